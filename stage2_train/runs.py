"""Runs and arms as a comparison reads them: files only, no torch.

A *run* is one directory that `drafttape train` wrote. An *arm* is the set of runs whose
configuration is the same but for seeds and for keys that can't change a result.
"""

import json
import os
import re
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import DataError, MismatchError
from shared.log import read_json_lines

# Keys that name a run or say when something happens, never what the optimizer sees.
NEUTRAL = (
    "run_dir", "seed", "init_seed", "device", "loader", "trainer.tensorboard",
    "trainer.checkpoint_every", "trainer.keep", "trainer.eval_every", "cache.root",
    "cache.snapshot", "tracking", "trainer.max_bad_steps", "trainer.recompute",
    "trainer.profile_start", "trainer.profile_steps", "diagnostics",
)  # fmt: skip


@dataclass
class Run:
    """One training run.

    Attributes:
        path: its directory.
        name: the directory's name (untrusted text).
        record: run.json as it stands.
        series: per step, float64 [steps]: step, loss, tokens, seconds, flops, … (NaN = not logged).
        digests: step -> digest of everything the optimizer saw up to it.
        heldout: (step, loss) of held-out evaluations during training.
        evaluation: eval.json, or None.
    """

    path: Path
    name: str
    record: dict[str, Any]
    series: dict[str, np.ndarray]
    digests: dict[int, str]
    heldout: list[tuple[int, float]] = field(default_factory=list)
    evaluation: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        return self.record.get("config", {})

    @property
    def seed(self) -> tuple[int, int]:
        """(order and anchors, initial weights)."""
        return int(self.config.get("seed", 0)), int(self.config.get("init_seed", 0))

    @property
    def num_steps(self) -> int:
        return len(self.series["step"])

    @property
    def unfinished(self) -> tuple[int, int] | None:
        """(updates made, updates planned) of a run that has not ended; else None."""
        made, planned = int(self.series["step"][-1]), self.record.get("steps")
        return (made, planned) if isinstance(planned, int) and made < planned else None

    def value(self, key: str) -> float:
        """A number of eval.json, NaN where there is none."""
        found = (self.evaluation or {}).get(key)
        return float(found) if isinstance(found, int | float) else float("nan")


@dataclass
class Arm:
    """Runs of one configuration, one a seed.

    Attributes:
        name: short label (untrusted text).
        runs: by (seed, init_seed).
        settings: the flattened configuration without neutral keys.
    """

    name: str
    runs: dict[tuple[int, int], Run]
    settings: dict[str, Any]

    @property
    def seeds(self) -> list[tuple[int, int]]:
        return sorted(self.runs)


SERIES = (
    "loss", "tokens", "supervised", "seconds", "flops", "data_wait", "lr", "grad_norm", "clipped",
    "skipped",
)  # fmt: skip


def read_run(path: str | Path) -> Run:
    """Reads a run directory.

    Raises:
        DataError: it isn't one, or it has no finished step.
    """
    path = Path(path)
    try:
        record = _json(path / "run.json")
        metrics = read_json_lines(path / "metrics.jsonl")
        digests = read_json_lines(path / "digests.jsonl")
        evaluation = None
        if (path / "eval.json").exists():
            evaluation = _json(path / "eval.json")
    except FileNotFoundError as error:
        raise DataError(
            f"{Path(error.filename).name} is missing", where=path,
            do="Give the directory of a run that drafttape train has written",
        ) from None  # fmt: skip
    except OSError as error:
        raise DataError(f"can't be read: {error}", where=path) from None
    for file, lines in (("metrics.jsonl", metrics), ("digests.jsonl", digests)):
        if not all(isinstance(line.get("step"), int) for line in lines):
            raise DataError("a line has no step", where=path / file)
    # A step that was logged twice (killed after the line, before the checkpoint) counts once.
    steps = {int(line["step"]): line for line in metrics if "loss" in line}
    if not steps:
        raise DataError(
            "no finished step", where=path / "metrics.jsonl", do="Let the run go on with train"
        )
    rows = [steps[step] for step in sorted(steps)]
    series = {"step": np.array(sorted(steps), dtype=np.float64)}
    for key in SERIES:
        series[key] = np.array([_number(row.get(key)) for row in rows], dtype=np.float64)
    heldout = {
        int(line["step"]): _number(line["heldout_loss"])
        for line in metrics
        if "heldout_loss" in line
    }
    return Run(
        path=path,
        name=name_of(path.resolve()),
        record=record,
        series=series,
        digests={int(line["step"]): str(line.get("digest")) for line in digests},
        heldout=sorted(heldout.items()),
        evaluation=evaluation,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"not JSON ({error})", where=path) from None
    if not isinstance(document, dict):
        raise DataError("not a JSON object", where=path)
    return document


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def settings_of(run: Run) -> dict[str, Any]:
    """The run's flattened configuration without neutral keys, and the codecs that it replays."""
    kept = {
        key: value
        for key, value in flatten(run.config).items()
        if not any(key == name or key.startswith(name + ".") for name in NEUTRAL)
    }
    vocabulary = run.record.get("draft_vocabulary")
    if isinstance(vocabulary, dict):  # the ids themselves, not where their file lay
        kept["drafter.draft_vocabulary_ids"] = vocabulary.get("digest")
    return kept | {"codecs": _codec(run)}


