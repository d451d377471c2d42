"""A small cache of random states, written through the Store as stage one does, and a tiny run."""

import numpy as np
import torch

from shared.sample import SnapshotRow, pack_mask, sample_id
from shared.spec import CaptureSpec
from shared.store import Store
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

VOCAB, WIDTH, STATES, MASK_TOKEN = 40, 16, 2, 39


def tiny_cache(root, count=14, heldout=3, seed=0, masked=True, poison=None, longest=24):
    """Writes a cache and returns it; `poison` is the index of a sample with a NaN state."""
    rng = np.random.default_rng(seed)
    spec = CaptureSpec(weights="00" * 16, architecture="Tiny", layer_ids=(0, 1), hidden_size=WIDTH)
    store = Store.create(root, spec)
    samples, rows, states = [], [], []
    for index in range(count):
        length = int(rng.integers(8, longest + 1))
        tokens = rng.integers(0, VOCAB - 1, length).astype(np.int32)
        hidden = rng.normal(size=(length, STATES, WIDTH)).astype(np.float32)
        if index == poison:
            hidden[length // 2, 0, 3] = np.nan
        mask = (np.arange(length) >= 3) & masked
        split = "train" if index >= heldout else "heldout"
        samples.append((sample_id(tokens), tokens))
        states.append((hidden.view(np.uint32) >> 16).astype(np.uint16))
        rows.append(
            SnapshotRow(samples[-1][0], length, pack_mask(mask), split, f"data.jsonl:{index + 1}")
        )
    for start in range(0, count, 5):
        part = samples[start : start + 5]
        with store.write_shard(part, "lossless", "zarr") as writer:
            for (name, _), hidden in zip(part, states[start : start + 5], strict=True):
                writer.append(name, hidden)
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(VOCAB, WIDTH, generator=generator).bfloat16()
    store.write_target_assets(
        embed,
        None,
        {
            "model": "tiny",
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "tied": True,
            "mask_token_id": MASK_TOKEN,
            "eos_token_ids": [0],
            "layer_ids": [0, 1],
        },
    )
    store.write_snapshot(rows, {"name": "tiny"})
    return store


def tiny_config(root, run_dir, *, steps=6, optimizer="adamw", **keys):
    """A run of seconds: two layers, blocks of 4, rows of 48 tokens, two rows a step.

    Keys are dotted with `__`, as in `trainer__keep=1`.
    """
    cfg = TrainConfig(
        run_dir=str(run_dir),
        cache=CacheInput(root=str(root)),
        drafter=DrafterConfig(
            layer_types=["linear_attention", "full_attention"],
            intermediate_size=24,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            block_size=4,
            chunk_size=8,
        ),
        optimizer=OptimizerConfig(name=OptimizerName(optimizer), lr=1e-2),
        batch=BatchConfig(tokens_per_row=48, rows_per_step=2, anchors_per_sample=6),
        loader=LoaderConfig(workers=0),
        trainer=TrainerConfig(steps=steps, checkpoint_every=0, tensorboard=False),
        device="cpu",
    )
    for key, value in keys.items():
        *path, last = key.split("__")
        node = cfg
        for part in path:
            node = getattr(node, part)
        setattr(node, last, value)
    return cfg
