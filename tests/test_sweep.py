"""Sweeps: plans, resumption after kills, retries, the table, maps and the robust pick."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from shared.config import to_plain, typed
from shared.errors import ConfigError, MismatchError
from stage2_train import maps, sweep, sweep_halving, sweep_job, sweep_plan, sweep_report
from stage2_train.build import train_run
from stage2_train.config import ScheduleConfig, ScheduleName, SweepConfig, TrainConfig
from stage2_train.schedule import build_schedule
from tests import browser
from tests.tiny_cache import tiny_cache, tiny_config

ROOT = Path(__file__).resolve().parent.parent


def plan_file(root, **document):
    """A plan over the tiny cache."""
    tiny = to_plain(tiny_config(root / "cache", root / "unused", steps=4))
    train = {
        f"{group}.{key}": value
        for group in ("drafter", "batch", "loader", "trainer")
        for key, value in tiny[group].items()
        if key not in ("hidden_size", "mask_token_id")
    }
    train |= {"cache.root": str(root / "cache")}
    document = {"train": train | document.pop("train", {}), "eval": {"decode": False}} | document
    path = root / "plan.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def config(root, **more):
    return SweepConfig(plan=str(root / "plan.yaml"), out=str(root / "out"), **more)


def test_a_plan_is_a_product_of_arms_grid_and_seeds(tmp_path):
    path = plan_file(
        tmp_path,
        arms={"adamw": {"optimizer": "adamw"},
              "muon": {"optimizer": "muon", "grid": {"optimizer.polynomial": ["kj", "svd"]}}},
        grid={"optimizer.lr": {"log": [1e-4, 1e-2, 3]}},
        seeds=[0, 1],
    )  # fmt: skip
    plan = sweep_plan.read_plan(path)
    assert len(plan.trials) == 3 * 2 + 3 * 2 * 2
    assert len({trial.id for trial in plan.trials}) == len(plan.trials)
    assert {t.varied["optimizer.lr"] for t in plan.trials} == {1e-4, 1e-3, 1e-2}
    assert plan.trials == sweep_plan.read_plan(path).trials
    assert all(t.overrides["init_seed"] == t.overrides["seed"] for t in plan.trials)


def test_random_draws_are_a_pure_function(tmp_path):
    path = plan_file(
        tmp_path, grid={"optimizer.lr": {"log": [1e-4, 1e-2, 3]}, "batch.rows_per_step": [1, 2]},
        random={"trials": 20, "seed": 3},
    )  # fmt: skip
    first, again = sweep_plan.read_plan(path), sweep_plan.read_plan(path)
    lrs = [trial.varied["optimizer.lr"] for trial in first.trials]
    assert first.trials == again.trials
    assert len(set(lrs)) > 15
    assert all(1e-4 <= lr <= 1e-2 for lr in lrs)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"gird": {}}, "gird"),
        ({"grid": {"optimizer.lr": 3}}, r"grid\.optimizer\.lr"),
        ({"grid": {"optimizer.lr": {"log": [1, 0.1, 3]}}}, r"grid\.optimizer\.lr"),
        ({"seeds": "all"}, "seeds"),
        ({"random": {"trails": 3}}, "trails"),
        ({"halving": {"steps": [4, 2]}}, "halving"),
        ({"halving": {"steps": [2, 4], "keep": 1.0}}, "halving"),
        ({"arms": {"a": {"cooldowns": {"trunk": "t", "at": [10]}}}}, "cooldowns"),
        ({"arms": {"a": {"seed": 3}}}, "seed is set by the sweep"),
        ({"grid": {"init_seed": [0, 1]}}, "init_seed is set by the sweep"),
        ({"train": {"run_dir": "runs/one"}}, "run_dir is set by the sweep"),
        ({"eval": {"run_dir": "runs/one"}}, "run_dir is set by the sweep"),
        ({"arms": {"a": {1: 2}}, "train": {}}, "1 is not a key"),
    ],
)
def test_a_wrong_plan_names_its_key(tmp_path, document, named):
    with pytest.raises(ConfigError, match=named):
        sweep_plan.read_plan(plan_file(tmp_path, **document))


def test_a_trial_is_named_so_that_hydra_takes_it():
    for arm in ("漢字", "<b>|`$x`", "../..", "a\nb", "x" * 300):
        name = sweep_plan.trial_id(arm, {})
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,51}", name)


def test_cooldowns_are_branches_of_one_trunk(tmp_path):
    path = plan_file(
        tmp_path, seeds=[0, 3],
        arms={"adamw": {"optimizer": "adamw", "schedule.warmup": 5,
                        "cooldowns": {"trunk": "runs/trunk-{seed}", "at": [20, 40], "decay": 10}}},
    )  # fmt: skip
    trials = sweep_plan.read_plan(path).trials
    assert [(t.varied["seed"], t.varied["cooldown.at"]) for t in trials] == [
        (0, 20), (0, 40), (3, 20), (3, 40)
    ]  # fmt: skip
    assert trials[3].overrides["branch.run_dir"] == "runs/trunk-3"
    for trial in trials:
        at, total = trial.varied["cooldown.at"], trial.overrides["trainer.steps"]
        schedule = ScheduleConfig(name=ScheduleName.wsd, warmup=5, decay=10)
        factor = build_schedule(schedule, total)
        assert factor(at - 1) == 1.0 > factor(at) > factor(total - 1) > 0
        assert total - at == 10, "equal cooldowns"


def table(losses, rung=0):
    """Rows of a rung: setting -> losses of its seeds (None: failed)."""
    return [
        {"arm": "a", "state": "failed" if loss is None else "done", "heldout_loss": loss,
         "set.optimizer.lr": lr, "set.seed": seed, "run_dir": f"{lr}-{seed}", "rung": rung}
        for lr, values in losses.items() for seed, loss in enumerate(values)
    ]  # fmt: skip


def test_halving_keeps_the_better_half_of_each_arm(tmp_path):
    rows = table({1e-4: [3.0, 3.2], 1e-3: [2.0, 2.2], 1e-2: [1.0, None], 3e-3: [2.5, 2.5]})
    kept = sweep_halving.survivors(rows, 0.5)
    assert {dict(setting[1:])["optimizer.lr"] for setting in kept} == {"0.001", "0.003"}
    path = plan_file(
        tmp_path, arms={"a": {}}, grid={"optimizer.lr": [1e-4, 1e-3, 3e-3, 1e-2]}, seeds=[0, 1],
        halving={"steps": [2, 4], "keep": 0.5},
    )  # fmt: skip
    plan = sweep_plan.read_plan(path)
    first, second = (sweep_halving.rung_of(plan, n, rows) for n in (0, 1))
    assert len(first) == 8
    assert [(t.varied["optimizer.lr"], t.varied["seed"]) for t in second] == [
        (1e-3, 0), (1e-3, 1), (3e-3, 0), (3e-3, 1)
    ]  # fmt: skip
    assert second[0].overrides["branch.run_dir"] == "0.001-0"
    assert {t.overrides["schedule.horizon"] for t in first + second} == {4}
    assert "biased" in sweep_halving.bias(plan.halving, rows)


@pytest.mark.slow
def test_a_halved_sweep_ends_with_the_runs_that_stood_alone(tmp_path, capsys):
    tiny_cache(tmp_path / "cache")
    plan_file(tmp_path, grid={"optimizer.lr": [0.0001, 0.01]}, halving={"steps": [3, 6]})
    assert sweep.sweep(config(tmp_path)) == 0
    assert sweep.sweep(config(tmp_path)) == 0, "the same command finds all done"
    table = {
        row["trial"]: row for row in sweep.results(sorted((tmp_path / "out/trials").glob("*")))
    }
    last = [row for row in table.values() if row["rung"] == 1]
    assert len(table) == 3
    assert len(last) == 1
    cfg = typed(TrainConfig, json.loads(last[0]["config"]))
    cfg.run_dir, cfg.branch.run_dir = str(tmp_path / "alone"), None
    alone = train_run(cfg)
    assert alone["digest"] == last[0]["result.digest"]
    assert alone["loss"] == last[0]["result.loss"]
    page = (tmp_path / "out/report.html").read_text()
    assert "biased towards settings that are fast early" in page
    assert "1 trials of 6 updates" in page


def test_trials_are_dealt_out_over_devices(tmp_path):
    taken = [sweep_job.take_device(tmp_path, ["cuda:0", "cuda:1"], 2) for _ in range(4)]
    assert [device for device, _ in taken] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    taken[1][1].release()
    assert sweep_job.take_device(tmp_path, ["cuda:0", "cuda:1"], 2)[0] == "cuda:1"


def test_the_launcher_is_asked_for_what_the_configuration_says(tmp_path, monkeypatch):
    seen = {}

    class Process:
        def __init__(self, command, **keys):
            seen["command"], seen["env"] = command, keys["env"]

        def wait(self, timeout):
            return 0

    class Held:
        descriptor = 0

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan_file(tmp_path)
    cfg = config(tmp_path, launcher="joblib", devices=["cuda:0", "cuda:1"], trials_per_device=3)
    sweep.launch(cfg, [tmp_path / "x"], [], Held())
    assert "hydra.launcher.n_jobs=6" in seen["command"]
    assert "devices='cuda:0,cuda:1'" in seen["command"]
    assert any(word.startswith("share='/dev/shm/drafttape-") for word in seen["command"])
    assert seen["env"]["OMP_NUM_THREADS"] >= "1"
    for launcher in ("submitit_slurm", "ray"):
        cfg = config(tmp_path, launcher=launcher, launcher_overrides=["hydra.launcher.x=1"])
        sweep.launch(cfg, [tmp_path / "x"], [], Held())
        assert f"hydra/launcher={launcher}" in seen["command"]
        assert seen["command"][-1] == "hydra.launcher.x=1"
        assert ("share=''" in seen["command"]) == (launcher == "submitit_slurm")


def test_an_unknown_override_fails_before_anything_is_written(tmp_path):
    plan_file(tmp_path, grid={"optimizer.lrr": [1e-3]})
    with pytest.raises(ConfigError, match="lrr"):
        sweep.prepare(config(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_unequal_token_budgets_are_refused(tmp_path):
    plan_file(tmp_path, grid={"batch.rows_per_step": [1, 2]})
    with pytest.raises(ConfigError, match="unequal token budgets"):
        sweep.prepare(config(tmp_path))
    plan_file(tmp_path, grid={"batch.rows_per_step": [1, 2]},
              train={"trainer.steps": None, "trainer.epochs": 2})  # fmt: skip
    plan, _ = sweep.prepare(config(tmp_path))
    assert len(plan.trials) == 2


@pytest.mark.slow
def test_a_changed_plan_is_refused_or_said(tmp_path):
    plan_file(tmp_path, grid={"optimizer.lr": [1e-3, 2e-3]})
    sweep.prepare(config(tmp_path))
    plan_file(tmp_path, grid={"optimizer.lr": [1e-3]})
    with pytest.raises(MismatchError, match="1 trials there"):
        sweep.prepare(config(tmp_path))
    sweep.prepare(config(tmp_path, grow=True))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local", "ray"])
def test_a_sweep_runs_retries_once_and_writes_its_table(tmp_path, launcher, capsys):
    import pyarrow.parquet as pq

    if launcher == "ray":
        pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    tiny_cache(tmp_path / "cache")
    plan_file(
        tmp_path, seeds=[0, 1],
        # The last one can't train: a document is longer than a row.
        arms={"good": {}, "bad": {"batch.tokens_per_row": 4}}, unequal_budgets=True,
    )  # fmt: skip
    assert sweep.sweep(config(tmp_path, launcher=launcher, jobs=2)) == 1
    table = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert [row["state"] for row in table] == ["done", "done", "failed", "failed"]
    assert [row["attempts"] for row in table] == [0, 0, 2, 2]
    assert "tokens_per_row" in table[2]["error"]
    assert all(math.isfinite(row["heldout_loss"]) for row in table[:2])
    assert json.loads(table[0]["config"])["trainer"]["steps"] == 4
    assert (tmp_path / "out" / "report.html").exists()
    said = capsys.readouterr()
    assert "2 of 4 trials done, 2 failed" in said.out
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("metrics.jsonl")}
    assert sweep.sweep(config(tmp_path, launcher=launcher, jobs=2)) == 1
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("metrics.jsonl")}


@pytest.mark.slow
def test_killed_at_random_moments_no_trial_is_lost_or_run_twice(tmp_path):
    tiny_cache(tmp_path / "cache")
    plan_file(
        tmp_path, grid={"optimizer.lr": {"log": [1e-4, 1e-2, 4]}}, seeds=[0],
        train={"trainer.steps": 40, "trainer.checkpoint_every": 5},
    )  # fmt: skip
    words = ["sweep", str(tmp_path / "plan.yaml"), f"out={tmp_path / 'out'}"]
    command = [sys.executable, "-m", "shared.cli", *words]
    rng, kills = random.Random(1), 0
    for _ in range(4):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=rng.uniform(8, 20))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            process.wait()
            kills += 1
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kills >= 1
    folders = sorted((tmp_path / "out" / "trials").glob("*"))
    assert len(folders) == 4
    for folder in folders:
        state = sweep_job.read_state(folder)
        assert state["state"] == "done"
        assert state["attempts"] == 0, "being killed is no failure of the trial"
        lines = (folder / "run/digests.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == list(range(1, 41))


@pytest.mark.slow
def test_a_stopped_sweep_saves_the_trial_in_hand_and_starts_no_other(tmp_path):
    tiny_cache(tmp_path / "cache")
    plan_file(tmp_path, seeds=[0, 1, 2], train={"trainer.steps": 4000})
    words = ["sweep", str(tmp_path / "plan.yaml"), f"out={tmp_path / 'out'}"]
    process = subprocess.Popen([sys.executable, "-m", "shared.cli", *words], cwd=ROOT)
    running = []
    while not running:
        time.sleep(0.2)
        running = list((tmp_path / "out" / "trials").glob("*/run/metrics.jsonl"))
    process.terminate()
    assert process.wait(timeout=60) == 4
    states = sorted(read["state"] for read in map(sweep_job.read_state, trials_of(tmp_path)))
    assert states == ["new", "new", "stopped"]
    assert (tmp_path / "out" / "results.parquet").exists()
    sweep.Lock.take(tmp_path / "out" / "sweep.lock", wait=False).release()


def trials_of(root):
    return list((root / "out" / "trials").iterdir())


@pytest.mark.slow
def test_a_process_that_dies_without_a_word_counts_as_a_failure(tmp_path, monkeypatch):
    tiny_cache(tmp_path / "cache")
    plan_file(tmp_path)
    monkeypatch.setattr(sweep, "launch", lambda cfg, todo, folders, lock: _die(todo))
    assert sweep.sweep(config(tmp_path)) == 1
    state = sweep_job.read_state(next((tmp_path / "out/trials").glob("*")))
    assert state["state"] == "failed"
    assert state["attempts"] == 2
    assert "exit code -9" in state["error"]


def _die(todo):
    for folder in todo:
        sweep_job.write_state(folder, sweep_job.read_state(folder) | {"state": "running"})
    return -9


def rows_of(loss, lrs, batches, seeds=(0, 1), arm="muon", noise=0.0):
    """A results table from a function of log10(lr) and batch."""
    rng, rows = np.random.default_rng(0), []
    for lr in lrs:
        for batch in batches:
            for seed in seeds:
                value = loss(math.log10(lr), batch) + noise * rng.normal()
                rows.append(
                    {
                        "trial": f"{arm}-{lr:g}-{batch}-{seed}", "arm": arm, "state": "done",
                        "attempts": 0, "error": None, "seconds": 1.0, "set.optimizer.lr": lr,
                        "set.batch.rows_per_step": batch, "set.seed": seed,
                        "heldout_loss": value, "accuracy": 0.1, "result.flops": 1e15,
                    }
                )  # fmt: skip
    return rows


LRS = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]


def test_the_robust_pick_is_not_the_lucky_point():
    rows = rows_of(lambda x, b: 3 + (x + 3) ** 2, LRS, [1, 2, 4])
    for row in rows:  # one lucky point beside a cliff
        if row["set.optimizer.lr"] == 1e-2 and row["set.batch.rows_per_step"] == 4:
            row["heldout_loss"] = 2.5
    found = sweep_report.analyse(rows, tolerance=0.01)
    cells = found["cells"]
    assert cells[found["best"]].settings["optimizer.lr"] == 1e-2
    assert cells[found["robust"][0]].settings["optimizer.lr"] == 1e-3
    assert found["near"] == [found["best"]]
    assert len(sweep_report.analyse(rows, tolerance=0.25)["near"]) > 3


def test_the_robust_pick_is_not_an_edge_that_is_worse():
    # as measured: the last rate has one neighbour, and a good one
    values = {5e-4: 6.756, 1.6e-3: 6.253, 5e-3: 6.080, 1.6e-2: 6.162}
    rows = rows_of(lambda x, b: values[min(values, key=lambda lr: abs(math.log10(lr) - x))],
                   list(values), [1])  # fmt: skip
    found = sweep_report.analyse(rows, tolerance=0.01)
    assert found["cells"][found["robust"][0]].settings["optimizer.lr"] == 5e-3


def test_a_point_with_a_failed_trial_never_wins():
    rows = rows_of(lambda x, b: 3 + (x + 3) ** 2, LRS, [1])
    next(r for r in rows if r["set.optimizer.lr"] == 1e-3)["state"] = "failed"
    found = sweep_report.analyse(rows, tolerance=0.01)
    assert found["cells"][found["best"]].settings["optimizer.lr"] != 1e-3


def test_the_parabola_finds_the_best_lr_and_its_interval():
    x = np.repeat(np.linspace(-4, -2, 6), 2)
    noise = 0.01 * np.random.default_rng(0).normal(size=len(x))
    fit = maps.fit_lr("a", (10**x).tolist(), (3 + 0.5 * (x + 3.1) ** 2 + noise).tolist())
    assert fit.low < 10**-3.1 < fit.high
    assert fit.high / fit.low < 1.5
    assert fit.inside
    assert 0.003 < fit.residual < 0.03
    outside = maps.fit_lr("a", (10**x).tolist(), (3 + 0.5 * (x + 6) ** 2 + noise).tolist())
    assert not outside.inside
    assert maps.fit_lr("a", [1e-3, 1e-2], [3.0, 4.0]) is None


def test_the_local_law_predicts_with_an_interval_that_holds():
    rng, inside, tries = np.random.default_rng(1), 0, 200
    budgets = np.array([1e15, 3e15, 1e16, 3e16])
    for _ in range(tries):
        best = 0.3 * budgets**-0.125 * np.exp(0.1 * rng.normal(size=4))
        law = maps.fit_power_law(budgets.tolist(), best.tolist(), at=1e17)
        actual = 0.3 * 1e17**-0.125 * math.exp(0.1 * rng.normal())
        inside += law.low <= actual <= law.high
    assert 0.9 <= inside / tries <= 0.99
    assert maps.fit_power_law([1e15, 1e16], [1e-3, 1e-3], at=1e17) is None


def test_priors_and_rules_are_the_published_ones():
    assert maps.prior_lr(1e20) == pytest.approx(0.3118 * 1e20**-0.125)
    assert maps.prior_batch(1e20) == pytest.approx(0.2920 * 1e20**0.3271)
    assert maps.lr_rules(1e-4, 256, 1024) == pytest.approx({"linear": 4e-4, "square root": 2e-4})
    curve = maps.surge(0.1, 1.0, np.array([1, 100, 1e6]))
    assert curve[0] == pytest.approx(math.erf(0.1 / math.sqrt(2)))
    assert curve[0] < curve[1] < curve[2] <= 1


def two_hundred():
    """200 trials: 5 learning rates, 5 batches, 2 seeds, 4 arms."""
    rows = []
    for number, arm in enumerate(("adamw", "kj", "<b>pe</b>", "sgd")):
        rows += rows_of(lambda x, b, n=number: 3 + n / 10 + (x + 3) ** 2 + abs(b - 4) / 50, LRS,
                        [1, 2, 4, 8, 16], arm=arm, noise=0.01)  # fmt: skip
    return rows


@pytest.mark.slow
def test_the_report_of_200_trials_is_small(tmp_path):
    rows = two_hundred()
    assert len(rows) == 200
    found = sweep_report.analyse(rows, tolerance=0.01)
    sweep_report.write(tmp_path / "report.html", "two hundred", rows, found)
    assert (tmp_path / "report.html").stat().st_size < 5e6
    assert "&lt;b&gt;pe" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_the_report_of_200_trials_in_a_browser(tmp_path):
    rows = two_hundred()
    found = sweep_report.analyse(rows, tolerance=0.01)
    sweep_report.write(tmp_path / "report.html", "two hundred", rows, found)
    script = """
      const begun = performance.timing.navigationStart;
      return { numbers: [...document.querySelectorAll('#table-trials [data-key]')].map(
        (cell) => [cell.dataset.key, cell.dataset.value]),
        plots: document.querySelectorAll('.plot').length, ready: performance.now() };"""
    page = browser.load(tmp_path / "report.html", script=script)
    assert page.console == []
    shown = json.loads(browser.result(page))
    numbers = dict(shown["numbers"])
    for row in rows:
        assert float(numbers[f"{row['trial']}.heldout_loss"]) == pytest.approx(
            row["heldout_loss"], rel=1e-12
        )
    assert shown["plots"] == 5


def test_parquet_takes_mixed_columns(tmp_path):
    import pyarrow.parquet as pq

    rows = [{"a": 1, "b": "x"}, {"a": 1.5, "c": [1, 2]}, {"b": 3}]
    sweep.write_parquet(tmp_path / "t.parquet", rows)
    back = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["a"] for row in back] == [1.0, 1.5, None]
    assert back[2]["b"] == "3"


@pytest.mark.slow
def test_dry_run_runs_nothing(tmp_path, capsys):
    plan_file(tmp_path, seeds=[0, 1, 2])
    assert sweep.sweep(config(tmp_path, dry_run=True)) == 0
    assert "3 trials" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_trial_notices_that_its_parent_is_gone():
    """A process whose parent ends gets SIGTERM, as a killed sweep's trials must."""
    child = (
        "import signal, sys, time; from stage2_train.sweep_job import watch_parent;"
        "signal.signal(signal.SIGTERM, lambda *a: (print('saved', flush=True), sys.exit(0)));"
        "watch_parent(0.05); print('up', flush=True); time.sleep(30)"
    )
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]);"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout.readline() == "up\n"
    process.kill()
    begun = time.monotonic()
    assert process.stdout.readline() == "saved\n"
    assert time.monotonic() - begun < 10
    process.stdout.close()
    process.wait()
