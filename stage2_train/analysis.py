"""The numbers of a comparison: differences of each arm from the baseline, with intervals.

Three intervals stand beside each other and mean different things (see `stats.py`):
`within` resamples steps, held-out samples or prompts on these seeds; `across` is over seeds and
alone may decide; `unpaired` is what the comparison would be if the inputs were not the same.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stage2_train import stats
from stage2_train.runs import Arm, Run
from stage2_train.stats import Interval, none_if_nan

Seed = tuple[int, int]


@dataclass(frozen=True)
class Metric:
    """A number of a run that arms are compared by.

    Attributes:
        better: +1 when larger is better, -1 when smaller is.
        items: eval.json's rows (list, key, upper sum, lower sum) that share inputs over arms.
    """

    key: str
    label: str
    better: int
    digits: int = 4
    items: tuple[str, str, str, str] | None = None


METRICS = (
    Metric("heldout_loss", "held-out loss", -1, 4, ("samples", "sample_id", "loss_sum", "weight")),
    Metric("real_acceptance", "real acceptance", 1, 3, ("prompts", "id", "committed", "passes")),
    Metric("estimated_acceptance", "estimated acceptance", 1, 3),
    Metric("accuracy", "accuracy", 1, 4, ("samples", "sample_id", "correct", "count")),
    Metric("final_loss", "training loss, last quarter", -1, 4),
    Metric("train_loss", "training loss, all steps", -1, 4),
)
BY_KEY = {metric.key: metric for metric in METRICS}
AXES = {"tokens": "tokens", "flops": "model FLOPs", "seconds": "seconds"}


def value(run: Run, key: str) -> float:
    """One metric of one run; NaN where it was not measured."""
    loss = run.series["loss"]
    if key == "train_loss":
        return float(np.nanmean(loss))
    if key == "final_loss":
        return float(np.nanmean(loss[_final(len(loss))]))
    found = run.value(key)
    if key == "heldout_loss" and not np.isfinite(found) and run.heldout:
        return run.heldout[-1][1]
    return found


def _final(steps: int) -> slice:
    return slice(steps - max(1, steps // 4), steps)


def compare_pair(baseline: Arm, arm: Arm, seeds: list[Seed], level: float) -> dict[str, Any]:
    """Every metric's difference arm - baseline."""
    rows: dict[str, Any] = {}
    for metric in METRICS:
        a = [value(baseline.runs[seed], metric.key) for seed in seeds]
        b = [value(arm.runs[seed], metric.key) for seed in seeds]
        if not np.isfinite(a + b).all():
            continue
        rows[metric.key] = {
            "label": metric.label,
            "better": metric.better,
            "baseline": float(np.mean(a)),
            "arm": float(np.mean(b)),
            "by_seed": [[list(seed), x, y] for seed, x, y in zip(seeds, a, b, strict=True)],
            "within": _within(metric, baseline, arm, seeds, level),
            "across": stats.paired_t(np.subtract(b, a), level),
            "unpaired": _unpaired(metric, baseline, arm, seeds, level),
        }
    return rows


def _within(metric: Metric, baseline: Arm, arm: Arm, seeds: list[Seed], level: float) -> Interval:
    """Interval on common steps, samples or prompts, seeds averaged or pooled."""
    if metric.key in ("train_loss", "final_loss"):
        difference = difference_series(baseline, arm, seeds)
        if metric.key == "final_loss":
            difference = difference[_final(len(difference))]
        return stats.mean_interval(difference, level)
    if metric.items is not None:
        parts = [_item_sums(metric, baseline, arm, seed) for seed in seeds]
        if all(part is not None for part in parts):
            # The same items in every seed: pooled by item, so that an item is resampled whole.
            names = set.intersection(*(set(part) for part in parts))
            table = np.array(
                [np.sum([part[name] for part in parts], axis=0) for name in sorted(names)]
            ).reshape(-1, 4)
            return stats.ratio_difference(*table.T, level=level)
    nan = float("nan")
    mean = float(
        np.mean([value(arm.runs[s], metric.key) - value(baseline.runs[s], metric.key)
                 for s in seeds])
    )  # fmt: skip
    return Interval(mean, nan, nan, level, "not resampled", 0)


