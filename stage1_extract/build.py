"""drafttape extract, from configuration to snapshot.

Order of effects: data is read and checked before anything is written; the job's plan is written
before the first forward pass; shards before target assets before the snapshot.
"""

import hashlib
import time
from contextlib import ExitStack
from typing import Any

from shared.config import to_plain
from shared.errors import CacheError, ConfigError, DataError, DrafttapeError, Interrupted
from shared.log import note, say
from shared.store import Store, check_snapshot_name
from shared.target import (
    Target,
    TargetInfo,
    choose_device,
    describe_target,
    end_token_ids,
    load_target,
    load_tokenizer,
    mask_token_id,
    text_config,
    tokenizer_digest,
)
from stage1_extract.checks import self_test
from stage1_extract.config import Executor, ExtractConfig
from stage1_extract.executors import Deadline, Work, deadline, run_inline, stop_on_signals
from stage1_extract.job import Job
from stage1_extract.local_workers import run_local, worker_devices
from stage1_extract.plan import BITS, ShardPlan
from stage1_extract.prompts import check_data, prepare, reasons
from stage1_extract.ranks import Ranks, run_rank
from stage1_extract.rows import data_files
from stage1_extract.status import Status
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
    data_files(cfg.data.paths)
    if cfg.batch_tokens < 1 or cfg.cache.shard_bytes < 1 or cfg.workers < 0:
        raise ConfigError("batch_tokens and cache.shard_bytes must be positive, workers 0 or more")
    stop_at = deadline(cfg.until)
    ranks = Ranks.from_environment() if cfg.executor is not Executor.local else None
    if cfg.executor is Executor.torchrun and ranks is None:
        raise ConfigError(
            "executor=torchrun, but RANK and WORLD_SIZE are not set",
            where="executor",
            do="Start it as: torchrun --nproc-per-node=N -m shared.cli extract …",
        )
    device = choose_device(cfg.device)
    info = describe_target(cfg.target)
    spec = info.spec(device, last_hidden=cfg.last_hidden)
    tokenizer = load_tokenizer(cfg.target, info)
    mask_token = mask_token_id(cfg.target, tokenizer)
    vocab_size = int(text_config(info.config).vocab_size)
    prepared = prepare(cfg.data, tokenizer, mask_token, vocab_size)
    with ExitStack() as stack:
        if ranks is not None:
            ranks.start()
            stack.callback(ranks.finish)
        store = _open_store(cfg, spec, ranks)
        job = Job(cfg, store, prepared)
        capture_missing(job, info, ranks.device(device) if ranks else device, stop_at, ranks)
        if ranks is not None and ranks.rank:
            return 0
        return _finish(job, info, tokenizer, started)


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
    job: Job, info: TargetInfo, device: str, stop_at: float | None, ranks: Ranks | None = None
) -> None:
    """Runs what is missing and stores the target's frozen parts.

    Raises:
        Interrupted: a signal or `until` stopped it after the shards in hand.
    """
    cfg, store, first = job.cfg, job.store, ranks is None or ranks.rank == 0
    shards = job.todo() if first else []
    if ranks is not None:
        shards = ranks.from_first(shards)
    if not shards and _has_assets(store):
        return
    if first and shards:
        raw = sum(shard.num_tokens for shard in shards) * store.spec.bytes_per_token
        store.require_space(raw * BITS[cfg.cache.codec] / 16)
    note(f"loading {info.cfg.name} on {device}")
    target: Target | None = load_target(info.cfg, device, info)
    assert target is not None
    if first and not _has_assets(store):
        write_assets(store, target)
    if not shards:
        return
    if cfg.self_test:
        _self_test(job, target, shards)
    devices = worker_devices(device, cfg.workers)
    if len(devices) > 1 and ranks is None:
        target = None  # the workers load their own
    names = {name for shard in shards for name in shard.ids}
    tokens = {name: job.samples[name].tokens_T for name in names}
    total, rejects = sum(shard.num_tokens for shard in shards), len(job.rejects())
    reporter = Status(store, info.cfg.name, total, len(shards), len(devices), rejects)
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
                target=info.cfg,
                codec=cfg.cache.codec.value,
                container=cfg.cache.container.value,
                stop=stop,
                advance=reporter.advance,
                finished=finished,
            )
            if ranks is not None:
                assert target is not None
                mine = len(job.results)
                everyone = run_rank(store, target, work, ranks)
                del job.results[mine:]
                for result in everyone:
                    job.add(result)
            elif target is None:
                run_local(store, devices, work)
            else:
                run_inline(store, target, work)
        state = "done" if len(job.results) >= len(shards) else "stopped"
    finally:
        reporter.close(state)
        if first:
            job.write_rejects()
    if state == "stopped":
        raise Interrupted(
            f"stopped with {len(job.results)} of {len(shards)} shards committed",
            where=store.root,
            do="The same command goes on",
        )


