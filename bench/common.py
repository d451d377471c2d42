"""Speed of a training step on the common work: block positions per CPU second, one thread.

A drafter of 19.4 M trainable parameters (4 GDN layers and one attention layer) in rows of 576
tokens with 40 blocks of 16, against the full vocabulary of 49,152. Texts and masks are those of
`../shared/data`'s 420 chats where they are there, else random ones of their lengths; states and
embedding are random, which costs the same. Blocks x 16 over CPU seconds, median of the updates.
"""

import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from shared.sample import SnapshotRow, pack_mask, sample_id
from shared.spec import CaptureSpec
from shared.store import Store
from stage2_train import trainer
from stage2_train.build import train_run
from stage2_train.config import (
    BatchConfig,
    CacheInput,
    DrafterConfig,
    LoaderConfig,
    OptimizerConfig,
    OptimizerName,
    TrainConfig,
    TrainerConfig,
)

TEXTS = Path(__file__).parents[2] / "shared/data/smollm2-answers-420-tokens.jsonl"
VOCABULARY, WIDTH, LAYERS = 49152, 576, (1, 8, 14, 20, 27)


def drafter(**keys) -> DrafterConfig:
    """The common work's drafter: 19.4 M trainable parameters."""
    sizes = {
        "intermediate_size": 1456,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 6,
    }
    return DrafterConfig(**(sizes | keys))


def texts(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens int32, mask bool) of the first training texts."""
    if TEXTS.exists():
        rows = [json.loads(line) for line in TEXTS.read_text().splitlines()]
        rows = [row for row in rows if row["split"] == "train"][:count]
        return [
            (np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], bool)) for row in rows
        ]
    rng = np.random.default_rng(0)
    lengths = rng.integers(133, 144, count)
    return [
        (rng.integers(0, VOCABULARY - 1, int(n)).astype(np.int32), np.arange(n) >= 43)
        for n in lengths
    ]


def cache(root: Path, count: int = 64) -> Path:
    """The texts with random states."""
    rng = np.random.default_rng(0)
    store = Store.create(root, CaptureSpec("00" * 16, "Synthetic", LAYERS, WIDTH))
    rows = [(sample_id(ids), ids, mask) for ids, mask in texts(count)]
    rows = list({name: (name, ids, mask) for name, ids, mask in rows}.values())
    with store.write_shard([(name, ids) for name, ids, _ in rows], "lossless", "zarr") as writer:
        for name, ids, _ in rows:
            states = rng.standard_normal((len(ids), len(LAYERS), WIDTH), dtype=np.float32)
            writer.append(name, (states.view(np.uint32) >> 16).astype(np.uint16))
    embed = torch.randn(VOCABULARY, WIDTH).mul_(0.02).bfloat16()
    info = {"vocab_size": VOCABULARY, "mask_token_id": VOCABULARY - 1, "eos_token_ids": [2]}
    store.write_target_assets(embed, None, info)
    store.write_snapshot(
        [
            SnapshotRow(name, len(ids), pack_mask(mask), "train", f"text:{number}")
            for number, (name, ids, mask) in enumerate(rows)
        ],
        {},
    )
    return root


def config(root: Path, run_dir: Path, optimizer: str, steps: int, **keys) -> TrainConfig:
    """A few updates of the common work."""
    return TrainConfig(
        run_dir=str(run_dir),
        cache=CacheInput(root=str(root)),
        drafter=drafter(**keys),
        optimizer=OptimizerConfig(name=OptimizerName(optimizer), lr=1e-3),
        batch=BatchConfig(tokens_per_row=576, anchors_per_sample=10),
        loader=LoaderConfig(workers=0),
        trainer=TrainerConfig(steps=steps, checkpoint_every=0, tensorboard=False),
        device="cpu",
    )


def positions(cfg: TrainConfig) -> float:
    """Block positions per CPU second, median of the updates, reading included."""
    times: list[tuple[float, float]] = []
    whole = trainer.update

    def timed(job, state, batches, metrics):
        started, blocks = time.process_time(), state.totals["blocks"]
        line = whole(job, state, batches, metrics)
        done = state.totals["blocks"] - blocks
        times.append((time.process_time() - started, done * job.plan.block))
        return line

    trainer.update = timed
    try:
        train_run(cfg)
    finally:
        trainer.update = whole
    return float(np.median([count / seconds for seconds, count in times[1:]]))


def run() -> dict[str, float]:
    """The figures of `build/bench.json`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-common-", dir="build"))
    try:
        root = cache(folder / "cache")
        return {
            f"train.positions_{name}": positions(config(root, folder / name, name, 6))
            for name in ("adamw", "muon")
        }
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder)


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value:.4g}")
