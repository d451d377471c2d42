"""The word `train`: wires a run from its configuration. The only file that knows every part."""

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint

from shared.config import Dtype, to_plain, typed
from shared.errors import ConfigError, DataError, MismatchError
from shared.fs import Lock, disk_errors, write_atomic
from shared.log import note, say
from shared.record import RunRecord, code_state, differences, machine, read_record, versions
from shared.spec import CaptureSpec
from shared.store import Store, load_frozen
from stage2_train import checkpoint, mup, trainer
from stage2_train.branch import open_branch
from stage2_train.compiled import compile_layers
from stage2_train.config import DrafterConfig, LoaderConfig, Parallel, TrainConfig
from stage2_train.config import Source as StateSource
from stage2_train.draft_vocabulary import of_run, sentence, size_of
from stage2_train.drafter import Drafter
from stage2_train.heldout import heldout
from stage2_train.job import Job
from stage2_train.loader import Loader, RowFeed, Upload, heldout_batches, open_feed, pin
from stage2_train.optimizers import build_optimizer
from stage2_train.ranks import Ranks
from stage2_train.schedule import build_schedule, unlike_the_run
from stage2_train.sharding import shard_
from stage2_train.shared_reads import SharedReader
from stage2_train.steps import StepPlan
from stage2_train.trackers import RunName, Sink, import_tracker, open_trackers
from stage2_train.warm_start import warm_start

# Keys that say where and when something happens, never what the optimizer sees.
NEUTRAL = (
    "run_dir", "device", "loader", "cache.root", "tracking", "trainer.tensorboard", "trainer.keep",
    "trainer.checkpoint_every", "trainer.eval_every", "trainer.max_bad_steps", "trainer.recompute",
    "trainer.profile_start", "trainer.profile_steps", "trainer.parallel", "trainer.shard_ranks",
    "trainer.async_checkpoint", "trainer.compile", "trainer.kernels",
    "drafter.draft_vocabulary_ids",  # where the ids lie; the record has their digest
)  # fmt: skip


def train(cfg: TrainConfig) -> int:
    """The word `train`. Returns the exit code."""
    result = train_run(cfg)
    if result:
        say(_sentence(cfg.run_dir, result))
    return 0


def train_run(cfg: TrainConfig) -> dict[str, Any]:
    """Trains, or goes on with, the run in `cfg.run_dir`; a finished one is only reported.

    Returns:
        The run's result; empty on ranks other than the first.

    Raises:
        ConfigError, DataError, CacheError: the run can't begin; nothing has been written.
        MismatchError: the directory holds a run of another configuration or snapshot.
        TrainingError, CorruptionError, Interrupted: see `trainer.run`.
    """
    run_dir, device = Path(cfg.run_dir), resolve_device(cfg.device)
    ranks, lock = Ranks(device), None
    try:
        source = open_source(cfg)
        record = begin(source, run_dir)
        goes_on = bool(record.result) and checkpoint.lost_last(run_dir, record) is not None
        if record.result and not goes_on:
            return record.result | {"was_finished": True}
        if ranks.is_main:
            lock = _lock(run_dir)
        if goes_on:  # what is lost is made again
            record.result = {}
            if ranks.is_main:
                record.write(run_dir)
        ranks.barrier()
        with assemble(source, record, run_dir, device, ranks) as job:
            result = trainer.run(job)
        if not ranks.is_main:
            return {}
        record.result = result
        record.write(run_dir)
        return result
    finally:
        if lock is not None:
            lock.release()
        ranks.close()


@dataclass
class Source:
    """What a run replays: the cache, its snapshot, the plan, and the configuration made whole."""

    cfg: TrainConfig
    store: Store
    snapshot: Any
    plan: StepPlan
    steps: int
    total_rows: int | None
    codecs: list[str]


