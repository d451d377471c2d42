"""Several worker processes on one machine, one a GPU, fed shard by shard over pipes.

A worker that dies gets a successor and its shard is handed out again; a shard that kills three
workers ends the run. What was committed stays. Processes are spawned, never forked: CUDA and Blosc
threads don't survive a fork.
"""

import multiprocessing
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from shared.config import TargetConfig
from shared.errors import DrafttapeError, TargetError
from shared.log import note
from shared.store import Store
from stage1_extract.executors import DEATHS_PER_SHARD, POLL_S, Claims, Work
from stage1_extract.plan import ShardPlan

_GRACE_S = 5.0  # for workers to end by themselves


@dataclass
class _Process:
    """A worker as its parent sees it."""

    name: str
    device: str
    process: Any
    pipe: Connection
    shard: ShardPlan | None = None
    ready: bool = False
    advanced: int = 0


def worker_devices(device: str, workers: int) -> list[str]:
    """One device a worker: GPUs in turn; the CPU, or the GPU that is named, for all."""
    if not device.startswith("cuda") or ":" in device:
        return [device] * max(1, workers)
    import torch

    count = torch.cuda.device_count()
    return [f"cuda:{i % count}" for i in range(workers or count)]


def run_local(store: Store, devices: list[str], work: Work) -> None:
    """Runs shards in one process a device until done or stopped.

    Raises:
        DrafttapeError: what a worker raised, or that workers keep dying.
    """
    waiting, claims = deque(work.shards), Claims(store)
    deaths: Counter[tuple[str, ...]] = Counter()
    context = multiprocessing.get_context("spawn")
    running: list[_Process] = []
    try:
        for number, device in enumerate(devices[: max(1, len(waiting))]):
            running.append(_start(context, number, device, len(devices), store, work))
        while any(item.shard for item in running) or (waiting and not work.stop.is_set()):
            for item in running:
                work.advance(item.name, 0)  # a sign of life while targets load
                free = item.ready and item.shard is None and not work.stop.is_set()
                if free and (shard := claims.first(waiting)) is not None:
                    _hand_out(item, shard, work)
            pipes: list[Any] = [item.pipe for item in running]
            wait([*pipes, *(item.process.sentinel for item in running)], timeout=POLL_S)
            for position, item in enumerate(running):
                alive = _drain(item, work, claims)
                if alive and item.process.is_alive():
                    continue
                if item.shard is not None:
                    deaths[item.shard.ids] += 1
                    waiting.appendleft(item.shard)
                    claims.release(item.shard)
                    work.advance(item.name, -item.advanced)
                    count = deaths[item.shard.ids]
                else:
                    deaths[()] += 1
                    count = deaths[()]
                item.process.join()
                code = item.process.exitcode
                if count >= DEATHS_PER_SHARD:
                    raise TargetError(
                        f"{count} workers died (exit code {code}) on the same work",
                        where=f"sample {item.shard.ids[0]} and others" if item.shard else None,
                        do="Finished shards are committed. Is memory enough for so many workers?",
                    )
                note(f"{item.name} died (exit code {code}); a new one takes its shard")
                running[position] = _start(
                    context, position, item.device, len(devices), store, work
                )
    finally:
        for item in running:
            item.pipe.close()
        end = time.monotonic() + _GRACE_S
        for item in running:
            item.process.join(timeout=max(0.0, end - time.monotonic()))
            if item.process.is_alive():
                item.process.kill()
                item.process.join()
        claims.close()


def _start(
    context: Any, number: int, device: str, count: int, store: Store, work: Work
) -> _Process:
    ours, theirs = context.Pipe()
    name = f"{device}/{number}"
    process = context.Process(
        target=worker_main,
        args=(theirs, device, count, store.root, work.target, work.codec, work.container),
        name=f"drafttape {name}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return _Process(name, device, process, ours)


def _hand_out(item: _Process, shard: ShardPlan, work: Work) -> None:
    item.shard, item.advanced = shard, 0
    try:
        item.pipe.send((shard, {name: work.tokens[name] for name in shard.ids}))
    except (BrokenPipeError, ConnectionResetError):
        return  # it is dead: the loop sees it


def _drain(item: _Process, work: Work, claims: Claims) -> bool:
    """Takes all messages of a worker; false when its pipe has ended."""
    try:
        while item.pipe.poll():
            kind, value = item.pipe.recv()
            if kind == "ready":
                item.ready = True
            elif kind == "advance":
                item.advanced += value
                work.advance(item.name, value)
            elif kind == "done":
                if item.shard is not None:
                    claims.release(item.shard)
                item.shard = None
                work.finished(item.name, value)
            else:
                raise value
    except (EOFError, ConnectionResetError):
        return False
    return True


def worker_main(
    pipe: Connection,
    device: str,
    count: int,
    root: str,
    target_config: TargetConfig,
    codec: str,
    container: str,
) -> None:
    """A worker process: loads the target, then runs each shard that it is sent."""
    import signal

    # Signals of the terminal reach the parent, which decides; the pipe's end stops this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import torch

    from shared.target import load_target, use_device
    from stage1_extract.worker import Worker

    try:
        if device == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // count))
        use_device(device)
        worker = Worker(Store.open(root), load_target(target_config, device), codec, container)
        pipe.send(("ready", None))
        while True:
            shard, tokens = pipe.recv()
            done = worker.run(shard, tokens, lambda tokens: pipe.send(("advance", tokens)))
            pipe.send(("done", done))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except DrafttapeError as error:
        pipe.send(("error", error))
