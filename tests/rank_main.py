"""One rank of a tiny run: CACHE RUN_DIR STEPS STOP PARALLEL OPTIMIZER (STOP 0: never)."""

import os
import signal
import sys

import torch
from tiny_cache import tiny_config

from shared.errors import DrafttapeError
from stage2_train import trainer
from stage2_train.build import train_run
from stage2_train.config import Parallel


def main(cache, run_dir, steps, stop, parallel, optimizer):
    torch.set_num_threads(1)
    original = trainer.update

    def update(job, state, batches, metrics):
        line = original(job, state, batches, metrics)
        if state.step == int(stop) and job.ranks.rank == job.ranks.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # only one rank hears it; all stop
        return line

    trainer.update = update
    cfg = tiny_config(
        cache, run_dir, steps=int(steps), optimizer=optimizer, batch__rows_per_step=3,
        batch__tokens_per_row=30, trainer__parallel=Parallel(parallel), trainer__shard_ranks=2,
        diagnostics__every=2,
    )  # fmt: skip
    try:
        train_run(cfg)
    except DrafttapeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
