"""drafttape extract, from configuration to snapshot.

Order of effects: data is read and checked before anything is written; the job's plan is written
before the first forward pass; shards before target assets before the snapshot.
"""

import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from shared import tensor_parallel
from shared.errors import CacheError, ConfigError, DrafttapeError, Interrupted
from shared.log import note
from shared.recode import check_codec
from shared.store import Store, check_snapshot_name
from shared.target import (
    Target,
    TargetInfo,
    choose_device,
    describe_target,
    free_memory,
    load_target,
    load_tokenizer,
    mask_token_id,
    text_config,
    use_device,
)
from stage1_extract.batching import choose_batching
from stage1_extract.checks import self_test, self_test_samples
from stage1_extract.config import Executor, ExtractConfig
from stage1_extract.executors import Deadline, Work, deadline, run_inline, stop_on_signals
from stage1_extract.frozen import has_assets, write_assets
from stage1_extract.job import Job
from stage1_extract.local_workers import run_local, worker_devices
from stage1_extract.plan import BITS, ShardPlan
from stage1_extract.prompts import check_data, prepare
from stage1_extract.ranks import Ranks, run_rank
from stage1_extract.ray_actors import run_ray
from stage1_extract.rows import data_sources
from stage1_extract.status import Status
from stage1_extract.summary import finish
from stage1_extract.worker import ShardResult


def extract(cfg: ExtractConfig) -> int:
    """Runs the word. Returns 0, or 3 when more than the threshold's share of rows is rejected.

    Raises:
        DrafttapeError: see the parts; `Interrupted` (exit code 4) after a signal or at `until`.
    """
    started = time.perf_counter()
    check_data(cfg.data)
    if cfg.snapshot is not None:
        check_snapshot_name(cfg.snapshot)
    data_sources(cfg.data)
    if cfg.batch_tokens < 1 or cfg.cache.shard_bytes < 1 or cfg.workers < 0:
        raise ConfigError("batch_tokens and cache.shard_bytes must be positive, workers 0 or more")
    stop_at = deadline(cfg.until)
    ranks = _ranks(cfg)
    device = choose_device(cfg.device)
    info = _with_attention(cfg, describe_target(cfg.target), device)
    tokenizer = load_tokenizer(cfg.target, info)
    mask_token = mask_token_id(cfg.target, tokenizer)
    vocab_size = int(text_config(info.config).vocab_size)
    prepared = prepare(cfg.data, tokenizer, mask_token, vocab_size)
    with ExitStack() as stack:
        if ranks is not None:
            ranks.start(nccl=cfg.target.tensor_parallel > 1 and device.startswith("cuda"))
            stack.push(ranks.leave)
            device = ranks.device(device)
        use_device(device)
        tokens = {sample.id: sample.tokens_T for sample in prepared.samples}
        loaded: list[Target] = []
        packed = choose_batching(cfg, info, device, self_test_samples(tokens), loaded)
        spec = info.spec(device, last_hidden=cfg.last_hidden, packed=packed)
        store = _open_store(cfg, spec, ranks)
        check_codec(store, cfg.cache.codec.value)
        job = Job(cfg, store, prepared)
        capture_missing(job, info, device, stop_at, ranks, loaded)
        if ranks is not None and ranks.rank:
            return 0
        return finish(job, info, tokenizer, started)


def _with_attention(cfg: ExtractConfig, info: TargetInfo, device: str) -> TargetInfo:
    """The target with its attention by name, also in `cfg`, so that all workers take the same.

    `auto` is what the cache holds already, else what suits the device.
    """
    name = info.attention(device)
    if cfg.target.attention == "auto":
        with suppress(CacheError):  # a new cache
            name = Store.open(cfg.cache.root).spec.backend.get("attention", name)
    cfg.target = replace(cfg.target, attention=name)
    return replace(info, cfg=cfg.target)


def _ranks(cfg: ExtractConfig) -> Ranks | None:
    """This process's place among others, where the launcher started several.

    Raises:
        ConfigError: the configuration needs another launcher.
    """
    alone = cfg.executor in (Executor.local, Executor.ray)
    ranks = None if alone else Ranks.from_environment()
    if cfg.ray_address is not None and cfg.executor is not Executor.ray:
        raise ConfigError(
            "nothing would run on Ray", where="ray_address", do="Add executor=ray, or leave it out"
        )
    if cfg.executor is Executor.torchrun and ranks is None:
        raise ConfigError(
            "executor=torchrun, but RANK and WORLD_SIZE are not set",
            where="executor",
            do="Start it as: torchrun --nproc-per-node=N -m shared.cli extract …",
        )
    size, wanted = ranks.size if ranks else 1, cfg.target.tensor_parallel
    if wanted > 1 and size != wanted:
        raise ConfigError(
            f"tensor_parallel={wanted} needs as many ranks, there are {size}",
            where="target.tensor_parallel",
            do=f"Start it as: torchrun --nproc-per-node={wanted} -m shared.cli extract …",
        )
    if cfg.target.device_map is not None and (size > 1 or cfg.workers > 1):
        raise ConfigError(
            "one target is spread over all GPUs, so there can be only one worker",
            where="target.device_map",
        )
    return ranks


