"""Actors on a Ray cluster, one a GPU, fed shard by shard.

An actor gets its first shard when it has loaded the target, so actors that wait for a free GPU hold
nothing up. The shard of a lost actor goes to another, and a new actor takes its place; work that
loses three actors ends the run. What was committed stays.
"""

import contextlib
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.config import TargetConfig
from shared.errors import ConfigError, DrafttapeError, TargetError
from shared.log import note
from shared.store import Store
from stage1_extract.executors import DEATHS_PER_SHARD, POLL_S, Claims, Work
from stage1_extract.plan import ShardPlan
from stage1_extract.worker import ShardResult

_EVERY_S = 60.0


class Actor:
    """What runs on the cluster. Its node must see the cache under the same path or URL."""

    def __init__(
        self, root: str, target: TargetConfig, device: str, codec: str, container: str
    ) -> None:
        self.root, self.target, self.device = root, target, device
        self.codec, self.container, self.worker = codec, container, None

    def load(self) -> None:
        """Loads the target; apart from `__init__`, so that its errors reach the user whole."""
        from shared.target import load_target
        from stage1_extract.worker import Worker

        target = load_target(self.target, self.device)
        self.worker = Worker(Store.open(self.root), target, self.codec, self.container)

    def run(self, shard: ShardPlan, tokens: Mapping[str, np.ndarray]) -> ShardResult:
        assert self.worker is not None
        return self.worker.run(shard, tokens)


def run_ray(store: Store, work: Work, device: str, workers: int, address: str | None) -> None:
    """Runs shards on actors until done or stopped.

    Args:
        device: "cuda" gives each actor one GPU, anything else one CPU core.
        workers: number of actors; 0: one for each GPU of the cluster.
        address: of a running cluster; None starts Ray on this machine.

    Raises:
        ConfigError: Ray isn't installed, no cluster is at the address, or no node of it has room
            for an actor.
        DrafttapeError: what an actor raised, or that actors keep dying.
    """
    gpu = device.startswith("cuda")
    with _cluster(address, workers) as ray, contextlib.closing(Claims(store)) as claims:
        needs = {"CPU": 1, "GPU": 1} if gpu else {"CPU": 1}
        placement = _Placement(ray, needs, address)
        placement.check()
        count = workers or int(ray.cluster_resources().get("GPU", 0)) or 1
        remote = ray.remote(num_gpus=int(gpu), num_cpus=1)(Actor)
        arguments = (store.root, work.target, "cuda" if gpu else device, work.codec, work.container)
        waiting, deaths = deque(work.shards), Counter[Any]()
        names: dict[Any, str] = {}  # actor: its name
        tasks: dict[Any, tuple[Any, ShardPlan | None]] = {}  # call: (actor, its shard; None: load)
        idle: list[Any] = []

        def start(name: str) -> None:
            actor = remote.remote(*arguments)
            names[actor] = name
            placement.queued.append(actor.__ray_ready__.remote())
            tasks[actor.load.remote()] = (actor, None)

        try:
            for number in range(max(1, min(count, len(waiting)))):
                start(f"actor {number}")
            while any(shard for _, shard in tasks.values()) or (waiting and not work.stop.is_set()):
                while idle and not work.stop.is_set():
                    if (shard := claims.first(waiting)) is None:
                        break
                    actor = idle.pop()
                    tokens = {name: work.tokens[name] for name in shard.ids}
                    tasks[actor.run.remote(shard, tokens)] = (actor, shard)
                for name in names.values():
                    work.advance(name, 0)  # a sign of life
                placement.look()
                if not tasks:
                    work.stop.wait(POLL_S)
                    continue
                ready, _ = ray.wait(list(tasks), timeout=POLL_S)
                for call in ready:
                    actor, shard = tasks.pop(call)
                    if shard is not None:
                        claims.release(shard)
                    try:
                        result = ray.get(call)
                    except ray.exceptions.RayActorError:
                        if shard is not None:
                            waiting.appendleft(shard)
                        deaths[shard and shard.ids] += 1
                        _check(deaths[shard and shard.ids], shard)
                        name = names.pop(actor)
                        note(f"{name} was lost; its shard goes to another")
                        start(name)
                        continue
                    except ray.exceptions.RayTaskError as error:
                        raise _cause(error) from None
                    if shard is not None:
                        if result.ran:
                            work.advance(names[actor], shard.num_tokens)
                        work.finished(names[actor], result)
                    idle.append(actor)
        finally:
            for actor in names:
                ray.kill(actor)


@dataclass
class _Placement:
    """Whether Ray finds nodes for the actors: it lets those it can't place wait without a word.

    Args:
        needs: resources of an actor.
        queued: calls that return once their actor has a node.
    """

    ray: Any
    needs: dict[str, int]
    address: str | None
    queued: list[Any] = field(default_factory=list)
    told_at: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """
        Raises:
            ConfigError: no node has, even when nothing else runs on it, what an actor needs.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if any(all(has.get(key, 0) >= n for key, n in self.needs.items()) for has in nodes):
            return
        wanted = " and ".join(f"{n} {key}" for key, n in self.needs.items())
        there = "; ".join(", ".join(f"{has.get(k, 0):g} {k}" for k in self.needs) for has in nodes)
        raise ConfigError(
            f"an actor needs {wanted}, and no node of the Ray cluster has that "
            f"(its nodes have {there or 'gone'})",
            where=f"ray_address={self.address}",
            do="Start such a node (ray start --address=… --num-gpus=N), or choose another device",
        )

    def look(self) -> None:
        """Says once a minute how many actors wait for room."""
        if not self.queued or time.monotonic() - self.told_at < _EVERY_S:
            return
        self.told_at = time.monotonic()
        _, self.queued = self.ray.wait(self.queued, num_returns=len(self.queued), timeout=0)
        if self.queued:
            self.check()  # nodes may have gone
            what = " and ".join(self.needs)
            note(f"{len(self.queued)} actors wait for a node with a free {what}")


@contextlib.contextmanager
def _cluster(address: str | None, workers: int) -> Iterator[Any]:
    """Ray, connected; left again if it wasn't before.

    Raises:
        ConfigError: it isn't installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "executor=ray, but Ray is not installed", do="pip install 'drafttape[ray]'"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        cores = max(workers, os.cpu_count() or 1)
        options |= {"address": "local", "include_dashboard": False, "num_cpus": cores}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster ({' '.join(str(error).split())[:200]})",
            where=f"ray_address={address}",
            do="Give the address that `ray start --head` printed, or auto",
        ) from None
    try:
        for number, handler in handlers.items():  # Ray puts its own in their place
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(number, handler)
        yield ray
    finally:
        ray.shutdown()


def _check(deaths: int, shard: ShardPlan | None) -> None:
    if deaths >= DEATHS_PER_SHARD:
        raise TargetError(
            f"{deaths} actors were lost on the same work",
            where=f"sample {shard.ids[0]} and others" if shard else "loading the target",
            do="Finished shards are committed. Is memory enough for so many actors?",
        )


def _cause(error: Any) -> DrafttapeError:
    """What the actor raised; anything unforeseen with its traceback's last line."""
    if isinstance(error.cause, DrafttapeError):
        return error.cause
    return TargetError(f"an actor failed ({str(error).strip().splitlines()[-1][:300]})")
