"""Chunked cross entropy against torch's own over materialised logits."""

import pytest
import torch
import torch.nn.functional as F

from stage2_train import loss as loss_module
from stage2_train.batch import Batch
from stage2_train.loss import block_loss, estimated_acceptance, slot_weights


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
