"""A sweep's plan file and the trials it means; torch-free.

```yaml
name: muon-lr
train:                       # overrides that all trials share
  cache.root: build/demo/cache
  drafter: demo
  trainer.epochs: 3          # equal passes = equal tokens, whatever the batch
arms:                        # named sets of overrides, each with a grid of its own if it likes
  adamw: {optimizer: adamw}
  muon:
    optimizer: muon
    grid: {optimizer.polynomial: [kj, polar_express]}
grid:                        # the product of these
  optimizer.lr: {log: [3.0e-4, 1.0e-2, 4]}
  batch.rows_per_step: [1, 2]
seeds: [0, 1]                # order, anchors and initial weights
random: {trials: 24, seed: 0}  # optional: so many draws an arm instead of the whole product
halving: {steps: [50, 100, 200], keep: 0.5}  # optional: see `sweep_halving`
eval: {decode: false}        # keys of `drafttape eval`
```

An arm may be a set of cooldowns from one trunk instead (WSD: one long plateau, several budgets):

```yaml
arms:
  adamw:
    optimizer: adamw
    cooldowns: {trunk: "runs/trunk-{seed}", at: [100, 200, 400], decay: 40}
```

The trunk is a run of its own with `schedule=wsd schedule.decay=0 trainer.checkpoint_every=100
trainer.keep=100`. Each trial begins at its checkpoint with all states and cools down in `decay`
updates, so the trunk is trained once.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import quote
from shared.errors import ConfigError
from shared.rng import generator

KEYS = {"name", "train", "arms", "grid", "seeds", "random", "halving", "eval", "unequal_budgets"}
AT = "cooldown.at"  # the setting that a cooldown's trial varies
OWN = {  # keys that the sweep itself sets
    "run_dir": "Leave it out: each trial has a place of its own",
    "seed": "Write seeds: [0, 1] beside train",
    "init_seed": "Write seeds: [0, 1] beside train",
}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        id: names it: the arm and a hash of everything that it is.
        arm: the arm's name.
        overrides: of `drafttape train`, key -> value.
        varied: the overrides that differ inside the sweep, and the seed.
        rung: of successive halving.
    """

    id: str
    arm: str
    overrides: dict[str, Any]
    varied: dict[str, Any]
    rung: int = 0


@dataclass(frozen=True)
class Halving:
    """Successive halving: updates of each rung, and the share of an arm's settings that go on."""

    steps: tuple[int, ...]
    keep: float


@dataclass(frozen=True)
class SweepPlan:
    """A plan file, read and checked."""

    name: str
    trials: tuple[Trial, ...]
    eval: dict[str, Any]
    unequal_budgets: bool
    halving: Halving | None = None


def read_plan(path: str | Path) -> SweepPlan:
    """Reads a plan file.

    Raises:
        ConfigError: unknown key, an empty grid, a value that makes no sense; names the key.
    """
    import yaml

    path = Path(path)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"the plan can't be read ({reason})", where=path) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}", where=path) from None
    if not isinstance(document, dict):
        raise ConfigError("a plan is a mapping", where=path, do=f"Keys: {', '.join(sorted(KEYS))}")
    _known(document, KEYS, path)
    trials = expand(document, path)
    evaluation = _mapping(document, "eval", path)
    _free(evaluation, f"{path}: eval")
    return SweepPlan(
        str(document.get("name", path.stem)),
        tuple(trials),
        evaluation,
        bool(document.get("unequal_budgets", False)),
        _halving(document, path),
    )


def _halving(document: dict[str, Any], where: Any) -> Halving | None:
    if document.get("halving") is None:
        return None
    asked = _mapping(document, "halving", where)
    _known(asked, {"steps", "keep"}, f"{where}: halving")
    steps, keep = asked.get("steps"), asked.get("keep", 0.5)
    rising = _are_whole(steps) and len(steps) > 1 and steps == sorted(set(steps)) and steps[0] > 0
    if not rising or not _are_numbers([keep], 1) or not 0 < keep < 1:
        raise ConfigError(
            "needs steps: [rising whole numbers] and keep: a share between 0 and 1",
            where=f"{where}: halving",
        )
    return Halving(tuple(steps), float(keep))


def expand(document: dict[str, Any], where: Any) -> list[Trial]:
    """All trials of a plan, in the plan's order, each once."""
    common = _mapping(document, "train", where)
    grid = _mapping(document, "grid", where)
    arms = _mapping(document, "arms", where) or {"all": {}}
    seeds = document.get("seeds", [0])
    if not _are_whole(seeds) or min(seeds) < 0:
        raise ConfigError("must be a list of whole numbers from 0", where=f"{where}: seeds")
    draws = document.get("random")
    if draws is not None:
        draws = _mapping(document, "random", where)
        _known(draws, {"trials", "seed"}, f"{where}: random")
        if not _are_whole([draws.get("trials"), draws.get("seed", 0)]) or draws["trials"] < 1:
            raise ConfigError(
                "needs trials: a whole number from 1, and seed: a whole number",
                where=f"{where}: random",
            )
    trials: dict[str, Trial] = {}
    for arm in arms:
        own = dict(_mapping(arms, arm, f"{where}: arms"))
        axes = grid | _mapping(own, "grid", f"{where}: arms.{arm}")
        own.pop("grid", None)
        _free({**common, **own, **axes}, f"{where}: arms.{arm}")
        cooldowns = _cooldowns(own, f"{where}: arms.{arm}")
        if cooldowns and axes:
            raise ConfigError("cooldowns have no grid", where=f"{where}: arms.{arm}")
        if cooldowns or draws is None:
            points = product({key: values_of(key, axis, where) for key, axis in axes.items()})
        else:
            points = sample(axes, draws["trials"], draws.get("seed", 0), arm, where)
        for point in points:
            for seed in seeds:
                overrides = {**common, **own, **point, "seed": seed, "init_seed": seed}
                for extra, varied in cooldowns or [({}, {})]:
                    full = overrides | _of_seed(extra, seed)
                    shown = {**point, **varied, "seed": seed}
                    trial = Trial(trial_id(arm, full), str(arm), full, shown)
                    trials.setdefault(trial.id, trial)
    return list(trials.values())


