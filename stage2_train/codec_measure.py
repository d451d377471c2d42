"""What each codec does to a cache's states: bits, error, decode speed, and the target's next token.

`kl` and `top1` say what the target makes of decoded states: the output of a tapped layer is
replaced by its decoded state and the target's own remaining layers, final norm and head run on it,
in float32; that is held against the same with the stored bf16 state, at every position. Means are
over positions, intervals resample samples. The row `bf16` holds the stored states themselves
against the target's own float32 states: the floor below which a codec can't be told from rounding.

T tokens of a sample, L states, D channels, V vocabulary.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.codec import get_codec
from shared.errors import DataError, TargetError
from shared.quantize import GroupCodec, to_float
from shared.rng import generator
from shared.shards import CHUNK_TOKENS
from shared.spec import CaptureSpec
from shared.store import Store
from stage2_train.stats import Interval, ratio_difference

ROWS = 512  # positions whose logits exist at once
PREAD_BYTES = 128 << 20


@dataclass(frozen=True)
class Sample:
    """One measured sample: input ids int32 [T], states uint16 [T, L, D]."""

    ids_T: np.ndarray
    hidden_TLD: np.ndarray


def choose(store: Store, snapshot: str, count: int, max_tokens: int) -> list[Sample]:
    """Samples of a snapshot in an order that only the snapshot decides, up to both limits.

    Raises:
        DataError: a state is not finite or was stored by a lossy codec.
    """
    chosen, reader, tokens = store.snapshot(snapshot), store.reader(), 0
    order = generator("codec-report", chosen.id).permutation(len(chosen)).tolist()
    index, found = store.committed(), []
    for row in order[:count]:
        name = chosen.ids[row]
        codec = store.shard(index[name][0]).codec
        if get_codec(codec).lossy:
            raise DataError(
                f"sample {name} is stored as {codec}, which has lost bits already",
                where=store.root,
                do="Measure codecs on a lossless cache",
            )
        ids_T, hidden_TLD = reader.read(name)
        room = max_tokens - tokens
        found.append(Sample(ids_T[:room], hidden_TLD[:room]))
        tokens += len(found[-1].ids_T)
        if tokens >= max_tokens:
            break
    return found


def entropy(counts: np.ndarray) -> float:
    """Bits a symbol of counts of any shape, read as one distribution."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def entropy_limits(parts: list[np.ndarray]) -> tuple[float, float]:
    """Order-0 entropy of bf16 bits uint16 [T, L, D]: (of all values, exponents given the channel).

    What no codec that looks at a value alone, or at it and its channel's exponents, can get below.
    """
    whole = np.zeros(1 << 16, np.int64)
    _, num_states, size = parts[0].shape
    channel = np.zeros((num_states * size, 256), np.int64)
    first_C = np.arange(num_states * size) << 8
    for bits_TLD in parts:
        whole += np.bincount(bits_TLD.reshape(-1), minlength=1 << 16)
        exponent_TC = ((bits_TLD >> 7) & 0xFF).reshape(len(bits_TLD), -1)
        found = np.bincount((exponent_TC + first_C).reshape(-1), minlength=channel.size)
        channel += found.reshape(channel.shape)
    exponent = whole.reshape(2, 256, 128).sum((0, 2))
    totals = channel.sum(1, keepdims=True)
    p = channel / np.maximum(totals, 1)
    given = -(p * np.log2(np.where(p > 0, p, 1))).sum(1) @ totals[:, 0] / totals.sum()
    limit = entropy(whole)
    return limit, limit - entropy(exponent) + float(given)


@dataclass
class Coded:
    """One codec on the samples: decoded states and what they cost.

    Args:
        bits: stored bits a value, checksums included.
        limit_bits: order-0 entropy of what the codec keeps: the decoded values' bits, or for int8
            and int4 the integers and the scales as stored.
        layer_error: relative L2 error of each state.
        decode_x_pread: bf16 decoded per CPU second over bf16 read by pread per CPU second.
    """

    name: str
    lossy: bool
    bits: float
    limit_bits: float
    layer_error: list[float]
    decode_x_pread: float
    decoded: list[np.ndarray] = field(repr=False, default_factory=list)


