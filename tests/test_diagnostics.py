"""Figures of an update against hand-made ones."""

import math

import pytest
import torch
from test_muon import Mixed, config

from stage2_train.config import OptimizerConfig, OptimizerName
from stage2_train.diagnostics import Diagnostics, entropy, spectra
from stage2_train.gradients import clip_gradients
from stage2_train.optimizers import build_optimizer


def test_figures_of_a_plain_gradient_step():
    p = torch.nn.Parameter(torch.full((1, 4), 2.0))
    optimizer = build_optimizer(
        OptimizerConfig(name=OptimizerName.sgd, lr=0.1, momentum=0.0, weight_decay=0.5),
        [("p", p)],
        {},
    )
    p.grad = torch.full((1, 4), 3.0)
    diagnostics = Diagnostics(optimizer, 1, layers=True)
    diagnostics.before(1)
    report = clip_gradients([("p", p)], "global_norm", 1.0)
    optimizer.step()
    found = diagnostics.after(report)
    # the clipped gradient is 0.5 an entry, decay adds 0.5 * 2
    assert found["sgd/grad_norm"] == pytest.approx(6.0)
    assert found["sgd/clipped_grad_norm"] == pytest.approx(1.0)
    assert found["sgd/update_rms"] == pytest.approx(0.1 * 1.5)
    assert found["sgd/update_over_weight"] == pytest.approx(0.15 / 2)
    assert found["sgd/effective_decay"] == pytest.approx(0.05)
    assert found["sgd/decay_steps"] == pytest.approx(20)
    assert found["layer/p/update_rms"] == found["sgd/update_rms"]


def test_every_group_is_measured_and_only_when_due():
    model = Mixed()
    optimizer = build_optimizer(config(), model.named_parameters(), model.parts())
    diagnostics = Diagnostics(optimizer, 2)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(torch.randn(12, 32, generator=torch.Generator().manual_seed(step))).backward()
        diagnostics.before(step)
        report = clip_gradients(model.named_parameters())
        optimizer.step(checked=True)
        found = diagnostics.after(report)
        assert bool(found) == (step == 2)
        if found:
            assert {key.split("/")[0] for key in found} == {"muon", "adamw", "adamw_no_decay"}
            assert found["muon/update_rms"] > 0
            assert "muon/second_moment_norm" not in found
            assert found["adamw/second_moment_norm"] > 0
            assert found["adamw_no_decay/effective_decay"] == 0


def test_moonlight_updates_have_the_target_rms():
    model = Mixed()
    optimizer = build_optimizer(
        config(weight_decay=0.0, lr=1.0, polynomial_steps=8),
        model.named_parameters(),
        model.parts(),
    )
    diagnostics = Diagnostics(optimizer, 1, layers=True)
    for name, p in model.named_parameters():
        if name in {"q_proj.weight", "gate_up.weight"}:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    diagnostics.before(1)
    optimizer.step()
    found = diagnostics.after(clip_gradients([]))
    for name in ("q_proj.weight", "gate_up.weight"):
        assert found[f"layer/{name}/update_rms"] == pytest.approx(0.2, rel=0.01)


def test_entropy_is_one_for_equal_and_zero_for_rank_one():
    assert entropy(torch.ones(8)) == pytest.approx(1.0)
    assert entropy(torch.tensor([5.0, 0, 0, 0])) == 0.0
    two = entropy(torch.tensor([1.0, 1.0, 0, 0]))
    assert two == pytest.approx(math.log(2) / math.log(4))


def test_spectra_are_by_role_and_part():
    model = Mixed()
    optimizer = build_optimizer(config(), model.named_parameters(), model.parts())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = spectra(weights, optimizer.routing)
    assert {role: len(parts) for role, parts in found.items()} == {
        "q": 4, "gate": 1, "up": 1, "unused": 1,
    }  # fmt: skip
    expected = torch.linalg.svdvals(weights["q_proj.weight"][16:32])
    assert found["q"][1] == pytest.approx((expected / expected[0]).tolist(), rel=1e-5)
