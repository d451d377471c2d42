"""The gated delta rule on CPU: chunks solved at once, one scan over them, reads at any position.

Per value head a state S [K, V] runs over the tokens of a document,

    S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,      o_t = S_t^T q_t.

Inside a chunk of C tokens a triangular solve gives pseudo-values u - w S with the chunk's first
state S; it is prefix-consistent, so the state can be read at any cut. A block of B tokens that goes
on from F = S right before its anchor needs F only as Y = X F, with X [2B, K] known before the scan.
So the scan reads Y as it passes each anchor and no copy of F is made: nothing of size N x K x V.

Letters: T context tokens, N anchors, B block, H value heads, K / V key and value head dims,
C chunk, Z chunks, R rows read at once. Computed in the inputs' dtype, float32 or float64.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stage2_train.geometry import Geometry


@dataclass
class Tokens:
    """What the delta rule reads of a run of tokens; [..., H, K|V] and [..., H], q may be None."""

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor


class _ScanRead(torch.autograd.Function):
    """The scan over chunks with its reads. Sizes: see `scan_read`."""

    @staticmethod
    def forward(ctx, u, w, k, k_end, fade, x, x_decay, pair_decay, bounds):
        heads, anchors, rows, width = x.shape
        y = x.new_empty(heads, anchors, rows, u.shape[-1])
        state = x.new_zeros(heads, width, u.shape[-1])
        states, values = [], []
        for z in range(len(u)):
            value = torch.baddbmm(u[z], w[z], state, alpha=-1)
            states.append(state)
            values.append(value)
            first, last = bounds[z], bounds[z + 1]
            if last > first:
                xz = x[:, first:last].reshape(heads, -1, width)
                near = torch.bmm(xz, k[z].mT).view(heads, last - first, rows, -1)
                near = (near * pair_decay[:, first:last, None]).view(heads, xz.shape[1], -1)
                far = torch.bmm(xz, state).view(heads, last - first, rows, -1)
                far.mul_(x_decay[:, first:last, None, None])
                read = far.view(heads, xz.shape[1], -1).baddbmm_(near, value)
                y[:, first:last] = read.view(heads, last - first, rows, -1)
            state = torch.baddbmm(state * fade[z][:, None, None], k_end[z].mT, value)
        ctx.save_for_backward(w, k, k_end, fade, x, x_decay, pair_decay, *states, *values)
        ctx.bounds = bounds
        return y

    @staticmethod
    def backward(ctx, grad_y):
        w, k, k_end, fade, x, x_decay, pair_decay, *saved = ctx.saved_tensors
        chunks, bounds = len(w), ctx.bounds
        states, values = saved[:chunks], saved[chunks:]
        heads, _, rows, width = x.shape
        grad_u = torch.empty_like(torch.stack(values))
        grad_w, grad_k, grad_k_end = torch.empty_like(w), torch.zeros_like(k), torch.empty_like(k)
        grad_fade, grad_x = torch.empty_like(fade), torch.empty_like(x)
        grad_x_decay, grad_pair = torch.empty_like(x_decay), torch.empty_like(pair_decay)
        grad_state = torch.zeros_like(states[0])
        for z in reversed(range(chunks)):
            state, value = states[z], values[z]
            grad_k_end[z] = torch.bmm(value, grad_state.mT)
            grad_value = torch.bmm(k_end[z], grad_state)
            grad_fade[z] = (grad_state * state).sum((1, 2))
            grad_state = grad_state * fade[z][:, None, None]
            first, last = bounds[z], bounds[z + 1]
            if last > first:
                count = last - first
                xz = x[:, first:last].reshape(heads, count * rows, width)
                gy = grad_y[:, first:last].reshape(heads, count * rows, -1)
                pair = pair_decay[:, first:last, None]
                near = torch.bmm(xz, k[z].mT).view(heads, count, rows, -1)
                grad_near = torch.bmm(gy, value.mT).view(heads, count, rows, -1)
                grad_pair[:, first:last] = (grad_near * near).sum(2)
                grad_near = (grad_near * pair).view(heads, count * rows, -1)
                near = (near * pair).view(heads, count * rows, -1)
                grad_value.baddbmm_(near.mT, gy)
                grad_k[z] = torch.bmm(grad_near.mT, xz)
                through = torch.bmm(gy, state.mT)
                decay = x_decay[:, first:last, None, None]
                grad_x_decay[:, first:last] = (
                    (through * xz).view(heads, count, rows, width).sum((2, 3))
                )
                far = (through.view(heads, count, rows, width) * decay).view_as(xz)
                grad_x[:, first:last] = far.baddbmm_(grad_near, k[z]).view(
                    heads, count, rows, width
                )
                gy = (gy.view(heads, count, rows, -1) * decay).view_as(gy)
                grad_state.baddbmm_(xz.mT, gy)
            grad_u[z] = grad_value
            grad_w[z] = torch.bmm(grad_value, state.mT).neg_()
            grad_state = torch.baddbmm(grad_state, w[z].mT, grad_value, alpha=-1)
        return (
            grad_u, grad_w, grad_k, grad_k_end, grad_fade, grad_x, grad_x_decay, grad_pair, None,
        )  # fmt: skip


def scan_read(u, w, k, k_end, fade, x, x_decay, pair_decay, bounds) -> torch.Tensor:
    """Runs the state over the chunks and reads it for the rows of every anchor.

        values_z = u_z - w_z S_z
        y_n      = x_decay_n x_n S_z + ((x_n k_z^T) * pair_decay_n) values_z     (n stands in z)
        S_{z+1}  = fade_z S_z + k_end_z^T values_z

    Args:
        u: [Z, H, C, V], w, k, k_end: [Z, H, C, K], fade: [Z, H].
        x: [H, N, R, K], R rows an anchor; x_decay [H, N]; pair_decay [H, N, C].
        bounds: Z+1 indices into the anchors, which are sorted by chunk.

    Returns:
        y [H, N, R, V].
    """
    return _ScanRead.apply(u, w, k, k_end, fade, x, x_decay, pair_decay, bounds)


def chunk_solve(tokens: Tokens, apart, alive) -> tuple[torch.Tensor, ...]:
    """The delta rule inside runs of C tokens, up to the state S that they start from.

    Args:
        tokens: k, v [..., H, C, K|V], beta, g [..., H, C].
        apart: bool [..., C, C] without heads, True where token i mustn't see token j.
        alive: bool [..., C], True where the token sees the starting state; None: everywhere.

    Returns:
        u [..., C, V] and w [..., C, K] with pseudo-values = u - w S, the summed log decay
        [..., C] (float64), and the decay between tokens [..., C, C].
    """
    # Differences of a float32 sum lose digits where decay is strong: the few sums are float64.
    # They start anew with each document, so that no rounding of one reaches another.
    total = tokens.g.double() @ (~apart).double().mT
    apart = apart.unsqueeze(-3)
    between = _decay(total[..., :, None] - total[..., None, :], apart, tokens.k)
    system = tokens.beta[..., None] * (tokens.k @ tokens.k.mT) * between
    from_start = total.exp().to(tokens.k)
    if alive is not None:
        from_start = from_start * alive
    right = torch.cat(
        [tokens.beta[..., None] * tokens.v, (tokens.beta * from_start)[..., None] * tokens.k], -1
    )
    # Substitution stays near rounding where MASK slots have near-identical keys; a doubling
    # (Neumann) inverse loses everything there. Only the part below the diagonal is read.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([tokens.v.shape[-1], tokens.k.shape[-1]], -1)
    return u, w, total, between


class _Scan(torch.autograd.Function):
    """The scan over chunks, every chunk read at its start. Sizes: see `delta_rule`."""

    @staticmethod
    def forward(ctx, u, w, k_end, fade, x):
        rows = w.shape[2]
        both = torch.cat([w, x], 2)
        state = u.new_zeros(u.shape[1], w.shape[-1], u.shape[-1])
        far, states, values = torch.empty_like(u), [], []
        chunks = zip(u.unbind(), both.unbind(), k_end.mT.unbind(), fade[..., None].unbind(),
                     far.unbind(), strict=True)  # fmt: skip
        for u_z, both_z, k_z, fade_z, far_z in chunks:
            states.append(state)
            read = torch.bmm(both_z, state)
            far_z.copy_(read[:, rows:])
            values.append(u_z - read[:, :rows])
            state = torch.baddbmm(state * fade_z[..., None], k_z, values[-1])
        states, values = torch.stack(states), torch.stack(values)
        ctx.save_for_backward(both, k_end, fade, states, values)
        return values, far

    @staticmethod
    def backward(ctx, grad_values, grad_far):
        both, k_end, fade, states, values = ctx.saved_tensors
        rows = values.shape[2]
        grad_read = torch.cat([grad_values, grad_far], 2)
        grad_states = torch.empty_like(states)  # of the state behind each chunk
        grad_state = torch.zeros_like(states[0])
        chunks = zip(grad_read.unbind(), both.mT.unbind(), k_end.unbind(),
                     fade[..., None].unbind(), grad_states.unbind(), strict=True)  # fmt: skip
        for grad_z, both_z, k_z, fade_z, grad_state_z in reversed(list(chunks)):
            grad_state_z.copy_(grad_state)
            value = grad_z[:, :rows].baddbmm_(k_z, grad_state)
            value.neg_()  # the read behind w enters with a minus
            grad_state = torch.baddbmm(grad_state * fade_z[..., None], both_z, grad_z)
        grad_both = torch.matmul(grad_read, states.mT)
        return (
            grad_read[:, :, :rows].neg(), grad_both[:, :, :rows],
            torch.matmul(values, grad_states.mT), (grad_states * states).sum((2, 3)),
            grad_both[:, :, rows:],
        )  # fmt: skip


def delta_rule(tokens: Tokens, geometry: Geometry) -> torch.Tensor:
    """Reads of every token of a packed row; the CPU twin of FLA's `chunk_gated_delta_rule`.

    Args:
        tokens: q, k [T, H, K], v [T, H, V], beta, g [T, H].
        geometry: its documents and chunk count; anchors only say how far the row is read.

    Returns:
        o [T, H, V].
    """
    size = geometry.num_chunks * geometry.chunk

    def by_chunk(t):  # [T, H, *] -> [Z, H, C, *]
        if size > len(t):
            t = torch.cat([t, t.new_zeros(size - len(t), *t.shape[1:])])
        return t.unflatten(0, (-1, geometry.chunk)).transpose(1, 2).contiguous()

    q, k, v, beta, g = map(by_chunk, (tokens.q, tokens.k, tokens.v, tokens.beta, tokens.g))
    alive = geometry.alive_ZC[:, None]
    u, w, total, between = chunk_solve(Tokens(None, k, v, beta, g), geometry.apart_ZCC, alive)
    k_end, fade = _chunk_end(k, total, geometry)
    far = q * (total.exp().to(q) * alive)[..., None]
    values, far = _Scan.apply(u, w, k_end, fade, far)
    out = (q @ k.mT * between) @ values + far
    return out.transpose(1, 2).flatten(0, 1)[: len(tokens.k)]


def _chunk_end(k, total, geometry: Geometry):
    """Keys decayed to their chunk's end [Z, H, C, K], and what the state keeps over it [Z, H]."""
    end = total[:, :, -1]
    to_end = _decay(end[..., None] - total, geometry.fading_ZC[:, None], k)
    return k * to_end[..., None], end.exp().to(k) * geometry.alive_ZC[:, -1:]


