"""Upkeep: diff, names, gc, compaction, repair; each with its dry run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_tools import fill, rows_of

from shared.errors import CacheError, CorruptionError, MismatchError
from shared.quantize import to_float
from shared.reader import open_shard
from shared.recode import recode
from shared.sample import pack_mask
from shared.store import Store
from shared.upkeep import diff, gc, remove_snapshot, repair

CONTAINERS = ["zarr", "webdataset"]


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def check(store: Store, truth: dict, names) -> None:
    reader = store.reader()
    for name in names:
        ids_T, hidden_TLD = reader.read(name)
        assert np.array_equal(ids_T, truth[name][0])
        assert np.array_equal(hidden_TLD, truth[name][1])


def test_diff_and_names(tmp_path):
    store, truth = fill(tmp_path / "c", [[10, 20, 30], [40]])
    rows = rows_of(truth)
    old = store.write_snapshot(rows[:3], {}, name="old")
    changed = replace(rows[2], mask=pack_mask(np.ones(30)))
    new = store.write_snapshot([rows[1], changed, rows[3]], {}, name="new")
    result = diff(store, "old", "new")
    assert result.added[:2] == (1, 40)
    assert result.removed[:2] == (1, 10)
    assert result.unchanged[:2] == (2, 50)
    assert result.relabelled == 1
    assert result.added[2] > 0
    store.tag("best", old.id)
    assert store.names() == {"old": old.id, "new": new.id, "best": old.id}
    with pytest.raises(CacheError, match="latest"):
        remove_snapshot(store, "new")
    remove_snapshot(store, "best")
    assert store.names() == {"new": new.id}
    assert store.snapshot_ids() == [new.id]
    for bad in ("latest", "abcdef", "../x", ""):
        with pytest.raises(CacheError):
            store.tag(bad, new.id)


@pytest.mark.parametrize("container", CONTAINERS)
def test_gc_drops_only_what_no_snapshot_refers_to(tmp_path, container):
    root = tmp_path / "c"
    store, truth = fill(root, [[10, 200], [30], [300, 20], [5]], container=container)
    names = list(truth)
    rows = rows_of(truth)
    store.write_snapshot([rows[0], rows[1]], {}, name="old")
    store.write_snapshot([rows[4]], {}, name="new")
    before = tree(root)
    planned = gc(store, keep_days=0)
    assert tree(root) == before  # a dry run
    assert len(planned.drop) == 2
    assert [kept for _, kept in planned.compact] == [1]
    assert gc(store, dry_run=False).drop == []  # young: a running extraction may need them
    assert tree(root)["shards/" + planned.drop[0] + ".json"]
    old, new = store.snapshot("old"), store.snapshot("new")
    done = gc(store, dry_run=False, keep_days=0)
    assert done.drop == planned.drop
    again = Store.open(root)
    assert set(again.committed()) == {names[0], names[1], names[4]}
    check(again, truth, again.committed())
    assert again.verify().ok
    assert (again.snapshot("old").id, again.snapshot("new").id) == (old.id, new.id)
    assert gc(again, keep_days=0).drop == gc(again, keep_days=0).compact == []


def test_gc_takes_orphans_and_refuses_on_damage(tmp_path):
    root = tmp_path / "c"
    store, truth = fill(root, [[10], [20]])
    snapshot = store.write_snapshot(rows_of(truth), {})
    first = store.shard_ids()[0]
    (root / "shards" / f"{first}.tar").write_bytes(b"left by a killed conversion")
    (root / "shards" / ("0" * 32)).mkdir()
    report = gc(store, dry_run=False, keep_days=0)
    assert sorted(report.orphans) == sorted(["0" * 32, f"{first}.tar"])
    assert store.verify().ok
    path = root / "snapshots" / f"{snapshot.id}.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError):
        gc(store, dry_run=False, keep_days=0)
    assert len(store.shard_ids()) == 2


@pytest.mark.parametrize("container", CONTAINERS)
def test_repair_keeps_every_good_sample(tmp_path, container):
    root = tmp_path / "c"
    store, truth = fill(root, [[70, 130, 5], [64], [40]], container=container)
    names = list(truth)
    snapshot = store.write_snapshot(rows_of(truth), {}, name="all")
    store.write_job("job", {"shards": []})
    index = store.committed()
    damaged = {names[1], names[3]}
    for name in damaged:
        shard, row = index[name]
        place = int(open_shard(store, store.shard(shard)).starts[row]) + 50
        suffix = "/hidden/c/0/0/0" if container == "zarr" else ".tar"
        path = root / "shards" / f"{shard}{suffix}"
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
    job = root / "jobs" / "job.json"
    job.write_bytes(job.read_bytes() + b" ")
    found = store.verify()
    bad = set(found.bad_samples)
    assert bad == damaged
    before = tree(root)
    planned = repair(store, found)
    assert tree(root) == before
    report = repair(store, found, dry_run=False)
    assert set(report.lost) == set(planned.lost)
    assert set(report.lost) | set(report.unreadable) == bad
    for name, ids_T in report.lost.items():
        assert np.array_equal(ids_T, truth[name][0])
    assert not job.exists()
    good = set(names) - bad
    assert set(store.committed()) == good
    check(store, truth, good)
    missing = [(name, truth[name][0]) for name in sorted(bad)]
    with store.write_shard(missing, "lossless", container) as writer:
        for name, _ in missing:
            writer.append(name, truth[name][1])
    assert store.verify().ok
    check(store, truth, store.snapshot(snapshot.id).ids)


def test_repair_rewrites_what_readers_do_not_use(tmp_path):
    root = tmp_path / "c"
    store, truth = fill(root, [[70]])
    before = tree(root)
    path = root / "shards" / store.shard_ids()[0] / "zarr.json"
    path.write_bytes(path.read_bytes()[:-3])
    report = repair(store, store.verify(), dry_run=False)
    assert not report.lost
    assert tree(root) == before
    check(store, truth, truth)


def test_repair_drops_a_shard_whose_sidecar_is_damaged(tmp_path):
    root = tmp_path / "c"
    store, truth = fill(root, [[70], [30]])
    path = root / "shards" / f"{store.shard_ids()[0]}.json"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptionError, match=path.stem):
        Store.open(root).committed()
    repair(store, Store.open(root).verify(), dry_run=False)
    again = Store.open(root)
    assert len(again.committed()) == 1
    check(again, truth, again.committed())
    assert again.verify().ok


def test_a_recoded_copy_replays_the_same_snapshots(tmp_path):
    store, truth = fill(tmp_path / "c", [[70, 130], [30]], container="webdataset")
    rows = rows_of(truth)
    store.write_snapshot(rows, {"max_tokens": 7}, name="all")
    some = store.write_snapshot(rows[:2], {})
    store.files.write("target/target.json", b"as it is")
    for _ in range(2):  # the second time finds all shards
        copy = recode(store, "bits5", str(tmp_path / "small"))
    assert {copy.shard(name).codec for name in copy.shard_ids()} == {"bits5"}
    assert copy.resolve() == some.id
    assert copy.names() == store.names()
    assert copy.snapshot("all").meta["max_tokens"] == 7
    assert copy.verify().bad_files == ["target/target.json"]
    for name, (ids_T, hidden_TLD) in truth.items():
        ours_T, ours_TLD = copy.reader().read(name)
        assert np.array_equal(ours_T, ids_T)
        error = to_float(ours_TLD) - to_float(hidden_TLD)
        assert 0 < np.linalg.norm(error) < 0.01 * np.linalg.norm(to_float(hidden_TLD))
    with pytest.raises(MismatchError, match="lost bits already"):
        recode(copy, "int8", str(tmp_path / "smaller"))


@pytest.mark.slow
def test_the_words_of_cache(tmp_path, capsys):
    from shared.cli import main

    root = tmp_path / "c"
    store, truth = fill(root, [[70, 200], [30], [5]])
    rows = rows_of(truth)
    store.write_snapshot(rows, {}, name="all")
    store.write_snapshot(rows[:2], {}, name="some")

    def word(*arguments: str) -> tuple[int, str]:
        code = main(["cache", *arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    assert word("ls", str(root))[0] == 0
    code, text = word("diff", str(root), "all", "some")
    assert code == 0
    assert "removed   2 samples, 35 tokens" in text
    code, text = word("tag", str(root), "some", "mine")
    assert code == 0
    assert "mine" in text
    assert word("rm", str(root), "all")[0] == 0
    code, text = word("gc", str(root), "keep_days=0")
    assert code == 0
    assert "drop shard" in text
    assert "would free" in text
    assert len(store.shard_ids()) == 3
    assert word("gc", str(root), "keep_days=0", "dry_run=false")[0] == 0
    assert len(store.shard_ids()) == 1
    assert word("convert", str(root), "webdataset")[0] == 0
    assert word("verify", str(root))[0] == 0
    path = root / "shards" / f"{store.shard_ids()[0]}.tar"
    data = bytearray(path.read_bytes())
    data[3000] ^= 4
    path.write_bytes(data)
    code, text = word("verify", str(root))
    assert code == 1
    assert "BAD" in text
    assert path.stem in text
    assert word("verify", str(root), "full=false")[0] == 0
    code, text = word("repair", str(root))
    assert code == 1
    assert "dry_run=false" in text
    for wrong in (("diff", str(root), "all"), ("nix", str(root)), ("convert", str(root), "zip"),
                  ("ls", str(tmp_path)), ("rm", str(root), "none")):  # fmt: skip
        code, text = word(*wrong)
        assert code == 2
        assert "Traceback" not in text
