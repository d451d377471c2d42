"""Comparisons: proven-identical inputs or a refusal, honest intervals, a defensible verdict."""

import json
from pathlib import Path

import numpy as np
import pytest

from shared.errors import ConfigError, DataError, MismatchError
from stage2_train import analysis, report, runs, stats, verdict
from stage2_train.compare import analyse, compare, plain
from stage2_train.config import CompareConfig, DecideBy, Noise
from tests.run_tools import chain, evaluation, learning, write_run

MUON = {"name": "muon", "lr": 3e-3}


def pair(root, *, gain=0.2, seeds=(0,), steps=80, own=0.01, measured=True):
    """Two arms, one run a seed each; returns all run directories."""
    paths = []
    for seed in seeds:
        for arm, (name, optimizer) in enumerate((("adamw", None), ("muon", MUON))):
            drop = gain * arm
            paths.append(
                write_run(
                    root / (name if len(seeds) == 1 else f"{name}-s{seed}"),
                    loss=learning(steps, seed=seed, gain=drop, own=own, arm=arm),
                    seed=seed,
                    optimizer=optimizer,
                    seconds_per_step=1.0 + 0.5 * arm,
                    evaluation=evaluation(
                        4 - drop + 0.01 * seed,
                        acceptance=1.5 + drop,
                        noise=own,
                        seed=2 * seed + arm,
                    )
                    if measured
                    else None,
                )
            )
    return [str(path) for path in paths]


def config(paths, root, **more):
    return CompareConfig(runs=paths, report=str(root / "report.html"), **more)


@pytest.mark.slow
def test_writes_report_summary_and_record(tmp_path, capsys):
    paths = pair(tmp_path)
    cfg = config(
        paths, tmp_path, summary=str(tmp_path / "summary.json"), record=str(tmp_path / "record.md")
    )
    assert compare(cfg) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["digests_equal"] is True
    assert summary["output_identical"] == [24, 24]
    muon = summary["arms"]["muon"]
    assert muon["heldout_loss"] == pytest.approx(3.8, abs=0.01)
    assert muon["real_acceptance"] == pytest.approx(1.7)
    assert set(summary["arms"]["adamw"]) >= {
        "heldout_loss", "accuracy", "estimated_acceptance", "real_acceptance", "tokens_per_s",
    }  # fmt: skip
    assert summary["settings"] == {
        "optimizer.lr": [6e-4, 3e-3], "optimizer.name": ["adamw", "muon"],
    }  # fmt: skip
    text = capsys.readouterr().out
    assert "muon against adamw" in text
    assert "undecided" in text, "one seed never decides"
    assert "80 steps" in text
    record = (tmp_path / "record.md").read_text()
    assert record.startswith("# Decision: Is muon better than adamw?")
    for heading in ("Verdict", "Inputs", "Arms", "Differences", "matched", "Bottleneck", "change"):
        assert heading in record


