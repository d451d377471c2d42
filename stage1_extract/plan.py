"""Which samples go into which shard and batch: pure functions of lengths and ids.

Samples are sorted by length (longest first, so that memory runs out at once or never), cut into
shards of a size in bytes, and batched inside a shard: worker count, executor and interruptions
change neither shards nor batches, hence no byte.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stage1_extract.config import Codec

# A forward pass costs about as much as this many padded tokens more: below it, split no further.
BATCH_OVERHEAD_TOKENS = 128
# Stored bits of a value, measured on real hidden states; a wide target may differ by some percent.
BITS = {
    Codec.lossless: 11.5,
    Codec.fast: 13.3,
    Codec.int8: 7.76,
    Codec.bits5: 9.0,
    Codec.bits4: 8.1,
    Codec.bits3: 7.1,
    Codec.int4: 4.5,
}


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its samples in order, and its batches as (start, stop) ranges over them."""

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def computed_tokens(self, packed: bool) -> int:
        """Tokens that the target computes; pads count where batches are not packed."""
        if packed:
            return self.num_tokens
        return sum(self.lengths[start] * (stop - start) for start, stop in self.batches)

    def without(self, dropped: set[str]) -> "ShardPlan":
        """The shard with some samples left out of it and of its batches."""
        kept = [i for i, name in enumerate(self.ids) if name not in dropped]
        batches, position = [], 0
        for start, stop in self.batches:
            count = sum(start <= i < stop for i in kept)
            if count:
                batches.append((position, position + count))
            position += count
        return ShardPlan(
            tuple(self.ids[i] for i in kept), tuple(self.lengths[i] for i in kept), tuple(batches)
        )


@dataclass(frozen=True)
class JobPlan:
    """Everything an extraction will run."""

    shards: tuple[ShardPlan, ...]

    def computed_tokens(self, packed: bool) -> int:
        """Tokens that the target computes in all shards."""
        return sum(shard.computed_tokens(packed) for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        return {
            "shards": [
                {"ids": list(s.ids), "lengths": list(s.lengths), "batches": list(s.batches)}
                for s in self.shards
            ]
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "JobPlan":
        return cls(
            tuple(
                ShardPlan(
                    tuple(shard["ids"]),
                    tuple(shard["lengths"]),
                    tuple((start, stop) for start, stop in shard["batches"]),
                )
                for shard in document["shards"]
            )
        )


def plan_job(
    samples: Sequence[tuple[str, int]],
    bytes_per_token: int,
    shard_bytes: int,
    batch_tokens: int,
    packed: bool = False,
) -> JobPlan:
    """Shards and batches of (id, num_tokens) samples.

    Args:
        bytes_per_token: bf16 bytes of a token's states.
        shard_bytes: a shard is closed before it would grow over this; it holds a sample at least.
        batch_tokens: budget of a batch, pads included; a longer sample is alone.
        packed: samples stand end to end in a batch, without pads.
    """
    shards: list[ShardPlan] = []
    current: list[tuple[str, int]] = []
    size = 0
    for name, length in sorted(samples, key=lambda item: (-item[1], item[0])):
        if current and size + length * bytes_per_token > shard_bytes:
            shards.append(_shard(current, batch_tokens, packed))
            current, size = [], 0
        current.append((name, length))
        size += length * bytes_per_token
    if current:
        shards.append(_shard(current, batch_tokens, packed))
    return JobPlan(tuple(shards))


def _shard(samples: list[tuple[str, int]], batch_tokens: int, packed: bool) -> ShardPlan:
    lengths = tuple(length for _, length in samples)
    batches = (pack_batches if packed else plan_batches)(lengths, batch_tokens)
    return ShardPlan(tuple(name for name, _ in samples), lengths, tuple(batches))


def pack_batches(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Ranges over lengths whose sum is within the budget, or that hold one sample."""
    ranges, start, total = [], 0, 0
    for stop, length in enumerate(lengths):
        if stop > start and total + length > batch_tokens:
            ranges.append((start, stop))
            start, total = stop, 0
        total += length
    return [*ranges, (start, len(lengths))]


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Ranges over descending lengths that cost least: padded tokens plus an overhead a batch.

    Dynamic programming over the last batch's start; a batch that would be cheaper in two parts is
    no candidate, and neither is any longer one with the same end.
    """
    best = [0] + [0] * len(lengths)
    start_of = [0] * (len(lengths) + 1)
    for stop in range(1, len(lengths) + 1):
        best[stop] = -1
        for start in range(stop - 1, -1, -1):
            longest, count = lengths[start], stop - start
            if count > 1 and longest * count > batch_tokens:
                break
            middle = (start + stop) // 2
            if (longest - lengths[middle]) * (stop - middle) > BATCH_OVERHEAD_TOKENS:
                break
            cost = best[start] + longest * count + BATCH_OVERHEAD_TOKENS
            if best[stop] < 0 or cost < best[stop]:
                best[stop], start_of[stop] = cost, start
    ranges, stop = [], len(lengths)
    while stop:
        ranges.append((start_of[stop], stop))
        stop = start_of[stop]
    return ranges[::-1]


def job_id(request: Sequence[Any], ids: Sequence[str]) -> str:
    """Names a job by what is asked for: its settings and the set of samples."""
    digest = hashlib.blake2b(b"drafttape.job.v1", digest_size=16)
    digest.update(repr(tuple(request)).encode())
    for name in sorted(ids):
        digest.update(bytes.fromhex(name))
    return digest.hexdigest()
