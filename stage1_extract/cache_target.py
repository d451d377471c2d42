"""The cache's states against the target's: compare a few, or capture lost ones again.

T: tokens of a sample; L: states; D: channels.
"""

import numpy as np

from shared.config import TargetConfig, typed
from shared.errors import CacheError, MismatchError
from shared.log import progress, say
from shared.rng import generator
from shared.shards import CHUNK_TOKENS
from shared.store import Store
from shared.target import Target, choose_device, describe_target, load_target
from stage1_extract.config import CacheWordConfig
from stage1_extract.plan import plan_job
from stage1_extract.worker import Worker

# bf16 keeps 8 bits: two ways to run the same model differ by a few roundings, not by more.
TOLERANCE = 0.02


def load(store: Store, device: str) -> Target:
    """The target that the cache was made with, loaded from what the cache says about it.

    Raises:
        CacheError: the cache doesn't say which model it was made with.
        MismatchError: the model that is there now is another one.
    """
    plain = store.target_assets().info.get("target")
    if not isinstance(plain, dict):
        raise CacheError("the cache doesn't name its target", where=store.root)
    cfg = typed(TargetConfig, plain)
    info, place = describe_target(cfg), choose_device(device)
    packed = store.spec.backend.get("batching") == "packed"
    spec = info.spec(place, last_hidden=store.spec.last_hidden, packed=packed)
    differences = store.spec.differences(spec)
    if differences:
        named = "; ".join(f"{key}: cache {old!r}, now {new!r}" for key, old, new in differences)
        raise MismatchError(f"the target is not the cache's ({named})", where=store.root)
    return load_target(cfg, place, info)


def recompute(store: Store, count: int, device: str) -> int:
    """Runs random samples through the target and prints the largest difference by state."""
    ids = list(store.committed())
    rng = generator("recompute", len(ids))
    chosen = [ids[i] for i in rng.permutation(len(ids))[:count]]
    worker = Worker(store, load(store, device), "lossless", "zarr")
    reader, worst = store.reader(), np.zeros(store.spec.num_states)
    for sample in progress_over(chosen, "recompute"):
        ids_T, stored_TLD = reader.read(sample)
        ((host_1TLD, _),) = worker.forward([ids_T])
        ours, theirs = as_float(stored_TLD), as_float(host_1TLD[0, : len(ids_T)])
        norm_TL = np.maximum(np.linalg.norm(theirs, axis=-1), 1e-20)
        error_TL = np.linalg.norm(ours - theirs, axis=-1) / norm_TL
        worst = np.maximum(worst, error_TL.max(0))
    for state, error in enumerate(worst):
        say(f"state {state}: largest relative difference of a token {error:.2g}")
    lossy = max((max(store.shard(s).layer_error, default=0) for s in store.shard_ids()), default=0)
    return 0 if worst.max() <= TOLERANCE + 10 * lossy else 1


def as_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def progress_over(items: list[str], what: str):
    """The items, with a bar."""
    with progress(len(items), what, "samples") as bar:
        for item in items:
            yield item
            bar.update(1)


def recapture(store: Store, lost: dict[str, np.ndarray], cfg: CacheWordConfig) -> None:
    """Captures samples again and commits them, in the codec and container of the other shards."""
    infos = [store.shard(name) for name in store.shard_ids()]
    codec = infos[0].codec if infos else cfg.codec.value
    container = infos[0].container if infos else cfg.container.value
    worker = Worker(store, load(store, cfg.device), codec, container)
    lengths = [(name, len(ids_T)) for name, ids_T in lost.items()]
    plan = plan_job(lengths, store.spec.bytes_per_token, 2 << 30, 64 * CHUNK_TOKENS)
    with progress(sum(size for _, size in lengths), "capture", "tokens") as bar:
        for shard in plan.shards:
            worker.run(shard, lost, bar.update)
