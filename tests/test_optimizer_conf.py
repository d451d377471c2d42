"""Every shipped optimizer and schedule composes and trains a tiny model."""

import pytest
import torch
from test_muon import Mixed, train

from shared.config import CONF, compose
from stage2_train.config import TrainConfig
from stage2_train.optimizers import build_optimizer
from stage2_train.schedule import build_schedule

OPTIMIZERS = sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml"))
SCHEDULES = sorted(path.stem for path in (CONF / "schedule").glob("*.yaml"))
PRESETS = ["deepseek", "dflash", "kj", "moonlight", "qwen"]


def composed(*overrides):
    return compose("train", TrainConfig, ["run_dir=x", "cache.root=y", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_trains(name):
    model = Mixed()
    optimizer = build_optimizer(
        composed(f"optimizer={name}").optimizer, model.named_parameters(), model.parts()
    )
    x_TD = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    before = float(model(x_TD).detach())
    train(model, optimizer, 10)
    assert all(p.isfinite().all() for p in model.parameters())
    assert float(model(x_TD).detach()) < before


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_builds(name):
    fn = build_schedule(composed(f"schedule={name}").schedule, 100)
    assert fn(3) == 1.0


def test_presets_are_records_with_a_source():
    assert set(PRESETS) < set(OPTIMIZERS)
    for name in PRESETS:
        text = (CONF / "optimizer" / f"{name}.yaml").read_text()
        assert "a record, not a recommendation" in text.splitlines()[0]
        assert "http" in text or "report" in text or "recorded" in text
