"""The start-up check of a fast path: results and gradients against its naive twin in float64.

Letters: T context tokens, N anchors.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stage2_train.geometry import Geometry

CHUNK = 32  # of the check's geometry


def row_of(lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """document_T, position_T and anchor_N (every fifth token) of a row of documents."""
    sizes = torch.tensor(lengths)
    total = int(sizes.sum())
    document_T = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    position_T = torch.arange(total) - (sizes.cumsum(0) - sizes)[document_T]
    return document_T, position_T, torch.arange(0, total, 5)


def worst_difference(
    row: tuple[Tensor, Tensor, Tensor],
    block: int,
    inputs: Sequence[Tensor],
    weight: Tensor,
    twin: Callable[[list[Tensor], Geometry], Tensor],
    fast: Callable[[list[Tensor], Geometry], Tensor],
    device: torch.device,
    *,
    gradients: bool = True,
) -> float:
    """The largest relative difference of a result or gradient.

    Args:
        row: see `row_of`.
        inputs: float64, on the CPU.
        weight: what the result is summed with before the gradients are taken.
        twin: computed on the CPU in float64.
        fast: computed on the device in float32.
    """
    results = []
    for function, place, dtype in (
        (twin, torch.device("cpu"), torch.float64),
        (fast, device, torch.float32),
    ):
        leaves = [t.to(place, dtype).requires_grad_(gradients) for t in inputs]
        geometry = Geometry.of(*(t.to(place) for t in row), block=block, chunk=CHUNK)
        y = function(leaves, geometry)
        found = [y]
        if gradients:
            found += torch.autograd.grad((y * weight.to(y)).sum(), leaves)
        results.append([t.detach().cpu().double() for t in found])
    return max(((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True))
