"""Gated delta net mixer: every block starts from the recurrent state right before its anchor.

Per value head a state S [K, V] runs over the context of a document,

    S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,      o_t = S_t^T q_t,

and a block's B tokens go on causally from F = S behind the last context token before its anchor.
N anchors would need N copies of F; none is ever built. In closed form a block needs F only as
Y = X F, with X [2B, K] known before the scan. So the chunked scan over the context reads Y while it
passes each anchor (`scan_read`), from the state at the chunk's start and the chunk's pseudo-values.

Letters: T context tokens, N anchors, B block, D width, H value heads, K / V key and value head
dims, C chunk, Z chunks. The recurrence runs in float32 (float64 for float64 inputs).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stage2_train.geometry import GAP, Context, Geometry
from stage2_train.layers import Linear, RMSNormGated, ShortConv, l2norm


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


def blocks_from_context(context: Tokens, block: Tokens, geometry: Geometry) -> torch.Tensor:
    """Reads of all blocks, each continued from the state right before its anchor.

    Args:
        context: k [Z, C, H, K], v [Z, C, H, V], beta, g [Z, C, H] by chunk; behind the row's end
            k and v are zero.
        block: q, k [N, B, H, K], v [N, B, H, V], beta, g [N, B, H].

    Returns:
        o [N, B, H, V].
    """
    x, finish = block_rows(block)
    chunks = Tokens(
        None,
        *(t.transpose(1, 2).contiguous() for t in (context.k, context.v, context.beta, context.g)),
    )
    u, w, total, _ = chunk_solve(chunks, geometry.apart_ZCC, geometry.alive_ZC[:, None])
    end = total[:, :, -1]
    to_end = _decay(end[..., None] - total, geometry.fading_ZC[:, None], u)
    fade = end.exp().to(u) * geometry.alive_ZC[:, -1:]
    # Log decay summed from the chunk's start up to the token before the anchor.
    total_N = total.transpose(0, 1)[:, geometry.anchor_chunk_N]
    before = F.pad(total_N, (1, 0)).gather(
        2, (geometry.anchor_N % geometry.chunk)[None, :, None].expand(len(total_N), -1, 1)
    )
    pair_decay = _decay(before - total_N, geometry.hidden_NC, u)
    x_decay = before[..., 0].exp().to(u) * geometry.anchor_alive_N
    y = scan_read(
        u, w, chunks.k, chunks.k * to_end[..., None], fade, x, x_decay, pair_decay,
        geometry.anchor_bounds,
    )  # fmt: skip
    return finish(y)


def _decay(log, hidden, like):
    """exp(log) in the dtype of `like`, 0 where hidden: masked before exp, which could overflow."""
    return log.to(like).masked_fill(hidden, -math.inf).exp()


def block_rows(block: Tokens):
    """The rows X with which blocks read their starting states, and how they go on from Y = X F.

    Args:
        block: q, k [N, B, H, K], v [N, B, H, V], beta, g [N, B, H].

    Returns:
        x [H, N, 2B, K] and finish: y [H, N, 2B, V] -> o [N, B, H, V].
    """
    q, k, v = (t.permute(2, 0, 1, 3).contiguous() for t in (block.q, block.k, block.v))
    beta, g = (t.permute(2, 0, 1).contiguous() for t in (block.beta, block.g))
    size = k.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    u, w, total, between = chunk_solve(Tokens(None, k, v, beta, g), later, None)
    x = torch.cat([w, q * total.exp().to(q)[..., None]], 2)
    scores = (q @ k.mT) * between

    def finish(y):
        y_w, y_q = y.split(size, 2)
        return (y_q + scores @ (u - y_w)).permute(1, 2, 0, 3)

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


@dataclass
class MixerState:
    """What drafting needs of the context: the state and the last rows before the convolutions."""

    state_HKV: torch.Tensor
    tail_k: torch.Tensor
    tail_v: torch.Tensor


class GDNMixer(nn.Module):
    """Gated delta net over context features c and blocks h, with the same weights for both.

    Args:
        hidden_size: D.
        num_key_heads, num_value_heads: key heads are shared by value heads, as in grouped queries.
        key_dim, value_dim: K, V.
        kernel: taps of the causal depthwise convolutions.
        eps: of the output norm.
    """

    def __init__(
        self, hidden_size, num_key_heads, num_value_heads, key_dim, value_dim, kernel, eps
    ):
        super().__init__()
        assert kernel - 1 <= GAP
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        keys, values = num_key_heads * key_dim, num_value_heads * value_dim
        self.q_proj = Linear(hidden_size, keys)
        self.k_proj = Linear(hidden_size, keys)
        self.v_proj = Linear(hidden_size, values)
        self.b_proj = Linear(hidden_size, num_value_heads)
        self.a_proj = Linear(hidden_size, num_value_heads)
        self.g_proj = Linear(hidden_size, values)
        self.o_proj = Linear(values, hidden_size)
        self.q_conv1d = ShortConv(keys, kernel)
        self.k_conv1d = ShortConv(keys, kernel)
        self.v_conv1d = ShortConv(values, kernel)
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.o_norm = RMSNormGated(value_dim, eps)
        self.reset_decay()

    @torch.no_grad()
    def reset_decay(self) -> None:
        """Decay rates as in FLA: A uniform in (0, 16), softplus(dt_bias) log-uniform 1e-3 … 0.1."""
        self.A_log.uniform_(1e-3, 16).log_()
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp_()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def parts(self) -> dict:
        """Muon's parts of the matrices (see `param_rules`)."""
        from stage2_train.param_rules import by_head, elementwise, whole

        gate = elementwise("one row a head: a gate, no map between features")
        return {
            "q_proj.weight": by_head("q", self.num_key_heads, self.key_dim),
            "k_proj.weight": by_head("k", self.num_key_heads, self.key_dim),
            "v_proj.weight": by_head("v", self.num_value_heads, self.value_dim),
            "g_proj.weight": by_head("g", self.num_value_heads, self.value_dim),
            "b_proj.weight": gate,
            "a_proj.weight": gate,
            "o_proj.weight": whole("o"),
        }

    def _keys(self, x):  # [..., Hk*K] -> unit vectors [..., H, K]
        x = l2norm(x.unflatten(-1, (self.num_key_heads, self.key_dim)))
        return _repeat(x, self.num_value_heads // self.num_key_heads)

    def _tokens(self, q, k, v, b, a) -> Tokens:
        """Projections behind their convolutions to what the delta rule reads, in its dtype."""
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        if q is not None:
            q = self._keys(q.to(dtype)) * self.key_dim**-0.5
        return Tokens(
            q,
            self._keys(k.to(dtype)),
            v.to(dtype).unflatten(-1, (self.num_value_heads, self.value_dim)),
            b.to(dtype).sigmoid(),
            -self.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + self.dt_bias.to(dtype)),
        )

    def context_tokens(self, spread_PD, geometry: Geometry) -> Tokens:
        """k, v, beta, g of the context by chunk [Z, C, H, …], from its spread features."""
        rows, shape = geometry.chunk_rows, (geometry.num_chunks, geometry.chunk)
        projected = (
            self.k_conv1d(self.k_proj(spread_PD)[None])[0],
            self.v_conv1d(self.v_proj(spread_PD)[None])[0],
            self.b_proj(spread_PD),
            self.a_proj(spread_PD),
        )
        chunks = (x.index_select(0, rows).unflatten(0, shape) for x in projected)
        return self._tokens(None, *chunks)

    def block_tokens(self, block_NBD) -> Tokens:
        """q, k, v, beta, g of the blocks [N, B, H, …]; convolutions start with the block."""
        return self._tokens(
            self.q_conv1d(self.q_proj(block_NBD)),
            self.k_conv1d(self.k_proj(block_NBD)),
            self.v_conv1d(self.v_proj(block_NBD)),
            self.b_proj(block_NBD),
            self.a_proj(block_NBD),
        )

    def output(self, o_NBHV, block_NBD) -> torch.Tensor:
        """Gated norm and output projection."""
        gate = self.g_proj(block_NBD).view_as(o_NBHV)
        return self.o_proj(self.o_norm(o_NBHV, gate).flatten(-2).to(block_NBD.dtype))

    def forward(self, block_NBD, context: Context, geometry: Geometry) -> torch.Tensor:
        """[N, B, D] -> [N, B, D]."""
        context = self.context_tokens(context.spread_PD, geometry)
        o_NBHV = blocks_from_context(context, self.block_tokens(block_NBD), geometry)
        return self.output(o_NBHV, block_NBD)

    def new_state(self) -> MixerState:
        """The state before the first token of a document."""
        weight, tail = self.k_proj.weight, self.k_conv1d.kernel - 1
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return MixerState(
            weight.new_zeros(self.num_value_heads, self.key_dim, self.value_dim, dtype=dtype),
            weight.new_zeros(tail, self.k_proj.out_features),
            weight.new_zeros(tail, self.v_proj.out_features),
        )

    def extend(self, state: MixerState, context_TD, chunk: int) -> None:
        """Advances the state by T context tokens."""
        tail = len(state.tail_k)
        k = torch.cat([state.tail_k.to(context_TD.dtype), self.k_proj(context_TD)])
        v = torch.cat([state.tail_v.to(context_TD.dtype), self.v_proj(context_TD)])
        tokens = self._tokens(
            None,
            self.k_conv1d(k[None])[0, tail:],
            self.v_conv1d(v[None])[0, tail:],
            self.b_proj(context_TD),
            self.a_proj(context_TD),
        )
        state.state_HKV = run_state(tokens, state.state_HKV, chunk)
        state.tail_k, state.tail_v = k[len(k) - tail :], v[len(v) - tail :]

    def draft(self, state: MixerState, block_1BD) -> torch.Tensor:
        """A block right behind the context; the state isn't changed."""
        x, finish = block_rows(self.block_tokens(block_1BD))
        return self.output(finish(x @ state.state_HKV[:, None]), block_1BD)


def _repeat(x, times: int):
    """[..., h, K] -> [..., h * times, K], each head `times` times in a row."""
    return x if times == 1 else x.repeat_interleave(times, -2)
