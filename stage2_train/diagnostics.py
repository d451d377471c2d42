"""What an update did to the parameters, by group: norms, update size, effective decay; and spectra.

`Diagnostics` is asked around an optimizer's step. It keeps one copy of the parameters of the
measured updates only, so it costs memory and time only at every `every`-th update.

- update RMS: root mean square of the change of the parameters, decay included.
- update/weight: norm of the change over the norm of the parameters before it.
- decay time: 1 / (lr * decay), the updates in which a weight's history fades by e.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stage2_train.ownership import local
from stage2_train.param_rules import blocks
from stage2_train.sharding import sum_over_shards


class Diagnostics:
    """Measures every `every`-th update of an optimizer; 0 measures none.

    Args:
        optimizer: a `DrafterOptimizer`.
        every: updates between measurements.
        layers: also by parameter, not only by group.
    """

    def __init__(self, optimizer: Any, every: int, *, layers: bool = False) -> None:
        self.optimizer, self.every, self.layers = optimizer, every, layers
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def before(self, step: int) -> None:
        """Call before the optimizer's step; `step` counts updates from one."""
        if self.every and step % self.every == 0:
            named = self.optimizer.named_parameters
            self._before = {name: local(p.detach()).clone() for name, p in named.items()}

    @torch.no_grad()
    def after(self, report: Any) -> dict[str, float]:
        """Call after the step, with `clip_gradients`' report; flat figures for the metrics.

        Returns:
            keys "group/figure", and "layer/parameter/figure" when asked for; empty if the update
            was not measured.
        """
        if not self._before:
            return {}
        rows = [self._row(name, group, report) for name, group in self.optimizer.group_of().items()]
        self._before = {}
        self._total(rows)
        found: dict[str, float] = {}
        for group in self.optimizer.param_groups:
            mine = [row for row in rows if row["group"] == group["name"]]
            found |= {f"{group['name']}/{key}": v for key, v in _summary(mine, group).items()}
        if self.layers:
            for row in rows:
                group = next(g for g in self.optimizer.param_groups if g["name"] == row["group"])
                figures = _summary([row], group)
                found |= {f"layer/{row['name']}/{key}": value for key, value in figures.items()}
        return found

    def _row(self, name: str, group: Mapping[str, Any], report: Any) -> dict[str, Any]:
        parameter = local(self.optimizer.named_parameters[name])
        before = self._before[name]
        state = {key: local(value) for key, value in self.optimizer.state_of(name).items()}
        first = state.get("momentum", state.get("exp_avg", state.get("momentum_buffer")))
        return {
            "name": name,
            "group": group["name"],
            "count": self.optimizer.named_parameters[name].numel(),
            "update": float((parameter.float() - before.float()).double().square().sum()),
            "weight": float(before.double().square().sum()),
            "gradient": report.norms.get(name, 0.0) ** 2,
            "factor": report.factor,
            "first": 0.0 if first is None else float(first.double().square().sum()),
            "second": float(state["exp_avg_sq"].double().square().sum())
            if "exp_avg_sq" in state
            else None,
        }

    def _total(self, rows: list[dict[str, Any]]) -> None:
        """Sums of squares over the shards of a cut parameter; each element counts once."""
        owners = [self.optimizer.named_parameters[row["name"]] for row in rows]
        keys = ("update", "weight", "first", "second")
        table = torch.tensor(
            [[row[key] or 0.0 for key in keys] for row in rows], dtype=torch.float64
        )
        table = sum_over_shards(table.to(owners[0].device), owners).tolist()
        for row, totals in zip(rows, table, strict=True):
            row |= {k: t for k, t in zip(keys, totals, strict=True) if row[k] is not None}


def _summary(rows: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> dict[str, float]:
    total = {key: sum(row[key] for row in rows) for key in ("count", "update", "weight", "first")}
    gradient = sum(row["gradient"] for row in rows) ** 0.5
    rate = group["lr"] * group["weight_decay"]
    figures = {
        "grad_norm": gradient,
        "clipped_grad_norm": gradient * (rows[0]["factor"] if rows else 1.0),
        "update_rms": (total["update"] / max(1, total["count"])) ** 0.5,
        "update_over_weight": (total["update"] / total["weight"]) ** 0.5
        if total["weight"]
        else 0.0,
        "first_moment_norm": total["first"] ** 0.5,
        "lr": group["lr"],
        "effective_decay": rate,
    }
    if rate:
        figures["decay_steps"] = 1 / rate
    seconds = [row["second"] for row in rows if row["second"] is not None]
    return figures | ({"second_moment_norm": sum(seconds) ** 0.5} if seconds else {})


def entropy(singular_values: Tensor) -> float:
    """Normalised entropy of the energies sigma^2 / sum: 1 for equal ones, 0 for rank one.

    Divided by log of the number of singular values; zeros count in that number.
    """
    energy = singular_values.double().square()
    if len(energy) < 2 or not energy.sum():
        return 0.0
    share = energy / energy.sum()
    return float(torch.special.entr(share).sum() / torch.log(torch.tensor(float(len(energy)))))


@torch.no_grad()
def spectra(
    matrices: Mapping[str, Tensor], routing: Any, head_group: int = 1
) -> dict[str, list[list[float]]]:
    """Singular values of every Muon part, by role, each divided by its largest.

    Args:
        matrices: weights or updates by parameter name (never both in one call: an update's
            spectrum is not the trained weight's); names not in it are left out.
        routing: the run's `RoutingTable`.

    Returns:
        role -> one descending list per part.
    """
    found: dict[str, list[list[float]]] = {}
    for row in routing.owned("muon"):
        if row.name not in matrices:
            continue
        matrix = matrices[row.name].float()
        for block in blocks(row.parts, head_group):
            part = torch.cat([matrix[slice(*piece)] for piece in block.slices])
            values = torch.linalg.svdvals(part)
            found.setdefault(block.role, []).append((values / values[0].clamp_min(1e-30)).tolist())
    return found
