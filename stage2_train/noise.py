"""Where blocks start in a document: a pure function of seed, epoch and sample.

The only randomness of training besides order and initial weights. The slot a sample has in a row,
the rank that reads it and the number of workers don't take part.
"""

import numpy as np

from shared.rng import random_words

HELDOUT_EPOCH = -1


def candidates(mask: np.ndarray) -> np.ndarray:
    """Positions at which a block may start.

    An anchor is a token that the target itself wrote (position >= 1, supervised), as the verified
    token is in decoding, and its first slot has a supervised label.

    Args:
        mask: bool [T], supervised tokens.

    Returns:
        int64 [n], ascending.
    """
    mask = np.asarray(mask, dtype=bool)
    if len(mask) < 3:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(mask[1:-1] & mask[2:]).astype(np.int64) + 1


def anchors(
    seed: int, epoch: int, sample_id: str, mask: np.ndarray, max_anchors: int, block: int
) -> np.ndarray:
    """The anchors of one document in one epoch, drawn without replacement.

    Args:
        seed: the run's seed.
        epoch: 0-based; `HELDOUT_EPOCH` has fixed anchors that no seed changes, so that the same
            weights have the same held-out loss in every run.
        sample_id: names the document.
        mask: bool [T], supervised tokens.
        max_anchors: most anchors drawn.
        block: tokens of a block; another block size is another draw.

    Returns:
        int64 [n <= max_anchors], ascending positions in the document.
    """
    positions = candidates(mask)
    if len(positions) <= max_anchors:
        return positions
    if epoch == HELDOUT_EPOCH:
        seed = 0
    keys = random_words(len(positions), "anchors", seed, epoch, sample_id, block)
    chosen = np.argsort(keys, kind="stable")[:max_anchors]
    return positions[np.sort(chosen)]


def slot_counts(mask: np.ndarray, anchor_N: np.ndarray, block: int) -> np.ndarray:
    """How many anchors have a supervised label at each slot 1 … block-1.

    Args:
        mask: bool [T], supervised tokens of one document.
        anchor_N: int64 [N], positions in it.
        block: tokens of a block.

    Returns:
        int64 [block - 1]; exact, so that denominators don't depend on the order of a sum.
    """
    if not len(anchor_N):
        return np.zeros(block - 1, dtype=np.int64)
    padded = np.concatenate([np.asarray(mask, dtype=bool), np.zeros(block, dtype=bool)])
    return padded[anchor_N[:, None] + np.arange(1, block)].sum(axis=0, dtype=np.int64)
