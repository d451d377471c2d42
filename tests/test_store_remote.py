"""A cache behind an fsspec URL: the same store, read through bounded local blocks."""

import pickle
import uuid

import numpy as np
import pytest
from store_tools import fill, rows_of, samples, states

from shared import remote
from shared.errors import CacheError, CorruptionError
from shared.remote import BlockCache
from shared.store import Store
from shared.upkeep import gc, repair


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    return tmp_path / "home" / "drafttape" / "blocks"


def exercise(url: str, blocks) -> None:
    """Everything a cache does, on any URL; the same ids as on a local path."""
    store, truth = fill(url, [[1, 200, 70], [64]])
    snapshot = store.write_snapshot(rows_of(truth), {}, name="all")
    again = pickle.loads(pickle.dumps(Store.open(url)))
    assert again.snapshot("all").id == again.resolve() == snapshot.id
    for _ in range(2):
        reader = pickle.loads(pickle.dumps(again.reader()))
        for name, (ids_T, hidden_TLD) in truth.items():
            assert np.array_equal(reader.read(name)[0], ids_T)
            assert np.array_equal(reader.read(name)[1], hidden_TLD)
    assert any(blocks.glob("??/*"))
    assert again.verify().ok
    assert again.convert("webdataset") == 2
    for name, (_, hidden_TLD) in truth.items():
        assert np.array_equal(again.reader().read(name)[1], hidden_TLD)
    assert again.verify().ok
    extra = samples([30], seed=77)
    with again.write_shard(extra, "lossless", "zarr") as writer:
        writer.append(extra[0][0], states(30))
    assert again.has_shard(writer.shard_id)
    assert gc(again, keep_days=-1, dry_run=False).drop == [writer.shard_id]
    with pytest.raises(CacheError, match="not a cache"):
        Store.open(url + "/nothing")
    (first, second) = again.shard_ids()
    data = bytearray(again.files.read(f"shards/{first}.tar"))
    data[len(data) // 2] ^= 8
    again.files.write(f"shards/{first}.tar", bytes(data))
    found = again.verify()
    assert any(first in problem for problem in found.problems)
    repair(again, found, dry_run=False)
    again.files.remove(f"shards/{second}.tar")
    name = next(name for name, place in again.committed().items() if place[0] == second)
    with pytest.raises(CorruptionError, match=second):
        again.reader().read(name)


def test_a_cache_behind_a_url(blocks):
    exercise(f"memory://{uuid.uuid4().hex}/cache", blocks)


def test_a_url_without_library_is_one_sentence():
    with pytest.raises(CacheError, match="no library"):
        Store.open("nosuch://bucket/cache")


def test_the_block_cache_keeps_its_limit_and_drops_the_oldest(tmp_path):
    import os

    blocks = BlockCache(tmp_path, 10_000)
    for number in range(30):
        blocks.put(f"{number:04d}", bytes(1000))
        os.utime(tmp_path / f"{number:04d}"[:2] / f"{number:04d}", (number, number))
    blocks.shrink()
    kept = sorted(path.name for path in tmp_path.glob("??/*"))
    assert kept == [f"{number:04d}" for number in range(20, 30)]
    assert blocks.get("0025") == bytes(1000)
    assert blocks.get("0001") is None
    blocks.put("big", bytes(20_000))
    assert blocks.get("big") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cache_in_s3(s3, blocks):
    exercise(s3, blocks)
    with pytest.raises(CacheError, match=r"remote store|not a cache"):
        Store.open("s3://no-such-bucket/cache")
