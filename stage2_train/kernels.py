"""Reading the context's states by FLA's Triton kernel: one ordinary call over an interleaved row.

The kernel gives a read per token and no states in the middle. So the rows X of an anchor are put
into the row as tokens that only read (k = v = beta = g = 0, q = x), right before the anchor, where
they leave the state as it is; context tokens get q = 0. This needs only FLA's public API.

Letters: T context tokens, N anchors, R rows an anchor, H heads, K / V head dims.
"""

import importlib.util

import torch

from shared.errors import TrainingError
from stage2_train.geometry import Geometry
from stage2_train.scan import Tokens, read_by_scan
from stage2_train.twins import CHUNK, row_of, worst_difference

LENGTHS = (1, 2, 3, 16, 63, 64, 65)  # documents of the check: around the kernel's chunk of 64
TOLERANCE = 0.02  # relative; the kernel multiplies in tf32 or bf16, a broken one is off by O(1)


def available(device: torch.device) -> bool:
    """FLA and Triton are importable and the device is CUDA's."""
    return device.type == "cuda" and all(map(importlib.util.find_spec, ("fla", "triton")))


def interleave(context: Tokens, x: torch.Tensor, geometry: Geometry):
    """The row with the anchors' rows among its tokens.

    Args:
        context: k, v, beta, g by chunk [Z, C, H, …]; x: [H, N, R, K].

    Returns:
        tokens with q, [T + N*R, H, …]; where documents start and the last one ends in it; the
        index of the anchors' rows [N*R].
    """
    rows, read = x.shape[2], geometry.num_read
    anchor = geometry.anchor_N
    device = anchor.device
    token = torch.arange(read, device=device)
    token_at = token + rows * torch.searchsorted(anchor, token, right=True)
    first = anchor + rows * torch.arange(len(anchor), device=device)
    rows_at = (first[:, None] + torch.arange(rows, device=device)).flatten()
    size = read + len(rows_at)

    def scatter(at, values):
        return values.new_zeros(size, *values.shape[1:]).index_copy(0, at, values)

    flat = (t.flatten(0, 1)[:read] for t in (context.k, context.v, context.beta, context.g))
    q = scatter(rows_at, x.permute(1, 2, 0, 3).flatten(0, 1))
    # An anchor on a document's first token still belongs to it: its rows stand behind the cut.
    document = torch.cat([geometry.document_T[:read], geometry.anchor_document_N])
    lengths = torch.bincount(document)
    lengths += (rows - 1) * torch.bincount(geometry.anchor_document_N, minlength=len(lengths))
    lengths = lengths[lengths > 0]
    return (
        Tokens(q, *(scatter(token_at, t) for t in flat)),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        rows_at,
    )


def read_by_kernel(context: Tokens, x: torch.Tensor, geometry: Geometry, op=None) -> torch.Tensor:
    """Y = X F for every anchor as `read_by_scan`, through one call of the kernel.

    Args:
        op: (tokens [T, H, …], cu_seqlens) -> reads [T, H, V]; FLA's if None.
    """
    tokens, cu_seqlens, rows_at = interleave(context, x, geometry)
    out = (op or _fla)(tokens, cu_seqlens).index_select(0, rows_at)
    return out.unflatten(0, x.shape[1:3]).permute(2, 0, 1, 3).to(x.dtype)


def _fla(tokens: Tokens, cu_seqlens: torch.Tensor) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        tokens.q[None], tokens.k[None], tokens.v[None], tokens.g[None], tokens.beta[None],
        scale=1.0, use_qk_l2norm_in_kernel=False, cu_seqlens=cu_seqlens,
    )[0][0]  # fmt: skip


def check(device: torch.device, key_dim: int, value_dim: int, op=None) -> float:
    """Compares reads and gradients with the scan in float64, on the device that will be used.

    Returns:
        the largest relative difference.

    Raises:
        TrainingError: it is above the tolerance, or not a number.
    """
    generator = torch.Generator().manual_seed(0)
    row, heads, block = row_of(LENGTHS), 2, 4
    anchor_N = row[2]

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    shape = (int(anchor_N[-1]) // CHUNK + 1, CHUNK, heads)
    inputs = [
        torch.nn.functional.normalize(normal(*shape, key_dim), dim=-1),
        normal(*shape, value_dim),
        normal(*shape).sigmoid(),
        -normal(*shape).sigmoid(),
        normal(heads, len(anchor_N), block, key_dim) * key_dim**-0.5,
    ]
    worst = worst_difference(
        row,
        block,
        inputs,
        normal(heads, len(anchor_N), block, value_dim),
        lambda leaves, geometry: read_by_scan(Tokens(None, *leaves[:4]), leaves[4], geometry),
        lambda leaves, geometry: read_by_kernel(Tokens(None, *leaves[:4]), leaves[4], geometry, op),
        device,
    )
    if not worst < TOLERANCE:
        raise TrainingError(
            f"FLA's gated delta rule differs from the reference by {worst:.2g} on {device}",
            do="Use another pair of Triton and driver, or remove FLA: the scan needs no kernel",
        )
    return worst
