"""A cache in an object store: any fsspec URL (s3://, gs://, memory://, …).

Credentials come from where the URL's library takes them (for S3 the usual AWS_* environment).
Shards are written to a local scratch folder and uploaded whole, sidecar last. Reads go through
a bounded local cache of blocks; the block after the one that was read is fetched ahead.
"""

import concurrent.futures
import contextlib
import datetime
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from shared.errors import CacheError
from shared.fs import LocalFiles, write_atomic

BLOCK_BYTES = 8 << 20
CACHE_BYTES = 20 << 30  # override by DRAFTTAPE_CACHE_BYTES
_ENDS = (KeyboardInterrupt, SystemExit, FileNotFoundError, CacheError)


def files_at(root: str | Path) -> "LocalFiles":
    """The files under a root: a local path or an fsspec URL."""
    text = str(root)
    if text.startswith("file://"):
        text = text[len("file://") :]
    return RemoteFiles(text) if "://" in text else LocalFiles(text)


@contextlib.contextmanager
def remote_errors(where: object):
    """Turns whatever a remote library raises into a CacheError; a missing file stays one."""
    try:
        yield
    except _ENDS:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CacheError(
            f"the remote store answers: {reason}",
            where=where,
            do="Check the URL, the credentials in the environment and the network",
        ) from error