def code(name: str, samples: list[Sample], pread_s: float) -> Coded:
    """Encodes and decodes the samples by a codec.

    Raises:
        AssertionError: a codec that promises every bit didn't return it.
    """
    codec, values = get_codec(name), sum(s.hidden_TLD.size for s in samples)
    chunks = [
        (number, start, np.frombuffer(codec.encode(part, CHUNK_TOKENS), np.uint8))
        for number, sample in enumerate(samples)
        for start in range(0, len(sample.ids_T), CHUNK_TOKENS)
        for part in [sample.hidden_TLD[start : start + CHUNK_TOKENS]]
    ]
    decoded = [np.zeros_like(sample.hidden_TLD) for sample in samples]

    def decode() -> None:
        for number, start, data in chunks:
            part = decoded[number][start : start + CHUNK_TOKENS]
            codec.decode(data, part, CHUNK_TOKENS)

    decode()  # page faults, and imports
    seconds = cpu_seconds(decode)
    squares = np.zeros((2, samples[0].hidden_TLD.shape[1]))
    for sample, back_TLD in zip(samples, decoded, strict=True):
        if not codec.lossy:
            assert np.array_equal(sample.hidden_TLD, back_TLD), name
        true_TLD = to_float(sample.hidden_TLD).astype(np.float64)
        error_TLD = to_float(back_TLD) - true_TLD
        squares += [(x * x).sum((0, 2)) for x in (error_TLD, true_TLD)]
    if isinstance(codec, GroupCodec):
        counts, side = np.zeros(256, np.int64), 0
        for number, start, data in chunks:
            shape = decoded[number][start : start + CHUNK_TOKENS].shape
            *_, body = codec.parts(data, shape, CHUNK_TOKENS)
            counts += np.bincount(codec.unpack(body).view(np.uint8), minlength=256)
            side += len(data) - len(body)
        limit = entropy(counts) * counts.sum() / values + 8 * side / values
    else:
        limit = entropy_limits(decoded)[0]
    return Coded(
        name=name,
        lossy=codec.lossy,
        bits=8 * sum(len(data) + 4 for *_, data in chunks) / values,
        limit_bits=limit,
        layer_error=np.sqrt(squares[0] / np.maximum(squares[1], 1e-300)).tolist(),
        decode_x_pread=pread_s / seconds,
        decoded=decoded,
    )


def cpu_seconds(action: Any, repeats: int = 5) -> float:
    """Least CPU time of a few calls."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        action()
        best = min(best, time.process_time() - begin)
    return max(best, 1e-9)


def pread_seconds(samples: list[Sample]) -> float:
    """CPU seconds to read the samples' bf16 from a file in the page cache, into used buffers.

    The file holds them several times over: one that fits into the CPU's cache reads too fast.
    """
    buffers = [np.ones_like(sample.hidden_TLD) for sample in samples]
    copies = -(-PREAD_BYTES // sum(buffer.nbytes for buffer in buffers))
    with tempfile.TemporaryFile(buffering=0) as file:
        for sample in samples * copies:
            file.write(np.ascontiguousarray(sample.hidden_TLD).data.cast("B"))

        def read() -> None:
            offset = 0
            for buffer in buffers * copies:
                offset += os.preadv(file.fileno(), [buffer.data.cast("B")], offset)

        read()
        return cpu_seconds(read) / copies


class Tail:
    """The target from the output of a tapped layer on."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._tuple = False

    @torch.inference_mode()
    def whole(self, ids_T: np.ndarray) -> Tensor:
        """The target's own last hidden state [T, D], after the final norm."""

        def look(_module: Any, _args: Any, output: Any) -> None:
            self._tuple = isinstance(output, tuple)

        hook = self.target.layers[0].register_forward_hook(look)
        try:
            return self._run(ids_T)
        finally:
            hook.remove()

    @torch.inference_mode()
    def after(self, layer: int, ids_T: np.ndarray, hidden_TD: np.ndarray) -> Tensor:
        """The last hidden state [T, D] when layer `layer` gives these states (bf16 bits).

        Layers before it are not run. `whole` has to be called once before.
        """
        target, given = self.target, self.states(hidden_TD)[None]

        def result(hidden: Tensor) -> Any:
            return (hidden,) if self._tuple else hidden

        def passed(*args: Any, **named: Any) -> Any:
            return result(args[0] if args else named["hidden_states"])

        with contextlib.ExitStack() as stack:
            for earlier in target.layers[:layer]:
                stack.enter_context(_forward(earlier, passed))
            stack.enter_context(_forward(target.layers[layer], lambda *a, **n: result(given)))
            return self._run(ids_T)

    def states(self, hidden_TD: np.ndarray) -> Tensor:
        """bf16 bits as states in the target's dtype."""
        bits = torch.from_numpy(np.ascontiguousarray(hidden_TD).view(np.int16))
        return bits.view(torch.bfloat16).to(self.target.device, self.target.embed.weight.dtype)

    def _run(self, ids_T: np.ndarray) -> Tensor:
        ids = torch.from_numpy(ids_T.astype(np.int64))[None].to(self.target.device)
        found = self.target.decoder(input_ids=ids, use_cache=False)
        return found.last_hidden_state[0]