def _open_store(cfg: ExtractConfig, spec: Any, ranks: Ranks | None) -> Store:
    """The cache; under ranks the first one makes it, and its refusal reaches all."""
    if ranks is None:
        return Store.create(cfg.cache.root, spec)
    error: DrafttapeError | None = None
    if ranks.rank == 0:
        try:
            Store.create(cfg.cache.root, spec)
        except DrafttapeError as caught:
            error = caught
    error = ranks.from_first(error)
    if error is not None:
        raise error
    return Store.open(cfg.cache.root)


def capture_missing(
    job: Job,
    info: TargetInfo,
    device: str,
    stop_at: float | None,
    ranks: Ranks | None,
    loaded: list[Target],
) -> None:
    """Runs what is missing and stores the target's frozen parts.

    Args:
        loaded: the target, if it is loaded already; taken out, so that nobody else keeps it.

    Raises:
        Interrupted: a signal or `until` stopped it after the shards in hand.
    """
    cfg, store, first = job.cfg, job.store, ranks is None or ranks.rank == 0
    shards = job.todo() if first else []
    lacks_assets = first and not has_assets(store)
    if ranks is not None:
        shards, lacks_assets = ranks.from_first((shards, lacks_assets))
    if not shards and not lacks_assets:
        return
    if first and shards:
        raw = sum(shard.num_tokens for shard in shards) * store.spec.bytes_per_token
        store.require_space(raw * BITS[cfg.cache.codec] / 16)
    if not loaded:
        note(f"loading {info.cfg.name} on {device}")
        loaded.append(load_target(info.cfg, device, info))
    target: Target | None = loaded.pop()
    assert target is not None
    split = info.cfg.tensor_parallel > 1
    if lacks_assets and (first or split):
        write_assets(store, target, write=first)
    if not shards:
        return
    if split and not first:
        tensor_parallel.follow(target)
        return
    if cfg.self_test:
        tokens = {name: job.samples[name].tokens_T for s in shards for name in s.ids}
        errors = self_test(target, store.spec, self_test_samples(tokens))
        note(f"self-test passed: batched equals alone within {max(errors.values()):.1e}")
    devices = worker_devices(device, cfg.workers)
    if cfg.executor is Executor.ray or (len(devices) > 1 and ranks is None):
        target = None  # the workers load their own, on the same devices
        free_memory()
    state = _run(job, devices, shards, stop_at, None if split else ranks, target)
    if split:
        tensor_parallel.release()
    if state == "stopped":
        raise Interrupted(
            f"stopped with {len(job.results)} of {len(shards)} shards committed",
            where=store.root,
            do="The same command goes on",
        )


def _run(
    job: Job,
    devices: list[str],
    shards: list[ShardPlan],
    stop_at: float | None,
    ranks: Ranks | None,
    target: Target | None,
) -> str:
    """Runs shards by the executor that the configuration names; "done" or "stopped".

    Args:
        devices: one a worker of this machine.
        target: None where workers load their own.
    """
    cfg, store = job.cfg, job.store
    names = {name for shard in shards for name in shard.ids}
    tokens = {name: job.samples[name].tokens_T for name in names}
    total, rejects = sum(shard.num_tokens for shard in shards), len(job.rejects())
    place: dict[str, Any] = {}
    if ranks is not None:
        run = ranks.from_first(secrets.token_hex(8))
        place = {"rank": ranks.rank, "size": ranks.size, "run": run}
    reporter = Status(store, cfg.target.name, total, len(shards), len(devices), rejects, **place)
    state = "failed"
    try:
        with stop_on_signals(note) as stop:
            limit = Deadline(stop_at, stop)

            def finished(worker: str, result: ShardResult) -> None:
                job.add(result)
                reporter.finished(worker, result)
                if limit.finished(result.seconds):
                    note(f"until={cfg.until}: another shard would end too late, stopping")

            work = Work(
                shards=shards,
                tokens=tokens,
                target=cfg.target,
                codec=cfg.cache.codec.value,
                container=cfg.cache.container.value,
                stop=stop,
                advance=reporter.advance,
                finished=finished,
            )
            if cfg.executor is Executor.ray:
                run_ray(store, work, devices[0], cfg.workers, cfg.ray_address)
            elif target is None:
                run_local(store, devices, work)
            elif ranks is not None:
                mine = len(job.results)
                everyone = run_rank(store, target, work, ranks)
                del job.results[mine:]
                for result in everyone:
                    job.add(result)
            else:
                run_inline(store, target, work)
        state = "done" if len(job.results) >= len(shards) else "stopped"
    finally:
        reporter.close(state)
        if ranks is None or ranks.rank == 0:
            job.write_rejects()
    return state
