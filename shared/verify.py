"""Verification of a cache: sizes and sidecars (fast), or every byte (full)."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shared.errors import DrafttapeError
from shared.fs import unseal_json, unseal_lines
from shared.index import decode_index
from shared.shards import ShardInfo

if TYPE_CHECKING:
    from shared.store import Store


@dataclass
class VerifyReport:
    """What was checked, and what is wrong.

    Args:
        bad_samples: ids of samples that can't be read.
        bad_shards: shards with a damaged file.
        bad_files: damaged files besides shards, relative to the root.
    """

    files: int = 0
    samples: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    bad_samples: set[str] = field(default_factory=set)
    bad_shards: set[str] = field(default_factory=set)
    bad_files: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def total_bytes(store: "Store") -> int:
    """Bytes that `verify` will report progress over (readable sidecars only)."""
    total = 0
    for name in store.shard_ids():
        with contextlib.suppress(DrafttapeError):
            total += store.shard(name).stored_bytes
    return total


def verify(
    store: "Store", *, full: bool = True, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Checks sidecars, sizes, snapshots, jobs and rejects; with `full` every byte of every file.

    Args:
        progress: called with the number of bytes just checked.
    """
    report = VerifyReport()
    committed: dict[str, None] = {}
    for name in store.shard_ids():
        report.files += 1
        try:
            info = store.shard(name)
        except DrafttapeError as error:
            report.problems.append(str(error))
            continue
        committed.update(dict.fromkeys(info.ids))
        report.samples += len(info.ids)
        _verify_shard(store, info, report, full, progress)
    _verify_snapshots(store, report, committed)
    for folder, parse in (("jobs", unseal_json), ("rejects", unseal_lines)):
        for name in store.files.names(folder):
            where = f"{store.root}/{folder}/{name}"
            report.files += 1
            with _collect(report, f"{folder}/{name}"):
                parse(store.files.read(f"{folder}/{name}"), where)
    if store.files.exists("index.bin"):
        report.files += 1
        if decode_index(store.files.read("index.bin")) is None:
            report.problems.append("index.bin is damaged; it is not used, and made again")
            report.bad_files.append("index.bin")
    if store.files.names("target"):
        from shared.assets import verify_assets

        report.files += 2
        with _collect(report, "target/target.json"):
            verify_assets(store)
    return report


@contextlib.contextmanager
def _collect(report: VerifyReport, path: str) -> Iterator[None]:
    try:
        yield
    except (DrafttapeError, FileNotFoundError) as error:
        report.problems.append(str(error))
        report.bad_files.append(path)


def _verify_shard(
    store: "Store",
    info: ShardInfo,
    report: VerifyReport,
    full: bool,
    progress: Callable[[int], None] | None,
) -> None:
    damaged_file = False
    for name, (size, sha) in info.files.items():
        report.files += 1
        path = f"shards/{info.id}{name}"
        try:
            found = store.files.sha256(path) if full else (store.files.size(path), sha)
        except (OSError, DrafttapeError) as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else str(error)
            report.problems.append(f"shard {info.id}: the file {info.id}{name} {reason}")
            damaged_file = True
            continue
        report.bytes += found[0]
        if progress is not None:
            progress(found[0])
        if found[0] != size:
            what = f"has {found[0]} bytes, not {size}"
        elif found[1] != sha:
            what = "is damaged (its sha256 doesn't match)"
        else:
            continue
        report.problems.append(f"shard {info.id}: the file {info.id}{name} {what}")
        damaged_file = True
    if damaged_file:
        report.bad_shards.add(info.id)
        _name_samples(store, info, report)


def _name_samples(store: "Store", info: ShardInfo, report: VerifyReport) -> None:
    """Finds which samples of a damaged shard can't be read."""
    from shared.reader import open_shard
    from shared.sample import sample_id

    try:
        reader = open_shard(store, info)
    except DrafttapeError as error:
        report.problems.append(f"{error} (all {len(info.ids)} samples of the shard)")
        report.bad_samples.update(info.ids)
        return
    for row, sample in enumerate(info.ids):
        out = np.empty((int(info.num_tokens[row]), info.num_states, info.hidden_size), np.uint16)
        try:
            reader.read_into(row, out)
            if sample_id(reader.tokens(row).view(np.uint32)) != sample:
                raise DrafttapeError("the tokens are not the sample's", where=f"sample {sample}")
        except DrafttapeError as error:
            report.problems.append(str(error))
            report.bad_samples.add(sample)
    reader.close()


def _verify_snapshots(store: "Store", report: VerifyReport, committed: dict[str, None]) -> None:
    ids = store.snapshot_ids()
    for name in ids:
        report.files += 2
        with _collect(report, f"snapshots/{name}.json"):
            snapshot = store.snapshot(name)
            if snapshot.true_id() != name:
                report.problems.append(f"snapshot {name}: its id is not the hash of its rows")
                report.bad_files.append(f"snapshots/{name}.json")
            missing = [sample for sample in snapshot.ids if sample not in committed]
            if missing:
                report.problems.append(
                    f"snapshot {name}: {len(missing)} samples are in no readable shard, "
                    f"the first is {missing[0]}"
                )
                report.bad_samples.update(missing)
    pointers = [f"snapshots/names/{name}" for name in store.files.names("snapshots/names")]
    if store.files.exists("snapshots/latest"):
        pointers.append("snapshots/latest")
    elif ids:  # a writer makes it right after the first snapshot
        report.problems.append(
            "snapshots/latest is missing; drafttape extract with the same data makes it again"
        )
        report.bad_files.append("snapshots/latest")
    for pointer in pointers:
        report.files += 1
        with _collect(report, pointer):
            if (target := store._pointer(pointer)) not in ids:
                report.problems.append(f"{pointer} names snapshot {target}, which is not there")
                report.bad_files.append(pointer)
