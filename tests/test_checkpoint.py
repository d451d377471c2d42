"""Checkpoints: exact, atomic, and loud when damaged."""

import json
import math

import pytest
import torch

from shared.errors import CorruptionError, MismatchError
from stage2_train import checkpoint
from stage2_train.config import OptimizerConfig, OptimizerName
from stage2_train.optimizers import build_optimizer
from stage2_train.param_rules import whole


def _module(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))


def _optimizer(module, name):
    config = OptimizerConfig(name=OptimizerName(name), lr=1e-3)
    named = list(module.named_parameters())
    return build_optimizer(config, named, {n: whole(n) for n, p in named if p.ndim == 2})


def _step(module, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    module(torch.randn(4, 16, generator=generator)).square().sum().backward()
    optimizer.step()


def _save(run_dir, step=3, **state):
    module = _module()
    optimizer = _optimizer(module, "adamw")
    _step(module, optimizer, 0)
    path = checkpoint.save(
        run_dir, step, dict(module.named_parameters()), optimizer.named_state(), state
    )
    return path, module, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_trap_26_42_every_tensor_comes_back_as_it_was(tmp_path, name):
    module = _module()
    optimizer = _optimizer(module, name)
    for seed in range(3):
        _step(module, optimizer, seed)
    path = checkpoint.save(
        tmp_path, 3, dict(module.named_parameters()), optimizer.named_state(), {"digest": "ab"}
    )
    other = _module(seed=9)
    again = _optimizer(other, name)
    model, states, state = checkpoint.load(path)
    assert state["step"] == 3
    assert state["digest"] == "ab"
    checkpoint.load_parameters(other, model, path)
    again.load_named_state(states)
    saved, loaded = optimizer.named_state(), again.named_state()
    assert saved.keys() == loaded.keys()
    for key in saved:
        assert saved[key].dtype == loaded[key].dtype
        assert torch.equal(saved[key], loaded[key])
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    for seed in range(3, 6):
        _step(module, optimizer, seed)
        _step(other, again, seed)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


def test_trap_26_a_missing_or_unknown_key_is_an_error(tmp_path):
    path, module, optimizer = _save(tmp_path)
    model, states, _ = checkpoint.load(path)
    missing = dict(list(states.items())[1:])
    with pytest.raises(MismatchError):
        optimizer.load_named_state(missing)
    del model["0.bias"]
    with pytest.raises(MismatchError, match=r"0\.bias is missing"):
        checkpoint.load_parameters(module, model, path)
    model = checkpoint.load(path)[0]
    model["0.bias"] = model["0.bias"].bfloat16()
    with pytest.raises(MismatchError, match="bfloat16"):
        checkpoint.load_parameters(module, model, path)
    model = checkpoint.load(path)[0] | {"extra": torch.zeros(1)}
    with pytest.raises(MismatchError, match="extra is unknown"):
        checkpoint.load_parameters(module, model, path)


@pytest.mark.parametrize("file", [*checkpoint.FILES, "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_named(tmp_path, file, damage):
    path, _, _ = _save(tmp_path)
    data = bytearray((path / file).read_bytes())
    if damage == "flip":
        data[-5] ^= 1
    elif damage == "cut":
        del data[-1:]
    (path / file).unlink()
    if damage != "gone":
        (path / file).write_bytes(data)
    with pytest.raises(CorruptionError, match=file):
        checkpoint.load(path)


def test_a_half_written_checkpoint_is_not_seen(tmp_path):
    _save(tmp_path, 3)
    half = tmp_path / "checkpoints" / ".tmp-step-000004"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert checkpoint.steps(tmp_path) == [3]
    assert checkpoint.find(tmp_path, "last").name == "step-000003"
    _save(tmp_path, 4)
    assert checkpoint.steps(tmp_path) == [3, 4]


def test_finding_and_keeping(tmp_path):
    for step in (1, 2, 3, 4):
        _save(tmp_path, step)
    checkpoint.mark_best(tmp_path, 1, 2.0)
    checkpoint.prune(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [1, 3, 4]
    assert checkpoint.find(tmp_path, "best").name == "step-000001"
    assert checkpoint.find(tmp_path, "step-000003").name == "step-000003"
    for which in ("step-000002", "nonsense"):
        with pytest.raises(MismatchError, match="Have: step-000001"):
            checkpoint.find(tmp_path, which)
    checkpoint.prune(tmp_path, 0)
    assert checkpoint.steps(tmp_path) == [1, 4]


def test_trap_37_nan_and_infinity_never_win():
    assert checkpoint.is_better(3.0, {})
    assert checkpoint.is_better(2.0, {"heldout_loss": 3.0})
    for loss in (math.nan, math.inf, -math.inf, 3.0):
        assert not checkpoint.is_better(loss, {"heldout_loss": 3.0})
        assert loss == 3.0 or not checkpoint.is_better(loss, {})


def test_saving_a_step_again_replaces_it(tmp_path):
    _save(tmp_path, 3, digest="old")
    path, _, _ = _save(tmp_path, 3, digest="new")
    assert checkpoint.load_state(path)["digest"] == "new"


def test_a_state_from_before_it_was_sealed_is_read(tmp_path):
    path, _, _ = _save(tmp_path, digest="ab")
    state = checkpoint.load_state(path) | {"format": 1}
    (path / "state.json").write_text(json.dumps(state, indent=1) + "\n")
    assert checkpoint.load(path)[2]["digest"] == "ab"
