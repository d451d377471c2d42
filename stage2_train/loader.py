"""Rows of the plan as batches: reading ahead changes *when* a batch comes, never *what* it is.

T tokens of a row, L stored states, D target width.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from shared.errors import DataError
from shared.log import note
from stage2_train import noise
from stage2_train.batch import Batch
from stage2_train.config import LoaderConfig, TrainConfig
from stage2_train.feed import Feed, Part, read_sample
from stage2_train.steps import Row, StepPlan


class RowFeed(Protocol):
    """Brings rows in the order in which they are asked for: `feed.Feed`, `online.OnlineFeed`."""

    def rows(
        self, tasks: Iterable[tuple[Any, tuple[Part, ...]]]
    ) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yields (key, tokens int32 [T], hidden uint16 [T, L, D]) for every (key, parts)."""
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...


class Upload:
    """Brings rows to a device. From pinned memory a copy goes on its own stream, beside the work on
    the row before; the host waits for the copy only when the row's buffer is wanted again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Any = None

    def __call__(self, batch: Batch) -> Batch:
        """The row on the device; call `release` before the next row is asked for."""
        if self._stream is None:
            return batch.to(self.device)
        with torch.cuda.stream(self._stream):
            there = batch.to(self.device, non_blocking=True)
            self._copied = self._stream.record_event()
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in vars(there).values():
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(current)
        return there

    def release(self) -> None:
        """Waits until the last row is copied."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def pin(feed: Feed) -> None:
    """Pins a feed's reused buffers, so that copies to a CUDA device don't stop the host."""
    block = feed.block
    address = block.array((1,)).ctypes.data
    failed = int(torch.cuda.cudart().cudaHostRegister(address, block.num_bytes, 0))
    if failed:
        note(f"host buffers of {block.num_bytes >> 20} MiB can't be pinned (CUDA error {failed})")


class Loader:
    """Packs the rows of a plan.

    Args:
        plan: which samples stand in which row.
        feed: reads and verifies rows.
        mask_token_id: must not occur in any document.
    """

    def __init__(self, plan: StepPlan, feed: RowFeed, *, mask_token_id: int) -> None:
        self.plan, self.feed, self.mask_token_id = plan, feed, mask_token_id

    def batches(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Batch]]:
        """Yields every row with its batch, in order.

        The batch's hidden states live in a reused buffer: use or copy them before the next one.

        Raises:
            CorruptionError: a sample can't be read.
            DataError: the mask token occurs in a document.
        """
        plan = self.plan

        def tasks() -> Iterator[tuple[Row, tuple[Part, ...]]]:
            for row in rows:
                yield (
                    row,
                    tuple(
                        (
                            plan.snapshot.ids[piece.sample],
                            int(plan.snapshot.num_tokens[piece.sample]),
                            piece.start,
                            piece.stop,
                        )
                        for piece in row.pieces
                    ),
                )

        for row, tokens_T, hidden_TLD in self.feed.rows(tasks()):
            masks = [plan.mask(piece) for piece in row.pieces]
            names = [plan.name(piece) for piece in row.pieces]
            yield (
                row,
                make_batch(
                    names, tokens_T, hidden_TLD, masks, plan.anchors(row), self.mask_token_id
                ),
            )

    def close(self) -> None:
        """Ends the reader processes."""
        self.feed.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_batch(
    ids: list[str],
    tokens_T: np.ndarray,
    hidden_TLD: np.ndarray,
    masks: list[np.ndarray],
    anchors: list[np.ndarray],
    mask_token_id: int | None,
) -> Batch:
    """A packed row from what was read; shares memory with `hidden_TLD` (uint16 bits of bfloat16).

    Raises:
        DataError: the mask token occurs in a document.
    """
    tokens_T = np.require(tokens_T, requirements="CW")
    ends = np.cumsum([len(mask) for mask in masks])
    found = np.flatnonzero(tokens_T == (-1 if mask_token_id is None else mask_token_id))
    if len(found):
        document = int(np.searchsorted(ends, found[0], side="right"))
        raise DataError(
            f"the mask token (id {mask_token_id}) occurs in the text",
            where=f"sample {ids[document]}",
            do="Choose a token that the data never uses with drafter.mask_token_id",
        )
    bits_TLD = torch.from_numpy(np.require(hidden_TLD, requirements="CW").view(np.int16))
    return Batch.pack(
        ids,
        [torch.from_numpy(part) for part in np.split(tokens_T, ends[:-1])],
        bits_TLD.view(torch.bfloat16),
        [torch.from_numpy(np.asarray(mask, dtype=bool)) for mask in masks],
        [torch.from_numpy(anchor_N) for anchor_N in anchors],
    )


def open_feed(
    plan: StepPlan, reader: Any, *, num_states: int, hidden_size: int, config: LoaderConfig
) -> Feed:
    """The feed from disk, or from memory.

    Args:
        plan: gives the size of a row and, for memory, which samples to hold.
        reader: reads a sample; must be picklable with workers.
        num_states: L, stored states a token.
        hidden_size: D, width of a state.
        config: workers and prefetch.
    """
    shape = (plan.batch.tokens_per_row, num_states, hidden_size)
    if config.ram:
        ids = dict.fromkeys(plan.snapshot.ids[piece.sample] for piece in plan.pieces)
        return Feed(RamReader(reader, ids), shape, workers=0, prefetch=1)
    return Feed(reader, shape, workers=config.workers, prefetch=config.prefetch)


class RamReader:
    """All samples of a snapshot in memory: the trainer's input without disk and codec."""

    def __init__(self, reader: Any, ids: Iterable[str]) -> None:
        self.samples = {name: tuple(np.array(part) for part in reader.read(name)) for name in ids}

    def read(self, name: str, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids int32 [T], hidden uint16 [T, L, D], in `out` when it is given)."""
        tokens, hidden = self.samples[name]
        if out is None:
            return tokens, hidden
        out[:] = hidden
        return tokens, out


def heldout_batches(
    snapshot: Any, reader: Any, cfg: TrainConfig, mask_token_id: int | None = None
) -> Iterator[Batch]:
    """The held-out split, one document a row, with anchors that no seed changes.

    Documents without a position to predict have nothing to measure and are left out.
    """
    for index in np.asarray(snapshot.indices("heldout")).tolist():
        mask, name = snapshot.mask(index), snapshot.ids[index]
        most, block = cfg.batch.anchors_per_sample, cfg.drafter.block_size
        anchor_N = noise.anchors(0, noise.HELDOUT_EPOCH, name, mask, most, block)
        if len(anchor_N):
            tokens_T, hidden_TLD = read_sample(reader, name, len(mask))
            yield make_batch([name], tokens_T, hidden_TLD, [mask], [anchor_N], mask_token_id)
