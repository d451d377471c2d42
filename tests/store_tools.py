"""What the store's tests share: small specs, samples with realistic states, filled stores."""

from pathlib import Path

import numpy as np

from shared.sample import SnapshotRow, pack_mask, sample_id
from shared.spec import CaptureSpec
from shared.store import Store

SPEC = CaptureSpec("w" * 32, "Toy", (0, 2, 5), 96, backend={"attention": "sdpa"})


def states(num_tokens: int, spec: CaptureSpec = SPEC, seed: int = 0) -> np.ndarray:
    """uint16 [T, L, D]: bf16 bits of values with a scale for each channel, as models have."""
    rng = np.random.default_rng(seed)
    scale_D = np.exp(1.5 * rng.standard_normal(spec.hidden_size))
    x_TLD = rng.standard_normal((num_tokens, spec.num_states, spec.hidden_size)) * scale_D
    return (x_TLD.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def samples(lengths: list[int], seed: int = 0) -> list[tuple[str, np.ndarray]]:
    """(id, tokens [T] int32) of random tokens."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 50_000, size, dtype=np.int32) for size in lengths]
    return [(sample_id(ids_T), ids_T) for ids_T in tokens]


def fill(
    root: Path, shards: list[list[int]], codec: str = "lossless", container: str = "zarr"
) -> tuple[Store, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A store with shards of samples of these lengths, and what was put in: id -> (ids, states)."""
    store = Store.create(root, SPEC)
    truth = {}
    for number, lengths in enumerate(shards):
        chosen = samples(lengths, seed=number)
        with store.write_shard(chosen, codec, container) as writer:
            for row, (name, ids_T) in enumerate(chosen):
                truth[name] = ids_T, states(len(ids_T), seed=1000 * number + row)
                writer.append(name, truth[name][1])
    return store, truth


def rows_of(truth: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[SnapshotRow]:
    """Snapshot rows that train on every second token, each third sample held out."""
    rows = []
    for number, (name, (ids_T, _)) in enumerate(truth.items()):
        mask_T = np.arange(len(ids_T)) % 2 == 1
        split = "heldout" if number % 3 == 2 else "train"
        rows.append(SnapshotRow(name, len(ids_T), pack_mask(mask_T), split, f"f.jsonl:{number}"))
    return rows
