"""Checkpoints: everything that the rest of a run is a function of, whole or not at all.

`checkpoints/step-000150/`: `model.safetensors` (fp32 masters), `optimizer.safetensors` (states by
parameter name), `state.json` (step, digest, totals, a crc32c of each file; sealed, written last). A
checkpoint is written beside its place, fsynced and renamed. Order and anchors are pure functions of
the step, so no generator state is saved. Tensors are never cast.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shared.errors import CorruptionError, MismatchError
from shared.fs import disk_errors, fsync_path, seal_json, unseal_json, write_atomic

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
    folder = run_dir / FOLDER
    final, temporary = folder / name_of(step), folder / f".tmp-{name_of(step)}"
    with disk_errors(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        checksums = {}
        for file, tensors in zip(FILES, (model, optimizer), strict=True):
            try:
                save_file(
                    {key: t.detach().cpu().contiguous() for key, t in tensors.items()},
                    temporary / file,
                )
            except SafetensorError as error:
                raise OSError(str(error)) from error
            fsync_path(temporary / file)
            checksums[file] = _crc(temporary / file)
        document = {"format": 2, "step": step, **state, "crc32c": checksums}
        # A step that met a NaN is a state too.
        write_atomic(temporary / "state.json", seal_json(document, allow_nan=True))
        if final.exists():  # the same step again after a resume: equal, but whole beats old
            shutil.rmtree(final)
        temporary.rename(final)
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
    tensors = []
    for file in FILES:
        try:
            if _crc(path / file) != state["crc32c"][file]:
                raise CorruptionError(
                    "the file is not what was written (its checksum differs)",
                    where=path / file,
                    do=f"Delete {path}; the same command goes on from the checkpoint before",
                )
            tensors.append(load_file(path / file))
        except (OSError, KeyError, SafetensorError) as error:
            raise CorruptionError(
                f"the checkpoint can't be read ({error})", where=path / file
            ) from None
    return tensors[0], tensors[1], state


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
        MismatchError: a name is missing or unknown, or a shape or dtype differs.
    """
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
            parameter.copy_(tensors[key])


def steps(run_dir: Path) -> list[int]:
    """Steps of all whole checkpoints, ascending."""
    found = []
    for path in (run_dir / FOLDER).glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / "state.json").exists():
            found.append(int(match[1]))
    return sorted(found)


def find(run_dir: Path, which: str) -> Path:
    """The directory of `last`, `best` or `step-NNNNNN`.

    Raises:
        MismatchError: there is none.
    """
    existing = steps(run_dir)
    step = None
    if which == "last" and existing:
        step = existing[-1]
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
