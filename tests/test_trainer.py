"""The training loop on a tiny cache that was written through the Store."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_cache import MASK_TOKEN, WIDTH, tiny_config
from trainer_tools import equal, gradients_of, job_of, lines_of, parameters

from shared.log import read_json_lines
from shared.record import read_record
from shared.store import Store
from stage2_train import trainer
from stage2_train.batch import Batch
from stage2_train.build import open_source, train, train_run
from stage2_train.config import Dtype, ScheduleConfig, ScheduleName
from stage2_train.heldout import heldout
from stage2_train.loader import heldout_batches
from stage2_train.schedule import build_schedule


@pytest.mark.slow
def test_a_run_learns_and_says_what_it_did(cache, tmp_path, capsys):
    cfg = tiny_config(cache, tmp_path / "run", steps=15, optimizer="muon")
    assert train(cfg) == 0
    assert "15 updates" in capsys.readouterr().out
    lines = lines_of(tmp_path / "run")
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


@pytest.mark.parametrize("epochs", [1.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_trap_35_exactly_the_planned_updates_and_the_schedules_last_lr(cache, tmp_path, epochs):
    keys = {"trainer__epochs": epochs, "optimizer__lr": 0.5}
    result = train_run(tiny_config(cache, tmp_path / "run", steps=2, **keys))
    lines = lines_of(tmp_path / "run")
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
    lines = lines_of(tmp_path / "run")
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
        with job_of(cfg, tmp_path / name) as job:
            assert job.steps == 1
            assert len(job.plan.step(0, job.total_rows)) == (1 if rows == 1 else job.total_rows)
            assert job.total_rows == 1 or job.total_rows > 4
            found.append(gradients_of(job))
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
    with job_of(cfg, tmp_path / "start") as job:
        start = {n: p.detach().clone() for n, p in job.drafter.named_parameters() if "norm" in n}
    assert sum(bool((tensor == 1).all()) for tensor in start.values()) == len(start) - 1
    train_run(cfg)
    trained = parameters(tmp_path / "run")
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert all((trained[name] != tensor).any() for name, tensor in start.items())
    with job_of(cfg, tmp_path / "run") as job:
        trainer.restore(job)
        assert {p.dtype for p in job.drafter.parameters()} == {torch.float32}
        assert job.drafter.dtype is torch.bfloat16


def test_trap_31_the_frozen_head_is_the_targets_and_never_changes(cache, tmp_path):
    store = Store.open(cache)
    with job_of(tiny_config(cache, tmp_path / "run", steps=3), tmp_path / "run") as job:
        assert job.embed is job.head
        before = job.head.clone()
        names = [name for name, _ in job.drafter.named_parameters()]
        assert not any("embed" in name or "head" in name for name in names)
        owned = {id(p) for group in job.optimizer.param_groups for p in group["params"]}
        assert id(job.head) not in owned
        trainer.run(job)
        assert torch.equal(job.head, before)
    assert store.target_assets().info["tied"]


def test_trap_41_the_same_weights_have_the_same_held_out_loss(cache, tmp_path):
    losses = set()
    for seed in (0, 7):
        cfg = tiny_config(cache, tmp_path / f"run{seed}", seed=seed)
        with job_of(cfg, tmp_path / f"run{seed}") as job:
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


def test_rows_without_a_label_add_nothing(cache, tmp_path):
    with job_of(tiny_config(cache, tmp_path / "run"), tmp_path / "run") as job:
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


def test_recomputing_layers_gives_the_same_gradients(cache, tmp_path):
    found = []
    for recompute in (False, True):
        cfg = tiny_config(cache, tmp_path / str(recompute), trainer__recompute=recompute)
        with job_of(cfg, tmp_path / str(recompute)) as job:
            found.append(gradients_of(job))
    equal(*found)


@pytest.mark.slow
def test_bf16_compute_is_near_float32_and_keeps_float32_gradients(cache, tmp_path):
    found = []
    for dtype in (Dtype.float32, Dtype.bfloat16):
        with job_of(
            tiny_config(cache, tmp_path / dtype.value, trainer__dtype=dtype), tmp_path / dtype.value
        ) as job:
            assert job.head.dtype is getattr(torch, dtype.value)
            found.append(gradients_of(job))
    for name, gradient in found[0].items():
        assert found[1][name].dtype is torch.float32
        error = (gradient - found[1][name]).norm() / (gradient.norm() + 1e-3)
        assert error < 0.1, name
