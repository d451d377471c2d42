"""Checkpoints: everything that the rest of a run is a function of, whole or not at all.

`checkpoints/step-000150/`: `model.safetensors` (fp32 masters), `optimizer.safetensors` (states by
parameter name), `state.json` (step, digest, totals, a crc32c of each file; sealed, written last). A
drafter that is cut over ranks has a file of each rank instead of the first two (see
`checkpoint_shards`). A checkpoint is written beside its place, fsynced and renamed. Order and
anchors are pure functions of the step, so no generator state is saved. Tensors are never cast.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors.torch import load_file, save_file

from shared.errors import CorruptionError, MismatchError
from shared.fs import (
    disk_errors,
    fsync_path,
    library_writes,
    seal_json,
    unseal_json,
    write_atomic,
)
from shared.record import RunRecord, read_record
from stage2_train.draft_vocabulary import take_ids
from stage2_train.sharding import copy_

FOLDER = "checkpoints"
FILES = ("model.safetensors", "optimizer.safetensors")


def name_of(step: int) -> str:
    """Directory name of the checkpoint after `step` updates."""
    return f"step-{step:06d}"


def save(
    run_dir: Path,
    step: int,
    model: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    state: dict[str, Any],
) -> Path:
    """Writes a checkpoint atomically and returns its directory.

    Args:
        run_dir: the run.
        step: updates done.
        model: parameters by name.
        optimizer: optimizer states by name.
        state: JSON-ready; the rest of what resuming needs.

    Raises:
        CacheError: the disk is full, read-only or gone.
    """
    folder = begin(run_dir, step)
    with disk_errors(folder.parent):
        for file, tensors in zip(FILES, (model, optimizer), strict=True):
            whole = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
            with library_writes(folder / file):
                save_file(whole, folder / file)
            fsync_path(folder / file)
    return finish(run_dir, step, state)


def temporary(run_dir: Path, step: int) -> Path:
    """Where a checkpoint is written before it is renamed."""
    return run_dir / FOLDER / f".tmp-{name_of(step)}"


def begin(run_dir: Path, step: int) -> Path:
    """Makes the empty directory that a checkpoint is written in; what a killed save left goes.

    Raises:
        CacheError: the disk is full, read-only or gone.
    """
    folder = run_dir / FOLDER
    with disk_errors(folder):
        for left in folder.glob(".tmp-step-*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary(run_dir, step).mkdir(parents=True)
    return temporary(run_dir, step)


def finish(run_dir: Path, step: int, state: dict[str, Any]) -> Path:
    """Seals a directory whose tensor files are written, and puts it in its place.

    Raises:
        CacheError: the disk is full, read-only or gone.
    """
    folder = run_dir / FOLDER
    final, made = folder / name_of(step), temporary(run_dir, step)
    with disk_errors(folder):
        checksums = {p.name: _crc(p) for p in sorted(made.glob("*.safetensors"))}
        document = {"format": 2, "step": step, **state, "crc32c": checksums}
        # A step that met a NaN is a state too.
        write_atomic(made / "state.json", seal_json(document, allow_nan=True))
        if final.exists():  # the same step again after a resume: equal, but whole beats old
            shutil.rmtree(final)
        made.rename(final)
        fsync_path(folder)
    return final


def load(
    path: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """(model, optimizer, state) of a checkpoint directory, on the CPU.

    Raises:
        CorruptionError: a file is missing, cut or changed.
    """
    state = load_state(path)
    verify(path, state)
    if set(state["crc32c"]) == set(FILES):
        return load_file(path / FILES[0]), load_file(path / FILES[1]), state
    from stage2_train.checkpoint_shards import read_whole

    tensors = read_whole(path)
    states = {key: tensor for key, tensor in tensors.items() if "/" in key}
    return {key: t for key, t in tensors.items() if key not in states}, states, state


def verify(path: Path, state: dict[str, Any], rank: int = 0, world: int = 1) -> None:
    """Holds the tensor files against their checksums; rank r of W looks at every W-th.

    Raises:
        CorruptionError: a file is missing, cut or changed.
    """
    files = state.get("crc32c") or dict.fromkeys(FILES, "")
    for file in sorted(files)[rank::world]:
        try:
            if _crc(path / file) != files[file]:
                raise CorruptionError(
                    "the file is not what was written (its checksum differs)",
                    where=path / file,
                    do=f"Delete {path}; the same command goes on from the checkpoint before",
                )
        except OSError as error:
            raise CorruptionError(
                f"the checkpoint can't be read ({error})", where=path / file
            ) from None


def weights_key(path: Path) -> str:
    """Changes when a checkpoint's tensor files do."""
    files = load_state(path).get("crc32c") or {}
    return files.get(FILES[0]) or "-".join(files[file] for file in sorted(files))


