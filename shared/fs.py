"""Files of a cache: sealed JSON, atomic writes, locks, and disk errors as one sentence.

A *sealed* file ends in a sha256 of all bytes before it, so that any changed, cut or appended
byte is an error. A file appears under its name only whole: written beside it, fsynced, renamed.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import CacheError, CorruptionError

SEAL = re.compile(rb',\n"checksum": "([0-9a-f]{64})"\n}\n')
LINE_SEAL = re.compile(rb'{"checksum": "([0-9a-f]{64})"}\n')
SEAL_BYTES = len(b',\n"checksum": ""\n}\n') + 64
LINE_SEAL_BYTES = len(b'{"checksum": ""}\n') + 64

_SENTENCES = {
    errno.ENOSPC: ("no space is left on the device", "Free some space; the same command goes on"),
    errno.EDQUOT: ("the disk quota is used up", "Free some space; the same command goes on"),
    errno.EROFS: ("the file system is read-only", "Choose a directory that can be written"),
    errno.EACCES: ("permission denied", "Choose a directory that you may write"),
    errno.EPERM: ("permission denied", "Choose a directory that you may write"),
    errno.EIO: ("the device reports an input/output error", "Check the disk, then run it again"),
    errno.ESTALE: ("the network mount is gone", "Mount it again; the same command goes on"),
    errno.ENOTCONN: ("the network mount is gone", "Mount it again; the same command goes on"),
    errno.ENODEV: ("the device is gone", "Mount it again; the same command goes on"),
    errno.EEXIST: ("a file is there already", "Choose another directory"),
    errno.EISDIR: ("it is a directory", "Give the name of a file"),
    errno.ENAMETOOLONG: ("the name is too long", "Choose a shorter one"),
    errno.ENOTDIR: ("a part of the path is a file, not a directory", "Choose another directory"),
    errno.ENOENT: ("the directory is not there", "Was it moved, or its mount lost?"),
    errno.EMFILE: ("too many open files", "Raise the limit (ulimit -n)"),
}


@contextlib.contextmanager
def disk_errors(where: object) -> Iterator[None]:
    """Turns what a disk does to a user (ENOSPC, EIO, EROFS, …) into a CacheError."""
    try:
        yield
    except OSError as error:
        code = error.errno if error.errno is not None else -1
        what, do = _SENTENCES.get(code, (error.strerror or str(error), None))
        raise CacheError(what, where=where, do=do) from error


@contextlib.contextmanager
def library_writes(path: object) -> Iterator[None]:
    """A disk's fault that a library met under an error of its own is an OSError again.

    safetensors has the number in its text; torch.save into an open file has the OSError behind its
    RuntimeError (given a path, it loses it).
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        named = re.search(r"\(os error (\d+)\)", str(error))
        code = int(named[1]) if named else getattr(error.__context__, "errno", None)
        if code is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def disk_fault(error: OSError) -> CacheError | None:
    """The sentence for a disk's fault that was met outside `disk_errors`; None for other errors."""
    if error.errno not in _SENTENCES or error.errno == errno.ENOENT:
        return None
    what, do = _SENTENCES[error.errno]
    return CacheError(what, where=error.filename, do=do)


def seal_json(document: dict[str, Any], *, allow_nan: bool = False) -> bytes:
    """A JSON object, one line per top-level key, with the checksum of all before it."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'), allow_nan=allow_nan)}"
        for key, value in document.items()
    ]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n"checksum": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def unseal_json(data: bytes, where: object) -> dict[str, Any]:
    """The object of a sealed JSON file.

    Raises:
        CorruptionError: a byte differs from what was written.
    """
    seal = SEAL.fullmatch(data[-SEAL_BYTES:])
    body = data[:-SEAL_BYTES]
    if seal is None or hashlib.sha256(body).hexdigest().encode() != seal[1]:
        raise CorruptionError("the file is damaged (its checksum doesn't match)", where=where)
    document = json.loads(body + b"\n}")
    if not isinstance(document, dict):
        raise CorruptionError("the file is not a JSON object", where=where)
    return document


def seal_lines(rows: list[dict[str, Any]]) -> bytes:
    """JSON lines, the last one being the checksum of all before it."""
    body = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    return body + f'{{"checksum": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def unseal_lines(data: bytes, where: object) -> list[dict[str, Any]]:
    """The rows of sealed JSON lines.

    Raises:
        CorruptionError: a byte differs from what was written.
    """
    seal = LINE_SEAL.fullmatch(data[-LINE_SEAL_BYTES:])
    body = data[:-LINE_SEAL_BYTES]
    if seal is None or hashlib.sha256(body).hexdigest().encode() != seal[1]:
        raise CorruptionError("the file is damaged (its checksum doesn't match)", where=where)
    return [json.loads(line) for line in body.splitlines()]


def fsync_path(path: Path) -> None:
    """Flushes a file or a directory to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that it is seen whole or not at all, also after a power cut.

    Raises:
        CacheError: the disk is full, read-only, gone.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)


