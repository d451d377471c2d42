"""Half a minute of the real thing, for `plan`: the target's speed and the codecs' bits.

T: tokens; L: states; D: channels.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.capture import capture, pad_batch
from shared.codec import get_codec
from shared.config import TargetConfig
from shared.target import Target, load_target
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
    cfg: TargetConfig,
    device: str,
    job: JobPlan,
    tokens: dict[str, np.ndarray],
    *,
    last_hidden: bool = False,
    seconds: float = 30.0,
) -> Probe:
    """Runs batches of the plan, spread over it, for about so many seconds.

    Batches are cut to fewer samples where the target is so slow that a handful would not fit.
    """
    target = load_target(cfg, device)
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
        names = names[: max(1, limit // longest)]
        begin = time.perf_counter()
        hidden_BTLD, lengths = _states(target, [tokens[name] for name in names], last_hidden)
        took = time.perf_counter() - begin
        if turn < 2:  # the first batch warms up, the second one shows how large they may be
            limit = max(1, int(len(names) * longest * seconds / _LEAST_BATCHES / took))
            started = time.perf_counter()
            continue
        computed += len(names) * longest
        spent += took
        kept += [row[:length] for row, length in zip(hidden_BTLD, lengths, strict=True)]
        if sum(map(len, kept)) > 2 * _CODEC_TOKENS:
            kept = kept[len(kept) // 2 :]
        if time.perf_counter() - started > seconds and turn > _LEAST_BATCHES:
            break
    needed = sum(shard.computed_tokens for shard in job.shards)
    real = sum(shard.num_tokens for shard in job.shards)
    return Probe(real / needed * computed / spent, measured_bits(kept))


def _states(
    target: Target, sequences: list[np.ndarray], last_hidden: bool
) -> tuple[np.ndarray, list[int]]:
    """uint16 [B, T, L, D] on the host, and the lengths."""
    import torch

    ids_BT, lengths = pad_batch(sequences, 0)
    layers = target.info.layer_ids
    hidden = capture(target, ids_BT.to(target.device), lengths, layers, last_hidden)
    return hidden.cpu().view(torch.int16).numpy().view(np.uint16), lengths


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