def _cooldowns(own: dict[str, Any], where: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(overrides, what varies) of each cooldown of an arm; takes the key out of the arm."""
    asked = _mapping(own, "cooldowns", where)
    own.pop("cooldowns", None)
    if not asked:
        return []
    _known(asked, {"trunk", "at", "decay"}, f"{where}.cooldowns")
    trunk, at, decay = (asked.get(key) for key in ("trunk", "at", "decay"))
    if not isinstance(trunk, str) or not _are_whole(at) or not _are_whole([decay]) or decay < 1:
        raise ConfigError(
            "needs trunk: RUN, at: [updates], decay: updates", where=f"{where}.cooldowns"
        )
    return [
        (
            {
                "branch.run_dir": trunk,
                "branch.checkpoint": f"step-{step:06d}",
                "branch.restart_schedule": False,
                "schedule": "wsd",
                "schedule.decay": decay,
                "trainer.steps": step + decay,
            },
            {AT: step},
        )
        for step in at
    ]


def _of_seed(overrides: dict[str, Any], seed: int) -> dict[str, Any]:
    """A cooldown's trunk may have {seed} in its name."""
    trunk = overrides.get("branch.run_dir")
    if trunk is None:
        return overrides
    return overrides | {"branch.run_dir": trunk.replace("{seed}", str(seed))}


def product(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The points of a grid; one empty point for no axis."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def values_of(key: str, axis: Any, where: Any) -> list[Any]:
    """An axis as a list: a list itself, or {log: [low, high, count]}."""
    if isinstance(axis, list) and axis:
        return axis
    if isinstance(axis, dict) and set(axis) == {"log"} and _are_numbers(axis["log"], 3):
        low, high, count = axis["log"]
        if 0 < low <= high < math.inf and count >= 1 and count == int(count):
            return log_steps(float(low), float(high), int(count))
    raise ConfigError(
        f"{axis!r} is neither a list nor {{log: [low, high, count]}} (write 1.0e-3, not 1e-3)",
        where=f"{where}: grid.{key}",
    )


def log_steps(low: float, high: float, count: int) -> list[float]:
    """`count` values with equal ratios, ends included, three significant digits."""
    if count == 1:
        return [low]
    ratio = math.log(high / low) / (count - 1)
    return [float(f"{low * math.exp(ratio * k):.3g}") for k in range(count)]


def sample(
    axes: dict[str, Any], trials: int, seed: int, arm: str, where: Any
) -> list[dict[str, Any]]:
    """Random points, pure in seed and arm: a {log: …} axis log-uniformly, a list evenly."""
    rng, points = generator("sweep", seed, arm), []
    for _ in range(trials):
        point = {}
        for key, axis in axes.items():
            values = values_of(key, axis, where)
            if isinstance(axis, dict):
                low, high = math.log(axis["log"][0]), math.log(axis["log"][1])
                point[key] = float(f"{math.exp(rng.uniform(low, high)):.3g}")
            else:
                point[key] = values[int(rng.integers(len(values)))]
        points.append(point)
    return points


def to_overrides(values: dict[str, Any]) -> list[str]:
    """Key-value pairs as Hydra overrides."""
    return [f"{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, list):
        return "[" + ",".join(_text(item) for item in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return quote(str(value))


def trial_id(arm: str, overrides: dict[str, Any]) -> str:
    """The arm and a hash of everything that the trial is."""
    text = json.dumps([arm, overrides], sort_keys=True)
    # Only what Hydra's grammar takes unquoted.
    safe = "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "-" for c in str(arm))[:40]
    return f"{safe}-{hashlib.blake2b(text.encode(), digest_size=5).hexdigest()}"


def _mapping(document: dict[str, Any], key: str, where: Any) -> dict[str, Any]:
    value = document.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be a mapping", where=where)
    return value


def _free(overrides: dict[str, Any], where: Any) -> None:
    """Overrides are text, and none of the sweep's own keys."""
    for key in overrides:
        if not isinstance(key, str):
            raise ConfigError(f"{key!r} is not a key of a configuration", where=where)
        if key in OWN:
            raise ConfigError(f"{key} is set by the sweep", where=where, do=OWN[key])


def _known(document: dict[str, Any], keys: set[str], where: Any) -> None:
    for key in document:
        if key not in keys:
            import difflib

            near: Sequence[str] = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Keys: {', '.join(sorted(keys))}"
            raise ConfigError(f"unknown key {key!r}", where=where, do=hint)


def _are_whole(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    )


def _are_numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    )