def open_source(cfg: TrainConfig) -> Source:
    """Opens the cache, fills in what the configuration leaves to it, and plans the steps.

    Raises:
        CacheError, DataError, MismatchError: the cache can't be replayed.
        ConfigError: no mask token, no step, an impossible batch.
    """
    cfg = copy.deepcopy(cfg)
    store = Store.open(cfg.cache.root)
    snapshot = store.snapshot(cfg.cache.snapshot)
    cfg.cache.snapshot = snapshot.id
    if snapshot.spec_digest != store.spec.digest:
        raise MismatchError(
            "the snapshot is of another capture spec than the cache",
            where=f"snapshot {snapshot.id} in {store.root}",
        )
    index = store.committed()
    present, shard_numbers = index.shards_of(snapshot.id_bytes)
    if not present.all():
        missing = np.flatnonzero(~present)
        raise DataError(
            f"{len(missing)} of {len(snapshot)} samples are not in the cache, the first is "
            f"{snapshot.ids[missing[0]]}",
            where=f"snapshot {snapshot.id} in {store.root}",
            do="Extract the data set into this cache again; only what is missing is run",
        )
    shards = [index.shard_ids[number] for number in np.unique(shard_numbers)]
    cfg.drafter.mask_token_id = mask_token(cfg.drafter, store.target_assets().info)
    cfg.drafter.hidden_size = cfg.drafter.hidden_size or store.spec.hidden_size
    cfg.drafter.draft_vocabulary = size_of(cfg.drafter, store.target_assets().info)
    if cfg.trainer.dtype is Dtype.float16:
        raise ConfigError(
            "float16 needs loss scaling, which isn't there",
            where="trainer.dtype",
            do="Choose bfloat16 or float32",
        )
    if not (cfg.loss.cross_entropy or cfg.loss.kl or cfg.loss.l1):
        raise ConfigError("all weights of the objective are 0, so nothing is learned", where="loss")
    if (cfg.loss.kl or cfg.loss.l1) and not store.spec.last_hidden:
        raise ConfigError(
            "KL and L1 need the target's last hidden state, which this cache doesn't hold",
            where="loss",
            do="Extract with last_hidden=true, or set loss.kl=0 loss.l1=0",
        )
    if cfg.init_from is not None and cfg.branch.run_dir is not None:
        raise ConfigError(
            "a run begins at one place", where="init_from and branch.run_dir", do="Set one to null"
        )
    for tracker in cfg.tracking.trackers:
        import_tracker(tracker)
    plan = StepPlan(snapshot, cfg.batch, seed=cfg.seed, block=cfg.drafter.block_size)
    asked = cfg.trainer
    steps = plan.total_steps(steps=asked.steps, epochs=asked.epochs)
    total_rows = plan.total_rows(asked.epochs) if asked.steps is None else None
    codecs = sorted({store.shard(name).codec for name in shards})
    return Source(cfg, store, snapshot, plan, steps, total_rows, codecs)


def mask_token(drafter: DrafterConfig, info: dict[str, Any]) -> int:
    """The id of MASK: explicit or recorded in the cache, never guessed.

    Raises:
        ConfigError: none is known, or it has another use.
    """
    where = "drafter.mask_token_id"
    choice = "Choose a token of the target's vocabulary that never occurs in the data"
    token = drafter.mask_token_id
    token = info.get("mask_token_id") if token is None else token
    if token is None:
        raise ConfigError("the cache names no mask token", where=where, do=choice)
    if not 0 <= token < info["vocab_size"]:
        raise ConfigError(
            f"{token} is outside the vocabulary of {info['vocab_size']}", where=where, do=choice
        )
    taken = {int(token_id) for token_id in info.get("eos_token_ids") or []}
    for name in ("pad_token_id", "bos_token_id"):
        if info.get(name) is not None:
            taken.add(int(info[name]))
    if token in taken:
        raise ConfigError(
            f"{token} ends, begins or pads text, so it can't stand for MASK", where=where, do=choice
        )
    return int(token)


def begin(source: Source, run_dir: Path) -> RunRecord:
    """The record of the run that is there, or a new one.

    Raises:
        MismatchError: the directory holds a run of another configuration, snapshot or plan.
    """
    config = to_plain(source.cfg)
    record = RunRecord(
        config=config,
        snapshot=source.snapshot.id,
        spec_digest=source.store.spec.digest,
        codecs=source.codecs,
        plan=source.plan.key,
        steps=source.steps,
        start_digest=source.plan.start_digest().hex(),
    )
    if not (run_dir / "run.json").exists():
        if checkpoint.steps(run_dir):
            raise MismatchError(
                "there are checkpoints but no run.json, so what made them is not known",
                where=run_dir,
                do="Choose another run_dir",
            )
        return record
    there = read_record(run_dir)
    stored = to_plain(typed(TrainConfig, there.config, where=run_dir / "run.json"))
    changed = [
        row
        for row in differences(stored, config)
        if not any(row[0] == key or row[0].startswith(key + ".") for key in NEUTRAL)
    ]
    for key in ("spec_digest", "codecs", "start_digest"):
        if not changed and getattr(there, key) != getattr(record, key):
            changed.append((key, getattr(there, key), getattr(record, key)))
    if changed:
        named = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in changed)
        raise MismatchError(
            f"a run of another configuration is there ({named})",
            where=run_dir,
            do="Choose another run_dir, or give the run's own values",
        )
    return there


