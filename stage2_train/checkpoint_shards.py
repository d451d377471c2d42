"""Tensor files of a cut drafter: every rank writes its rows, through torch.distributed.checkpoint.

The storage is DCP's safetensors one, whose files say themselves which rows they hold: nothing is
pickled, unlike in DCP's own format. Keys are those of a whole checkpoint (parameter names, and
"parameter/state"), so any number of ranks reads what any number wrote, a single process included.
"""

import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shared.errors import CorruptionError, MismatchError


def begin_save(folder: Path, tensors: dict[str, torch.Tensor], group: Any) -> Future:
    """Copies tensors to the host and writes this rank's rows in a thread; all ranks call it.

    Args:
        folder: exists; empty.
        tensors: parameters and optimizer states by key.
        group: a process group with a CPU backend that nothing else uses.

    Returns:
        done when every rank's file is written and synced, or failed on any rank.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, async_save

    # DCP copies from a GPU, but takes CPU tensors as they are, and training goes on in them.
    copied = {
        key: tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach()
        for key, tensor in tensors.items()
    }
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    return async_save(copied, storage_writer=writer, process_group=group)


def read_into(path: Path, tensors: dict[str, torch.Tensor], *, group: Any = None) -> None:
    """Fills tensors (whole or cut) from the files in a folder; nothing is cast.

    Args:
        group: ranks that read together, each its rows; None: this process alone.

    Raises:
        MismatchError: a key is missing or unknown, or a shape or dtype differs.
        CorruptionError: a file can't be read.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    found = contents(path)
    for key in sorted(found.keys() | tensors.keys()):
        if key not in tensors or key not in found:
            state = "is missing" if key not in found else "is unknown to this drafter or optimizer"
            raise MismatchError(
                f"{key} {state}", where=path, do="Resume with the run's settings, or branch the run"
            )
        own = (tensors[key].dtype, tuple(tensors[key].shape))
        if own != found[key]:
            raise MismatchError(
                f"{key} is {found[key][0]} {list(found[key][1])} here, but {own[0]} {list(own[1])} "
                "in this run",
                where=path,
            )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked
            load(
                {key: tensor.detach() for key, tensor in tensors.items()},
                storage_reader=HuggingFaceStorageReader(str(path)),
                process_group=group,
                no_dist=group is None,
            )
    except (OSError, SafetensorError) as error:
        raise CorruptionError(f"the checkpoint can't be read ({error})", where=path) from None


def contents(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and whole shape of every tensor in a folder's files.

    Raises:
        CorruptionError: a file can't be read.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        metadata = HuggingFaceStorageReader(str(path)).read_metadata()
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CorruptionError(f"the checkpoint can't be read ({error})", where=path) from None
    return {
        key: (entry.properties.dtype, tuple(entry.size))
        for key, entry in metadata.state_dict_metadata.items()
    }


def read_whole(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whole, on the CPU."""
    tensors = {
        key: torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
        for key, (dtype, shape) in contents(path).items()
    }
    read_into(path, tensors)
    return tensors
