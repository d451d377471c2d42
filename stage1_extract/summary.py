"""The end of an extraction: rejects, snapshot, what the user is told, and the exit code."""

import hashlib
import time
from typing import Any

from shared.config import to_plain
from shared.errors import DataError
from shared.log import note, say
from shared.target import TargetInfo, tokenizer_digest
from stage1_extract.job import Job
from stage1_extract.prompts import reasons


def finish(job: Job, info: TargetInfo, tokenizer: Any, started: float) -> int:
    """Writes rejects and the snapshot; prints the summary; returns the exit code."""
    prepared, store = job.prepared, job.store
    results = [result for result in job.results if result.ran]
    reused = job.num_reused + sum(len(r.shard.ids) for r in job.results if not r.ran)
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
    say(f"samples   {num_run:,} run, {reused:,} in the cache before; {held:,} held out")
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
