"""One rank of tiny runs, one after the other: a JSON list of (port, `Run`); prints exit codes."""

import json
import os
import shutil
import signal
import sys
from typing import NamedTuple

import torch
from tiny_cache import tiny_config

from shared.errors import DrafttapeError
from stage2_train import trainer
from stage2_train.build import train_run
from stage2_train.config import Parallel


class Run(NamedTuple):
    """A run; `stop`: SIGTERM after this update, 0: never; `copy`: keep what is left there."""

    cache: str
    run_dir: str
    parallel: str = "ddp"
    optimizer: str = "muon"
    stop: int = 0
    copy: str = ""


def execute(run: Run) -> int:
    """Trains; returns the exit code."""
    original = trainer.update

    def update(job, state, batches, metrics):
        line = original(job, state, batches, metrics)
        if state.step == run.stop and job.ranks.rank == job.ranks.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # only one rank hears it; all stop
        return line

    trainer.update = update
    cfg = tiny_config(
        run.cache, run.run_dir, steps=5, optimizer=run.optimizer, diagnostics__every=2,
        batch__rows_per_step=3, batch__tokens_per_row=30, trainer__shard_ranks=2,
        trainer__parallel=Parallel(run.parallel), trainer__keep=9,
    )  # fmt: skip
    try:
        train_run(cfg)
    except DrafttapeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        trainer.update = original
        if run.copy and os.environ.get("RANK", "0") == "0":
            shutil.copytree(run.run_dir, run.copy)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    codes = []
    for port, run in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)  # the store of the run before may still be there
        codes.append(execute(Run(*run)))
    sys.stdout.write(json.dumps(codes))
