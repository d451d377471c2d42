"""The order of an epoch: a pure function of snapshot, seed and epoch.

No worker count, rank count, container or position in a file takes part, so nothing of them can
change what an optimizer sees.
"""

from collections.abc import Sequence

import numpy as np

from shared.rng import random_words


def epoch_order(snapshot_id: str, seed: int, epoch: int, ids: Sequence[str]) -> np.ndarray:
    """The permutation of `range(len(ids))` in which an epoch visits the samples.

    The permutation acts on the sorted ids: listing the same samples in another order gives the same
    sequence of samples.

    Args:
        snapshot_id: names the data set.
        seed: the run's seed.
        epoch: 0-based; every epoch has its own order.
        ids: sample ids, each once.

    Returns:
        int64 [len(ids)], indices into `ids`.
    """
    by_id = np.argsort(np.asarray(ids, dtype=np.str_), kind="stable")
    keys = random_words(len(ids), "order", snapshot_id, seed, epoch)
    return by_id[np.argsort(keys, kind="stable")].astype(np.int64)
