"""Hidden states from and to other tools: SpecForge, speculators, DeepSpec.

| kind | files | states |
|---|---|---|
| specforge | one `.ckpt` or `.ckpt.gz` a sample: input_ids, loss_mask, aux_hidden_state [1, T, L*D], hidden_state [1, T, D] | taps, then the last hidden state after the norm |
| speculators | one `.safetensors` a sample: token_ids [T], hidden_states [T, L, D], loss_mask if there | taps |
| deepspec | manifest.json, samples.idx, shards of raw records | taps, then the last hidden state after the norm |

Everything imported is checked: shapes, token ids, bf16, finite, no pickled objects. What fails is left
out and listed. T: tokens of a sample; L: taps; D: channels.
"""  # noqa: E501

import gzip
import io
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import TargetConfig
from shared.errors import ConfigError, DataError, DrafttapeError
from shared.fs import library_writes
from shared.sample import SnapshotRow, pack_mask, sample_id
from shared.spec import CaptureSpec
from shared.store import Store
from stage1_extract.checks import finite
from stage1_extract.import_target import ImportTarget
from stage1_extract.prompts import split_of

# kind: patterns of its files in the directory.
KINDS = {
    "specforge": ("**/*.ckpt", "**/*.ckpt.gz"),
    "speculators": ("**/*.safetensors",),
    "deepspec": ("manifest.json",),
}
_RECORD = struct.Struct("<QIIQQQQQ")
_SHARD_BYTES = 512 << 20
_MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class Foreign:
    """One sample of another tool."""

    source: str
    ids_T: np.ndarray
    hidden_TLD: np.ndarray
    mask_T: np.ndarray


@dataclass
class ImportReport:
    """What came in and what was left out (source, reason)."""

    samples: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)


