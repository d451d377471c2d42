"""Learning from the target's whole distribution: KL and L1 beside cross entropy, tile by tile.

The target's logits are its frozen head on its last hidden state (behind the final norm, cached by
stage one when asked). Neither the drafter's nor the target's logits ever exist for more than a
chunk of slots and a tile of the vocabulary. With q the drafter's and p the target's distribution,
W the head, and E_q[W] = sum_v q_v W_v:

    cross entropy   -log q_label          gradient to h:  E_q[W] - W_label
    KL              sum p log(p / q)                      E_q[W] - E_p[W]
    KL, top k       p cut to its k largest, made to sum to 1 again
    L1              sum |q - p|                           E_q[(s - E_q[s]) W],  s = sign(q - p)

L1 needs q and p normalised before the sign is known: a second pass over the tiles.

Letters: M slots, D width, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

TILE = 2048  # vocabulary rows of one tile


@dataclass(frozen=True)
class Mixture:
    """Weights of the three losses; `top_k` 0 keeps the target's whole distribution."""

    cross_entropy: float = 1.0
    kl: float = 0.0
    l1: float = 0.0
    top_k: int = 0

    @property
    def needs_target(self) -> bool:
        return self.kl > 0 or self.l1 > 0


class _Sum:
    """sum_v e^{x_v} and sum_v e^{x_v} W_v over tiles, with a running maximum."""

    def __init__(self, x_MD, wide):
        self.top = torch.full((len(x_MD), 1), -math.inf, dtype=wide, device=x_MD.device)
        self.total = torch.zeros_like(self.top)
        self.mean = torch.zeros(x_MD.shape, dtype=wide, device=x_MD.device)
        self.inner = torch.zeros_like(self.top)

    def add(self, logit, rows, other=None):
        """Adds a tile; `other`: also sums e^{x_v} other_v."""
        top = torch.maximum(self.top, logit.amax(1, keepdim=True))
        shrink, weight = (self.top - top).exp_(), (logit - top).exp_()
        self.total = self.total * shrink + weight.sum(1, keepdim=True)
        self.mean.mul_(shrink).add_(weight.to(rows.dtype) @ rows)
        if other is not None:
            self.inner = self.inner * shrink + (weight * other).sum(1, keepdim=True)
        self.top = top

    def finish(self):
        """log sum, E[W], E[other]."""
        log = self.top + self.total.log()
        return log, self.mean.div_(self.total), self.inner / self.total


class _Distill(torch.autograd.Function):
    """Losses of M slots; their gradient to h is ready after the forward."""

    @staticmethod
    def forward(ctx, h_MD, target_MD, label_M, head, mixture, chunk):
        wide = torch.float64 if h_MD.dtype == torch.float64 else torch.float32
        out = torch.zeros(4, len(h_MD), dtype=wide, device=h_MD.device)  # nll, kl, l1, hit
        grad = torch.zeros(h_MD.shape, dtype=wide, device=h_MD.device)
        for start in range(0, len(h_MD), chunk):
            part = slice(start, start + chunk)
            _chunk(
                h_MD[part], target_MD[part], label_M[part], head, mixture, out[:, part], grad[part]
            )
        ctx.save_for_backward(grad.to(h_MD.dtype))
        nll, kl, l1, hit = out
        loss = mixture.cross_entropy * nll + mixture.kl * kl + mixture.l1 * l1
        ctx.mark_non_differentiable(nll, kl, l1, hit)
        return loss, nll, kl, l1, hit > 0

    @staticmethod
    def backward(ctx, grad_loss, *_):
        (grad,) = ctx.saved_tensors
        return grad * grad_loss[:, None].to(grad.dtype), None, None, None, None, None


def _tiles(head, dtype):
    for low in range(0, len(head), TILE):
        yield low, head[low : low + TILE].to(dtype)


def _chunk(h, target, label, head, mixture: Mixture, out, grad) -> None:
    wide = grad.dtype
    drafter, teacher = _Sum(h, wide), _Sum(h, wide)
    label_logit = torch.zeros(len(h), 1, dtype=wide, device=h.device)
    best = None  # the target's top k so far: logits, tokens, the drafter's logits
    for low, rows in _tiles(head, h.dtype):
        logit, goal = (h @ rows.T).to(wide), (target @ rows.T).to(wide)
        inside = ((label >= low) & (label < low + len(rows)))[:, None]
        at = (label - low).clamp(0, len(rows) - 1)[:, None]
        label_logit += torch.where(inside, logit.gather(1, at), 0.0)
        drafter.add(logit, rows)
        if mixture.top_k:
            best = _merge(best, goal, logit, low, mixture.top_k)
        if mixture.l1 or not mixture.top_k:
            teacher.add(goal, rows, goal - logit)
    log_q, mean_q, _ = drafter.finish()
    out[0] = (log_q - label_logit).squeeze(1)
    out[3] = (label_logit == drafter.top).squeeze(1).to(wide)
    if mixture.cross_entropy:
        grad.add_(mean_q - head[label].to(wide), alpha=mixture.cross_entropy)
    if mixture.l1 or not mixture.top_k:
        log_p, mean_p, gap = teacher.finish()
        out[1] = (gap - log_p + log_q).squeeze(1)
    if mixture.top_k:
        goal, token, logit = best
        log_top = goal.log_softmax(1)
        top = log_top.exp()
        out[1] = (top * (log_top - logit + log_q)).sum(1)
        mean_top = torch.einsum("mk,mkd->md", top, head[token].to(wide))
    if mixture.kl:
        grad.add_(mean_q - (mean_top if mixture.top_k else mean_p), alpha=mixture.kl)
    if not mixture.l1:
        return
    signed = torch.zeros_like(grad)
    share = torch.zeros_like(log_q)
    for _, rows in _tiles(head, h.dtype):
        q = ((h @ rows.T).to(wide) - log_q).exp_()
        difference = q - ((target @ rows.T).to(wide) - log_p).exp_()
        out[2] += difference.abs().sum(1)
        q.mul_(difference.sign_())
        share += q.sum(1, keepdim=True)
        signed.add_(q.to(rows.dtype) @ rows)
    grad.add_(signed - share * mean_q, alpha=mixture.l1)


def _merge(best, goal, logit, low, k):
    value, at = goal.topk(min(k, goal.shape[1]), 1)
    found = (value, at + low, logit.gather(1, at))
    if best is None:
        return found
    joined = [torch.cat(pair, 1) for pair in zip(best, found, strict=True)]
    value, at = joined[0].topk(min(k, joined[0].shape[1]), 1)
    return value, joined[1].gather(1, at), joined[2].gather(1, at)


def distill(h_MD, target_MD, label_M, head, mixture: Mixture, chunk: int):
    """Per slot: the mixture's loss (with gradient), and nll, KL, L1 and hits (without).

    Args:
        h_MD: the drafter's hidden states behind its norm.
        target_MD: the target's last hidden states behind its norm, at the token before the label.
        label_M: int64.
        head: [V, D], frozen.
        chunk: slots at once.
    """
    return _Distill.apply(h_MD, target_MD.to(h_MD.dtype), label_M, head, mixture, chunk)
