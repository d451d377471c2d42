"""Layouts of the storage benchmark: the same samples as ours and as other tools store them.

T: tokens of a sample; L: states; D: channels.
"""

import gzip
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from shared.spec import CaptureSpec
from shared.store import Store

Samples = list[tuple[str, np.ndarray, np.ndarray]]  # (id, tokens [T], states [T, L, D])


class Layout:
    """One way to store samples: `write` puts all of them into a folder, `read` gives one back."""

    name = ""

    def __init__(self, folder: Path, samples: Samples) -> None:
        self.folder, self.samples = folder, samples

    def write(self) -> None:
        raise NotImplementedError

    def read(self, index: int, out_TLD: np.ndarray) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        light = [(name, ids_T, hidden.shape) for name, ids_T, hidden in self.samples]
        return {"folder": self.folder, "samples": light}


class Raw(Layout):
    """One file and its offsets, read by pread: the limit, and DeepSpec's records."""

    name = "raw pread (DeepSpec's records)"
    _fd = -1

    def write(self) -> None:
        with (self.folder / "data").open("wb", buffering=0) as file:
            for _, _, hidden_TLD in self.samples:
                file.write(hidden_TLD.data.cast("B"))
            os.fsync(file.fileno())

    def read(self, index: int, out_TLD: np.ndarray) -> None:
        if self._fd < 0:
            self._fd = os.open(self.folder / "data", os.O_RDONLY)
            shapes = [getattr(hidden, "shape", hidden) for _, _, hidden in self.samples]
            self._starts = np.cumsum([0, *(2 * int(np.prod(shape)) for shape in shapes)]).tolist()
        os.preadv(self._fd, [out_TLD.data.cast("B")], self._starts[index])


class Ours(Layout):
    """drafttape's store."""

    name = "drafttape lossless, zarr"
    codec, container = "lossless", "zarr"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader = None

    def write(self) -> None:
        _, _, first = self.samples[0]
        spec = CaptureSpec("b" * 32, "Wide", tuple(range(first.shape[1])), first.shape[2])
        store = Store.create(self.folder / "cache", spec)
        names = [(name, ids_T) for name, ids_T, _ in self.samples]
        with store.write_shard(names, self.codec, self.container) as writer:
            for name, _, hidden_TLD in self.samples:
                writer.append(name, hidden_TLD)

    def read(self, index: int, out_TLD: np.ndarray) -> None:
        if getattr(self, "_reader", None) is None:
            self._reader = Store.open(self.folder / "cache").reader()
        self._reader.read(self.samples[index][0], out_TLD)


class Tar(Ours):
    name, container = "drafttape lossless, webdataset", "webdataset"


class Fast(Ours):
    name, codec = "drafttape fast, zarr", "fast"


class Int8(Ours):
    name, codec = "drafttape int8, zarr", "int8"


class Bits5(Ours):
    name, codec = "drafttape bits5, zarr", "bits5"


class Bits4(Ours):
    name, codec = "drafttape bits4, zarr", "bits4"


class Bits3(Ours):
    name, codec = "drafttape bits3, zarr", "bits3"


class Int4(Ours):
    name, codec = "drafttape int4, zarr", "int4"


class StockZarr(Layout):
    """zarr-python writing and reading the array of our lossless codec."""

    name = "zarr-python, same codec"
    _array = None

    def write(self) -> None:
        import zarr
        from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec

        rows = sum(len(hidden_TLD) for _, _, hidden_TLD in self.samples)
        size = -(-rows // 64) * 64
        _, states, width = self.samples[0][2].shape
        blosc = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=2, blocksize=1 << 22)
        array = zarr.create_array(
            str(self.folder / "stock.zarr"), shape=(size, states, width), dtype="uint16",
            chunks=(64, states, width), shards=(size, states, width), fill_value=65535,
            serializer=BytesCodec(), compressors=[blosc, Crc32cCodec()],
        )  # fmt: skip
        whole = np.full((size, states, width), 65535, np.uint16)
        start = 0
        for _, _, hidden_TLD in self.samples:
            whole[start : start + len(hidden_TLD)] = hidden_TLD
            start += len(hidden_TLD)
        array[:] = whole  # one write: appends would rewrite the shard each time

    def read(self, index: int, out_TLD: np.ndarray) -> None:
        import zarr

        if self._array is None:
            self._array = zarr.open_array(str(self.folder / "stock.zarr"), mode="r")
            lengths = [len(ids_T) for _, ids_T, _ in self.samples]
            self._starts = np.cumsum([0, *lengths]).tolist()
        out_TLD[:] = self._array[self._starts[index] : self._starts[index + 1]]


class Safetensors(Layout):
    name = "safetensors a sample (speculators)"

    def write(self) -> None:
        import torch
        from safetensors.torch import save_file

        for name, ids_T, hidden_TLD in self.samples:
            tensors = {"hidden_states": _bf16(hidden_TLD), "token_ids": torch.from_numpy(ids_T)}
            save_file(tensors, self.folder / f"{name}.safetensors")

    def read(self, index: int, out_TLD: np.ndarray) -> None:
        from safetensors.torch import load_file

        file = load_file(self.folder / f"{self.samples[index][0]}.safetensors")
        _copy(file["hidden_states"], out_TLD)


class Ckpt(Layout):
    name = ".ckpt a sample (SpecForge)"

    def write(self) -> None:
        import torch

        for name, ids_T, hidden_TLD in self.samples:
            data = {"hidden_state": _bf16(hidden_TLD), "input_ids": torch.from_numpy(ids_T)}
            torch.save(data, self.folder / f"{name}.ckpt")

    def read(self, index: int, out_TLD: np.ndarray) -> None:
        import torch

        file = torch.load(self.folder / f"{self.samples[index][0]}.ckpt", weights_only=True)
        _copy(file["hidden_state"], out_TLD)


class CkptGz(Layout):
    name = ".ckpt.gz a sample (SpecForge)"

    def write(self) -> None:
        import torch

        for name, ids_T, hidden_TLD in self.samples:
            buffer = io.BytesIO()
            torch.save(
                {"hidden_state": _bf16(hidden_TLD), "input_ids": torch.from_numpy(ids_T)}, buffer
            )
            with gzip.open(self.folder / f"{name}.ckpt.gz", "wb") as file:
                file.write(buffer.getvalue())

    def read(self, index: int, out_TLD: np.ndarray) -> None:
        import torch

        with gzip.open(self.folder / f"{self.samples[index][0]}.ckpt.gz", "rb") as file:
            data = torch.load(io.BytesIO(file.read()), weights_only=True)
        _copy(data["hidden_state"], out_TLD)


KINDS: list[type[Layout]] = [
    Raw, Ours, Tar, Fast, Int8, Bits5, Bits4, Bits3, Int4, StockZarr, Safetensors, Ckpt, CkptGz
]  # fmt: skip


def _bf16(hidden_TLD: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(hidden_TLD.view(np.int16)).view(torch.bfloat16)


def _copy(states_TLD: Any, out_TLD: np.ndarray) -> None:
    """What a mapped file costs shows only when its pages are read."""
    import torch

    out_TLD[:] = states_TLD.view(torch.int16).numpy().view(np.uint16)
