"""What a sweep says: maps, the near-optimal region, the robust pick, fits and labelled priors.

A *cell* is one point of the sweep (arm and settings without the seed), its value the mean over
seeds. The robust pick is the cell with the best mean of its own value and its worst neighbour's:
one lucky point between bad ones doesn't win, nor does the neighbour that it flatters.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import special

LR, BATCH = "optimizer.lr", "batch.rows_per_step"


@dataclass
class Cell:
    """One point of a sweep.

    Attributes:
        values: held-out losses, one a finished seed.
        failed: trials of this point that failed for good or diverged.
    """

    arm: str
    settings: dict[str, Any]
    values: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def mean(self) -> float:
        """Mean over seeds; infinite when one of its trials failed: such a setting isn't good."""
        if self.failed or not self.values:
            return math.inf
        return float(np.mean(self.values))

    @property
    def label(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.arm} {settings}".strip()


def cells_of(rows: list[dict[str, Any]], metric: str = "heldout_loss") -> list[Cell]:
    """Groups trials into cells, in the table's order."""
    cells: dict[tuple[Any, ...], Cell] = {}
    for row in rows:
        settings = {
            key.removeprefix("set."): value
            for key, value in row.items()
            if key.startswith("set.") and key != "set.seed" and value is not None
        }
        key = (row["arm"], *sorted((k, str(v)) for k, v in settings.items()))
        cell = cells.setdefault(key, Cell(row["arm"], settings))
        value = row.get(metric)
        if row["state"] == "done" and value is not None and math.isfinite(value):
            cell.values.append(float(value))
        elif row["state"] == "failed" or (row["state"] == "done" and value is not None):
            cell.failed += 1
    return list(cells.values())


def coordinates(cells: list[Cell]) -> tuple[list[str], np.ndarray]:
    """Numeric settings that vary, as ranks on each axis, int [cells, axes]; others split groups."""
    axes = []
    keys = list(dict.fromkeys(key for cell in cells for key in cell.settings))
    for key in keys:
        values = [cell.settings.get(key) for cell in cells]
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if numeric and len(set(values)) > 1:
            axes.append(key)
    ranks = np.zeros((len(cells), len(axes)), dtype=int)
    for column, key in enumerate(axes):
        values = sorted({cell.settings[key] for cell in cells})
        ranks[:, column] = [values.index(cell.settings[key]) for cell in cells]
    return axes, ranks


