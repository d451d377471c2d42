"""Storage: the same real hidden states in every layout; bytes, speed and files of each.

Speeds are MB of bf16 per CPU second (and per second of wall time), best of three, page cache
warm: ratios between layouts hold elsewhere, MB/s don't. `x raw` is against `pread` into a used
buffer in the same run. Lines are printed; the figures of `run` go to build/bench.json.
T: tokens of a sample; L: states; D: channels.
"""

import gzip
import hashlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shared.sample import SnapshotRow, pack_mask, sample_id
from shared.spec import CaptureSpec
from shared.store import Store

WORK = Path("build/bench-storage")
WIDE = 8  # token segments laid side by side: width 8 x 576
LENGTHS = (700, 300, 900, 500, 64, 1000, 450, 600)


def hidden_states(max_tokens: int = 40_000) -> np.ndarray:
    """[n, L, WIDE * D] uint16: states of a real model over real text, made wide.

    From the demo's cache when it is there, else captured now (about two minutes on two cores).
    """
    for root in (Path("build/demo/cache"), WORK / "real"):
        if (root / "snapshots" / "latest").exists():
            store = Store.open(root)
            break
    else:
        store = _extract(WORK / "real")
    reader, parts, count = store.reader(), [], 0
    for name in store.snapshot().ids:
        parts.append(reader.read(name)[1])
        count += len(parts[-1])
        if count >= max_tokens:
            break
    rows_NLD = np.concatenate(parts)
    size = len(rows_NLD) // WIDE
    return np.concatenate([rows_NLD[i * size : (i + 1) * size] for i in range(WIDE)], axis=-1)


