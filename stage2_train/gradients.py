"""Gradients between backward and optimizer: finite check, global norm, clipping, in this order.

accumulate -> unscale -> finite check -> global norm -> clip -> optimizer -> schedule
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stage2_train.ownership import local
from stage2_train.sharding import is_cut, sum_over_shards


@dataclass(frozen=True)
class GradientReport:
    """What `clip_gradients` found and did.

    Attributes:
        norm: global L2 norm before clipping.
        factor: what all gradients were multiplied by; 1.0 when nothing was clipped.
        norms: L2 norm before clipping by parameter name.
        nonfinite: names of parameters whose gradient has a NaN or an Inf; nothing was clipped then.
    """

    norm: float
    factor: float
    norms: dict[str, float]
    nonfinite: tuple[str, ...] = ()

    @property
    def clipped(self) -> bool:
        return self.factor != 1.0


@torch.no_grad()
def clip_gradients(
    named_parameters: Iterable[tuple[str, Tensor]], how: str = "global_norm", threshold: float = 1.0
) -> GradientReport:
    """Checks, measures and clips the accumulated gradients in place.

    Args:
        named_parameters: tied tensors and parameters without gradient are counted once and not.
        how: global_norm (direction kept), value (each entry clamped to +-threshold), none.
        threshold: the largest norm, or the largest entry.

    With `how="value"` the report's factor is the global norm after clipping over that before.
    """
    owners = {id(p): (n, p) for n, p in named_parameters if p.grad is not None}
    names = [name for name, _ in owners.values()]
    whole = [parameter.grad for _, parameter in owners.values()]
    gradients = [local(gradient) for gradient in whole]
    if not gradients:
        return GradientReport(0.0, 1.0, {})
    norms = _norms(gradients, whole)
    report = dict(zip(names, norms.tolist(), strict=True))
    total = float(torch.linalg.vector_norm(norms))
    nonfinite = tuple(
        name
        for name, gradient, norm in zip(names, whole, norms, strict=True)
        if not norm.isfinite() and (is_cut(gradient) or not gradient.isfinite().all())
    )
    if nonfinite:
        return GradientReport(total, 1.0, report, nonfinite)
    if how == "global_norm" and total > threshold:
        factor = threshold / total
        torch._foreach_mul_(gradients, factor)
        return GradientReport(total, factor, report)
    if how == "value":
        torch._foreach_clamp_max_(gradients, threshold)
        torch._foreach_clamp_min_(gradients, -threshold)
        after = float(torch.linalg.vector_norm(_norms(gradients, whole)))
        return GradientReport(total, after / total if total else 1.0, report)
    return GradientReport(total, 1.0, report)


def _norms(gradients: list[Tensor], whole: list[Tensor]) -> Tensor:
    """L2 norms in float64 of the whole gradients, each element counted once over shards.

    float32 squares overflow from 1e19 on.
    """
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
    for i in (~norms.isfinite()).nonzero().flatten().tolist():
        norms[i] = torch.linalg.vector_norm(gradients[i], dtype=torch.float64)
    return sum_over_shards(norms.square_(), whole).sqrt_() if any(map(is_cut, whole)) else norms
