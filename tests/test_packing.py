"""Packed batches: the same states as padded ones, and only where a test proves it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shared.config import Dtype, TargetConfig
from shared.errors import ConfigError, MismatchError, TargetError
from shared.store import Store
from shared.target import TargetInfo, load_target
from stage1_extract import batching
from stage1_extract.batching import choose_batching, is_candidate
from stage1_extract.build import extract
from stage1_extract.checks import packing_test, relative_error, self_test
from stage1_extract.config import Batching, CacheConfig, DataConfig, ExtractConfig
from stage1_extract.plan import pack_batches, plan_job
from tests.test_extract import config
from tests.test_large_targets import states

SAMPLES = [np.arange(n, 2 * n, dtype=np.int32) % 250 for n in (40, 25, 70)]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))


def target_of(family: str, **changes):
    cfg = TargetConfig(family, f"random://{family}", dtype=Dtype.float32, num_taps=3, **changes)
    return load_target(cfg)


def test_batches_are_filled_end_to_end():
    assert pack_batches([5, 4, 4, 3, 1], 8) == [(0, 1), (1, 3), (3, 5)]
    assert pack_batches([9, 1], 8) == [(0, 1), (1, 2)]
    (shard,) = plan_job(
        [("a" * 32, 6), ("b" * 32, 2), ("c" * 32, 2)], 1, 100, 8, packed=True
    ).shards
    assert shard.batches == ((0, 2), (2, 3))


@pytest.mark.slow
def test_packed_and_padded_batches_give_the_same_states(tmp_path):
    chosen = "target.model=random://qwen3"
    extract(config(tmp_path, chosen, cache="padded"))
    extract(config(tmp_path, chosen, "batching=packed", cache="packed"))
    padded, packed = Store.open(tmp_path / "padded"), Store.open(tmp_path / "packed")
    assert packed.spec.backend == padded.spec.backend | {"batching": "packed"}
    ours, theirs = states(packed), states(padded)
    assert ours.keys() == theirs.keys()
    for name, hidden in ours.items():
        assert relative_error(hidden, theirs[name]) < 1e-3
    with pytest.raises(MismatchError, match=r"backend\.batching"):
        extract(config(tmp_path, chosen, "batching=packed", cache="padded"))
    # auto goes on with what the cache holds, and nothing has to be run again.
    assert extract(config(tmp_path, chosen, cache="packed")) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_attention_keeps_packed_documents_apart(family):
    target = target_of(family)
    assert packing_test(target, target.spec(), SAMPLES) < 1e-5
    assert max(self_test(target, target.info.spec("cpu", packed=True), SAMPLES).values()) < 1e-3


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe"])
def test_trap_07_recurrent_layers_without_a_packing_kernel_are_refused(family):
    target = target_of(family)
    with pytest.raises(TargetError, match="leak"):
        self_test(target, target.info.spec("cpu", packed=True), SAMPLES)


def test_trap_07_a_leak_below_a_batchs_own_rounding_is_found():
    target = target_of("qwen3")

    def leak(_module, _args, output):
        # What a decaying state carries over a document's end: little, and to later tokens only.
        return output + 1e-3 * output.cumsum(1) / 20

    target.layers[1].register_forward_hook(leak)
    with pytest.raises(TargetError, match="packed documents leak"):
        packing_test(target, target.spec(), SAMPLES)


def test_auto_packs_only_where_every_layer_has_a_kernel_for_it(tmp_path, monkeypatch):
    config = SimpleNamespace(num_hidden_layers=8, hidden_size=4, layer_types=["full_attention"])
    config.get_text_config = lambda decoder: config
    cfg = TargetConfig("x", "x", attention="flash_attention_2", num_taps=3)
    info = TargetInfo(cfg, config, "X", "w", "none", None)
    assert is_candidate(info, "cuda")
    config.layer_types = ["linear_attention"]
    assert not is_candidate(info, "cpu")  # torch's delta rule
    monkeypatch.setattr("shared.target.gdn_backend", lambda device: "fla 9.9")
    assert is_candidate(info, "cuda")
    wanted = ExtractConfig(
        target=cfg, data=DataConfig(), cache=CacheConfig(root=str(tmp_path / "cache"))
    )
    target = SimpleNamespace(info=info, device="cuda")
    monkeypatch.setattr(batching, "load_target", lambda *args: target)
    monkeypatch.setattr(batching, "self_test", lambda *args: {})
    loaded: list = []
    assert choose_batching(wanted, info, "cuda", [], loaded) is True
    assert loaded == [target]  # extraction goes on with it

    def fail(*args):
        raise TargetError("packed documents leak")

    monkeypatch.setattr(batching, "self_test", fail)
    assert choose_batching(wanted, info, "cuda", [], []) is False
    wanted.batching = Batching.padded
    assert choose_batching(wanted, info, "cuda", [], []) is False
    wanted.batching, wanted.self_test = Batching.packed, False
    with pytest.raises(ConfigError, match="unproven"):
        choose_batching(wanted, info, "cuda", [], [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_flash_attention_and_fla_keep_packed_documents_apart(family):
    pytest.importorskip("flash_attn")
    cfg = TargetConfig(family, f"random://{family}", num_taps=3, attention="flash_attention_2")
    target = load_target(cfg, "cuda")
    self_test(target, target.info.spec("cuda", packed=True), SAMPLES)
