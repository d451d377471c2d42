"""One cache holds one codec's loss; a copy in another codec has the same samples and snapshots."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shared.codec import get_codec
from shared.errors import ConfigError, MismatchError
from shared.sample import sample_id
from shared.shards import ShardInfo, damaged

if TYPE_CHECKING:
    from shared.store import Store


def recode(
    store: "Store", codec: str, root: str, progress: Callable[[int], object] = lambda count: None
) -> "Store":
    """Writes every shard of `store` in another codec into a new cache.

    Snapshots keep their ids, for those name tokens and masks, not bytes; so a run replays the same
    inputs from the copy. Goes on where an interrupted one ended. Memory is one sample.

    Args:
        progress: called with the stored bytes of each shard just encoded.

    Raises:
        ConfigError: there is no such codec, or `root` is the cache itself or lies in it.
        MismatchError: shards of `store` have lost bits already; losses are never laid on top of
            each other. Or a cache of another spec or loss is at `root`.
        CorruptionError: a shard is damaged.
    """
    from shared.store import Store

    get_codec(codec)
    infos = [store.shard(name) for name in store.shard_ids()]
    for info in infos:
        if get_codec(info.codec).lossy:
            raise MismatchError(
                f"shard {info.id} is stored as {info.codec}, which has lost bits already",
                where=store.root,
                do="Recode a lossless cache, or extract again",
            )
    here, there = place_of(store.root), place_of(root)
    if there == here or there.startswith(here + "/"):
        raise ConfigError(
            "the copy needs a place of its own", where=root, do="Name a new directory as NEW_ROOT"
        )
    copy = Store.create(root, store.spec)
    check_codec(copy, codec)
    for info in infos:
        _encode(store, info, codec, copy)
        progress(info.stored_bytes)
    for name in store.files.names("target"):
        if not copy.files.exists(f"target/{name}"):
            copy.files.write(f"target/{name}", store.files.read(f"target/{name}"))
    latest = store.resolve() if store.files.exists("snapshots/latest") else None
    # The latest one last: writing a snapshot points `latest` to it.
    for name in sorted(store.snapshot_ids(), key=lambda name: name == latest):
        snapshot = store.snapshot(name)
        copy.write_snapshot(snapshot.rows(), snapshot.meta)
    for label, name in store.names().items():
        copy.tag(label, name)
    return copy


def place_of(root: str) -> str:
    """A root as text that is equal for equal places; URLs are taken as they are."""
    return root.rstrip("/") if "://" in root else str(Path(root).resolve())


def check_codec(store: "Store", codec: str) -> None:
    """One cache, one loss: states are never stored in two codecs of which one drops bits.

    Raises:
        MismatchError: the cache's shards are in another codec.
    """
    names = store.shard_ids()
    for name in {*names[:8], *names[-8:]}:  # all are alike, for this was asked each time
        there = store.shard(name).codec
        if there == codec or not (get_codec(there).lossy or get_codec(codec).lossy):
            continue
        copy = f"drafttape cache recode {store.root} {codec} NEW_ROOT"
        raise MismatchError(
            f"the cache's states are stored as {there}, cache.codec={codec} is asked for; "
            "what is cached is not encoded again, and one cache holds one loss",
            where=store.root,
            do=f"Keep cache.codec={there}, or extract into a new cache"
            + ("" if get_codec(there).lossy else f" ({copy} makes one from this one)"),
        )


def _encode(store: "Store", info: ShardInfo, codec: str, copy: "Store") -> None:
    from shared.reader import open_shard

    reader = open_shard(store, info)
    tokens = [reader.tokens(row) for row in range(len(info.ids))]
    for row, ids_T in enumerate(tokens):
        if sample_id(ids_T.view(np.uint32)) != info.ids[row]:
            raise damaged(info, row, "the tokens are not those that the sample's id names")
    samples = list(zip(info.ids, tokens, strict=True))
    writer = copy.write_shard(samples, codec, info.container)
    if not copy.has_shard(writer.shard_id):
        with writer:
            for row, (name, ids_T) in enumerate(samples):
                hidden_TLD = np.empty((len(ids_T), info.num_states, info.hidden_size), np.uint16)
                reader.read_into(row, hidden_TLD)
                writer.append(name, hidden_TLD)
    reader.close()
