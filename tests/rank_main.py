"""One rank of a run, for the tests of several ranks: CACHE RUN_DIR STEPS [stop after an update]."""

import os
import signal
import sys

import torch
from tiny_cache import tiny_config

from shared.errors import DrafttapeError
from stage2_train import trainer
from stage2_train.build import train_run


def main(cache, run_dir, steps, stop="0"):
    torch.set_num_threads(1)
    original = trainer.update

    def update(job, state, batches, metrics):
        line = original(job, state, batches, metrics)
        if state.step == int(stop) and job.ranks.rank == job.ranks.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # only one rank hears it; all stop
        return line

    trainer.update = update
    cfg = tiny_config(
        cache, run_dir, steps=int(steps), batch__rows_per_step=3, batch__tokens_per_row=30
    )
    try:
        train_run(cfg)
    except DrafttapeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
