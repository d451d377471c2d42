"""Which shard and row holds a sample: the store's index, made from the sidecars.

S: samples of the cache.
"""

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