def blocks_from_context(
    context: Tokens, block: Tokens, geometry: Geometry, *, read=None, bidirectional: bool = False
) -> torch.Tensor:
    """Reads of all blocks, each continued from the state right before its anchor.

    Args:
        context: k [Z, C, H, K], v [Z, C, H, V], beta, g [Z, C, H] by chunk; behind the row's end
            k and v are zero.
        block: q, k [N, B, H, K], v [N, B, H, V], beta, g [N, B, H].
        read: how the states are read; `read_by_scan` if None.
        bidirectional: see `block_rows`.

    Returns:
        o [N, B, H, V].
    """
    x, finish = block_rows(block, bidirectional)
    return finish((read or read_by_scan)(context, x, geometry))


def read_by_scan(context: Tokens, x: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Y = X F for every anchor, F the state right before it: [H, N, R, K] -> [H, N, R, V]."""
    chunks = Tokens(
        None,
        *(t.transpose(1, 2).contiguous() for t in (context.k, context.v, context.beta, context.g)),
    )
    u, w, total, _ = chunk_solve(chunks, geometry.apart_ZCC, geometry.alive_ZC[:, None])
    k_end, fade = _chunk_end(chunks.k, total, geometry)
    # Log decay summed from the chunk's start up to the token before the anchor.
    total_N = total.transpose(0, 1)[:, geometry.anchor_chunk_N]
    before = F.pad(total_N, (1, 0)).gather(
        2, (geometry.anchor_N % geometry.chunk)[None, :, None].expand(len(total_N), -1, 1)
    )
    pair_decay = _decay(before - total_N, geometry.hidden_NC, u)
    x_decay = before[..., 0].exp().to(u) * geometry.anchor_alive_N
    return scan_read(u, w, chunks.k, k_end, fade, x, x_decay, pair_decay, geometry.anchor_bounds)


def _decay(log, hidden, like):
    """exp(log) in the dtype of `like`, 0 where hidden: masked before exp, which could overflow."""
    return log.to(like).masked_fill(hidden, -math.inf).exp()


def block_rows(block: Tokens, bidirectional: bool = False):
    """The rows X with which blocks read their starting states, and how they go on from Y = X F.

    Args:
        block: q, k [N, B, H, K], v [N, B, H, V], beta, g [N, B, H].
        bidirectional: adds what a second recurrence from the block's end to its start, beginning
            empty, holds right before each token.

    Returns:
        x [H, N, 2B, K] and finish: y [H, N, 2B, V] -> o [N, B, H, V].
    """
    q, k, v = (t.permute(2, 0, 1, 3).contiguous() for t in (block.q, block.k, block.v))
    beta, g = (t.permute(2, 0, 1).contiguous() for t in (block.beta, block.g))
    size = k.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    u, w, total, between = chunk_solve(Tokens(None, k, v, beta, g), later, None)
    x = torch.cat([w, q * total.exp().to(q)[..., None]], 2)
    products = q @ k.mT
    scores = products * between
    from_end = None
    if bidirectional:
        turned = Tokens(None, *(t.flip(2) for t in (k, v, beta, g)))
        u_turned, _, _, between = chunk_solve(turned, later, None)
        from_end = ((products.flip(2, 3) * between).tril(-1) @ u_turned).flip(2)

    def finish(y):
        y_w, y_q = y.split(size, 2)
        out = y_q + scores @ (u - y_w)
        return (out if from_end is None else out + from_end).permute(1, 2, 0, 3)

    return x, finish


def run_state(tokens: Tokens, state: torch.Tensor, chunk: int) -> torch.Tensor:
    """The state after T more tokens of one document, without gradients.

    Args:
        tokens: k [T, H, K], v [T, H, V], beta, g [T, H].
        state: [H, K, V].
    """
    for start in range(0, len(tokens.k), chunk):
        stop = start + chunk
        k, v = (t[start:stop].transpose(0, 1) for t in (tokens.k, tokens.v))
        beta, g = (t[start:stop].mT for t in (tokens.beta, tokens.g))
        size = k.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
        u, w, total, _ = chunk_solve(Tokens(None, k, v, beta, g), later, None)
        end = total[:, -1:]
        k_end = k * (end - total).exp().to(k)[..., None]
        state = end.exp().to(k)[..., None] * state + k_end.mT @ (u - w @ state)
    return state