def groups_of(cells: list[Cell]) -> list[list[int]]:
    """Indices of cells that differ in numeric settings alone."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, cell in enumerate(cells):
        rest = tuple(
            sorted(
                (key, str(value))
                for key, value in cell.settings.items()
                if not isinstance(value, int | float) or isinstance(value, bool)
            )
        )
        groups.setdefault((cell.arm, rest), []).append(index)
    return list(groups.values())


def robust_pick(cells: list[Cell]) -> tuple[int, float] | None:
    """(index, worst value among it and its neighbours) of the cell that is good and has no cliff.

    Neighbours differ by one rank on one numeric axis inside a group; a random sweep's points have
    no grid, so their neighbours are the next ones on each axis. Beyond an edge the loss is taken to
    rise as much as it differs on the other side: unknown values would make every edge look safe.
    """
    best: tuple[int, float] | None = None
    best_score = math.inf
    for group in groups_of(cells):
        members = [cells[index] for index in group]
        axes, ranks = coordinates(members)
        for place, index in enumerate(group):
            mean = cells[index].mean
            near = [mean]
            for axis in range(len(axes)):
                found = [members[n].mean for n in _neighbours(ranks, place, axis)]
                near += found if len(found) != 1 else [*found, mean + abs(mean - found[0])]
            worst = max(near)
            score = (mean + worst) / 2
            if score < best_score:
                best, best_score = (index, worst), score
    return best


def _neighbours(ranks: np.ndarray, place: int, axis: int) -> list[int]:
    others = np.delete(np.arange(ranks.shape[1]), axis)
    same = np.flatnonzero((ranks[:, others] == ranks[place, others]).all(1))
    if len(same) < 2:  # no grid: the next points on this axis
        same = np.arange(len(ranks))
    found = []
    for side in (-1, 1):
        beyond = [n for n in same if side * (ranks[n, axis] - ranks[place, axis]) > 0]
        if beyond:
            found.append(min(beyond, key=lambda n: side * ranks[n, axis]))
    return found


def near_optimal(cells: list[Cell], tolerance: float) -> list[int]:
    """Cells whose mean is within the tolerance (a share) of the best."""
    means = [cell.mean for cell in cells]
    best = min(means, default=math.inf)
    if not math.isfinite(best):
        return []
    return [index for index, mean in enumerate(means) if mean <= best + tolerance * abs(best)]


@dataclass(frozen=True)
class LrFit:
    """A parabola of the loss over log(lr) in one group at one batch.

    Attributes:
        best: the vertex, a learning rate; NaN when the parabola opens downwards.
        low, high: interval of the vertex (delta method on the residuals).
        residual: standard deviation of the residuals, in loss.
        inside: whether the vertex lies inside the range tried.
    """

    label: str
    best: float
    low: float
    high: float
    residual: float
    inside: bool
    points: int


def fit_lr(label: str, lr: list[float], loss: list[float], level: float = 0.95) -> LrFit | None:
    """Fits it; None with fewer than four points."""
    x, y = np.log(np.asarray(lr, dtype=float)), np.asarray(loss, dtype=float)
    kept = np.isfinite(y)
    x, y = x[kept], y[kept]
    if len(set(x.tolist())) < 4:
        return None
    center = x.mean()
    design = np.stack([np.ones_like(x), x - center, (x - center) ** 2], 1)
    weights, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest = y - design @ weights
    df = len(x) - 3
    residual = float(np.sqrt((rest**2).sum() / df)) if df else 0.0
    nan = float("nan")
    if weights[2] <= 0:
        return LrFit(label, nan, nan, nan, residual, False, len(x))
    vertex = -weights[1] / (2 * weights[2])
    slope = np.array([0.0, -1 / (2 * weights[2]), weights[1] / (2 * weights[2] ** 2)])
    spread = float(
        np.sqrt(max(0.0, residual**2 * slope @ np.linalg.inv(design.T @ design) @ slope))
    )
    half = float(special.stdtrit(df, 0.5 + level / 2)) * spread if df else nan
    best = float(np.exp(vertex + center))
    inside = bool(x.min() <= vertex + center <= x.max())
    ends = [float(np.exp(np.clip(vertex + center + s * half, -700, 700))) for s in (-1, 1)]
    return LrFit(label, best, *ends, residual, inside, len(x))


@dataclass(frozen=True)
class PowerLaw:
    """y = factor * C^exponent, fitted in logarithms over budgets.

    Attributes:
        residual: standard deviation of log y about the line.
        low, high: prediction interval at `at`.
        residuals: (C, y, log y about the line) of each point.
    """

    factor: float
    exponent: float
    residual: float
    at: float
    predicted: float
    low: float
    high: float
    points: int
    residuals: tuple[tuple[float, float, float], ...] = ()


def fit_power_law(
    budget: list[float], best: list[float], at: float, level: float = 0.95
) -> PowerLaw | None:
    """Least squares over at least three budgets; predicts at another one, with its interval."""
    x, y = np.log(np.asarray(budget, float)), np.log(np.asarray(best, float))
    if len(set(x.tolist())) < 3:
        return None
    design = np.stack([np.ones_like(x), x], 1)
    weights, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest = y - design @ weights
    df = len(x) - 2
    residual = float(np.sqrt((rest**2).sum() / df))
    row = np.array([1.0, math.log(at)])
    spread = residual * math.sqrt(1 + row @ np.linalg.inv(design.T @ design) @ row)
    half = float(special.stdtrit(df, 0.5 + level / 2)) * spread
    predicted = float(row @ weights)
    return PowerLaw(
        math.exp(weights[0]), float(weights[1]), residual, at,
        math.exp(predicted), math.exp(predicted - half), math.exp(predicted + half), len(x),
        tuple(zip(budget, best, rest.tolist(), strict=True)),
    )  # fmt: skip


def prior_lr(flops: float) -> float:
    """0.3118 C^-0.1250: a published fit for dense pretraining with AdamW, C = 6ND in FLOPs.

    A prior, not a law: another objective, another optimizer and other data move it.
    """
    return 0.3118 * flops**-0.1250


def prior_batch(flops: float) -> float:
    """0.2920 C^0.3271, a batch in tokens, from the same fit and with the same caution."""
    return 0.2920 * flops**0.3271


def lr_rules(lr: float, batch: float, other: float) -> dict[str, float]:
    """The learning rate at another batch by the two common rules, both candidates only.

    `linear` keeps the mean displacement per example and its covariance under SGD with frozen
    gradients; `square root` keeps the covariance of one step. Neither holds for Adam or Muon.
    """
    ratio = other / batch
    return {"linear": lr * ratio, "square root": lr * math.sqrt(ratio)}


def surge(gradient: float, sigma: float, batch: np.ndarray) -> np.ndarray:
    """Mean of the sign of a noisy mean gradient: erf(g sqrt(B) / (sqrt(2) sigma)).

    The simplified sign model of an adaptive update: it rises with the batch and flattens.
    """
    return special.erf(gradient * np.sqrt(np.asarray(batch, float)) / (math.sqrt(2) * sigma))
