"""Attention over the context before a block's anchor and over the block itself (DFlash's mask).

Queries come from the blocks, keys and values from the context features and the blocks. A slot sees
the context tokens of its document before its anchor, and every slot of its own block. A dense mask
over N*B queries and T + N*B keys would be almost all False: anchors are taken in groups of
neighbours, each against the slice of context it can see (`blocks_attend`).

Letters: T context tokens, N anchors, B block, D width, H query heads, J key/value heads, E their
size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stage2_train.geometry import Context, Geometry
from stage2_train.layers import Linear, RMSNorm

GROUP = 8  # anchors that share one call


def block_mask(geometry: Geometry, first: int, last: int, low: int, high: int, window: int | None):
    """What anchors first … last-1 see of context low … high-1 and of their own blocks.

    Returns:
        bool [(last-first)*B, (high-low) + (last-first)*B], True: seen.
    """
    anchor, block = geometry.anchor_N[first:last], geometry.block
    token = torch.arange(low, high, device=anchor.device)
    same = geometry.document_T[low:high] == geometry.anchor_document_N[first:last, None]
    context = (same & (token < anchor[:, None]))[:, None].expand(-1, block, -1)
    if window is not None:
        slot = torch.arange(block, device=anchor.device)
        distance = (anchor[:, None] + slot)[..., None] - token
        context = context & (distance < window)
    count = last - first
    own = torch.eye(count, dtype=torch.bool, device=anchor.device)
    own = own.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return torch.cat([context.reshape(count * block, -1), own], 1)


def blocks_attend(q, k_context, v_context, k_block, v_block, geometry: Geometry, window=None):
    """Softmax attention of every block over its context and itself.

    Args:
        q: [H, N, B, E]; k_context, v_context: [J, T, E]; k_block, v_block: [J, N, B, E].
        window: a slot sees context less than so many positions before it.

    Returns:
        [H, N, B, E].
    """
    times = q.shape[0] // k_block.shape[0]
    k_context, v_context, k_block, v_block = (
        _spread(x, times) for x in (k_context, v_context, k_block, v_block)
    )
    outputs = []
    for first, last, low, high in attention_groups(geometry, window):
        k = torch.cat([k_context[:, low:high], k_block[:, first:last].flatten(1, 2)], 1)
        v = torch.cat([v_context[:, low:high], v_block[:, first:last].flatten(1, 2)], 1)
        mask = block_mask(geometry, first, last, low, high, window)
        out = F.scaled_dot_product_attention(
            q[None, :, first:last].flatten(2, 3), k[None], v[None], attn_mask=mask
        )
        outputs.append(out[0].unflatten(1, (last - first, geometry.block)))
    return torch.cat(outputs, 1)


def _spread(x, times: int):
    """[J, ...] -> [J * times, ...], each head `times` times in a row."""
    return x if times == 1 else x.repeat_interleave(times, 0)


def attention_groups(geometry: Geometry, window: int | None) -> list[tuple[int, int, int, int]]:
    """(first, last, low, high): anchors first … last-1 of one document see context low … high-1."""
    anchors = geometry.anchor_N.tolist()
    documents = geometry.anchor_document_N.tolist()
    starts = (geometry.anchor_N - geometry.anchor_position_N).tolist()
    groups, first = [], 0
    while first < len(anchors):
        last = first + 1
        while last < len(anchors) and last - first < GROUP and documents[last] == documents[first]:
            last += 1
        low = starts[first]
        if window is not None:
            low = max(low, anchors[first] - window + 1)
        groups.append((first, last, low, max(low, anchors[last - 1])))
        first = last
    return groups


def rotary(position, dim: int, theta: float, like):
    """cos and sin [..., dim] at integer positions, halves repeated."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, dim, 2, device=position.device, dtype=wide) / dim
    angle = position[..., None].to(wide) / theta**exponent
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x, cos, sin):
    """Rotates pairs (i, i + dim/2) of the last dim."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


@dataclass
class CacheState:
    """Rotated keys and values of the last context tokens [J, T, E], and how many there were."""

    k_JTE: torch.Tensor
    v_JTE: torch.Tensor
    seen: int = 0


class BlockAttention(nn.Module):
    """Attention layer of the drafter; names as in DFlash's published layout.

    Args:
        hidden_size: D.
        num_heads, num_kv_heads, head_dim: H, J, E.
        theta: base of the rotary embedding, over the whole head.
        window: of sliding attention, tokens; None: full.
    """

    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim, theta, eps, window=None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.theta, self.window = theta, window
        self.attend = blocks_attend
        self.q_proj = Linear(hidden_size, num_heads * head_dim)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim)
        self.o_proj = Linear(num_heads * head_dim, hidden_size)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)

    def parts(self) -> dict:
        """Muon's parts of the matrices (see `param_rules`)."""
        from stage2_train.param_rules import by_head, whole

        return {
            "q_proj.weight": by_head("q", self.num_heads, self.head_dim),
            "k_proj.weight": by_head("k", self.num_kv_heads, self.head_dim),
            "v_proj.weight": by_head("v", self.num_kv_heads, self.head_dim),
            "o_proj.weight": whole("o"),
        }

    def _keys_values(self, x, position):
        """[..., D] -> keys and values [J, ..., E]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)).movedim(-2, 0)
        cos, sin = rotary(position, self.head_dim, self.theta, x)
        return rotate(k.movedim(-2, 0), cos, sin), v

    def _queries(self, x, position):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)))
        return rotate(q.movedim(-2, 0), *rotary(position, self.head_dim, self.theta, x))

    def forward(self, block_NBD, context: Context, geometry: Geometry) -> torch.Tensor:
        """[N, B, D] -> [N, B, D]."""
        read = int(geometry.anchor_N[-1])
        k_context, v_context = self._keys_values(
            context.plain_TD[:read], geometry.position_T[:read]
        )
        k_block, v_block = self._keys_values(block_NBD, geometry.position_NB)
        out_HNBE = self.attend(
            self._queries(block_NBD, geometry.position_NB),
            k_context,
            v_context,
            k_block,
            v_block,
            geometry,
            self.window,
        )
        return self.o_proj(out_HNBE.movedim(0, -2).flatten(-2))

    def new_state(self) -> CacheState:
        """An empty cache."""
        empty = self.k_proj.weight.new_zeros(self.num_kv_heads, 0, self.head_dim)
        return CacheState(empty, empty)

    def extend(self, state: CacheState, context_TD, chunk: int) -> None:
        """Appends T context tokens; a sliding layer keeps only what a later block can see."""
        seen = state.seen
        position = torch.arange(seen, seen + len(context_TD), device=context_TD.device)
        k, v = self._keys_values(context_TD, position)
        keep = slice(None) if self.window is None else slice(-self.window, None)
        state.k_JTE = torch.cat([state.k_JTE.to(k.dtype), k], 1)[:, keep]
        state.v_JTE = torch.cat([state.v_JTE.to(v.dtype), v], 1)[:, keep]
        state.seen = seen + len(context_TD)

    def draft(self, state: CacheState, block_1BD) -> torch.Tensor:
        """A block right behind the context; the cache isn't changed."""
        size = block_1BD.shape[1]
        position = state.seen + torch.arange(size, device=block_1BD.device)
        k, v = self._keys_values(block_1BD[0], position)
        mask, cached = None, state.k_JTE.shape[1]
        if self.window is not None:
            distance = torch.arange(size)[:, None] + cached - torch.arange(cached + size)
            mask = (distance < self.window).to(block_1BD.device)
            mask[:, cached:] = True
        times = self.num_heads // self.num_kv_heads
        out = F.scaled_dot_product_attention(
            self._queries(block_1BD[0], position)[None],
            _spread(torch.cat([state.k_JTE.to(k.dtype), k], 1), times)[None],
            _spread(torch.cat([state.v_JTE.to(v.dtype), v], 1), times)[None],
            attn_mask=mask,
        )
        return self.o_proj(out[0].movedim(0, -2).flatten(-2))[None]
