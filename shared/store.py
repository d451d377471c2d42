"""Store: a cache of hidden states. `shared/FORMAT.md` describes the files.

Data is written before its sidecar, the snapshot's table before its JSON, both before `latest`;
a crash leaves garbage, never a lie.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.assets import TargetAssets, load_frozen, read_assets, write_assets
from shared.errors import CacheError, CorruptionError, DataError, MismatchError
from shared.fs import (
    disk_errors,
    seal_json,
    seal_lines,
    sweep_staging,
    unseal_json,
    unseal_lines,
)
from shared.index import SampleIndex, decode_index, encode_index
from shared.reader import SampleReader
from shared.remote import files_at
from shared.sample import SnapshotRow
from shared.shards import FORMAT, HEX32, ShardInfo, ids_array, library_versions, plan_shard
from shared.snapshot import Snapshot, build_snapshot
from shared.spec import CaptureSpec
from shared.writer import ShardWriter, convert_shard

if TYPE_CHECKING:
    from shared.verify import VerifyReport

__all__ = ["SampleReader", "ShardWriter", "Snapshot", "Store", "TargetAssets", "load_frozen"]

_INDEX_FROM = 256  # sidecars that are read one by one without complaint
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Store:
    """One cache: shards, snapshots and jobs under one root, of one CaptureSpec."""

    def __init__(self, root: str | Path, spec: CaptureSpec) -> None:
        self.files = files_at(root)
        self.root, self.spec = str(root), spec
        self._index: tuple[list[str], SampleIndex] | None = None
        self._known: dict[str, np.ndarray] = {}

    @classmethod
    def create(cls, root: str | Path, spec: CaptureSpec, *, exist_ok: bool = True) -> "Store":
        """Makes a cache, or opens the one that is there if its spec is the same.

        Raises:
            MismatchError: the cache is of another spec; every differing field is named.
            CacheError: the root can't be written or holds something else.
        """
        files = files_at(root)
        if not files.exists("cache.json"):
            if files.names(""):
                raise CacheError(
                    "the directory has files but no cache.json, so it is not a cache",
                    where=root,
                    do="Choose an empty or a new directory",
                )
            document = {"format": FORMAT, "spec": spec.to_json(), "spec_digest": spec.digest}
            files.create("cache.json", seal_json(document))
        elif not exist_ok:
            raise CacheError("there is a cache already", where=root, do="Choose a new directory")
        store = cls.open(root)
        differences = store.spec.differences(spec)
        if differences:
            named = "; ".join(f"{key}: cache {old!r}, now {new!r}" for key, old, new in differences)
            raise MismatchError(
                f"the cache holds states of another capture spec ({named})",
                where=root,
                do="Extract into a new cache"
                + ("" if store.shard_ids() else ", or delete this one, which is empty"),
            )
        with disk_errors(files):
            for folder in ("shards", "snapshots", "jobs", "rejects"):
                sweep_staging(files.path(folder))
        return store

    @classmethod
    def open(cls, root: str | Path) -> "Store":
        """Opens a cache for reading and writing.

        Raises:
            CacheError: there is none, or its format is unknown.
            CorruptionError: cache.json is damaged.
        """
        files, where = files_at(root), f"{root}/cache.json"
        try:
            document = unseal_json(files.read("cache.json"), where)
        except FileNotFoundError:
            raise CacheError(
                "this is not a cache (it has no cache.json)",
                where=root,
                do="Give the directory that drafttape extract wrote",
            ) from None
        if document.get("format") != FORMAT:
            raise CacheError(
                f"the cache has format {document.get('format')}, this version reads {FORMAT}",
                where=root,
                do="Install the drafttape that wrote it",
            )
        spec = CaptureSpec.from_json(document["spec"])
        if spec.digest != document["spec_digest"]:
            raise CorruptionError("the spec is not the one its digest names", where=where)
        return cls(root, spec)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}}

    # --- shards ---------------------------------------------------------------------------

    def shard_ids(self) -> list[str]:
        """Committed shards, ascending."""
        names = self.files.names("shards")
        return [name[:-5] for name in names if name.endswith(".json") and HEX32.match(name)]

    def has_shard(self, shard_id: str) -> bool:
        return self.files.exists(f"shards/{shard_id}.json")

    def shard(self, shard_id: str) -> ShardInfo:
        """A shard's sidecar.

        Raises:
            CorruptionError: it is missing, damaged, or of another shard or spec.
        """
        where = f"{self.root}/shards/{shard_id}.json"
        try:
            document = unseal_json(self.files.read(f"shards/{shard_id}.json"), where)
        except FileNotFoundError:
            raise CorruptionError("the shard's sidecar is missing", where=where) from None
        info = ShardInfo.from_json(document, where)
        if info.id != shard_id or info.spec_digest != self.spec.digest:
            raise CorruptionError("the sidecar is of another shard or spec", where=where)
        if (info.num_states, info.hidden_size) != (self.spec.num_states, self.spec.hidden_size):
            raise CorruptionError("the sidecar's shape is not the spec's", where=where)
        return info

    def committed(self) -> SampleIndex:
        """sample id -> (shard id, row) of every committed sample; kept until shards change.

        Raises:
            CorruptionError: a sidecar is damaged.
        """
        names = self.shard_ids()
        if self._index is None or self._index[0] != names:
            if not self._known and len(names) > _INDEX_FROM:
                with contextlib.suppress(FileNotFoundError):
                    self._known = dict(decode_index(self.files.read("index.bin")) or {})
            for name in self._known.keys() - set(names):
                del self._known[name]
            missing = [name for name in names if name not in self._known]
            for name in missing:
                self._known[name] = ids_array(self.shard(name).ids)
            index = SampleIndex(names, [self._known[name] for name in names])
            self._index = names, index
            if len(missing) > _INDEX_FROM:
                with contextlib.suppress(CacheError):  # a read-only cache does without
                    self.files.write("index.bin", encode_index(self._known))
        return self._index[1]

    def require_space(self, num_bytes: float) -> None:
        """Call before a run that will store about `num_bytes`.

        Raises:
            CacheError: the disk has less room than that.
        """
        free = self.files.free_bytes()
        if free is not None and free < num_bytes:
            raise CacheError(
                f"the disk has {free / 1e9:.3g} GB free, about {num_bytes / 1e9:.3g} GB are needed",
                where=self.root,
                do="Free space, choose a smaller codec, or put cache.root elsewhere",
            )

    def write_shard(
        self, samples: Sequence[tuple[str, Any]], codec: str, container: str
    ) -> "ShardWriter":
        """A writer for a shard of these (id, tokens [T]) in this order; see ShardWriter.

        Raises:
            ConfigError: unknown codec or container, an id that isn't its tokens' hash.
        """
        info, tokens = plan_shard(self.spec, samples, codec, container)
        return ShardWriter(self, replace(info, versions=library_versions()), tokens)

    def convert(self, container: str, progress: Callable[[int], None] | None = None) -> int:
        """Moves every shard to `container`; snapshots, ids and decoded bits stay as they are.

        Goes on where an interrupted conversion ended.

        Args:
            progress: called with the stored bytes of each shard just moved.

        Returns:
            How many shards were moved.

        Raises:
            CorruptionError: a shard is damaged; it stays as it is.
        """
        moved = 0
        for name in self.shard_ids():
            info = self.shard(name)
            if info.container != container:
                convert_shard(self, info, container)
                moved += 1
            if progress is not None:
                progress(info.stored_bytes)
        return moved

    # --- jobs and rejects -----------------------------------------------------------------

    def write_job(self, job_id: str, plan: dict[str, Any]) -> None:
        """Stores an extraction's plan, before it starts."""
        self.files.write(f"jobs/{_checked(_JOB, job_id)}.json", seal_json({"plan": plan}))

    def job(self, job_id: str) -> dict[str, Any] | None:
        """A stored plan, or None.

        Raises:
            CorruptionError: it is damaged.
        """
        name = f"jobs/{_checked(_JOB, job_id)}.json"
        try:
            return unseal_json(self.files.read(name), f"{self.root}/{name}")["plan"]
        except FileNotFoundError:
            return None

    def write_rejects(self, job_id: str, rows: list[dict[str, Any]]) -> None:
        """Stores what a job did not capture: source, reason, name."""
        self.files.write(f"rejects/{_checked(_JOB, job_id)}.jsonl", seal_lines(rows))

    def rejects(self, job_id: str) -> list[dict[str, Any]]:
        """
        Raises:
            CorruptionError: the list is damaged.
        """
        name = f"rejects/{_checked(_JOB, job_id)}.jsonl"
        try:
            return unseal_lines(self.files.read(name), f"{self.root}/{name}")
        except FileNotFoundError:
            return []

    # --- snapshots ------------------------------------------------------------------------

    def write_snapshot(
        self, rows: Sequence[SnapshotRow], meta: dict[str, Any], name: str | None = None
    ) -> Snapshot:
        """Stores a snapshot, points `latest` (and `name`) to it.

        Raises:
            DataError: no rows, or a row whose sample isn't committed.
        """
        if name is not None:
            check_snapshot_name(name)
        index = self.committed()
        missing = [row for row in rows if row.id not in index]
        if missing:
            raise DataError(
                f"{len(missing)} samples are not in the cache, the first is {missing[0].id}",
                where=missing[0].source,
            )
        shards = [index[row.id][0] for row in rows]
        snapshot = build_snapshot(self.spec.digest, rows, shards, meta | {"name": name})
        if not self.files.exists(f"snapshots/{snapshot.id}.json"):
            table = snapshot.data
            document = {
                "format": FORMAT,
                "snapshot": snapshot.id,
                "spec": self.spec.digest,
                "num_samples": len(snapshot),
                "num_tokens": int(snapshot.num_tokens.sum(dtype=np.int64)),
                "num_supervised": int(snapshot.num_supervised.sum(dtype=np.int64)),
                "table": {"bytes": len(table), "sha256": hashlib.sha256(table).hexdigest()},
                "meta": snapshot.meta,
            }
            self.files.write(f"snapshots/{snapshot.id}.parquet", table)
            self.files.write(f"snapshots/{snapshot.id}.json", seal_json(document))
        if name is not None:
            self.tag(name, snapshot.id)
        self.files.write("snapshots/latest", seal_json({"snapshot": snapshot.id}))
        return self.snapshot(snapshot.id)

    def tag(self, name: str, snapshot: str) -> None:
        """Gives a snapshot a name; a name that exists moves."""
        check_snapshot_name(name)
        self.files.write(f"snapshots/names/{name}", seal_json({"snapshot": snapshot}))

    def names(self) -> dict[str, str]:
        """name -> snapshot id."""
        found = self.files.names("snapshots/names")
        return {name: self._pointer(f"snapshots/names/{name}") for name in found}

    def _pointer(self, name: str) -> str:
        where = f"{self.root}/{name}"
        target = unseal_json(self.files.read(name), where).get("snapshot")
        if not isinstance(target, str) or not HEX32.fullmatch(target):
            raise CorruptionError("the file names no snapshot", where=where)
        return target

    def snapshot_ids(self) -> list[str]:
        """Ids of all snapshots, ascending."""
        names = self.files.names("snapshots")
        return [name[:-5] for name in names if name.endswith(".json") and HEX32.match(name)]

    def resolve(self, ref: str = "latest") -> str:
        """A snapshot's id from its id, a unique prefix (4 digits or more), a name, or "latest".

        Raises:
            CacheError: no or more than one snapshot is meant.
        """
        ids = self.snapshot_ids()
        if ref in ids:
            return ref
        try:
            if ref == "latest":
                return self._pointer("snapshots/latest")
            if _NAME.fullmatch(ref):
                return self._pointer(f"snapshots/names/{ref}")
        except FileNotFoundError:
            pass
        near = [name for name in ids if len(ref) >= 4 and name.startswith(ref)]
        if len(near) == 1:
            return near[0]
        if near:
            raise CacheError(f"{ref!r} is the start of {len(near)} snapshots", where=self.root)
        what = f"no snapshot is {ref!r}" if ids else "the cache has no snapshot yet"
        raise CacheError(what, where=self.root, do=f"See drafttape cache ls {self.root}")

    def snapshot_info(self, snapshot: str) -> dict[str, Any]:
        """A snapshot's JSON: counts, meta, its table's size and sha256.

        Raises:
            CorruptionError: it is missing or damaged.
        """
        where = f"{self.root}/snapshots/{snapshot}.json"
        try:
            document = unseal_json(self.files.read(f"snapshots/{snapshot}.json"), where)
        except FileNotFoundError:
            raise CorruptionError("the snapshot is missing", where=where) from None
        if document.get("snapshot") != snapshot or document.get("spec") != self.spec.digest:
            raise CorruptionError("the file is of another snapshot or spec", where=where)
        return document

    def snapshots(self) -> list[dict[str, Any]]:
        """Every snapshot's JSON with the names that point to it (key "names")."""
        names = self.names()
        return [
            self.snapshot_info(snapshot)
            | {"names": sorted(name for name, target in names.items() if target == snapshot)}
            for snapshot in self.snapshot_ids()
        ]

    def snapshot(self, ref: str = "latest") -> Snapshot:
        """
        Raises:
            CacheError: no or more than one snapshot is meant.
            CorruptionError: it is damaged.
        """
        name = self.resolve(ref)
        info, where = self.snapshot_info(name), f"{self.root}/snapshots/{name}.parquet"
        try:
            data = self.files.read(f"snapshots/{name}.parquet")
        except FileNotFoundError:
            raise CorruptionError("the snapshot's table is missing", where=where) from None
        wanted = info["table"]["bytes"], info["table"]["sha256"]
        if (len(data), hashlib.sha256(data).hexdigest()) != wanted:
            raise CorruptionError("the snapshot's table is damaged", where=where)
        snapshot = Snapshot(name, self.spec.digest, info["meta"], data)
        if len(snapshot) != info["num_samples"]:
            raise CorruptionError("the snapshot's table has another length", where=where)
        return snapshot

    # --- reading, target, verification ----------------------------------------------------

    def reader(self) -> SampleReader:
        """A reader for one process and thread."""
        return SampleReader(self)

    def write_target_assets(self, embed: Any, lm_head: Any, info: dict[str, Any]) -> None:
        """Stores embedding [V, D] and head (None when tied) once, with what training must know."""
        write_assets(self, embed, lm_head, info)

    def target_assets(self) -> TargetAssets:
        """
        Raises:
            CacheError: the cache has none.
        """
        return read_assets(self)

    def verify(
        self, full: bool = True, progress: Callable[[int], None] | None = None
    ) -> "VerifyReport":
        """Checks everything; see `shared/verify.py`."""
        from shared.verify import verify

        return verify(self, full=full, progress=progress)


def _checked(pattern: re.Pattern[str], name: str) -> str:
    if not pattern.fullmatch(name):
        raise CacheError(f"{name!r} can't be a file name", do="Use letters, digits, . _ and -")
    return name


def check_snapshot_name(name: str) -> None:
    """Call before a long run whose snapshot will have this name.

    Raises:
        CacheError: a snapshot can't have this name.
    """
    _checked(_NAME, name)
    if name == "latest" or re.fullmatch(r"[0-9a-f]{4,32}", name):
        raise CacheError(f"{name!r} can't name a snapshot: it reads like an id or is reserved")
