"""Training from disk against memory, and cached against online trials (CPU).

`train.disk_vs_ram`: step time fed by the zarr cache (lossless, one worker) over that fed from
memory, same rows; per step the least of a few interleaved rounds.
`train.cached_vs_online_of_limit`: N trials online cost N (target + train), with a cache
extract + N train. Reported is the measured ratio over the one that these rates predict.
"""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from shared.config import to_plain
from shared.log import read_json_lines
from shared.sample import SnapshotRow, pack_mask, sample_id
from shared.spec import CaptureSpec
from shared.store import Store
from stage2_train.build import train_run
from stage2_train.config import (
    BatchConfig,
    CacheInput,
    DrafterConfig,
    LoaderConfig,
    OptimizerConfig,
    Source,
    TrainConfig,
    TrainerConfig,
)

DEMO = Path("build/demo/cache")
VOCABULARY, WIDTH, STATES = 49152, 576, 5


def run() -> dict[str, float]:
    """Figures of this file."""
    folder = Path(tempfile.mkdtemp(prefix="bench-train-", dir="build"))
    try:
        figures = disk_vs_ram(folder)
        if DEMO.exists():
            figures |= cached_vs_online(folder)
        return figures
    finally:
        shutil.rmtree(folder)


def config(root: Path, run_dir: Path, steps: int, **loader) -> TrainConfig:
    """The demo's drafter and batch."""
    return TrainConfig(
        run_dir=str(run_dir),
        cache=CacheInput(root=str(root)),
        drafter=DrafterConfig(),
        batch=BatchConfig(tokens_per_row=1024, anchors_per_sample=16),
        loader=LoaderConfig(**loader),
        trainer=TrainerConfig(steps=steps, checkpoint_every=0, tensorboard=False),
        device="cpu",
    )


def step_seconds(run_dir: Path) -> np.ndarray:
    """float64 [steps]: seconds of every update."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    totals = [line["seconds"] for line in lines if "loss" in line]
    return np.diff([0.0, *totals])


def disk_vs_ram(folder: Path, steps: int = 6, rounds: int = 3) -> dict[str, float]:
    """Step time from disk over that from memory, and the share of time spent waiting."""
    root = DEMO if DEMO.exists() else synthetic_cache(folder / "cache")
    arms = {"disk": {"workers": 1}, "ram": {"workers": 0, "ram": True}}
    best: dict[str, np.ndarray] = {}
    waits = []
    for round_ in range(rounds):
        for name in arms if round_ % 2 == 0 else reversed(arms):
            run_dir = folder / f"{name}{round_}"
            result = train_run(config(root, run_dir, steps, **arms[name]))
            seconds = step_seconds(run_dir)[2:]  # the first ones start workers and warm caches
            best[name] = np.minimum(best.get(name, seconds), seconds)
            if name == "disk":
                waits.append(result["data_wait"] / result["seconds"])
    return {
        "train.disk_vs_ram": float(best["disk"].sum() / best["ram"].sum()),
        "train.step_seconds": float(np.median(best["disk"])),
        "train.data_wait_share": float(min(waits)),
    }


def synthetic_cache(root: Path, documents: int = 120) -> Path:
    """A cache of the demo's shape with random states of varied channel scale."""
    rng = np.random.default_rng(0)
    spec = CaptureSpec("00" * 16, "Synthetic", tuple(range(STATES)), WIDTH)
    store = Store.create(root, spec)
    tokens = [
        rng.integers(0, VOCABULARY - 1, int(n)).astype(np.int32)
        for n in rng.integers(100, 400, documents)
    ]
    samples = [(sample_id(ids), ids) for ids in tokens]
    scale = np.exp(rng.normal(size=(STATES, WIDTH))).astype(np.float32)
    with store.write_shard(samples, "lossless", "zarr") as writer:
        for name, ids in samples:
            states = rng.standard_normal((len(ids), STATES, WIDTH), dtype=np.float32) * scale
            writer.append(name, (states.view(np.uint32) >> 16).astype(np.uint16))
    embed = torch.randn(VOCABULARY, WIDTH).mul_(0.02).bfloat16()
    info = {"vocab_size": VOCABULARY, "mask_token_id": VOCABULARY - 1, "eos_token_ids": [2]}
    store.write_target_assets(embed, None, info)
    masks = [pack_mask(np.arange(len(ids)) >= 20) for ids in tokens]
    store.write_snapshot(
        [
            SnapshotRow(name, len(ids), mask, "train", f"synthetic:{number}")
            for number, ((name, ids), mask) in enumerate(zip(samples, masks, strict=True))
        ],
        {},
    )
    return root


def cached_vs_online(folder: Path, trials: int = 8, steps: int = 2) -> dict[str, float]:
    """Trials of other learning rates, each over the same few rows; models are loaded untimed."""

    def trial(name: str, number: int, **loader) -> dict:
        cfg = config(DEMO, folder / f"{name}{number}", steps, **loader)
        cfg.optimizer = OptimizerConfig(lr=1e-4 * 2**number)
        if name == "online":
            cfg.source = Source.online
        return train_run(cfg)

    online = [trial("online", number) for number in range(trials)]
    cached = [trial("cached", number, workers=1) for number in range(trials)]
    memory = [trial("memory", number, ram=True, workers=0) for number in range(3)]
    extract = extraction_seconds(folder, steps)
    target = float(np.median([result["data_wait"] for result in online]))
    train = float(np.median([result["seconds"] for result in memory]))
    predicted = trials * (target + train) / (extract + trials * train)
    measured = sum(result["seconds"] for result in online) / (
        extract + sum(result["seconds"] for result in cached)
    )
    return {
        "train.cached_vs_online": measured,
        "train.cached_vs_online_limit": predicted,
        "train.cached_vs_online_of_limit": measured / predicted,
    }


def extraction_seconds(folder: Path, steps: int) -> float:
    """The target over the trials' documents once, written to a cache."""
    from stage2_train.build import open_source
    from stage2_train.online import open_online

    source = open_source(config(DEMO, folder / "plan", steps))
    rows = [row for step in range(steps) for row in source.plan.step(step)]
    names = dict.fromkeys(source.snapshot.ids[index] for row in rows for index in row.samples)
    feed = open_online(source.store, torch.device("cpu"), 1024)
    fresh = Store.create(folder / "fresh", source.store.spec)
    started = time.perf_counter()
    samples = [(name, feed.reader.read_tokens(name)) for name in names]
    states = feed.states([tokens for _, tokens in samples])
    with fresh.write_shard(samples, "lossless", "zarr") as writer:
        for (name, _), hidden in zip(samples, states, strict=True):
            writer.append(name, np.ascontiguousarray(hidden))
    return time.perf_counter() - started


if __name__ == "__main__":
    print(to_plain(run()))
