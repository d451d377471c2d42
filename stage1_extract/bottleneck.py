"""The bottleneck sheet: what a cache saves, and whether a faster optimizer could save anything.

Online training runs target and drafter side by side, so a batch takes as long as the slower side.
With a cache the target runs once over the data on all GPUs, then every trial trains on all GPUs.
"""

from dataclasses import dataclass

from shared.errors import ConfigError


@dataclass(frozen=True)
class Sheet:
    """Rates in batches/s, times in hours (None where the number of batches isn't known).

    Args:
        bound_by: "target" or "drafter", the slower side online.
        online_rate: batches/s of online training.
        drafter_idle: share of time that the drafter's GPUs wait online.
        faster_step_gain: online speed-up if a drafter step took no time at all.
        best_target_gpus: how many of all GPUs the target should have online.
        online_hours: N * (extract + train), each trial alone with its target.
        cached_hours: extract + N * train.
    """

    bound_by: str
    online_rate: float
    drafter_idle: float
    faster_step_gain: float
    best_target_gpus: int
    online_hours: float | None
    cached_hours: float | None


def sheet(
    target_rate: float,
    drafter_rate: float,
    target_gpus: int,
    drafter_gpus: int,
    trials: int,
    batches: int | None,
    epochs: int,
) -> Sheet:
    """Works the sheet out; see SheetConfig for the arguments.

    Raises:
        ConfigError: a number is not positive.
    """
    numbers = (target_rate, drafter_rate, target_gpus, drafter_gpus, trials, epochs)
    if min(numbers) <= 0 or (batches is not None and batches <= 0):
        raise ConfigError("rates, GPUs, trials, batches and epochs must be positive", where="sheet")
    online = min(target_rate, drafter_rate)
    gpus = target_gpus + drafter_gpus
    per_target, per_drafter = target_rate / target_gpus, drafter_rate / drafter_gpus
    best = max(range(1, gpus), key=lambda n: min(per_target * n, per_drafter * (gpus - n)))
    online_hours = cached_hours = None
    if batches is not None:
        online_hours = trials * epochs * batches / online / 3600
        extract_s = batches / (per_target * gpus)
        train_s = epochs * batches / (per_drafter * gpus)
        cached_hours = (extract_s + trials * train_s) / 3600
    return Sheet(
        bound_by="target" if target_rate < drafter_rate else "drafter",
        online_rate=online,
        drafter_idle=1 - online / drafter_rate,
        faster_step_gain=target_rate / online,
        best_target_gpus=best,
        online_hours=online_hours,
        cached_hours=cached_hours,
    )


def lines(result: Sheet, target_rate: float, drafter_rate: float, gpus: int) -> list[str]:
    """The sheet as text."""
    out = [
        f"online    target {target_rate:.2g}, drafter {drafter_rate:.2g} batch/s: bound by the "
        f"{result.bound_by}; the drafter waits {result.drafter_idle:.0%} of the time",
        f"          the best split of {gpus} GPUs is {result.best_target_gpus} for the target",
    ]
    if result.faster_step_gain < 1.01:
        out.append("          a faster optimizer step can't change the wall clock")
    else:
        out.append(
            f"          a faster optimizer step gains at most {result.faster_step_gain:.2f}x, "
            "then the target is the limit"
        )
    if result.online_hours is not None and result.cached_hours is not None:
        out.append(
            f"cached    {result.cached_hours:,.1f} h for all trials against "
            f"{result.online_hours:,.1f} h online: {result.online_hours / result.cached_hours:.1f}x"
        )
    return out
