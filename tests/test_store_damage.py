"""Kills, flips, cuts and deletions: nothing is lost, nothing damaged is handed out."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from store_tools import SPEC, fill, rows_of, samples, states

from shared.errors import CacheError, CorruptionError, DrafttapeError
from shared.fs import seal_json
from shared.store import Store

CONTAINERS = ["zarr", "webdataset"]

WRITE = """
import sys
sys.path[:0] = ["tests"]
from store_tools import *
store = Store.create(sys.argv[1], SPEC)
truth = {}
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    chosen = samples([200, 70, 300, 64], seed=number)
    for row, (name, ids_T) in enumerate(chosen):
        truth[name] = ids_T, None
    writer = store.write_shard(chosen, "lossless", sys.argv[3])
    if store.has_shard(writer.shard_id):
        continue
    with writer:
        for row, (name, ids_T) in enumerate(chosen):
            writer.append(name, states(len(ids_T), seed=1000 * number + row))
store.write_snapshot(rows_of(truth), {}, name="all")
print("done", flush=True)
"""


def run_writer(root: Path, shards: int, container: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WRITE, str(root), str(shards), container],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def tree(root: Path) -> dict[str, bytes]:
    """All files but what a killed writer may leave: temporaries and locks, which nothing reads."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".lock-") and "/.tmp-" not in str(path)
    }


def test_what_killed_writers_left_is_swept(tmp_path):
    from shared.fs import Lock, Staging, sweep_staging

    live = Staging(tmp_path, "shard")
    claim = Lock.take(tmp_path / ".claim-a", wait=False)
    (tmp_path / ".claim-b").touch()
    (tmp_path / ".lock-c").touch()
    dead = tmp_path / ".tmp-dead-00000000"
    dead.mkdir()
    (tmp_path / ".tmp-dead-00000000.lock").touch()
    old, young = tmp_path / ".tmp-a.json-1", tmp_path / ".tmp-b.json-2"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert sweep_staging(tmp_path) == 4
    assert {path.name for path in tmp_path.glob(".[cl]*")} == {".claim-a"}
    claim.release()
    assert not dead.exists()
    assert not old.exists()
    assert young.exists()
    assert live.path.exists()
    live.close()


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
def test_trap_14_kill_9_at_any_moment_then_finish_gives_the_same_bytes(tmp_path, container):
    calm = run_writer(tmp_path / "calm", 24, container)
    calm.communicate()
    root, rng = tmp_path / "killed", random.Random(3)
    finished, kills = {}, 0
    for _ in range(40):
        process = run_writer(root, 24, container)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        ended = "done" in process.communicate()[0]
        kills += not ended
        store = Store.open(root)
        for name, (ids_T, hidden_TLD) in _readable(store).items():
            assert np.array_equal(store.reader().read(name)[0], ids_T)
            assert np.array_equal(store.reader().read(name)[1], hidden_TLD)
        for name, mtime in finished.items():  # finished shards are never written again
            assert (root / name).stat().st_mtime_ns == mtime
        finished = {
            str(path.relative_to(root)): path.stat().st_mtime_ns
            for path in (root / "shards").glob("*.json")
        }
        if ended:
            break
    assert kills >= 2
    run_writer(root, 24, container).communicate()
    assert tree(root) == tree(tmp_path / "calm")
    assert Store.open(root).verify().ok


def _readable(store):
    """Every committed sample with the states it must have."""
    expected = {}
    for number in range(24):
        for row, (name, ids_T) in enumerate(samples([200, 70, 300, 64], seed=number)):
            expected[name] = ids_T, states(len(ids_T), seed=1000 * number + row)
    committed = store.committed()
    chosen = random.Random(len(committed)).sample(sorted(committed), min(8, len(committed)))
    return {name: expected[name] for name in chosen}


@pytest.mark.parametrize("container", CONTAINERS)
def test_trap_15_a_shard_cut_short_is_never_seen(tmp_path, container):
    store, truth = fill(tmp_path / "c", [[10]], container=container)
    chosen = samples([100, 100], seed=5)
    die = f"""
import os, sys
sys.path[:0] = ["tests"]
from store_tools import *
chosen = samples([100, 100], seed=5)
writer = Store.open({str(store.root)!r}).write_shard(chosen, "lossless", {container!r}).__enter__()
writer.append(chosen[0][0], states(100))
os._exit(9)
"""
    folder = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", die], cwd=folder, check=False).returncode == 9
    again = Store.open(store.root)
    assert set(again.committed()) == set(truth)
    assert again.verify().ok
    left = [path for path in Path(store.root, "shards").iterdir() if ".tmp" in path.name]
    assert left
    Store.create(store.root, SPEC)
    assert not any(path.exists() for path in left)
    with again.write_shard(chosen, "lossless", container) as writer:
        for name, ids_T in chosen:
            writer.append(name, states(len(ids_T)))
    assert len(again.committed()) == 3


def test_two_writers_of_one_shard_and_a_live_temporary(tmp_path):
    store, _ = fill(tmp_path / "c", [[10]])
    chosen = samples([100], seed=5)
    one, two = (store.write_shard(chosen, "lossless", "zarr") for _ in range(2))
    with one, two:
        Store.create(store.root, SPEC)  # sweeps: both are alive and stay
        one.append(chosen[0][0], states(100))
        two.append(chosen[0][0], states(100))
    assert Store.open(store.root).verify().ok
    assert len(store.committed()) == 2


