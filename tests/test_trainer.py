"""The training loop on a tiny cache that was written through the Store."""

import dataclasses
import json
import math
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_cache import MASK_TOKEN, WIDTH, tiny_cache, tiny_config

from shared.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    Interrupted,
    MismatchError,
    TrainingError,
)
from shared.log import read_json_lines
from shared.record import differences, read_record
from shared.store import Store
from stage2_train import build, checkpoint, trainer
from stage2_train.batch import Batch
from stage2_train.build import assemble, begin, mask_token, open_source, train, train_run
from stage2_train.config import Dtype, ScheduleConfig, ScheduleName, Tracker
from stage2_train.heldout import heldout
from stage2_train.loader import heldout_batches
from stage2_train.ranks import Ranks
from stage2_train.schedule import build_schedule


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny") / "cache"
    tiny_cache(root)
    return root


def _parameters(run_dir, which="last"):
    return checkpoint.load(checkpoint.find(Path(run_dir), which))[0]


def _equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def _lines(run_dir, key="loss"):
    return [line for line in read_json_lines(Path(run_dir) / "metrics.jsonl") if key in line]


def _job(cfg, tmp_path):
    source = open_source(cfg)
    record = begin(source, tmp_path)
    device = torch.device("cpu")
    tmp_path.mkdir(exist_ok=True)
    return assemble(source, record, tmp_path, device, Ranks(device))


def _gradients(job, state=None):
    """Gradients of the first step, before clipping."""
    state = state or trainer.restore(job)
    rows = job.plan.step(state.step, job.total_rows)
    weight = trainer.denominator(job, job.plan.slot_counts(rows))
    share = trainer.accumulate(job, rows, job.loader.batches(rows), weight)
    assert share.error is None
    return {name: p.grad.clone() for name, p in job.drafter.named_parameters()}


@pytest.mark.slow
def test_a_run_learns_and_says_what_it_did(cache, tmp_path, capsys):
    cfg = tiny_config(cache, tmp_path / "run", steps=15, optimizer="muon")
    assert train(cfg) == 0
    assert "15 updates" in capsys.readouterr().out
    lines = _lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 16))
    assert lines[-1]["loss"] < lines[0]["loss"]
    for key in ("tokens", "supervised", "blocks", "flops", "seconds"):
        assert all(a[key] < b[key] for a, b in pairwise(lines))
    record = read_record(tmp_path / "run")
    assert record.result["step"] == 15
    assert record.result["digest"] == record.last["digest"]
    assert record.config["drafter"]["mask_token_id"] == MASK_TOKEN
    assert record.codecs == ["lossless"]
    digests = read_json_lines(tmp_path / "run" / "digests.jsonl")
    assert [line["step"] for line in digests] == list(range(1, 16))
    assert digests[-1]["digest"] == record.result["digest"]
    assert "muon" in (tmp_path / "run" / "routing.txt").read_text()
    # The same command again says that it is done, and changes nothing.
    before = (tmp_path / "run" / "run.json").read_bytes()
    assert train(cfg) == 0
    assert "was finished already" in capsys.readouterr().out
    assert (tmp_path / "run" / "run.json").read_bytes() == before


@pytest.mark.slow
def test_equal_inputs_have_equal_digests_whatever_the_optimizer(cache, tmp_path):
    results = [
        train_run(tiny_config(cache, tmp_path / name, steps=3, optimizer=name, **keys))
        for name, keys in [("adamw", {}), ("muon", {"loader__workers": 1}), ("sgd", {})]
    ]
    assert len({result["digest"] for result in results}) == 1
    other = train_run(tiny_config(cache, tmp_path / "seed", steps=3, seed=1))
    assert other["digest"] != results[0]["digest"]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_trap_25_resuming_is_bit_equal(cache, tmp_path, optimizer, monkeypatch):
    straight = tiny_config(cache, tmp_path / "a", steps=8, optimizer=optimizer)
    train_run(straight)
    parts = tiny_config(cache, tmp_path / "b", steps=8, optimizer=optimizer)
    _stop_after(monkeypatch, 3)
    with pytest.raises(Interrupted) as caught:
        train_run(parts)
    assert caught.value.exit_code == 4
    assert checkpoint.steps(tmp_path / "b") == [3]
    monkeypatch.undo()
    train_run(parts)
    _equal(_parameters(tmp_path / "a"), _parameters(tmp_path / "b"))
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


