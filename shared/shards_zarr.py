"""The zarr container: one zarr v3 group a shard, written as a stream, read with a thin reader.

    shards/<id>/zarr.json                group; attributes name sample ids and lengths
    shards/<id>/hidden/zarr.json         uint16 [N, L, D], one zarr shard, chunks (64, L, D)
    shards/<id>/hidden/c/0/0/0           chunks, each with its crc32c, then the index
    shards/<id>/tokens/zarr.json         uint32 [N], one chunk
    shards/<id>/tokens/c/0

Stock zarr-python opens it (it is the reference twin in the tests); ours reads the index once and
then one `preadv` a sample. N: rows, pads included; T: tokens; L: states; D: channels.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.chunks import CRC_BYTES, ChunkReader, ChunkWriter, crc32c
from shared.codec import FILL, Codec, blosc, check_blosc, get_codec
from shared.errors import CorruptionError
from shared.fs import LocalFiles, fsync_path
from shared.shards import ShardInfo, damaged, open_blob, read_blob

HIDDEN, TOKENS = "/hidden/c/0/0/0", "/tokens/c/0"
_TOKEN_BLOSC = {
    "typesize": 4, "cname": "zstd", "clevel": 3, "shuffle": "shuffle", "blocksize": 0
}  # fmt: skip
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def _metadata(info: ShardInfo, codec: Codec) -> dict[str, dict[str, Any]]:
    """The three zarr.json documents."""
    shape = [info.num_rows, info.num_states, info.hidden_size]
    inner = [info.chunk_tokens, info.num_states, info.hidden_size]
    array = {"zarr_format": 3, "node_type": "array"}
    separator = {"name": "default", "configuration": {"separator": "/"}}
    sharding = {
        "chunk_shape": inner,
        "codecs": [*codec.zarr_codecs(), {"name": "crc32c"}],
        "index_codecs": [_LITTLE, {"name": "crc32c"}],
        "index_location": "end",
    }
    hidden = array | {
        "shape": shape,
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": separator,
        "fill_value": FILL,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"bits_of": "bfloat16", "codec": info.codec},
        "dimension_names": ["token", "state", "channel"],
        "storage_transformers": [],
    }
    tokens = array | {
        "shape": shape[:1],
        "data_type": "uint32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape[:1]}},
        "chunk_key_encoding": separator,
        "fill_value": 0xFFFFFFFF,
        "codecs": [
            _LITTLE,
            {"name": "blosc", "configuration": _TOKEN_BLOSC},
            {"name": "crc32c"},
        ],
        "attributes": {},
        "dimension_names": ["token"],
        "storage_transformers": [],
    }
    attributes = {
        "drafttape_format": 1,
        "spec": info.spec_digest,
        "ids": list(info.ids),
        "num_tokens": info.num_tokens.tolist(),
        "start": (info.chunk_starts[:-1] * info.chunk_tokens).tolist(),
    }
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return {"/zarr.json": group, "/hidden/zarr.json": hidden, "/tokens/zarr.json": tokens}


class ZarrWriter(ChunkWriter):
    """Writes a shard as a stream: memory is one sample, whatever the shard's size."""

    suffix = ""

    def __init__(self, path: Path, info: ShardInfo, tokens: Sequence[np.ndarray]) -> None:
        super().__init__(info)
        self._path = path
        self._index = np.zeros((info.num_chunks, 2), "<u8")
        self._files: dict[str, tuple[int, str]] = {}
        self._sha, self._offset, self._chunk = hashlib.sha256(), 0, 0
        for name, document in _metadata(info, get_codec(info.codec)).items():
            self._put(name, json.dumps(document, indent=1).encode())
        tokens_N = np.full(info.num_rows, 0xFFFFFFFF, "<u4")
        for ids_T, chunk in zip(tokens, info.chunk_starts[:-1].tolist(), strict=True):
            tokens_N[chunk * info.chunk_tokens :][: len(ids_T)] = ids_T
        data = blosc().compress(tokens_N, b"zstd", 3, blosc().SHUFFLE, 0)
        self._put(TOKENS, data + crc32c(data))
        target = self._path / HIDDEN[1:]
        target.parent.mkdir(parents=True)
        self._file = target.open("wb", buffering=0)

    def _put(self, name: str, data: bytes) -> None:
        path = self._path / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._files[name] = len(data), hashlib.sha256(data).hexdigest()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._sha.update(data)

    def append_chunks(self, row: int, chunks: Sequence[Any]) -> None:
        for data in chunks:
            self._write(data)
            self._index[self._chunk] = self._offset, len(data)
            self._offset += len(data)
            self._chunk += 1

    def finish(self) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
        assert self._chunk == self.info.num_chunks
        index = self._index.tobytes()
        self._write(index + crc32c(index))
        os.fsync(self._file.fileno())
        self._file.close()
        size = self._offset + len(index) + CRC_BYTES
        self._files[HIDDEN] = size, self._sha.hexdigest()
        for folder, _, _ in os.walk(self._path):
            fsync_path(Path(folder))
        return dict(sorted(self._files.items())), {}

    def close(self) -> None:
        self._file.close()


class ZarrReader(ChunkReader):
    """Reads samples of one shard; opening checks sizes and the chunk index."""

    def __init__(self, files: LocalFiles, info: ShardInfo) -> None:
        self._files, self.info = files, info
        self._tokens_N: np.ndarray | None = None
        self.blob = open_blob(files, info, HIDDEN)
        size = info.num_chunks * 16
        end = info.files[HIDDEN][0] - size - CRC_BYTES
        data = bytearray(size + CRC_BYTES)
        read_blob(self.blob, info, data, max(end, 0), "the chunk index")
        if end < 0 or crc32c(data[:size]) != data[size:]:
            raise damaged(info, None, "the chunk index is damaged")
        index = np.frombuffer(data, "<u8", info.num_chunks * 2).reshape(-1, 2)
        # Chunks fill the file from its start: a missing one (marked 2**64 - 1) can't pass.
        if int(index.max(initial=0)) > end or int(index[:, 1].sum()) != end:
            raise damaged(info, None, "the chunk index points outside its file")
        self.sizes = index[:, 1].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        if not np.array_equal(offsets[:-1], index[:, 0].astype(np.int64)):
            raise damaged(info, None, "the chunk index has gaps or overlaps")
        self.starts = offsets[info.chunk_starts[:-1]]

    def tokens(self, row: int) -> np.ndarray:
        if self._tokens_N is None:
            self._tokens_N = self._read_tokens()
        start = int(self.info.chunk_starts[row]) * self.info.chunk_tokens
        return self._tokens_N[start : start + int(self.info.num_tokens[row])].astype(np.int32)

    def _read_tokens(self) -> np.ndarray:
        blob = open_blob(self._files, self.info, TOKENS)
        data = np.empty(blob.size, np.uint8)
        read_blob(blob, self.info, data, 0, "the tokens")
        blob.close()
        body = data[:-CRC_BYTES]
        if len(data) <= CRC_BYTES or crc32c(body) != data[-CRC_BYTES:].tobytes():
            raise damaged(self.info, None, "the tokens don't match their checksum")
        tokens_N = np.empty(self.info.num_rows, "<u4")
        try:
            check_blosc(body, tokens_N.nbytes)
            blosc().decompress(body, tokens_N)
        except (CorruptionError, RuntimeError) as error:
            raise damaged(self.info, None, f"the tokens can't be decoded ({error})") from None
        return tokens_N
