"""Storage: the same real hidden states in every layout; bytes, speed and files of each.

Speeds are MB of bf16 per CPU second (and per second of wall time), best of three, page cache
warm: ratios between layouts hold elsewhere, MB/s don't. `x raw` is against `pread` into a used
buffer in the same run. Lines are printed; the figures of `run` go to build/bench.json.
T: tokens of a sample; L: states; D: channels.
"""

import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.cache_index import amplification, million
from bench.layouts import KINDS, CkptGz, Int4, Int8, Layout, Ours, Raw, Samples, StockZarr
from shared.sample import sample_id
from shared.store import Store

WORK = Path("build/bench-storage")
WIDE = 8  # token segments laid side by side: width 8 x 576
MAX_TOKENS = 32_000
LENGTHS = (700, 300, 900, 500, 64, 1000, 450, 600)


def hidden_states(max_tokens: int = MAX_TOKENS) -> np.ndarray:
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
    """States of the demo's target over this repository's own text."""
    data, pieces = root.parent / "text.jsonl", []
    for path in sorted([*Path().glob("*.md"), *Path("docs").glob("*.md"), *Path().glob("*/*.py")]):
        text = path.read_text()
        pieces += [text[start : start + 3000] for start in range(0, len(text), 3000)]
    data.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": piece[:40], "completion": piece[40:]} for piece in pieces if piece[100:]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[: MAX_TOKENS // 700]))
    command = [
        sys.executable, "-m", "shared.cli", "extract", "target=smollm2", f"data.paths=[{data}]",
        f"cache.root={root}", "self_test=false",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return Store.open(root)


def samples_of(wide_NLD: np.ndarray) -> Samples:
    """(id, tokens [T], states [T, L, D]) cut from the rows."""
    rng, found, start = np.random.default_rng(0), [], 0
    while start < len(wide_NLD):
        hidden_TLD = wide_NLD[start : start + LENGTHS[len(found) % len(LENGTHS)]]
        ids_T = rng.integers(0, 49_000, len(hidden_TLD), dtype=np.int32)
        found.append((sample_id(ids_T), ids_T, np.ascontiguousarray(hidden_TLD)))
        start += len(hidden_TLD)
    return found


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


class Readers:
    """Two reader processes that are started once; a layout is sent to them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.tasks, self.done = [context.Queue() for _ in range(2)], context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(queue, self.done), daemon=True)
            for queue in self.tasks
        ]
        for process in self.processes:
            process.start()

    def wall(self, layout: Layout, order: list[int], num_bytes: int, count: int) -> float:
        """MB per second of wall time with `count` processes sharing the samples."""
        wall = float("inf")
        for number in range(3):
            begin = time.perf_counter()
            for worker in range(count):
                self.tasks[worker].put((layout if number == 0 else None, order[worker::count]))
            for _ in range(count):
                self.done.get()
            if number:  # the first pass opens files
                wall = min(wall, time.perf_counter() - begin)
        return num_bytes / 1e6 / wall

    def close(self) -> None:
        for queue in self.tasks:
            queue.put(None)
        for process in self.processes:
            process.join()


def _serve(tasks: Any, done: Any) -> None:
    import torch

    torch.set_num_threads(1)
    kept = None
    while (task := tasks.get()) is not None:
        layout, order = task
        kept = layout or kept
        _read_all(kept, order)
        done.put(True)


HEAD = (
    f"{'MB per CPU second or wall second':<36} {'bytes/':>8} {'files/':>7} | {'write':>6} "
    f"{'wall':>6} | {'random':>6} {'x raw':>5} {'wall':>6} {'seq.':>6} | {'1 w.':>6} "
    f"{'2 w.':>6}\n{'':<36} {'token':>8} {'M tok':>7}"
)


def measure(kind: type[Layout], samples: Samples, readers: Readers) -> dict[str, float]:
    """Writes and reads one layout; its row of the table."""
    folder = WORK / "layout"
    tokens = sum(len(ids_T) for _, ids_T, _ in samples)
    size = sum(hidden_TLD.nbytes for _, _, hidden_TLD in samples)
    plain = list(range(len(samples)))
    order = np.random.default_rng(1).permutation(len(samples)).tolist()

    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kind(folder, samples).write()

    slow = kind in (CkptGz, Int4)
    written = best(write, size, 1 if slow else 2)
    files = [path for path in folder.rglob("*") if path.is_file()]
    layout = kind(folder, samples)
    if not slow:
        _read_all(layout, order)  # warm
    random = best(lambda: _read_all(layout, order), size, 1 if slow else 3)
    ordered = random if slow else best(lambda: _read_all(layout, plain), size, 2)
    walls = [0.0 if slow else readers.wall(layout, order, size, count) for count in (1, 2)]
    row = {
        "bytes": sum(path.stat().st_size for path in files) / tokens,
        "files": len(files) / tokens * 1e6, "write": written[0], "write_wall": written[1],
        "read": random[0], "read_wall": random[1], "sequential": ordered[0],
        "wall_1": walls[0], "wall_2": walls[1],
    }  # fmt: skip
    if kind is Ours:
        row["amplification"] = amplification(folder, order, samples)
    return row


def run() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    WORK.mkdir(parents=True, exist_ok=True)
    samples = samples_of(hidden_states())
    _, states, width = samples[0][2].shape
    size = sum(hidden_TLD.nbytes for _, _, hidden_TLD in samples)
    tokens = sum(len(ids_T) for _, ids_T, _ in samples)
    print(f"{tokens} tokens x {states} states x {width} channels, {size / 1e6:.0f} MB of bf16")
    print(HEAD)
    table: dict[type[Layout], dict[str, float]] = {}
    with ExitStack() as stack:
        readers = Readers()
        stack.callback(readers.close)
        for kind in KINDS:
            row = table[kind] = measure(kind, samples, readers)
            print(
                f"{kind.name:<36} {row['bytes']:>8.0f} {row['files']:>7.0f} | {row['write']:>6.0f} "
                f"{row['write_wall']:>6.0f} | {row['read']:>6.0f} "
                f"{row['read'] / table[Raw]['read']:>5.2f} {row['read_wall']:>6.0f} "
                f"{row['sequential']:>6.0f} | {row['wall_1']:>6.0f} {row['wall_2']:>6.0f}",
                flush=True,
            )
    shutil.rmtree(WORK / "layout", ignore_errors=True)
    seconds, memory = million(WORK / "million")
    print(f"a million samples open in {seconds:.2f} s and {memory:.0f} MB")
    raw, lossless, int8 = table[Raw], table[Ours], table[Int8]
    return {
        "storage.lossless_bytes": lossless["bytes"] / raw["bytes"],
        "storage.lossless_read": lossless["read"] / raw["read"],
        "storage.int8_bytes": int8["bytes"] / raw["bytes"],
        "storage.int8_read": int8["read"] / raw["read"],
        "storage.write_vs_zarr": lossless["write"] / table[StockZarr]["write"],
        "storage.write_vs_ckptgz": lossless["write"] / table[CkptGz]["write"],
        "storage.read_amplification": lossless["amplification"],
        "storage.open_1m_s": seconds,
        "storage.open_1m_mb": memory,
        "storage.raw_mb_per_cpu_s": raw["read"],
    }
