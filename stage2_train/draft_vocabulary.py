"""A draft vocabulary: the drafter proposes only the tokens that the training data uses most.

Its head is then the target's rows of these ids: the largest product of a step and of a draft, 2 S D
FLOPs a slot instead of 2 V D. A label outside is *not covered*: it adds nothing to the loss but
stays in the denominator, which is known before any token is read, and it counts as wrong in every
accuracy and acceptance. Decoding maps back to full ids, so the output stays the target's own.

The ids are a pure function of snapshot, size and end tokens. They lie in every checkpoint as
`draft_ids`, int64, ascending: row r of the head is token `draft_ids[r]`.

Letters: V vocabulary, S draft vocabulary.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.errors import ConfigError, MismatchError

IDS = "draft_ids"


def count_labels(snapshot: Any, reader: Any, split: str, vocabulary: int) -> np.ndarray:
    """int64 [V]: how often each token is supervised in a split."""
    counts_V = np.zeros(vocabulary, np.int64)
    for index in np.asarray(snapshot.indices(split)).tolist():
        tokens = reader.read_tokens(snapshot.ids[index])[snapshot.mask(index)]
        counts_V += np.bincount(tokens, minlength=vocabulary)
    return counts_V


def choose(counts_V: np.ndarray, size: int, end_tokens: list[int]) -> np.ndarray:
    """int64 [S] ascending: the end tokens and the most frequent others, ties by id.

    Raises:
        ConfigError: the size doesn't fit.
    """
    ends = sorted(set(end_tokens))
    if not len(ends) < size < len(counts_V):
        raise ConfigError(
            f"{size} tokens: it must be more than the {len(ends)} end tokens, and less than the "
            f"vocabulary of {len(counts_V)}",
            where="drafter.draft_vocabulary", do="Set it to null for the whole vocabulary",
        )  # fmt: skip
    rank_V = counts_V.copy()
    rank_V[ends] = counts_V.max() + 1
    return np.sort(np.argsort(-rank_V, kind="stable")[:size]).astype(np.int64)


def draft_vocabulary(
    snapshot: Any, reader: Any, size: int, info: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The ids [S], and what run.json says of them: size, digest, coverage of each split.

    Coverage is the share of supervised tokens that are in it; None for a split without any.
    """
    counts = {
        split: count_labels(snapshot, reader, split, int(info["vocab_size"]))
        for split in ("train", "heldout")
    }
    ends = [int(token) for token in info.get("eos_token_ids") or []]
    ids_S = choose(counts["train"], size, ends)
    digest = hashlib.blake2b(ids_S.astype("<i8").tobytes(), digest_size=16).hexdigest()
    facts: dict[str, Any] = {"size": size, "digest": digest}
    for split, counts_V in counts.items():
        total = int(counts_V.sum())
        facts[f"{split}_coverage"] = int(counts_V[ids_S].sum()) / total if total else None
    return torch.from_numpy(ids_S), facts


def sentence(facts: dict[str, Any]) -> str:
    """The record's facts for a person."""
    shares = [
        f"{facts[key]:.2%} of the {name} labels"
        for key, name in (("train_coverage", "training"), ("heldout_coverage", "held-out"))
        if facts[key] is not None
    ]
    return f"draft vocabulary of {facts['size']:,} tokens covers {' and '.join(shares)}"


def rows_of(ids_S: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Head rows of labels (full ids), and whether each is covered; the row is 0 where not."""
    row = torch.searchsorted(ids_S, label.contiguous()).clamp_(max=len(ids_S) - 1)
    covered = ids_S[row] == label
    return row * covered, covered


def named_ids(drafter: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of it besides parameters: nothing without a draft vocabulary."""
    ids_S = getattr(drafter, IDS, None)
    return {} if ids_S is None else {IDS: ids_S}


def take_ids(
    drafter: torch.nn.Module, tensors: dict[str, torch.Tensor], where: Path
) -> dict[str, torch.Tensor]:
    """Gives a drafter that waits for its ids the ones of a checkpoint; returns the other tensors.

    Raises:
        MismatchError: the drafter has other ids, or the checkpoint has none.
    """
    mine_S = getattr(drafter, IDS, None)
    if mine_S is None:
        return tensors
    theirs_S = tensors.get(IDS)
    what = None
    if theirs_S is None:
        what = "there is none"
    elif theirs_S.shape != mine_S.shape:
        what = f"it has {len(theirs_S)} tokens there, {len(mine_S)} here"
    elif mine_S[0] >= 0 and not torch.equal(theirs_S, mine_S.cpu()):
        what = f"{int((theirs_S != mine_S.cpu()).sum())} of {len(mine_S)} ids differ"
    if theirs_S is None or what is not None:
        raise MismatchError(
            f"draft_ids, the draft vocabulary, is another one ({what})", where=where
        )
    mine_S.copy_(theirs_S)
    return {key: tensor for key, tensor in tensors.items() if key != IDS}
