"""The store: round trips, commits, snapshots, refusals."""

import pickle

import numpy as np
import pytest
from store_tools import SPEC, fill, rows_of, samples, states

from shared.errors import CacheError, ConfigError, DataError, MismatchError
from shared.sample import pack_mask, sample_id, unpack_mask
from shared.spec import CaptureSpec
from shared.store import Store, load_frozen

CONTAINERS = ["zarr", "webdataset"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_samples_come_back_bit_for_bit(tmp_path, container):
    store, truth = fill(tmp_path / "c", [[1, 63, 64, 65, 200], [128, 5]], container=container)
    reader = pickle.loads(pickle.dumps(Store.open(tmp_path / "c").reader()))
    for name, (ids_T, hidden_TLD) in truth.items():
        read_T, read_TLD = reader.read(name)
        assert read_T.dtype == np.int32
        assert np.array_equal(read_T, ids_T)
        assert np.array_equal(read_TLD, hidden_TLD)
    assert set(store.committed()) == set(truth)
    assert store.verify().ok


def test_stock_zarr_reads_a_shard(tmp_path):
    import zarr

    store, truth = fill(tmp_path / "c", [[1, 63, 130]])
    (name,) = store.shard_ids()
    group = zarr.open_group(tmp_path / "c" / "shards" / name, mode="r")
    attributes = dict(group.attrs)
    for sample, start, size in zip(
        *(attributes[k] for k in ("ids", "start", "num_tokens")), strict=True
    ):
        assert np.array_equal(group["hidden"][start : start + size], truth[sample][1])
        assert np.array_equal(group["tokens"][start : start + size], truth[sample][0])


@pytest.mark.parametrize("codec", ["lossless", "fast", "bits4"])
def test_tensorstore_reads_a_shard(tmp_path, codec):
    tensorstore = pytest.importorskip("tensorstore")
    store, truth = fill(tmp_path / "c", [[1, 63, 130]], codec=codec)
    info = store.shard(store.shard_ids()[0])

    def opened(array):
        path = f"{tmp_path}/c/shards/{info.id}/{array}/"
        kvstore = {"driver": "file", "path": path}
        return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()

    hidden, tokens = (opened(name).read().result() for name in ("hidden", "tokens"))
    reader = store.reader()
    for row, sample in enumerate(info.ids):
        start = int(info.chunk_starts[row]) * info.chunk_tokens
        part = slice(start, start + int(info.num_tokens[row]))
        assert np.array_equal(hidden[part], reader.read(sample)[1])
        assert np.array_equal(tokens[part], truth[sample][0])


@pytest.mark.filterwarnings("ignore:.*:ResourceWarning")
def test_stock_webdataset_reads_a_shard(tmp_path):
    import webdataset
    from numcodecs import blosc

    store, truth = fill(tmp_path / "c", [[1, 63, 130]], container="webdataset")
    (name,) = store.shard_ids()
    url = str(tmp_path / "c" / "shards" / f"{name}.tar")
    seen = []
    for sample in webdataset.WebDataset(url, shardshuffle=False).decode():
        ids_T, hidden_TLD = truth[sample["__key__"]]
        assert np.array_equal(sample["input_ids.npy"], ids_T)
        meta, data, parts = sample["meta.json"], sample["hidden.chunks"], []
        for size in meta["chunk_bytes"]:
            parts.append(np.frombuffer(blosc.decompress(data[: size - 4]), np.uint16))
            data = data[size:]
        read_TLD = np.concatenate(parts).reshape(-1, *meta["chunk_shape"][1:])
        assert np.array_equal(read_TLD[: meta["num_tokens"]], hidden_TLD)
        seen.append(sample["__key__"])
    assert seen == list(truth)


@pytest.mark.parametrize(("old", "new"), [("zarr", "webdataset"), ("webdataset", "zarr")])
def test_a_converted_cache_is_the_one_written_in_that_container(tmp_path, old, new):
    store, truth = fill(tmp_path / "a", [[1, 63, 200], [7]], container=old)
    snapshot = store.write_snapshot(rows_of(truth), {})
    reader = store.reader()
    reader.read(snapshot.ids[0])  # has the old container open
    assert store.convert(new) == 2
    assert store.convert(new) == 0
    fill(tmp_path / "b", [[1, 63, 200], [7]], container=new)
    trees = [
        {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (tmp_path / "a" / "shards", tmp_path / "b" / "shards")
    ]
    assert trees[0] == trees[1]
    assert store.snapshot().id == snapshot.id
    for name, (ids_T, hidden_TLD) in truth.items():
        for each in (store.reader(), reader):
            assert np.array_equal(each.read(name)[0], ids_T)
            assert np.array_equal(each.read(name)[1], hidden_TLD)
    assert store.verify().ok


def test_trap_8_special_values_keep_their_bits(tmp_path):
    import torch

    values = torch.tensor([7e4, 3e38, -0.0, 1e-40, -1e-45, float("inf")]).bfloat16()
    bits = np.concatenate([values.view(torch.int16).numpy().view(np.uint16), [0x7FC1, 0xFFFF]])
    assert 0x8000 in bits
    assert not np.isinf(values[:2].float().numpy()).any()
    hidden_TLD = np.resize(bits, (70, 3, 96)).astype(np.uint16)
    for number, container in enumerate(CONTAINERS):
        store = Store.create(tmp_path / str(number), SPEC)
        (chosen,) = samples([70])
        with store.write_shard([chosen], "lossless", container) as writer:
            writer.append(chosen[0], hidden_TLD)
        assert np.array_equal(store.reader().read(chosen[0])[1], hidden_TLD)


def test_snapshot_round_trip(tmp_path):
    store, truth = fill(tmp_path / "c", [[10, 20], [30]])
    rows = rows_of(truth)
    snapshot = store.write_snapshot(rows + rows[:1], {"max_tokens": 64}, name="first")
    again = Store.open(tmp_path / "c").snapshot("first")
    assert again.id == snapshot.id == store.resolve() == store.resolve(snapshot.id[:6])
    assert again.ids == sorted(truth)
    assert again.meta["max_tokens"] == 64
    by_id = {row.id: row for row in rows}
    for index, name in enumerate(again.ids):
        row = by_id[name]
        assert again.num_tokens[index] == row.num_tokens
        assert again.split[index] == row.split
        assert np.array_equal(again.mask(index), unpack_mask(row.mask, row.num_tokens))
        assert again.num_supervised[index] == again.mask(index).sum()
    assert sorted(again.rows(), key=lambda r: r.id) == sorted(rows, key=lambda r: r.id)
    assert len(again.indices("train")) == 2
    assert store.write_snapshot(rows[::-1], {}).id == snapshot.id


def test_a_snapshot_refuses_what_is_not_committed(tmp_path):
    store, truth = fill(tmp_path / "c", [[10]])
    _, other = fill(tmp_path / "d", [[11]])
    with pytest.raises(DataError, match="not in the cache"):
        store.write_snapshot(rows_of(truth | other), {})


def test_trap_12_another_spec_is_refused_and_each_field_named(tmp_path):
    Store.create(tmp_path / "c", SPEC)
    Store.create(tmp_path / "c", CaptureSpec.from_json(SPEC.to_json()))
    changes = {
        "weights": "x" * 32,
        "layer_ids": (0, 2, 4),
        "last_hidden": True,
        "backend": {"attention": "eager"},
        "hidden_size": 64,
        "tap": "layer_input",
    }
    for field, value in changes.items():
        other = CaptureSpec.from_json(SPEC.to_json() | {field: value})
        with pytest.raises(MismatchError, match=field):
            Store.create(tmp_path / "c", other)


def test_trap_12_a_mask_change_makes_a_new_snapshot_and_keeps_the_old(tmp_path):
    from dataclasses import replace

    store, truth = fill(tmp_path / "c", [[10, 20, 30]])
    rows = rows_of(truth)
    old = store.write_snapshot(rows, {})
    files = {p: p.read_bytes() for p in (tmp_path / "c" / "snapshots").glob(f"{old.id}*")}
    changed = [replace(row, mask=pack_mask(np.ones(row.num_tokens))) for row in rows]
    new = store.write_snapshot(changed, {})
    assert new.id != old.id
    assert all(path.read_bytes() == data for path, data in files.items())
    assert store.snapshot(old.id).rows() == old.rows()


def test_trap_13_ids_follow_content(tmp_path):
    (_, a_T), (_, b_T) = samples([50, 50])
    edited_T = b_T.copy()
    edited_T[17] += 1
    assert sample_id(edited_T) != sample_id(b_T)
    assert sample_id(a_T) == sample_id(a_T.tolist()) == sample_id(a_T.astype(np.int64))
    assert sample_id([1, 2, 3]) == "3a23880728429ca8143890fec62a5fc7"


def test_refusals(tmp_path):
    store, _ = fill(tmp_path / "c", [[10]])
    (chosen,) = samples([10], seed=9)
    with pytest.raises(ConfigError, match="no codec"):
        store.write_shard([chosen], "zip", "zarr")
    with pytest.raises(ConfigError, match="not the hash"):
        store.write_shard([("0" * 32, chosen[1])], "lossless", "zarr")
    with pytest.raises(DataError, match="no such sample"):
        store.reader().read("0" * 32)
    with pytest.raises(CacheError, match="not a cache"):
        Store.open(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(CacheError, match="not a cache"):
        Store.create(tmp_path / "full", SPEC)
    for ref in ("latest", "abcd", "../cache"):
        with pytest.raises(CacheError):
            store.snapshot(ref)
    writer = store.write_shard([chosen], "lossless", "zarr")
    with pytest.raises(ValueError, match="uint16"), writer:
        writer.append(chosen[0], np.zeros((10, 3, 96), np.int16))
    assert len(store.shard_ids()) == 1
    assert sorted(p.name for p in (tmp_path / "c" / "shards").iterdir() if "tmp" in p.name) == []


def test_trap_16_a_chunk_over_two_gib_is_refused_before_the_run(tmp_path):
    store = Store.create(tmp_path / "c", CaptureSpec("w", "Wide", tuple(range(4)), 1 << 22))
    (chosen,) = samples([3])
    with pytest.raises(ConfigError, match="limit"):
        store.write_shard([chosen], "lossless", "zarr")


def test_target_assets(tmp_path):
    import torch

    store, _ = fill(tmp_path / "c", [[10]])
    embed = torch.randn(20, 96).bfloat16()
    store.write_target_assets(embed, None, {"tied": True})
    loaded, head = load_frozen(store)
    assert loaded is head
    assert torch.equal(loaded, embed)
    assert store.target_assets().info == {"tied": True}
    with pytest.raises(MismatchError):
        store.write_target_assets(embed + 1, None, {"tied": True})
    assert store.verify().ok
    assert states(3).shape == (3, 3, 96)