@pytest.mark.parametrize("step", [1, 2, 40, 80])
def test_one_changed_anchor_is_refused_with_its_step(tmp_path, step):
    paths = pair(tmp_path)
    other = write_run(
        tmp_path / "changed", loss=learning(80), optimizer=MUON, digests=chain(80, 0, step)
    )
    with pytest.raises(MismatchError, match=f"from step {step} on"):
        analyse(config([paths[0], str(other)], tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_another_seed_is_refused_with_the_reason(tmp_path):
    paths = pair(tmp_path)
    other = write_run(tmp_path / "seed1", loss=learning(80, seed=1), seed=1, optimizer=MUON)
    with pytest.raises(MismatchError, match=r"from step 1 on.*seed 0 against 1"):
        analyse(config([paths[0], str(other)], tmp_path))


def test_unequal_lengths_and_codecs_are_refused(tmp_path):
    paths = pair(tmp_path)
    short = write_run(tmp_path / "short", loss=learning(60), optimizer=MUON)
    with pytest.raises(MismatchError, match="short ends before step 61"):
        analyse(config([paths[0], str(short)], tmp_path))
    lossy = write_run(tmp_path / "lossy", loss=learning(80), optimizer=MUON, codecs=["int8"])
    with pytest.raises(MismatchError, match="int8"):
        analyse(config([paths[0], str(lossy)], tmp_path))
    only = write_run(tmp_path / "only", loss=learning(80), codecs=["int8"])
    for other in (lossy, only):  # the codec alone makes an arm, too
        analyse(config([paths[0], str(other)], tmp_path, allow_codec=True))


def test_what_is_no_run_is_said(tmp_path):
    paths = pair(tmp_path)
    with pytest.raises(DataError, match=r"run\.json is missing"):
        analyse(config([paths[0], str(tmp_path / "nowhere")], tmp_path))
    with pytest.raises(ConfigError, match="needs two arms"):
        analyse(config(paths[:1], tmp_path))
    with pytest.raises(MismatchError, match="named twice"):
        analyse(config([paths[0], *paths], tmp_path))
    twin = write_run(tmp_path / "twin", loss=learning(80))
    with pytest.raises(MismatchError, match="configuration and the seeds"):
        analyse(config([*paths, str(twin)], tmp_path))


def test_seeds_are_grouped_and_decide(tmp_path):
    paths = pair(tmp_path, seeds=(0, 1, 2), gain=0.2)
    summary, arms = analyse(config(paths, tmp_path))
    assert [arm.name for arm in arms] == ["adamw", "muon"]
    assert summary["seeds"] == [[0, 0], [1, 1], [2, 2]]
    row = summary["pairs"]["muon"]["heldout_loss"]
    assert row["across"].mean == pytest.approx(-0.2, abs=0.02)
    assert row["across"].excludes_zero
    assert summary["verdict"]["pairs"]["muon"]["decision"] == "adopt"
    assert "Adopt muon" in verdict.terminal_text(summary)
    worse, _ = analyse(config(list(reversed(paths)), tmp_path))
    assert worse["baseline"] == "muon"
    assert worse["verdict"]["pairs"]["adamw"]["decision"] == "keep"


def test_no_difference_is_not_claimed_and_says_what_it_would_take(tmp_path):
    paths = pair(tmp_path, seeds=(0, 1, 2), gain=0.0, own=0.05)
    summary, _ = analyse(config(paths, tmp_path))
    found = summary["verdict"]["pairs"]["muon"]
    assert found["decision"] == "undecided"
    assert "more seeds" in found["text"] or "Over 1000 seeds" in found["text"]
    close, _ = analyse(config(paths, tmp_path, tolerance=1.0))
    assert close["verdict"]["pairs"]["muon"]["decision"] == "keep"


def test_pairing_is_much_tighter_than_not(tmp_path):
    summary, _ = analyse(config(pair(tmp_path, steps=200), tmp_path))
    row = summary["pairs"]["muon"]["final_loss"]
    assert row["unpaired"].width > 3 * row["within"].width
    assert abs(row["within"].mean + 0.2) < 2 * row["within"].width


def test_without_evaluations_the_training_loss_stands_in(tmp_path):
    paths = pair(tmp_path, measured=False)
    summary, _ = analyse(config(paths, tmp_path, decide_by=DecideBy.real_acceptance))
    assert summary["verdict"]["fallback"]
    assert summary["verdict"]["metric"] == "final_loss"
    assert "was not measured" in summary["verdict"]["text"]
    json.dumps(plain(summary), allow_nan=False)


def test_matched_budgets(tmp_path):
    summary, _ = analyse(config(pair(tmp_path, steps=120), tmp_path))
    rows = summary["matched"]["muon"]
    assert rows["tokens"]["paired"]
    assert rows["tokens"]["steps"] == [120, 120]
    assert not rows["seconds"]["paired"]
    assert rows["seconds"]["steps"] == [120, 80], "a step of muon takes 1.5 times as long here"
    assert rows["seconds"]["budget"] == 120.0


def test_branches_are_compared_from_the_branch_on(tmp_path):
    """A run branched at step 40 has no lines before it; its first digest covers the trunk."""
    paths = pair(tmp_path)
    trunk = tmp_path / "adamw"
    branch = write_run(tmp_path / "switched", loss=learning(80, gain=0.1, arm=1), optimizer=MUON)
    for name in ("metrics.jsonl", "digests.jsonl"):
        lines = (branch / name).read_text().splitlines(keepends=True)
        (branch / name).write_text("".join(lines[40:]))
    summary, _ = analyse(config([str(trunk), str(branch)], tmp_path))
    assert (summary["first_step"], summary["steps"]) == (41, 40)
    assert "from step 41 on" in verdict.terminal_text(summary)
    foreign = write_run(
        tmp_path / "foreign", loss=learning(80), optimizer=MUON, digests=chain(80, 0, 20)
    )
    for name in ("metrics.jsonl", "digests.jsonl"):
        lines = (foreign / name).read_text().splitlines(keepends=True)
        (foreign / name).write_text("".join(lines[40:]))
    with pytest.raises(MismatchError, match="from step 41 on"):
        analyse(config([paths[0], str(foreign)], tmp_path))


def test_stability_counts_spikes_and_skips(tmp_path):
    loss = learning(100, own=0.0)
    loss[60] += 30
    run = runs.read_run(write_run(tmp_path / "spiky", loss=loss))
    found = analysis.stability(run)
    assert found == {"spikes": 1, "skipped": 0, "clipped_share": 0.25}


def test_block_bootstrap_covers_a_correlated_mean():
    """AR(1) with rho 0.7: a plain interval covers about half as often as it says."""
    rng, hits, plain_hits, tries = np.random.default_rng(5), 0, 0, 120
    for _ in range(tries):
        x = np.zeros(300)
        shocks = rng.normal(size=300)
        for k in range(1, 300):
            x[k] = 0.7 * x[k - 1] + shocks[k]
        interval = stats.mean_interval(x, draws=300)
        hits += interval.low <= 0 <= interval.high
        plain_hits += abs(x.mean()) <= 1.96 * x.std() / np.sqrt(300)
    assert hits / tries >= 0.87
    assert plain_hits / tries < 0.7


def test_block_length_follows_the_correlation():
    rng = np.random.default_rng(0)
    white = rng.normal(size=1000)
    walk = np.convolve(white, np.ones(25) / 25, "valid")
    assert stats.block_length(white) <= 5
    assert stats.block_length(walk) >= 20
    assert stats.block_length(np.ones(50)) == 1


def test_bootstrap_means_equal_a_naive_resampling():
    x = np.arange(10.0)
    fast = stats.bootstrap_means(x, block=4, draws=50, seed=3)
    rng = np.random.Generator(np.random.Philox(3))
    starts = rng.integers(0, 10, size=(50, 3))
    naive = [
        np.concatenate([x[(s + np.arange(4)) % 10] for s in row])[:10].mean() for row in starts
    ]
    np.testing.assert_allclose(fast, naive)


def test_holm_against_a_worked_example():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    with_gap = stats.holm([0.02, float("nan"), 0.03])
    assert with_gap[0] == pytest.approx(0.04)
    assert np.isnan(with_gap[1])


def test_seeds_to_resolve_grows_with_noise():
    assert stats.seeds_to_resolve(1.0, 0.1) == 2
    few, many = stats.seeds_to_resolve(0.1, 0.1), stats.seeds_to_resolve(0.05, 0.1)
    assert few < many
    assert stats.seeds_to_resolve(0.0, 0.1) is None


def test_terminal_text_has_no_control_characters(tmp_path):
    paths = pair(tmp_path)
    evil = tmp_path / "ev\x1b[31mil|`x`"
    write_run(evil, loss=learning(80), optimizer={"name": "muon", "lr": 1.0})
    summary, _ = analyse(config([paths[0], str(evil)], tmp_path))
    assert "\x1b" not in verdict.terminal_text(summary)
    record = verdict.decision_record(summary)
    assert "\x1b" not in record
    assert "\\|\\`x\\`" in record


def with_table(path, **sets):
    rows = [{"data": data, "way": "chain T=0", "acceptance": value} for data, value in sets.items()]
    (path / "eval_table.json").write_text(json.dumps({"step": 1, "rows": rows}))


def test_transfer_is_shown_and_does_not_decide(tmp_path):
    paths = [Path(path) for path in pair(tmp_path, seeds=(0, 1, 2), gain=0.2)]
    for number, path in enumerate(paths):
        gain = 0.1 if "muon" in path.name else 0.0
        with_table(path, gsm8k=1.5 - gain + 0.001 * number, mbpp=2.0 + gain + 0.002 * number)
    summary, _ = analyse(config([str(p) for p in paths], tmp_path))
    rows = {row["data"]: row for row in summary["transfer"]}
    assert rows["gsm8k"]["across"].mean < -0.09
    assert rows["mbpp"]["across"].low > 0
    assert rows["gsm8k"]["p_holm"] >= rows["gsm8k"]["across"].p
    assert summary["verdict"]["pairs"]["muon"]["decision"] == "adopt"
    text = verdict.decision_record(summary)
    assert "## Transfer" in text
    assert "changes sign on gsm8k" in text
    assert "gsm8k" in report.transfer_sections(summary)[0]
    (paths[0] / "eval_table.json").unlink()
    assert analyse(config([str(p) for p in paths], tmp_path))[0]["transfer"] == []
    json.dumps(plain(summary), allow_nan=False)


def test_known_seed_noise_judges_an_arm_of_one_run(tmp_path):
    losses = {0: 4.0, 1: 4.01, 2: 3.99, 3: 4.005}
    baseline = [
        write_run(tmp_path / f"adamw-{seed}", loss=learning(40), seed=seed,
                  digests=chain(40, 0), evaluation=evaluation(loss))
        for seed, loss in losses.items()
    ]  # fmt: skip
    for seed in losses:  # one order, other initial weights: repeats on the same inputs
        document = json.loads((baseline[seed] / "run.json").read_text())
        document["config"] |= {"seed": 0, "init_seed": seed}
        (baseline[seed] / "run.json").write_text(json.dumps(document))
    for name, loss, decision in (("better", 3.8, "adopt"), ("same", 3.995, "undecided")):
        arm = write_run(tmp_path / name, loss=learning(40), optimizer={"name": name},
                        digests=chain(40, 0), evaluation=evaluation(loss))  # fmt: skip
        runs_ = [str(path) for path in (*baseline, arm)]
        plain_, _ = analyse(config(runs_, tmp_path))
        assert plain_["verdict"]["pairs"][name]["decision"] == "undecided"
        known, _ = analyse(config(runs_, tmp_path, noise=Noise.baseline))
        row = known["pairs"][name]["heldout_loss"]
        assert row["noise"] == pytest.approx(2**0.5 * np.std(list(losses.values()), ddof=1))
        assert known["verdict"]["pairs"][name]["decision"] == decision
        assert known["left_out"] == []
    with pytest.raises(ConfigError, match="known from 1 runs"):
        analyse(config([str(baseline[0]), str(arm)], tmp_path, noise=Noise.baseline))


def test_a_sweeps_trials_are_named_by_their_arm(tmp_path):
    trial = tmp_path / "gdn-muon-0123456789"
    (trial / "run").mkdir(parents=True)
    assert runs.name_of(trial / "run") == "run"
    (trial / "trial.json").write_text("{}")
    assert runs.name_of(trial / "run") == "gdn-muon"
    assert runs.name_of(tmp_path / "adamw-seed1") == "adamw-seed1"
    assert runs.arm_name(["gdn_muon_pe8"] * 3) == "gdn_muon_pe8"
