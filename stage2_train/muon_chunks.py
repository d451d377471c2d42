"""Chunks of Muon's parts: equal shapes of all matrices gathered, and which rows each shard holds.

B parts in a chunk, N x M each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stage2_train.ownership import edges
from stage2_train.param_rules import Parts, blocks


@dataclass(frozen=True)
class Run:
    """Rows of parameter `index` that stand one after the other in a chunk, from row `first` on."""

    index: int
    rows: range
    first: int

    def within(self, low: int, high: int) -> "Run":
        """The rows from `low` to before `high`."""
        start, stop, step = self.rows.start, self.rows.stop, self.rows.step
        skipped = max(0, -(-(low - start) // step))
        rows = range(start + skipped * step, min(stop, high), step)
        return Run(self.index, rows, self.first + skipped)

    def of(self, tensor: Tensor, low: int) -> Tensor:
        """View of the rows in a shard that begins at row `low`."""
        return tensor[self.rows.start - low : self.rows.stop - low : self.rows.step]

    def at(self, stage_BNM: Tensor) -> Tensor:
        """The matching rows of the chunk."""
        return stage_BNM.view(-1, stage_BNM.shape[2])[self.first : self.first + len(self.rows)]


@dataclass
class Chunk:
    """Up to a bounded number of equally shaped parts that are orthogonalised in one call.

    Attributes:
        home: the one shard that holds all rows; None: rows of several shards.
        size: number of parts.
        runs: where the rows come from.
        held: the runs cut to what each shard holds.
    """

    rows: int
    cols: int
    home: int | None
    size: int = 0
    runs: list[Run] = field(default_factory=list)
    held: list[list[Run]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.rows, self.cols

    def count(self, shard: int) -> int:
        """Elements that a shard holds."""
        return sum(len(run.rows) for run in self.held[shard]) * self.cols


def plan_chunks(
    matrices: Sequence[tuple[int, tuple[int, int], Parts]],
    head_group: int,
    most_elements: int,
    shards: int = 1,
) -> list[Chunk]:
    """Gathers equal parts of all matrices (index, shape, parts) into chunks, in a fixed order.

    Parts that lie on one shard and parts that lie on several are not mixed.
    """
    chunks: list[Chunk] = []
    open_chunks: dict[tuple, Chunk] = {}
    cuts: dict[int, list[tuple[int, int]]] = {}
    for index, (rows, cols), parts in matrices:
        cuts[index] = edges(rows, shards)
        for block in blocks(parts, head_group):
            slices = [range(*piece) for piece in block.slices]
            home = _home(slices, cuts[index])
            key = (block.rows, cols, home)
            capacity = max(1, most_elements // (block.rows * cols))
            chunk = open_chunks.get(key)
            if chunk is None or chunk.size == capacity:
                chunk = open_chunks[key] = Chunk(*key)
                chunks.append(chunk)
            _place(chunk, index, slices)
    for chunk in chunks:
        cut = [[run.within(*cuts[run.index][s]) for run in chunk.runs] for s in range(shards)]
        chunk.held = [[run for run in runs if run.rows] for runs in cut]
    return chunks


def _home(slices: Sequence[range], cuts: Sequence[tuple[int, int]]) -> int | None:
    """The shard that holds all rows, if one does."""
    first, last = min(rows[0] for rows in slices), max(rows[-1] for rows in slices)
    return next((s for s, (low, high) in enumerate(cuts) if low <= first and last < high), None)


def _place(chunk: Chunk, index: int, slices: Sequence[range]) -> None:
    """Adds a part; rows right below the last run's rows extend that run."""
    first = chunk.size * chunk.rows
    for rows in slices:
        last = chunk.runs[-1] if chunk.runs else None
        if last is not None and last.index == index and last.rows.step == rows.step:
            grown = range(last.rows.start, rows.stop, rows.step)
            if last.rows[-1] + rows.step == rows.start and len(grown) == len(last.rows) + len(rows):
                chunk.runs[-1] = Run(index, grown, last.first)
                first += len(rows)
                continue
        chunk.runs.append(Run(index, rows, first))
        first += len(rows)
    chunk.size += 1


def placed(
    chunks: Sequence[Chunk | None], shard: int, flat: Tensor
) -> Iterator[tuple[Chunk, Run, Tensor]]:
    """Every run that a shard holds, with its rows [k, M] in a flat tensor, in this order."""
    place = 0
    for chunk in chunks:
        for run in chunk.held[shard] if chunk else ():
            size = len(run.rows) * chunk.cols
            yield chunk, run, flat[place : place + size].view(-1, chunk.cols)
            place += size
