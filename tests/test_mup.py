"""muP: multipliers by function, initial weights, the coordinate check, exact resume."""

import pytest
import torch
from tiny_cache import tiny_cache, tiny_config
from trainer_tools import stop_after

from shared.errors import ConfigError, Interrupted
from stage2_train import checkpoint, mup, mup_check
from stage2_train.build import train_run
from stage2_train.config import MuonScale, MupConfig, OptimizerConfig, OptimizerName
from stage2_train.drafter import Drafter
from stage2_train.optimizers import build_optimizer
from stage2_train.param_rules import route


def drafters(name, **options):
    """(config, base shapes, optimizer of a four times wider drafter, that drafter)."""
    optimizer = OptimizerConfig(name=OptimizerName(name), lr=1.0, weight_decay=0.1, **options)
    config = MupConfig(optimizer=optimizer, widths=[32, 128])
    base = mup_check.small(config)
    shapes = mup.shapes(mup_check.on_meta(base, config.num_states, 32))
    model = Drafter(mup_check.scaled(base, 128, 32), config.num_states, 128)
    made = build_optimizer(optimizer, model.named_parameters(), model.parts(), base=shapes)
    return config, shapes, made, model


def test_adamw_divides_by_the_width_and_leaves_vectors_and_convolutions():
    _, _, optimizer, model = drafters("adamw")
    groups = optimizer.group_of()
    for name, parameter in model.named_parameters():
        expected = 0.25 if parameter.ndim == 2 else 1.0
        assert groups[name]["base_lr"] == expected, name
    decays = {round(g["base_lr"] * g["weight_decay"], 9) for g in optimizer.param_groups}
    assert decays == {0.1, 0.0}, "the rate of fading is the base's"


@pytest.mark.parametrize(
    ("scale", "head_group", "part", "whole"),
    # 0.2 sqrt(max) is .2 sqrt(128), the wish sqrt(16/128) per head, sqrt(1) for a square matrix
    [("moonlight", 1, 1 / 4, 1 / 2), ("kj", 1, 1 / 2, 1.0), ("none", 0, 1.0, 1.0)],
)
def test_muon_keeps_the_activations_norm(scale, head_group, part, whole):
    _, _, optimizer, _ = drafters("muon", scale=MuonScale(scale), head_group=head_group)
    groups = optimizer.group_of()
    mixer = "layers.0.linear_attn"
    assert groups[f"{mixer}.q_proj.weight"]["base_lr"] == pytest.approx(part)
    assert groups[f"{mixer}.o_proj.weight"]["base_lr"] == pytest.approx(whole)
    assert groups["norm.weight"]["base_lr"] == 1.0
    optimizer.set_lr(0.3)
    ratios = [group["lr"] / group["base_lr"] for group in optimizer.param_groups]
    assert ratios == pytest.approx([0.3] * len(ratios))


def test_initial_matrices_shrink_with_the_fan_in():
    _, shapes, _, model = drafters("muon")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mup.rescale_init_(model.named_parameters(), shapes)
    for name, p in model.named_parameters():
        factor = 0.5 if p.ndim == 2 else 1.0
        assert torch.equal(p, before[name] * factor), name


def test_the_base_itself_is_untouched_and_other_architectures_are_refused(tmp_path):
    config, shapes, _, _ = drafters("muon")
    base = mup_check.small(config)
    model = mup_check.on_meta(base, config.num_states, 32)
    routing = route(model.named_parameters(), model.parts())
    assert set(mup.multipliers(config.optimizer, routing, shapes).values()) == {1.0}
    shapes.pop("fc.weight")
    with pytest.raises(ConfigError, match=r"doesn't know fc\.weight"):
        mup.multipliers(config.optimizer, routing, shapes)
    with pytest.raises(ConfigError, match="sgd"):
        mup.multipliers(OptimizerConfig(name=OptimizerName.sgd), routing, shapes)
    (tmp_path / "base.json").write_text("{}")
    with pytest.raises(ConfigError, match="no base-shapes file"):
        mup.read_base(tmp_path / "base.json")
    with pytest.raises(ConfigError, match="multiples"):
        mup_check.scaled(base, 40, 32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_activation_change_is_flat_with_mup_and_grows_without(name):
    lr = {"adamw": 6e-4, "muon": 3e-3}[name]
    optimizer = OptimizerConfig(name=OptimizerName(name), lr=lr, adamw_lr=6e-4)
    config = MupConfig(optimizer=optimizer, seeds=1)
    assert len(config.widths) == 4
    flat = mup_check.measure(config, use_mup=True).slopes
    growing = mup_check.measure(config, use_mup=False).slopes
    assert all(abs(slope) < 0.3 for slope in flat.values()), flat
    assert all(slope > 0.4 for slope in growing.values()), growing


@pytest.mark.slow
def test_a_resumed_run_is_not_scaled_again(tmp_path, monkeypatch):
    tiny_cache(tmp_path / "cache")

    def config(name):
        cfg = tiny_config(tmp_path / "cache", tmp_path / name, steps=6, optimizer="muon")
        cfg.optimizer.mup_base = str(tmp_path / "base.json")
        return cfg

    narrow = mup_check.on_meta(config("x").drafter, 2, 8)
    mup.write_base(tmp_path / "base.json", narrow)
    train_run(config("whole"))
    stop_after(monkeypatch, 3)
    with pytest.raises(Interrupted):
        train_run(config("parts"))
    monkeypatch.undo()
    train_run(config("parts"))
    whole, parts = (
        checkpoint.load(checkpoint.find(tmp_path / name, "last"))[0] for name in ("whole", "parts")
    )
    assert whole["fc.weight"].shape[1] == 2 * narrow.fc.weight.shape[1]
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.slow
def test_the_word_writes_the_page_and_the_base(tmp_path, capsys):
    config = MupConfig(widths=[32, 64], seeds=1, steps=1, report=str(tmp_path / "mup.html"),
                       base_shapes=str(tmp_path / "base.json"))  # fmt: skip
    assert mup_check.mup_word(config) == 0
    assert "With muP: flat." in (tmp_path / "mup.html").read_text()
    assert mup.read_base(tmp_path / "base.json")["fc.weight"]["shape"] == [576, 5 * 576]
    assert "without muP" in capsys.readouterr().out