def group_arms(runs: list[Run]) -> list[Arm]:
    """Groups runs into arms, in order of first appearance.

    Raises:
        MismatchError: two runs of one arm have the same seed (a repeated run is no new evidence).
    """
    arms: list[Arm] = []
    for run in runs:
        settings = settings_of(run)
        arm = next((arm for arm in arms if arm.settings == settings), None)
        if arm is None:
            arm = Arm(run.name, {}, settings)
            arms.append(arm)
        if run.seed in arm.runs:
            other = arm.runs[run.seed]
            if same_place(other.path, run.path):
                raise MismatchError("the run is named twice", where=run.path)
            raise MismatchError(
                f"has the configuration and the seeds of {other.path}",
                where=run.path,
                do="Name each run once; repeat a baseline with another seed or init_seed",
            )
        arm.runs[run.seed] = run
    taken: dict[str, int] = {}
    for arm in arms:
        name = arm_name([run.name for run in arm.runs.values()])
        taken[name] = taken.get(name, 0) + 1
        arm.name = name if taken[name] == 1 else f"{name} ({taken[name]})"
    return arms


def name_of(path: Path) -> str:
    """A run's name: its directory's, or of a sweep's trial (`ARM-HASH/run`) the arm's."""
    trial = path.parent
    if path.name == "run" and (trial / "trial.json").exists():
        return trial.name.rpartition("-")[0]
    return path.name


def same_place(a: Path, b: Path) -> bool:
    """Whether two paths name the same directory."""
    return os.path.realpath(a) == os.path.realpath(b)


def arm_name(names: list[str]) -> str:
    """The common part of the runs' names without a seed suffix."""
    if len(set(names)) == 1:
        return names[0]
    letters = takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))
    common = "".join(column[0] for column in letters)
    common = re.sub(r"[-_. ]*(seed|s)?[-_. =]*\d*$", "", common, flags=re.IGNORECASE)
    return common or names[0]


def differing_settings(arms: list[Arm]) -> dict[str, list[Any]]:
    """Keys whose values differ between arms -> the value of each arm."""
    keys = sorted({key for arm in arms for key in arm.settings})
    rows = {key: [arm.settings.get(key) for arm in arms] for key in keys}
    return {key: values for key, values in rows.items() if any(v != values[0] for v in values)}


def check_inputs(arms: list[Arm], *, allow_codec: bool = False) -> list[tuple[int, int]]:
    """Proves that the arms saw the same inputs at every step.

    Returns:
        The seeds that every arm has.

    Raises:
        MismatchError: names the first differing step and the configuration keys behind it.
    """
    common = set(arms[0].seeds)
    for arm in arms[1:]:
        common &= set(arm.seeds)
    baseline = arms[0]
    if not common:
        for arm in arms[1:]:
            if not set(arm.seeds) & set(baseline.seeds):
                _refuse(baseline.runs[baseline.seeds[0]], arm.runs[arm.seeds[0]])
        raise MismatchError(
            "no seed is common to all arms: "
            + "; ".join(f"{arm.name} has {arm.seeds}" for arm in arms),
            do="Train every arm with the same seeds (seed, init_seed)",
        )
    for seed in sorted(common):
        first = baseline.runs[seed]
        for arm in arms[1:]:
            run = arm.runs[seed]
            if first_difference(first, run) is not None:
                _refuse(first, run)
            mine, theirs = _codec(first), _codec(run)
            if mine != theirs and not allow_codec:
                raise MismatchError(
                    f"replays states stored as {theirs}, {first.name} as {mine}",
                    where=run.path,
                    do="Use one codec, or say allow_codec=true if the codec is the question",
                )
    return sorted(common)


def first_difference(a: Run, b: Run) -> int | None:
    """The first step whose inputs differ or that only one of the runs has; None: all equal.

    A run that was branched at step k has digests from k+1 on. Each digest covers all steps before
    it, so equality from there on is equality of everything, the trunk included.
    """
    if not a.digests or not b.digests:
        return min({*a.digests, *b.digests}, default=None)
    start = max(min(a.digests), min(b.digests))
    for step in sorted({*a.digests, *b.digests}):
        if step >= start and a.digests.get(step) != b.digests.get(step):
            return step
    return None


def common_steps(arms: list[Arm], seeds: list[tuple[int, int]]) -> int:
    """Cuts every run to the steps from the latest branch point on; returns the first of them."""
    chosen = [arm.runs[seed] for arm in arms for seed in seeds]
    first = max(int(run.series["step"][0]) for run in chosen)
    for run in chosen:
        kept = run.series["step"] >= first
        if not kept.all():
            run.series = {key: values[kept] for key, values in run.series.items()}
    return first


def _codec(run: Run) -> Any:
    return run.record.get("codec", run.record.get("codecs"))


def _refuse(a: Run, b: Run) -> None:
    step = first_difference(a, b)
    ours, theirs = flatten(a.config), flatten(b.config)
    inputs = ("seed", "batch", "drafter.block_size", "cache.snapshot")
    why = [
        f"{key} {ours.get(key)} against {theirs.get(key)}"
        for key in sorted(ours.keys() | theirs.keys())
        if any(key == name or key.startswith(name + ".") for name in inputs)
        and ours.get(key) != theirs.get(key)
    ]
    mine, yours = a.record.get("snapshot"), b.record.get("snapshot")
    if mine != yours:
        why.append(f"snapshot {mine} against {yours}")
    if step is None:
        raise MismatchError(
            f"{a.name} and {b.name} have no digests in common and can't be held against each other",
            where=b.path,
        )
    if step in a.digests and step in b.digests:
        what = f"the inputs differ from those of {a.name} from step {step} on"
    else:
        run, other = (b, a) if step in a.digests else (a, b)
        what = f"{run.name} ends before step {step}, {other.name} goes on"
        why.append("compare finished runs of equal length")
    raise MismatchError(
        what + (f" ({'; '.join(why)})" if why else ""),
        where=b.path,
        do="Only runs on identical inputs can be compared: same snapshot, seed, batch and steps",
    )