def test_trap_16_missing_data_is_an_error_and_zeros_are_data(tmp_path):
    store = Store.create(tmp_path / "c", SPEC)
    chosen = samples([70, 5])
    with store.write_shard(chosen, "lossless", "zarr") as writer:
        for name, ids_T in chosen:
            writer.append(name, np.zeros((len(ids_T), 3, 96), np.uint16))
    shard = writer.shard_id
    assert not store.reader().read(chosen[0][0])[1].any()
    data = tmp_path / "c" / "shards" / shard / "hidden" / "c" / "0" / "0" / "0"
    whole = data.read_bytes()
    # A chunk marked as missing in a valid index, as zarr does for chunks of fill value.
    import google_crc32c

    index = np.frombuffer(whole[-3 * 16 - 4 : -4], "<u8").copy()
    index[2:4] = np.iinfo("u8").max
    body = whole[: -3 * 16 - 4] + index.tobytes()
    data.write_bytes(body + google_crc32c.value(index.tobytes()).to_bytes(4, "little"))
    with pytest.raises(CorruptionError, match=shard):
        store.reader().read(chosen[0][0])
    data.unlink()
    with pytest.raises(CorruptionError, match=f"{shard}.*missing"):
        store.reader().read(chosen[0][0])
    shutil.rmtree(tmp_path / "c" / "shards" / shard)
    report = store.verify()
    assert report.bad_samples == {name for name, _ in chosen}
    with pytest.raises(CorruptionError, match=shard):
        store.reader().read(chosen[0][0])


def read_everything(root: Path, truth: dict) -> None:
    """What a training run does; raises on any damage, and checks that data is what it was."""
    store = Store.open(root)
    snapshot, reader = store.snapshot("all"), store.reader()
    assert store.snapshot().id == snapshot.id
    for name in snapshot.ids:
        ids_T, hidden_TLD = reader.read(name)
        assert np.array_equal(ids_T, truth[name][0])
        assert np.array_equal(hidden_TLD, truth[name][1])


@pytest.mark.parametrize("container", CONTAINERS)
def test_trap_17_every_flip_and_cut_is_found_and_nothing_bad_is_read(tmp_path, container):
    store, truth = fill(tmp_path / "c", [[70, 5, 130], [64]], container=container)
    store.write_snapshot(rows_of(truth), {}, name="all")
    store.write_job("job", {"shards": []})
    store.write_rejects("job", [{"source": "f:1", "reason": "empty", "name": None}])
    root, rng = tmp_path / "c", random.Random(17)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    by_data = {path: rng.sample(range(path.stat().st_size), 1) for path in files}
    for path in files:
        whole = path.read_bytes()
        for place in by_data[path]:
            flipped = bytearray(whole)
            flipped[place] ^= 1 << rng.randrange(8)
            cut = whole[:place]
            for damaged in (bytes(flipped), cut, whole + b"\0"):
                path.write_bytes(damaged)
                _check_found(root, path, truth)
        path.write_bytes(whole)
    assert store.verify().ok


def test_a_missing_or_dangling_latest_is_reported(tmp_path):
    store, truth = fill(tmp_path / "c", [[5]])
    assert store.verify().ok  # no snapshot yet, so none is the latest
    store.write_snapshot(rows_of(truth), {}, name="all")
    latest = tmp_path / "c" / "snapshots" / "latest"
    store.files.write("snapshots/latest", seal_json({"snapshot": "0" * 32}))
    report = store.verify()
    assert "latest names snapshot 000" in report.problems[0]
    latest.unlink()
    report = store.verify()
    assert "latest is missing" in report.problems[0]
    assert report.bad_files == ["snapshots/latest"]
    store.write_snapshot(rows_of(truth), {}, name="all")
    assert store.verify().ok


@pytest.mark.parametrize("container", CONTAINERS)
def test_trap_17_a_read_of_flipped_bits_names_shard_and_sample(tmp_path, container):
    store, truth = fill(tmp_path / "c", [[70, 5, 130]], container=container)
    (shard,) = store.shard_ids()
    folder = Path(store.root) / "shards"
    data = max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    damaged = bytearray(data.read_bytes())
    for place in range(1000, len(damaged) - 1000, 997):  # in the chunks of every sample
        damaged[place] ^= 1
    data.write_bytes(damaged)
    for name in truth:
        with pytest.raises(CorruptionError) as caught:
            Store.open(store.root).reader().read(name)
        assert shard in str(caught.value)
        assert name in str(caught.value)


def _check_found(root: Path, path: Path, truth: dict) -> None:
    try:
        problems = Store.open(root).verify().problems
    except DrafttapeError as error:
        problems = [str(error)]
    shard = path.relative_to(root / "shards").parts[0] if "shards" in path.parts else path.name
    name = shard.removesuffix(".json").removesuffix(".tar")
    assert any(name in problem for problem in problems), (path, problems)
    with contextlib.suppress(DrafttapeError):  # data is right, or an error: never silently wrong
        read_everything(root, truth)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_root_is_one_sentence(tmp_path):
    (tmp_path / "c").mkdir(mode=0o500)
    with pytest.raises(CacheError, match="permission"):
        Store.create(tmp_path / "c", SPEC)


def test_a_file_in_the_way_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="not a directory"):
        Store.create(tmp_path / "file" / "c", SPEC)
