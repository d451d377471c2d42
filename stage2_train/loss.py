"""Weighted cross entropy of the blocks' slots under the target's frozen head.

Logits of all slots never exist: they are made tile by tile (slots x vocabulary), and the gradient
to the hidden states, (softmax - one hot) W, is summed on the way with a running maximum, as in
flash attention. So no tile is made twice, and memory grows with neither slots x vocabulary.
Slots of weight zero are left out before anything is computed.

Letters: N anchors, B block, K = B-1 predicted slots, D width, M slots that count, V vocabulary.
"""

import math

import torch

from shared.errors import ConfigError
from stage2_train.config import LossConfig
from stage2_train.distill import Mixture, distill
from stage2_train.draft_vocabulary import rows_of

UNREACHABLE = 1e4  # nats of a label that can't be drafted, where slots behind it are weighted
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
        chunk = -(-size // -(-size // chunk)) if size else 1  # equal chunks: a thin one is slow
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


def pace(nll_NK, counts_NK, alpha: float) -> torch.Tensor:
    """D-PACE factors [N, K]: (prod of the drafter's own probability of labels 1 … k-1) ** alpha.

    A slot matters as far as the drafter can get to it. Slots that don't count have probability 1.
    """
    nll_NK = torch.where(counts_NK, nll_NK, 0.0)
    return torch.exp(-alpha * (nll_NK.cumsum(1) - nll_NK))


def block_loss(
    h_NBD, label_NK, weight_NK, head, *, denominator: float, chunk: int,
    mixture: Mixture | None = None, target_NKD=None, alpha: float = 0.0, ids_S=None,
):  # fmt: skip
    """sum over slots of weight * loss / denominator, and what the slots did.

    Losses of micro-batches and ranks add up: the denominator is the step's, not this call's.

    Args:
        h_NBD: hidden states behind the final norm; slot k = 1 … B-1 predicts label k-1.
        label_NK: int64; weight_NK: float, 0 where a slot doesn't count.
        head: the target's [V, D], frozen; with `ids_S` [S, D], the rows of these ids.
        denominator: sum of the weights of the whole optimizer step.
        chunk: slots of one tile.
        mixture: cross entropy alone if None.
        target_NKD: (states [T, D], index [N, K]): the target's last hidden states and which of
            them predicts each slot's label; needed for KL and L1.
        alpha: exponent of the D-PACE factors; 0: none. They aren't differentiated, and the
            denominator doesn't contain them.
        ids_S: the draft vocabulary, ascending; None: all tokens. A slot whose label isn't in it
            adds nothing to the loss and counts as wrong; D-PACE never gets behind it. KL and L1
            are then about the target's distribution over these tokens, made to sum to 1.

    Returns:
        a scalar, and sums over this call: `count`, `correct`, `nll` (each [K] per slot), `weight`
        and `weighted_nll` (scalars), without gradient; under a mixture `kl` and `l1` (scalars);
        `missed`, the weight of slots whose label isn't in the draft vocabulary, which `nll`,
        `weight` and `weighted_nll` leave out.
    """
    counts_NK = known_NK = weight_NK > 0
    if ids_S is not None:
        label_NK, covered_NK = rows_of(ids_S, label_NK)
        known_NK = counts_NK & covered_NK
    h_MD, label_M = h_NBD[:, 1:][known_NK], label_NK[known_NK]
    extra = {}
    if mixture is not None and mixture.needs_target:
        states_TD, index_NK = target_NKD
        loss_M, nll_M, kl_M, l1_M, hit_M = distill(
            h_MD, states_TD[index_NK[known_NK]], label_M, head, mixture, chunk
        )
        extra = {"kl": kl_M.sum(), "l1": l1_M.sum()}
    else:
        loss_M, hit_M = _CrossEntropy.apply(h_MD, label_M, head, chunk)
        nll_M = loss_M.detach()
    per_slot = torch.zeros(2, *weight_NK.shape, dtype=nll_M.dtype, device=nll_M.device)
    per_slot[0][known_NK], per_slot[1][known_NK] = hit_M.to(nll_M.dtype), nll_M
    weight_M = weight_NK[known_NK].to(nll_M.dtype)
    paced_M = weight_M
    if alpha:
        reach_NK = torch.where(known_NK, per_slot[1], UNREACHABLE)
        paced_M = weight_M * pace(reach_NK, counts_NK, alpha)[known_NK]
    stats = {
        "count": counts_NK.sum(0),
        "correct": per_slot[0].sum(0),
        "nll": per_slot[1].sum(0),
        "weight": weight_M.sum(),
        "weighted_nll": (weight_M * nll_M).sum(),
        "missed": (weight_NK * ~known_NK).sum(),
    }
    return (paced_M * loss_M).sum() / denominator, stats | extra


def batch_loss(
    h_NBD, batch, head, cfg: LossConfig, *, num_states: int, denominator: float, ids_S=None
):
    """`block_loss` of a batch under a configured objective.

    Args:
        batch: a `Batch`; its states behind the first `num_states` are the target's last hidden.
        num_states: tapped states that the drafter reads.
        ids_S: the drafter's draft vocabulary, to which `head` is cut.

    Raises:
        ConfigError: KL or L1 without a cached last hidden state.
    """
    block = h_NBD.shape[1]
    label_NK, counts_NK = batch.labels(block)
    mixture = Mixture(cfg.cross_entropy, cfg.kl, cfg.l1, cfg.top_k)
    target = None
    if mixture.needs_target:
        if batch.hidden_TLD.shape[1] <= num_states:
            raise ConfigError(
                "KL and L1 need the target's last hidden state, which this cache doesn't hold",
                where="loss",
                do="Extract with last_hidden=true, or set loss.kl=0 loss.l1=0",
            )
        slots = torch.arange(block - 1, device=batch.anchor_N.device)
        index_NK = (batch.anchor_N[:, None] + slots).clamp(max=len(batch.input_ids_T) - 1)
        target = (batch.hidden_TLD[:, num_states], index_NK)
    return block_loss(
        h_NBD, label_NK, slot_weights(counts_NK, cfg.gamma), head,
        denominator=denominator, chunk=cfg.chunk, mixture=mixture, target_NKD=target,
        alpha=cfg.dpace_alpha, ids_S=ids_S,
    )  # fmt: skip


def estimated_acceptance(correct_K, count_K) -> float:
    """Tokens per target pass if slots were right independently: 1 + sum_k prod_{j<=k} accuracy_j.

    A slot that never counted ends the sum.
    """
    accuracy = torch.where(count_K > 0, correct_K / count_K.clamp_min(1), 0.0)
    return 1.0 + accuracy.double().cumprod(0).sum().item()
