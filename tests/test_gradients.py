"""Finite check, norm and clipping of accumulated gradients."""

import pytest
import torch
from torch import nn

from stage2_train.gradients import clip_gradients


def named(*gradients):
    pairs = []
    for i, gradient in enumerate(gradients):
        p = nn.Parameter(torch.zeros_like(gradient))
        p.grad = gradient.clone()
        pairs.append((f"p{i}", p))
    return pairs


def test_global_norm_scales_all_alike():
    pairs = named(torch.full((3,), 2.0), torch.full((2, 2), -2.0))
    report = clip_gradients(pairs, "global_norm", 1.0)
    assert report.norm == pytest.approx(28**0.5)
    assert report.clipped
    assert report.norms == pytest.approx({"p0": 12**0.5, "p1": 4.0})
    flat = torch.cat([p.grad.flatten() for _, p in pairs])
    assert flat.norm() == pytest.approx(1.0)
    assert torch.allclose(flat, torch.tensor([2.0] * 3 + [-2.0] * 4) / 28**0.5)
    again = clip_gradients(pairs, "global_norm", 1.5)
    assert not again.clipped


def test_value_clamps_entries():
    pairs = named(torch.tensor([3.0, -0.5, -4.0]))
    report = clip_gradients(pairs, "value", 1.0)
    assert pairs[0][1].grad.tolist() == [1.0, -0.5, -1.0]
    assert report.factor == pytest.approx((2.25 / 25.25) ** 0.5)


def test_none_only_measures():
    pairs = named(torch.tensor([30.0, 40.0]))
    report = clip_gradients(pairs, "none", 1.0)
    assert report.norm == pytest.approx(50)
    assert not report.clipped
    assert pairs[0][1].grad.tolist() == [30.0, 40.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_named_and_nothing_is_touched(bad):
    pairs = named(torch.tensor([30.0, 40.0]), torch.tensor([1.0, bad]))
    report = clip_gradients(pairs, "global_norm", 1.0)
    assert report.nonfinite == ("p1",)
    assert pairs[0][1].grad.tolist() == [30.0, 40.0]


def test_squares_beyond_float32_are_no_alarm():
    pairs = named(torch.tensor([3e25, 4e25]))
    report = clip_gradients(pairs, "global_norm", 1.0)
    assert not report.nonfinite
    assert report.norm == pytest.approx(5e25, rel=1e-6)
    assert pairs[0][1].grad.tolist() == pytest.approx([0.6, 0.8])


def test_tied_and_gradless_parameters():
    pairs = named(torch.tensor([3.0, 4.0]))
    pairs += [("tied", pairs[0][1]), ("unused", nn.Parameter(torch.ones(2)))]
    report = clip_gradients(pairs, "global_norm", 1.0)
    assert report.norm == pytest.approx(5.0)
    assert list(report.norms) == ["tied"] or list(report.norms) == ["p0"]
    assert pairs[0][1].grad.tolist() == pytest.approx([0.6, 0.8])
    assert clip_gradients([("unused", nn.Parameter(torch.ones(2)))]).norm == 0.0
