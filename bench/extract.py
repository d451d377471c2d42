"""Extraction against the bare forward pass over the same batches, and padding waste.

`extract.vs_forward`: tokens/s of a whole extraction (taps, copy to bf16, finite check, lossless
codec, hashes, disk, commit) over tokens/s of the decoder alone, cut after the last tapped layer.
Both run the same batches, one after the other, in several rounds; the median of the rounds' ratios
counts. Torch has all cores but one, in both: a thread that writes must not take its time from the
forward pass, as on a GPU it doesn't. Time is wall time; `extract.vs_forward_cpu` is the same ratio
in CPU seconds of the process, which counts the writing thread in full.
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

ROUNDS, TOKENS, BATCH_TOKENS = 5, 1500, 1024


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
    computed = whole.computed_tokens(packed=False)
    tokens = sum(shard.num_tokens for shard in whole.shards)
    cfg = compose("extract", ExtractConfig, ["target=smollm2", "cache.root=x", "data.paths=[x]"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    target = load_target(cfg.target)
    spec, last = target.spec(), max(target.info.layer_ids)
    few, total = [], 0
    for name in sorted(samples):
        if total < TOKENS:
            few.append((name, len(samples[name])))
            total += few[-1][1]
    (shard,) = plan_job(few, spec.bytes_per_token, 1 << 31, BATCH_TOKENS).shards
    batches = [
        pad_batch([samples[name] for name in shard.ids[a:b]], 0)[0] for a, b in shard.batches
    ]
    written = 0

    def forward() -> None:
        layers = target.decoder.layers
        target.decoder.layers = torch.nn.ModuleList(target.layers[: last + 1])
        with torch.inference_mode():
            for ids_BT in batches:
                target.decoder(input_ids=ids_BT, use_cache=False)
        target.decoder.layers = layers

    def extraction() -> None:
        nonlocal written
        with tempfile.TemporaryDirectory() as folder:
            store = Store.create(Path(folder) / "cache", spec)
            result = Worker(store, target, "lossless", "zarr").run(shard, samples)
            written = store.shard(result.shard_id or "").stored_bytes

    rounds = []
    for index in range(ROUNDS + 1):
        pair = [(0, forward), (1, extraction)]
        times: list[tuple[float, float]] = [(0.0, 0.0)] * 2
        for place, work in pair if index % 2 else pair[::-1]:
            clock = _Clock()
            work()
            times[place] = clock.read()
        if index:  # the first round warms up
            rounds.append((*times[0], *times[1]))
    wall, cpu, full_wall, full_cpu = (
        statistics.median(column) for column in zip(*rounds, strict=True)
    )
    return {
        "extract.vs_forward": statistics.median(row[0] / row[2] for row in rounds),
        "extract.vs_forward_cpu": statistics.median(row[1] / row[3] for row in rounds),
        "extract.tokens_per_s": shard.num_tokens / full_wall,
        "extract.forward_tokens_per_s": shard.num_tokens / wall,
        "extract.cpu_s_per_1k_tokens": 1000 * full_cpu / shard.num_tokens,
        "extract.forward_cpu_s_per_1k_tokens": 1000 * cpu / shard.num_tokens,
        "extract.bytes_per_token": written / shard.num_tokens,
        "extract.padding_waste": 1 - tokens / computed,
    }


class _Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu
