"""drafttape extract, from configuration to snapshot.

Order of effects: data is read and checked before anything is written; the job's plan is written
before the first forward pass; shards before target assets before the snapshot.
"""

import time
from collections.abc import Sequence
from typing import Any

from shared.config import to_plain
from shared.errors import CacheError, ConfigError, DataError, Interrupted
from shared.log import note, progress, say
from shared.spec import CaptureSpec
from shared.store import Store
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
from stage1_extract.config import ExtractConfig
from stage1_extract.executors import Work, run_inline, stop_on_signals
from stage1_extract.plan import JobPlan, ShardPlan, job_id, plan_job
from stage1_extract.prompts import Prepared, check_data, prepare, reasons
from stage1_extract.rows import Reject, data_files
from stage1_extract.worker import ShardResult


def extract(cfg: ExtractConfig) -> int:
    """Runs the word. Returns 0, or 3 when more than the threshold's share of rows is rejected.

    Raises:
        DrafttapeError: see the parts; `Interrupted` (exit code 4) after a signal.
    """
    started = time.perf_counter()
    check_data(cfg.data)
    data_files(cfg.data.paths)
    if cfg.batch_tokens < 1 or cfg.cache.shard_bytes < 1:
        raise ConfigError("batch_tokens and cache.shard_bytes must be positive")
    device = choose_device(cfg.device)
    info = describe_target(cfg.target)
    spec = info.spec(device, last_hidden=cfg.last_hidden)
    tokenizer = load_tokenizer(cfg.target, info)
    mask_token = mask_token_id(cfg.target, tokenizer)
    prepared = prepare(cfg.data, tokenizer, mask_token, int(text_config(info.config).vocab_size))
    store = Store.create(cfg.cache.root, spec)
    run = _Extraction(cfg, store, info, tokenizer, prepared, device)
    run.capture()
    return run.finish(started)


