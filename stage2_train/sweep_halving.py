"""Successive halving: all settings for a few updates, the better ones for more, and so on.

Every rung's trial is a branch of the rung before, with all states and one schedule laid out for the
last rung, so a setting that reaches the end is, bit for bit, the run that it would have been alone.
Settings are ranked inside their arm by the mean held-out loss over seeds; a setting with a failed
trial is dropped. The price is a bias that the report states: a setting that is slow early (a small
learning rate, a long warmup, a schedule that is not yet down) is judged before its time.
"""

import math
from typing import Any

from stage2_train.sweep_plan import Halving, SweepPlan, Trial, trial_id

BIAS = (
    "Successive halving: {rungs}. Settings were ranked inside their arm by held-out loss in the "
    "middle of their schedule, so the result is biased towards settings that are fast early: "
    "those that were dropped might have won at the full budget. Losses of different rungs are not "
    "comparable; maps and picks are of the last rung alone."
)


def rung_of(plan: SweepPlan, number: int, rows: list[dict[str, Any]]) -> list[Trial]:
    """The trials of a rung.

    Args:
        plan: with `halving`.
        number: of the rung, from 0.
        rows: the results table of the rung before.
    """
    halving = plan.halving
    assert halving is not None
    settings = {
        "trainer.steps": halving.steps[number],
        "schedule.horizon": halving.steps[-1],
    }
    if number == 0:
        return [_trial(trial, settings, 0, None) for trial in plan.trials]
    parents = {_key(row["arm"], _varied(row)): row for row in rows if row["state"] == "done"}
    kept = survivors(rows, halving.keep)
    trials = []
    for trial in plan.trials:
        parent = parents.get(_key(trial.arm, trial.varied))
        if parent is not None and _setting(trial.arm, trial.varied) in kept:
            trials.append(_trial(trial, settings, number, parent["run_dir"]))
    return trials


def _trial(trial: Trial, settings: dict[str, Any], rung: int, parent: str | None) -> Trial:
    overrides = trial.overrides | settings
    name = trial_id(trial.arm, overrides)  # without the parent's place: a sweep can be moved
    if parent is not None:
        overrides |= {"branch.run_dir": parent, "branch.restart_schedule": False}
    return Trial(name, trial.arm, overrides, trial.varied, rung)


def survivors(rows: list[dict[str, Any]], keep: float) -> set[tuple[Any, ...]]:
    """The best `keep` of each arm's settings (at least one), by the mean over seeds."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        loss = row.get("heldout_loss")
        good = row["state"] == "done" and loss is not None and math.isfinite(loss)
        values.setdefault(_setting(row["arm"], _varied(row)), []).append(loss if good else math.inf)
    means = {setting: sum(losses) / len(losses) for setting, losses in values.items()}
    kept: set[tuple[Any, ...]] = set()
    for arm in dict.fromkeys(setting[0] for setting in means):
        own = sorted((s for s in means if s[0] == arm), key=lambda s: (means[s], str(s)))
        usable = [s for s in own if math.isfinite(means[s])]
        kept |= set(usable[: max(1, math.ceil(keep * len(own)))])
    return kept


def _varied(row: dict[str, Any]) -> dict[str, Any]:
    return {key[4:]: row[key] for key in row if key.startswith("set.")}


def _setting(arm: str, varied: dict[str, Any]) -> tuple[Any, ...]:
    return (arm, *sorted((k, str(v)) for k, v in varied.items() if k != "seed" and v is not None))


def _key(arm: str, varied: dict[str, Any]) -> tuple[Any, ...]:
    return (*_setting(arm, varied), varied.get("seed"))


def bias(halving: Halving, rows: list[dict[str, Any]]) -> str:
    """What the report has to say of it."""
    counts = [
        f"{sum(row['rung'] == n for row in rows)} trials of {steps} updates"
        for n, steps in enumerate(halving.steps)
    ]
    return BIAS.format(rungs=", then ".join(counts))
