"""Which documents every optimizer step sees: a pure plan, known before anything is read.

The data's path, in numbered steps (each a pure function of snapshot, seed and batch settings):

1. Documents longer than a row are refused, or cut into windows (`long_documents`).
2. `shared.order.epoch_order` permutes the training split of an epoch.
3. Whole documents are packed in that order into rows of at most `tokens_per_row` tokens.
4. Rows of all epochs follow each other; step k takes the next `rows_per_step` of them.
   With a number of epochs the last step takes what is left: every epoch is the snapshot once.
5. Rank r of W computes rows r, r+W, … of a step; the step's denominator counts all of them.
6. `noise.anchors` draws block starts in every document.
"""

import bisect
import hashlib
import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.config import to_plain
from shared.errors import ConfigError, DataError
from shared.order import epoch_order
from stage2_train import noise
from stage2_train.config import BatchConfig, LongDocuments, Packing

OPEN_ROWS = 32  # rows that balanced packing keeps open; more only mixes an epoch's order further


@dataclass(frozen=True)
class Piece:
    """A whole document, or a window of a long one.

    Attributes:
        sample: index into the snapshot.
        start, stop: its tokens in the document.
        first, last: anchors a with first <= a < last are trained in this piece; those before have
            been in the window before, and are context here.
    """

    sample: int
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Row:
    """A packed row before it is read.

    Attributes:
        number: 0-based over the whole run.
        epoch: the pass over the data that it belongs to.
        pieces: documents and windows, in packing order.
    """

    number: int
    epoch: int
    pieces: tuple[Piece, ...]

    @property
    def samples(self) -> tuple[int, ...]:
        """Indices into the snapshot, one a piece."""
        return tuple(piece.sample for piece in self.pieces)


