"""Damaged, empty and impossible input ends training with its name; NaN never passes for success."""

import dataclasses

import pytest
from tiny_cache import tiny_cache, tiny_config
from trainer_tools import lines_of, parameters

from shared.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    TrainingError,
)
from shared.record import read_record
from shared.store import Store
from stage2_train import build, checkpoint, trainer
from stage2_train.build import mask_token, open_source, train_run


def test_trap_36_a_stored_nan_names_the_sample_and_ends_the_run(tmp_path):
    tiny_cache(tmp_path / "cache", poison=5)
    cfg = tiny_config(tmp_path / "cache", tmp_path / "run", steps=None, trainer__epochs=1.0)
    with pytest.raises(TrainingError, match=r"stored states are not finite.*data\.jsonl:6") as e:
        train_run(cfg)
    assert e.value.exit_code == 1
    assert e.value.where.startswith("sample ")
    assert not read_record(tmp_path / "run").result
    for step in checkpoint.steps(tmp_path / "run"):
        model = parameters(tmp_path / "run", checkpoint.name_of(step))
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
    assert [line["step"] for line in lines_of(tmp_path / "some") if line["skipped"]] == [2, 4]
    assert "samples" in capsys.readouterr().err
    assert all(t.isfinite().all() for t in parameters(tmp_path / "some").values())
    calls.clear()
    monkeypatch.setattr(trainer, "forward", broken(range(3, 99)))
    cfg = tiny_config(cache, tmp_path / "all", steps=20)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        train_run(cfg)
    assert len(lines_of(tmp_path / "all")) == 4


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


def test_losses_that_need_the_last_hidden_state_are_refused_without_it(cache, tmp_path):
    with pytest.raises(ConfigError, match="last_hidden=true"):
        train_run(tiny_config(cache, tmp_path / "run", loss__kl=0.5))
