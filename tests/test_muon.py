"""Muon: parts, momentum, decay, scale, and torch.optim.Muon as the reference."""

import math

import pytest
import torch
from torch import nn

from shared.errors import CorruptionError, MismatchError, TrainingError
from stage2_train.config import MuonScale, OptimizerConfig, OptimizerName, Polynomial
from stage2_train.muon import Muon, shape_factor
from stage2_train.muon_chunks import plan_chunks
from stage2_train.optimizers import build_optimizer
from stage2_train.param_rules import by_head, grouped, interleaved, resolve, stacked, whole


def make(parameters, parts, lr=0.1, weight_decay=0.0, **settings):
    """Muon over tensors p0, p1, …"""
    names = {id(p): f"p{i}" for i, p in enumerate(parameters)}
    resolved = {
        id(p): resolve("p", part, p.shape[0]) for p, part in zip(parameters, parts, strict=True)
    }
    groups = [{"params": list(parameters), "lr": lr, "weight_decay": weight_decay}]
    return Muon(groups, resolved, names, **{"dtype": torch.float32} | settings)


def parameter(*shape, seed=0):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def gradient(tensor, step, seed=7):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("scale", ["kj", "moonlight"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_parity_with_torch_muon(dtype, tolerance, scale, nesterov, monkeypatch):
    if dtype == torch.float32:  # torch casts to bfloat16 whatever comes in
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    shapes = [(32, 32), (24, 40), (40, 24)]
    mine = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    start = [p.detach().clone() for p in mine]
    ours = make(
        mine,
        [whole("w")] * 3,
        lr=0.02,
        weight_decay=0.1,
        dtype=dtype,
        polynomial="kj",
        scale=scale,
        nesterov=nesterov,
    )
    reference = torch.optim.Muon(
        theirs,
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=nesterov,
        adjust_lr_fn="original" if scale == "kj" else "match_rms_adamw",
    )
    for step in range(20):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = gradient(a, step)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
    for a, b, s in zip(mine, theirs, start, strict=True):
        assert (a - b).norm() < tolerance * (b - s).norm()


def test_bf16_without_nesterov_keeps_the_buffer():
    p = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    p.grad = torch.eye(16, dtype=torch.bfloat16) * 2
    ours = make([p], [whole("w")], nesterov=False, momentum=0.95)
    ours.step()
    expected = torch.eye(16) * (1 - 0.95) * 2
    torch.testing.assert_close(ours.state[p]["momentum"], expected, rtol=1e-6, atol=0)


FUSED = {
    "stacked": (stacked([("q", 32, 2), ("k", 32, 2), ("v", 48, 3)]), torch.arange(112)),
    "by key head": (
        grouped(2, [("q", 16, 1), ("k", 16, 1), ("v", 32, 2)]),
        torch.cat(
            [
                torch.arange(0, 16),
                torch.arange(64, 80),
                torch.arange(16, 32),
                torch.arange(80, 96),
                torch.arange(32, 64),
                torch.arange(96, 128),
            ]
        ),
    ),
    "row-interleaved": (
        interleaved(["q", "k"], 32),
        torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)]),
    ),
}


