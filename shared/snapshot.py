"""A snapshot: an immutable view of a cache. Which samples, with which masks, in which split.

Rows are sorted by sample id, and the snapshot's id is a hash of (spec digest, rows: id, mask,
split); where a sample lies, its source line and names are not part of it.
S: samples of a snapshot; T: tokens of a sample.
"""

import hashlib
import io
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import CorruptionError, DataError
from shared.sample import ID_BYTES, SnapshotRow, unpack_mask

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

SPLITS = ("train", "heldout")


_GROUP = 2048  # rows of the table that are decoded together
_COLUMNS = ["id", "num_tokens", "num_supervised", "mask", "split", "source", "name", "shard"]


@dataclass(frozen=True)
class Snapshot:
    """The data set's view of a cache; columns are decoded when asked for, masks group by group.

    Args:
        id: hash of what it is.
        spec_digest: the cache's spec.
        meta: tokenizer, template digest, max tokens, sources, …; not part of the id.
        data: the table as Parquet, one row a sample, sorted by id.
    """

    id: str
    spec_digest: str
    meta: dict[str, Any]
    data: bytes

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("id", "spec_digest", "meta", "data")}

    @cached_property
    def _file(self) -> "pyarrow.parquet.ParquetFile":
        return open_table(self.data, f"snapshot {self.id}")

    def _column(self, name: str) -> "pyarrow.ChunkedArray":
        # One thread: pyarrow's pool, still starting when a short command ends, aborts the process.
        return self._file.read(columns=[name], use_threads=False).column(name)

    def __len__(self) -> int:
        return self._file.metadata.num_rows

    @cached_property
    def id_bytes(self) -> np.ndarray:
        """[S] of 16 raw bytes each (dtype S16 can't hold trailing zeros, so V16)."""
        column = self._column("id").combine_chunks()
        data = np.frombuffer(column.buffers()[1], np.uint8)
        start = column.offset * ID_BYTES
        return data[start : start + len(self) * ID_BYTES].view(f"V{ID_BYTES}")

    @cached_property
    def ids(self) -> list[str]:
        """Sample ids, ascending."""
        text = self.id_bytes.tobytes().hex()
        width = 2 * ID_BYTES
        return [text[i : i + width] for i in range(0, len(text), width)]

    @cached_property
    def num_tokens(self) -> np.ndarray:
        """[S] int32."""
        return self._column("num_tokens").to_numpy()

    @cached_property
    def num_supervised(self) -> np.ndarray:
        """[S] int32: ones in each mask."""
        return self._column("num_supervised").to_numpy()

    @cached_property
    def split(self) -> list[str]:
        return self._column("split").to_pylist()

    @cached_property
    def source(self) -> list[str]:
        return self._column("source").to_pylist()

    @cached_property
    def name(self) -> list[str | None]:
        return self._column("name").to_pylist()

    @cached_property
    def shard(self) -> list[str]:
        """Where each sample lay when the snapshot was written; a hint, the store's index rules."""
        return self._column("shard").to_pylist()

    @cached_property
    def _groups(self) -> "OrderedDict[int, list[bytes]]":
        return OrderedDict()

    def packed_mask(self, index: int) -> bytes:
        """`pack_mask` of row `index`."""
        group, row = divmod(index, _GROUP)
        if group not in self._groups:
            if len(self._groups) >= 16:
                self._groups.popitem(last=False)
            part = self._file.read_row_group(group, columns=["mask"], use_threads=False)
            self._groups[group] = part.column("mask").to_pylist()
        return self._groups[group][row]

    def mask(self, index: int) -> np.ndarray:
        """[T] bool: the loss mask of row `index`."""
        return unpack_mask(self.packed_mask(index), int(self.num_tokens[index]))

    def indices(self, split: str) -> np.ndarray:
        """int64 row numbers of "train" or "heldout", ascending."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
        chosen = [index for index, name in enumerate(self.split) if name == split]
        return np.array(chosen, np.int64)

    def rows(self) -> list[SnapshotRow]:
        """All rows as objects (for small snapshots and for writing new ones from old)."""
        masks = [self.packed_mask(index) for index in range(len(self))]
        columns = (self.ids, self.num_tokens.tolist(), masks, self.split, self.source, self.name)
        return [SnapshotRow(*row) for row in zip(*columns, strict=True)]

    def true_id(self) -> str:
        """The id that the rows have; differs from `id` if somebody changed them."""
        masks = (self.packed_mask(index) for index in range(len(self)))
        return snapshot_id(self.spec_digest, self.ids, masks, self.split)


def snapshot_id(spec_digest: str, ids: Iterable[str], masks: Iterable[bytes], splits) -> str:
    """The id of rows that are sorted by sample id."""
    digest = hashlib.blake2b(b"drafttape.snapshot.v1", digest_size=16)
    digest.update(bytes.fromhex(spec_digest))
    for sample, mask, split in zip(ids, masks, splits, strict=True):
        digest.update(bytes.fromhex(sample) + len(mask).to_bytes(4, "little") + mask)
        digest.update(SPLITS.index(split).to_bytes(1, "little"))
    return digest.hexdigest()


def build_snapshot(
    spec_digest: str, rows: Sequence[SnapshotRow], shards: Sequence[str], meta: dict[str, Any]
) -> Snapshot:
    """A snapshot of rows (any order; of equal ids the first counts), `shards` beside them.

    Raises:
        DataError: no rows, a bad split, a mask that doesn't fit its tokens.
    """
    import pyarrow

    unique: dict[str, tuple[SnapshotRow, str]] = {}
    for row, shard in zip(rows, shards, strict=True):
        unique.setdefault(row.id, (row, shard))
    if not unique:
        raise DataError("a snapshot needs at least one sample")
    ordered = [unique[key] for key in sorted(unique)]
    for row, _ in ordered:
        if row.split not in SPLITS:
            raise DataError(f"split {row.split!r} is not one of {SPLITS}", where=row.source)
        if len(row.mask) != (row.num_tokens + 7) // 8:
            raise DataError("the mask doesn't have one bit a token", where=row.source)
    kept = [row for row, _ in ordered]
    supervised = [int.from_bytes(row.mask, "little").bit_count() for row in kept]
    table = pyarrow.table(
        {
            "id": pyarrow.array([bytes.fromhex(row.id) for row in kept], pyarrow.binary(ID_BYTES)),
            "num_tokens": pyarrow.array([row.num_tokens for row in kept], pyarrow.int32()),
            "num_supervised": pyarrow.array(supervised, pyarrow.int32()),
            "mask": pyarrow.array([row.mask for row in kept], pyarrow.large_binary()),
            "split": pyarrow.array([row.split for row in kept], pyarrow.string()),
            "source": pyarrow.array([row.source for row in kept], pyarrow.large_string()),
            "name": pyarrow.array([row.name for row in kept], pyarrow.large_string()),
            "shard": pyarrow.array([shard for _, shard in ordered], pyarrow.string()),
        }
    )
    columns = ([r.id for r in kept], [r.mask for r in kept], [r.split for r in kept])
    name = snapshot_id(spec_digest, *columns)
    return Snapshot(name, spec_digest, dict(meta), encode_table(table))


def encode_table(table: "pyarrow.Table") -> bytes:
    """A snapshot's table as Parquet."""
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        table,
        buffer,
        row_group_size=_GROUP,
        compression="zstd",
        use_dictionary=["split", "shard"],
        write_statistics=False,
    )
    return buffer.getvalue()


def open_table(data: bytes, where: object) -> "pyarrow.parquet.ParquetFile":
    """The table of `encode_table`.

    Raises:
        CorruptionError: it can't be parsed or has other columns.
    """
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise CorruptionError(f"the table can't be read ({error})", where=where) from None
    schema = file.schema_arrow
    if schema.names != _COLUMNS or schema.field("id").type.byte_width != ID_BYTES:
        raise CorruptionError("the table has other columns than a snapshot's", where=where)
    return file
