"""Targets that one device doesn't hold as they are: spread, split over ranks, quantised."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shared import target_files, target_kernels, tensor_parallel, tiny
from shared.config import Dtype, TargetConfig
from shared.errors import ConfigError, TargetError
from shared.store import Store, load_frozen
from shared.target import describe_target, full_weight, load_target
from stage1_extract.build import extract
from stage1_extract.checks import relative_error
from tests.test_extract import config


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))


def saved(folder, family: str) -> TargetConfig:
    """A tiny model as a local directory."""
    tiny.build(f"random://{family}", "float32", "sdpa").save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return TargetConfig(
        name="dir", model=str(folder), dtype=Dtype.float32, num_taps=3, mask_token="<|mask|>"
    )


def states(store: Store) -> dict[str, torch.Tensor]:
    reader = store.reader()
    bits = {name: reader.read(name)[1] for name in store.snapshot().ids}
    return {
        name: torch.from_numpy(b.view(np.int16).copy()).view(torch.bfloat16)
        for name, b in bits.items()
    }


@pytest.mark.slow
def test_a_target_split_over_two_ranks_gives_one_workers_states(tmp_path):
    saved(tmp_path / "model", "qwen3_5")
    chosen = f"target.model={tmp_path / 'model'}"
    cfg = config(tmp_path, chosen, "data.limit=8", cache="one")
    extract(cfg)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "shared.cli", "extract", "target=tiny_qwen3_5", "cache.shard_bytes=80000"]
    command += [chosen, f"data.paths=[{tmp_path / 'chats.jsonl'}]", "data.limit=8"]
    command += [f"cache.root={tmp_path / 'split'}", "batch_tokens=400", "target.tensor_parallel=2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("snapshot ") == 1
    one, split = Store.open(tmp_path / "one"), Store.open(tmp_path / "split")
    assert split.spec.backend == one.spec.backend | {"tensor_parallel": "2"}
    assert split.verify().problems == []
    ours, theirs = states(split), states(one)
    assert ours.keys() == theirs.keys()
    for name, hidden in ours.items():
        assert relative_error(hidden, theirs[name]) < 1e-3
    for mine, wanted in zip(load_frozen(split), load_frozen(one), strict=True):
        assert torch.equal(mine, wanted)
    assert split.target_assets().info["target"]["tensor_parallel"] == 1


def test_ranks_and_maps_that_do_not_fit_are_refused(tmp_path):
    for overrides, part in (
        (["target.tensor_parallel=2"], "needs as many ranks, there are 1"),
        (["target.device_map=auto", "workers=2"], "only one worker"),
    ):
        with pytest.raises(ConfigError, match=part):
            extract(config(tmp_path, *overrides))
    assert not (tmp_path / "cache").exists()
    both = TargetConfig(name="x", model="x", device_map="auto", tensor_parallel=2)
    with pytest.raises(ConfigError, match="exclude"):
        target_files.placement(both, None, "cpu")


def test_out_of_memory_on_another_rank_of_a_shared_target_says_what_to_do(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    sent = [(torch.zeros(4, 100, dtype=torch.int64), ([100] * 4, [1], False, False))]
    monkeypatch.setattr("shared.capture.capture", full)
    monkeypatch.setattr(
        "torch.distributed.broadcast_object_list", lambda box: box.__setitem__(0, sent[0])
    )
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    info = SimpleNamespace(cfg=SimpleNamespace(tensor_parallel=4))
    target = SimpleNamespace(device=torch.device("cpu"), info=info)
    thread = ThreadPoolExecutor(1)  # a rank's own signals are not this test's
    with pytest.raises(TargetError, match=r"400 tokens on rank 3 .*batch_tokens=200; committed"):
        thread.submit(tensor_parallel.follow, target).result()
    thread.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("device_map", ["auto", "cpu"])
def test_a_mapped_target_gives_the_same_states(tmp_path, device_map):
    cfg = saved(tmp_path / "model", "qwen3")
    ids = torch.arange(40)[None] % 250
    from shared.capture import capture

    whole = capture(load_target(cfg), ids, [40], [1, 2, 4])
    mapped = load_target(replace(cfg, device_map=device_map))
    assert torch.equal(capture(mapped, ids, [40], [1, 2, 4]), whole)


@pytest.mark.slow
def test_a_weight_that_accelerate_keeps_elsewhere_is_found():
    from accelerate import cpu_offload

    layer = torch.nn.Linear(3, 4)
    wanted = layer.weight.detach().clone()
    cpu_offload(layer, execution_device="cpu")
    assert layer.weight.is_meta
    assert torch.equal(full_weight(layer), wanted)


def test_the_form_of_quantised_weights_is_in_the_spec(tmp_path, monkeypatch):
    cfg = saved(tmp_path / "model", "qwen3")
    path = tmp_path / "model" / "config.json"
    stored = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    info = describe_target(cfg)
    assert info.backend("cpu")["quantization"] == "fp8-dequantized"
    monkeypatch.setattr("shared.target.computes_fp8", lambda device: True)
    assert info.backend("cuda")["quantization"] == "fp8"
    with pytest.raises(ConfigError, match="fp8 already"):
        describe_target(replace(cfg, quantization={"quant_method": "torchao"}))
    assert target_kernels.computes_fp8("cpu") is False


def test_quantising_at_loading_is_in_the_spec_and_needs_its_package(tmp_path):
    cfg = saved(tmp_path / "model", "qwen3")
    wanted = {"quant_method": "fp8", "dequantize": False}
    info = describe_target(replace(cfg, quantization=wanted))
    assert json.loads(info.backend("cuda:1")["quantization"]) == wanted
    assert info.spec("cpu").digest != describe_target(cfg).spec("cpu").digest
    with pytest.raises(TargetError, match=r"fp8|FP8"):
        load_target(info.cfg, "cpu", info)
    with pytest.raises(TargetError, match="can't be loaded"):
        load_target(replace(cfg, quantization={"quant_method": "magic"}))


@pytest.mark.slow
def test_fp8_weights_are_computed_with_what_they_say(tmp_path):
    """On a CPU: dequantised, hence the states of a model that holds the rounded weights."""
    cfg = saved(tmp_path / "model", "qwen3")
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model" / "model.safetensors")
    plain, fp8 = {}, {}
    for name, tensor in weights.items():
        plain[name] = fp8[name] = tensor
        if "_proj" in name:
            rows, columns = (size // 8 for size in tensor.shape)
            blocks = tensor.view(rows, 8, columns, 8)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            rounded = (blocks / scale).to(torch.float8_e4m3fn)
            plain[name] = (rounded.float() * scale).view(tensor.shape)
            fp8[name] = rounded.view(tensor.shape)
            fp8[f"{name}_scale_inv"] = scale.view(rows, columns)
    save_file(plain, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    ids = torch.arange(40)[None] % 250
    from shared.capture import capture

    wanted = capture(load_target(cfg), ids, [40], [1, 2, 4])
    save_file(fp8, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "model" / "config.json"
    stored = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    info = describe_target(cfg)
    assert info.quantization == "fp8"
    ours = capture(load_target(cfg, "cpu", info), ids, [40], [1, 2, 4])
    assert relative_error(ours[0], wanted[0]) < 1e-2
