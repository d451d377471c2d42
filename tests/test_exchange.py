"""From and to other tools' files; nothing untrusted is unpickled, nothing bad comes in."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from store_tools import rows_of, samples, states

from shared.errors import ConfigError, DataError
from shared.spec import CaptureSpec
from shared.store import Store
from stage1_extract.exchange import KINDS, export_to, import_from

LAYERS = [1, 3]
WITH_LAST = CaptureSpec("w", "toy/model", tuple(LAYERS), 32, last_hidden=True)


def made(root: Path, spec: CaptureSpec) -> tuple[Store, dict]:
    store, truth = Store.create(root, spec), {}
    chosen = samples([5, 70, 130, 64])
    with store.write_shard(chosen, "lossless", "zarr") as writer:
        for row, (name, ids_T) in enumerate(chosen):
            truth[name] = ids_T, states(len(ids_T), spec, seed=row)
            writer.append(name, truth[name][1])
    store.write_snapshot(rows_of(truth), {}, name="all")
    return store, truth


def bring(kind: str, source: Path, root: Path):
    layers = None if kind == "deepspec" else LAYERS + ([5] if kind == "speculators" else [])
    return import_from(
        kind, str(source), str(root), codec="lossless", container="zarr", layer_ids=layers,
        weights=None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_out_and_back_is_the_same(tmp_path, kind):
    spec = CaptureSpec("w", "toy", (1, 3, 5), 32) if kind == "speculators" else WITH_LAST
    store, truth = made(tmp_path / "a", spec)
    assert export_to(kind, store, "all", str(tmp_path / "out")) == 4
    if kind == "specforge":  # SpecForge's compressed form comes in as well
        first = next((tmp_path / "out").glob("*.ckpt"))
        first.with_suffix(".ckpt.gz").write_bytes(gzip.compress(first.read_bytes()))
        first.unlink()
    report = bring(kind, tmp_path / "out", tmp_path / "b")
    assert (report.samples, report.rejected) == (4, [])
    back = Store.open(tmp_path / "b")
    assert set(back.committed()) == set(truth)
    old, new = store.snapshot("all"), back.snapshot("imported")
    for number, name in enumerate(old.ids):
        ids_T, hidden_TLD = back.reader().read(name)
        assert np.array_equal(ids_T, truth[name][0])
        assert np.array_equal(hidden_TLD, truth[name][1])
        assert np.array_equal(new.mask(number), old.mask(number))
    assert back.verify().ok


def test_bad_files_are_left_out_with_a_reason(tmp_path):
    import torch

    store, _ = made(tmp_path / "a", WITH_LAST)
    out = tmp_path / "out"
    export_to("specforge", store, "all", str(out))
    files = sorted(out.glob("*.ckpt"))
    files[0].write_bytes(files[0].read_bytes()[:500])
    found = torch.load(files[1], weights_only=True)
    found["hidden_state"][0, 0, 0] = float("nan")
    torch.save(found, files[1])
    found = torch.load(files[2], weights_only=True)
    found["input_ids"] = found["input_ids"][:-1]
    torch.save(found, files[2])
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (ran,)

    (out / "evil.ckpt").write_bytes(pickle.dumps({"input_ids": Evil()}))
    torch.save({"input_ids": Evil()}, out / "evil2.ckpt")
    report = bring("specforge", out, tmp_path / "b")
    assert report.samples == 1
    assert len(report.rejected) == 5
    assert not ran.exists()
    assert any("not finite" in reason for _, reason in report.rejected)


def test_a_deepspec_manifest_can_not_name_files_elsewhere(tmp_path):
    store, _ = made(tmp_path / "a", WITH_LAST)
    out = tmp_path / "out"
    export_to("deepspec", store, "all", str(out))
    data = (out / "shard-00000.bin").read_bytes()
    (out / "shard-00000.bin").write_bytes(data[:-10])
    assert len(bring("deepspec", out, tmp_path / "b").rejected) == 1
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["shards"][0]["file_name"] = "../a/cache.json"
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="outside"):
        bring("deepspec", out, tmp_path / "c")


def test_the_wrong_kind_is_told_which_one_the_files_are(tmp_path):
    for kind in KINDS:
        spec = CaptureSpec("w", "toy", (1, 3, 5), 32) if kind == "speculators" else WITH_LAST
        store, _ = made(tmp_path / f"cache-{kind}", spec)
        export_to(kind, store, "all", str(tmp_path / kind))
        for wrong in KINDS.keys() - {kind}:
            with pytest.raises(DataError, match=f"its files look like {kind}'s.*ROOT {kind} "):
                bring(wrong, tmp_path / kind, tmp_path / "x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.md").touch()
    with pytest.raises(DataError, match=r"no \*\.ckpt or \*\.ckpt\.gz in it.*that specforge wrote"):
        bring("specforge", tmp_path / "notes", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_deepspec_index_that_ends_early_is_told(tmp_path):
    store, _ = made(tmp_path / "a", WITH_LAST)
    out = tmp_path / "out"
    export_to("deepspec", store, "all", str(out))
    index = (out / "samples.idx").read_bytes()
    (out / "samples.idx").write_bytes(index[:-10])
    report = bring("deepspec", out, tmp_path / "b")
    assert report.samples == 3
    ((_, reason),) = report.rejected
    assert reason == "the index has 3 samples, the manifest 4"


def test_refusals(tmp_path):
    store, _ = made(tmp_path / "a", CaptureSpec("w", "toy", (1, 3), 32))
    with pytest.raises(ConfigError, match="last hidden"):
        export_to("deepspec", store, "all", str(tmp_path / "x"))
    with pytest.raises(DataError, match="not empty"):
        export_to("speculators", store, "all", str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="nothing is known"):
        export_to("zip", store, "all", str(tmp_path / "x"))
    (tmp_path / "data_0.ckpt").touch()
    with pytest.raises(ConfigError, match="layer_ids"):
        import_from(
            "specforge", str(tmp_path), str(tmp_path / "b"), codec="lossless", container="zarr",
            layer_ids=None, weights=None,
        )  # fmt: skip
