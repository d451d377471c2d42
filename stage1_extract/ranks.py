"""Ranks under torchrun or SLURM: every rank runs the same command and takes the next free shard.

A shard is claimed by a lock file beside the cache, so slow ranks take fewer. Rank 0 plans, writes
the rejects and the snapshot; ranks meet over gloo at the start and at the end. A rank that fails
ends the launcher non-zero; committed shards stay.
"""

import contextlib
import datetime
import os
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError, Interrupted
from shared.store import Store
from shared.target import Target
from stage1_extract.executors import Work, in_turn
from stage1_extract.worker import ShardResult, Worker


@dataclass(frozen=True)
class Ranks:
    """This process's place among all, from the launcher's environment."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def from_environment(cls, environment: Any = os.environ) -> "Ranks | None":
        """torchrun's RANK and WORLD_SIZE, else SLURM's; None outside of both.

        Raises:
            ConfigError: SLURM without the address of rank 0.
        """
        if "RANK" in environment and "WORLD_SIZE" in environment:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            return cls(rank, size, int(environment.get("LOCAL_RANK", rank)))
        if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", 1)) > 1:
            if "MASTER_ADDR" not in environment:
                raise ConfigError(
                    "several SLURM tasks, but MASTER_ADDR and MASTER_PORT are not set",
                    do="Export them in the batch script, or use torchrun",
                )
            rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
            return cls(rank, size, int(environment.get("SLURM_LOCALID", 0)))
        return None

    def device(self, device: str) -> str:
        """`cuda` becomes this rank's own GPU."""
        return f"cuda:{self.local_rank}" if device == "cuda" else device

    def start(self, *, nccl: bool = False) -> None:
        """Joins the others; a rank may wait for days for a slower one.

        Args:
            nccl: ranks also exchange tensors of their GPUs (tensor parallelism).
        """
        import torch.distributed as dist

        # Under SLURM transformers finds the place of a split target's rank here too.
        place = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        os.environ.update({key: str(value) for key, value in place.items()})
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(days=7),
        )

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """For an exit stack. After a failure nothing is closed: that would wait for ranks that wait
        for this one, and the launcher could not end them."""
        import torch.distributed as dist

        if kind is None or issubclass(kind, Interrupted):
            dist.destroy_process_group()


def run_rank(store: Store, target: Target, work: Work, ranks: Ranks) -> list[ShardResult]:
    """Runs shards that no other rank has claimed; returns every rank's results, in any order.

    Raises:
        ConfigError: the cache is behind a URL.
    """
    if store.files.remote:
        raise ConfigError(
            "ranks claim shards by lock files, which a URL doesn't have",
            where="cache.root",
            do="Extract onto a shared directory, then copy the cache",
        )
    worker = Worker(store, target, work.codec, work.container)
    name, results = f"rank {ranks.rank}", []
    # Each rank starts elsewhere, so that they seldom ask for the same shard.
    first = ranks.rank * len(work.shards) // ranks.size
    order = [*work.shards[first:], *work.shards[:first]]
    with contextlib.closing(in_turn(store, work, order, name, tell=False)) as shards:
        for shard in shards:
            index = store.committed()
            if any(sample in index for sample in shard.ids):
                continue  # another rank's
            result = worker.run(shard, work.tokens, lambda count: work.advance(name, count))
            results.append(result)
            work.finished(name, result)
    results = [result for part in ranks.gather(results) for result in part]
    return results + _of_others(store, work, results)


def _of_others(store: Store, work: Work, results: list[ShardResult]) -> list[ShardResult]:
    """Shards that another run has committed meanwhile."""
    ours, index = {result.shard.ids for result in results}, store.committed()
    return [
        ShardResult(shard, index[shard.ids[0]][0], 0.0, ran=False)
        for shard in work.shards
        if shard.ids not in ours and all(name in index for name in shard.ids)
    ]
