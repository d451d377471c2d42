"""One rank of tiny runs, one after the other: a JSON list of (port, `Run`); prints exit codes."""

import json
import os
import shutil
import signal
import sys
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tiny_cache import tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shared.errors import DrafttapeError
from stage2_train import trainer
from stage2_train.build import train_run
from stage2_train.config import OptimizerConfig, OptimizerName, Parallel
from stage2_train.optimizers import build_optimizer
from stage2_train.param_rules import by_head, stacked, whole
from stage2_train.ranks import Ranks


class Run(NamedTuple):
    """A run; `stop`: SIGTERM after this update, 0: never; `copy`: keep what is left there; `keys`:
    more of its configuration, as pairs."""

    cache: str
    run_dir: str
    parallel: str = "ddp"
    optimizer: str = "muon"
    stop: int = 0
    copy: str = ""
    keys: tuple = ()


SHAPES = {"uneven": (67, 32), "heads": (64, 40), "pair": (96, 32), "row": (1, 32), "norm": (32,)}


def update_three_times(run: Run) -> int:
    """Three updates of odd shapes by given gradients, cut over all ranks; saves the parameters."""
    ranks = Ranks(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def place(tensor):
        if ranks.world == 1 or tensor.ndim == 1:
            return tensor
        return distribute_tensor(tensor, init_device_mesh("cpu", (ranks.world,)), [Shard(0)])

    named = {
        name: torch.nn.Parameter(place(torch.randn(shape, generator=generator)))
        for name, shape in SHAPES.items()
    }
    parts = {
        "uneven": whole("w"),
        "heads": by_head("q", 4, 16),
        "pair": stacked([("gate", 48, 1), ("up", 48, 1)]),
    }
    config = OptimizerConfig(OptimizerName.muon, lr=0.02, weight_decay=0.1)
    optimizer = build_optimizer(config, named.items(), parts)
    for _ in range(3):
        for name, shape in SHAPES.items():
            named[name].grad = place(torch.randn(shape, generator=generator))
        optimizer.step()
    found = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in named.items()}
    if ranks.is_main:
        save_file({name: p.detach().clone() for name, p in found.items()}, run.run_dir)
    ranks.close()
    return 0


def execute(run: Run) -> int:
    """Trains; returns the exit code."""
    if run.parallel == "update":
        return update_three_times(run)
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
        trainer__parallel=Parallel(run.parallel), trainer__keep=9, **dict(run.keys),
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