@contextmanager
def assemble(
    source: Source, record: RunRecord, run_dir: Path, device: torch.device, ranks: Ranks
) -> Iterator[Job]:
    """Builds the parts of a run and ends its reader processes at exit."""
    cfg, store, spec = source.cfg, source.store, source.store.spec
    token = cfg.drafter.mask_token_id
    assert token is not None  # open_source filled it in
    with closing(_feed(source, device)) as feed:
        drafter = build_drafter(cfg.drafter, spec, cfg.init_seed).to(device)
        if cfg.optimizer.mup_base is not None:
            mup.rescale_init_(drafter.named_parameters(), mup.read_base(cfg.optimizer.mup_base))
        if cfg.trainer.kernels:
            drafter.use_kernels(device)
        compute = torch.bfloat16 if cfg.trainer.dtype is Dtype.bfloat16 else torch.float32
        drafter.compute_dtype = compute
        if cfg.trainer.compile:
            compile_layers(drafter, device)
        if cfg.trainer.recompute:
            recompute_layers(drafter)
        embed, head = frozen(store, device, compute)
        reader = open_reader(store, cfg.loader)
        if cfg.drafter.draft_vocabulary is not None:
            known, info = record.draft_vocabulary, store.target_assets().info
            ids_S, record.draft_vocabulary = of_run(
                run_dir, cfg.drafter, known, source.snapshot, reader, info, ranks
            )
            drafter.draft_ids.copy_(ids_S)
            if ranks.is_main:
                note(sentence(record.draft_vocabulary))
        head = drafter.head_rows(head)
        drafter.match_head(head)
        if cfg.init_from is not None and not checkpoint.steps(run_dir):
            began = warm_start(drafter, cfg.drafter, spec.layer_ids, cfg.init_from)
            if ranks.is_main:
                note(began)
        if ranks.world > 1 and cfg.trainer.parallel is not Parallel.ddp:
            shard_(drafter, cfg.trainer, ranks.world, device)
            ranks.cut = True
        elif cfg.trainer.parallel is not Parallel.ddp:
            how = cfg.trainer.parallel.value
            note(f"trainer.parallel={how} cuts nothing on one rank; torchrun starts several")
        named = list(drafter.named_parameters())
        optimizer = build_optimizer(cfg.optimizer, named, drafter.parts())
        newest = checkpoint.steps(run_dir)
        branch = None
        if cfg.branch.run_dir is not None and not newest:
            start = source.plan.start_digest().hex()
            branch = open_branch(cfg.branch, start, source.steps, optimizer)
            if ranks.is_main:
                note(branch.sentence())
            record.parent = branch.record() | {"own_steps_before": branch.step}
        factor = _schedule(source, record)
        if ranks.is_main and (said := unlike_the_run(cfg.schedule, source.steps)):
            note(said)

        def measure() -> dict[str, Any]:
            batches = heldout_batches(source.snapshot, reader, cfg, token)
            block = cfg.drafter.block_size
            return heldout(drafter, batches, embed, head, cfg.loss, block, device=device)

        counts = {"trainable": sum(p.numel() for _, p in named if p.requires_grad)}
        for row in optimizer.routing.rows:
            counts[row.owner] = counts.get(row.owner, 0) + math.prod(row.shape)
        record.parameters, record.code, record.versions = counts, code_state(), versions()
        first = newest[-1] if newest else branch.step if branch else 0
        record.sessions.append({"from_step": first, "ranks": ranks.world} | machine(str(device)))
        if ranks.is_main:
            record.write(run_dir)
            write_atomic(run_dir / "routing.txt", optimizer.routing.text().encode() + b"\n")
            if first == 0 and optimizer.routing.owned("muon"):
                note(optimizer.routing.folded().rstrip())
        yield Job(
            cfg=cfg,
            run_dir=run_dir,
            record=record,
            plan=source.plan,
            steps=source.steps,
            total_rows=source.total_rows,
            loader=Loader(source.plan, feed, mask_token_id=token),
            reader=reader,
            drafter=drafter,
            embed=embed,
            head=head,
            optimizer=optimizer,
            factor=factor,
            heldout=measure if len(source.snapshot.indices("heldout")) else None,
            branch=branch,
            trackers=partial(_trackers, record, run_dir, ranks, cfg),
            device=device,
            upload=Upload(device),
            ranks=ranks,
        )