def _item_sums(
    metric: Metric, baseline: Arm, arm: Arm, seed: Seed
) -> dict[str, tuple[float, float, float, float]] | None:
    """item -> (upper a, lower a, upper b, lower b) of one seed's two evaluations."""
    table, key, upper, lower = metric.items
    sides = []
    for side in (baseline, arm):
        rows = (side.runs[seed].evaluation or {}).get(table) or []
        try:
            sides.append({str(row[key]): (float(row[upper]), float(row[lower])) for row in rows})
        except (KeyError, TypeError, ValueError):
            return None
    names = set(sides[0]) & set(sides[1])
    if not names:
        return None
    return {name: (*sides[0][name], *sides[1][name]) for name in names}


def _unpaired(metric: Metric, baseline: Arm, arm: Arm, seeds: list[Seed], level: float) -> Interval:
    if metric.key not in ("train_loss", "final_loss"):
        return stats.welch(
            [value(baseline.runs[seed], metric.key) for seed in seeds],
            [value(arm.runs[seed], metric.key) for seed in seeds],
            level,
        )
    if metric.key == "train_loss":
        # The curve's fall would count as noise: an interval that flatters pairing. Left out.
        nan = float("nan")
        return Interval(nan, nan, nan, level, "not defined on a falling curve", 0)
    sides = []
    for side in (baseline, arm):
        losses = np.mean([side.runs[seed].series["loss"] for seed in seeds], axis=0)
        sides.append(stats.mean_interval(losses[_final(len(losses))], level))
    mean = sides[1].mean - sides[0].mean
    half = float(np.hypot(sides[0].width, sides[1].width)) / 2
    return Interval(mean, mean - half, mean + half, level, "block bootstrap of each arm", 0)


def difference_series(baseline: Arm, arm: Arm, seeds: list[Seed]) -> np.ndarray:
    """Loss of arm - baseline at every step, averaged over seeds, float64 [steps]."""
    return np.mean(
        [arm.runs[s].series["loss"] - baseline.runs[s].series["loss"] for s in seeds], axis=0
    )


def pool_and_correct(
    pairs: dict[str, dict[str, Any]],
    arms: list[Arm],
    seeds: list[Seed],
    *,
    from_baseline: bool = False,
) -> None:
    """Adds, per metric: the interval with pooled or known seed noise, and Holm's p-values.

    Args:
        from_baseline: the noise is that of all runs of the baseline, also of seeds of its own.
    """
    for key in BY_KEY:
        rows = [(name, rows[key]) for name, rows in pairs.items() if key in rows]
        if not rows or (len(seeds) < 2 and not from_baseline):
            continue
        pooled = None
        if from_baseline:
            pooled = stats.known_noise([value(run, key) for run in arms[0].runs.values()])
        elif len(arms) > 2 and len(rows) == len(arms) - 1:
            table = [[value(arm.runs[seed], key) for seed in seeds] for arm in arms]
            pooled = stats.pooled_noise(np.array(table))
        if pooled is not None:
            for _, row in rows:
                differences = [y - x for _, x, y in row["by_seed"]]
                row["across"] = stats.paired_t(differences, row["across"].level, pooled=pooled)
                row["noise"] = pooled[0]
        adjusted = stats.holm([row["across"].p for _, row in rows])
        for (_, row), p in zip(rows, adjusted, strict=True):
            row["p_holm"] = p


