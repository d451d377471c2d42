"""The gradient noise scale: how large a batch is before its gradient is no longer mostly noise.

For gradients that are means over b independent elements, E|g_b|^2 = |G|^2 + tr(S) / b, with G the
true gradient and S the covariance of one element's. Two batch sizes tell the two apart: the rows
(or ranks' shares) of a step, and the step itself. tr(S) / |G|^2 is the simple noise scale: the
batch at which signal and noise are equal (https://arxiv.org/abs/1812.06162, appendix A.1).

The unit is a supervised loss element, as everywhere. What it assumes: elements are independent. A
row's are of few documents, so the scale in elements is an upper bound of what a shuffled batch of
single elements would give. One estimate is noisy (the signal may come out below zero): estimates
are averaged before they are divided. It says nothing of a best batch for good: it changes as the
model learns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """One estimate.

    Attributes:
        trace: of the covariance of one element's gradient.
        signal: squared norm of the true gradient, without the noise's share.
        batch: elements of the step.
    """

    trace: float
    signal: float
    batch: float


def estimate(rows: Sequence[tuple[float, float]], total: float) -> Estimate | None:
    """From the rows of a step.

    Args:
        rows: (elements, squared norm of the row's mean gradient), rows without elements left out.
        total: squared norm of the step's mean gradient.

    Returns:
        None with fewer than two rows: one size tells nothing apart.
    """
    usable = [(count, square) for count, square in rows if count > 0]
    if len(usable) < 2:
        return None
    batch = sum(count for count, _ in usable)
    small = sum(square for _, square in usable) / len(usable)
    inverse = sum(1 / count for count, _ in usable) / len(usable)
    trace = (small - total) / (inverse - 1 / batch)
    return Estimate(trace, total - trace / batch, batch)


def summary(estimates: Iterable[Estimate]) -> dict[str, float] | None:
    """Means of many estimates, their noise scale in elements, and the SNR of a step."""
    found = list(estimates)
    if not found:
        return None
    trace = sum(e.trace for e in found) / len(found)
    signal = sum(e.signal for e in found) / len(found)
    batch = sum(e.batch for e in found) / len(found)
    return {
        "trace": trace,
        "signal": signal,
        "noise_scale": trace / signal if signal > 0 else float("inf"),
        "snr": signal / (trace / batch) if trace > 0 else float("inf"),
        "batch": batch,
        "estimates": float(len(found)),
    }


def from_lines(lines: Iterable[dict[str, Any]]) -> list[tuple[int, Estimate]]:
    """(update, estimate) of every measured update of metrics.jsonl."""
    return [
        (line["step"], Estimate(*(line[f"noise/{key}"] for key in ("trace", "signal", "batch"))))
        for line in lines
        if "noise/trace" in line
    ]


class RowNorms:
    """Squared norms of each row's mean gradient while gradients accumulate in `.grad`.

    Args:
        parameters: those that accumulate; one copy of their gradients is held.
        weight: the step's denominator, by which every row's loss is divided.
    """

    def __init__(self, parameters: Iterable[Tensor], weight: float) -> None:
        self.parameters, self.weight = [p for p in parameters if p.requires_grad], weight
        self.rows: list[tuple[float, float]] = []
        self._before: list[Tensor | None] = [None] * len(self.parameters)

    @torch.no_grad()
    def add(self, elements: float, row_weight: float) -> None:
        """Call after a row's backward pass; `row_weight` is the weight of the row's elements."""
        square = 0.0
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            before = self._before[place]
            change = parameter.grad if before is None else parameter.grad - before
            square += float(change.double().square().sum())
            self._before[place] = parameter.grad.clone()
        if row_weight > 0:
            self.rows.append((elements, square * (self.weight / row_weight) ** 2))
