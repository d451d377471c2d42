"""What a run directory holds: going on from it, branching from it, and refusing to mix two runs."""

import json
import shutil

import pytest
from tiny_cache import tiny_config
from trainer_tools import equal, lines_of, parameters, stop_after

from shared.errors import (
    ConfigError,
    DataError,
    Interrupted,
    MismatchError,
)
from shared.log import read_json_lines
from shared.record import differences, read_record
from shared.store import Store
from stage2_train import build, checkpoint, trainer
from stage2_train.build import open_source, train_run
from stage2_train.config import Dtype
from stage2_train.schedule import build_schedule


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_trap_25_resuming_is_bit_equal(cache, tmp_path, optimizer, monkeypatch):
    straight = tiny_config(cache, tmp_path / "a", steps=8, optimizer=optimizer)
    train_run(straight)
    parts = tiny_config(cache, tmp_path / "b", steps=8, optimizer=optimizer)
    stop_after(monkeypatch, 3)
    with pytest.raises(Interrupted) as caught:
        train_run(parts)
    assert caught.value.exit_code == 4
    assert checkpoint.steps(tmp_path / "b") == [3]
    monkeypatch.undo()
    train_run(parts)
    equal(parameters(tmp_path / "a"), parameters(tmp_path / "b"))
    for key in ("digest", "loss", "heldout", "tokens", "supervised"):
        results = [read_record(tmp_path / name).result[key] for name in "ab"]
        assert results[0] == results[1]
    for name in ("metrics.jsonl", "digests.jsonl"):
        a, b = (read_json_lines(tmp_path / run / name) for run in "ab")
        timing = ("time", "seconds", "data_wait")
        assert [{k: v for k, v in line.items() if k not in timing} for line in a] == [
            {k: v for k, v in line.items() if k not in timing} for line in b
        ]
    assert [s["from_step"] for s in read_record(tmp_path / "b").sessions] == [0, 3]


@pytest.mark.slow
def test_trap_25_resuming_exactly_at_an_epochs_end(cache, tmp_path, monkeypatch):
    keys = {"batch__rows_per_step": 1, "trainer__steps": None, "trainer__epochs": 2.0}
    source = open_source(tiny_config(cache, tmp_path / "a", **keys))
    boundary = source.plan.first_row(1)
    assert source.steps == source.plan.total_rows(2)
    train_run(tiny_config(cache, tmp_path / "a", **keys))
    stop_after(monkeypatch, boundary)
    with pytest.raises(Interrupted):
        train_run(tiny_config(cache, tmp_path / "b", **keys))
    monkeypatch.undo()
    train_run(tiny_config(cache, tmp_path / "b", **keys))
    equal(parameters(tmp_path / "a"), parameters(tmp_path / "b"))
    epochs = [line["epoch"] for line in lines_of(tmp_path / "b")]
    assert epochs == [0] * boundary + [1] * (source.steps - boundary)


@pytest.mark.slow
def test_work_that_a_kill_lost_is_done_again_and_counted_once(cache, tmp_path, monkeypatch):
    cfg = tiny_config(cache, tmp_path / "run", steps=6, trainer__checkpoint_every=2)
    original = trainer.update

    def update(job, state, batches, metrics):
        if state.step == 5:
            raise KeyboardInterrupt  # as hard as a kill: nothing is saved
        return original(job, state, batches, metrics)

    monkeypatch.setattr(trainer, "update", update)
    with pytest.raises(KeyboardInterrupt):
        train_run(cfg)
    assert len(lines_of(tmp_path / "run")) == 5
    monkeypatch.undo()
    train_run(cfg)
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    train_run(tiny_config(cache, tmp_path / "straight", steps=6))
    equal(parameters(tmp_path / "run"), parameters(tmp_path / "straight"))


@pytest.mark.slow
def test_another_configuration_in_a_run_directory_is_refused_by_key(cache, tmp_path, monkeypatch):
    stop_after(monkeypatch, 2)
    with pytest.raises(Interrupted):
        train_run(tiny_config(cache, tmp_path / "run"))
    monkeypatch.undo()
    with pytest.raises(MismatchError, match=r"optimizer\.lr was 0\.01, is 0\.5; seed was 0, is 3"):
        train_run(tiny_config(cache, tmp_path / "run", optimizer__lr=0.5, seed=3))
    store = Store.open(cache)
    old = store.snapshot()
    store.write_snapshot(old.rows()[:-1], {})  # `latest` is another data set now
    try:
        with pytest.raises(MismatchError, match=r"cache\.snapshot"):
            train_run(tiny_config(cache, tmp_path / "run"))
        cfg = tiny_config(cache, tmp_path / "run", loader__workers=1, trainer__keep=5)
        cfg.cache.snapshot = old.id
        train_run(cfg)
    finally:
        store.write_snapshot(old.rows(), {"name": "tiny"})


