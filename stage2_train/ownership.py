"""Muon over ranks: each chunk of parts is orthogonalised by one owner, not by every rank.

Under data parallelism every rank holds all parameters, the same summed gradients and the same
momentum, so nothing has to be sent in. Owners are a pure function of the chunks: largest first, to
the rank with the least work so far, by the FLOP formula. Ranks compute one chunk each per round and
then receive the round's results, one broadcast a chunk in the compute dtype; every rank applies
the owner's bits, so replicas can't drift apart. Nothing about owners is saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def flops(rows: int, cols: int, count: int, steps: int) -> float:
    """FLOPs of `steps` standard iterations of `count` matrices."""
    n, m = sorted((rows, cols))
    return count * steps * (4.0 * n * n * m + 2.0 * n**3)


def assign(costs: Sequence[float], world: int) -> list[int]:
    """The owner of each item: greedy balance, largest first; ties by index, then lowest rank."""
    load, owners = [0.0] * world, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(world), key=lambda r: (load[r], r))
        owners[item] = rank
        load[rank] += costs[item]
    return owners


def rounds(owners: Sequence[int], world: int) -> list[list[tuple[int, int]]]:
    """(owner, item) pairs of each round: every rank's first item, then every rank's second, …"""
    items = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(world)]
    longest = max(map(len, items), default=0)
    return [
        [(rank, mine[k]) for rank, mine in enumerate(items) if k < len(mine)]
        for k in range(longest)
    ]


def receive(result_BNM: Tensor, owner: int) -> None:
    """Makes every rank's tensor the owner's, in place; contiguous."""
    torch.distributed.broadcast(result_BNM, src=owner)


def here() -> tuple[int, int]:
    """(rank, world) of this process; (0, 1) when no process group was started."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