class BlockCache:
    """Blocks of remote files on the local disk, oldest use dropped first beyond a size."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._written = 0

    def get(self, key: str) -> bytes | None:
        path = self.folder / key[:2] / key
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def put(self, key: str, data: bytes) -> None:
        if len(data) > self.limit:
            return
        with contextlib.suppress(CacheError):  # a full disk only makes it slower
            path = self.folder / key[:2] / key
            write_atomic(path, data)
        self._written += len(data)
        if self._written > self.limit // 16:
            self._written = 0
            self.shrink()

    def shrink(self) -> None:
        """Removes the blocks that were not used for longest until the limit holds."""
        found = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        size = sum(entry[1] for entry in found)
        for _, length, path in sorted(found):
            if size <= self.limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            size -= length


class RemoteBlob:
    """A remote file for positioned reads, through the block cache, with read-ahead."""

    def __init__(self, files: "RemoteFiles", name: str) -> None:
        self._files, self._name = files, name
        info = files.info(name)
        self.size = int(info["size"])
        version = str(info.get("ETag") or info.get("mtime") or info.get("created") or "")
        text = f"{files.root_url}\0{name}\0{self.size}\0{version}\0{BLOCK_BYTES}"
        self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._last: tuple[int, bytes] | None = None
        self._ahead: tuple[int, concurrent.futures.Future[bytes]] | None = None

    def _fetch(self, block: int) -> bytes:
        key = f"{self._key}-{block}"
        wanted = min(BLOCK_BYTES, self.size - block * BLOCK_BYTES)
        data = self._files.blocks.get(key)
        if data is None or len(data) != wanted:
            data = self._files.read_range(self._name, block * BLOCK_BYTES, wanted)
            self._files.blocks.put(key, data)
        return data

    def _block(self, block: int) -> bytes:
        if self._last is not None and self._last[0] == block:
            return self._last[1]
        if self._ahead is not None and self._ahead[0] == block:
            data = self._ahead[1].result()
        else:
            data = self._fetch(block)
        self._last, self._ahead = (block, data), None
        if (block + 1) * BLOCK_BYTES < self.size:
            self._ahead = block + 1, self._files.pool.submit(self._fetch, block + 1)
        return data

    def read_into(self, buffer: Any, offset: int) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view) and offset + done < self.size:
            block, start = divmod(offset + done, BLOCK_BYTES)
            part = self._block(block)[start : start + len(view) - done]
            if not part:
                break
            view[done : done + len(part)] = part
            done += len(part)
        return done

    def close(self) -> None:
        self._last = self._ahead = None


class RemoteFiles(LocalFiles):
    """The files under an fsspec URL; staging and locks are in a local scratch folder."""

    remote = True

    def __init__(self, url: str) -> None:
        self.root_url = url.rstrip("/")
        tag = hashlib.blake2b(self.root_url.encode(), digest_size=8).hexdigest()
        super().__init__(Path(tempfile.gettempdir()) / f"drafttape-{os.getuid()}" / tag)
        self._connect()

    def _connect(self) -> None:
        import fsspec

        with remote_errors(self.root_url):
            try:
                self._fs, self._base = fsspec.core.url_to_fs(self.root_url)
            except (ImportError, ValueError) as error:
                raise CacheError(
                    f"no library for this URL ({error})",
                    where=self.root_url,
                    do="Install it; for s3:// that is drafttape[s3]",
                ) from None
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        limit = int(os.environ.get("DRAFTTAPE_CACHE_BYTES") or CACHE_BYTES)
        self.blocks = BlockCache(home / "drafttape" / "blocks", limit)
        self.pool = concurrent.futures.ThreadPoolExecutor(2, "read-ahead")

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.root_url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RemoteFiles.__init__(self, state["url"])

    def __str__(self) -> str:
        return self.root_url

    def _url(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{name}" if name else self._base

    def info(self, name: str) -> dict[str, Any]:
        with remote_errors(f"{self.root_url}/{name}"):
            self._fs.invalidate_cache()
            return self._fs.info(self._url(name))

    def read(self, name: str) -> bytes:
        with remote_errors(f"{self.root_url}/{name}"):
            return self._fs.cat_file(self._url(name))

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Bytes of a file."""
        with remote_errors(f"{self.root_url}/{name}"):
            return self._fs.cat_file(self._url(name), start=start, end=start + size)

    def open(self, name: str) -> Any:
        return RemoteBlob(self, name)

    def write(self, name: str, data: bytes) -> None:
        with remote_errors(f"{self.root_url}/{name}"):
            parent = self._url(name).rpartition("/")[0]
            with contextlib.suppress(Exception):  # object stores have no folders
                self._fs.makedirs(parent, exist_ok=True)
            self._fs.pipe_file(self._url(name), data)
            self._fs.invalidate_cache()

    def create(self, name: str, data: bytes) -> bool:
        if self.exists(name):
            return False
        self.write(name, data)
        return True

    def free_bytes(self) -> int | None:
        """Room for one shard in the local scratch folder is all that is needed at a time."""
        return super().free_bytes() if self.root.exists() else None

    def exists(self, name: str) -> bool:
        try:
            self.info(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        return int(self.info(name)["size"])

    def mtime(self, name: str) -> float:
        info = self.info(name)
        stamp = info.get("LastModified") or info.get("created") or info.get("mtime")
        if isinstance(stamp, datetime.datetime):
            return stamp.timestamp()
        return float(stamp) if isinstance(stamp, int | float) else time.time()

    def sha256(self, name: str) -> tuple[int, str]:
        """Past the block cache: this is to prove what the store holds."""
        digest, size = hashlib.sha256(), self.size(name)
        for start in range(0, size, 4 * BLOCK_BYTES):
            digest.update(self.read_range(name, start, min(4 * BLOCK_BYTES, size - start)))
        return size, digest.hexdigest()

    def names(self, folder: str) -> list[str]:
        with remote_errors(f"{self.root_url}/{folder}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._url(folder), detail=False)
            except FileNotFoundError:
                return []
        base = [entry.rstrip("/").rpartition("/")[2] for entry in found]
        own = self._url(folder).rstrip("/").rpartition("/")[2]
        folder_itself = {entry for entry in found if entry.rstrip("/") == self._url(folder)}
        names = {name for name in base if name and not name.startswith(".")}
        return sorted(names - ({own} if folder_itself else set()))

    def remove(self, name: str) -> None:
        with remote_errors(f"{self.root_url}/{name}"):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._url(name), recursive=True)
            self._fs.invalidate_cache()

    def publish(self, staged: Path, name: str) -> None:
        """Uploads; what stood under the name before is replaced file by file."""
        with remote_errors(f"{self.root_url}/{name}"):
            paths = [staged] if staged.is_file() else sorted(staged.rglob("*"))
            for path in paths:
                if path.is_file():
                    part = "" if path == staged else f"/{path.relative_to(staged)}"
                    with contextlib.suppress(Exception):  # object stores have no folders
                        parent = self._url(name + part).rpartition("/")[0]
                        self._fs.makedirs(parent, exist_ok=True)
                    self._fs.put_file(str(path), self._url(name + part))
            self._fs.invalidate_cache()
