"""A sample: its id (a hash of its token ids), its loss mask as bits, its row in a snapshot.

T: tokens of a sample.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

ID_BYTES = 16
_PERSON = b"drafttape.sample.v1"


def sample_id(input_ids: Any) -> str:
    """The 32 hex digits that name a token sequence, whatever file it came from.

    Args:
        input_ids: T token ids in [0, 2**32), a list or an integer array.

    Raises:
        ValueError: an id is out of range, or the array isn't one-dimensional.
    """
    ids_T = np.asarray(input_ids)
    if ids_T.ndim != 1 or (ids_T.size and ids_T.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be a list of integers, got shape {ids_T.shape}")
    if ids_T.size and (int(ids_T.min()) < 0 or int(ids_T.max()) >= 1 << 32):
        raise ValueError("a token id is negative or over 32 bits")
    digest = hashlib.blake2b(_PERSON, digest_size=ID_BYTES)
    digest.update(ids_T.astype("<u4").tobytes())
    return digest.hexdigest()


def pack_mask(mask: Any) -> bytes:
    """A loss mask [T] of bools as ceil(T / 8) bytes, lowest bit first."""
    return np.packbits(np.asarray(mask, dtype=bool), bitorder="little").tobytes()


def unpack_mask(packed: bytes, num_tokens: int) -> np.ndarray:
    """The mask [T] of `pack_mask`.

    Raises:
        ValueError: the bytes are not those of a mask of `num_tokens`.
    """
    if len(packed) != (num_tokens + 7) // 8:
        raise ValueError(f"a mask of {num_tokens} tokens can't have {len(packed)} bytes")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    return bits[:num_tokens].astype(bool)


@dataclass(frozen=True)
class SnapshotRow:
    """One sample as a data set sees it.

    Args:
        id: `sample_id` of its tokens.
        num_tokens: T.
        mask: `pack_mask` of which tokens are trained on.
        split: "train" or "heldout".
        source: "file:line" that it came from.
        name: the line's own id, if it has one.
    """

    id: str
    num_tokens: int
    mask: bytes
    split: str
    source: str
    name: str | None = None
