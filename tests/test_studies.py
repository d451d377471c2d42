"""Simulated studies: what is planted is found, what isn't there is not claimed, 100 of 100 refused.

The noise is that of real runs of one size: seeds share their inputs and their initial weights, so
what remains of a paired difference between seeds is small against the loss.
"""

import numpy as np
import pytest
import torch

from shared.errors import MismatchError
from stage2_train import analysis, runs, steps, verdict
from stage2_train.batch import Batch
from stage2_train.runs import Arm, Run, check_inputs
from tests.run_tools import learning

STUDIES, SEEDS, LOSS = 200, ((0, 0), (1, 1), (2, 2)), 4.0


def simulated(rng, gains, noise):
    """Arms of three seeds; a seed's level is common to all arms, `noise` is an arm's own."""
    levels = rng.normal(0, 0.05 * LOSS, len(SEEDS))
    arms = []
    for number, gain in enumerate(gains):
        own = {}
        for seed, level in zip(SEEDS, levels, strict=True):
            loss = LOSS + level - gain + rng.normal(0, noise)
            series = {key: np.arange(1.0, 9.0) for key in ("step", "tokens", "seconds", "flops")}
            series |= {"loss": np.full(8, loss), "skipped": np.zeros(8), "clipped": np.zeros(8)}
            own[seed] = Run(None, f"a{number}", {}, series, {}, [], {"heldout_loss": loss})
        arms.append(Arm(f"a{number}", own, {"arm": number}))
    return arms


def decisions(arms, level=0.95):
    """Arm -> decision, by held-out loss."""
    pairs = {
        arm.name: {
            "heldout_loss": _row(arms[0], arm, level),
        }
        for arm in arms[1:]
    }
    analysis.pool_and_correct(pairs, arms, list(SEEDS))
    summary = {
        "pairs": pairs, "decide_by": "heldout_loss", "tolerance": 0.0, "seeds": SEEDS,
        "confidence": level, "baseline": arms[0].name,
    }  # fmt: skip
    return {name: pair["decision"] for name, pair in verdict.decide(summary)["pairs"].items()}


def _row(baseline, arm, level):
    metric = analysis.BY_KEY["heldout_loss"]
    a = [analysis.value(baseline.runs[seed], metric.key) for seed in SEEDS]
    b = [analysis.value(arm.runs[seed], metric.key) for seed in SEEDS]
    across = analysis.stats.paired_t(np.subtract(b, a), level)
    return {
        "label": metric.label, "better": metric.better, "baseline": np.mean(a), "arm": np.mean(b),
        "by_seed": [[seed, x, y] for seed, x, y in zip(SEEDS, a, b, strict=True)],
        "across": across, "within": across,
    }  # fmt: skip


def test_a_true_difference_of_one_percent_is_found():
    rng = np.random.default_rng(1)
    found = sum(
        decisions(simulated(rng, (0.0, 0.01 * LOSS), noise=0.001 * LOSS))["a1"] == "adopt"
        for _ in range(STUDIES)
    )
    assert found >= 0.95 * STUDIES, f"found in {found} of {STUDIES}"


@pytest.mark.parametrize(
    ("arms", "noise"),
    [
        (2, 0.001),
        (2, 0.05),
        pytest.param(6, 0.001, marks=pytest.mark.slow),
        pytest.param(6, 0.01, marks=pytest.mark.slow),
    ],
)
def test_no_difference_is_claimed_in_at_most_one_study_in_twenty(arms, noise):
    """Claims in either direction over all arms of a study together, without any allowance."""
    rng = np.random.default_rng(2)
    claims = sum(
        any(
            d != "undecided" for d in decisions(simulated(rng, [0.0] * arms, noise * LOSS)).values()
        )
        for _ in range(STUDIES)
    )
    assert claims <= 0.05 * STUDIES, f"claimed in {claims} of {STUDIES}"


def test_unpaired_would_have_found_nothing():
    """The seeds' own level is 5 % of the loss: five times the planted difference."""
    rng, missed = np.random.default_rng(3), 0
    for _ in range(50):
        arms = simulated(rng, (0.0, 0.01 * LOSS), noise=0.001 * LOSS)
        sides = [[run.value("heldout_loss") for run in arm.runs.values()] for arm in arms]
        missed += not analysis.stats.welch(*sides).excludes_zero
    assert missed >= 48


def test_one_seed_never_decides():
    rng = np.random.default_rng(4)
    arms = simulated(rng, (0.0, 0.5 * LOSS), noise=0.0)
    summary = {
        "pairs": {"a1": {"heldout_loss": _row(*arms, 0.95)}}, "decide_by": "heldout_loss",
        "tolerance": 0.0, "seeds": SEEDS[:1], "confidence": 0.95, "baseline": "a0",
    }  # fmt: skip
    assert verdict.decide(summary)["pairs"]["a1"]["decision"] == "undecided"


def rows(rng, num_steps):
    """Packed rows as a trainer sees them: two documents each."""
    made = []
    for step in range(num_steps):
        lengths = rng.integers(12, 20, 2)
        made.append(
            Batch.pack(
                [f"{step:030x}{d:02x}" for d in range(2)],
                [torch.arange(int(n)) for n in lengths],
                [torch.zeros(int(n), 1, 1, dtype=torch.bfloat16) for n in lengths],
                [torch.arange(int(n)) > 2 for n in lengths],
                [torch.tensor([4, 7]), torch.tensor([3, 5, 8])],
            )
        )
    return made


def digests(batches):
    """Step -> digest, chained as the trainer chains them."""
    link, found = b"start", {}
    for number, batch in enumerate(batches, start=1):
        link = steps.chain(link, [batch.digest(4)])
        found[number] = link.hex()
    return found


def change(rng, batch, kind):
    """The same row but for one anchor, one sample, or how it is packed."""
    import dataclasses

    if kind == "anchor":
        anchors = batch.anchor_N.clone()
        anchors[int(rng.integers(0, len(anchors)))] += 1
        return dataclasses.replace(batch, anchor_N=anchors)
    if kind == "sample":
        names = list(batch.sample_ids)
        names[int(rng.integers(0, 2))] = "f" * 32
        return dataclasses.replace(batch, sample_ids=tuple(names))
    ends = batch.cu_seqlens.clone()
    ends[1] += int(rng.choice([-1, 1]))
    return dataclasses.replace(batch, cu_seqlens=ends)


@pytest.mark.slow
def test_planted_changes_of_one_input_are_refused_and_named_100_of_100(tmp_path):
    rng, refused = np.random.default_rng(5), 0
    batches = rows(rng, 30)
    series = {"step": np.arange(1.0, 31.0), "loss": learning(30)}
    first = Run(tmp_path / "a", "a", {}, series, digests(batches))
    for case in range(100):
        step = int(rng.integers(1, 31))
        other = list(batches)
        other[step - 1] = change(rng, batches[step - 1], ("anchor", "sample", "packing")[case % 3])
        second = Run(tmp_path / "b", "b", {}, series, digests(other))
        assert runs.first_difference(first, second) == step
        with pytest.raises(MismatchError, match=f"from step {step} on"):
            check_inputs([Arm("a", {(0, 0): first}, {}), Arm("b", {(0, 0): second}, {"x": 1})])
        refused += 1
    assert refused == 100
    same = Run(tmp_path / "b", "b", {}, series, digests(batches))
    assert check_inputs([Arm("a", {(0, 0): first}, {}), Arm("b", {(0, 0): same}, {"x": 1})])
