"""Upkeep of a cache: compare snapshots, drop what none refers to, drop what is damaged.

Everything that removes data has a dry run that changes nothing and says what would go.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shared.errors import CacheError, CorruptionError, DrafttapeError
from shared.fs import Lock, disk_errors
from shared.sample import sample_id
from shared.shards import HEX32, ShardInfo, shard_id
from shared.verify import VerifyReport
from shared.writer import ShardWriter

if TYPE_CHECKING:
    from shared.store import Store


@dataclass(frozen=True)
class SnapshotDiff:
    """What another snapshot has that this one lacks; each a count of (samples, tokens, bytes).

    Args:
        relabelled: samples in both whose mask or split differs.
    """

    added: tuple[int, int, int]
    removed: tuple[int, int, int]
    unchanged: tuple[int, int, int]
    relabelled: int


def diff(store: "Store", old: str, new: str) -> SnapshotDiff:
    """From snapshot `old` to `new`; bytes are stored ones, by each sample's share of its shard."""
    a, b = store.snapshot(old), store.snapshot(new)
    cost: dict[str, float] = {}

    def total(snapshot, names: Iterable[str]) -> tuple[int, int, int]:
        place = {name: row for row, name in enumerate(snapshot.ids)}
        rows = [place[name] for name in names]
        size = 0.0
        index = store.committed()
        for row in rows:
            shard = index[snapshot.ids[row]][0] if snapshot.ids[row] in index else None
            if shard is None:
                continue
            if shard not in cost:
                info = store.shard(shard)
                cost[shard] = info.stored_bytes / int(info.num_tokens.sum(dtype=np.int64))
            size += cost[shard] * int(snapshot.num_tokens[row])
        return len(rows), int(snapshot.num_tokens[rows].sum(dtype=np.int64)), round(size)

    ours, theirs = set(a.ids), set(b.ids)
    labels = [{row.id: (row.mask, row.split) for row in s.rows()} for s in (a, b)]
    both = sorted(ours & theirs)
    return SnapshotDiff(
        added=total(b, sorted(theirs - ours)),
        removed=total(a, sorted(ours - theirs)),
        unchanged=total(b, both),
        relabelled=sum(labels[0][name] != labels[1][name] for name in both),
    )


def remove_snapshot(store: "Store", ref: str) -> str:
    """Forgets a snapshot and the names that point to it; shards stay until `gc`.

    Raises:
        CacheError: it is the latest one, or there is none.
    """
    name = store.resolve(ref)
    if store.files.exists("snapshots/latest") and store.resolve("latest") == name:
        raise CacheError(
            "the latest snapshot can't be removed", where=name, do="Write another one first"
        )
    for label, target in store.names().items():
        if target == name:
            store.files.remove(f"snapshots/names/{label}")
    store.files.remove(f"snapshots/{name}.json")
    store.files.remove(f"snapshots/{name}.parquet")
    return name


@dataclass
class GcReport:
    """What `gc` dropped, or would drop.

    Args:
        drop: shards that no snapshot refers to.
        compact: shards of which only some samples are referred to: (shard, samples kept).
        young: shards that nothing refers to but that are too young to drop.
        orphans: data without a sidecar, left by killed processes.
        freed: bytes.
    """

    drop: list[str] = field(default_factory=list)
    compact: list[tuple[str, int]] = field(default_factory=list)
    young: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    freed: int = 0


def gc(
    store: "Store", *, dry_run: bool = True, keep_days: float = 7.0, threshold: float = 0.5
) -> GcReport:
    """Drops shards that no snapshot refers to, and shrinks shards that are mostly unused.

    Args:
        keep_days: unreferenced shards younger than this stay: an extraction may still need them.
        threshold: a shard whose referenced tokens are a smaller share than this is rewritten
            with those samples only (their chunks are copied).

    Raises:
        CorruptionError: a snapshot or a sidecar is damaged; nothing is dropped then, for what is
            referred to can't be known.
    """
    wanted: set[str] = set()
    for name in store.snapshot_ids():
        wanted.update(store.snapshot(name).ids)
    index, report = store.committed(), GcReport()
    infos = {name: store.shard(name) for name in store.shard_ids()}
    for name, info in infos.items():
        # Of a sample in two shards only the copy that readers use is needed.
        kept = [
            row
            for row, sample in enumerate(info.ids)
            if sample in wanted and index[sample][0] == name
        ]
        used = int(info.num_tokens[kept].sum(dtype=np.int64))
        share = used / int(info.num_tokens.sum(dtype=np.int64))
        age_days = (time.time() - store.files.mtime(f"shards/{name}.json")) / 86400
        if not kept and age_days < keep_days:
            report.young.append(name)
        elif not kept:
            report.drop.append(name)
            report.freed += info.stored_bytes
        elif share < threshold:
            report.compact.append((name, len(kept)))
            report.freed += round(info.stored_bytes * (1 - share))
    known = {*infos, *(f"{name}.tar" for name in infos), *(f"{name}.json" for name in infos)}
    for name in store.files.names("shards"):
        data = infos.get(name.removesuffix(".tar"))
        stray = data is not None and name != f"{data.id}.json" and name != _data_name(data)
        if (name not in known and HEX32.match(name)) or stray:
            report.orphans.append(name)
    if dry_run:
        return report
    for name in report.orphans:
        _remove_orphan(store, name)
    for name, _ in report.compact:
        info = infos[name]
        kept = [
            row
            for row, sample in enumerate(info.ids)
            if sample in wanted and index[sample][0] == name
        ]
        rewrite(store, info, kept)
    for name in report.drop:
        drop_shard(store, name)
    return report