def test_errors_before_the_run_leave_nothing_behind(cache, tmp_path):
    for change, error in [
        ({"trainer__dtype": Dtype.float16}, ConfigError),
        ({"batch__tokens_per_row": 5}, DataError),
        ({"device": "quantum"}, ConfigError),
        ({"cache__snapshot": "nonesuch"}, Exception),
    ]:
        with pytest.raises(error):
            train_run(tiny_config(cache, tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"file, not a directory"):
        train_run(tiny_config(cache, tmp_path / "file" / "run"))


@pytest.mark.slow
def test_a_finished_run_that_lost_its_last_checkpoint_makes_it_again(cache, tmp_path):
    cfg = tiny_config(cache, tmp_path / "run", steps=4, trainer__checkpoint_every=2)
    first, before = train_run(cfg), parameters(tmp_path / "run")
    assert train_run(cfg)["was_finished"]
    shutil.rmtree(checkpoint.find(tmp_path / "run", "last"))
    with pytest.raises(MismatchError, match=r"step-000004 is gone.*checkpoint=step-000002"):
        checkpoint.find(tmp_path / "run", "last")
    again = train_run(cfg)
    assert "was_finished" not in again
    assert (again["digest"], again["loss"]) == (first["digest"], first["loss"])
    equal(before, parameters(tmp_path / "run"))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_two_processes_cannot_train_in_one_directory(cache, tmp_path):
    lock = build._lock(tmp_path / "run")
    with pytest.raises(MismatchError, match="another process"):
        train_run(tiny_config(cache, tmp_path / "run"))
    lock.release()


def test_differences_are_dotted_leaves():
    a, b = {"x": {"y": 1, "z": 2}, "w": [1]}, {"x": {"y": 1, "z": 3}, "w": [1], "v": None}
    assert differences(a, b) == [("x.z", 2, 3)]
    assert json.loads(json.dumps(a)) == a


@pytest.mark.slow
def test_a_branch_with_the_same_optimizer_is_the_parents_continuation(cache, tmp_path):
    parent = tiny_config(cache, tmp_path / "parent", steps=8, trainer__checkpoint_every=4)
    train_run(parent)
    child = tiny_config(cache, tmp_path / "child", steps=8)
    child.branch.run_dir, child.branch.checkpoint = str(tmp_path / "parent"), "step-000004"
    result = train_run(child)
    equal(parameters(tmp_path / "parent"), parameters(tmp_path / "child"))
    assert result["digest"] == read_record(tmp_path / "parent").result["digest"]
    record = read_record(tmp_path / "child")
    assert record.parent["step"] == 4
    assert (record.parent["optimizer"], record.parent["schedule"]) == ("kept", "continued")
    assert [line["step"] for line in lines_of(tmp_path / "child")] == [5, 6, 7, 8]


@pytest.mark.slow
def test_a_branch_with_another_optimizer_drops_states_and_warms_up_again(
    cache, tmp_path, capsys, monkeypatch
):
    train_run(tiny_config(cache, tmp_path / "parent", steps=4))
    child = tiny_config(cache, tmp_path / "child", steps=14, optimizer="muon")
    child.schedule.warmup = 5
    child.branch.run_dir = str(tmp_path / "parent")
    stop_after(monkeypatch, 7)
    with pytest.raises(Interrupted):
        train_run(child)
    monkeypatch.undo()
    assert "optimizer states dropped (exp_avg of " in capsys.readouterr().err
    train_run(child)  # goes on from its own checkpoint, not from the parent's
    record = read_record(tmp_path / "child")
    assert record.parent["optimizer"] == "dropped"
    assert record.parent["schedule"] == "restarted"
    factor = build_schedule(child.schedule, 10)
    lines = lines_of(tmp_path / "child")
    assert [line["step"] for line in lines] == list(range(5, 15))
    assert [line["lr"] for line in lines] == [0.01 * factor(step) for step in range(10)]
    # The data goes on where the parent stopped.
    straight = train_run(tiny_config(cache, tmp_path / "straight", steps=14))
    assert record.result["digest"] == straight["digest"]
    other = tiny_config(cache, tmp_path / "other", steps=3, seed=5)
    other.branch.run_dir = str(tmp_path / "parent")
    train_run(other)
    assert read_record(tmp_path / "other").parent["data"] == "begun anew"
    short = tiny_config(cache, tmp_path / "short", steps=4)
    short.branch.run_dir = str(tmp_path / "parent")
    with pytest.raises(MismatchError, match="has 4 updates, the run plans 4"):
        train_run(short)