class StepPlan:
    """Rows, steps and denominators of a run.

    Args:
        snapshot: the data set's view.
        batch: packing and step size.
        seed: order and anchors.
        block: tokens of a block.
        split: which split is replayed.

    Raises:
        ConfigError: impossible batch settings.
        DataError: the split is empty, nothing in it can be trained on, or a document is longer
            than a row.
    """

    def __init__(
        self, snapshot: Any, batch: BatchConfig, *, seed: int, block: int, split: str = "train"
    ) -> None:
        _check(batch)
        self.snapshot, self.batch, self.seed, self.block = snapshot, batch, seed, block
        indices = np.asarray(snapshot.indices(split), dtype=np.int64)
        if not len(indices):
            raise DataError(
                f"no sample in the {split} split",
                where=f"snapshot {snapshot.id}",
                do="Extract data into the cache, or choose another snapshot with cache.snapshot",
            )
        if not any(len(noise.candidates(snapshot.mask(int(index)))) for index in indices):
            raise DataError(
                f"none of the {len(indices)} documents of the {split} split has a supervised "
                "token to predict",
                where=f"snapshot {snapshot.id}",
                do="Check the loss mask of the data (drafttape cache ls)",
            )
        self.pieces = _pieces(snapshot, indices, batch, block)
        self._names = [self.name(piece) for piece in self.pieces]
        self._tokens = np.array([piece.stop - piece.start for piece in self.pieces])
        self._most_anchors = self._count_anchors() if batch.anchors_per_row else None
        self._rows: dict[int, list[np.ndarray]] = {}
        self._first_row = [0]  # of epoch e; grows as epochs are planned
        self._recent: OrderedDict[int, list[np.ndarray]] = OrderedDict()

    @property
    def key(self) -> dict[str, Any]:
        """What the steps are a function of, besides the snapshot."""
        return {"seed": self.seed, "block": self.block, **to_plain(self.batch)}

    def name(self, piece: Piece) -> str:
        """The sample's id; of a window also its bounds."""
        name: str = self.snapshot.ids[piece.sample]
        whole = piece.stop - piece.start == self.snapshot.num_tokens[piece.sample]
        return name if whole else f"{name}[{piece.start}:{piece.stop}]"

    def mask(self, piece: Piece) -> np.ndarray:
        """bool: supervised tokens of a piece."""
        mask: np.ndarray = self.snapshot.mask(piece.sample)[piece.start : piece.stop]
        return mask

    def start_digest(self) -> bytes:
        """Digest 0 of the chain."""
        text = json.dumps({"snapshot": self.snapshot.id, **self.key}, sort_keys=True)
        return hashlib.blake2b(b"drafttape.steps.v1" + text.encode(), digest_size=16).digest()

    def epoch_rows(self, epoch: int) -> list[np.ndarray]:
        """The packed rows of one epoch, as indices of pieces: every piece exactly once."""
        if epoch not in self._rows:
            order = epoch_order(self.snapshot.id, self.seed, epoch, self._names)
            for old in [key for key in self._rows if key < epoch - 1]:
                del self._rows[old]
            most = self.batch.tokens_per_row
            if self.batch.packing is Packing.greedy and self._most_anchors is None:
                self._rows[epoch] = pack(order, self._tokens, most)
            else:
                anchors = np.zeros_like(self._tokens)
                if self._most_anchors is not None:
                    anchors = self._most_anchors
                open_rows = OPEN_ROWS if self.batch.packing is Packing.balanced else 1
                self._rows[epoch] = pack_balanced(
                    order, self._tokens, anchors, most, self.batch.anchors_per_row or 0, open_rows
                )
        return self._rows[epoch]

    def first_row(self, epoch: int) -> int:
        """The number of an epoch's first row."""
        while len(self._first_row) <= epoch:
            rows = self.epoch_rows(len(self._first_row) - 1)
            self._first_row.append(self._first_row[-1] + len(rows))
        return self._first_row[epoch]

    def row(self, number: int) -> Row:
        """Row `number` of the run."""
        while self._first_row[-1] <= number:
            self.first_row(len(self._first_row))
        epoch = bisect.bisect_right(self._first_row, number) - 1
        pieces = self.epoch_rows(epoch)[number - self._first_row[epoch]]
        return Row(number, epoch, tuple(self.pieces[index] for index in pieces.tolist()))

    def total_rows(self, epochs: float) -> int:
        """Rows of so many passes; a part of a pass is rounded up to a row."""
        whole = math.floor(epochs)
        part = epochs - whole
        rows = self.first_row(whole)
        return rows + (math.ceil(part * len(self.epoch_rows(whole)) - 1e-9) if part else 0)

    def total_steps(self, *, steps: int | None, epochs: float) -> int:
        """The planned number of updates.

        Raises:
            ConfigError: there would be none.
        """
        if steps is None:
            steps = -(-self.total_rows(epochs) // self.batch.rows_per_step)
        if steps < 1:
            raise ConfigError(
                f"trainer.steps={steps} and trainer.epochs={epochs} plan no step", where="trainer"
            )
        return steps

    def step(self, step: int, total_rows: int | None = None) -> list[Row]:
        """The rows of a 0-based step, over all ranks; `total_rows` ends the last step early."""
        start = step * self.batch.rows_per_step
        stop = start + self.batch.rows_per_step
        return [self.row(n) for n in range(start, min(stop, total_rows or stop))]

    def anchors(self, row: Row) -> list[np.ndarray]:
        """int64 [n] a piece: block starts, positions in the piece."""
        if row.number not in self._recent:
            # Asked for by the loader and for the denominator: kept until the step is over.
            self._recent[row.number] = [
                self._piece_anchors(row.epoch, piece) for piece in row.pieces
            ]
            while len(self._recent) > 4 * self.batch.rows_per_step + 64:
                self._recent.popitem(last=False)
        return self._recent[row.number]

    def _piece_anchors(self, epoch: int, piece: Piece) -> np.ndarray:
        anchor_N = noise.anchors(
            self.seed,
            epoch,
            self.snapshot.ids[piece.sample],
            self.snapshot.mask(piece.sample),
            self.batch.anchors_per_sample,
            self.block,
        )
        mine = (anchor_N >= piece.first) & (anchor_N < piece.last)
        return anchor_N[mine] - piece.start

    def slot_counts(self, rows: list[Row]) -> np.ndarray:
        """int64 [block - 1]: supervised labels a slot over these rows, of masks alone."""
        total = np.zeros(self.block - 1, dtype=np.int64)
        for row in rows:
            for piece, anchor_N in zip(row.pieces, self.anchors(row), strict=True):
                total += noise.slot_counts(self.mask(piece), anchor_N, self.block)
        return total

    def _count_anchors(self) -> np.ndarray:
        """int64: the most anchors that each piece can have."""
        counts = []
        for piece in self.pieces:
            possible = noise.candidates(self.snapshot.mask(piece.sample))
            inside = int(((possible >= piece.first) & (possible < piece.last)).sum())
            counts.append(min(inside, self.batch.anchors_per_sample))
        return np.array(counts)


def _check(batch: BatchConfig) -> None:
    if batch.tokens_per_row < 3 or batch.rows_per_step < 1 or batch.anchors_per_sample < 1:
        raise ConfigError(
            f"tokens_per_row={batch.tokens_per_row}, rows_per_step={batch.rows_per_step} and "
            f"anchors_per_sample={batch.anchors_per_sample} must be positive",
            where="batch",
        )
    if batch.anchors_per_row is not None and batch.anchors_per_row < batch.anchors_per_sample:
        raise ConfigError(
            f"a row holds {batch.anchors_per_row} anchors, a document may have "
            f"{batch.anchors_per_sample}",
            where="batch.anchors_per_row",
            do="Raise it, or lower batch.anchors_per_sample",
        )


def _pieces(snapshot: Any, indices: np.ndarray, batch: BatchConfig, block: int) -> list[Piece]:
    """Documents as they are; those longer than a row as windows.

    Windows overlap: an anchor of any window but the first has at least half a row of context, and
    its whole block stands in its window. The drafter's state starts anew in every window.
    """
    lengths = np.asarray(snapshot.num_tokens, dtype=np.int64)
    most, context = batch.tokens_per_row, batch.tokens_per_row // 2
    span = most - context - (block - 1)
    pieces = []
    for index in indices.tolist():
        length = int(lengths[index])
        if length <= most:
            pieces.append(Piece(index, 0, length, 0, length))
            continue
        if batch.long_documents is LongDocuments.error or span < 1:
            raise DataError(
                f"a document has {length} tokens, a row holds batch.tokens_per_row={most}",
                where=f"sample {snapshot.ids[index]}",
                do=f"Set batch.tokens_per_row={lengths[indices].max()} or "
                "batch.long_documents=window",
            )
        first, last = 0, most - (block - 1)
        while first < length - 1:
            start = max(0, first - context)
            stop = min(length, start + most)
            last = length if stop == length else stop - (block - 1)
            pieces.append(Piece(index, start, stop, first, last))
            first = last
    return pieces


def pack(order: np.ndarray, num_tokens: np.ndarray, tokens_per_row: int) -> list[np.ndarray]:
    """Puts whole documents greedily, in order, into rows.

    Args:
        order: int64 [n], indices in the order of the epoch.
        num_tokens: int64, lengths by index; none is longer than a row.
        tokens_per_row: most tokens of a row.

    Returns:
        Slices of `order`.
    """
    ends = np.cumsum(num_tokens[order])
    rows, start, used = [], 0, 0
    while start < len(order):
        stop = int(np.searchsorted(ends, used + tokens_per_row, side="right"))
        rows.append(order[start:stop])
        start, used = stop, int(ends[stop - 1])
    return rows


def pack_balanced(
    order: np.ndarray,
    num_tokens: np.ndarray,
    num_anchors: np.ndarray,
    tokens_per_row: int,
    anchors_per_row: int,
    open_rows: int,
) -> list[np.ndarray]:
    """Puts every document, in order, into the fullest open row that has room for it.

    When none has, the fullest row is closed (if `open_rows` are open) and a new one opened. Rows
    come out in the order in which they are closed, the rest in the order in which they were
    opened. With one open row this is greedy packing.

    Args:
        order: int64 [n], indices in the order of the epoch.
        num_tokens, num_anchors: int64, by index.
        tokens_per_row, anchors_per_row: most of a row; 0 anchors: any number.
        open_rows: rows open at a time.
    """
    closed: list[np.ndarray] = []
    rows: list[list[int]] = []
    room: list[int] = []
    blocks: list[int] = []
    for index in order.tolist():
        tokens, anchors = int(num_tokens[index]), int(num_anchors[index])
        best = -1
        for place, free in enumerate(room):
            fits = free >= tokens and (not anchors_per_row or blocks[place] >= anchors)
            if fits and (best < 0 or free < room[best]):
                best = place
        if best < 0:
            if len(rows) == open_rows:
                fullest = min(range(len(rows)), key=room.__getitem__)
                closed.append(np.array(rows.pop(fullest)))
                room.pop(fullest)
                blocks.pop(fullest)
            rows.append([])
            room.append(tokens_per_row)
            blocks.append(anchors_per_row)
            best = len(rows) - 1
        rows[best].append(index)
        room[best] -= tokens
        blocks[best] -= anchors
    return closed + [np.array(row) for row in rows]


def chain(digest: bytes, row_digests: list[bytes]) -> bytes:
    """The next link: a step's digest from the previous one and its rows, over all ranks."""
    return hashlib.blake2b(digest + b"".join(row_digests), digest_size=16).digest()