def check_writable(path: Path) -> None:
    """Refuses a file's place before the work for it begins; writes nothing.

    Raises:
        CacheError: it is a directory, or a part of the path is a file or can't be written.
    """
    with disk_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "")
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "")


class Blob:
    """A local file open for positioned reads; forks may share it, for it has no cursor."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, buffer: Any, offset: int) -> int:
        """Fills `buffer` from `offset`; returns the bytes read, fewer only at the file's end."""
        view, done = memoryview(buffer), 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class LocalFiles:
    """The files under a cache's root, by relative path; every fault of the disk is a CacheError.

    A missing file raises FileNotFoundError where it is read or opened: its meaning depends on
    the caller.
    """

    remote = False

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        return self.root / name

    def read(self, name: str) -> bytes:
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            with disk_errors(self.path(name)):
                raise error

    def open(self, name: str) -> Blob:
        try:
            return Blob(self.path(name))
        except FileNotFoundError:
            raise
        except OSError as error:
            with disk_errors(self.path(name)):
                raise error

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces a file atomically."""
        write_atomic(self.path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Creates a file atomically; False, changing nothing, if it is there already."""
        path = self.path(name)
        temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        write_atomic(temporary, data)
        with disk_errors(path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            fsync_path(path.parent)
        return True

    def free_bytes(self) -> int | None:
        """Room on the device; None where that can't be known."""
        path = self.root.absolute()
        while not path.exists():
            path = path.parent
        with disk_errors(path):
            return shutil.disk_usage(path).free

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def mtime(self, name: str) -> float:
        """When a file was last written, seconds since 1970."""
        return self.path(name).stat().st_mtime

    def sha256(self, name: str) -> tuple[int, str]:
        """(bytes, sha256) of a file."""
        return sha256_file(self.path(name))

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted, without temporary ones; empty if there is no folder."""
        with disk_errors(self.path(folder)):
            try:
                found = [entry.name for entry in os.scandir(self.path(folder))]
            except FileNotFoundError:
                return []
        return sorted(name for name in found if not name.startswith("."))

    def remove(self, name: str) -> None:
        """Removes a file or a folder with all in it; nothing happens if it isn't there."""
        path = self.path(name)
        with disk_errors(path):
            if path.is_dir() and not path.is_symlink():
                # First out of sight in one step: nobody finds half a folder.
                hidden = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
                path.rename(hidden)
                shutil.rmtree(hidden)
            else:
                path.unlink(missing_ok=True)

    def publish(self, staged: Path, name: str) -> None:
        """Moves a staged file or folder to its name, replacing what is there, and fsyncs."""
        path = self.path(name)
        with disk_errors(path):
            if path.is_dir():
                self.remove(name)
            staged.replace(path)
            fsync_path(path.parent)


class Lock:
    """An advisory lock on a file, held until `release` or the end of the process (kill -9 too)."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def take(cls, path: Path, *, wait: bool) -> "Lock | None":
        """The lock, or None when another process holds it and `wait` is false."""
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                return None
            # The holder before us may have deleted the file: then ours is a lock on nothing.
            try:
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return cls(path, descriptor)
            except FileNotFoundError:
                pass
            os.close(descriptor)

    @property
    def descriptor(self) -> int:
        """The open file; a child process that inherits it holds the lock too."""
        return self._descriptor

    def release(self, *, delete: bool = True) -> None:
        if delete:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._descriptor)


class Staging:
    """A directory that nobody reads, to write into before publishing; its lock marks it as live."""

    def __init__(self, folder: Path, name: str) -> None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / f".tmp-{name}-{secrets.token_hex(4)}"
            lock = Lock.take(self.path.with_name(self.path.name + ".lock"), wait=False)
            assert lock is not None  # the name is random
            self._lock = lock
            self.path.mkdir()

    def close(self) -> None:
        """Removes what is left in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def sweep_staging(folder: Path) -> int:
    """Removes temporaries and locks of killed processes; returns how many. Live ones stay."""
    removed = 0
    if not folder.is_dir():
        return 0
    for path in list(folder.glob(".*")):
        staged = path.name.startswith(".tmp-") and path.suffix == ".lock"
        if staged or path.name.startswith((".lock-", ".claim-")):
            lock = Lock.take(path, wait=False)
            if lock is None:
                continue
            if staged:
                shutil.rmtree(path.with_name(path.name.removesuffix(".lock")), True)
            lock.release()
            removed += 1
        elif path.name.startswith(".tmp-"):
            # The temporaries of single files have no lock: a live one is renamed within seconds.
            with contextlib.suppress(OSError):
                if path.is_file() and _age_s(path) > 3600:
                    path.unlink()
                    removed += 1
    return removed


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def sha256_file(path: Path, *, block: int = 1 << 22) -> tuple[int, str]:
    """(bytes, sha256) of a file, read in blocks."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(block)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return size, digest.hexdigest()
