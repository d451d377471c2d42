"""Who runs the shards of a job. One worker code; work is handed out shard by shard.

`run_inline` runs them in this process; `local_workers` and `ranks` in several. Whoever runs a shard
makes the same bytes. Stopping is asked for by an event: shards in hand are finished and committed,
the rest stays for the next run.
"""

import contextlib
import datetime
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shared.config import TargetConfig
from shared.errors import ConfigError
from shared.store import Store
from shared.target import Target
from stage1_extract.plan import ShardPlan
from stage1_extract.worker import ShardResult, Worker


@dataclass(frozen=True)
class Work:
    """What every executor gets: shards to run, their tokens, and whom to tell.

    Args:
        advance: called with (worker, tokens) as batches finish.
        finished: called with (worker, result) as shards are committed.
    """

    shards: Sequence[ShardPlan]
    tokens: Mapping[str, np.ndarray]
    target: TargetConfig
    codec: str
    container: str
    stop: threading.Event
    advance: Callable[[str, int], None]
    finished: Callable[[str, ShardResult], None]


def run_inline(store: Store, target: Target, work: Work) -> None:
    """Runs shards one after another in this process until done or stopped."""
    worker, name = Worker(store, target, work.codec, work.container), str(target.device)
    for shard in work.shards:
        if work.stop.is_set():
            return
        result = worker.run(shard, work.tokens, lambda count: work.advance(name, count))
        work.finished(name, result)


@contextlib.contextmanager
def stop_on_signals(note: Callable[[str], None]) -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one interrupts at once."""
    event = threading.Event()

    def handle(number: int, _frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        note(f"{signal.Signals(number).name}: finishing the shard in hand, then stopping")

    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def deadline(until: str | None, now: datetime.datetime | None = None) -> float | None:
    """The next time that the clock shows `until` (HH:MM), as seconds since the epoch.

    Raises:
        ConfigError: it isn't a time of day.
    """
    if until is None:
        return None
    try:
        clock = datetime.datetime.strptime(until, "%H:%M").time()
    except ValueError:
        raise ConfigError(
            f"{until!r} is not HH:MM", where="until", do="As in until=07:00"
        ) from None
    now = now or datetime.datetime.now()
    when = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    if when <= now:
        when += datetime.timedelta(days=1)
    return when.timestamp()


class Deadline:
    """Sets `stop` when another shard as long as the longest so far would end too late."""

    def __init__(self, when: float | None, stop: threading.Event) -> None:
        self.when, self.stop, self.longest_s = when, stop, 0.0

    def finished(self, seconds: float) -> bool:
        """To be called after a shard; true when it was this call that stopped the run."""
        self.longest_s = max(self.longest_s, seconds)
        if self.when is None or self.stop.is_set() or time.time() + self.longest_s <= self.when:
            return False
        self.stop.set()
        return True
