"""What a run reports besides metrics.jsonl: TensorBoard, trackers, profiles."""

import sys

import pytest
from tiny_cache import tiny_config
from trainer_tools import lines_of

from shared.errors import ConfigError
from stage2_train.build import train_run
from stage2_train.config import Tracker


@pytest.mark.slow
def test_tensorboard_files_are_written(cache, tmp_path):
    train_run(tiny_config(cache, tmp_path / "run", steps=1, trainer__tensorboard=True))
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


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
    assert logged[0][1][0]["loss"] == lines_of(tmp_path / "run")[0]["loss"]
    assert "heldout_loss" in logged[-1][1][0]
    assert calls[-1][0] in {"finish", "end_run"}
