"""Weighted cross entropy of the blocks' slots under the target's frozen head.

Logits of all slots never exist: they are made tile by tile (slots x vocabulary), and the gradient
to the hidden states, (softmax - one hot) W, is summed on the way with a running maximum, as in
flash attention. So no tile is made twice, and memory grows with neither slots x vocabulary.
Slots of weight zero are left out before anything is computed.

Letters: N anchors, B block, K = B-1 predicted slots, D width, M slots that count, V vocabulary.
"""

import math

import torch

TILE = 2048  # vocabulary rows of one tile: with 512 slots 4 MiB of logits, which stay in cache


def slot_weights(weightmask_NK, gamma: float) -> torch.Tensor:
    """float32 [N, K]: exp(-(k-1)/gamma) for slot k = 1 … K where the slot counts, else 0."""
    slots = torch.arange(weightmask_NK.shape[1], device=weightmask_NK.device)
    return weightmask_NK * torch.exp(-slots / gamma)


class _CrossEntropy(torch.autograd.Function):
    """Negative log likelihood and hit of each row; the gradient is ready after the forward."""

    @staticmethod
    def forward(ctx, h_MD, label_M, head, chunk):
        needs_grad = ctx.needs_input_grad[0]
        wide = torch.float64 if h_MD.dtype == torch.float64 else torch.float32
        size, vocabulary = len(h_MD), len(head)
        top = torch.full((size, 1), -math.inf, dtype=wide, device=h_MD.device)
        total = torch.zeros_like(top)
        label_logit = torch.zeros_like(top)
        grad = torch.zeros(h_MD.shape, dtype=wide, device=h_MD.device) if needs_grad else None
        for low in range(0, vocabulary, TILE):
            rows = head[low : low + TILE].to(h_MD.dtype)
            for start in range(0, size, chunk):
                part = slice(start, start + chunk)
                logit = (h_MD[part] @ rows.T).to(wide)
                inside = (label_M[part] >= low) & (label_M[part] < low + len(rows))
                at = (label_M[part] - low).clamp(0, len(rows) - 1)[:, None]
                label_logit[part] += torch.where(inside[:, None], logit.gather(1, at), 0.0)
                new_top = torch.maximum(top[part], logit.amax(1, keepdim=True))
                shrink = (top[part] - new_top).exp_()
                logit.sub_(new_top).exp_()
                total[part] = total[part] * shrink + logit.sum(1, keepdim=True)
                top[part] = new_top
                if needs_grad:
                    weighted = logit.to(h_MD.dtype) @ rows
                    grad[part] = grad[part].mul_(shrink).add_(weighted)
        nll = (top + total.log() - label_logit).squeeze(1)
        # The label's logit comes from the same product as the maximum: equality is exact.
        hit = (label_logit == top).squeeze(1)
        if needs_grad:
            grad.div_(total).sub_(head[label_M].to(wide))
            ctx.save_for_backward(grad.to(h_MD.dtype))
        ctx.mark_non_differentiable(hit)
        return nll, hit

    @staticmethod
    def backward(ctx, grad_nll, _):
        (grad,) = ctx.saved_tensors
        return grad * grad_nll[:, None].to(grad.dtype), None, None, None


def block_loss(h_NBD, label_NK, weight_NK, head, *, denominator: float, chunk: int):
    """sum over slots of weight * cross entropy / denominator, and what the slots did.

    Losses of micro-batches and ranks add up: the denominator is the step's, not this call's.

    Args:
        h_NBD: hidden states behind the final norm; slot k = 1 … B-1 predicts label k-1.
        label_NK: int64; weight_NK: float, 0 where a slot doesn't count.
        head: the target's [V, D], frozen.
        denominator: sum of the weights of the whole optimizer step.
        chunk: slots of one tile.

    Returns:
        a scalar, and sums over this call: `count`, `correct`, `nll` (each [K] per slot), `weight`
        and `weighted_nll` (scalars), without gradient.
    """
    counts_NK = weight_NK > 0
    h_MD = h_NBD[:, 1:][counts_NK]
    weight_M = weight_NK[counts_NK]
    nll_M, hit_M = _CrossEntropy.apply(h_MD, label_NK[counts_NK], head, chunk)
    weighted = (weight_M.to(nll_M.dtype) * nll_M).sum()
    with torch.no_grad():
        per_slot = torch.zeros(2, *weight_NK.shape, dtype=nll_M.dtype, device=nll_M.device)
        per_slot[0][counts_NK], per_slot[1][counts_NK] = hit_M.to(nll_M.dtype), nll_M
        stats = {
            "count": counts_NK.sum(0),
            "correct": per_slot[0].sum(0),
            "nll": per_slot[1].sum(0),
            "weight": weight_M.sum(),
            "weighted_nll": weighted.detach(),
        }
    return weighted / denominator, stats


def estimated_acceptance(correct_K, count_K) -> float:
    """Tokens per target pass if slots were right independently: 1 + sum_k prod_{j<=k} accuracy_j.

    A slot that never counted ends the sum.
    """
    accuracy = torch.where(count_K > 0, correct_K / count_K.clamp_min(1), 0.0)
    return 1.0 + accuracy.double().cumprod(0).sum().item()
