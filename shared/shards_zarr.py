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
import itertools
import json
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from shared.codec import FILL, Codec, check_blosc, get_codec
from shared.errors import CorruptionError
from shared.fs import LocalFiles, fsync_path
from shared.shards import ShardInfo, damaged, open_blob, read_blob

HIDDEN, TOKENS = "/hidden/c/0/0/0", "/tokens/c/0"
_CRC = 4
_TOKEN_BLOSC = {
    "typesize": 4, "cname": "zstd", "clevel": 3, "shuffle": "shuffle", "blocksize": 0
}  # fmt: skip
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def _crc(data: Any) -> bytes:
    # The C extension takes bytes and numpy arrays, but no bytearray and no memoryview.
    return google_crc32c.value(np.frombuffer(data, np.uint8)).to_bytes(_CRC, "little")


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


class ZarrWriter:
    """Writes a shard as a stream: memory is one chunk, whatever the shard's size."""

    def __init__(self, path: Path, info: ShardInfo, tokens_N: np.ndarray) -> None:
        self._path, self._info, self._codec = path, info, get_codec(info.codec)
        self._index = np.zeros((info.num_chunks, 2), "<u8")
        self._files: dict[str, tuple[int, str]] = {}
        self._sha, self._offset, self._chunk = hashlib.sha256(), 0, 0
        for name, document in _metadata(info, self._codec).items():
            self._put(name, json.dumps(document, indent=1).encode())
        from numcodecs.blosc import SHUFFLE, compress

        data = compress(tokens_N.astype("<u4"), b"zstd", 3, SHUFFLE, 0)
        self._put(TOKENS, data + _crc(data))
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

    def append(self, row: int, hidden_TLD: np.ndarray) -> None:
        size = self._info.chunk_tokens
        for start in range(0, len(hidden_TLD), size):
            data = self._codec.encode(hidden_TLD[start : start + size], size)
            self.append_chunk(data + _crc(data))

    def append_chunk(self, data: bytes) -> None:
        """Appends an encoded chunk with its crc32c."""
        self._write(data)
        self._index[self._chunk] = self._offset, len(data)
        self._offset += len(data)
        self._chunk += 1

    def finish(self) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
        assert self._chunk == self._info.num_chunks
        index = self._index.tobytes()
        self._write(index + _crc(index))
        os.fsync(self._file.fileno())
        self._file.close()
        size = self._offset + len(index) + _CRC
        self._files[HIDDEN] = size, self._sha.hexdigest()
        for folder, _, _ in os.walk(self._path):
            fsync_path(Path(folder))
        return dict(sorted(self._files.items())), {}

    def close(self) -> None:
        self._file.close()


class ZarrReader:
    """Reads samples of one shard. The first touch checks sizes and the index, each read its crc."""

    def __init__(self, files: LocalFiles, info: ShardInfo) -> None:
        self._files, self._info, self._codec = files, info, get_codec(info.codec)
        self._buffer = bytearray()
        self._tokens_N: np.ndarray | None = None
        self._blob = open_blob(files, info, HIDDEN)
        size = info.num_chunks * 16
        start = info.files[HIDDEN][0] - size - _CRC
        data = bytearray(size + _CRC)
        read_blob(self._blob, info, data, max(start, 0), "the chunk index")
        if start < 0 or _crc(data[:size]) != data[size:]:
            raise damaged(info, None, "the chunk index is damaged")
        index = np.frombuffer(data, "<u8", info.num_chunks * 2).reshape(-1, 2)
        if int(index.max(initial=0)) > start or int(index[:, 1].sum()) != start:
            raise damaged(info, None, "the chunk index points outside its file")
        self._offsets = np.concatenate([[0], np.cumsum(index[:, 1])]).astype(np.int64)
        if not np.array_equal(self._offsets[:-1], index[:, 0].astype(np.int64)):
            raise damaged(info, None, "the chunk index has gaps or overlaps")

    def raw_chunks(self, row: int) -> list[memoryview]:
        """The encoded chunks of a sample with their crc32c, valid until the next read."""
        first, last = self._info.chunk_starts[row : row + 2].tolist()
        begin = int(self._offsets[first])
        size = int(self._offsets[last]) - begin
        if len(self._buffer) < size:
            self._buffer = bytearray(size + (size >> 2))
        view = memoryview(self._buffer)[:size]
        read_blob(self._blob, self._info, view, begin, "the sample")
        bounds = (self._offsets[first : last + 1] - begin).tolist()
        chunks = [view[a:b] for a, b in itertools.pairwise(bounds)]
        for number, chunk in enumerate(chunks):
            if len(chunk) < _CRC or _crc(chunk[:-_CRC]) != chunk[-_CRC:]:
                what = f"chunk {number} of the sample doesn't match its checksum"
                raise damaged(self._info, row, what)
        return chunks

    def read_into(self, row: int, out_TLD: np.ndarray) -> None:
        """Decodes a sample into `out_TLD` (exactly its T rows).

        Raises:
            CorruptionError: any byte of it is missing or changed.
        """
        size = self._info.chunk_tokens
        for number, chunk in enumerate(self.raw_chunks(row)):
            try:
                self._codec.decode(
                    chunk[:-_CRC], out_TLD[number * size : (number + 1) * size], size
                )
            except CorruptionError as error:
                raise damaged(self._info, row, error.what) from None

    def tokens(self, row: int) -> np.ndarray:
        if self._tokens_N is None:
            self._tokens_N = self._read_tokens()
        start = int(self._info.chunk_starts[row]) * self._info.chunk_tokens
        return self._tokens_N[start : start + int(self._info.num_tokens[row])].astype(np.int32)

    def _read_tokens(self) -> np.ndarray:
        from numcodecs.blosc import decompress

        blob = open_blob(self._files, self._info, TOKENS)
        data = bytearray(blob.size)
        read_blob(blob, self._info, data, 0, "the tokens")
        blob.close()
        body = memoryview(data)[:-_CRC]
        if len(data) < _CRC or _crc(body) != data[-_CRC:]:
            raise damaged(self._info, None, "the tokens don't match their checksum")
        tokens_N = np.empty(self._info.num_rows, "<u4")
        try:
            check_blosc(body, tokens_N.nbytes)
            decompress(body, tokens_N)
        except (CorruptionError, RuntimeError) as error:
            raise damaged(self._info, None, f"the tokens can't be decoded ({error})") from None
        return tokens_N

    def close(self) -> None:
        self._blob.close()
