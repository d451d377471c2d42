"""SampleReader: samples by id, whatever container or codec they lie in.

T: tokens of a sample; L: states; D: channels.
"""

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.chunks import ChunkReader
from shared.errors import DataError
from shared.index import SampleIndex
from shared.sample import sample_id
from shared.shards import ShardInfo, damaged

if TYPE_CHECKING:
    from shared.store import Store

OPEN_SHARDS = 128


def open_shard(store: "Store", info: ShardInfo) -> ChunkReader:
    """The container's reader for a shard."""
    if info.container == "webdataset":
        from shared.shards_tar import TarReader

        return TarReader(store.files, info)
    from shared.shards_zarr import ZarrReader

    return ZarrReader(store.files, info)


class SampleReader:
    """Random access to the samples of a store.

    Cheap to pickle and to fork: shards are opened at first use, in the process that uses them.
    Every read checks the bytes it hands out; a sample that can't be trusted raises
    CorruptionError with shard and sample named. A reader is for one thread.
    """

    def __init__(self, store: "Store") -> None:
        self._start(store)

    def _start(self, store: "Store") -> None:
        self._store = store
        self._shards: OrderedDict[str, tuple[ShardInfo, ChunkReader]] = OrderedDict()
        self._pid = os.getpid()
        self._closed_bytes = 0
        self._index: SampleIndex | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self._store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["store"])

    def _shard(self, sample: str) -> tuple[ShardInfo, ChunkReader, int]:
        if self._pid != os.getpid():
            self._shards, self._pid = OrderedDict(), os.getpid()
        if self._index is None or sample not in self._index:
            self._index = self._store.committed()  # first use, or shards were added since
        try:
            name, row = self._index[sample]
        except KeyError:
            raise DataError(
                "the cache has no such sample",
                where=f"sample {sample}",
                do="Extract the data set into this cache again; only what is missing is run",
            ) from None
        entry = self._shards.get(name)
        if entry is None:
            info = self._store.shard(name)
            while len(self._shards) >= OPEN_SHARDS:
                self._close(self._shards.popitem(last=False)[1][1])
            entry = self._shards[name] = info, open_shard(self._store, info)
        else:
            self._shards.move_to_end(name)
        return *entry, row

    def num_tokens(self, sample: str) -> int:
        """T of a sample."""
        info, _, row = self._shard(sample)
        return int(info.num_tokens[row])

    def read_tokens(self, sample: str) -> np.ndarray:
        """input_ids [T] int32, proven to be the ones that the id names.

        Raises:
            DataError: the cache has no such sample.
            CorruptionError: its tokens are damaged.
        """
        info, shard, row = self._shard(sample)
        ids_T = shard.tokens(row)
        if sample_id(ids_T.view(np.uint32)) != sample:
            raise damaged(info, row, "the tokens are not those that the sample's id names")
        return ids_T

    def read(self, sample: str, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids [T] int32, hidden [T, L, D] uint16, the bits of bf16).

        Args:
            out: C-contiguous uint16 [T, L, D] to decode into (a slice of a batch, say); decoding
                into memory that was used before is much faster than into new memory.

        Raises:
            DataError: the cache has no such sample.
            CorruptionError: a byte of it is missing or changed.
        """
        ids_T = self.read_tokens(sample)
        info, shard, row = self._shard(sample)
        shape = (int(info.num_tokens[row]), info.num_states, info.hidden_size)
        if out is None:
            out = np.empty(shape, np.uint16)
        elif out.shape != shape or out.dtype != np.uint16:
            raise ValueError(f"out must be uint16 {shape}, not {out.dtype} {out.shape}")
        shard.read_into(row, out)
        return ids_T, out

    @property
    def bytes_read(self) -> int:
        """Stored bytes of states that this reader has read in this process."""
        return self._closed_bytes + sum(shard.bytes_read for _, shard in self._shards.values())

    def _close(self, shard: ChunkReader) -> None:
        self._closed_bytes += shard.bytes_read
        shard.close()

    def close(self) -> None:
        for _, shard in self._shards.values():
            self._close(shard)
        self._shards.clear()
