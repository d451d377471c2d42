"""Extraction against the bare forward pass over the same batches, and padding waste.

`extract.vs_forward`: tokens/s of a whole extraction (taps, copy to bf16, finite check, lossless
codec, disk) over tokens/s of the decoder alone, cut after the last tapped layer. Both run the same
batches in turn, several rounds, on two threads of the CPU; medians are compared.
`extract.padding_waste`: share of computed tokens that are pads, on the lengths of the chats in
$DRAFTTAPE_DATA (default ../shared/data) when they are there, else on drawn lengths.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from shared.capture import pad_batch
from shared.config import compose
from shared.sample import sample_id
from shared.store import Store
from shared.target import load_target
from stage1_extract.config import ExtractConfig
from stage1_extract.plan import plan_job
from stage1_extract.worker import Worker

ROUNDS, SAMPLES, BATCH_TOKENS = 3, 48, 2048


def chats() -> list[np.ndarray]:
    """Token sequences of real chats, or drawn ones of similar lengths."""
    path = Path(os.environ.get("DRAFTTAPE_DATA", "../shared/data"))
    path = path / "smollm2-answers-420-tokens.jsonl"
    if path.exists():
        lines = path.read_text().splitlines()
        return [np.asarray(json.loads(line)["input_ids"], np.int32) for line in lines]
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.0, 0.4, 420).astype(int).clip(20, 2000)
    return [rng.integers(20, 40_000, length).astype(np.int32) for length in lengths]


def run() -> dict[str, float]:
    """The figures of this part."""
    samples = {sample_id(tokens): tokens for tokens in chats()}
    whole = plan_job([(n, len(t)) for n, t in samples.items()], 5760, 1 << 31, 8192)
    computed = sum(shard.computed_tokens for shard in whole.shards)
    tokens = sum(shard.num_tokens for shard in whole.shards)
    cfg = compose("extract", ExtractConfig, ["target=smollm2", "cache.root=x", "data.paths=[x]"])
    target = load_target(cfg.target)
    spec, last = target.spec(), max(target.info.layer_ids)
    few = [(name, len(samples[name])) for name in sorted(samples)[:SAMPLES]]
    (shard,) = plan_job(few, spec.bytes_per_token, 1 << 31, BATCH_TOKENS).shards
    batches = [
        pad_batch([samples[name] for name in shard.ids[a:b]], 0)[0] for a, b in shard.batches
    ]
    layers = target.decoder.layers
    bare, full = [], []
    for index in range(ROUNDS + 1):
        target.decoder.layers = torch.nn.ModuleList(target.layers[: last + 1])
        started = time.perf_counter()
        with torch.inference_mode():
            for ids_BT in batches:
                target.decoder(input_ids=ids_BT, use_cache=False)
        seconds = time.perf_counter() - started
        target.decoder.layers = layers
        with tempfile.TemporaryDirectory() as folder:
            store = Store.create(Path(folder) / "cache", spec)
            result = Worker(store, target, "lossless", "zarr").run(shard, samples)
            written = store.shard(result.shard_id or "").stored_bytes
        if index:  # the first round warms up
            bare.append(shard.num_tokens / seconds)
            full.append(shard.num_tokens / result.seconds)
    return {
        "extract.vs_forward": statistics.median(full) / statistics.median(bare),
        "extract.tokens_per_s": statistics.median(full),
        "extract.forward_tokens_per_s": statistics.median(bare),
        "extract.bytes_per_token": written / shard.num_tokens,
        "extract.padding_waste": 1 - tokens / computed,
    }