def _self_test(job: Job, target: Target, shards: list[ShardPlan]) -> None:
    names = [shards[0].ids[0], shards[-1].ids[-1], shards[-1].ids[0]]
    errors = self_test(target, job.store.spec, [job.samples[name].tokens_T for name in names])
    note(f"self-test passed: batched equals alone within {max(errors.values()):.1e}")


def _has_assets(store: Store) -> bool:
    try:
        store.target_assets()
    except CacheError:
        return False
    return True


def _finish(job: Job, info: TargetInfo, tokenizer: Any, started: float) -> int:
    """Writes rejects and the snapshot; prints the summary; returns the exit code."""
    prepared, store, results = job.prepared, job.store, job.results
    job.write_rejects()
    kept = [sample for sample in prepared.samples if sample.id not in job.bad]
    rejects = job.rejects()
    num_run = sum(len(result.shard.ids) - len(result.bad) for result in results)
    run = sum(result.shard.num_tokens for result in results)
    seconds = sum(result.seconds for result in results)
    say(
        f"rows      {prepared.num_rows:,}: {len(kept):,} samples, "
        f"{prepared.num_duplicates:,} duplicates, {len(rejects):,} rejects"
    )
    for reason, count in reasons(rejects):
        say(f"          {count:,} x {reason}")
    held = sum(sample.split == "heldout" for sample in kept)
    say(f"samples   {num_run:,} run, {job.num_reused:,} in the cache before; {held:,} held out")
    tokens = sum(len(sample.tokens_T) for sample in kept)
    supervised = sum(int(sample.mask_T.sum()) for sample in kept)
    say(f"tokens    {tokens:,}, {supervised:,} supervised")
    if run:
        say(f"speed     {run / seconds:,.0f} tokens/s a worker while running shards")
    if rejects:
        say(f"rejects   {store.root}/rejects/{job.id}.jsonl")
    if not kept:
        raise DataError(
            f"none of {prepared.num_rows} rows could be captured; the first: {rejects[0].reason}",
            where=rejects[0].source,
        )
    snapshot = store.write_snapshot(
        [sample.row() for sample in kept], _meta(job, info, tokenizer), job.cfg.snapshot
    )
    say(f"snapshot  {snapshot.id}")
    say(f"cache     {store.root}, {time.perf_counter() - started:.1f} s in all")
    share = len(rejects) / max(prepared.num_rows, 1)
    if share > job.cfg.reject_threshold:
        note(f"{share:.1%} of the rows are rejected: over {job.cfg.reject_threshold:.1%}")
        return 3
    return 0


def _meta(job: Job, info: TargetInfo, tokenizer: Any) -> dict[str, Any]:
    template = str(tokenizer.chat_template or "")
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": info.cfg.name,
        "tokenizer": tokenizer_digest(tokenizer),
        "template": hashlib.blake2b(template.encode(), digest_size=16).hexdigest(),
        "max_tokens": job.cfg.data.max_tokens,
        "sources": job.prepared.files,
        "data": to_plain(job.cfg.data),
        "job": job.id,
        "rows": job.prepared.num_rows,
        "duplicates": job.prepared.num_duplicates,
        "rejects": len(job.rejects()),
    }


def write_assets(store: Store, target: Target) -> None:
    """Stores the target's embedding, head and what training and decoding must know of it."""
    config, tokenizer, cfg = text_config(target.info.config), target.tokenizer, target.info.cfg
    info = {
        "model": cfg.model,
        "revision": cfg.revision,
        "name": cfg.name,
        "architecture": target.info.architecture,
        "weights": target.info.weights,
        "vocab_size": int(target.embed.weight.shape[0]),
        "hidden_size": store.spec.hidden_size,
        "tied": target.tied,
        "mask_token_id": mask_token_id(cfg, tokenizer),
        "eos_token_ids": end_token_ids(target),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "tokenizer": tokenizer_digest(tokenizer),
        "special_token_ids": sorted(int(i) for i in tokenizer.added_tokens_encoder.values()),
        "num_layers": target.info.num_layers,
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "layer_ids": list(store.spec.layer_ids),
        "target": to_plain(cfg),
    }
    head = None if target.tied else target.head.weight
    store.write_target_assets(target.embed.weight, head, info)
