"""Lossy codecs on chunks: rounded mantissas, int8 with channel scales, int4 with a rotation.

All arithmetic is float32 in a fixed order and ends in round-to-nearest-even bf16, so that numpy
and torch, and every machine, decode a chunk to the same bits.
R: rows of a chunk; L: states; D: channels; G: groups of channels.
"""

import math
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
class GroupCodec:
    """What int8 and int4 share: channels brought to one scale, then small integers in groups.

    value = q * channel * scale (FORMAT.md has the order); channel = 2**(k / 4) with k (int8) one
    per state and channel of the chunk; scale (bf16) one per row, state and group. A chunk: header,
    Blosc of [k, high bytes and low bytes of the scales], q of the real rows only.
    """

    name: str
    group: int
    lossy: bool = True
    magic: ClassVar[bytes]
    top: ClassVar[int]
    fallback: ClassVar[int]  # k of all channels where a channel's own one would overflow

    def turned(self, y_RLD: np.ndarray) -> np.ndarray:
        """What is quantised of the scaled channels."""
        return y_RLD

    def width(self, hidden_size: int) -> int:
        """Channels that are quantised, pads included."""
        return hidden_size

    def pack(self, q_RLD: np.ndarray) -> bytes:
        raise NotImplementedError

    def unpack(self, body: np.ndarray) -> np.ndarray:
        """int8, the integers of `pack`, flat."""
        raise NotImplementedError

    def packed_size(self, rows: int, num_states: int, hidden_size: int) -> int:
        """Bytes that `pack` gives."""
        raise NotImplementedError

    def encode(self, rows_RLD: np.ndarray, chunk_tokens: int) -> bytes:
        check_finite(rows_RLD, self.name)
        x_RLD = to_float(rows_RLD)
        k_LD = channel_exponents(x_RLD)
        with np.errstate(over="ignore", invalid="ignore"):
            y_RLD = self.turned(x_RLD / exp2_quarter(k_LD))
        if not np.isfinite(y_RLD).all():
            k_LD = np.full_like(k_LD, self.fallback)
            y_RLD = self.turned(x_RLD / exp2_quarter(k_LD))
        y_RLGg, scale_RLG = scaled_groups(y_RLD, self.group, self.top)
        q_RLD = np.rint(y_RLGg).astype(np.int8).reshape(*y_RLD.shape[:2], -1)
        side = pack_side(k_LD, scale_RLG)
        head = _HEAD.pack(self.magic, len(rows_RLD), len(side), 0)
        return head + side + self.pack(q_RLD[..., : self.width(rows_RLD.shape[2])])

    def parts(
        self, data: Any, shape: tuple[int, ...], chunk_tokens: int
    ) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """(rows, k [L, D], scale [R, L, G] float32, the packed integers) of a chunk.

        Args:
            shape: at most as many rows as the chunk has, L, D.

        Raises:
            CorruptionError: the chunk is not one of this codec, or too short.
        """
        data_N = np.frombuffer(data, np.uint8)
        if len(data_N) < _HEAD.size:
            raise CorruptionError("a chunk is shorter than its header")
        magic, rows, size, zero = _HEAD.unpack(data_N[: _HEAD.size].tobytes())
        wanted, states, hidden_size = shape
        if magic != self.magic or zero or not wanted <= rows <= chunk_tokens:
            raise CorruptionError(f"not a chunk of codec {self.name} with {wanted} rows")
        groups = -(-self.width(hidden_size) // self.group)
        packed, body = data_N[_HEAD.size :][:size], data_N[_HEAD.size + size :]
        k_LD, scale_RLG = unpack_side(packed, (states, hidden_size), (rows, states, groups))
        if len(body) != self.packed_size(rows, states, hidden_size):
            raise CorruptionError(f"a chunk has {len(body)} quantised bytes for {rows} rows")
        return rows, k_LD, scale_RLG, body


@dataclass(frozen=True)
class Int8Codec(GroupCodec):
    """int8 in groups of 64 channels; q in [-127, 127]. 8.25 bits a value."""

    name: str = "int8"
    group: int = 64
    magic: ClassVar[bytes] = b"dti8"
    top: ClassVar[int] = 127
    fallback: ClassVar[int] = 0

    def zarr_codecs(self) -> list[dict[str, Any]]:
        return [{"name": "drafttape.int8", "configuration": {"group": self.group}}]

    def pack(self, q_RLD: np.ndarray) -> bytes:
        return np.ascontiguousarray(q_RLD).tobytes()

    def unpack(self, body: np.ndarray) -> np.ndarray:
        return body.view(np.int8)

    def packed_size(self, rows: int, num_states: int, hidden_size: int) -> int:
        return rows * num_states * hidden_size

    def decode(self, data: Any, out_RLD: np.ndarray, chunk_tokens: int) -> None:
        wanted, *inner = out_RLD.shape
        rows, k_LD, scale_RLG, body = self.parts(data, out_RLD.shape, chunk_tokens)
        q_RLD = self.unpack(body).reshape(rows, *inner)[:wanted]
        dequantise(q_RLD, exp2_quarter(k_LD), scale_RLG[:wanted], self.group, out_RLD)


@dataclass(frozen=True)
class Int4Codec(GroupCodec):
    """Experimental: int4 in groups of 32 after a Hadamard rotation of 64 channels. 4.5 bits.

    Its loss is large (see codec-report); it is there to measure what a drafter tolerates.
    """

    name: str = "int4"
    group: int = 32
    rotation: int = 64
    magic: ClassVar[bytes] = b"dti4"
    top: ClassVar[int] = 7
    fallback: ClassVar[int] = 24  # 2**(24 / 4) = 64: the rotation's sums stay finite

    def zarr_codecs(self) -> list[dict[str, Any]]:
        configuration = {"group": self.group, "rotation": self.rotation}
        return [{"name": "drafttape.int4", "configuration": configuration}]

    def turned(self, y_RLD: np.ndarray) -> np.ndarray:
        return rotate(y_RLD, self.rotation)

    def width(self, hidden_size: int) -> int:
        return -(-hidden_size // self.rotation) * self.rotation

    def pack(self, q_RLD: np.ndarray) -> bytes:
        q = q_RLD.reshape(-1, 2) + 8
        return (q[:, 0] | (q[:, 1] << 4)).astype(np.uint8).tobytes()

    def unpack(self, body: np.ndarray) -> np.ndarray:
        q = np.empty((body.size, 2), np.int8)
        q[:, 0], q[:, 1] = body & 15, body >> 4
        return q.reshape(-1) - np.int8(8)

    def packed_size(self, rows: int, num_states: int, hidden_size: int) -> int:
        return rows * num_states * self.width(hidden_size) // 2

    def decode(self, data: Any, out_RLD: np.ndarray, chunk_tokens: int) -> None:
        wanted, num_states, size = out_RLD.shape
        _, k_LD, scale_RLG, body = self.parts(data, out_RLD.shape, chunk_tokens)
        needed = self.packed_size(wanted, num_states, size)
        q_RLGg = self.unpack(body[:needed]).reshape(wanted, num_states, -1, self.group)
        with np.errstate(over="ignore", invalid="ignore"):
            y = q_RLGg.astype(np.float32) * scale_RLG[:wanted, ..., None]
            y_RLD = self.turned(y.reshape(wanted, num_states, -1))
            x_RLD = y_RLD[..., :size] * exp2_quarter(k_LD)
        out_RLD[:] = to_bits(np.clip(x_RLD, -_MAX, _MAX))


_MAX = np.float32(3.3895313892515355e38)  # the largest bf16
_QUARTERS = np.array([1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75], np.float32)
_K = np.arange(256).astype(np.uint8).view(np.int8).astype(np.int32)  # as int8 counts
_EXP2 = np.ldexp(_QUARTERS[_K & 3], _K >> 2).astype(np.float32)


def exp2_quarter(k: np.ndarray) -> np.ndarray:
    """2**(k / 4) of int8 k in float32, the same bits everywhere."""
    return _EXP2.take(k.view(np.uint8))


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
    """Channel exponents and scales, compressed by what decodes them fastest."""
    scales = to_bits(scale_RLG)
    planes = k_LD.tobytes() + (scales >> 8).astype("u1").tobytes() + scales.astype("u1").tobytes()
    return blosc().compress(np.frombuffer(planes, np.uint8), b"lz4", 9, blosc().NOSHUFFLE, 0)


def unpack_side(
    packed: np.ndarray, channels: tuple[int, int], scales: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(k [L, D] int8, scale [R, L, G] float32) of these shapes.

    Raises:
        CorruptionError: they aren't there.
    """
    split, count = math.prod(channels), math.prod(scales)
    side = np.empty(split + 2 * count, np.uint8)
    check_blosc(packed, side.size)
    try:
        blosc().decompress(packed, side)
    except RuntimeError as error:
        raise CorruptionError(f"a chunk's scales can't be decoded ({error})") from None
    high, low = side[split:].reshape(2, count)
    bits = np.left_shift(high, 24, dtype=np.uint32) | np.left_shift(low, 16, dtype=np.uint32)
    return side[:split].view(np.int8).reshape(channels), bits.view(np.float32).reshape(scales)


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
