"""Learning rate schedules: pure functions from an update's index to a factor in [0, 1].

The trainer sets each group's lr to base_lr * factor(step), so ratios between groups never change.
With t = step + 1 counting updates from one, every schedule warms up by t/W and has its peak at
t = W; a decay reaches the floor one update *after* the last, so no update is spent at lr 0.
"""

import math
from collections.abc import Callable

from shared.errors import ConfigError
from stage2_train.config import ScheduleConfig

Schedule = Callable[[int], float]


def build_schedule(config: ScheduleConfig, total_steps: int) -> Schedule:
    """The factor of update `step` (0-based) of a run of `total_steps` updates.

    Raises:
        ConfigError: warmup and decay don't fit the number of steps.
    """
    if total_steps < 1:
        raise ConfigError(f"a schedule needs at least one step, not {total_steps}")
    warmup = steps_of("warmup", config.warmup, total_steps)
    shape = _SHAPES[config.name.value](config, total_steps, warmup)

    def factor(step: int) -> float:
        t = step + 1
        return t / warmup if t <= warmup else shape(t)

    return factor


def unlike_the_run(config: ScheduleConfig, total_steps: int) -> str | None:
    """What to say when the run ends before its schedule does, or goes on behind it."""
    horizon = config.horizon
    if horizon is None or horizon == total_steps:
        return None
    if horizon > total_steps:
        last = build_schedule(config, horizon)(total_steps - 1)
        return (
            f"the run of {total_steps} updates ends before its schedule of {horizon} does: the "
            f"last learning rate is {last:.0%} of the peak"
        )
    return f"the run of {total_steps} updates goes on behind its schedule of {horizon}"


def steps_of(key: str, value: float, total: int) -> int:
    """A share of the steps (< 1) or a number of steps, as a number of steps."""
    if value < 0:
        raise ConfigError(f"schedule.{key} is {value}, below zero")
    steps = round(value * total) if value < 1 else round(value)
    if steps > total:
        raise ConfigError(
            f"schedule.{key} is {steps} steps of a run of {total}",
            do=f"Shorten schedule.{key} or raise trainer.steps",
        )
    return steps


def _constant(config: ScheduleConfig, total: int, warmup: int) -> Schedule:
    return lambda t: 1.0


def _cosine(config: ScheduleConfig, total: int, warmup: int) -> Schedule:
    def shape(t: int) -> float:
        progress = _progress(t, warmup, total)
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return shape


def _wsd(config: ScheduleConfig, total: int, warmup: int) -> Schedule:
    decay = steps_of("decay", config.decay, total)
    if warmup + decay > total:
        raise ConfigError(f"warmup {warmup} and decay {decay} exceed the run's {total} steps")
    curve = _COOLDOWNS[config.cooldown.value]

    def shape(t: int) -> float:
        progress = _progress(t, total - decay, total)
        return config.floor + (1 - config.floor) * curve(progress)

    return shape


def _multistep(config: ScheduleConfig, total: int, warmup: int) -> Schedule:
    drops = [share * total for share in config.milestones]
    return lambda t: config.drop ** sum(t > drop for drop in drops)


def _inverse_sqrt(config: ScheduleConfig, total: int, warmup: int) -> Schedule:
    # https://arxiv.org/abs/1706.03762 section 5.3, scaled to a peak of one at t = warmup
    return lambda t: math.sqrt(max(warmup, 1) / max(t, warmup, 1))


def _progress(t: int, start: int, total: int) -> float:
    """0 up to `start`, 1 at total + 1."""
    return min(1.0, max(0.0, (t - start) / (total + 1 - start)))


_COOLDOWNS: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)),
    "one_minus_sqrt": lambda p: 1 - math.sqrt(p),
}
_SHAPES = {
    "constant": _constant,
    "cosine": _cosine,
    "wsd": _wsd,
    "multistep": _multistep,
    "inverse_sqrt": _inverse_sqrt,
}
