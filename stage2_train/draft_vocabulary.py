"""A draft vocabulary: the drafter proposes only the tokens that the training data uses most.

Its head is then the target's rows of these ids: the largest product of a step and of a draft, 2 S D
FLOPs a slot instead of 2 V D. A label outside is *not covered*: it adds nothing to the loss but
stays in the denominator, which is known before any token is read, and it counts as wrong in every
accuracy and acceptance. Decoding maps back to full ids, so the output stays the target's own.

Counted ids are a pure function of snapshot, size and end tokens; others come from a file. They lie
in every checkpoint as `draft_ids`, int64, ascending: row r of the head is token `draft_ids[r]`. The
first rank counts once a run and keeps the ids in `draft_vocabulary.json`, for later starts.

Letters: V vocabulary, S draft vocabulary.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.errors import ConfigError, CorruptionError, DrafttapeError, MismatchError
from shared.fs import seal_json, unseal_json, write_atomic
from stage2_train.config import DrafterConfig

IDS = "draft_ids"
FILE = "draft_vocabulary.json"


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


def read_ids(path: str | Path, vocabulary: int) -> np.ndarray:
    """int64 [S] ascending, from a file: a JSON list, or one id a line.

    Raises:
        ConfigError: it can't be read, or an id is none, outside the vocabulary, or there twice.
    """
    where = "drafter.draft_vocabulary_ids"
    try:
        text = Path(path).read_text()
        found = json.loads(text) if text.lstrip().startswith("[") else list(map(int, text.split()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read ({error})", where=where,
            do="Give a file with a JSON list of token ids, or one id a line",
        ) from None  # fmt: skip
    bad = [
        token
        for token in found
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary
    ]
    ids_S, counts = np.unique(np.array([] if bad else found, dtype=np.int64), return_counts=True)
    fault = None
    if bad:
        fault = f"{bad[0]!r} is no id of a vocabulary of {vocabulary}"
    elif (counts > 1).any():
        fault = f"{ids_S[counts > 1][0]} is there twice"
    elif not 0 < len(ids_S) < vocabulary:
        fault = f"it has {len(ids_S)} of {vocabulary} ids"
    if fault is not None:
        raise ConfigError(f"{fault} in {path}", where=where)
    return ids_S


def size_of(cfg: DrafterConfig, info: dict[str, Any]) -> int | None:
    """S, that of the file if there is one; None: all tokens are drafted.

    Raises:
        ConfigError: the file can't be used, or another size is asked for.
    """
    if cfg.draft_vocabulary_ids is None:
        return cfg.draft_vocabulary
    size = len(read_ids(cfg.draft_vocabulary_ids, int(info["vocab_size"])))
    if cfg.draft_vocabulary not in (None, size):
        raise ConfigError(
            f"{cfg.draft_vocabulary_ids} has {size} ids, {cfg.draft_vocabulary} are asked for",
            where="drafter.draft_vocabulary", do="Set it to null: the file decides",
        )  # fmt: skip
    return size


def digest_of(ids_S: np.ndarray) -> str:
    """What run.json knows the ids by."""
    return hashlib.blake2b(ids_S.astype("<i8").tobytes(), digest_size=16).hexdigest()


def draft_vocabulary(
    snapshot: Any, reader: Any, info: dict[str, Any], size: int, given_S: np.ndarray | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """The ids [S], and what run.json says of them: size, digest, coverage of each split.

    Coverage is the share of supervised tokens that are in it; None for a split without any.
    """
    counts = {
        split: count_labels(snapshot, reader, split, int(info["vocab_size"]))
        for split in ("train", "heldout")
    }
    ends = [int(token) for token in info.get("eos_token_ids") or []]
    ids_S = choose(counts["train"], size, ends) if given_S is None else given_S
    facts: dict[str, Any] = {"size": len(ids_S), "digest": digest_of(ids_S)}
    for split, counts_V in counts.items():
        total = int(counts_V.sum())
        facts[f"{split}_coverage"] = int(counts_V[ids_S].sum()) / total if total else None
    return ids_S, facts


def of_run(
    run_dir: Path, cfg: DrafterConfig, known: dict[str, Any] | None, snapshot: Any, reader: Any,
    info: dict[str, Any], ranks: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:  # fmt: skip
    """The ids [S] of a run and its record's facts, on every rank; only the first rank reads.

    Args:
        cfg: size, and the file of given ids.
        known: what run.json says of an earlier start; None: this is the first.

    Raises:
        ConfigError: see `choose` and `read_ids`. MismatchError: the run began with other ids.
        CacheError, CorruptionError: the labels can't be counted.
    """
    found: Any = None
    if ranks.is_main:
        try:
            found = _of_first_rank(run_dir, cfg, known, snapshot, reader, info)
        except DrafttapeError as error:
            found = error
    found = ranks.gather(found)[0]
    if isinstance(found, DrafttapeError):
        raise found  # the same one on every rank
    ids_S, facts = found
    return torch.from_numpy(ids_S), facts


def _of_first_rank(
    run_dir: Path, cfg: DrafterConfig, known: dict[str, Any] | None, snapshot: Any, reader: Any,
    info: dict[str, Any],
) -> tuple[np.ndarray, dict[str, Any]]:  # fmt: skip
    path, given_S = run_dir / FILE, None
    size = cfg.draft_vocabulary
    assert size is not None
    if cfg.draft_vocabulary_ids is not None:
        given_S = read_ids(cfg.draft_vocabulary_ids, int(info["vocab_size"]))
        if known is not None and digest_of(given_S) != known["digest"]:
            raise MismatchError(
                f"the run began with another draft vocabulary than that of "
                f"{cfg.draft_vocabulary_ids}",
                where=run_dir, do="Choose another run_dir, or give the run's own ids",
            )  # fmt: skip
    if known is not None:
        # A missing or damaged file is made again: the ids are a function of what is known.
        with contextlib.suppress(FileNotFoundError, CorruptionError):
            ids_S = np.array(unseal_json(path.read_bytes(), path)["ids"], dtype=np.int64)
            if digest_of(ids_S) == known["digest"]:
                return ids_S, known
    ids_S, facts = draft_vocabulary(snapshot, reader, info, size, given_S)
    write_atomic(path, seal_json({"ids": ids_S.tolist()}))
    return ids_S, facts


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
