"""Reading and writing a sample's chunks, which both containers store as they are.

A stored chunk is a codec's bytes and their crc32c, 4 bytes little-endian; a sample's chunks lie
back to back. Containers differ in what lies around them, so a conversion copies chunks.
T: tokens of a sample; L: states; D: channels.
"""

from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np

from shared.codec import Codec, get_codec
from shared.errors import CorruptionError
from shared.fs import Blob
from shared.shards import ShardInfo, damaged, read_blob

CRC_BYTES = 4


def crc32c(data: Any) -> bytes:
    """The four bytes that follow a chunk."""
    # The C extension takes bytes and numpy arrays, but no bytearray and no memoryview.
    return google_crc32c.value(np.frombuffer(data, np.uint8)).to_bytes(CRC_BYTES, "little")


class ChunkWriter:
    """Encodes samples; a container says where chunks go (`append_chunks`)."""

    suffix: str

    def __init__(self, info: ShardInfo) -> None:
        self.info = info
        self._squares = np.zeros((2, info.num_states))

    def append(self, row: int, hidden_TLD: np.ndarray) -> None:
        """Adds a sample's states, uint16 [T, L, D]."""
        codec, size = get_codec(self.info.codec), self.info.chunk_tokens
        chunks = []
        for start in range(0, len(hidden_TLD), size):
            rows_RLD = hidden_TLD[start : start + size]
            data = codec.encode(rows_RLD, size)
            chunks.append(data + crc32c(data))
            if codec.lossy:
                self._measure(codec, rows_RLD, data)
        self.append_chunks(row, chunks)

    def _measure(self, codec: Codec, rows_RLD: np.ndarray, data: bytes) -> None:
        """Adds a chunk's squared error and square, per state, to the shard's."""
        from shared.quantize import to_float

        decoded_RLD = np.empty_like(rows_RLD)
        codec.decode(data, decoded_RLD, self.info.chunk_tokens)
        true_RLD = to_float(rows_RLD).astype(np.float64)
        error_RLD = to_float(decoded_RLD) - true_RLD
        self._squares += [(x * x).sum((0, 2)) for x in (error_RLD, true_RLD)]

    @property
    def layer_error(self) -> tuple[float, ...]:
        """Relative L2 error of each state; empty for a lossless codec."""
        if not self._squares.any():
            return ()
        error_L, true_L = self._squares
        return tuple(float(f"{x:.6g}") for x in np.sqrt(error_L / np.maximum(true_L, 1e-300)))

    def append_chunks(self, row: int, chunks: Sequence[Any]) -> None:
        """Adds a sample as stored chunks."""
        raise NotImplementedError

    def finish(self) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
        """Flushes all to the device; returns the sidecar's `files` and `extra`."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes files; what is not finished is garbage."""
        raise NotImplementedError


class ChunkReader:
    """Random access to a shard's samples; checks every byte that it hands out.

    A container sets, when it is opened: `blob`, the file with the chunks; `starts` [S], where
    each sample's first chunk lies; `sizes` [chunks], bytes of each chunk with its crc32c.
    """

    info: ShardInfo
    blob: Blob
    starts: np.ndarray
    sizes: np.ndarray
    bytes_read = 0  # stored bytes of states that were read
    _buffer = np.empty(0, np.uint8)

    def _spans(self, row: int) -> tuple[int, list[int]]:
        first, last = self.info.chunk_starts[row : row + 2].tolist()
        return int(self.starts[row]), self.sizes[first:last].tolist()

    def _chunk(self, row: int, number: int, offset: int, size: int) -> np.ndarray:
        """One checked chunk with its crc32c, valid until the next call.

        Chunk by chunk into one small buffer: the data stays in the CPU's cache until it is
        decoded, which is faster than one large read.
        """
        if self._buffer.size < size:
            self._buffer = np.empty(size + (size >> 3), np.uint8)
        chunk = self._buffer[:size]
        read_blob(self.blob, self.info, chunk, offset, "the sample")
        self.bytes_read += size
        data = chunk[:-CRC_BYTES]
        if size <= CRC_BYTES or crc32c(data) != chunk[-CRC_BYTES:].tobytes():
            what = f"chunk {number} of the sample doesn't match its checksum"
            raise damaged(self.info, row, what)
        return chunk

    def read_into(self, row: int, out_TLD: np.ndarray) -> None:
        """Decodes a sample into `out_TLD` (exactly its T rows).

        Raises:
            CorruptionError: any byte of it is missing or changed.
        """
        codec, step = get_codec(self.info.codec), self.info.chunk_tokens
        offset, sizes = self._spans(row)
        for number, size in enumerate(sizes):
            chunk = self._chunk(row, number, offset, size)
            out_RLD = out_TLD[number * step : (number + 1) * step]
            try:
                codec.decode(chunk[:-CRC_BYTES], out_RLD, step)
            except CorruptionError as error:
                raise damaged(self.info, row, error.what) from None
            offset += size

    def raw_chunks(self, row: int) -> list[bytes]:
        """A sample's stored chunks, checked."""
        offset, sizes = self._spans(row)
        chunks = []
        for number, size in enumerate(sizes):
            chunks.append(self._chunk(row, number, offset, size).tobytes())
            offset += size
        return chunks

    def tokens(self, row: int) -> np.ndarray:
        """int32 [T]"""
        raise NotImplementedError

    def close(self) -> None:
        self.blob.close()
