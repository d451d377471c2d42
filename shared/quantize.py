"""Lossy codecs on chunks: rounded mantissas, int8 with channel scales, int4 with a rotation.

All arithmetic is float32 in a fixed order and ends in round-to-nearest-even bf16, so that numpy
and torch, and every machine, decode a chunk to the same bits.
R: rows of a chunk; L: states; D: channels; G: groups of channels.
"""

import struct
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shared.codec import BloscCodec, blosc, check_blosc, scratch
from shared.errors import CorruptionError, DataError

_HEAD = struct.Struct("<4sIII")  # magic, rows, bytes of the scales, 0


def to_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(x: np.ndarray) -> np.ndarray:
    """float32 as bf16 bits, rounded to nearest even; x must be finite and in bf16's range."""
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def check_finite(bits: np.ndarray, codec: str) -> None:
    """
    Raises:
        DataError: a state is NaN or infinite.
    """
    if np.any((bits & 0x7F80) == 0x7F80):
        raise DataError(f"codec {codec} needs finite states", do="Use the lossless codec")


@dataclass(frozen=True)
class RoundedCodec(BloscCodec):
    """Keeps `mantissa` of bf16's 7 mantissa bits, then the lossless chain: stock zarr reads it."""

    mantissa: int = 7
    lossy: bool = True

    def encode(self, rows_RLD: np.ndarray, chunk_tokens: int) -> bytes:
        check_finite(rows_RLD, self.name)
        drop = 7 - self.mantissa
        wide = rows_RLD.astype(np.uint32)
        rounded = wide + ((1 << (drop - 1)) - 1) + ((wide >> drop) & 1)
        rounded &= 0xFFFF ^ ((1 << drop) - 1)
        # The largest values would round up to infinity: those are cut off instead.
        cut = wide & (0xFFFF ^ ((1 << drop) - 1))
        rounded = np.where((rounded & 0x7F80) == 0x7F80, cut, rounded)
        return super().encode(rounded.astype(np.uint16), chunk_tokens)


@dataclass(frozen=True)
class Int8Codec:
    """int8 in groups of 64 channels, after channels are brought to one scale.

    value = q * channel * scale; q in [-127, 127]; channel = 2**(k / 4) with k (int8) one per
    state and channel of the chunk; scale (bf16) one per row, state and group. 8.25 bits a value.
    A chunk: header, Blosc of [k, scales], q of the real rows only.
    """

    name: str = "int8"
    lossy: bool = True
    group: int = 64
    magic: ClassVar[bytes] = b"dti8"

    def zarr_codecs(self) -> list[dict[str, Any]]:
        return [{"name": "drafttape.int8", "configuration": {"group": self.group}}]

    def encode(self, rows_RLD: np.ndarray, chunk_tokens: int) -> bytes:
        check_finite(rows_RLD, self.name)
        x_RLD = to_float(rows_RLD)
        k_LD = channel_exponents(x_RLD)
        with np.errstate(over="ignore"):
            y_RLD = x_RLD / exp2_quarter(k_LD)
        if not np.isfinite(y_RLD).all():
            k_LD, y_RLD = np.zeros_like(k_LD), x_RLD
        y_RLGg, scale_RLG = scaled_groups(y_RLD, self.group, 127)
        q_RLD = np.rint(y_RLGg).astype(np.int8).reshape(*y_RLD.shape[:2], -1)
        q_RLD = q_RLD[..., : y_RLD.shape[2]]
        side = pack_side(k_LD, scale_RLG)
        head = _HEAD.pack(self.magic, len(rows_RLD), len(side), 0)
        return head + side + np.ascontiguousarray(q_RLD).tobytes()

    def decode(self, data: Any, out_RLD: np.ndarray, chunk_tokens: int) -> None:
        shape = out_RLD.shape
        rows, k_LD, scale_RLG, body = unpack_side(self, data, out_RLD, self.group, chunk_tokens)
        if len(body) != rows * shape[1] * shape[2]:
            raise CorruptionError(f"a chunk has {len(body)} quantised bytes for {rows} rows")
        q_RLD = np.frombuffer(body, np.int8).reshape(rows, *shape[1:])[: shape[0]]
        dequantise(q_RLD, exp2_quarter(k_LD), scale_RLG[: shape[0]], self.group, out_RLD)