def _stop_after(monkeypatch, step):
    """SIGTERM arrives while update `step` (1-based) is computed."""
    original = trainer.update

    def update(job, state, batches, metrics):
        line = original(job, state, batches, metrics)
        if state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return line

    monkeypatch.setattr(trainer, "update", update)


@pytest.mark.slow
def test_trap_25_resuming_exactly_at_an_epochs_end(cache, tmp_path, monkeypatch):
    keys = {"batch__rows_per_step": 1, "trainer__steps": None, "trainer__epochs": 2.0}
    source = open_source(tiny_config(cache, tmp_path / "a", **keys))
    boundary = source.plan.first_row(1)
    assert source.steps == source.plan.total_rows(2)
    train_run(tiny_config(cache, tmp_path / "a", **keys))
    _stop_after(monkeypatch, boundary)
    with pytest.raises(Interrupted):
        train_run(tiny_config(cache, tmp_path / "b", **keys))
    monkeypatch.undo()
    train_run(tiny_config(cache, tmp_path / "b", **keys))
    _equal(_parameters(tmp_path / "a"), _parameters(tmp_path / "b"))
    epochs = [line["epoch"] for line in _lines(tmp_path / "b")]
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
    assert len(_lines(tmp_path / "run")) == 5
    monkeypatch.undo()
    train_run(cfg)
    assert [line["step"] for line in _lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    train_run(tiny_config(cache, tmp_path / "straight", steps=6))
    _equal(_parameters(tmp_path / "run"), _parameters(tmp_path / "straight"))


@pytest.mark.parametrize("epochs", [1.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_trap_35_exactly_the_planned_updates_and_the_schedules_last_lr(cache, tmp_path, epochs):
    keys = {"trainer__epochs": epochs, "optimizer__lr": 0.5}
    result = train_run(tiny_config(cache, tmp_path / "run", steps=2, **keys))
    lines = _lines(tmp_path / "run")
    assert result["step"] == len(lines) == 2
    factor = build_schedule(ScheduleConfig(), 2)
    assert [line["lr"] for line in lines] == [0.5 * factor(0), 0.5 * factor(1)]
    assert lines[-1]["lr"] > 0
    by_epochs = train_run(tiny_config(cache, tmp_path / "epochs", steps=None, **keys))
    source = open_source(tiny_config(cache, tmp_path / "epochs", steps=None, **keys))
    assert by_epochs["step"] == math.ceil(source.total_rows / 2)


@pytest.mark.slow
def test_trap_30_group_ratios_stay_through_warmup_and_decay(cache, tmp_path):
    schedule = ScheduleConfig(name=ScheduleName.cosine, warmup=4)
    cfg = tiny_config(cache, tmp_path / "run", steps=12, optimizer="muon", schedule=schedule)
    cfg.optimizer.adamw_lr = 1e-3
    train_run(cfg)
    lines = _lines(tmp_path / "run")
    groups = [key for key in lines[0] if key.startswith("lr_")]
    assert groups
    for group in groups:
        ratios = [line[group] / line["lr"] for line in lines]
        assert max(ratios) - min(ratios) < 1e-9


def test_trap_24_rows_and_accumulation_give_one_gradient(cache, tmp_path):
    """The same documents in one long row, in four rows of a step, and alone: one gradient."""
    store = Store.open(cache)
    snapshot = store.snapshot()
    longest = int(snapshot.num_tokens.max())
    found = []
    for name, tokens, rows in [("one", 10_000, 1), ("many", longest, 99)]:
        cfg = tiny_config(
            cache,
            tmp_path / name,
            batch__tokens_per_row=tokens,
            batch__rows_per_step=rows,
            trainer__epochs=1.0,
            trainer__steps=None,
        )
        with _job(cfg, tmp_path / name) as job:
            assert job.steps == 1
            assert len(job.plan.step(0, job.total_rows)) == (1 if rows == 1 else job.total_rows)
            assert job.total_rows == 1 or job.total_rows > 4
            found.append(_gradients(job))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_trap_27_norms_move_and_masters_are_float32(cache, tmp_path):
    cfg = tiny_config(
        cache,
        tmp_path / "run",
        steps=100,
        trainer__dtype=Dtype.bfloat16,
        optimizer__lr=6e-4,
        batch__tokens_per_row=24,
        batch__rows_per_step=1,
        batch__anchors_per_sample=2,
        drafter__layer_types=["linear_attention"],
    )
    with _job(cfg, tmp_path / "start") as job:
        start = {n: p.detach().clone() for n, p in job.drafter.named_parameters() if "norm" in n}
    assert sum(bool((tensor == 1).all()) for tensor in start.values()) == len(start) - 1
    train_run(cfg)
    parameters = _parameters(tmp_path / "run")
    assert {tensor.dtype for tensor in parameters.values()} == {torch.float32}
    assert all((parameters[name] != tensor).any() for name, tensor in start.items())
    with _job(cfg, tmp_path / "run") as job:
        trainer.restore(job)
        assert {p.dtype for p in job.drafter.parameters()} == {torch.float32}
        assert job.drafter.dtype is torch.bfloat16


def test_trap_31_the_frozen_head_is_the_targets_and_never_changes(cache, tmp_path):
    store = Store.open(cache)
    with _job(tiny_config(cache, tmp_path / "run", steps=3), tmp_path / "run") as job:
        assert job.embed is job.head
        before = job.head.clone()
        names = [name for name, _ in job.drafter.named_parameters()]
        assert not any("embed" in name or "head" in name for name in names)
        owned = {id(p) for group in job.optimizer.param_groups for p in group["params"]}
        assert id(job.head) not in owned
        trainer.run(job)
        assert torch.equal(job.head, before)
    assert store.target_assets().info["tied"]


def test_trap_36_a_stored_nan_names_the_sample_and_ends_the_run(tmp_path):
    tiny_cache(tmp_path / "cache", poison=5)
    cfg = tiny_config(tmp_path / "cache", tmp_path / "run", steps=None, trainer__epochs=1.0)
    with pytest.raises(TrainingError, match=r"stored states are not finite.*data\.jsonl:6") as e:
        train_run(cfg)
    assert e.value.exit_code == 1
    assert e.value.where.startswith("sample ")
    assert not read_record(tmp_path / "run").result
    for step in checkpoint.steps(tmp_path / "run"):
        model = _parameters(tmp_path / "run", checkpoint.name_of(step))
        assert all(tensor.isfinite().all() for tensor in model.values())


@pytest.mark.slow
def test_trap_36_a_bad_update_is_skipped_counted_and_ends_the_run_after_a_few(
    cache, tmp_path, monkeypatch, capsys
):
    original = trainer.forward

    def broken(bad):
        def forward(job, batch, denominator):
            loss, stats = original(job, batch, denominator)
            calls.append(None)
            return (loss * float("nan") if len(calls) in bad else loss), stats

        return forward

    calls: list = []
    cfg = tiny_config(cache, tmp_path / "some", steps=6)
    monkeypatch.setattr(trainer, "forward", broken({3, 7}))  # rows of updates 2 and 4
    result = train_run(cfg)
    assert result["skipped"] == 2
    assert [line["step"] for line in _lines(tmp_path / "some") if line["skipped"]] == [2, 4]
    assert "samples" in capsys.readouterr().err
    assert all(t.isfinite().all() for t in _parameters(tmp_path / "some").values())
    calls.clear()
    monkeypatch.setattr(trainer, "forward", broken(range(3, 99)))
    cfg = tiny_config(cache, tmp_path / "all", steps=20)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        train_run(cfg)
    assert len(_lines(tmp_path / "all")) == 4


def test_trap_37_nan_is_never_the_best(cache, tmp_path, monkeypatch):
    losses = iter([3.0, float("nan"), 2.0, 2.5, float("nan")])
    monkeypatch.setattr(
        build, "heldout", lambda *_, **__: {"heldout_loss": next(losses), "samples": []}
    )
    cfg = tiny_config(cache, tmp_path / "run", steps=5, trainer__eval_every=1, trainer__keep=1)
    best = []
    original = trainer.save

    def save(*arguments):
        original(*arguments)
        arguments[-1].wait()
        best.append(checkpoint.best(tmp_path / "run")["step"])

    monkeypatch.setattr(trainer, "save", save)
    train_run(cfg)
    assert best == [1, 1, 3, 3, 3]
    assert checkpoint.steps(tmp_path / "run") == [3, 5]
    assert checkpoint.find(tmp_path / "run", "best").name == "step-000003"


def test_trap_38_nothing_to_learn_or_another_data_set_is_an_error(cache, tmp_path):
    tiny_cache(tmp_path / "unsupervised", masked=False)
    with pytest.raises(DataError, match="supervised"):
        train_run(tiny_config(tmp_path / "unsupervised", tmp_path / "run"))
    gone = tiny_cache(tmp_path / "gone")
    for name in gone.shard_ids():
        (tmp_path / "gone" / "shards" / f"{name}.json").unlink()
    with pytest.raises(DataError, match="14 of 14 samples are not in the cache"):
        train_run(tiny_config(tmp_path / "gone", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_trap_39_a_damaged_shard_ends_training_with_its_name(tmp_path, workers):
    store = tiny_cache(tmp_path / "cache")
    index = store.committed()
    plan = open_source(tiny_config(tmp_path / "cache", tmp_path / "run")).plan
    name = plan.snapshot.ids[plan.row(3).samples[0]]
    shard = tmp_path / "cache" / "shards" / index[name][0]
    for path in shard.rglob("*"):
        if path.is_file() and path.stat().st_size > 2000:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
    cfg = tiny_config(tmp_path / "cache", tmp_path / "run", loader__workers=workers)
    with pytest.raises(CorruptionError, match=index[name][0]):
        train_run(cfg)


def test_trap_41_the_same_weights_have_the_same_held_out_loss(cache, tmp_path):
    losses = set()
    for seed in (0, 7):
        cfg = tiny_config(cache, tmp_path / f"run{seed}", seed=seed)
        with _job(cfg, tmp_path / f"run{seed}") as job:
            for _ in range(2):
                torch.rand(3)
                np.random.default_rng().random()
                losses.add(job.heldout()["heldout_loss"])
                batches = heldout_batches(job.plan.snapshot, job.reader, job.cfg)
                losses.add(
                    heldout(job.drafter, batches, job.embed, job.head, job.cfg.loss, 4)[
                        "heldout_loss"
                    ]
                )
    assert len(losses) == 1


def test_trap_43_the_mask_token_is_explicit_and_has_no_other_use(cache, tmp_path):
    drafter = tiny_config(cache, tmp_path / "run").drafter
    info = {"vocab_size": 40, "eos_token_ids": [0], "pad_token_id": 1, "mask_token_id": None}
    with pytest.raises(ConfigError, match=r"names no mask token.*Choose a token"):
        mask_token(drafter, info)
    assert mask_token(drafter, info | {"mask_token_id": 5}) == 5
    for token, says in [(0, "ends"), (1, "pads"), (40, "outside"), (-1, "outside")]:
        with pytest.raises(ConfigError, match=says):
            mask_token(dataclasses.replace(drafter, mask_token_id=token), info)
    used = int(Store.open(cache).reader().read_tokens(Store.open(cache).snapshot().ids[0])[0])
    cfg = tiny_config(cache, tmp_path / "run", drafter__mask_token_id=used or 1, steps=8)
    with pytest.raises(DataError, match="occurs in the text"):
        train_run(cfg)


@pytest.mark.slow
def test_another_configuration_in_a_run_directory_is_refused_by_key(cache, tmp_path, monkeypatch):
    _stop_after(monkeypatch, 2)
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


def test_two_processes_cannot_train_in_one_directory(cache, tmp_path):
    lock = build._lock(tmp_path / "run")
    with pytest.raises(MismatchError, match="another process"):
        train_run(tiny_config(cache, tmp_path / "run"))
    lock.release()


def test_rows_without_a_label_add_nothing(cache, tmp_path):
    with _job(tiny_config(cache, tmp_path / "run"), tmp_path / "run") as job:
        empty = Batch.pack(
            ["a"],
            [torch.arange(5)],
            [torch.zeros(5, 2, WIDTH, dtype=torch.bfloat16)],
            [torch.zeros(5, dtype=torch.bool)],
            [torch.zeros(0, dtype=torch.int64)],
        )
        loss, stats = trainer.forward(job, empty, 1.0)
        assert float(loss) == 0.0
        assert stats == {}


def test_differences_are_dotted_leaves():
    a, b = {"x": {"y": 1, "z": 2}, "w": [1]}, {"x": {"y": 1, "z": 3}, "w": [1], "v": None}
    assert differences(a, b) == [("x.z", 2, 3)]
    assert json.loads(json.dumps(a)) == a


@pytest.mark.slow
def test_tensorboard_files_are_written(cache, tmp_path):
    train_run(tiny_config(cache, tmp_path / "run", steps=1, trainer__tensorboard=True))
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_recomputing_layers_gives_the_same_gradients(cache, tmp_path):
    found = []
    for recompute in (False, True):
        cfg = tiny_config(cache, tmp_path / str(recompute), trainer__recompute=recompute)
        with _job(cfg, tmp_path / str(recompute)) as job:
            found.append(_gradients(job))
    _equal(*found)


@pytest.mark.slow
def test_bf16_compute_is_near_float32_and_keeps_float32_gradients(cache, tmp_path):
    found = []
    for dtype in (Dtype.float32, Dtype.bfloat16):
        with _job(
            tiny_config(cache, tmp_path / dtype.value, trainer__dtype=dtype), tmp_path / dtype.value
        ) as job:
            assert job.head.dtype is getattr(torch, dtype.value)
            found.append(_gradients(job))
    for name, gradient in found[0].items():
        assert found[1][name].dtype is torch.float32
        error = (gradient - found[1][name]).norm() / (gradient.norm() + 1e-3)
        assert error < 0.1, name


@pytest.mark.slow
def test_a_branch_with_the_same_optimizer_is_the_parents_continuation(cache, tmp_path):
    parent = tiny_config(cache, tmp_path / "parent", steps=8, trainer__checkpoint_every=4)
    train_run(parent)
    child = tiny_config(cache, tmp_path / "child", steps=8)
    child.branch.run_dir, child.branch.checkpoint = str(tmp_path / "parent"), "step-000004"
    result = train_run(child)
    _equal(_parameters(tmp_path / "parent"), _parameters(tmp_path / "child"))
    assert result["digest"] == read_record(tmp_path / "parent").result["digest"]
    record = read_record(tmp_path / "child")
    assert record.parent["step"] == 4
    assert (record.parent["optimizer"], record.parent["schedule"]) == ("kept", "continued")
    assert [line["step"] for line in _lines(tmp_path / "child")] == [5, 6, 7, 8]


@pytest.mark.slow
def test_a_branch_with_another_optimizer_drops_states_and_warms_up_again(
    cache, tmp_path, capsys, monkeypatch
):
    train_run(tiny_config(cache, tmp_path / "parent", steps=4))
    child = tiny_config(cache, tmp_path / "child", steps=14, optimizer="muon")
    child.schedule.warmup = 5
    child.branch.run_dir = str(tmp_path / "parent")
    _stop_after(monkeypatch, 7)
    with pytest.raises(Interrupted):
        train_run(child)
    monkeypatch.undo()
    assert "optimizer states dropped (exp_avg of " in capsys.readouterr().err
    train_run(child)  # goes on from its own checkpoint, not from the parent's
    record = read_record(tmp_path / "child")
    assert record.parent["optimizer"] == "dropped"
    assert record.parent["schedule"] == "restarted"
    factor = build_schedule(child.schedule, 10)
    lines = _lines(tmp_path / "child")
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


@pytest.mark.slow
def test_a_profile_window_writes_a_trace(cache, tmp_path):
    cfg = tiny_config(cache, tmp_path / "run", steps=3)
    cfg.trainer.profile_start, cfg.trainer.profile_steps = 2, 1
    train_run(cfg)
    names = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert names == ["update-000002.json", "update-000002.txt"]


@pytest.mark.parametrize(
    "kind",
    [
        kind if i == 0 else pytest.param(kind, marks=pytest.mark.slow)
        for i, kind in enumerate(Tracker)
    ],
)
def test_trackers_get_the_numbers_and_are_imported_only_when_chosen(
    cache, tmp_path, monkeypatch, kind
):
    assert kind.value not in sys.modules
    cfg = tiny_config(cache, tmp_path / "run", steps=2)
    cfg.tracking.trackers = [kind]
    monkeypatch.setitem(sys.modules, kind.value, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=f"pip install {kind.value}"):
        train_run(cfg)
    assert not (tmp_path / "run").exists()
    calls = []

    class Service:
        def __getattr__(self, name):
            def call(*args, **kwargs):
                calls.append((name, args, kwargs))
                return self

            return call

    monkeypatch.setitem(sys.modules, kind.value, Service())
    train_run(cfg)
    logged = [call for call in calls if call[0] in {"log", "log_metrics"}]
    assert [call[2]["step"] for call in logged] == [1, 2, 2]
    assert logged[0][1][0]["loss"] == _lines(tmp_path / "run")[0]["loss"]
    assert "heldout_loss" in logged[-1][1][0]
    assert calls[-1][0] in {"finish", "end_run"}


def test_losses_that_need_the_last_hidden_state_are_refused_without_it(cache, tmp_path):
    with pytest.raises(ConfigError, match="last_hidden=true"):
        train_run(tiny_config(cache, tmp_path / "run", loss__kl=0.5))