def _extract(root: Path) -> Store:
    command = [
        sys.executable, "-m", "shared.cli", "extract", "target=smollm2",
        "data.paths=[examples/prompts.jsonl]", f"cache.root={root}", "data.train_on=all",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return Store.open(root)


def samples_of(wide_NLD: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(id, tokens [T], states [T, L, D]) cut from the rows."""
    rng, found, start = np.random.default_rng(0), [], 0
    while start < len(wide_NLD):
        hidden_TLD = wide_NLD[start : start + LENGTHS[len(found) % len(LENGTHS)]]
        ids_T = rng.integers(0, 49_000, len(hidden_TLD), dtype=np.int32)
        found.append((sample_id(ids_T), ids_T, np.ascontiguousarray(hidden_TLD)))
        start += len(hidden_TLD)
    return found


class Layout:
    """One way to store samples: `write` puts all of them into a folder, `read` gives one back."""

    name = ""

    def __init__(self, folder: Path, samples: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
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
        blosc = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=2, blocksize=1 << 20)
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

        load_file(self.folder / f"{self.samples[index][0]}.safetensors")["hidden_states"]


class Ckpt(Layout):
    name = ".ckpt a sample (SpecForge)"

    def write(self) -> None:
        import torch

        for name, ids_T, hidden_TLD in self.samples:
            data = {"hidden_state": _bf16(hidden_TLD), "input_ids": torch.from_numpy(ids_T)}
            torch.save(data, self.folder / f"{name}.ckpt")

    def read(self, index: int, out_TLD: np.ndarray) -> None:
        import torch

        torch.load(self.folder / f"{self.samples[index][0]}.ckpt", weights_only=True)


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
            torch.load(io.BytesIO(file.read()), weights_only=True)


KINDS: list[type[Layout]] = [
    Raw, Ours, Tar, Fast, Int8, Bits5, Bits4, Bits3, Int4, StockZarr, Safetensors, Ckpt, CkptGz
]  # fmt: skip


def _bf16(hidden_TLD: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(hidden_TLD.view(np.int16)).view(torch.bfloat16)


def best(action: Callable[[], None], num_bytes: int, repeats: int) -> tuple[float, float]:
    """(MB per CPU second, MB per second of wall time), each the best of the repeats."""
    cpu = wall = float("inf")
    for _ in range(repeats):
        start, begin = time.process_time(), time.perf_counter()
        action()
        cpu = min(cpu, time.process_time() - start)
        wall = min(wall, time.perf_counter() - begin)
    return num_bytes / 1e6 / max(cpu, 1e-9), num_bytes / 1e6 / wall


def _read_all(layout: Layout, order: list[int]) -> None:
    shapes = [getattr(hidden, "shape", hidden) for _, _, hidden in layout.samples]
    buffer = _BUFFERS.setdefault("out", np.ones(max(int(np.prod(s)) for s in shapes), np.uint16))
    for index in order:
        out = buffer[: int(np.prod(shapes[index]))].reshape(shapes[index])
        layout.read(index, out)


_BUFFERS: dict[str, np.ndarray] = {}


def _serve(layout: Layout, orders: Any, done: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while (order := orders.get()) is not None:
        _read_all(layout, order)
        done.put(True)


def workers_wall(layout: Layout, order: list[int], num_bytes: int, count: int) -> float:
    """MB per second of wall time with `count` reader processes sharing the samples."""
    context = multiprocessing.get_context("spawn")
    orders, done = [context.Queue() for _ in range(count)], context.Queue()
    processes = [
        context.Process(target=_serve, args=(layout, queue, done), daemon=True) for queue in orders
    ]
    for process in processes:
        process.start()
    wall = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for number, queue in enumerate(orders):
            queue.put(order[number::count])
        for _ in processes:
            done.get()
        wall = min(wall, time.perf_counter() - begin)
    for queue in orders:
        queue.put(None)
    for process in processes:
        process.join()
    return num_bytes / 1e6 / wall


def amplification(folder: Path, order: list[int], samples: list[Any]) -> float:
    """Bytes read for whole samples at random, index and tokens included, over bytes stored."""
    from shared.fs import Blob

    store, read = Store.open(folder / "cache"), [0]
    plain = Blob.read_into

    def counted(self: Blob, buffer: Any, offset: int) -> int:
        count = plain(self, buffer, offset)
        read[0] += count
        return count

    Blob.read_into = counted  # type: ignore[method-assign]
    try:
        reader = store.reader()
        for index in order:
            reader.read(samples[index][0])
    finally:
        Blob.read_into = plain  # type: ignore[method-assign]
    (shard,) = store.shard_ids()
    return read[0] / store.shard(shard).files["/hidden/c/0/0/0"][0]


def million(root: Path, shards: int = 20_000, samples: int = 50) -> tuple[float, float]:
    """(seconds, MB of memory) to open a cache of a million samples and its snapshot.

    Indexes only: sidecars, index.bin and the snapshot's table, no hidden states.
    """
    from shared.fs import seal_json
    from shared.shards import ShardInfo, shard_id
    from shared.snapshot import build_snapshot

    spec = CaptureSpec("m" * 32, "Million", (0, 1, 2, 3, 4), 5120)
    if not (root / "snapshots" / "latest").exists():
        shutil.rmtree(root, ignore_errors=True)
        store = Store.create(root, spec)
        (root / "shards").mkdir()
        rng, rows, places = np.random.default_rng(0), [], []
        for _ in range(shards):
            names = [rng.bytes(16).hex() for _ in range(samples)]
            lengths = rng.integers(200, 4000, samples).astype(np.int32)
            name = shard_id(spec.digest, "lossless", names)
            info = ShardInfo(
                name, spec.digest, "zarr", "lossless", 5, 5120, tuple(names), lengths,
                files={"/hidden/c/0/0/0": (1, "0" * 64)},
            )  # fmt: skip
            (root / "shards" / f"{name}.json").write_bytes(seal_json(info.to_json()))
            for sample, length in zip(names, lengths.tolist(), strict=True):
                mask = b"\x00" * (length // 16) + b"\xff" * ((length + 7) // 8 - length // 16)
                rows.append(SnapshotRow(sample, length, mask, "train", f"chats.jsonl:{len(rows)}"))
                places.append(name)
        snapshot = build_snapshot(spec.digest, rows, places, {})
        document = {
            "format": 1, "snapshot": snapshot.id, "spec": spec.digest,
            "num_samples": len(snapshot), "num_tokens": 0, "num_supervised": 0,
            "table": {
                "bytes": len(snapshot.data), "sha256": hashlib.sha256(snapshot.data).hexdigest()
            },
            "meta": {},
        }  # fmt: skip
        store.files.write(f"snapshots/{snapshot.id}.parquet", snapshot.data)
        store.files.write(f"snapshots/{snapshot.id}.json", seal_json(document))
        store.committed()  # writes index.bin
        store.files.write("snapshots/latest", seal_json({"snapshot": snapshot.id}))
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(root)], check=True, capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    return result["seconds"], result["mb"]


_OPEN = """
import json, sys, time
from shared.store import Store
begin = time.perf_counter()
store = Store.open(sys.argv[1])
snapshot = store.snapshot()
index = store.committed()
assert len(index) == len(snapshot.ids) == len(snapshot.num_tokens) == 1_000_000
assert snapshot.ids[123456] in index
snapshot.mask(999_999)
seconds = time.perf_counter() - begin
# Not ru_maxrss: a child starts with its parent's, whatever it uses itself.
status = open("/proc/self/status").read()
mb = int(status.split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps({"seconds": seconds, "mb": mb}))
"""


def run() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    mask = pack_mask([True])  # imports done before timing
    assert mask
    WORK.mkdir(parents=True, exist_ok=True)
    samples = samples_of(hidden_states())
    tokens = sum(len(ids_T) for _, ids_T, _ in samples)
    size = sum(hidden_TLD.nbytes for _, _, hidden_TLD in samples)
    order = np.random.default_rng(1).permutation(len(samples)).tolist()
    _, states, width = samples[0][2].shape
    print(f"{tokens} tokens x {states} states x {width} channels, {size / 1e6:.0f} MB of bf16")
    print(
        f"{'MB per CPU second or wall second':<36} {'bytes/':>8} {'files/':>7} | {'write':>6} "
        f"{'wall':>6} | {'random':>6} {'x raw':>5} {'wall':>6} {'seq.':>6} | {'1 w.':>6} "
        f"{'2 w.':>6}\n{'':<36} {'token':>8} {'M tok':>7}"
    )
    table: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        folder = WORK / "layout"

        def write(folder: Path = folder, kind: type[Layout] = kind) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            kind(folder, samples).write()

        slow = kind in (CkptGz, Int4)
        written = best(write, size, 1 if slow else 2)
        files = [path for path in folder.rglob("*") if path.is_file()]
        layout = kind(folder, samples)
        _read_all(layout, order)  # warm
        random = best(lambda: _read_all(layout, order), size, 1 if slow else 3)  # noqa: B023
        plain = list(range(len(samples)))
        ordered = best(lambda: _read_all(layout, plain), size, 1 if slow else 2)  # noqa: B023
        parallel = [0.0, 0.0]
        if not slow:
            parallel = [workers_wall(layout, order, size, count) for count in (1, 2)]
        row = {
            "bytes": sum(path.stat().st_size for path in files) / tokens,
            "files": len(files) / tokens * 1e6, "write": written[0], "write_wall": written[1],
            "read": random[0], "read_wall": random[1], "sequential": ordered[0],
        }  # fmt: skip
        table[kind.name] = row
        raw = table[Raw.name]["read"]
        print(
            f"{kind.name:<36} {row['bytes']:>8.0f} {row['files']:>7.0f} | {row['write']:>6.0f} "
            f"{row['write_wall']:>6.0f} | {row['read']:>6.0f} {row['read'] / raw:>5.2f} "
            f"{row['read_wall']:>6.0f} {row['sequential']:>6.0f} | {parallel[0]:>6.0f} "
            f"{parallel[1]:>6.0f}",
            flush=True,
        )
        if kind.name == "drafttape lossless, zarr":
            read_amplification = amplification(folder, order, samples)
    shutil.rmtree(WORK / "layout", ignore_errors=True)
    seconds, memory = million(WORK / "million")
    print(f"a million samples open in {seconds:.2f} s and {memory:.0f} MB")
    lossless, int8 = table["drafttape lossless, zarr"], table["drafttape int8, zarr"]
    raw = table[Raw.name]
    return {
        "storage.lossless_bytes": lossless["bytes"] / raw["bytes"],
        "storage.lossless_read": lossless["read"] / raw["read"],
        "storage.int8_bytes": int8["bytes"] / raw["bytes"],
        "storage.int8_read": int8["read"] / raw["read"],
        "storage.write_vs_zarr": lossless["write"] / table[StockZarr.name]["write"],
        "storage.write_vs_ckptgz": lossless["write"] / table[CkptGz.name]["write"],
        "storage.read_amplification": read_amplification,
        "storage.open_1m_s": seconds,
        "storage.open_1m_mb": memory,
        "storage.raw_mb_per_cpu_s": raw["read"],
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
