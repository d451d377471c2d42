"""Random numbers as pure functions of names: nothing global, nothing to save on a checkpoint."""

import hashlib

import numpy as np


def generator(*keys: object) -> np.random.Generator:
    """A counter-based generator (Philox) keyed by names; the same names give the same stream.

    Args:
        keys: text, bytes, integers; `("a", 1)` and `("a1",)` are different keys.
    """
    return np.random.Generator(_philox(keys))


def random_words(count: int, *keys: object) -> np.ndarray:
    """`count` uint64 words of the stream named by `keys`.

    numpy promises bit generators to stay as they are over its versions, and `Generator`'s methods
    not: whatever must be the same tomorrow (order, anchors) is derived from these words.
    """
    return _philox(keys).random_raw(count)


def _philox(keys: tuple[object, ...]) -> np.random.Philox:
    hasher = hashlib.blake2b(b"drafttape.rng.v1", digest_size=16)
    for key in keys:
        data = key if isinstance(key, bytes) else str(key).encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    words = np.frombuffer(hasher.digest(), dtype="<u8")
    return np.random.Philox(key=words)
