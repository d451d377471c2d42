"""Shards: what both containers share. A shard is an immutable file set plus a sidecar.

Rows of a shard are tokens: each sample starts at a multiple of `chunk_tokens`, so that a chunk
holds rows of one sample only: a read touches no other sample's bytes, a damaged chunk names its
sample, and a chunk can be copied to another shard as it is.
S: samples of a shard; T: tokens of a sample; L: states; D: channels.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import ConfigError, CorruptionError
from shared.fs import Blob, LocalFiles, disk_errors
from shared.sample import ID_BYTES

if TYPE_CHECKING:
    from shared.spec import CaptureSpec

FORMAT = 1
CHUNK_TOKENS = 64
HEX32 = re.compile(r"[0-9a-f]{32}")
CONTAINERS = ("zarr", "webdataset")
_FILE = re.compile(r"(?:\.tar|/[A-Za-z0-9_][A-Za-z0-9_.]*(?:/[A-Za-z0-9_][A-Za-z0-9_.]*)*)")


def shard_id(spec_digest: str, codec: str, ids: Sequence[str]) -> str:
    """Hash of what a shard holds: the same samples in the same order make the same shard."""
    digest = hashlib.blake2b(b"drafttape.shard.v1", digest_size=16)
    digest.update(bytes.fromhex(spec_digest) + codec.encode() + b"\0")
    for sample in ids:
        digest.update(bytes.fromhex(sample))
    return digest.hexdigest()


@dataclass(frozen=True)
class ShardInfo:
    """A shard's sidecar: its sample table, its files with size and sha256, how it is encoded.

    Args:
        files: path after `shards/<id>` (".tar", "/hidden/c/0/0/0") to (bytes, sha256).
        layer_error: relative L2 error of each state under a lossy codec; empty if lossless.
        extra: what only the container needs (the tar's offset index).
    """

    id: str
    spec_digest: str
    container: str
    codec: str
    num_states: int
    hidden_size: int
    ids: tuple[str, ...]
    num_tokens: np.ndarray
    chunk_tokens: int = CHUNK_TOKENS
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    layer_error: tuple[float, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @cached_property
    def chunk_starts(self) -> np.ndarray:
        """[S + 1] int64: first chunk of each sample."""
        chunks = -(-self.num_tokens.astype(np.int64) // self.chunk_tokens)
        return np.concatenate([[0], np.cumsum(chunks)])

    @property
    def num_chunks(self) -> int:
        return int(self.chunk_starts[-1])

    @property
    def num_rows(self) -> int:
        """N: rows of the arrays, pads included."""
        return self.num_chunks * self.chunk_tokens

    @property
    def stored_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "shard": self.id,
            "spec": self.spec_digest,
            "container": self.container,
            "codec": self.codec,
            "num_states": self.num_states,
            "hidden_size": self.hidden_size,
            "chunk_tokens": self.chunk_tokens,
            "ids": list(self.ids),
            "num_tokens": self.num_tokens.tolist(),
            "files": {path: list(entry) for path, entry in self.files.items()},
            "layer_error": list(self.layer_error),
            "extra": self.extra,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], where: object) -> "ShardInfo":
        """
        Raises:
            CorruptionError: the sidecar contradicts itself or names a path outside its shard.
        """
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']}, this version reads {FORMAT}")
            info = cls(
                id=document["shard"],
                spec_digest=document["spec"],
                container=document["container"],
                codec=document["codec"],
                num_states=int(document["num_states"]),
                hidden_size=int(document["hidden_size"]),
                ids=tuple(document["ids"]),
                num_tokens=np.array(document["num_tokens"], np.int32),
                chunk_tokens=int(document["chunk_tokens"]),
                files={path: (int(n), str(sha)) for path, (n, sha) in document["files"].items()},
                layer_error=tuple(map(float, document["layer_error"])),
                extra=document["extra"],
                versions=document["versions"],
            )
            if shard_id(info.spec_digest, info.codec, info.ids) != info.id:
                raise ValueError("its id is not the hash of its samples")
            if info.container not in CONTAINERS:
                raise ValueError(f"unknown container {info.container!r}")
            if len(info.ids) != info.num_tokens.size or not len(info.ids):
                raise ValueError("ids and num_tokens differ in length")
            if int(info.num_tokens.min()) < 1 or info.chunk_tokens < 1 or info.num_states < 1:
                raise ValueError("a count is not positive")
            for path in info.files:
                if not _FILE.fullmatch(path):
                    raise ValueError(f"bad file name {path!r}")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptionError(f"not a valid sidecar ({error})", where=where) from None
        return info


def plan_shard(
    spec: "CaptureSpec", samples: Sequence[tuple[str, Any]], codec: str, container: str
) -> tuple[ShardInfo, list[np.ndarray]]:
    """The sidecar (without files) and the tokens [T] of each sample of a shard to be written.

    Args:
        samples: (id, tokens [T]) in the order of the shard.

    Raises:
        ConfigError: unknown container; a sample twice, empty or not the one its id names; a chunk
            over the limit.
    """
    from shared.codec import check_chunk_size, get_codec
    from shared.sample import sample_id

    if container not in CONTAINERS:
        raise ConfigError(f"there is no container {container!r}", do="Choose zarr or webdataset")
    get_codec(codec)
    check_chunk_size(CHUNK_TOKENS, spec.num_states, spec.hidden_size)
    ids = [name for name, _ in samples]
    if len(set(ids)) != len(ids) or not ids:
        raise ConfigError("a shard needs at least one sample, and each sample once")
    tokens = [np.asarray(ids_T) for _, ids_T in samples]
    for name, ids_T in zip(ids, tokens, strict=True):
        if not len(ids_T) or sample_id(ids_T) != name:
            raise ConfigError("the id is not the hash of these tokens", where=f"sample {name}")
    info = ShardInfo(
        id=shard_id(spec.digest, codec, ids),
        spec_digest=spec.digest,
        container=container,
        codec=codec,
        num_states=spec.num_states,
        hidden_size=spec.hidden_size,
        ids=tuple(ids),
        num_tokens=np.array([len(ids_T) for ids_T in tokens], np.int32),
    )
    return info, tokens


def damaged(info: ShardInfo, row: int | None, what: str) -> CorruptionError:
    """The error of a damaged shard: names the shard and, where it is known, the sample."""
    where = f"shard {info.id}" + ("" if row is None else f", sample {info.ids[row]}")
    return CorruptionError(what, where=where, do="See drafttape cache verify, then cache repair")


def ids_array(ids: Sequence[str]) -> np.ndarray:
    """[S] V16 raw ids of hex ids."""
    return np.frombuffer(bytes.fromhex("".join(ids)), dtype=f"V{ID_BYTES}")


def library_versions() -> dict[str, str]:
    """Versions of what made the bytes."""
    from importlib.metadata import version

    return {name: version(name) for name in ("drafttape", "numcodecs", "numpy")}


def open_blob(files: LocalFiles, info: ShardInfo, name: str) -> Blob:
    """Opens a shard's file and checks its size.

    Raises:
        CorruptionError: it is missing or has another size than the sidecar says.
    """
    if name not in info.files:
        raise damaged(info, None, f"the sidecar doesn't list {name}")
    try:
        blob = files.open(f"shards/{info.id}{name}")
    except FileNotFoundError:
        raise damaged(info, None, f"the file {info.id}{name} is missing") from None
    if blob.size != info.files[name][0]:
        found, wanted = blob.size, info.files[name][0]
        blob.close()
        raise damaged(info, None, f"{info.id}{name} has {found} bytes, not {wanted}")
    return blob


def read_blob(blob: Blob, info: ShardInfo, buffer: Any, offset: int, what: str) -> None:
    """Fills `buffer`.

    Raises:
        CorruptionError: the file ends before that.
        CacheError: the device reports an error.
    """
    with disk_errors(f"shard {info.id}"):
        count = blob.read_into(buffer, offset)
    if count != len(buffer):
        raise damaged(info, None, f"{what} ends early")
