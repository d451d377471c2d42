"""Reader processes: rows of hidden states into shared, reused buffers. Free of torch.

A worker is a spawned process with one thread. It opens the cache lazily, reads the documents of a
row straight into its slot of shared memory and answers with their number of tokens; the training
process wraps the slot without a copy. An answer is so small that no worker waits to be heard, so
tasks are always taken from the pipe. Row i belongs to worker i mod W and slot i mod (W * prefetch),
so rows come back in order and at most `prefetch` of a worker are ahead. A worker's error travels as
a value and is raised in the training process as it is.
"""

import contextlib
import mmap
import os
import signal
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import get_context, reduction
from typing import Any

import numpy as np

from shared.errors import CorruptionError, DrafttapeError, TrainingError
from shared.sample import sample_id

VERIFY = "Run drafttape cache verify"


class SharedBlock:
    """Anonymous shared memory that a spawned process can map; no name is left behind."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        if fd is None:
            if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm
                fd = os.memfd_create("drafttape")
            else:
                with tempfile.TemporaryFile() as file:
                    fd = os.dup(file.fileno())
            os.ftruncate(fd, num_bytes)
        self.fd, self.num_bytes = fd, num_bytes
        self.memory = mmap.mmap(fd, num_bytes)

    def array(self, shape: tuple[int, ...], offset: int = 0, dtype: type = np.uint16) -> np.ndarray:
        """A view."""
        count = int(np.prod(shape))
        return np.frombuffer(self.memory, dtype, count, offset).reshape(shape)

    def __reduce__(self):
        return _attach, (reduction.DupFd(self.fd), self.num_bytes)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.fd)


def _attach(duplicate: Any, num_bytes: int) -> SharedBlock:
    return SharedBlock(num_bytes, duplicate.detach())


def read_sample(
    reader: Any, name: str, length: int, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Reads one document and holds it against what the snapshot says.

    Args:
        reader: `read(id, out) -> (input_ids int32 [T], hidden uint16 [T, L, D])`.
        name: the sample id.
        length: the tokens that the snapshot says it has.
        out: uint16 [length, L, D] to decode into.

    Raises:
        CorruptionError: the cache can't be read or holds something else.
    """
    try:
        input_ids, hidden = reader.read(name, out)
    except DrafttapeError:
        raise
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise CorruptionError(
            f"can't be read ({type(error).__name__}: {error})", where=f"sample {name}", do=VERIFY
        ) from None
    if len(input_ids) != length or len(hidden) != length:
        raise CorruptionError(
            f"has {len(input_ids)} tokens and {len(hidden)} states, the snapshot says {length}",
            where=f"sample {name}",
            do=VERIFY,
        )
    if sample_id(input_ids) != name:
        raise CorruptionError(
            "its tokens are not those of its id", where=f"sample {name}", do=VERIFY
        )
    return input_ids, hidden


Part = tuple[str, int, int, int]  # sample id, tokens of the document, first and last+1 wanted


def read_row(reader: Any, parts: Iterable[Part], out_TLD: np.ndarray) -> np.ndarray:
    """Reads documents (or windows of them) side by side into the first rows of `out_TLD`.

    Returns:
        int32 [T], tokens.
    """
    tokens, place = [], 0
    for name, length, start, stop in parts:
        out = out_TLD[place : place + stop - start]
        if stop - start == length:
            input_ids, _ = read_sample(reader, name, length, out)
        else:
            input_ids, hidden = read_sample(reader, name, length)
            out[:] = hidden[start:stop]
        tokens.append(input_ids[start:stop])
        place += stop - start
    return np.concatenate(tokens)


def _work(reader: Any, block: SharedBlock, shape: tuple[int, ...], pipe: Any) -> None:
    """The loop of a worker: (slot offset, parts) in, ("row", number of tokens) or an error out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.suppress(ImportError):
        from numcodecs import blosc

        blosc.use_threads = False
    with contextlib.suppress(EOFError, OSError):
        while True:
            offset, parts = pipe.recv()
            try:
                tokens = read_row(reader, parts, block.array(shape, offset))
                place = offset + _hidden_bytes(shape)
                block.array((len(tokens),), place, np.int32)[:] = tokens
                pipe.send(("row", len(tokens)))
            except DrafttapeError as error:
                pipe.send(("error", error))
            except Exception:
                pipe.send(("crash", traceback.format_exc()))


def _hidden_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a slot before its tokens, which are int32."""
    return -(-int(np.prod(shape)) * 2 // 4) * 4


class Feed:
    """Reads rows with W workers (0: in this process) in the order in which they are asked for.

    Args:
        reader: picklable; opens its files where it is first used.
        shape: (most tokens of a row, L, D) of a slot.
        workers: reader processes; 0 reads when the row is asked for.
        prefetch: rows that a worker may be ahead.
    """

    def __init__(
        self, reader: Any, shape: tuple[int, int, int], *, workers: int, prefetch: int
    ) -> None:
        self.reader, self.shape = reader, shape
        self.slots = max(1, workers * max(1, prefetch))
        slot_bytes = _hidden_bytes(shape) + 4 * shape[0]
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.block = SharedBlock(self.slots * self.slot_bytes)
        self._processes, self._pipes = [], []
        context = get_context("spawn")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(reader, self.block, shape, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that a dead worker shows as the end of the pipe
            self._processes.append(process)
            self._pipes.append(ours)

    def rows(
        self, tasks: Iterable[tuple[Any, tuple[Part, ...]]]
    ) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yields (key, tokens int32 [T], hidden uint16 [T, L, D]) for every (key, parts).

        Both are views into a slot: valid until the next row is asked for.
        """
        if not self._processes:
            out_TLD = self.block.array(self.shape)
            for key, parts in tasks:
                tokens = read_row(self.reader, parts, out_TLD)
                yield key, tokens, out_TLD[: len(tokens)]
            return
        tasks, keys, sent, done = iter(tasks), [], 0, 0
        exhausted = False
        while True:
            while not exhausted and sent < done + self.slots:
                task = next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                keys.append(task[0])
                slot = sent % self.slots
                self._send(sent, (slot * self.slot_bytes, task[1]))
                sent += 1
            if done == sent:
                return
            count = self._receive(done)
            offset = done % self.slots * self.slot_bytes
            tokens = self.block.array((count,), offset + _hidden_bytes(self.shape), np.int32)
            yield keys.pop(0), tokens, self.block.array((count, *self.shape[1:]), offset)
            done += 1

    def _send(self, number: int, task: Any) -> None:
        try:
            self._pipes[number % len(self._pipes)].send(task)
        except OSError:
            raise self._died(number) from None

    def _receive(self, number: int) -> int:
        try:
            kind, value = self._pipes[number % len(self._pipes)].recv()
        except (EOFError, OSError):
            raise self._died(number) from None
        if kind == "error":
            raise value
        if kind == "crash":
            raise RuntimeError(f"a reader process failed:\n{value}")
        return value

    def _died(self, number: int) -> TrainingError:
        process = self._processes[number % len(self._processes)]
        process.join(5)
        return TrainingError(
            f"a reader process ended by itself (exit code {process.exitcode})",
            do="Out of memory? Lower loader.workers or loader.prefetch; the same command goes on",
        )

    def close(self) -> None:
        """Ends the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
