"""Small stand-ins for a snapshot and a reader. Free of torch: reader processes import this."""

import os
from types import SimpleNamespace

import numpy as np

from shared.errors import CorruptionError
from shared.sample import sample_id


def make_data(count=12, seed=0, shortest=3, longest=30, states=2, width=4, vocab=90, heldout=3):
    """(snapshot, samples): random documents; the mask leaves a few tokens at the start out."""
    rng = np.random.default_rng(seed)
    samples, masks = {}, {}
    while len(samples) < count:
        length = int(rng.integers(shortest, longest + 1))
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        bits = rng.normal(size=(length, states, width)).astype(np.float32).view(np.uint32) >> 16
        name = sample_id(tokens)
        samples[name] = (tokens, bits.astype(np.uint16))
        masks[name] = np.arange(length) >= min(3, length // 2)
    return make_snapshot(samples, masks, heldout), samples


def make_snapshot(samples, masks, heldout=0):
    """A snapshot's view of `samples`; the last `heldout` ids are held out."""
    ids = sorted(samples)
    split = ["train"] * (len(ids) - heldout) + ["heldout"] * heldout
    return SimpleNamespace(
        id="snapshot-of-a-test",
        ids=ids,
        split=split,
        num_tokens=np.array([len(samples[name][0]) for name in ids], dtype=np.int32),
        mask=lambda index: masks[ids[index]],
        indices=lambda name: np.flatnonzero(np.array(split) == name).astype(np.int64),
    )


class Reader:
    """Reads from memory; `broken` names a sample and what happens when it is read."""

    def __init__(self, samples, broken=None, kind="corrupt"):
        self.samples, self.broken, self.kind = samples, broken, kind

    def read(self, name, out=None):
        tokens, hidden = self.samples[name]
        if name == self.broken:
            if self.kind == "corrupt":
                raise CorruptionError("checksum differs", where=f"shard 7, sample {name}")
            if self.kind == "missing":
                raise FileNotFoundError("no such shard")
            if self.kind == "die":
                os._exit(9)
            if self.kind == "bug":
                raise ZeroDivisionError("a bug")
            if self.kind == "other":
                return (tokens + 1) % 7, hidden
            if self.kind == "short":
                return tokens[:-1], hidden[:-1]
        if out is None:
            return tokens, hidden
        out[:] = hidden
        return tokens, out
