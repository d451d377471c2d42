"""What a cache's index costs: bytes read beside the data, and opening a million samples."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from shared.sample import SnapshotRow
from shared.spec import CaptureSpec
from shared.store import Store


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
