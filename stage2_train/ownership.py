"""Muon over ranks: each chunk of parts is orthogonalised by one owner, not by every rank.

The ranks stand in a grid: `replicas` copies of the parameters, each cut by rows over `shards` ranks
(data parallelism: one shard a copy; FSDP2: one copy; HSDP: both). Owners are a pure function of the
chunks: largest first, to the rank with the least work so far, by the FLOP formula. A chunk whose
rows all lie on one shard is owned there, so that heads that fall between shard edges need no
exchange. Ranks compute one chunk each a round:

    in    every rank sends its rows of each owner's chunk: one all-to-all of a copy's shards
    out   every owner sends each shard's rows of the result back: one all-to-all
    copy  the rows go to the same shard of the other copies: one broadcast a copy

All ranks apply the owner's bits, so copies can't drift apart. Nothing about owners is saved.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """This process among `replicas` x `shards` ranks."""

    shard: int = 0
    shards: int = 1
    replica: int = 0
    replicas: int = 1
    shard_group: Any = None
    replica_group: Any = None

    @classmethod
    def of(cls, parameter: Tensor) -> "Grid":
        """Where a parameter stands: a DTensor's mesh, else all ranks hold a copy."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            return cls(replica=rank, replicas=world, replica_group=torch.distributed.group.WORLD)
        shard, group = mesh.get_local_rank(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
        if mesh.ndim == 1:
            return cls(shard, mesh.size(), shard_group=group)
        return cls(
            shard, mesh.size(1), mesh.get_local_rank(0), mesh.size(0), group, mesh.get_group(0)
        )

    @property
    def world(self) -> int:
        return self.shards * self.replicas

    @property
    def rank(self) -> int:
        """Number in the grid: shards of a copy follow each other."""
        return self.replica * self.shards + self.shard

    def exchange(self, sent: Tensor, to: Sequence[int], come: Sequence[int]) -> Tensor:
        """Sends `to[s]` elements of a flat tensor to shard s; returns `come[s]` from each."""
        received = sent.new_empty(sum(come))
        torch.distributed.all_to_all_single(
            received, sent, list(come), list(to), group=self.shard_group
        )
        return received

    def copy(self, flat: Tensor, replica: int) -> None:
        """Makes the tensor of every copy's same shard that of `replica`, in place; contiguous."""
        torch.distributed.broadcast(flat, group=self.replica_group, group_src=replica)

    def total(self, values: Tensor) -> Tensor:
        """Sums over the shards of a copy, in place."""
        if self.shards > 1:
            torch.distributed.all_reduce(values, group=self.shard_group)
        return values


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds: of a DTensor its shard, else the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


def edges(rows: int, shards: int) -> list[tuple[int, int]]:
    """First row and the one behind the last of every shard as FSDP2 cuts; the last may be empty."""
    size = math.ceil(rows / shards)
    return [(min(s * size, rows), min((s + 1) * size, rows)) for s in range(shards)]


def flops(rows: int, cols: int, count: int, steps: int) -> float:
    """FLOPs of `steps` standard iterations of `count` matrices."""
    n, m = sorted((rows, cols))
    return count * steps * (4.0 * n * n * m + 2.0 * n**3)


def assign(
    costs: Sequence[float], world: int, allowed: Sequence[Sequence[int] | None] | None = None
) -> list[int]:
    """The owner of each item: greedy balance, largest first; ties by index, then lowest rank.

    Args:
        costs: of each item.
        world: ranks.
        allowed: the ranks that may own an item; None: all. Items that are bound come first, so
            that free ones level the load.
    """
    load, owners = [0.0] * world, [0] * len(costs)
    ranks = [None] * len(costs) if allowed is None else allowed
    for item in sorted(range(len(costs)), key=lambda i: (ranks[i] is None, -costs[i], i)):
        choice = ranks[item]
        rank = min(range(world) if choice is None else choice, key=lambda r: (load[r], r))
        owners[item] = rank
        load[rank] += costs[item]
    return owners


def rounds(
    owners: Sequence[int], world: int, items: Sequence[int] | None = None
) -> list[dict[int, int]]:
    """{owner: item} of each round: every rank's first item, then every rank's second, …"""
    queues: list[list[int]] = [[] for _ in range(world)]
    for item in range(len(owners)) if items is None else items:
        queues[owners[item]].append(item)
    return [
        {rank: queue[k] for rank, queue in enumerate(queues) if k < len(queue)}
        for k in range(max(map(len, queues), default=0))
    ]