class _Extraction:
    """One run of the word on an open store."""

    def __init__(
        self,
        cfg: ExtractConfig,
        store: Store,
        info: TargetInfo,
        tokenizer: Any,
        prepared: Prepared,
        device: str,
    ) -> None:
        self.cfg, self.store, self.info, self.device = cfg, store, info, device
        self.tokenizer, self.prepared = tokenizer, prepared
        self.samples = {sample.id: sample for sample in prepared.samples}
        self.results: list[ShardResult] = []
        settings = (store.spec.digest, cfg.cache.codec.value, cfg.cache.container.value)
        self.settings = (*settings, cfg.cache.shard_bytes, cfg.batch_tokens)
        self.job = job_id(self.settings, list(self.samples))
        # What an earlier run of this job found to be unusable is not tried again.
        self.bad: dict[str, str] = {
            row["id"]: row["reason"]
            for row in store.rejects(self.job)
            if row.get("id") in self.samples
        }
        self.reused = sum(name in store.committed() for name in self.samples)

    def todo(self) -> list[ShardPlan]:
        """Shards to run: those of the stored plan, then a plan for samples that it lacks."""
        committed = self.store.committed()
        missing = {n for n in self.samples if n not in committed and n not in self.bad}
        plan = self.store.job(self.job)
        if plan is None:
            if not missing:
                return []
            shards = self._plan(self.job, missing)
        else:
            shards = JobPlan.from_json(plan).shards
        todo = []
        for shard in shards:
            shard = shard.without(self.bad.keys() & set(shard.ids))
            if shard.ids and missing.issuperset(shard.ids):
                todo.append(shard)
                missing -= set(shard.ids)
        if missing:
            extra = job_id((*self.settings, self.job), list(missing))
            stored = self.store.job(extra)
            todo += JobPlan.from_json(stored).shards if stored else self._plan(extra, missing)
        return todo

    def _plan(self, job: str, missing: set[str]) -> Sequence[ShardPlan]:
        lengths = [(name, len(self.samples[name].tokens_T)) for name in missing]
        plan = plan_job(
            lengths,
            self.store.spec.bytes_per_token,
            self.cfg.cache.shard_bytes,
            self.cfg.batch_tokens,
        )
        self.store.write_job(job, plan.to_json())
        return plan.shards

    def capture(self) -> None:
        """Runs what is missing and stores the target's frozen parts.

        Raises:
            Interrupted: a signal stopped it after the shard in hand.
        """
        shards = self.todo()
        if not shards and self._has_assets():
            return
        note(f"loading {self.info.cfg.name} on {self.device}")
        target = load_target(self.info.cfg, self.device, self.info)
        if not self._has_assets():
            write_assets(self.store, target, self.store.spec)
        if not shards:
            return
        if self.cfg.self_test:
            names = [shards[0].ids[0], shards[-1].ids[-1], shards[-1].ids[0]]
            tokens = [self.samples[name].tokens_T for name in names]
            errors = self_test(target, self.store.spec, tokens)
            note(f"self-test passed: batched equals alone within {max(errors.values()):.1e}")
        total = sum(shard.num_tokens for shard in shards)
        with stop_on_signals(note) as stop, progress(total, "extract", "tok") as bar:

            def finished(result: ShardResult) -> None:
                self.results.append(result)
                self.bad |= result.bad
                done = sum(r.shard_id is not None for r in self.results)
                bar.set_postfix_str(f"shard {done}/{len(shards)}, rejects {len(self.bad)}")

            tokens = {n: self.samples[n].tokens_T for shard in shards for n in shard.ids}
            codec, container = self.cfg.cache.codec.value, self.cfg.cache.container.value
            work = Work(shards, tokens, codec, container, stop, bar.update, finished)
            run_inline(self.store, target, work)
        self._write_rejects()
        if len(self.results) < len(shards):
            raise Interrupted(
                f"stopped with {len(self.results)} of {len(shards)} shards committed",
                where=self.store.root,
                do="The same command goes on",
            )

    def _has_assets(self) -> bool:
        try:
            self.store.target_assets()
        except CacheError:
            return False
        return True

    def _write_rejects(self) -> None:
        rows = [
            {"source": r.source, "reason": r.reason, "name": r.name} for r in self.all_rejects()
        ]
        for row, name in zip(rows[len(self.prepared.rejects) :], self.bad, strict=True):
            row["id"] = name
        self.store.write_rejects(self.job, rows)

    def all_rejects(self) -> list[Reject]:
        """Rows that could not be used, then samples that could not be captured."""
        captured = [
            Reject(self.samples[name].source, reason, self.samples[name].name)
            for name, reason in self.bad.items()
        ]
        return self.prepared.rejects + captured

    def finish(self, started: float) -> int:
        """Writes rejects and the snapshot; prints the summary; returns the exit code."""
        self._write_rejects()
        kept = [s for s in self.prepared.samples if s.id not in self.bad]
        rejects = self.all_rejects()
        share = len(rejects) / max(self.prepared.num_rows, 1)
        run = sum(r.shard.num_tokens for r in self.results)
        seconds = sum(r.seconds for r in self.results)
        num_run = sum(len(r.shard.ids) - len(r.bad) for r in self.results)
        tokens = sum(len(s.tokens_T) for s in kept)
        supervised = sum(int(s.mask_T.sum()) for s in kept)
        held = sum(s.split == "heldout" for s in kept)
        say(
            f"rows      {self.prepared.num_rows:,}: {len(kept):,} samples, "
            f"{self.prepared.num_duplicates:,} duplicates, {len(rejects):,} rejects"
        )
        for reason, count in reasons(rejects):
            say(f"          {count:,} x {reason}")
        say(f"samples   {num_run:,} run, {self.reused:,} in the cache before; {held:,} held out")
        say(f"tokens    {tokens:,}, {supervised:,} supervised")
        if run:
            say(f"speed     {run / seconds:,.0f} tokens/s while running shards")
        if rejects:
            say(f"rejects   {self.store.root}/rejects/{self.job}.jsonl")
        if not kept:
            raise DataError(
                f"none of {len(rejects)} rows could be captured; the first: {rejects[0].reason}",
                where=rejects[0].source,
            )
        snapshot = self.store.write_snapshot(
            [sample.row() for sample in kept], self._meta(), self.cfg.snapshot
        )
        say(f"snapshot  {snapshot.id}")
        say(f"cache     {self.store.root}, {time.perf_counter() - started:.1f} s in all")
        if share > self.cfg.reject_threshold:
            note(
                f"{share:.1%} of the rows are rejected, more than "
                f"reject_threshold={self.cfg.reject_threshold}"
            )
            return 3
        return 0

    def _meta(self) -> dict[str, Any]:
        import hashlib

        template = str(self.tokenizer.chat_template or "")
        data = to_plain(self.cfg.data)
        return {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "target": self.info.cfg.name,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "template": hashlib.blake2b(template.encode(), digest_size=16).hexdigest(),
            "max_tokens": self.cfg.data.max_tokens,
            "sources": self.prepared.files,
            "data": data,
            "job": self.job,
            "rows": self.prepared.num_rows,
            "duplicates": self.prepared.num_duplicates,
            "rejects": len(self.all_rejects()),
        }


def write_assets(store: Store, target: Target, spec: CaptureSpec) -> None:
    """Stores the target's embedding, head and what training and decoding must know of it."""
    config = text_config(target.info.config)
    tokenizer = target.tokenizer
    info = {
        "model": target.info.cfg.model,
        "revision": target.info.cfg.revision,
        "name": target.info.cfg.name,
        "architecture": target.info.architecture,
        "weights": target.info.weights,
        "vocab_size": int(target.embed.weight.shape[0]),
        "hidden_size": spec.hidden_size,
        "tied": target.tied,
        "mask_token_id": mask_token_id(target.info.cfg, tokenizer),
        "eos_token_ids": end_token_ids(target),
        "tokenizer": tokenizer_digest(tokenizer),
        "special_token_ids": sorted(int(i) for i in tokenizer.added_tokens_encoder.values()),
        "num_layers": target.info.num_layers,
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "layer_ids": list(spec.layer_ids),
        "target": to_plain(target.info.cfg),
    }
    head = None if target.tied else target.head.weight
    store.write_target_assets(target.embed.weight, head, info)
