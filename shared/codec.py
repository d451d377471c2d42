"""Codecs: how a chunk of hidden states becomes bytes.

A chunk is up to `chunk_tokens` rows of one sample; a shorter one is padded to full size with
65535, the fill value (a bf16 NaN, so that a pad can't pass for data). Each codec is a chain of
zarr codecs whose parameters stand in the array's metadata: stock zarr reads what it knows.
R: rows of a chunk that are real; C: rows of a full chunk; L: states; D: channels.
"""

import struct
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from shared.errors import ConfigError, CorruptionError

FILL = 65535
_BLOSC_MAX = (1 << 31) - 1 - 16


class Codec(Protocol):
    """Encodes and decodes chunks of uint16 (the bits of bf16)."""

    @property
    def name(self) -> str: ...

    @property
    def lossy(self) -> bool: ...

    def zarr_codecs(self) -> list[dict[str, Any]]:
        """The array-to-bytes and bytes-to-bytes codecs, without the final crc32c."""
        ...

    def encode(self, rows_RLD: np.ndarray, chunk_tokens: int) -> bytes:
        """Bytes of a chunk; R <= chunk_tokens."""
        ...

    def decode(self, data: Any, out_RLD: np.ndarray, chunk_tokens: int) -> None:
        """Writes the first R rows of a chunk; raises CorruptionError when they aren't there."""
        ...


@cache
def blosc() -> Any:
    """numcodecs.blosc, single-threaded."""
    import numcodecs.blosc

    # One thread: readers and writers are parallel by process, and figures are per CPU second.
    numcodecs.blosc.use_threads = False
    return numcodecs.blosc


def padded(rows_RLD: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """The rows as one contiguous full chunk, filled up with 65535."""
    if len(rows_RLD) == chunk_tokens:
        return np.ascontiguousarray(rows_RLD, dtype="<u2")
    block_CLD = np.full((chunk_tokens, *rows_RLD.shape[1:]), FILL, dtype="<u2")
    block_CLD[: len(rows_RLD)] = rows_RLD
    return block_CLD


@dataclass(frozen=True)
class BloscCodec:
    """Blosc over the raw bits. `blocksize` is the trap: at Blosc's own choice the ratio is .80, at
    1 MiB .690, at 4 MiB (mostly a whole chunk) .682, all equally fast."""

    name: str
    cname: str
    clevel: int
    shuffle: str
    blocksize: int = 1 << 22
    lossy: bool = False

    def zarr_codecs(self) -> list[dict[str, Any]]:
        configuration = {
            "typesize": 2,
            "cname": self.cname,
            "clevel": self.clevel,
            "shuffle": self.shuffle,
            "blocksize": self.blocksize,
        }
        return [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "blosc", "configuration": configuration},
        ]

    def encode(self, rows_RLD: np.ndarray, chunk_tokens: int) -> bytes:
        shuffle = {"shuffle": blosc().SHUFFLE, "bitshuffle": blosc().BITSHUFFLE}[self.shuffle]
        block_CLD = padded(rows_RLD, chunk_tokens)
        return blosc().compress(
            block_CLD.reshape(-1), self.cname.encode(), self.clevel, shuffle, self.blocksize
        )

    def decode(self, data: Any, out_RLD: np.ndarray, chunk_tokens: int) -> None:
        row_bytes = out_RLD.shape[1] * out_RLD.shape[2] * 2
        check_blosc(data, chunk_tokens * row_bytes)
        try:
            if len(out_RLD) == chunk_tokens and out_RLD.flags.c_contiguous:
                blosc().decompress(data, out_RLD.reshape(-1))
            else:
                chunk = scratch(chunk_tokens * row_bytes // 2)
                blosc().decompress(data, chunk)
                out_RLD[:] = chunk[: out_RLD.size].reshape(out_RLD.shape)
        except RuntimeError as error:
            raise CorruptionError(f"a chunk can't be decoded ({error})") from None


def check_blosc(data: Any, num_bytes: int) -> None:
    """Refuses a Blosc buffer whose header doesn't promise exactly `num_bytes`.

    Raises:
        CorruptionError: the header is missing or says something else.
    """
    if len(data) < 16:
        raise CorruptionError("a chunk is shorter than its header")
    decoded, _, encoded = struct.unpack_from("<III", data, 4)
    if decoded != num_bytes or encoded != len(data):
        raise CorruptionError(
            f"a chunk promises {decoded} bytes in {encoded}, not {num_bytes} in {len(data)}"
        )


class _Scratch(threading.local):
    buffer = np.empty(0, np.uint16)


_SCRATCH = _Scratch()


def scratch(size: int) -> np.ndarray:
    """A uint16 buffer of this thread, used again: page faults cost more than decoding."""
    if _SCRATCH.buffer.size < size:
        _SCRATCH.buffer = np.empty(size, np.uint16)
    return _SCRATCH.buffer[:size]


# Bytes stored per byte of bf16, rounded up: for estimates and for checks of free space.
RATIOS = {
    "lossless": 0.74, "fast": 0.88, "int8": 0.53, "bits5": 0.62, "bits4": 0.56, "bits3": 0.5,
    "int4": 0.3,
}  # fmt: skip
NAMES = ("lossless", "fast", "int8", "bits5", "bits4", "bits3", "int4")


@cache
def get_codec(name: str) -> Codec:
    """
    Raises:
        ConfigError: there is no such codec.
    """
    from shared.quantize import Int4Codec, Int8Codec, RoundedCodec

    if name == "lossless":
        return BloscCodec(name, "zstd", 1, "shuffle")
    if name == "fast":
        return BloscCodec(name, "lz4", 5, "bitshuffle")
    if name == "int8":
        return Int8Codec()
    if name == "int4":
        return Int4Codec()
    if name in ("bits5", "bits4", "bits3"):
        return RoundedCodec(name, "zstd", 1, "shuffle", mantissa=int(name[4]))
    raise ConfigError(f"there is no codec {name!r}", do=f"Choose one of {', '.join(NAMES)}")


def check_chunk_size(chunk_tokens: int, num_states: int, hidden_size: int) -> None:
    """
    Raises:
        ConfigError: a chunk would be over Blosc's limit of 2 GiB.
    """
    size = chunk_tokens * num_states * hidden_size * 2
    if size > _BLOSC_MAX:
        raise ConfigError(
            f"a chunk of {chunk_tokens} tokens x {num_states} states x {hidden_size} channels has "
            f"{size} bytes, over the limit of {_BLOSC_MAX}",
            do="Tap fewer layers",
        )
