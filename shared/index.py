"""Which shard and row holds a sample: the store's index, made from the sidecars.

`index.bin` remembers the sample ids of each shard, so that a cache of 50 thousand shards opens
without reading as many sidecars. It can't be stale (a shard's id is a hash of its sample ids) and
may be deleted at any time.
S: samples of the cache.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shared.sample import ID_BYTES


class SampleIndex(Mapping[str, tuple[str, int]]):
    """sample id -> (shard id, row). Kept as sorted arrays: 24 bytes a sample.

    A sample in several shards is found in the one with the smallest id, so that every reader
    agrees.
    """

    def __init__(self, shards: Sequence[str], ids: Sequence[np.ndarray]) -> None:
        """Args:
        shards: shard ids, ascending.
        ids: for each shard its raw sample ids in row order, dtype V16.
        """
        self._shards = list(shards)
        counts = np.array([len(part) for part in ids], np.int64)
        raw = np.concatenate(ids) if len(ids) else np.empty(0, f"V{ID_BYTES}")
        # Fixed-width bytes compare like memory, pads included, which is all that searching needs.
        keys_S = np.ascontiguousarray(raw).view(f"S{ID_BYTES}")
        order = np.argsort(keys_S, kind="stable")
        keys_S = keys_S[order]
        first = np.ones(len(keys_S), bool)
        first[1:] = keys_S[1:] != keys_S[:-1]
        order, self._keys_S = order[first], keys_S[first]
        starts = np.concatenate([[0], np.cumsum(counts)])
        self._shard_S = (np.searchsorted(starts, order, side="right") - 1).astype(np.int32)
        self._row_S = (order - starts[self._shard_S]).astype(np.int32)

    def _find(self, key: object) -> int:
        if not isinstance(key, str) or len(key) != 2 * ID_BYTES:
            return -1
        try:
            raw = np.array(bytes.fromhex(key), f"S{ID_BYTES}")
        except ValueError:
            return -1
        place = int(np.searchsorted(self._keys_S, raw))
        found = place < len(self._keys_S) and self._keys_S[place] == raw
        return place if found else -1

    def __getitem__(self, key: str) -> tuple[str, int]:
        place = self._find(key)
        if place < 0:
            raise KeyError(key)
        return self._shards[self._shard_S[place]], int(self._row_S[place])

    def __contains__(self, key: object) -> bool:
        return self._find(key) >= 0

    def __len__(self) -> int:
        return len(self._keys_S)

    def __iter__(self) -> Iterator[str]:
        text = self._keys_S.view("u1").tobytes().hex()
        width = 2 * ID_BYTES
        return (text[i : i + width] for i in range(0, len(text), width))

    def shards_of(self, ids_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For raw ids (V16): (which are here [bool], their shard numbers; 0 where absent)."""
        wanted = np.ascontiguousarray(ids_V).view(f"S{ID_BYTES}")
        place = np.minimum(np.searchsorted(self._keys_S, wanted), max(len(self) - 1, 0))
        if not len(self):
            return np.zeros(len(wanted), bool), np.zeros(len(wanted), np.int32)
        return self._keys_S[place] == wanted, self._shard_S[place]

    @property
    def shard_ids(self) -> list[str]:
        return self._shards


_MAGIC = b"drafttape.index1"
_COUNTS = struct.Struct("<QQ")


def encode_index(known: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of `index.bin`: shard ids, samples of each, sample ids, sha256 of it all."""
    counts = np.array([len(ids) for ids in known.values()], "<u4")
    parts = [
        _MAGIC,
        _COUNTS.pack(len(known), int(counts.sum(dtype=np.int64))),
        bytes.fromhex("".join(known)),
        counts.tobytes(),
        *(ids.tobytes() for ids in known.values()),
    ]
    body = b"".join(parts)
    return body + hashlib.sha256(body).digest()


def decode_index(data: bytes) -> dict[str, np.ndarray] | None:
    """shard id -> raw sample ids (V16) in row order; None if a byte is not what was written."""
    head = len(_MAGIC) + _COUNTS.size
    if len(data) < head + 32 or not data.startswith(_MAGIC):
        return None
    if hashlib.sha256(memoryview(data)[:-32]).digest() != data[-32:]:
        return None
    shards, samples = _COUNTS.unpack_from(data, len(_MAGIC))
    if len(data) != head + shards * (ID_BYTES + 4) + samples * ID_BYTES + 32:
        return None
    text = data[head : head + shards * ID_BYTES].hex()
    counts = np.frombuffer(data, "<u4", shards, head + shards * ID_BYTES).tolist()
    ids = np.frombuffer(data, f"V{ID_BYTES}", samples, head + shards * (ID_BYTES + 4))
    known, start = {}, 0
    for number, count in enumerate(counts):
        known[text[32 * number : 32 * number + 32]] = ids[start : start + count]
        start += count
    return known
