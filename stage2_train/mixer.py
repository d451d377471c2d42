"""Gated delta net mixer: every block starts from the recurrent state right before its anchor.

Context features and blocks go through the same weights; `scan` does the delta rule.

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
from stage2_train.scan import Tokens, block_rows, blocks_from_context, read_by_scan, run_state


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
        bidirectional: slots also read the block from its end.
    """

    def __init__(
        self, hidden_size, num_key_heads, num_value_heads, key_dim, value_dim, kernel, eps,
        bidirectional=False,
    ):  # fmt: skip
        super().__init__()
        assert kernel - 1 <= GAP
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.bidirectional = bidirectional
        self.read = read_by_scan
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
        o_NBHV = blocks_from_context(
            context, self.block_tokens(block_NBD), geometry,
            read=self.read, bidirectional=self.bidirectional,
        )  # fmt: skip
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
        x, finish = block_rows(self.block_tokens(block_1BD), self.bidirectional)
        return self.output(finish(x @ state.state_HKV[:, None]), block_1BD)


def _repeat(x, times: int):
    """[..., h, K] -> [..., h * times, K], each head `times` times in a row."""
    return x if times == 1 else x.repeat_interleave(times, -2)
