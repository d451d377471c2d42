"""Half a minute of the real thing, for `plan`: the target's speed and the codecs' bits.

T: tokens; L: states; D: channels.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.capture import capture, pack_batch, pad_batch
from shared.codec import get_codec
from shared.target import Target
from stage1_extract.config import Codec
from stage1_extract.plan import JobPlan

_CHUNK_TOKENS = 64
_CODEC_TOKENS = 2048
_LEAST_BATCHES = 8


@dataclass(frozen=True)
class Probe:
    """What was measured.

    Args:
        tokens_per_s: real tokens a second over the whole plan, pads paid for.
        bits: stored bits of a value by codec.
    """

    tokens_per_s: float
    bits: dict[Codec, float]


def probe(
    target: Target,
    job: JobPlan,
    tokens: dict[str, np.ndarray],
    *,
    packed: bool = False,
    last_hidden: bool = False,
    seconds: float = 30.0,
) -> Probe:
    """Runs batches of the plan, spread over it, for about so many seconds.

    Batches are cut to fewer samples where the target is so slow that a handful would not fit.

    Args:
        packed: the plan's batches are packed.
    """
    batches = [shard.ids[a:b] for shard in job.shards for a, b in shard.batches]
    # Steps of the golden ratio: any number of batches is spread evenly over all lengths.
    step = max(1, round(len(batches) * 0.618))
    while np.gcd(step, len(batches)) != 1:
        step += 1
    limit = computed = 0
    spent = started = 0.0
    kept: list[np.ndarray] = []
    for turn in range(10**9):
        names = batches[turn * step % len(batches)]
        longest = max(len(tokens[name]) for name in names)
        sequences = [tokens[name] for name in names[: max(1, limit // longest)]]
        begin = time.perf_counter()
        rows, size = _states(target, sequences, packed, last_hidden)
        took = time.perf_counter() - begin
        if turn < 2:  # the first batch warms up, the second one shows how large they may be
            limit = max(1, int(size * seconds / _LEAST_BATCHES / took))
            started = time.perf_counter()
            continue
        computed += size
        spent += took
        kept += rows
        if sum(map(len, kept)) > 2 * _CODEC_TOKENS:
            kept = kept[len(kept) // 2 :]
        if time.perf_counter() - started > seconds and turn > _LEAST_BATCHES:
            break
    real = sum(shard.num_tokens for shard in job.shards)
    return Probe(real / job.computed_tokens(packed) * computed / spent, measured_bits(kept))


def _states(
    target: Target, sequences: list[np.ndarray], packed: bool, last_hidden: bool
) -> tuple[list[np.ndarray], int]:
    """uint16 [T, L, D] of each sequence on the host, and how many tokens were computed."""
    import torch

    ids_BT, lengths = pack_batch(sequences) if packed else pad_batch(sequences, 0)
    layers = target.info.layer_ids
    hidden = capture(target, ids_BT.to(target.device), lengths, layers, last_hidden, packed)
    bits = hidden.cpu().view(torch.int16).numpy().view(np.uint16)
    if packed:
        return np.split(bits[0], np.cumsum(lengths)[:-1]), ids_BT.numel()
    return [row[:length] for row, length in zip(bits, lengths, strict=True)], ids_BT.numel()


def measured_bits(states: Sequence[np.ndarray]) -> dict[Codec, float]:
    """Stored bits of a value by codec, on the first tokens of uint16 [T, L, D] arrays."""
    rows: Any = np.concatenate(states)[:_CODEC_TOKENS]
    bits = {}
    for codec in Codec:
        encoder = get_codec(codec.value)
        chunks = range(0, len(rows), _CHUNK_TOKENS)
        size = sum(
            len(encoder.encode(rows[at : at + _CHUNK_TOKENS], _CHUNK_TOKENS)) for at in chunks
        )
        bits[codec] = 8 * size / rows.size
    return bits
