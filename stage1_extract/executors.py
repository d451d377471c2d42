"""Who runs the shards of a job. One worker code; work is handed out shard by shard.

`inline` runs them in this process. Interruption is asked for by setting an event: the shard in
hand is finished and committed, the rest stays for the next run.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shared.store import Store
from shared.target import Target
from stage1_extract.plan import ShardPlan
from stage1_extract.worker import ShardResult, Worker


@dataclass(frozen=True)
class Work:
    """What every executor gets: shards to run, their tokens, and whom to tell."""

    shards: Sequence[ShardPlan]
    tokens: Mapping[str, np.ndarray]
    codec: str
    container: str
    stop: threading.Event
    advance: Callable[[int], None]
    finished: Callable[[ShardResult], None]


def run_inline(store: Store, target: Target, work: Work) -> None:
    """Runs shards one after another in this process until done or stopped."""
    worker = Worker(store, target, work.codec, work.container)
    for shard in work.shards:
        if work.stop.is_set():
            return
        work.finished(worker.run(shard, work.tokens, work.advance))


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