@pytest.mark.parametrize("layout", FUSED)
@pytest.mark.parametrize("head_group", [1, 2, 0])
def test_trap_28_fused_storage_gives_the_separate_update(layout, head_group):
    parts, order = FUSED[layout]
    fused = parameter(len(order), 24)
    resolved = resolve("w", parts, len(order))
    roles = list(dict.fromkeys(part.role for part in resolved))
    separate, declared, start = [], [], 0
    for role in roles:
        mine = [part for part in resolved if part.role == role]
        heads = sum(part.heads for part in mine)
        rows = sum(part.rows for part in mine)
        separate.append(nn.Parameter(fused.detach()[order[start : start + rows]].clone()))
        declared.append(by_head(role, heads, rows // heads))
        start += rows
    one = make([fused], [parts], head_group=head_group, weight_decay=0.1)
    many = make(separate, declared, head_group=head_group, weight_decay=0.1)
    for step in range(3):
        fused.grad = gradient(fused, step)
        pieces = fused.grad[order].split([len(p) for p in separate])
        for p, piece in zip(separate, pieces, strict=True):
            p.grad = piece.clone()
        one.step()
        many.step()
    torch.testing.assert_close(
        fused.detach()[order], torch.cat([p.detach() for p in separate]), atol=1e-5, rtol=0
    )


def test_heads_do_not_couple():
    first, second = parameter(64, 32), parameter(64, 32)
    for p in (first, second):
        p.grad = gradient(p, 0)
    second.grad[48:] *= -3
    for p in (first, second):
        make([p], [by_head("q", 4, 16)]).step()
    assert torch.equal(first[:48], second[:48])
    assert not torch.equal(first[48:], second[48:])
    for p in (first, second):
        make([p], [whole("q")]).step()
    assert not torch.equal(first[:48], second[:48])


def test_decay_takes_the_unadjusted_lr_before_the_update():
    p = parameter(32, 64)
    p.grad = torch.zeros_like(p)
    before = p.detach().clone()
    make([p], [whole("w")], lr=0.1, weight_decay=0.5, scale="moonlight").step()
    assert torch.equal(p, before * (1 - 0.1 * 0.5))


@pytest.mark.parametrize(("shape", "rms"), [((4, 4), 0.5), ((4, 16), 0.25)])
def test_scale_sets_the_rms_of_a_full_rank_part(shape, rms):
    g = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    for scale, expected in (("none", rms), ("moonlight", 0.2)):
        p = nn.Parameter(torch.zeros(shape))
        p.grad = g.clone()
        make([p], [whole("w")], lr=1.0, polynomial="svd", scale=scale).step()
        assert p.detach().square().mean().sqrt() == pytest.approx(expected, rel=1e-4)
    assert shape_factor("kj", 64, 16, 0.2) == 2.0
    assert shape_factor("kj", 16, 64, 0.2) == 1.0


def test_the_scale_uses_the_parts_own_shape():
    p = nn.Parameter(torch.zeros(64, 16))
    p.grad = gradient(p, 0)
    make([p], [stacked([("gate", 32, 1), ("up", 32, 1)])], lr=1.0, polynomial="svd").step()
    for half in p.detach().split(32):
        assert half.square().mean().sqrt() == pytest.approx(0.2, rel=1e-3)


def test_gradients_are_not_written_and_grad_none_is_left_alone():
    used, unused = parameter(32, 32), parameter(32, 32)
    used.grad = gradient(used, 0)
    grad, idle = used.grad.clone(), unused.detach().clone()
    ours = make([used, unused], [whole("a"), whole("b")], weight_decay=0.1)
    ours.step()
    assert torch.equal(used.grad, grad)
    assert torch.equal(unused, idle)
    assert not ours.state[unused]["momentum"].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_names_the_parameter_and_changes_nothing(bad):
    first, second = parameter(32, 32), parameter(32, 32)
    first.grad, second.grad = gradient(first, 0), gradient(second, 1)
    second.grad[3, 4] = bad
    ours = make([first, second], [whole("a"), whole("b")], weight_decay=0.1)
    before = [p.detach().clone() for p in (first, second)]
    with pytest.raises(TrainingError, match="p1: the gradient is not finite"):
        ours.step()
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert not ours.state[first]["momentum"].any()


@pytest.mark.parametrize("polynomial", ["kj", "taylor", "polar_express", "svd"])
def test_a_zero_gradient_moves_nothing(polynomial):
    p = parameter(24, 32)
    p.grad = torch.zeros_like(p)
    before = p.detach().clone()
    make([p], [whole("w")], polynomial=polynomial).step()
    assert torch.equal(p, before)


def test_chunks_hold_every_part_once_and_are_bounded():
    shapes = [(96, 32), (96, 32), (64, 48)]
    parts = [by_head("q", 3, 32), stacked([("g", 48, 1), ("u", 48, 1)]), by_head("o", 2, 32)]
    matrices = [
        (i, s, resolve("w", p, s[0])) for i, (s, p) in enumerate(zip(shapes, parts, strict=True))
    ]
    for most in (1, 2 * 32 * 32, 10**9):
        chunks = plan_chunks(matrices, 1, most)
        assert all(c.size == 1 or c.size * c.rows * c.cols <= most for c in chunks)
        covered = [torch.zeros(s) for s in shapes]
        for chunk in chunks:
            stage = torch.ones(chunk.size, chunk.rows, chunk.cols)
            for run in chunk.runs:
                run.of(covered[run.index], 0).add_(run.at(stage))
        assert all(torch.equal(c, torch.ones_like(c)) for c in covered)
    assert len(plan_chunks(matrices, 1, 10**9)) == 3


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(32, 64, bias=False)
        self.gate_up = nn.Linear(32, 96)
        self.conv = nn.Conv1d(64, 64, 4, groups=64, bias=False)
        self.norm = nn.Parameter(torch.ones(32))
        self.row = nn.Parameter(torch.ones(1, 32))
        self.unused = nn.Linear(32, 32, bias=False)
        self.frozen = nn.Parameter(torch.ones(32, 32), requires_grad=False)

    def parts(self):
        return {
            "q_proj.weight": by_head("q", 4, 16),
            "gate_up.weight": stacked([("gate", 48, 1), ("up", 48, 1)]),
            "unused.weight": whole("unused"),
        }

    def forward(self, x_TD):
        x_TD = x_TD * self.norm * self.row
        y_TD = self.conv(self.q_proj(x_TD).mT[None])[0].mT
        return (self.gate_up(x_TD)[3:, :64] * y_TD).square().mean()


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(12, 32, generator=generator)).backward()
        optimizer.step()


def config(**changes):
    base = {"name": OptimizerName.muon, "lr": 0.01, "adamw_lr": 0.001, "weight_decay": 0.1}
    return OptimizerConfig(**base | changes)


@pytest.mark.parametrize("name", list(OptimizerName))
def test_trap_29_each_trained_parameter_moves(name):
    model = Mixed()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(config(name=name), model.named_parameters(), model.parts())
    train(model, optimizer, 5)
    still = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert still == {"unused.weight", "frozen"}


def test_groups_are_named_and_keep_their_ratio():
    optimizer = build_optimizer(config(), Mixed().named_parameters(), Mixed().parts())
    assert [(g["name"], g["base_lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("muon", 0.01, 0.1),
        ("adamw", 0.001, 0.1),
        ("adamw_no_decay", 0.001, 0.0),
    ]
    optimizer.set_lr(0.25)
    assert [g["lr"] for g in optimizer.param_groups] == [0.0025, 0.00025, 0.00025]


@pytest.mark.parametrize("name", list(OptimizerName))
def test_trap_26_state_round_trips_exactly_and_resume_is_bit_equal(name, tmp_path):
    from safetensors.torch import load_file, save_file

    straight, stopped = Mixed(), Mixed()
    optimizer = build_optimizer(config(name=name), straight.named_parameters(), straight.parts())
    train(straight, optimizer, 6)
    first = build_optimizer(config(name=name), stopped.named_parameters(), stopped.parts())
    train(stopped, first, 3)
    save_file(first.named_state(), tmp_path / "optimizer.safetensors")
    resumed = Mixed()
    resumed.load_state_dict(stopped.state_dict())
    second = build_optimizer(config(name=name), resumed.named_parameters(), resumed.parts())
    saved = load_file(tmp_path / "optimizer.safetensors")
    second.load_named_state(saved)
    for key, value in first.named_state().items():
        assert second.named_state()[key].dtype == value.dtype
        assert torch.equal(second.named_state()[key], value)
    train(resumed, second, 3, first=3)
    for (key, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), key

    key = min(saved)
    with pytest.raises(MismatchError, match=f"lacks {key}"):
        second.load_named_state({k: v for k, v in saved.items() if k != key})
    with pytest.raises(MismatchError, match="has new/momentum"):
        second.load_named_state(saved | {"new/momentum": torch.zeros(1)})
    with pytest.raises(CorruptionError, match="bfloat16"):
        second.load_named_state(saved | {key: saved[key].bfloat16()})


def test_state_exists_for_all_parameters_from_the_start():
    model = Mixed()
    optimizer = build_optimizer(config(), model.named_parameters(), model.parts())
    state = optimizer.named_state()
    assert state["unused.weight/momentum"].shape == (32, 32)
    assert {"norm/exp_avg", "norm/exp_avg_sq", "norm/step"} < set(state)
    assert not any(key.startswith("frozen") for key in state)
    assert all(value.dtype == torch.float32 for value in state.values())


def test_settings_are_compared_on_load():
    model = Mixed()
    optimizer = build_optimizer(config(), model.named_parameters(), model.parts())
    optimizer.check_settings(optimizer.settings())
    other = build_optimizer(
        config(polynomial=Polynomial.kj, head_group=0, scale=MuonScale.kj),
        model.named_parameters(),
        model.parts(),
    )
    with pytest.raises(MismatchError, match=r"head_group was '1', is '0'; polynomial was"):
        other.check_settings(optimizer.settings())


def test_trap_31_a_tied_tensor_is_updated_once():
    p = parameter(32, 32)
    optimizer = build_optimizer(
        config(weight_decay=0.0, polynomial=Polynomial.svd, lr=1.0),
        [("a", p), ("b", p)],
        {"a": whole("a"), "b": whole("a")},
    )
    before = p.detach().clone()
    p.grad = gradient(p, 0)
    optimizer.step()
    rms = (p.detach() - before).square().mean().sqrt()
    assert rms == pytest.approx(0.2, rel=1e-3)


def test_trap_27_fp32_masters_move_where_bf16_stands_still():
    norm = nn.Parameter(torch.ones(64))
    rounded = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    for p in (norm, rounded):
        optimizer = build_optimizer(OptimizerConfig(lr=6e-4, weight_decay=0.0), [("norm", p)], {})
        for step in range(100):
            p.grad = gradient(p, step).to(p.dtype)
            optimizer.step()
    assert (norm != 1).all()
    assert (rounded == 1).any()


def test_adamw_takes_the_textbook_step():
    theta = nn.Parameter(torch.full((1, 1), 10.0))
    optimizer = build_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.1), [("theta", theta)], {})
    theta.grad = torch.full((1, 1), 2.0)
    optimizer.step()
    assert theta.item() == pytest.approx(10 - 0.01 - 0.01, abs=1e-6)
    state = optimizer.named_state()
    for step in range(1, 20):
        if step > 1:
            optimizer.step()
        corrected = state["theta/exp_avg"] / (1 - 0.9**step)
        second = state["theta/exp_avg_sq"] / (1 - 0.95**step)
        assert float(corrected) == pytest.approx(2.0, rel=1e-5)
        assert float(second) == pytest.approx(4.0, rel=1e-5)


def test_adamw_first_step_is_a_sign_unless_eps_rules():
    theta = nn.Parameter(torch.zeros(1, 3))
    optimizer = build_optimizer(OptimizerConfig(lr=0.1, eps=1e-8), [("theta", theta)], {})
    theta.grad = torch.tensor([[5.0, -1e-3, 1e-10]])
    optimizer.step()
    assert theta[0, :2].tolist() == pytest.approx([-0.1, 0.1], rel=1e-4)
    # sqrt(v) + eps, not sqrt(v + eps): 1e-10 / (1e-10 + 1e-8)
    assert theta[0, 2].item() == pytest.approx(-0.1 * 1e-10 / (1e-10 + 1e-8), rel=1e-4)


@pytest.mark.parametrize(("lr", "converges"), [(0.1, True), (1.9, True), (2.1, False)])
def test_sgd_on_a_quadratic(lr, converges):
    theta = nn.Parameter(torch.ones(1, 1))
    optimizer = build_optimizer(
        OptimizerConfig(name=OptimizerName.sgd, lr=lr, momentum=0.0), [("theta", theta)], {}
    )
    for _ in range(100):
        theta.grad = theta.detach().clone()
        optimizer.step()
    assert (theta.abs().item() < 1e-2) == converges


def test_ema_and_sum_momentum_point_the_same_way():
    ours = nn.Parameter(torch.zeros(24, 40))
    optimizer = make([ours], [whole("w")], lr=1.0, polynomial="svd", scale="none")
    total, position = torch.zeros(24, 40), torch.zeros(24, 40)
    for step in range(5):
        ours.grad = gradient(ours, step)
        total = 0.95 * total + ours.grad
        u, _, vh = torch.linalg.svd(ours.grad + 0.95 * total, full_matrices=False)
        position -= u @ vh
        optimizer.step()
    assert (ours.detach() - position).norm() < 1e-4 * math.sqrt(24)
