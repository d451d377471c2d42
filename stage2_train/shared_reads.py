"""Decoded samples that the trials of a sweep share in memory: each is read and decoded once.

A sample's states are put into a folder of a memory file system (/dev/shm) by the trial that needs
them first; the others, which wait for it, copy them from there. What is there has been verified
when it was read and carries a checksum of its own; what doesn't fit is read from the cache as
always, so sharing changes when and by whom a sample is read, never what a trial sees.
"""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from shared.fs import Lock

MEMORY = Path("/dev/shm")
KEPT_FREE = 0.25  # share of the memory file system that is never filled
HEAD = 5  # uint64 words before the data: T, L, D, crc32c of tokens and states


def shared_folder(out: Path) -> Path | None:
    """Where the trials of the sweep in `out` share samples; None without a memory file system."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return None
    key = hashlib.blake2b(str(out.resolve()).encode(), digest_size=8).hexdigest()
    return MEMORY / f"drafttape-{os.getuid()}-{key}"


def forget(folder: Path | None) -> None:
    """Gives the memory back."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


class SharedReader:
    """A reader (see `shared.reader`) that takes part in sharing; picklable, one for a thread.

    Args:
        reader: reads from the cache.
        folder: of this cache, in memory.
    """

    def __init__(self, reader: Any, folder: Path) -> None:
        self.reader, self.folder = reader, folder

    def num_tokens(self, name: str) -> int:
        """T of a sample."""
        return int(self.reader.num_tokens(name))

    def read_tokens(self, name: str) -> np.ndarray:
        """input_ids [T] int32."""
        tokens: np.ndarray = self.reader.read_tokens(name)
        return tokens

    @property
    def bytes_read(self) -> int:
        """Stored bytes of states that this reader has taken from the cache."""
        return int(self.reader.bytes_read)

    def read(self, name: str, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """As `SampleReader.read`."""
        found = self._take(name, out)
        if found is not None:
            return found
        try:
            lock = Lock.take(self.folder / f"{name}.lock", wait=True)
        except OSError:  # no room for a lock: nobody shares any more
            return self._from_cache(name, out)
        try:
            found = self._take(name, out)
            if found is None:
                found = self._from_cache(name, out)
                self._put(name, *found)
        finally:
            if lock is not None:
                lock.release()
        return found

    def _from_cache(self, name: str, out: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        tokens_T, hidden_TLD = self.reader.read(name, out)
        return tokens_T, hidden_TLD

    def _take(self, name: str, out: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        """A shared sample; None if it isn't there, or not as it was put."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                head = np.fromfile(file, np.uint64, HEAD).tolist()
                shape = tuple(head[:3])
                tokens_T = np.fromfile(file, np.int32, shape[0])
                if out is None:
                    out = np.empty(shape, np.uint16)
                elif out.shape != shape:
                    raise ValueError(f"out must be uint16 {shape}, not {out.shape}")
                got = file.readinto(memoryview(out).cast("B"))  # type: ignore[attr-defined]
        except FileNotFoundError:
            return None
        if got == out.nbytes and head[3:] == [_crc(tokens_T), _crc(out)]:
            return tokens_T, out
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return None

    def _put(self, name: str, tokens_T: np.ndarray, hidden_TLD: np.ndarray) -> None:
        """Shares a sample if there is room."""
        try:
            room = os.statvfs(self.folder)
            free = room.f_bavail * room.f_frsize
            if free - hidden_TLD.nbytes < KEPT_FREE * room.f_blocks * room.f_frsize:
                return
            temporary = self.folder / f"{name}.{os.getpid()}"
            with temporary.open("wb") as file:
                sums = [_crc(tokens_T), _crc(hidden_TLD)]
                np.array([*hidden_TLD.shape, *sums], np.uint64).tofile(file)
                np.ascontiguousarray(tokens_T, np.int32).tofile(file)
                np.ascontiguousarray(hidden_TLD).tofile(file)
            temporary.replace(self.folder / name)
        except OSError:  # full after all: the sample stays where it is
            return

    def close(self) -> None:
        self.reader.close()


def _crc(values: np.ndarray) -> int:
    return int(google_crc32c.value(np.frombuffer(np.ascontiguousarray(values), np.uint8)))
