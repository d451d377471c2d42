"""Chunked cross entropy against torch's own over materialised logits."""

import pytest
import torch
import torch.nn.functional as F

from shared.errors import ConfigError
from stage2_train import distill as distill_module
from stage2_train import loss as loss_module
from stage2_train.batch import Batch
from stage2_train.config import LossConfig
from stage2_train.distill import Mixture
from stage2_train.loss import batch_loss, block_loss, estimated_acceptance, slot_weights


@pytest.fixture
def slots():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(9, 5, 16, generator=generator, dtype=torch.float64) * 3
    head = torch.randn(53, 16, generator=generator, dtype=torch.float64)
    label = torch.randint(0, 53, (9, 4), generator=generator)
    mask = torch.rand(9, 4, generator=generator) < 0.7
    return h, label, slot_weights(mask, 7.0), head


@pytest.mark.parametrize("tile", [7, 53, 4096])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_equals_cross_entropy_over_all_logits(slots, tile, chunk, monkeypatch):
    monkeypatch.setattr(loss_module, "TILE", tile)
    h, label, weight, head = slots
    h1, h2 = h.clone().requires_grad_(), h.clone().requires_grad_()
    total, stats = block_loss(h1, label, weight, head, denominator=3.5, chunk=chunk)
    logits = h2[:, 1:] @ head.T
    nll = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none").view(9, 4)
    expected = (nll * weight).sum() / 3.5
    (2 * total).backward()
    (2 * expected).backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(h1.grad, h2.grad)
    counts = weight > 0
    assert torch.equal(stats["count"], counts.sum(0))
    right = (logits.argmax(-1) == label) & counts
    assert torch.equal(stats["correct"].long(), right.sum(0))
    torch.testing.assert_close(stats["nll"], (nll * counts).sum(0))


def test_without_gradient_and_without_slots(slots):
    h, label, weight, head = slots
    with torch.no_grad():
        quiet, _ = block_loss(h, label, weight, head, denominator=1.0, chunk=4)
    loud, _ = block_loss(h.requires_grad_(), label, weight, head, denominator=1.0, chunk=4)
    assert torch.equal(quiet, loud.detach())
    nothing, stats = block_loss(h, label, weight * 0, head, denominator=1.0, chunk=4)
    nothing.backward()
    assert nothing == 0
    assert stats["count"].sum() == 0
    assert h.grad.abs().max() == 0


def test_trap_24_micro_batches_give_the_gradient_of_one(slots):
    h, label, weight, head = slots
    whole = h.clone().requires_grad_()
    block_loss(whole, label, weight, head, denominator=weight.sum(), chunk=4)[0].backward()
    pieces = h.clone().requires_grad_()
    for part in (slice(0, 1), slice(1, 7), slice(7, 9)):
        block_loss(
            pieces[part], label[part], weight[part], head, denominator=weight.sum(), chunk=4
        )[0].backward()
    torch.testing.assert_close(pieces.grad, whole.grad)


def test_trap_40_labels_stop_at_the_documents_end():
    lengths = [6, 5]
    batch = Batch.pack(
        ["a", "b"],
        [torch.arange(6), torch.arange(10, 15)],
        [torch.zeros(n, 1, 2, dtype=torch.bfloat16) for n in lengths],
        [torch.ones(n, dtype=torch.bool) for n in lengths],
        [torch.tensor([4]), torch.tensor([1, 3])],
    )
    label, mask = batch.labels(4)
    assert mask.tolist() == [[True, False, False], [True, True, True], [True, False, False]]
    assert label.tolist() == [[5, 0, 0], [12, 13, 14], [14, 0, 0]]


def test_slot_weights_decay_from_one():
    mask = torch.tensor([[True, True, False], [False, True, True]])
    weights = slot_weights(mask, 7.0)
    e = torch.exp(torch.tensor(-1 / 7.0))
    torch.testing.assert_close(weights, torch.tensor([[1, e, 0], [0, e, e * e]]))


def test_estimated_acceptance():
    correct, count = torch.tensor([3.0, 2.0, 0.0]), torch.tensor([4, 4, 0])
    assert estimated_acceptance(correct, count) == pytest.approx(1 + 0.75 + 0.375)


@pytest.fixture
def target(slots):
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(20, 16, generator=generator, dtype=torch.float64) * 2
    return states, torch.randint(0, 20, (9, 4), generator=generator)


def materialised(h, label, weight, head, target, mixture, alpha):
    states, index = target
    log_q = (h[:, 1:] @ head.T).log_softmax(-1)
    p = (states[index] @ head.T).softmax(-1)
    nll = -log_q.gather(-1, label[..., None]).squeeze(-1)
    l1 = (log_q.exp() - p).abs().sum(-1)
    if mixture.top_k:
        top, at = p.topk(mixture.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        kl = (top * (top.log() - log_q.gather(-1, at))).sum(-1)
    else:
        kl = (p * (p.log() - log_q)).sum(-1)
    own = torch.where(weight > 0, nll, 0.0).detach()
    factor = torch.stack([(-own[:, :k].sum(1)).exp() for k in range(4)], 1) ** alpha
    loss = mixture.cross_entropy * nll + mixture.kl * kl + mixture.l1 * l1
    return (loss * weight * factor).sum(), (kl * (weight > 0)).sum(), (l1 * (weight > 0)).sum()


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(
    "mixture",
    [Mixture(), Mixture(0, 1.0), Mixture(0, 0, 1.0), Mixture(0.1, 0.3, 0.9), Mixture(1, 2, 0.5, 5)],
)
def test_mixtures_equal_materialised_distributions(slots, target, mixture, alpha, monkeypatch):
    monkeypatch.setattr(distill_module, "TILE", 9)
    h, label, weight, head = slots
    h1, h2 = h.clone().requires_grad_(), h.clone().requires_grad_()
    total, stats = block_loss(
        h1, label, weight, head, denominator=2.0, chunk=5, mixture=mixture, target_NKD=target,
        alpha=alpha,
    )  # fmt: skip
    expected, kl, l1 = materialised(h2, label, weight, head, target, mixture, alpha)
    total.backward()
    (expected / 2).backward()
    torch.testing.assert_close(total, expected / 2)
    torch.testing.assert_close(h1.grad, h2.grad)
    if mixture.kl:
        torch.testing.assert_close(stats["kl"], kl)
    if mixture.l1:
        torch.testing.assert_close(stats["l1"], l1)


def test_target_states_belong_to_the_token_before_the_label():
    batch = Batch.pack(
        ["a"], [torch.arange(6)], [torch.randn(6, 3, 8).bfloat16()],
        [torch.ones(6, dtype=torch.bool)], [torch.tensor([1, 3])],
    )  # fmt: skip
    h = torch.zeros(2, 4, 8, dtype=torch.float64)
    # The drafter says what the target says: nothing is left of KL and L1.
    for n, anchor in enumerate([1, 3]):
        for slot in range(1, 4):
            h[n, slot] = batch.hidden_TLD[min(anchor + slot - 1, 5), 2].double()
    head = torch.randn(50, 8, dtype=torch.float64)
    cfg = LossConfig(cross_entropy=0.0, kl=1.0, l1=1.0)
    loss, stats = batch_loss(h, batch, head, cfg, num_states=2, denominator=1.0)
    assert abs(loss.item()) < 1e-12
    assert stats["count"].tolist() == [2, 2, 1]
    with pytest.raises(ConfigError, match="last hidden state"):
        batch_loss(h, batch, head, cfg, num_states=3, denominator=1.0)
