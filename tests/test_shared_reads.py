"""Trials that share decoded samples: read once, the same bits, whatever happens to the memory."""

import multiprocessing
import pickle

import numpy as np
import pytest
from tiny_cache import tiny_cache

from stage2_train import shared_reads
from stage2_train.shared_reads import SharedReader


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tiny_cache(tmp_path_factory.mktemp("shared") / "cache")


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """The tests' folder lies on a disk that may be nearly full."""
    monkeypatch.setattr(shared_reads, "KEPT_FREE", 0.0)


def read_all(reader, names):
    return {name: tuple(part.copy() for part in reader.read(name)) for name in names}


def equal(one, two):
    return all(np.array_equal(a, b) for k in one for a, b in zip(one[k], two[k], strict=True))


def test_the_second_reader_takes_nothing_from_the_cache(store, tmp_path):
    names = store.snapshot().ids
    plain = store.reader()
    expected = read_all(plain, names)
    first, second = (SharedReader(store.reader(), tmp_path) for _ in range(2))
    assert equal(read_all(first, names), expected)
    assert first.bytes_read == plain.bytes_read > 0
    second = pickle.loads(pickle.dumps(second))
    out = np.zeros_like(expected[names[0]][1])
    assert second.read(names[0], out)[1] is out
    assert np.array_equal(out, expected[names[0]][1])
    assert equal(read_all(second, names), expected)
    assert second.bytes_read == 0
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_memory_is_read_again_from_the_cache(store, tmp_path, damage):
    name = store.snapshot().ids[0]
    reader = SharedReader(store.reader(), tmp_path)
    expected = reader.read(name)[1].copy()
    data = bytearray((tmp_path / name).read_bytes())
    if damage == "cut":
        del data[-2:]
    else:
        data[-1] ^= 1
    (tmp_path / name).write_bytes(data)
    assert np.array_equal(reader.read(name)[1], expected)
    again = SharedReader(store.reader(), tmp_path)
    assert np.array_equal(again.read(name)[1], expected)
    assert again.bytes_read == 0


def test_what_does_not_fit_is_read_from_the_cache(store, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_reads, "KEPT_FREE", 1.1)
    name = store.snapshot().ids[0]
    readers = [SharedReader(store.reader(), tmp_path) for _ in range(2)]
    assert len({reader.read(name)[1].tobytes() for reader in readers}) == 1
    assert [reader.bytes_read > 0 for reader in readers] == [True, True]
    assert not (tmp_path / name).exists()


def _child(root, folder, names, answers):
    from shared.store import Store

    shared_reads.KEPT_FREE = 0.0  # `room` does not reach a spawned process
    reader = SharedReader(Store.open(root).reader(), folder)
    for name in names:
        reader.read(name)
    answers.put(reader.bytes_read)


@pytest.mark.slow
def test_two_processes_read_every_sample_once(store, tmp_path):
    names = list(store.snapshot().ids)
    plain = store.reader()
    for name in names:
        plain.read(name)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    children = [
        context.Process(target=_child, args=(store.root, tmp_path, names, answers))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    assert sum(answers.get(timeout=120) for _ in children) == plain.bytes_read
    for child in children:
        child.join()
