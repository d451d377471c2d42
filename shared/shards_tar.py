"""The webdataset container: one tar a shard, read in sequence by stock `webdataset`.

    <id>.input_ids.npy   int32 [T]
    <id>.hidden.chunks   the sample's chunks, each with its crc32c, back to back
    <id>.meta.json       codec, chunk sizes and shape: all that decoding needs

Times, owners and modes are fixed, so that the same samples make the same bytes. Random access
goes by the offsets in the sidecar (`extra`); names inside the tar are never trusted.
T: tokens of a sample.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.chunks import ChunkReader, ChunkWriter
from shared.codec import get_codec
from shared.fs import LocalFiles, fsync_path
from shared.shards import ShardInfo, damaged, open_blob, read_blob

TAR = ".tar"
_BLOCK = 512


def _npy(ids_T: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, ids_T.astype("<i4"), allow_pickle=False)
    return buffer.getvalue()


class TarWriter(ChunkWriter):
    """Writes a tar as a stream: memory is one sample."""

    suffix = TAR

    def __init__(self, path: Path, info: ShardInfo, tokens: Sequence[np.ndarray]) -> None:
        super().__init__(info)
        self._tokens = tokens
        self._sha, self._offset = hashlib.sha256(), 0
        self._starts: list[int] = []
        self._token_starts: list[int] = []
        self._sizes: list[int] = []
        self._path = path
        self._file = path.open("wb", buffering=0)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._sha.update(data)
        self._offset += len(data)

    def _member(self, name: str, parts: Sequence[Any]) -> int:
        """Writes one file of the tar; returns where its data starts."""
        header = tarfile.TarInfo(name)
        header.size, header.mode = sum(map(len, parts)), 0o444
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        start = self._offset
        for part in parts:
            self._write(part)
        self._write(bytes(-header.size % _BLOCK))
        return start

    def append_chunks(self, row: int, chunks: Sequence[Any]) -> None:
        name, sizes = self.info.ids[row], [len(chunk) for chunk in chunks]
        meta = {
            "codecs": [*get_codec(self.info.codec).zarr_codecs(), {"name": "crc32c"}],
            "chunk_bytes": sizes,
            "chunk_shape": [self.info.chunk_tokens, self.info.num_states, self.info.hidden_size],
            "num_tokens": int(self.info.num_tokens[row]),
            "data_type": "uint16",
            "bits_of": "bfloat16",
        }
        ids_start = self._member(f"{name}.input_ids.npy", [_npy(self._tokens[row])])
        # The data starts after the header of 128 bytes that numpy writes for a 1-D array.
        size = int(self.info.num_tokens[row]) * 4
        self._token_starts.append(ids_start + len(_npy(self._tokens[row])) - size)
        self._starts.append(self._member(f"{name}.hidden.chunks", chunks))
        self._member(f"{name}.meta.json", [json.dumps(meta).encode()])
        self._sizes += sizes

    def finish(self) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
        self._write(bytes(2 * _BLOCK))
        os.fsync(self._file.fileno())
        self._file.close()
        fsync_path(self._path.parent)
        extra = {
            "chunk_bytes": self._sizes, "hidden": self._starts, "input_ids": self._token_starts
        }  # fmt: skip
        return {TAR: (self._offset, self._sha.hexdigest())}, extra

    def close(self) -> None:
        self._file.close()


class TarReader(ChunkReader):
    """Random access to a tar by the sidecar's offsets."""

    def __init__(self, files: LocalFiles, info: ShardInfo) -> None:
        self.info = info
        self.blob = open_blob(files, info, TAR)
        try:
            self.sizes = np.array(info.extra["chunk_bytes"], np.int64)
            self.starts = np.array(info.extra["hidden"], np.int64)
            self._token_starts = np.array(info.extra["input_ids"], np.int64)
        except (KeyError, ValueError, TypeError, OverflowError):
            raise damaged(info, None, "the sidecar has no usable offset index") from None
        shapes = (self.sizes.shape, self.starts.shape, self._token_starts.shape)
        rows = (len(info.ids),)
        if shapes != ((info.num_chunks,), rows, rows) or int(self.sizes.min()) < 1:
            raise damaged(info, None, "the sidecar's offset index has another length")
        ends = self.starts + np.add.reduceat(self.sizes, info.chunk_starts[:-1])
        token_ends = self._token_starts + info.num_tokens.astype(np.int64) * 4
        first = min(int(self.starts.min()), int(self._token_starts.min()))
        if first < 0 or max(int(ends.max()), int(token_ends.max())) > self.blob.size:
            raise damaged(info, None, "the sidecar's offset index points outside its file")

    def tokens(self, row: int) -> np.ndarray:
        ids_T = np.empty(int(self.info.num_tokens[row]), "<i4")
        view = ids_T.view(np.uint8)
        read_blob(self.blob, self.info, view, int(self._token_starts[row]), "the tokens")
        return ids_T
