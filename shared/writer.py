"""ShardWriter: writes one shard aside and commits it; and moves a shard to another container.

T: tokens of a sample; L: states; D: channels.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from shared.chunks import ChunkWriter
from shared.codec import RATIOS
from shared.fs import Lock, Staging, disk_errors, seal_json
from shared.sample import sample_id
from shared.shards import ShardInfo, damaged

if TYPE_CHECKING:
    from shared.store import Store


def container_writer(path: Path, info: ShardInfo, tokens: Sequence[np.ndarray]) -> ChunkWriter:
    """The writer of the shard's container, writing to `path`."""
    if info.container == "webdataset":
        from shared.shards_tar import TarWriter

        return TarWriter(path, info, tokens)
    from shared.shards_zarr import ZarrWriter

    return ZarrWriter(path, info, tokens)


class ShardWriter:
    """Writes one shard; a context manager.

    `append` every sample in the order given; a clean exit commits (fsync, sha256, rename, sidecar
    last), anything else leaves nothing visible. Committing a shard that another writer has
    committed meanwhile drops ours: the id is a hash of what it holds.

    Args:
        tokens: the samples' token ids, [T] each.
        replaces: the sidecar that this one is to take the place of (a conversion).
    """

    def __init__(
        self,
        store: "Store",
        info: ShardInfo,
        tokens: Sequence[np.ndarray],
        replaces: ShardInfo | None = None,
    ) -> None:
        self.shard_id, self._store, self._info, self._tokens = info.id, store, info, tokens
        self._replaces, self._row = replaces, 0

    def __enter__(self) -> "ShardWriter":
        info = self._info
        tokens = int(info.num_tokens.sum(dtype=np.int64))
        size = tokens * info.num_states * info.hidden_size * 2 * RATIOS[info.codec]
        self._store.require_space(size)
        self._staging = Staging(self._store.files.path("shards"), self.shard_id)
        try:
            with disk_errors(f"{self._store.root}/shards"):
                path = self._staging.path / "data"
                self._writer = container_writer(path, self._info, self._tokens)
        except BaseException:
            self._staging.close()
            raise
        return self

    def append(self, sample: str, hidden_TLD: np.ndarray) -> None:
        """Adds the next sample's states, uint16 [T, L, D].

        Raises:
            ValueError: it isn't the next sample, or has another shape or dtype.
            CacheError: the disk is full or gone.
        """
        info, row = self._info, self._next(sample)
        shape = (int(info.num_tokens[row]), info.num_states, info.hidden_size)
        if hidden_TLD.shape != shape or hidden_TLD.dtype != np.uint16:
            found = f"{hidden_TLD.dtype} {hidden_TLD.shape}"
            raise ValueError(f"states must be uint16 {shape}, not {found}")
        with disk_errors(f"{self._store.root}/shards"):
            self._writer.append(row, hidden_TLD)
        self._row += 1

    def append_chunks(self, sample: str, chunks: Sequence[bytes]) -> None:
        """Adds the next sample as chunks that a shard of the same codec stores."""
        row = self._next(sample)
        with disk_errors(f"{self._store.root}/shards"):
            self._writer.append_chunks(row, chunks)
        self._row += 1

    def _next(self, sample: str) -> int:
        if self._row >= len(self._info.ids) or self._info.ids[self._row] != sample:
            raise ValueError(f"sample {sample} is not the next of shard {self.shard_id}")
        return self._row

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if self._row != len(self._info.ids):
                    raise ValueError(f"shard {self.shard_id} lacks its last samples")
                self._commit()
        finally:
            self._writer.close()
            self._staging.close()

    def _commit(self) -> None:
        store, name, old = self._store, f"shards/{self.shard_id}", self._replaces
        with disk_errors(f"{store.root}/shards"):
            files, extra = self._writer.finish()
            info = replace(self._info, files=files, extra=extra)
            if old is None:
                info = replace(info, layer_error=self._writer.layer_error)
            # One committer of a shard at a time: data and sidecar are always of one writer.
            lock = Lock.take(store.files.path(f"shards/.lock-{self.shard_id}"), wait=True)
            assert lock is not None
            try:
                if old is not None or not store.has_shard(self.shard_id):
                    store.files.publish(self._staging.path / "data", name + self._writer.suffix)
                    store.files.write(f"{name}.json", seal_json(info.to_json()))
                if old is not None and old.container != info.container:
                    store.files.remove(f"{name}.tar" if old.container == "webdataset" else name)
            finally:
                lock.release()


def convert_shard(store: "Store", info: ShardInfo, container: str) -> None:
    """Moves a shard to another container by copying its chunks: not one decoded bit changes.

    Raises:
        CorruptionError: the shard is damaged; it stays as it is.
    """
    from shared.reader import open_shard

    reader = open_shard(store, info)
    tokens = [reader.tokens(row) for row in range(len(info.ids))]
    for row, ids_T in enumerate(tokens):
        if sample_id(ids_T.view(np.uint32)) != info.ids[row]:
            raise damaged(info, row, "the tokens are not those that the sample's id names")
    moved = replace(info, container=container, files={}, extra={})
    with ShardWriter(store, moved, tokens, replaces=info) as writer:
        for row, sample in enumerate(info.ids):
            writer.append_chunks(sample, reader.raw_chunks(row))
    reader.close()
