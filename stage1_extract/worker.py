"""Runs shards on one device: forward passes here, finite check, codec and disk in a thread.

The thread is fed through a queue of two batches, so memory beyond the model is bounded by four
batches of states (computed, two queued, being written) and what the shard writer holds.

T: tokens of a sample.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.capture import capture, out_of_memory, pack_batch, pad_batch
from shared.errors import TargetError
from shared.log import note
from shared.sample import sample_id
from shared.store import Store
from shared.target import Target
from stage1_extract.checks import finite
from stage1_extract.host_copy import HostBatch, HostCopies
from stage1_extract.plan import ShardPlan

_QUEUED_BATCHES = 2


@dataclass
class ShardResult:
    """What became of a shard: `bad` maps a sample id to why it was left out.

    `ran` is false for a shard that another run had committed when its turn came.
    """

    shard: ShardPlan
    shard_id: str | None
    seconds: float
    bad: dict[str, str] = field(default_factory=dict)
    ran: bool = True


class Worker:
    """One target on one device, writing into one store."""

    def __init__(self, store: Store, target: Target, codec: str, container: str) -> None:
        self.store, self.target, self.codec, self.container = store, target, codec, container
        self.spec, self.copies = store.spec, HostCopies(target.device)
        self.packed = self.spec.backend.get("batching") == "packed"
        self.budget = 1 << 62  # computed tokens of a batch; smaller once memory has run out

    def run(
        self,
        shard: ShardPlan,
        tokens: Mapping[str, np.ndarray],
        advance: Callable[[int], None] = lambda count: None,
    ) -> ShardResult:
        """Captures and commits one shard.

        A sample with a non-finite state is left out: the shard is then written again without it,
        under the id of what it holds.

        Args:
            tokens: int32 [T] of every sample of the shard.
            advance: called with the number of real tokens of each finished batch.

        Raises:
            TargetError: out of memory with a single sample, or tokens that aren't the plan's.
        """
        started = time.perf_counter()
        for name, length in zip(shard.ids, shard.lengths, strict=True):
            if len(tokens[name]) != length or sample_id(tokens[name]) != name:
                raise TargetError("the tokens are not those of the plan", where=f"sample {name}")
        bad: dict[str, str] = {}
        rest = shard
        while rest.ids:
            samples = [(name, tokens[name]) for name in rest.ids]
            writer = self.store.write_shard(samples, self.codec, self.container)
            if self.store.has_shard(writer.shard_id):
                seconds = time.perf_counter() - started
                return ShardResult(shard, writer.shard_id, seconds, bad, ran=bool(bad))
            found = self._attempt(writer, rest, tokens, advance)
            if not found:
                return ShardResult(shard, writer.shard_id, time.perf_counter() - started, bad)
            bad |= found
            rest = rest.without(set(found))
            advance(-rest.num_tokens)
        return ShardResult(shard, None, time.perf_counter() - started, bad)

    def _attempt(
        self, writer: Any, shard: ShardPlan, tokens: Mapping[str, np.ndarray], advance: Any
    ) -> dict[str, str]:
        """Writes the shard; or nothing, when samples are bad: returns all of those."""
        try:
            with writer:
                pipe = _Pipe(writer)
                try:
                    for start, stop in shard.batches:
                        names = shard.ids[start:stop]
                        for batch in self.forward([tokens[name] for name in names]):
                            lengths = [len(tokens[names[i]]) for i in batch.rows]
                            pipe.put([names[i] for i in batch.rows], lengths, batch)
                            advance(sum(lengths))
                finally:
                    pipe.close()
                if pipe.bad:
                    raise _BadSamples
        except _BadSamples:
            return pipe.bad
        return {}

    def forward(self, sequences: list[np.ndarray], first: int = 0) -> Iterator[HostBatch]:
        """States of a batch, on their way to the host.

        When the device runs out of memory the token budget is halved, again and again, for this
        batch and all later ones.

        Args:
            first: number of the first sequence in the planned batch.

        Raises:
            TargetError: not even one sample fits.
        """
        import torch

        size = self._computed(sequences)
        if size <= self.budget or len(sequences) == 1:
            try:
                ids_BT, lengths = pack_batch(sequences) if self.packed else pad_batch(sequences, 0)
                hidden = capture(
                    self.target,
                    ids_BT.to(self.target.device),
                    lengths,
                    self.spec.layer_ids,
                    self.spec.last_hidden,
                    self.packed,
                )
                yield self.copies.start(hidden, list(range(first, first + len(sequences))))
                return
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self._halve(sequences, size)
            torch.cuda.empty_cache()
        half = (len(sequences) + 1) // 2
        yield from self.forward(sequences[:half], first)
        yield from self.forward(sequences[half:], first + half)

    def _computed(self, sequences: list[np.ndarray]) -> int:
        """Tokens of a batch, pads included."""
        lengths = [len(tokens) for tokens in sequences]
        return sum(lengths) if self.packed else max(lengths) * len(lengths)

    def _halve(self, sequences: list[np.ndarray], size: int) -> None:
        """A smaller token budget after running out of memory.

        Raises:
            TargetError: one sample alone doesn't fit, or the target is split over ranks, which
                would not halve together.
        """
        where = f"sample {sample_id(sequences[0])} on {self.target.device}"
        if len(sequences) == 1:
            raise TargetError(
                f"out of memory with one sample of {len(sequences[0])} tokens",
                where=where,
                do="Lower data.max_tokens, or give the target more memory",
            ) from None
        if self.target.info.cfg.tensor_parallel > 1:
            raise TargetError(
                f"out of memory with {size} tokens, and ranks that share a target can't halve "
                "together: the others wait inside the forward pass",
                where=where,
                do=f"Give the same command with batch_tokens={size // 2}; committed shards stay",
            ) from None
        self.budget = min(self.budget, size // 2)
        note(f"{self.target.device}: out of memory with {size} tokens, going on with {size // 2}")


class _BadSamples(Exception):  # discards the shard that is being written
    pass


class _Pipe:
    """The writing thread. After a bad sample it only looks for more of them."""

    def __init__(self, writer: Any) -> None:
        self.bad: dict[str, str] = {}
        self._writer, self._error = writer, None
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=_QUEUED_BATCHES)
        self._thread = threading.Thread(target=self._work, name="shard-writer", daemon=True)
        self._thread.start()

    def put(self, names: list[str], lengths: list[int], batch: HostBatch) -> None:
        """Queues a batch; waits while two are queued already."""
        self._check()
        self._queue.put((names, lengths, batch))

    def close(self) -> None:
        """Waits until all is written; raises what the thread met."""
        self._queue.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                parts = item[2].samples(item[1])
                for name, hidden_TLD in zip(item[0], parts, strict=True):
                    if not finite(hidden_TLD):
                        self.bad[name] = "a hidden state is not finite"
                    elif not self.bad:
                        self._writer.append(name, hidden_TLD)
                item[2].release()
            except BaseException as error:
                self._error = error
            item = parts = hidden_TLD = None