def matched(baseline: Arm, arm: Arm, seeds: list[Seed], level: float) -> dict[str, Any]:
    """Training loss of both arms at the largest budget that both reached, per axis.

    At equal tokens the same steps are compared, paired. At equal FLOPs or seconds the faster arm
    has seen more steps, so the windows hold different inputs and the interval is unpaired.
    """
    rows: dict[str, Any] = {}
    for axis, label in AXES.items():
        per_seed, halves, steps, budgets = [], [], [], []
        for seed in seeds:
            a, b = baseline.runs[seed].series, arm.runs[seed].series
            if not (np.isfinite(a[axis]).all() and np.isfinite(b[axis]).all()):
                break
            budget = float(min(a[axis][-1], b[axis][-1]))
            ends = [int(np.searchsorted(s[axis], budget, side="right")) for s in (a, b)]
            ends = [max(1, end) for end in ends]
            window = max(4, min(ends) // 10)
            cuts = [slice(max(0, end - window), end) for end in ends]
            losses = [s["loss"][part] for s, part in zip((a, b), cuts, strict=True)]
            if ends[0] == ends[1]:
                interval = stats.mean_interval(losses[1] - losses[0], level)
                half = interval.width / 2
            else:
                sides = [stats.mean_interval(part, level) for part in losses]
                half = float(np.hypot(sides[0].width, sides[1].width)) / 2
            per_seed.append([float(np.mean(part)) for part in losses])
            halves.append(half)
            steps.append(ends)
            budgets.append(budget)
        else:
            mean_a, mean_b = np.mean(per_seed, axis=0).tolist()
            half = float(np.sqrt(np.sum(np.square(halves)))) / len(seeds)
            difference = mean_b - mean_a
            across = stats.paired_t([y - x for x, y in per_seed], level)
            rows[axis] = {
                "label": label,
                "budget": float(np.mean(budgets)),
                "steps": np.mean(steps, axis=0).round().astype(int).tolist(),
                "baseline": mean_a,
                "arm": mean_b,
                "paired": all(x == y for x, y in steps),
                "within": Interval(difference, difference - half, difference + half, level,
                                   "block bootstrap", len(seeds)),
                "across": across,
            }  # fmt: skip
    return rows


def stability(run: Run) -> dict[str, Any]:
    """Spikes, skipped steps and clipping of a run.

    A spike is a loss above the median of the 50 losses before it by more than 8 times their
    median absolute deviation.
    """
    loss = run.series["loss"]
    spikes = 0
    for step in range(10, len(loss)):
        before = loss[max(0, step - 50) : step]
        median = np.nanmedian(before)
        spread = np.nanmedian(np.abs(before - median))
        spikes += int(loss[step] - median > 8 * spread + 1e-12)
    clipped = run.series["clipped"]
    return {
        "spikes": spikes,
        "skipped": int(np.nansum(run.series["skipped"])),
        "clipped_share": none_if_nan(float(np.nanmean(clipped)))
        if np.isfinite(clipped).any()
        else None,
    }


def arm_numbers(arm: Arm, seeds: list[Seed]) -> dict[str, Any]:
    """What the tables and `summary.json` say of one arm: means over seeds."""
    runs = [arm.runs[seed] for seed in seeds]
    numbers: dict[str, Any] = {
        "runs": [str(run.path) for run in runs],
        "seeds": [list(seed) for seed in seeds],
        "steps": runs[0].num_steps,
    }
    for metric in METRICS:
        numbers[metric.key] = _mean([value(run, metric.key) for run in runs])
    for key in ("tokens_per_s", "plain_tokens_per_s", "speedup"):
        numbers[key] = _mean([run.value(key) for run in runs])
    for axis in (*AXES, "data_wait"):
        numbers[axis] = _mean([float(run.series[axis][-1]) for run in runs])
    slots = [(run.evaluation or {}).get("slot_accuracy") for run in runs]
    numbers["slot_accuracy"] = (
        np.mean([np.array(s, dtype=np.float64) for s in slots], axis=0).tolist()
        if all(slots)
        else None
    )
    numbers["output_identical"] = _identical(runs)
    numbers["stability"] = [stability(run) for run in runs]
    return numbers


def _identical(runs: list[Run]) -> list[int] | None:
    pairs = [(run.evaluation or {}).get("output_identical") for run in runs]
    if not all(pairs):
        return None
    return [int(sum(pair[0] for pair in pairs)), int(sum(pair[1] for pair in pairs))]


def _mean(values: list[float]) -> float | None:
    return none_if_nan(float(np.mean(values)))  # type: ignore[return-value]