def import_from(
    kind: str,
    source: str,
    root: str,
    *,
    codec: str,
    container: str,
    layer_ids: list[int] | None,
    weights: str | None,
    target: TargetConfig | None = None,
    device: str = "auto",
    progress: Callable[[int], object] = lambda count: None,
) -> ImportReport:
    """Writes a cache and a snapshot "imported" from another tool's files.

    Args:
        target: the model that made the states. It is loaded, the first samples are held against
            it, and its embedding and head are stored, so that one can train from the cache.

    Raises:
        ConfigError: unknown kind; the files don't name the tapped layers and neither do you.
        MismatchError: the cache is of another spec, or the states aren't the target's.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"nothing is known about {kind!r}", do=f"Choose one of {', '.join(KINDS)}"
        )
    path, report = Path(source), ImportReport()
    if not path.is_dir():
        raise DataError("there is no such directory", where=source)
    _check_kind(path, kind)
    reader = {"specforge": _specforge, "speculators": _speculators, "deepspec": _deepspec}[kind]
    manifest: dict[str, Any] = _manifest(path) if kind == "deepspec" else {}
    layers = layer_ids or manifest.get("target_layer_ids")
    if not layers:
        raise ConfigError("the files don't say which layers were tapped", do="Give layer_ids=[…]")
    known = ImportTarget(target, layers, device) if target is not None else None
    store: Store | None = None
    rows: list[SnapshotRow] = []
    batch: dict[str, Foreign] = {}
    size = 0
    for item in reader(path, manifest):
        if isinstance(item, tuple):
            report.rejected.append(item)
            continue
        try:
            spec = _spec(kind, item, layers, weights, manifest)
            _check(item, spec)
            if known is not None:
                spec = known.spec(spec)
                known.check(item.ids_T, item.hidden_TLD, spec)
            if store is None:
                store = Store.create(root, spec)
        except (DataError, ValueError) as error:
            report.rejected.append((item.source, str(error)))
            continue
        if spec.digest != store.spec.digest:
            report.rejected.append((item.source, "other shape than the samples before it"))
            continue
        name = sample_id(item.ids_T)
        rows.append(
            SnapshotRow(
                name, len(item.ids_T), pack_mask(item.mask_T), split_of(name, 0.1, 0), item.source
            )
        )
        if name not in batch and name not in store.committed():
            batch[name] = item
            size += item.hidden_TLD.nbytes
        if size >= _SHARD_BYTES:
            _write(store, batch, codec, container)
            batch, size = {}, 0
        report.samples += 1
        progress(1)
    if store is not None and rows:
        if batch:
            _write(store, batch, codec, container)
        meta = {"imported_from": kind, "source": source, "rejected": len(report.rejected)}
        if known is not None:
            known.keep(store)
        store.write_snapshot(rows, meta, name="imported")
    return report


def _check_kind(path: Path, kind: str) -> None:
    """
    Raises:
        DataError: the directory has no file of this kind; says which kind its files look like.
    """
    found = [
        name
        for name, patterns in KINDS.items()
        if any(next(path.glob(pattern), None) for pattern in patterns)
    ]
    if kind in found:
        return
    files = " or ".join(pattern.removeprefix("**/") for pattern in KINDS[kind])
    raise DataError(
        f"there is no {files} in it" + (f"; its files look like {found[0]}'s" if found else ""),
        where=path,
        do=f"Use drafttape cache import ROOT {found[0]} {path}"
        if found
        else f"Give a directory that {kind} wrote",
    )


def _spec(
    kind: str, item: Foreign, layers: list[int], weights: str | None, manifest: dict[str, Any]
) -> CaptureSpec:
    model = manifest.get("target_model_name_or_path")
    return CaptureSpec(
        weights=weights or str(model or f"imported from {kind}"),
        architecture=str(model or "unknown"),
        layer_ids=tuple(layers),
        hidden_size=item.hidden_TLD.shape[2],
        last_hidden=kind != "speculators",
        backend={"imported_from": kind},
    )


def _check(item: Foreign, spec: CaptureSpec) -> None:
    tokens, states, size = item.hidden_TLD.shape
    if len(item.ids_T) != tokens or len(item.mask_T) != tokens or not tokens:
        raise DataError(f"{len(item.ids_T)} tokens, {len(item.mask_T)} mask bits, {tokens} states")
    if (states, size) != (spec.num_states, spec.hidden_size):
        raise DataError(f"{states} states of {size} channels, not {spec.num_states} as expected")
    if int(item.ids_T.min()) < 0:
        raise DataError("a token id is negative")
    if not finite(item.hidden_TLD):
        raise DataError("a hidden state is not finite")


def _write(store: Store, batch: dict[str, Foreign], codec: str, container: str) -> None:
    names = [(name, item.ids_T) for name, item in batch.items()]
    writer = store.write_shard(names, codec, container)
    if store.has_shard(writer.shard_id):
        return
    with writer:
        for name, item in batch.items():
            writer.append(name, item.hidden_TLD)


def _bits(tensor: Any) -> np.ndarray:
    """The bits of a bf16 tensor as uint16; other dtypes are refused rather than rounded."""
    import torch

    if tensor.dtype != torch.bfloat16:
        raise DataError(f"states are {tensor.dtype}, not torch.bfloat16")
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def _int_tokens(tensor: Any) -> np.ndarray:
    ids = tensor.reshape(-1).numpy()
    if ids.dtype.kind not in "iu" or (ids.size and int(ids.max()) >= 1 << 31):
        raise DataError("token ids are not 32-bit integers")
    return ids.astype(np.int32)


def _specforge(path: Path, _: dict[str, Any]) -> Iterator[Foreign | tuple[str, str]]:
    import torch

    for file in sorted([*path.rglob("*.ckpt"), *path.rglob("*.ckpt.gz")]):
        try:
            data = file.read_bytes()
            if file.suffix == ".gz":
                data = gzip.decompress(data)
            # weights_only: tensors and plain containers; a pickled object is refused.
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            last, taps = _bits(found["hidden_state"]), _bits(found["aux_hidden_state"])
            tokens, size = last.shape[-2:]
            hidden = [taps.reshape(tokens, -1, size), last.reshape(tokens, 1, size)]
            mask_T = found["loss_mask"].reshape(-1).numpy().astype(bool)
            ids_T = _int_tokens(found["input_ids"])
            yield Foreign(str(file), ids_T, np.concatenate(hidden, axis=1), mask_T)
        except Exception as error:
            yield str(file), _reason(error)


def _speculators(path: Path, _: dict[str, Any]) -> Iterator[Foreign | tuple[str, str]]:
    from safetensors.torch import load

    for file in sorted(path.rglob("*.safetensors")):
        try:
            found = load(file.read_bytes())
            ids_T = _int_tokens(found["token_ids"])
            hidden_TLD = _bits(found["hidden_states"])
            if hidden_TLD.ndim != 3:
                raise DataError(f"hidden_states have {hidden_TLD.ndim} dimensions, not 3")
            mask = found.get("loss_mask")
            mask_T = np.ones(len(ids_T), bool) if mask is None else mask.reshape(-1).numpy() > 0
            yield Foreign(str(file), ids_T, hidden_TLD, mask_T)
        except Exception as error:
            yield str(file), _reason(error)


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, DrafttapeError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200]


def _manifest(path: Path) -> dict[str, Any]:
    """
    Raises:
        DataError: it is missing, of another version, or names files outside the directory.
    """
    where = path / "manifest.json"
    try:
        found = json.loads(where.read_text())
        plain = all(Path(s["file_name"]).name == s["file_name"] for s in found["shards"])
        if found["version"] != 2 or found["index_record_size"] != _RECORD.size or not plain:
            raise ValueError("another version, or a file outside the directory")
        if (found["hidden_dtype"], found["token_dtype"]) != ("bfloat16", "int32"):
            raise ValueError(f"states are {found['hidden_dtype']}, not bfloat16")
        found["hidden_size"] = int(found["hidden_size"])
        found["target_layer_ids"] = [int(layer) for layer in found["target_layer_ids"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"not a DeepSpec target cache ({error})", where=where) from None
    return found


def _deepspec(path: Path, manifest: dict[str, Any]) -> Iterator[Foreign | tuple[str, str]]:
    size, taps = manifest["hidden_size"], len(manifest["target_layer_ids"])
    shards = [path / shard["file_name"] for shard in manifest["shards"]]
    index = (path / "samples.idx").read_bytes()
    count = len(index) // _RECORD.size
    if count != manifest.get("num_samples", count):
        reason = f"the index has {count} samples, the manifest {manifest['num_samples']}"
        yield str(path / "samples.idx"), reason
    for start in range(0, len(index) - len(index) % _RECORD.size, _RECORD.size):
        number, shard, tokens, ids_at, _, mask_at, taps_at, last_at = _RECORD.unpack_from(
            index, start
        )
        source = f"{path}:{number}"
        try:
            if shard >= len(shards) or not 0 < tokens <= _MAX_TOKENS:
                raise DataError("the index names a shard or a length that can't be")
            part = [
                np.fromfile(shards[shard], dtype, count, offset=offset)
                for dtype, count, offset in (
                    ("<i4", tokens, ids_at),
                    ("u1", tokens, mask_at),
                    ("<u2", tokens * taps * size, taps_at),
                    ("<u2", tokens * size, last_at),
                )
            ]
            if any(len(a) != n for a, n in zip(part, (tokens, tokens, tokens * taps * size,
                                                      tokens * size), strict=True)):  # fmt: skip
                raise DataError("the shard ends before the sample does")
            hidden = [part[2].reshape(tokens, taps, size), part[3].reshape(tokens, 1, size)]
            yield Foreign(source, part[0], np.concatenate(hidden, axis=1), part[1] > 0)
        except (DataError, OSError, ValueError) as error:
            yield source, _reason(error)


def export_to(
    kind: str,
    store: Store,
    ref: str,
    target: str,
    progress: Callable[[int], object] = lambda count: None,
) -> int:
    """Writes a snapshot's samples as another tool's files; returns how many.

    Raises:
        ConfigError: unknown kind; the tool needs the last hidden state and the cache has none.
        DataError: the directory has something in it.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"nothing is known about {kind!r}", do=f"Choose one of {', '.join(KINDS)}"
        )
    if kind != "speculators" and not store.spec.last_hidden:
        raise ConfigError(
            f"{kind} needs the last hidden state, which this cache doesn't have",
            where=store.root,
            do="Extract with last_hidden=true into a new cache",
        )
    folder = Path(target)
    if folder.exists() and any(folder.iterdir()):
        raise DataError("the directory is not empty", where=target, do="Choose a new one")
    folder.mkdir(parents=True, exist_ok=True)
    snapshot, reader = store.snapshot(ref), store.reader()
    writer = _DeepSpecWriter(folder, store) if kind == "deepspec" else None
    try:
        for number, name in enumerate(snapshot.ids):
            ids_T, hidden_TLD = reader.read(name)
            mask_T = snapshot.mask(number)
            if writer is not None:
                writer.add(number, ids_T, hidden_TLD, mask_T)
            elif kind == "speculators":
                _save_speculators(folder / f"hs_{number}.safetensors", ids_T, hidden_TLD, mask_T)
            else:
                _save_specforge(folder / f"data_{number}.ckpt", ids_T, hidden_TLD, mask_T)
            progress(1)
    finally:
        if writer is not None:
            writer.close()
    if writer is not None:
        writer.write_manifest()
    return len(snapshot)


def _tensor(bits: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def _save_speculators(path: Path, ids_T: np.ndarray, hidden: np.ndarray, mask: np.ndarray) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "token_ids": torch.from_numpy(ids_T.astype(np.int64)),
        "hidden_states": _tensor(hidden),
        "loss_mask": torch.from_numpy(mask.astype(np.int64)),
    }
    with library_writes(path):
        save_file(tensors, path)


def _save_specforge(path: Path, ids_T: np.ndarray, hidden: np.ndarray, mask: np.ndarray) -> None:
    import torch

    taps = hidden[:, :-1].reshape(1, len(ids_T), -1)
    found = {
        "input_ids": torch.from_numpy(ids_T.astype(np.int64)),
        "loss_mask": torch.from_numpy(mask.astype(np.int64)),
        "hidden_state": _tensor(hidden[:, -1][None]),
        "aux_hidden_state": _tensor(taps),
    }
    with library_writes(path), path.open("wb") as file:
        torch.save(found, file)


class _DeepSpecWriter:
    """One raw shard, its index, and the manifest last."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store, self._count = folder, store, 0
        self._data = (folder / "shard-00000.bin").open("wb")
        self._index = (folder / "samples.idx").open("wb")

    def add(self, number: int, ids_T: np.ndarray, hidden: np.ndarray, mask: np.ndarray) -> None:
        ones = np.ones(len(ids_T), "u1")
        parts = (ids_T.astype("<i4"), ones, mask.astype("u1"), hidden[:, :-1], hidden[:, -1])
        offsets = []
        for part in parts:
            offsets.append(self._data.tell())
            self._data.write(np.ascontiguousarray(part).tobytes())
        self._index.write(_RECORD.pack(number, 0, len(ids_T), *offsets))
        self._count += 1

    def close(self) -> None:
        self._data.close()
        self._index.close()

    def write_manifest(self) -> None:
        """Makes the files a target cache, once they are whole."""
        spec = self._store.spec
        manifest = {
            "version": 2,
            "num_samples": self._count,
            "num_shards": 1,
            "target_layer_ids": list(spec.layer_ids),
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": _RECORD.size,
            "hidden_size": spec.hidden_size,
            "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
            "target_model_name_or_path": spec.architecture,
        }
        (self._folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
