"""Attention of the blocks by PyTorch's flex attention: one kernel over a row, sparse by tiles.

Same function as `attention.blocks_attend`, its naive twin. The mask is made once a row and shared
by its layers. Key/value heads are not repeated.

Letters: T context tokens, N anchors, B block, H query heads, J key/value heads, E their size.
"""

from functools import cache
from typing import Any

import torch

from shared.errors import TrainingError
from stage2_train import attention
from stage2_train.geometry import Geometry
from stage2_train.twins import row_of, worst_difference

LENGTHS = (1, 2, 3, 16, 63, 64, 65, 130)  # documents of the check: around the kernel's tile of 128
TOLERANCE = 0.02  # relative; a kernel multiplies in tf32, a broken one is off by O(1)


def available(device: torch.device) -> bool:
    """The device has the kernel, with its backward pass."""
    return device.type == "cuda"


@cache
def _compiled() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask)


@cache
def _plain() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return flex_attention, create_block_mask


def sees(geometry: Geometry, num_context: int, window: int | None):
    """The mask as a function of (batch, head, query, key): queries are slots of all blocks, keys
    are the context and then the slots."""
    document_T, anchor_N = geometry.document_T, geometry.anchor_N
    anchor_document_N, block = geometry.anchor_document_N, geometry.block

    def mask(_, __, query, key):
        anchor, token = query // block, key.clamp(max=num_context - 1)
        context = (key < anchor_N[anchor]) & (document_T[token] == anchor_document_N[anchor])
        if window is not None:
            context = context & (anchor_N[anchor] + query % block - key < window)
        own = (key - num_context) // block == anchor
        return torch.where(key < num_context, context, own)

    return mask


def blocks_attend(q, k_context, v_context, k_block, v_block, geometry: Geometry, window=None):
    """Softmax attention of every block over its context and itself; see `attention.blocks_attend`.

    Args:
        q: [H, N, B, E]; k_context, v_context: [J, T, E]; k_block, v_block: [J, N, B, E].
    """
    num_context, num_slots = k_context.shape[1], q.shape[1] * q.shape[2]
    if not num_context:
        return attention.blocks_attend(q, k_context, v_context, k_block, v_block, geometry, window)
    attend, make_mask = _compiled() if available(q.device) else _plain()
    key = (num_context, window)
    if key not in geometry.masks:
        seen = sees(geometry, num_context, window)
        geometry.masks[key] = make_mask(
            seen, None, None, num_slots, num_context + num_slots, device=q.device
        )
    out = attend(
        q.flatten(1, 2)[None],
        torch.cat([k_context, k_block.flatten(1, 2)], 1)[None],
        torch.cat([v_context, v_block.flatten(1, 2)], 1)[None],
        block_mask=geometry.masks[key],
        enable_gqa=q.shape[0] != k_block.shape[0],
    )
    return out[0].unflatten(1, q.shape[1:3])


def check(device: torch.device, head_dim: int, window: int | None, attend=blocks_attend) -> float:
    """Compares results and gradients with SDPA in float64, on the device that will be used.

    Returns:
        the largest relative difference.

    Raises:
        TrainingError: it is above the tolerance, or not a number.
    """
    generator = torch.Generator().manual_seed(0)
    row, heads, shared, block = row_of(LENGTHS), 4, 2, 4
    anchor_N = row[2]
    read = int(anchor_N[-1])

    def normal(*size):
        return torch.randn(*size, head_dim, generator=generator, dtype=torch.float64)

    blocks = (len(anchor_N), block)
    inputs = [normal(heads, *blocks), normal(shared, read), normal(shared, read)]
    inputs += [normal(shared, *blocks), normal(shared, *blocks)]
    worst = worst_difference(
        row,
        block,
        inputs,
        normal(heads, *blocks),
        lambda leaves, geometry: attention.blocks_attend(*leaves, geometry, window),
        lambda leaves, geometry: attend(*leaves, geometry, window),
        device,
        gradients=available(device),
    )
    if not worst < TOLERANCE:
        raise TrainingError(
            f"flex attention differs from the reference by {worst:.2g} on {device}",
            do="Set trainer.kernels=false: SDPA needs no kernel of ours",
        )
    return worst
