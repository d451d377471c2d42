"""The cache against its target: recompute, repair, and imports that one can train from."""

import json

import numpy as np
import pytest

from shared.cli import main
from shared.errors import MismatchError
from shared.reader import open_shard
from shared.store import Store
from stage1_extract.exchange import export_to, import_from
from stage2_train.build import train_run
from stage2_train.config import EvalConfig
from stage2_train.evaluate import measure
from tests.target_cache import TARGET, target_cache
from tests.tiny_cache import tiny_config

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))


@pytest.fixture
def extracted(tmp_path):
    """A cache as `extract` writes it, several shards."""
    lines = [
        {"messages": [{"role": "user", "content": f"Say {n}."},
                      {"role": "assistant", "content": f"{n} is it, " * (3 + n % 5)}]}
        for n in range(14)
    ]  # fmt: skip
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "extract", "target=tiny_qwen3_5", f"data.paths=[{data}]", f"cache.root={tmp_path}/cache",
        "cache.shard_bytes=80000", "batch_tokens=400", "device=cpu",
    ]  # fmt: skip
    assert main(words) == 0
    return Store.open(tmp_path / "cache"), words


def damage(store: Store, sample: str) -> None:
    """Flips a bit of a sample's first chunk."""
    name, row = store.committed()[sample]
    info = store.shard(name)
    place = int(open_shard(store, info).starts[row]) + 40
    path = store.files.path(f"shards/{name}/hidden/c/0/0/0")
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def test_recompute_and_repair_run_the_target_again(extracted, capsys):
    store, words = extracted
    root, ids = store.root, store.snapshot().ids
    truth = {name: store.reader().read(name)[1] for name in ids}
    assert main(["cache", "verify", root, "recompute=5", "device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "layer 1: relative difference" in shown
    assert "5 samples" in shown
    lost = {ids[2], ids[9]}
    for name in lost:
        damage(store, name)
    assert main(["cache", "verify", root]) == 1
    shown = capsys.readouterr().out
    assert all(name in shown for name in lost)
    before = {name: store.files.mtime(f"shards/{name}.json") for name in store.shard_ids()}
    assert main(["cache", "repair", root, "dry_run=false", "device=cpu"]) == 0
    assert f"{len(lost)} samples to run again" in capsys.readouterr().out
    again = Store.open(root)
    assert again.resolve() == store.resolve()
    untouched = set(before) & set(again.shard_ids())
    assert len(untouched) >= len(before) - 2
    assert all(again.files.mtime(f"shards/{n}.json") == before[n] for n in untouched)
    for name in ids:
        hidden_TLD = again.reader().read(name)[1]
        if name not in lost:
            assert np.array_equal(hidden_TLD, truth[name])
    assert main(["cache", "verify", root, f"recompute={len(ids)}", "device=cpu"]) == 0
    assert main(words) == 0
    assert "0 run, 14 in the cache before" in capsys.readouterr().out


def test_recompute_finds_states_of_other_tokens(tmp_path, capsys):
    store = target_cache(tmp_path / "cache")
    assert main(["cache", "verify", store.root, "recompute=4", "device=cpu"]) == 0
    wrong = Store.create(tmp_path / "wrong", store.spec)
    reader = store.reader()
    samples = [(name, reader.read_tokens(name)) for name in store.snapshot().ids]
    with wrong.write_shard(samples, "lossless", "zarr") as writer:
        for name, _ in samples:
            writer.append(name, np.roll(reader.read(name)[1], 1, axis=0))  # trap 3: off by one
    for name in store.files.names("target"):
        wrong.files.write(f"target/{name}", store.files.read(f"target/{name}"))
    wrong.write_snapshot(store.snapshot().rows(), {})
    assert main(["cache", "verify", wrong.root, "recompute=4", "device=cpu"]) == 1
    assert "BAD layer" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["speculators", "deepspec"])
def test_an_import_with_its_target_is_proven_and_trains(tmp_path, kind, capsys):
    last = kind != "speculators"
    store = target_cache(tmp_path / "cache", last_hidden=last)
    out, layers = tmp_path / "out", list(store.spec.layer_ids)
    export_to(kind, store, "latest", str(out))
    words = [
        "cache", "import", str(tmp_path / "new"), kind, str(out), f"layer_ids={layers}",
        "target=tiny_qwen3_5", "target.name=tiny", f"target.model='{TARGET.model}'", "device=cpu",
    ]  # fmt: skip
    assert main(words) == 0
    new = Store.open(tmp_path / "new")
    assert new.spec.weights == store.spec.weights
    assert set(new.snapshot().ids) == set(store.snapshot().ids)
    assert new.target_assets().info["mask_token_id"] == 259
    assert main(["cache", "verify", new.root, "recompute=3", "device=cpu"]) == 0
    heldout = len(new.snapshot().indices("heldout"))
    train_run(tiny_config(new.root, tmp_path / "run", steps=3))
    if heldout:
        found = measure(EvalConfig(run_dir=str(tmp_path / "run"), max_new_tokens=8, device="cpu"))
        assert found["output_identical"][0] == found["output_identical"][1]
    damage(new, new.snapshot().ids[0])
    assert main(["cache", "repair", new.root, "dry_run=false"]) == 1
    assert "import with the same files" in capsys.readouterr().out
    assert main(words) == 0
    assert Store.open(new.root).verify().ok


def test_an_import_of_other_layers_is_refused_and_the_right_ones_are_named(tmp_path):
    store = target_cache(tmp_path / "cache")
    export_to("speculators", store, "latest", str(tmp_path / "out"))
    layers = [layer + 1 for layer in store.spec.layer_ids]
    with pytest.raises(MismatchError, match=rf"of layer {layers[0]} .*of layer {layers[0] - 1}\)"):
        import_from(
            "speculators", str(tmp_path / "out"), str(tmp_path / "new"), codec="lossless",
            container="zarr", layer_ids=layers, weights=None, target=TARGET, device="cpu",
        )  # fmt: skip
    assert not (tmp_path / "new").exists()
