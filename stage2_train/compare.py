"""The `compare` word: runs on proven-identical inputs, a verdict, and where to read it.

1. Read the runs and group them into arms (equal configuration but for seeds).
2. Hold the digest chains against each other: the first differing step refuses the comparison.
3. Differences with intervals (`analysis`), Holm's correction over arms, matched budgets.
4. Verdict (`verdict`), HTML report (`report`), JSON summary, decision record.
"""

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.fs import check_writable, write_atomic
from shared.log import say
from stage2_train import analysis, transfer, verdict
from stage2_train.config import CompareConfig, DecideBy, Noise
from stage2_train.runs import (
    Arm,
    check_inputs,
    common_steps,
    differing_settings,
    group_arms,
    read_run,
)
from stage2_train.stats import Interval, none_if_nan

FORMAT = "drafttape.compare.v1"
LOSSES = (DecideBy.heldout_loss.value, DecideBy.final_loss.value)
VOCABULARY = ("drafter.draft_vocabulary", "drafter.draft_vocabulary_ids")


def analyse(cfg: CompareConfig) -> tuple[dict[str, Any], list[Arm]]:
    """The summary (JSON-ready) and the arms, baseline first.

    Raises:
        DataError: a run can't be read. MismatchError: the inputs differ; names the step.
        ConfigError: fewer than two arms, a level outside (0, 1), or losses over other vocabularies.
    """
    if not 0 < cfg.confidence < 1:
        raise ConfigError(f"confidence={cfg.confidence} is not between 0 and 1")
    arms = group_arms([read_run(path) for path in cfg.runs])
    if len(arms) < 2:
        raise ConfigError(
            "a comparison needs two arms",
            where=f"{len(cfg.runs)} runs given",
            do="Name runs whose configuration differs; the first one is the baseline",
        )
    seeds = check_inputs(arms, allow_codec=cfg.allow_codec)
    first_step = common_steps(arms, seeds)
    baseline = arms[0]
    pairs = {arm.name: analysis.compare_pair(baseline, arm, seeds, cfg.confidence)
             for arm in arms[1:]}  # fmt: skip
    known = cfg.noise is Noise.baseline
    if known and len(baseline.runs) < 3:
        raise ConfigError(
            f"the seed noise can't be known from {len(baseline.runs)} runs of {baseline.name}",
            where="noise=baseline",
            do="Name at least three runs of the baseline, each with its own seed",
        )
    analysis.pool_and_correct(pairs, arms, seeds, from_baseline=known)
    first = baseline.runs[seeds[0]]
    numbers = {arm.name: analysis.arm_numbers(arm, seeds) for arm in arms}
    identical = [n["output_identical"] for n in numbers.values()]
    summary: dict[str, Any] = {
        "format": FORMAT,
        "digests_equal": True,
        "steps": first.num_steps,
        "first_step": first_step,
        "output_identical": [sum(p[0] for p in identical), sum(p[1] for p in identical)]
        if all(identical)
        else None,
        "confidence": cfg.confidence,
        "decide_by": cfg.decide_by.value,
        "tolerance": cfg.tolerance,
        "noise": cfg.noise.value,
        "baseline": baseline.name,
        "seeds": [list(seed) for seed in seeds],
        "inputs": {
            "snapshot": first.record.get("snapshot"),
            "spec_digest": first.record.get("spec_digest"),
            "codecs": first.record.get("codecs"),
            "plan": first.record.get("plan"),
            "final_digests": [
                [list(seed), baseline.runs[seed].digests.get(max(baseline.runs[seed].digests))]
                for seed in seeds
                if baseline.runs[seed].digests
            ],
        },
        "settings": differing_settings(arms),
        "arms": numbers,
        "pairs": pairs,
        "matched": {
            arm.name: analysis.matched(baseline, arm, seeds, cfg.confidence) for arm in arms[1:]
        },
    }
    summary["transfer"] = transfer.compare(arms, seeds, cfg.confidence)
    summary["left_out"] = [
        str(run.path)
        for arm in arms
        for seed, run in arm.runs.items()
        if seed not in seeds and not (known and arm is baseline)
    ]
    summary["unfinished"] = [
        f"{run.path} has made {run.unfinished[0]} of {run.unfinished[1]} planned updates"
        for arm in arms
        for seed, run in arm.runs.items()
        if seed in seeds and run.unfinished
    ]
    summary["verdict"] = verdict.decide(summary)
    metric = summary["verdict"]["metric"]
    if metric in LOSSES and any(key in summary["settings"] for key in VOCABULARY):
        raise ConfigError(
            "the arms have other draft vocabularies, and a loss over fewer tokens is another task",
            where=metric,
            do="Measure every run with drafttape eval and set decide_by=real_acceptance, "
            "estimated_acceptance or accuracy",
        )
    return summary, arms


def plain(value: Any) -> Any:
    """The summary as JSON: intervals as objects, NaN as null."""
    if isinstance(value, Interval):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return none_if_nan(value)


def compare(cfg: CompareConfig) -> int:
    """The word: writes the report (and summary and record if named) and prints the verdict."""
    from stage2_train.report import write_report

    for path in (cfg.report, cfg.summary, cfg.record):
        if path is not None:
            check_writable(Path(path))
    summary, arms = analyse(cfg)
    write_report(Path(cfg.report), summary, arms)
    if cfg.summary is not None:
        text = json.dumps(plain(summary), indent=1, allow_nan=False) + "\n"
        write_atomic(Path(cfg.summary), text.encode())
    if cfg.record is not None:
        text = verdict.decision_record(summary, question=cfg.question)
        write_atomic(Path(cfg.record), text.encode())
    say(verdict.terminal_text(summary))
    say(f"report: {cfg.report}")
    return 0
