"""Which documents every optimizer step sees: a pure plan, known before anything is read.

The data's path, in numbered steps (each a pure function of snapshot, seed and batch settings):

1. `shared.order.epoch_order` permutes the training split of an epoch.
2. Whole documents are packed greedily in that order into rows of at most `tokens_per_row` tokens.
3. Rows of all epochs follow each other; step k takes the next `rows_per_step` of them.
   With a number of epochs the last step takes what is left: every epoch is the snapshot once.
4. Rank r of W computes rows r, r+W, … of a step; the step's denominator counts all of them.
5. `noise.anchors` draws block starts in every document.
"""

import bisect
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shared.errors import ConfigError, DataError
from shared.order import epoch_order
from stage2_train import noise
from stage2_train.config import BatchConfig


@dataclass(frozen=True)
class Row:
    """A packed row before it is read.

    Attributes:
        number: 0-based over the whole run.
        epoch: the pass over the data that it belongs to.
        samples: indices into the snapshot, in packing order.
    """

    number: int
    epoch: int
    samples: tuple[int, ...]


class StepPlan:
    """Rows, steps and denominators of a run.

    Args:
        snapshot: the data set's view.
        batch: packing and step size.
        seed: order and anchors.
        block: tokens of a block.
        split: which split is replayed.

    Raises:
        DataError: the split is empty, nothing in it can be trained on, or a document is longer
            than a row.
    """

    def __init__(
        self, snapshot: Any, batch: BatchConfig, *, seed: int, block: int, split: str = "train"
    ) -> None:
        if batch.tokens_per_row < 3 or batch.rows_per_step < 1 or batch.anchors_per_sample < 1:
            raise ConfigError(
                f"tokens_per_row={batch.tokens_per_row}, rows_per_step={batch.rows_per_step} and "
                f"anchors_per_sample={batch.anchors_per_sample} must be positive",
                where="batch",
            )
        self.snapshot, self.batch, self.seed, self.block = snapshot, batch, seed, block
        self.indices = np.asarray(snapshot.indices(split), dtype=np.int64)
        if not len(self.indices):
            raise DataError(
                f"no sample in the {split} split",
                where=f"snapshot {snapshot.id}",
                do="Extract data into the cache, or choose another snapshot with cache.snapshot",
            )
        self.num_tokens = np.asarray(snapshot.num_tokens, dtype=np.int64)
        self._ids = [snapshot.ids[index] for index in self.indices]
        longest = self.indices[np.argmax(self.num_tokens[self.indices])]
        if self.num_tokens[longest] > batch.tokens_per_row:
            raise DataError(
                f"a document has {self.num_tokens[longest]} tokens, a row holds "
                f"batch.tokens_per_row={batch.tokens_per_row}",
                where=f"sample {snapshot.ids[longest]}",
                do=f"Set batch.tokens_per_row={self.num_tokens[longest]} or more",
            )
        if not any(len(noise.candidates(snapshot.mask(int(index)))) for index in self.indices):
            raise DataError(
                f"none of the {len(self.indices)} documents of the {split} split has a supervised "
                "token to predict",
                where=f"snapshot {snapshot.id}",
                do="Check the loss mask of the data (drafttape cache ls)",
            )
        self._rows: dict[int, list[np.ndarray]] = {}
        self._first_row = [0]  # of epoch e; grows as epochs are planned

    @property
    def key(self) -> dict[str, Any]:
        """What the steps are a function of, besides the snapshot."""
        return {"seed": self.seed, "block": self.block, **asdict(self.batch)}

    def start_digest(self) -> bytes:
        """Digest 0 of the chain."""
        text = json.dumps({"snapshot": self.snapshot.id, **self.key}, sort_keys=True)
        return hashlib.blake2b(b"drafttape.steps.v1" + text.encode(), digest_size=16).digest()

    def epoch_rows(self, epoch: int) -> list[np.ndarray]:
        """The packed rows of one epoch: every sample of the split exactly once."""
        if epoch not in self._rows:
            order = self.indices[epoch_order(self.snapshot.id, self.seed, epoch, self._ids)]
            for old in [key for key in self._rows if key < epoch - 1]:
                del self._rows[old]
            self._rows[epoch] = pack(order, self.num_tokens, self.batch.tokens_per_row)
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
        samples = self.epoch_rows(epoch)[number - self._first_row[epoch]]
        return Row(number, epoch, tuple(samples.tolist()))

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
        """int64 [n] a document: block starts, positions in the document."""
        return [
            noise.anchors(
                self.seed,
                row.epoch,
                self.snapshot.ids[index],
                self.snapshot.mask(index),
                self.batch.anchors_per_sample,
                self.block,
            )
            for index in row.samples
        ]

    def slot_counts(self, rows: list[Row]) -> np.ndarray:
        """int64 [block - 1]: supervised labels a slot over these rows, of masks alone."""
        total = np.zeros(self.block - 1, dtype=np.int64)
        for row in rows:
            for index, anchor_N in zip(row.samples, self.anchors(row), strict=True):
                total += noise.slot_counts(self.snapshot.mask(index), anchor_N, self.block)
        return total


def pack(order: np.ndarray, num_tokens: np.ndarray, tokens_per_row: int) -> list[np.ndarray]:
    """Puts whole documents greedily, in order, into rows.

    Args:
        order: int64 [n], sample indices in the order of the epoch.
        num_tokens: int64, lengths by sample index; none is longer than a row.
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


def chain(digest: bytes, row_digests: list[bytes]) -> bytes:
    """The next link: a step's digest from the previous one and its rows, over all ranks."""
    return hashlib.blake2b(digest + b"".join(row_digests), digest_size=16).digest()
