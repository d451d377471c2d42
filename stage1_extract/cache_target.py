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
from stage1_extract.checks import TOLERANCE
from stage1_extract.config import CacheWordConfig
from stage1_extract.import_target import TOLERANCE as IMPORTED
from stage1_extract.import_target import describes
from stage1_extract.plan import plan_job
from stage1_extract.worker import Worker


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
    spec = describes(store, info.spec(place, last_hidden=store.spec.last_hidden, packed=packed))
    differences = store.spec.differences(spec)
    if differences:
        named = "; ".join(f"{key}: cache {old!r}, now {new!r}" for key, old, new in differences)
        raise MismatchError(f"the target is not the cache's ({named})", where=store.root)
    return load_target(cfg, place, info)


def recompute(store: Store, count: int, device: str) -> int:
    """Runs random samples through the target again and prints how far the stored states are off.

    Returns:
        1 when the mean of a state's relative error over tokens is more than another run of the
        same model, and the codec, explain; else 0.
    """
    import torch

    ids = list(store.committed())
    rng = generator("recompute", len(ids))
    chosen = [ids[i] for i in rng.permutation(len(ids))[:count]]
    target = load(store, device)
    worker, reader = Worker(store, target, "lossless", "zarr"), store.reader()
    num_states = store.spec.num_states
    mean, worst, tokens = np.zeros(num_states), np.zeros(num_states), 0
    for sample in progress_over(chosen, "recompute"):
        ids_T, stored_TLD = reader.read(sample)
        (batch,) = worker.forward([ids_T])
        (ours_TLD,) = batch.samples([len(ids_T)])
        bits = (torch.from_numpy(part.view(np.int16).copy()) for part in (stored_TLD, ours_TLD))
        stored, ours = (part.view(torch.bfloat16).double() for part in bits)
        error_TL = (stored - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-12)
        mean += error_TL.sum(0).numpy()
        worst = np.maximum(worst, error_TL.max(0).values.numpy())
        tokens += len(ids_T)
        batch.release()
    mean /= tokens
    lossy = max((max(store.shard(s).layer_error, default=0) for s in store.shard_ids()), default=0)
    imported = "imported_from" in store.spec.backend
    run = IMPORTED if imported else TOLERANCE[target.info.cfg.dtype.value]
    limit, bad = run + 2 * lossy, False
    for state in range(num_states):
        taps = store.spec.layer_ids
        name = f"layer {taps[state]}" if state < len(taps) else "last hidden state"
        bad |= not mean[state] <= limit
        say(
            f"{'BAD ' if not mean[state] <= limit else ''}{name}: relative difference of a token "
            f"{mean[state]:.2g} on average, {worst[state]:.2g} at most"
        )
    say(f"{len(chosen)} samples, {tokens} tokens run again; {limit:.2g} on average is allowed")
    return int(bad)


def progress_over(items: list[str], what: str):
    """The items, with a bar."""
    with progress(len(items), what, "samples") as bar:
        for item in items:
            yield item
            bar.update(1)


def recapture(store: Store, lost: dict[str, np.ndarray], cfg: CacheWordConfig) -> None:
    """Captures samples again and commits them, in the codec and container of the other shards.

    States of another tool are not mixed with ours: its files are imported again instead.
    """
    if "imported_from" in store.spec.backend:
        say("run drafttape cache import with the same files: it writes only what is missing")
        return
    infos = [store.shard(name) for name in store.shard_ids()]
    codec = infos[0].codec if infos else cfg.codec.value
    container = infos[0].container if infos else cfg.container.value
    worker = Worker(store, load(store, cfg.device), codec, container)
    lengths = [(name, len(ids_T)) for name, ids_T in lost.items()]
    plan = plan_job(lengths, store.spec.bytes_per_token, 2 << 30, 64 * CHUNK_TOKENS)
    with progress(sum(size for _, size in lengths), "capture", "tokens") as bar:
        for shard in plan.shards:
            worker.run(shard, lost, bar.update)