def _data_name(info: ShardInfo) -> str:
    return f"{info.id}.tar" if info.container == "webdataset" else info.id


def drop_shard(store: "Store", name: str) -> None:
    """Removes a shard: first the sidecar, so that no reader finds it half gone."""
    with disk_errors(f"{store.root}/shards"):
        lock = Lock.take(store.files.path(f"shards/.lock-{name}"), wait=True)
    assert lock is not None
    try:
        for suffix in (".json", "", ".tar"):
            store.files.remove(f"shards/{name}{suffix}")
    finally:
        lock.release()


def _remove_orphan(store: "Store", name: str) -> None:
    shard = name.removesuffix(".tar")
    lock = Lock.take(store.files.path(f"shards/.lock-{shard}"), wait=False)
    if lock is None:
        return  # a writer is about to commit it
    try:
        if not store.has_shard(shard) or _data_name(store.shard(shard)) != name:
            store.files.remove(f"shards/{name}")
    finally:
        lock.release()


def rewrite(store: "Store", info: ShardInfo, rows: list[int]) -> str | None:
    """Replaces a shard by one with these rows only; their chunks are copied as they are.

    Returns:
        The new shard's id; None if there is nothing to keep.
    """
    from shared.reader import open_shard

    new = None
    if rows:
        ids = tuple(info.ids[row] for row in rows)
        new = shard_id(info.spec_digest, info.codec, ids)
        moved = replace(info, id=new, ids=ids, num_tokens=info.num_tokens[rows], files={}, extra={})
        if not store.has_shard(new):
            reader = open_shard(store, info)
            tokens = [reader.tokens(row) for row in rows]
            with ShardWriter(store, moved, tokens) as writer:
                for row in rows:
                    writer.append_chunks(info.ids[row], reader.raw_chunks(row))
            reader.close()
    if new != info.id:
        drop_shard(store, info.id)
    return new


@dataclass
class RepairReport:
    """What `repair` did, or would do.

    Args:
        lost: bad samples with their tokens where those can still be read: what to run again.
        unreadable: bad samples whose tokens are gone too; the data set has them.
        removed: files that were dropped because they are damaged and can be made again.
        left: damage that only the user can decide about (snapshots and their pointers).
    """

    lost: dict[str, np.ndarray] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def repair(store: "Store", found: VerifyReport, *, dry_run: bool = True) -> RepairReport:
    """Drops what `verify` found bad, keeping every sample that can still be trusted.

    After it, an extraction of the same data runs exactly the lost samples; snapshots stay as
    they are and are whole again then.
    """
    report = RepairReport()
    for name in store.shard_ids():
        try:
            info = store.shard(name)
        except DrafttapeError:
            report.removed.append(f"shards/{name}")
            if not dry_run:
                drop_shard(store, name)
            continue
        if name in found.bad_shards:
            _repair_shard(store, info, found, report, dry_run)
    for path in found.bad_files:
        folder = path.partition("/")[0]
        if folder in ("jobs", "rejects", "target", "index.bin"):
            report.removed.append(path)
            if not dry_run:
                store.files.remove("target" if folder == "target" else path)
    report.left = [path for path in found.bad_files if path.startswith("snapshots/")]
    return report


def _repair_shard(
    store: "Store", info: ShardInfo, found: VerifyReport, report: RepairReport, dry_run: bool
) -> None:
    from shared.reader import open_shard

    bad = [row for row, sample in enumerate(info.ids) if sample in found.bad_samples]
    good = [row for row in range(len(info.ids)) if row not in set(bad)]
    try:
        reader = open_shard(store, info)
    except DrafttapeError:
        reader, bad, good = None, list(range(len(info.ids))), []
    for row in bad:
        try:
            if reader is None:
                raise CorruptionError("the shard can't be opened")
            ids_T = reader.tokens(row)
            if sample_id(ids_T.view(np.uint32)) != info.ids[row]:
                raise CorruptionError("other tokens")
            report.lost[info.ids[row]] = ids_T.copy()
        except DrafttapeError:
            report.unreadable.append(info.ids[row])
    if reader is not None:
        reader.close()
    report.removed.append(f"shards/{info.id}")
    if dry_run:
        return
    if bad:
        rewrite(store, info, good)
    else:  # only what readers don't use is damaged (zarr metadata, tar headers): write it anew
        _rebuild(store, info)


def _rebuild(store: "Store", info: ShardInfo) -> None:
    """Writes a shard again from its own chunks."""
    from shared.reader import open_shard

    reader = open_shard(store, info)
    tokens = [reader.tokens(row) for row in range(len(info.ids))]
    fresh = replace(info, files={}, extra={})
    with ShardWriter(store, fresh, tokens, replaces=info) as writer:
        for row, sample in enumerate(info.ids):
            writer.append_chunks(sample, reader.raw_chunks(row))
    reader.close()