def _feed(source: Source, device: torch.device) -> RowFeed:
    cfg, store = source.cfg, source.store
    if cfg.source is StateSource.online:
        from stage2_train.online import open_online

        return open_online(store, device, cfg.batch.tokens_per_row)
    feed = open_feed(
        source.plan,
        open_reader(store, cfg.loader),
        num_states=store.spec.num_states,
        hidden_size=store.spec.hidden_size,
        config=cfg.loader,
    )
    if device.type == "cuda":
        pin(feed)
    return feed


def open_reader(store: Store, loader: LoaderConfig) -> Any:
    """A reader of the cache; with `loader.share`, one that shares what it has decoded.

    Only while the sweep that made the folder runs: later the run reads from the cache alone.
    """
    if loader.share is None or not Path(loader.share).is_dir():
        return store.reader()
    key = hashlib.blake2b(f"{store.root} {store.spec.digest}".encode(), digest_size=8).hexdigest()
    return SharedReader(store.reader(), Path(loader.share) / key)


def _schedule(source: Source, record: RunRecord) -> Callable[[int], float]:
    """The learning-rate factor of a 0-based update; laid out from the branch on if it restarts."""
    config, done = source.cfg.schedule, 0
    if record.parent is not None and record.parent["schedule"] == "restarted":
        done = record.parent["own_steps_before"]
    factor = build_schedule(config, config.horizon or source.steps - done)
    return lambda step: factor(step - done)


def _trackers(record: RunRecord, run_dir: Path, ranks: Ranks, cfg: TrainConfig) -> list[Sink]:
    if not ranks.is_main:
        return []
    name = RunName(run_dir, record.config, record.start_digest, cfg.tracking.name)
    return open_trackers(cfg.tracking, name)


def recompute_layers(drafter: Drafter) -> None:
    """Keeps only the layers' inputs for the backward pass and computes the rest again.

    Gradients are the same to the bit: a layer has no randomness.
    """
    for layer in drafter.layers:
        layer.forward = partial(
            torch.utils.checkpoint.checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
        )


def build_drafter(cfg: DrafterConfig, spec: CaptureSpec, init_seed: int) -> Drafter:
    """A drafter with initial weights that `init_seed` alone decides; float32, on the CPU.

    A cached last hidden state is for losses: it is not one of the states that are read.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)
        return Drafter(cfg, len(spec.layer_ids), spec.hidden_size)


def frozen(
    store: Store, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(embedding, head) [V, D] of the target in the compute dtype; one tensor when tied."""
    embed, head = load_frozen(store)
    placed = embed.to(device, dtype)
    return placed, placed if head is embed else head.to(device, dtype)


def resolve_device(name: str) -> torch.device:
    """`auto` takes the local rank's GPU where there is one.

    Raises:
        ConfigError: no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{name!r} can't be used ({reason})", where="device", do="Choose auto, cpu or cuda"
        ) from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _lock(run_dir: Path) -> Lock:
    with disk_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(run_dir / ".lock", wait=False)
    if lock is None:
        raise MismatchError("another process trains here", where=run_dir, do="Wait, or end it")
    return lock


def _sentence(run_dir: str, result: dict[str, Any]) -> str:
    was = "was finished already" if result.get("was_finished") else "finished"
    held = result.get("heldout") or {}
    parts = [f"{result['step']} updates", f"loss {result['loss']:.4f}"]
    if "heldout_loss" in held:
        parts.append(f"held-out loss {held['heldout_loss']:.4f}")
        parts.append(f"estimated acceptance {held['estimated_acceptance']:.3f}")
    if result["skipped"]:
        parts.append(f"{result['skipped']} updates skipped (not finite)")
    seconds = max(result["seconds"], 1e-9)
    parts.append(f"{result['tokens'] / seconds:.0f} tokens/s")
    parts.append(f"{result['data_wait'] / seconds:.1%} of the time waiting for data")
    return f"{run_dir} {was}: " + ", ".join(parts)
