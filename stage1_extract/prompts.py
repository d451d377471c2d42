"""Chats to samples: token ids, loss mask, id, split; what can't be used becomes a reject.

T: tokens of a sample.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from shared.errors import DataError
from shared.sample import SnapshotRow, pack_mask, sample_id
from stage1_extract.config import DataConfig, Thinking, TrainOn
from stage1_extract.masking import ChatTemplate, Rendered, drop_thinking
from stage1_extract.rows import BadRow, Reject, Row, data_sources, read_rows

_CHUNK = 256


@dataclass(frozen=True)
class Sample:
    """One sample: tokens int32 [T] and loss mask bool [T]."""

    id: str
    tokens_T: np.ndarray
    mask_T: np.ndarray
    split: str
    source: str
    name: str | None = None

    def row(self) -> SnapshotRow:
        return SnapshotRow(
            self.id, len(self.tokens_T), pack_mask(self.mask_T), self.split, self.source, self.name
        )


@dataclass
class Prepared:
    """All samples of the data files, each id once, and what was left out."""

    samples: list[Sample] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_duplicates: int = 0
    num_cut: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens_T) for sample in self.samples)

    @property
    def num_supervised(self) -> int:
        return sum(int(sample.mask_T.sum()) for sample in self.samples)

    def reasons(self) -> list[tuple[str, int]]:
        """(reason without its details, rows), most frequent first."""
        return reasons(self.rejects)


def reasons(rejects: list[Reject]) -> list[tuple[str, int]]:
    """(reason without its details in brackets, rows), most frequent first."""
    return Counter(reject.reason.partition(" (")[0] for reject in rejects).most_common()


def split_of(sample: str, heldout: float, seed: int) -> str:
    """ "train" or "heldout", by a hash of (seed, sample id): new data moves no old sample."""
    digest = hashlib.blake2b(f"drafttape.split.v1:{seed}:{sample}".encode(), digest_size=8)
    return "heldout" if int.from_bytes(digest.digest(), "big") < heldout * 2**64 else "train"


def prepare(
    cfg: DataConfig, tokenizer: Any, mask_token: int | None = None, vocab_size: int | None = None
) -> Prepared:
    """Reads, renders, tokenizes and masks the data files.

    Args:
        mask_token: id that stands for MASK in training; a sample that holds it is rejected.
        vocab_size: ids at or over it are rejected (pretokenized rows of another tokenizer).

    Raises:
        DataError: no file, or no usable sample in them.
    """
    check_data(cfg)
    prepared = Prepared(files=data_sources(cfg))
    seen: set[str] = set()
    for sample in _samples(cfg, tokenizer, prepared):
        if isinstance(sample, Reject):
            prepared.rejects.append(sample)
            continue
        reason = _unusable(sample, cfg, mask_token, vocab_size)
        if reason is not None:
            prepared.rejects.append(Reject(sample.source, reason, sample.name))
        elif sample.id in seen:
            prepared.num_duplicates += 1
        else:
            seen.add(sample.id)
            prepared.samples.append(sample)
    if not prepared.samples:
        first = f"; the first: {prepared.rejects[0].reason}" if prepared.rejects else ""
        raise DataError(
            f"no usable sample in {prepared.num_rows} rows{first}",
            where=", ".join(prepared.files),
            do="drafttape plan lists the reasons" if prepared.rejects else None,
        )
    return prepared


def check_data(cfg: DataConfig) -> None:
    """
    Raises:
        DataError: a number is out of its range.
    """
    if cfg.max_tokens < 2 or cfg.min_supervised < 1 or not 0 <= cfg.heldout < 1:
        raise DataError(
            "data.max_tokens must be at least 2, data.min_supervised at least 1, "
            "data.heldout in [0, 1)",
            where="data",
        )


def _samples(cfg: DataConfig, tokenizer: Any, prepared: Prepared) -> Iterator[Sample | Reject]:
    rows = read_rows(prepared.files, cfg.limit, cfg)
    template: ChatTemplate | None = None
    while chunk := list(islice(rows, _CHUNK)):
        prepared.num_rows += len(chunk)
        if template is None and any(
            isinstance(row, Row) and row.input_ids is None for row in chunk
        ):
            template = ChatTemplate(tokenizer, cfg.template)
        results: list[Any] = [_rendered(row, template, cfg) for row in chunk]
        texts = [item.text for item in results if isinstance(item, Rendered)]
        encodings = iter(encode(tokenizer, texts))
        for row, item in zip(chunk, results, strict=True):
            if isinstance(item, Reject):
                yield item
                continue
            assert isinstance(row, Row)
            if isinstance(item, Rendered):
                ids, offsets = next(encodings)
                mask = span_mask(offsets, item.spans)
            else:
                ids, mask = row.input_ids, np.asarray(row.loss_mask, bool)
            prepared.num_cut += len(ids) > cfg.max_tokens
            tokens_T = np.asarray(ids[: cfg.max_tokens], np.int64)
            if len(tokens_T) == 0 or int(tokens_T.max()) >= 1 << 31:
                yield Reject(row.source, "no tokens, or ids over 31 bits", row.name)
                continue
            name = sample_id(tokens_T)
            split = row.split or split_of(name, cfg.heldout, cfg.heldout_seed)
            mask_T = mask[: cfg.max_tokens]
            yield Sample(name, tokens_T.astype(np.int32), mask_T, split, row.source, row.name)


def _rendered(row: Row | Reject, template: ChatTemplate | None, cfg: DataConfig) -> Any:
    """The row's text and spans; the row itself when it is tokens already; or a Reject."""
    if isinstance(row, Reject) or row.input_ids is not None:
        return row
    assert template is not None
    last_only = cfg.train_on is TrainOn.last
    try:
        if row.turns is not None:
            raise BadRow("only user prompts in it, no answers; run drafttape generate first")
        if row.text is not None:
            return template.render_text(row.text, last_only=last_only)
        messages = row.messages or []
        if cfg.thinking is Thinking.drop:
            messages = drop_thinking(messages)
        return template.render(
            messages,
            row.tools,
            last_only=last_only,
            mask_thinking=cfg.thinking is Thinking.mask,
        )
    except BadRow as error:
        return Reject(row.source, str(error), row.name)


def encode(tokenizer: Any, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """(ids, character offsets) of each text, special tokens as they stand in it, none added."""
    if not texts:
        return []
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    encoded = backend.encode_batch(texts, add_special_tokens=False)
    return [(item.ids, item.offsets) for item in encoded]


def span_mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """[T] bool: tokens that lie wholly inside a span (one that straddles its start does not)."""
    table = np.asarray(offsets, np.int64).reshape(-1, 2)
    mask_T = np.zeros(len(table), bool)
    for start, end in spans:
        mask_T |= (table[:, 0] >= start) & (table[:, 1] <= end) & (table[:, 0] < end)
    return mask_T


def _unusable(
    sample: Sample, cfg: DataConfig, mask_token: int | None, vocab_size: int | None
) -> str | None:
    """Why a sample can't be used, or None."""
    supervised = int(sample.mask_T.sum())
    if supervised == len(sample.mask_T):
        return "every token is supervised, so there is no prompt to draft from"
    if supervised < cfg.min_supervised:
        return f"too few supervised tokens ({supervised} of {len(sample.mask_T)})"
    if vocab_size is not None and int(sample.tokens_T.max()) >= vocab_size:
        return f"a token id is not in the vocabulary ({int(sample.tokens_T.max())})"
    if mask_token is not None and bool((sample.tokens_T == mask_token).any()):
        return f"the mask token occurs in the text ({mask_token})"
    return None