@contextlib.contextmanager
def _forward(module: Any, function: Any) -> Iterator[None]:
    """Replaces a module's forward for a while."""
    own = module.__dict__.get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@torch.inference_mode()
def next_token(target: Any, true_TD: Tensor, others: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """For each of `others` [T, D]: (sum of KL(true || other), positions of equal top-1, T)."""
    sums = {name: np.zeros(3) for name in others}
    for start in range(0, len(true_TD), ROWS):
        part = slice(start, start + ROWS)
        p_TV = target.head(true_TD[part]).float().log_softmax(-1)
        top_T = p_TV.argmax(-1)
        for name, other_TD in others.items():
            q_TV = target.head(other_TD[part]).float().log_softmax(-1)
            kl = (p_TV.exp() * (p_TV - q_TV)).sum(-1).double().sum()
            same = (q_TV.argmax(-1) == top_T).sum()
            sums[name] += [float(kl), float(same), len(top_T)]
    return sums


def measure_next_token(
    target: Any,
    samples: list[Sample],
    coded: list[Coded],
    spec: CaptureSpec,
    *,
    every_tap: bool,
    advance: Any = lambda count: None,
) -> dict[str, dict[str, tuple[Interval, float]]]:
    """codec (and "bf16") -> state -> (KL in nats with its interval, top-1 agreement).

    States are named `layer N`, and `last` where the cache holds the last hidden state (then only
    the head is applied).

    Args:
        every_tap: each tap alone; else only the deepest.
        advance: called with the tokens of each finished sample.

    Raises:
        TargetError: the stored states aren't those of this target.
    """
    tail, layers = Tail(target), spec.layer_ids
    places = [(f"layer {layer}", layer, state) for state, layer in enumerate(layers)]
    places = places if every_tap else places[-1:]
    if spec.last_hidden:
        places.append(("last", -1, len(layers)))
    lossy = [c for c in coded if c.lossy]
    rows: dict[tuple[str, str], list[np.ndarray]] = {}

    def final(layer: int, ids_T: np.ndarray, hidden_TD: np.ndarray) -> Tensor:
        return tail.states(hidden_TD) if layer < 0 else tail.after(layer, ids_T, hidden_TD)

    for number, sample in enumerate(samples):
        own_TD = tail.whole(sample.ids_T)
        for place, layer, state in places:
            true_TD = final(layer, sample.ids_T, sample.hidden_TLD[:, state])
            others = {
                c.name: final(layer, sample.ids_T, c.decoded[number][:, state]) for c in lossy
            }
            sums = next_token(target, true_TD, others)
            sums |= next_token(target, own_TD, {"bf16": true_TD})
            for name, row in sums.items():
                rows.setdefault((name, place), []).append(row)
        advance(len(sample.ids_T))
    found: dict[str, dict[str, tuple[Interval, float]]] = {}
    for (name, place), parts in rows.items():
        kl_S, same_S, count_S = np.array(parts).T
        interval = ratio_difference(np.zeros_like(kl_S), count_S, kl_S, count_S)
        found.setdefault(name, {})[place] = interval, float(same_S.sum() / count_S.sum())
    agree = min(top1 for _, top1 in found["bf16"].values())
    if agree < 0.5:
        raise TargetError(
            f"the stored states give this target's next token at {agree:.0%} of the positions only",
            do="Run drafttape cache verify with recompute=4",
        )
    return found
