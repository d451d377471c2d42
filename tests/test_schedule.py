"""Schedules: exact values at the corners, and what all of them share."""

import math
from itertools import pairwise

import pytest

from shared.errors import ConfigError
from stage2_train.config import Cooldown, ScheduleConfig, ScheduleName
from stage2_train.schedule import build_schedule, unlike_the_run


def factors(total, **settings):
    fn = build_schedule(ScheduleConfig(**settings), total)
    return [fn(step) for step in range(total)]


@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize("total", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
def test_every_schedule_warms_up_to_one_and_is_never_zero(name, total, warmup):
    values = factors(total, name=name, warmup=warmup, decay=0.2)
    assert all(0 < value <= 1 for value in values)
    steps = round(warmup * total) if warmup < 1 else round(warmup)
    assert values[:steps] == pytest.approx([(s + 1) / steps for s in range(steps)])
    after = values[max(steps - 1, 0) :]
    assert all(a >= b for a, b in pairwise(after))


def test_trap_35_the_last_updates_lr_is_the_schedules():
    values = factors(100, name=ScheduleName.cosine, warmup=4.0)
    assert values[3] == 1.0
    assert values[99] == pytest.approx(0.5 * (1 + math.cos(math.pi * 96 / 97)))
    assert build_schedule(ScheduleConfig(warmup=4.0), 100)(100) == pytest.approx(0.0)


def test_cosine_and_wsd_have_a_floor():
    for settings in ({"name": ScheduleName.cosine}, {"name": ScheduleName.wsd}):
        fn = build_schedule(ScheduleConfig(floor=0.1, warmup=0.0, **settings), 50)
        assert fn(50) == pytest.approx(0.1)
        assert min(fn(step) for step in range(50)) > 0.1


@pytest.mark.parametrize(
    ("cooldown", "middle"),
    [
        (Cooldown.linear, 0.5),
        (Cooldown.cosine, 0.5),
        (Cooldown.one_minus_sqrt, 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_plateau_and_cooldown(cooldown, middle):
    values = factors(100, name=ScheduleName.wsd, warmup=10.0, decay=19.0, cooldown=cooldown)
    assert values[9:81] == [1.0] * 72
    assert values[81] < 1
    # progress is (t - 81) / 20
    assert values[90] == pytest.approx(middle)


def test_wsd_trunk_is_shared_by_all_budgets():
    trunk = factors(400, name=ScheduleName.wsd, warmup=10.0, decay=0.0)
    assert trunk[10:] == [1.0] * 390
    for budget in (100, 200, 400):
        branch = factors(budget, name=ScheduleName.wsd, warmup=10.0, decay=20.0)
        assert branch[: budget - 20] == trunk[: budget - 20]
        assert branch[-1] < 0.1


def test_multistep_drops_after_80_and_90_percent():
    values = factors(100, name=ScheduleName.multistep, warmup=0.0)
    assert values[79] == 1.0
    assert values[80] == pytest.approx(0.316)
    assert values[89] == pytest.approx(0.316)
    assert values[90] == pytest.approx(0.316**2)


def test_inverse_sqrt_is_the_transformers():
    values = factors(4000, name=ScheduleName.inverse_sqrt, warmup=400.0)
    peak = 400**-0.5
    for t in (1, 100, 400, 401, 4000):
        assert values[t - 1] == pytest.approx(min(t**-0.5, t * 400**-1.5) / peak)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 30.0}, "schedule.warmup is 30 steps of a run of 20"),
        ({"warmup": -1.0}, "below zero"),
        ({"name": ScheduleName.wsd, "warmup": 15.0, "decay": 10.0}, "exceed the run's 20 steps"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(ScheduleConfig(**settings), 20)


@pytest.mark.parametrize("name", list(ScheduleName))
def test_trap_30_group_ratios_are_constant(name):
    import torch
    from torch import nn

    from stage2_train.config import OptimizerConfig, OptimizerName
    from stage2_train.optimizers import build_optimizer
    from stage2_train.param_rules import whole

    named = [("w", nn.Parameter(torch.ones(16, 16))), ("norm", nn.Parameter(torch.ones(16)))]
    config = OptimizerConfig(name=OptimizerName.muon, lr=0.02, adamw_lr=0.0005)
    optimizer = build_optimizer(config, named, {"w": whole("w")})
    fn = build_schedule(ScheduleConfig(name=name), 50)
    for step in range(50):
        optimizer.set_lr(fn(step))
        muon, adamw = (group["lr"] for group in optimizer.param_groups)
        assert muon / adamw == pytest.approx(40)
        assert muon == pytest.approx(0.02 * fn(step))


def test_a_run_that_ends_before_its_schedule_says_so():
    said = unlike_the_run(ScheduleConfig(name=ScheduleName.cosine, warmup=0.0, horizon=100), 50)
    assert "50 updates ends before its schedule of 100" in said
    assert "51%" in said
    assert "goes on behind" in unlike_the_run(ScheduleConfig(horizon=40), 50)
    assert unlike_the_run(ScheduleConfig(horizon=50), 50) is None
    assert unlike_the_run(ScheduleConfig(), 50) is None