@dataclass(frozen=True)
class Int4Codec:
    """Experimental: int4 in groups of 32 after a Hadamard rotation of 64 channels. 4.5 bits.

    Its loss is large (see codec-report); it is there to measure what a drafter tolerates.
    """

    name: str = "int4"
    lossy: bool = True
    group: int = 32
    rotation: int = 64
    magic: ClassVar[bytes] = b"dti4"

    def zarr_codecs(self) -> list[dict[str, Any]]:
        configuration = {"group": self.group, "rotation": self.rotation}
        return [{"name": "drafttape.int4", "configuration": configuration}]

    def encode(self, rows_RLD: np.ndarray, chunk_tokens: int) -> bytes:
        check_finite(rows_RLD, self.name)
        x_RLD = to_float(rows_RLD)
        k_LD = channel_exponents(x_RLD)
        with np.errstate(over="ignore", invalid="ignore"):
            y_RLD = rotate(x_RLD / exp2_quarter(k_LD), self.rotation)
        if not np.isfinite(y_RLD).all():
            k_LD, y_RLD = np.zeros_like(k_LD), rotate(x_RLD * np.float32(1 / 64), self.rotation)
            k_LD += 24  # 2**(24 / 4) = 64: the rotation's sums stay finite
        y_RLGg, scale_RLG = scaled_groups(y_RLD, self.group, 7)
        q = np.rint(y_RLGg).astype(np.int8).reshape(-1, 2) + 8
        side = pack_side(k_LD, scale_RLG)
        head = _HEAD.pack(self.magic, len(rows_RLD), len(side), 0)
        return head + side + (q[:, 0] | (q[:, 1] << 4)).astype(np.uint8).tobytes()

    def decode(self, data: Any, out_RLD: np.ndarray, chunk_tokens: int) -> None:
        _, num_states, size = out_RLD.shape
        rows, k_LD, scale_RLG, body = unpack_side(self, data, out_RLD, self.group, chunk_tokens)
        width = -(-size // self.rotation) * self.rotation
        if len(body) != rows * num_states * width // 2:
            raise CorruptionError(f"a chunk has {len(body)} quantised bytes for {rows} rows")
        packed = np.frombuffer(body, np.uint8)[: out_RLD.shape[0] * num_states * width // 2]
        q = np.empty((packed.size, 2), np.int8)
        q[:, 0], q[:, 1] = packed & 15, packed >> 4
        q_RLGg = q.reshape(len(out_RLD), num_states, -1, self.group) - np.int8(8)
        with np.errstate(over="ignore", invalid="ignore"):
            y = q_RLGg.astype(np.float32) * scale_RLG[: len(out_RLD), ..., None]
            y_RLD = rotate(y.reshape(len(out_RLD), num_states, width), self.rotation)
            x_RLD = y_RLD[..., :size] * exp2_quarter(k_LD)
        out_RLD[:] = to_bits(np.clip(x_RLD, -_MAX, _MAX))


_MAX = np.float32(3.3895313892515355e38)  # the largest bf16
_QUARTERS = np.array([1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75], np.float32)
_K = np.arange(256).astype(np.uint8).view(np.int8).astype(np.int32)  # as int8 counts
_EXP2 = np.ldexp(_QUARTERS[_K & 3], _K >> 2).astype(np.float32)


def exp2_quarter(k: np.ndarray) -> np.ndarray:
    """2**(k / 4) of int8 k in float32, the same bits everywhere."""
    return _EXP2[k.view(np.uint8)]


def channel_exponents(x_RLD: np.ndarray) -> np.ndarray:
    """k [L, D] int8: 4 * log2 of each channel's usual size relative to its state's.

    Rows are first brought to one scale, so that a single huge token (the first of a text often
    is) doesn't decide for all.
    """
    size_RLD = np.abs(x_RLD)
    row_RL1 = size_RLD.mean(-1, keepdims=True, dtype=np.float64)
    relative = size_RLD / np.where(row_RL1 > 0, row_RL1, 1)
    mean_LD = relative.mean(0, dtype=np.float64)
    k_LD = np.rint(4 * np.log2(np.where(mean_LD > 0, mean_LD, 1)))
    return np.clip(k_LD, -120, 120).astype(np.int8)


def scaled_groups(y_RLD: np.ndarray, group: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """(y / scale [R, L, G, group] clipped to +-top, scale [R, L, G] float32 that bf16 holds)."""
    rows, states, size = y_RLD.shape
    pad = -size % group
    if pad:
        y_RLD = np.concatenate([y_RLD, np.zeros((rows, states, pad), np.float32)], -1)
    y_RLGg: np.ndarray = y_RLD.reshape(rows, states, -1, group)
    largest = np.abs(y_RLGg).max(-1)
    scale = np.maximum(largest / np.float32(top), np.float32(2.0**-126))
    scale_RLG = to_float(to_bits(np.minimum(scale, _MAX)))
    return np.clip(y_RLGg / scale_RLG[..., None], -top, top), scale_RLG


def pack_side(k_LD: np.ndarray, scale_RLG: np.ndarray) -> bytes:
    """Channel exponents and scales, compressed."""
    scales = to_bits(scale_RLG)
    planes = k_LD.tobytes() + (scales >> 8).astype("u1").tobytes() + scales.astype("u1").tobytes()
    return blosc().compress(np.frombuffer(planes, np.uint8), b"zstd", 1, blosc().SHUFFLE, 0)


def unpack_side(
    codec: Any, data: Any, out_RLD: np.ndarray, group: int, chunk_tokens: int
) -> tuple[int, np.ndarray, np.ndarray, memoryview]:
    """(rows, k [L, D], scale [R, L, G] float32, the quantised bytes) of a chunk.

    Raises:
        CorruptionError: the chunk is not one of this codec, or too short.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise CorruptionError("a chunk is shorter than its header")
    magic, rows, size, zero = _HEAD.unpack_from(view)
    wanted, states, width = out_RLD.shape
    if magic != codec.magic or zero or not wanted <= rows <= chunk_tokens:
        raise CorruptionError(f"not a chunk of codec {codec.name} with {wanted} rows")
    padded_width = width
    if isinstance(codec, Int4Codec):
        padded_width = -(-width // codec.rotation) * codec.rotation
    groups = -(-padded_width // group)
    count = rows * states * groups
    side = np.empty(states * width + 2 * count, np.uint8)
    packed = view[_HEAD.size : _HEAD.size + size]
    check_blosc(packed, side.size)
    try:
        blosc().decompress(packed, side)
    except RuntimeError as error:
        raise CorruptionError(f"a chunk's scales can't be decoded ({error})") from None
    k_LD = side[: states * width].view(np.int8).reshape(states, width)
    high, low = side[states * width :].reshape(2, count)
    scales = (high.astype(np.uint16) << 8) | low
    return rows, k_LD, to_float(scales).reshape(rows, states, groups), view[_HEAD.size + size :]


def rotate(y_RLD: np.ndarray, width: int) -> np.ndarray:
    """The orthonormal Hadamard rotation of each `width` channels (its own inverse), zero-padded.

    Butterflies, not a matrix product: sums in one order on every machine.
    """
    rows, states, size = y_RLD.shape
    pad = -size % width
    if pad:
        y_RLD = np.concatenate([y_RLD, np.zeros((rows, states, pad), np.float32)], -1)
    x: np.ndarray = y_RLD.reshape(-1, width).astype(np.float32)
    half = 1
    while half < width:
        x = x.reshape(-1, width // (2 * half), 2, half)
        x = np.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], 2)
        half *= 2
    return (x * np.float32(width**-0.5)).reshape(rows, states, size + pad)


def dequantise(
    q_RLD: np.ndarray,
    channel_LD: np.ndarray,
    scale_RLG: np.ndarray,
    group: int,
    out_RLD: np.ndarray,
) -> None:
    """out = bf16((q * channel) * scale), in blocks that stay in the CPU's cache.

    torch does it five times as fast as numpy; `dequantise_numpy` is its twin.
    """
    import torch

    rows, states, size = q_RLD.shape
    if size % group or not out_RLD.flags.c_contiguous or not q_RLD.flags.c_contiguous:
        dequantise_numpy(q_RLD, channel_LD, scale_RLG, group, out_RLD)
        return
    step = max(1, min(rows, (1 << 21) // (states * size * 4)))
    work = torch.from_numpy(scratch(step * states * size * 2).view(np.float32))
    work = work.view(step, states, size)
    channel = torch.from_numpy(channel_LD)
    scale = torch.from_numpy(np.ascontiguousarray(scale_RLG)).unsqueeze(-1)
    target = torch.from_numpy(out_RLD.view(np.int16)).view(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the buffer of q is read-only, and only read
        q = torch.from_numpy(q_RLD)
    for start in range(0, rows, step):
        block = work[: min(step, rows - start)]
        block.copy_(q[start : start + step]).mul_(channel)
        block.view(len(block), states, -1, group).mul_(scale[start : start + step])
        target[start : start + step].copy_(block)


def dequantise_numpy(
    q_RLD: np.ndarray,
    channel_LD: np.ndarray,
    scale_RLG: np.ndarray,
    group: int,
    out_RLD: np.ndarray,
) -> None:
    """The naive twin of `dequantise`."""
    size = q_RLD.shape[2]
    with np.errstate(over="ignore", invalid="ignore"):
        x_RLD = q_RLD.astype(np.float32) * channel_LD
        x_RLD *= np.repeat(scale_RLG, group, axis=-1)[..., :size]
    out_RLD[:] = to_bits(x_RLD)
