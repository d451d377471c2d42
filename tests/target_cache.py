"""A small cache of a tiny random target's own text and states, which `eval` can decode with."""

import numpy as np
import torch

from shared.capture import capture
from shared.config import Dtype, TargetConfig, to_plain
from shared.sample import SnapshotRow, pack_mask, sample_id
from shared.store import Store
from shared.target import load_target
from stage2_train import decode

TARGET = TargetConfig(
    name="tiny", model="random://llama?seed=1", dtype=Dtype.float32, num_taps=2,
    mask_token="<|mask|>",
)  # fmt: skip


def target_cache(root, last_hidden=False):
    """Writes a cache of twelve samples, four of them held out, and returns it."""
    target = load_target(TARGET)
    rng, samples, rows = np.random.default_rng(0), [], []
    for index in range(12):
        prompt = [int(t) for t in rng.integers(0, 256, 5 + index % 4)]
        answer = decode.greedy(target.model, prompt, 14).tokens
        tokens = np.array(prompt + answer, dtype=np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        split = "heldout" if index < 4 else "train"
        samples.append((sample_id(tokens), tokens))
        rows.append(
            SnapshotRow(samples[-1][0], len(tokens), pack_mask(mask), split, f"x.jsonl:{index}")
        )
    spec = target.spec(last_hidden=last_hidden)
    store = Store.create(root, spec)
    with store.write_shard(samples, "lossless", "zarr") as writer:
        for name, tokens in samples:
            ids = torch.from_numpy(tokens).long()[None]
            hidden = capture(target, ids, [len(tokens)], spec.layer_ids, last_hidden)[0]
            writer.append(name, hidden.view(torch.int16).numpy().view(np.uint16))
    info = {
        "model": TARGET.model, "target": to_plain(TARGET), "mask_token_id": 259, "tied": True,
        "vocab_size": target.embed.weight.shape[0], "hidden_size": target.info.hidden_size,
        "eos_token_ids": [258], "layer_ids": list(spec.layer_ids),
    }  # fmt: skip
    store.write_target_assets(target.embed.weight, None, info)
    store.write_snapshot(rows, {"name": "tiny"})
    return store