def load_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint directory.

    Raises:
        CorruptionError: it is missing, cut or changed.
    """
    where = path / "state.json"
    try:
        data = where.read_bytes()
        if data.startswith(b'{\n "format": 1,'):  # written before it was sealed
            state: dict[str, Any] = json.loads(data)
            return state
        return unseal_json(data, where)
    except (OSError, ValueError) as error:
        raise CorruptionError(f"the checkpoint can't be read ({error})", where=path) from None


def load_parameters(module: torch.nn.Module, tensors: dict[str, torch.Tensor], where: Path) -> None:
    """Copies tensors into a module's parameters; same names, shapes and dtypes, nothing cast.

    Raises:
        MismatchError: a name is missing or unknown, a shape or dtype differs, or the draft
            vocabulary does.
    """
    tensors = take_ids(module, tensors, where)
    mine = dict(module.named_parameters())
    for key in sorted(mine.keys() | tensors.keys()):
        if key not in tensors or key not in mine:
            state = "is missing" if key not in tensors else "is unknown to the drafter"
            raise MismatchError(f"parameter {key} {state}", where=where)
        if mine[key].shape != tensors[key].shape or mine[key].dtype != tensors[key].dtype:
            raise MismatchError(
                f"parameter {key} is {tensors[key].dtype} {tuple(tensors[key].shape)}, the drafter "
                f"has {mine[key].dtype} {tuple(mine[key].shape)}",
                where=where,
            )
    with torch.no_grad():
        for key, parameter in mine.items():
            copy_(parameter, tensors[key])


def steps(run_dir: Path) -> list[int]:
    """Steps of all whole checkpoints, ascending."""
    found = []
    for path in (run_dir / FOLDER).glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / "state.json").exists():
            found.append(int(match[1]))
    return sorted(found)


def lost_last(run_dir: Path, record: RunRecord) -> int | None:
    """The last update of a finished run whose checkpoint is not there any more."""
    step = record.result.get("step")
    return None if step is None or step in steps(run_dir) else int(step)


def find(run_dir: Path, which: str) -> Path:
    """The directory of `last`, `best` or `step-NNNNNN`.

    Raises:
        MismatchError: there is none.
    """
    existing = steps(run_dir)
    step = None
    if which == "last" and existing:
        step = existing[-1]
        lost = lost_last(run_dir, read_record(run_dir)) if (run_dir / "run.json").exists() else None
        if lost is not None:
            raise MismatchError(
                f"the run ended at update {lost}, but {name_of(lost)} is gone",
                where=run_dir,
                do="The same `drafttape train` command makes it again; or say "
                f"checkpoint={name_of(step)} to take an earlier one",
            )
    elif which == "best":
        step = best(run_dir).get("step")
    elif match := re.fullmatch(r"step-(\d+)", which):
        step = int(match[1])
    if step is None or step not in existing:
        have = ", ".join(map(name_of, existing)) or "none"
        raise MismatchError(f"there is no checkpoint {which!r}", where=run_dir, do=f"Have: {have}")
    return run_dir / FOLDER / name_of(step)


def best(run_dir: Path) -> dict[str, Any]:
    """{step, heldout_loss} of the best checkpoint, or {}.

    Raises:
        CorruptionError: the file that names it is damaged.
    """
    path = run_dir / FOLDER / "best.json"
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        return {"step": int(document["step"]), "heldout_loss": float(document["heldout_loss"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"it can't be read ({error})", where=path, do="Delete it") from None


def is_better(loss: float, old: dict[str, Any]) -> bool:
    """Whether a held-out loss beats the best one so far. NaN and infinity never do."""
    return math.isfinite(loss) and loss < old.get("heldout_loss", math.inf)


def mark_best(run_dir: Path, step: int, loss: float) -> None:
    """Records the best checkpoint (which must be saved already)."""
    document = {"step": step, "heldout_loss": loss}
    write_atomic(run_dir / FOLDER / "best.json", json.dumps(document).encode() + b"\n")


def prune(run_dir: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints (at least one) and the best."""
    spared = best(run_dir).get("step")
    for step in steps(run_dir)[: -max(1, keep)]:
        if step != spared:
            path = run_dir / FOLDER / name_of(step)
            (path / "state.json").unlink()  # from here on it is no checkpoint
            shutil.rmtree(path)


def _crc(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum.update(block)
    return bytes(checksum.digest()).hex()
