"""Limits: a full disk, a million samples, workers after fork and spawn, one token and many."""

import contextlib
import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_tools import SPEC, fill, rows_of, samples, states

from shared import fs
from shared.errors import CacheError
from shared.index import SampleIndex, decode_index, encode_index
from shared.shards import ids_array
from shared.store import Store


def write(store: Store, chosen: list[tuple[str, np.ndarray]]) -> None:
    with store.write_shard(chosen, "lossless", "zarr") as writer:
        for name, ids_T in chosen:
            writer.append(name, states(len(ids_T)))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_that_fails_is_one_sentence_and_the_cache_goes_on(tmp_path, monkeypatch, code, call):
    store, truth = fill(tmp_path / "c", [[70]])
    chosen = samples([100, 30], seed=5)

    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(fs.os, "fsync", fail)
        elif call == "replace":
            patch.setattr(Path, "replace", fail)
        else:
            patch.setattr("shared.shards_zarr.ZarrWriter._write", fail)
        with pytest.raises(CacheError) as caught:
            write(store, chosen)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert Store.open(store.root).verify().ok
    assert set(Store.open(store.root).committed()) == set(truth)
    write(store, chosen)
    assert store.verify().ok


def test_room_is_checked_before_a_shard_is_begun(tmp_path, monkeypatch):
    store, _ = fill(tmp_path / "c", [[70]])
    monkeypatch.setattr(store.files, "free_bytes", lambda: 10_000)
    with (
        pytest.raises(CacheError, match="GB free"),
        store.write_shard(samples([500], seed=3), "lossless", "zarr"),
    ):
        pass
    store.require_space(9_999)
    assert len(store.shard_ids()) == 1


@pytest.mark.slow
def test_a_small_disk_that_fills_up(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    with contextlib.suppress(OSError):
        if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
            try:
                store = Store.create(disk / "c", SPEC)
                store.require_space = lambda size: None
                chosen = samples([400, 400, 400])
                with pytest.raises(CacheError, match="no space"):
                    write(store, chosen)
                subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
                write(store, chosen)
                assert Store.open(disk / "c").verify().ok
            finally:
                subprocess.run(["umount", str(disk)], check=True)
            return
    pytest.skip("no permission to mount a tmpfs")


def test_the_index_survives_a_round_trip_and_no_damage():
    names = [f"{number:032x}" for number in range(40)]
    known = {"a" * 32: ids_array(names[:30]), "b" * 32: ids_array(names[25:])}
    data = encode_index(known)
    again = decode_index(data)
    assert again is not None
    assert {key: value.tobytes() for key, value in again.items()} == {
        key: value.tobytes() for key, value in known.items()
    }
    for place in range(0, len(data), 97):
        damaged = bytearray(data)
        damaged[place] ^= 1
        assert decode_index(bytes(damaged)) is None
    assert decode_index(data[:-1]) is None
    index = SampleIndex(list(known), list(known.values()))
    assert len(index) == 40
    assert index[names[27]] == ("a" * 32, 27)  # in both: the smaller shard id
    assert index[names[39]] == ("b" * 32, 14)
    assert sorted(index) == names
    for wrong in ("f" * 32, "zz", 5, "g" * 32):
        assert wrong not in index


def test_many_shards_open_through_the_index_file(tmp_path, monkeypatch):
    monkeypatch.setattr("shared.store._INDEX_FROM", 3)
    root = tmp_path / "c"
    _, truth = fill(root, [[number + 1] for number in range(6)])
    Store.open(root).committed()
    assert (root / "index.bin").exists()
    opened = []
    plain = Store.shard
    monkeypatch.setattr(Store, "shard", lambda self, name: opened.append(name) or plain(self, name))
    store = Store.open(root)
    assert set(store.committed()) == set(truth)
    assert opened == []
    (root / "index.bin").write_bytes(b"nonsense")
    assert set(Store.open(root).committed()) == set(truth)
    assert len(opened) == 6


READ = """
import sys
sys.path[:0] = ["tests"]
import multiprocessing
from store_tools import *
def work(reader, names, queue):
    queue.put(sum(int(reader.read(name)[1].sum()) for name in names))
if __name__ == "__main__":
    store = Store.open(sys.argv[1])
    reader, names = store.reader(), list(store.committed())
    expected = sum(int(reader.read(name)[1].sum()) for name in names)  # the parent has decoded
    context = multiprocessing.get_context(sys.argv[2])
    queue = context.Queue()
    workers = [context.Process(target=work, args=(reader, names, queue)) for _ in range(4)]
    for worker in workers: worker.start()
    assert [queue.get(timeout=60) for _ in workers] == [expected] * 4
    for worker in workers: worker.join(60)
    assert all(worker.exitcode == 0 for worker in workers)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_trap_18_workers_after_the_parent_has_decoded(tmp_path, method):
    fill(tmp_path / "c", [[70, 5], [130]])
    script = tmp_path / "read.py"
    script.write_text(READ)
    subprocess.run(
        [sys.executable, script, tmp_path / "c", method],
        check=True, timeout=120, cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert method in multiprocessing.get_all_start_methods()


@pytest.mark.slow
def test_a_sample_of_one_token_and_one_of_many(tmp_path):
    for container in ("zarr", "webdataset"):
        store, truth = fill(tmp_path / container, [[1, 20_000]], container=container)
        for name, (ids_T, hidden_TLD) in truth.items():
            assert np.array_equal(store.reader().read(name)[0], ids_T)
            assert np.array_equal(store.reader().read(name)[1], hidden_TLD)


def test_trap_21_the_samples_of_a_snapshot_are_its_rows_once(tmp_path):
    store, truth = fill(tmp_path / "c", [[10, 20], [30, 40]])
    rows = rows_of(truth)
    snapshot = store.write_snapshot(rows + rows, {})
    train, heldout = snapshot.indices("train"), snapshot.indices("heldout")
    assert sorted([*train.tolist(), *heldout.tolist()]) == list(range(4))
    assert sorted(snapshot.ids) == sorted(truth)


@pytest.mark.slow
def test_a_million_samples_open_in_two_seconds_and_500_megabytes(tmp_path):
    from bench.cache_index import million

    seconds, megabytes = million(tmp_path / "million", shards=4000, samples=250)
    assert megabytes < 500
    assert seconds < 6  # 2 on an idle machine, which the benchmark measures


def test_a_disks_fault_under_a_librarys_own_error_is_an_os_error(tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors = {"a": torch.zeros(100_000)}
    with pytest.raises(FileNotFoundError, match="nowhere"), fs.library_writes(tmp_path / "nowhere"):
        save_file(tensors, tmp_path / "nowhere" / "a.safetensors")
    with (
        pytest.raises(CacheError, match="no space is left on the device"),
        fs.disk_errors(tmp_path),
        fs.library_writes("/dev/full"),
        Path("/dev/full").open("wb") as file,
    ):
        torch.save(tensors, file)
    with pytest.raises(KeyError), fs.library_writes(tmp_path):
        raise KeyError("not the disk's")
