"""The mixer against the sequential float64 oracle."""

import dataclasses

import oracle
import pytest
import torch
import torch.nn.functional as F

from stage2_train.geometry import Geometry
from stage2_train.scan import Tokens, blocks_from_context, delta_rule

BLOCK = 4


def random_tokens(shape, heads, key_dim, value_dim, generator, decay=0.3, same_keys=0.0):
    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    direction = normal(heads, key_dim)
    return Tokens(
        F.normalize(normal(*shape, heads, key_dim), dim=-1) * key_dim**-0.5,
        F.normalize(
            normal(*shape, heads, key_dim) * (1 - same_keys) + direction * same_keys, dim=-1
        ),
        normal(*shape, heads, value_dim),
        torch.rand(*shape, heads, generator=generator, dtype=torch.float64),
        -decay * torch.rand(*shape, heads, generator=generator, dtype=torch.float64),
    )


def with_grad(tokens, dtype):
    return Tokens(
        *(
            t if t is None else t.to(dtype).detach().requires_grad_()
            for t in (getattr(tokens, f.name) for f in dataclasses.fields(tokens))
        )
    )


def by_chunk(tokens, geometry):
    """[T, H, …] -> [Z, C, H, …], zeros behind the row's end."""
    shape = (geometry.num_chunks, geometry.chunk)
    index = geometry.chunk_rows.new_tensor(range(shape[0] * shape[1]))
    return Tokens(
        None,
        *(
            torch.cat([t, t.new_zeros(shape[0] * shape[1], *t.shape[1:])])[index].unflatten(
                0, shape
            )
            for t in (tokens.k, tokens.v, tokens.beta, tokens.g)
        ),
    )


def relative(a, b):
    return ((a.double() - b).norm() / b.norm().clamp_min(1e-300)).item()


def compare(lengths, anchors, *, chunk, dtype=torch.float64, block=BLOCK, decay=0.3, same_keys=0.0):
    """Largest relative difference to the oracle over output and all gradients."""
    generator = torch.Generator().manual_seed(sum(lengths) * 31 + sum(anchors) + chunk)
    total, heads = sum(lengths), 2
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    anchor_N = torch.tensor(anchors)
    if max(anchors) < total:
        geometry = Geometry.of(documents, position, anchor_N, block=block, chunk=chunk)
    else:
        assert len(lengths) == 1
        geometry = Geometry.one_document(total, anchor_N, block=block, chunk=chunk)
    context = random_tokens((total,), heads, 5, 3, generator, decay, same_keys)
    blocks = random_tokens((len(anchors), block), heads, 5, 3, generator, decay, same_keys)
    results = []
    for fast in (True, False):
        kind = dtype if fast else torch.float64
        c, b = with_grad(context, kind), with_grad(blocks, kind)
        if fast:
            out = blocks_from_context(by_chunk(c, geometry), b, geometry)
        else:
            out = oracle.blocks_from_context(
                c, b, documents.tolist(), anchors, geometry.anchor_document_N.tolist()
            )
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        inputs = [c.k, c.v, c.beta, c.g, b.q, b.k, b.v, b.beta, b.g]
        grads = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=not fast)
        # A gradient of a row that nobody reads is zero in both: compare the whole concatenated.
        flat = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
        results.append([out, torch.cat([g.flatten() for g in flat[:4]]), *flat[4:]])
    return max(relative(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("lengths", "anchors"),
    [
        ([9], [0, 1, 4, 8]),
        ([16], [3, 4, 7, 8, 15, 16]),
        ([5, 8, 3], [0, 4, 5, 6, 12, 13, 15]),
        ([1, 1, 14, 2], [0, 1, 2, 9, 16, 17]),
        ([20], [2]),
    ],
)
@pytest.mark.parametrize("chunk", [4, 8])
def test_matches_the_oracle_with_gradients(lengths, anchors, chunk):
    assert compare(lengths, anchors, chunk=chunk) < 1e-12


@pytest.mark.parametrize("decay", [1e-3, 0.3, 20.0])
def test_float32_error_is_rounding(decay):
    error = compare(
        [33, 40], [0, 5, 31, 32, 33, 40, 64, 72], chunk=32, dtype=torch.float32, block=16,
        decay=decay, same_keys=0.9,
    )  # fmt: skip
    assert error < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reads_of_every_token_match_the_oracle(dtype):
    lengths = [5, 30, 1, 12]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    geometry = Geometry.of(documents, torch.arange(48), torch.tensor([47]), block=1, chunk=8)
    tokens = random_tokens((48,), 2, 5, 3, torch.Generator().manual_seed(0))
    results = []
    for fast in (True, False):
        t = with_grad(tokens, dtype if fast else torch.float64)
        if fast:
            out = delta_rule(t, geometry)
        else:
            pieces, state = [], t.k.new_zeros(2, 5, 3)
            for document in range(4):
                at = documents == document
                pieces.append(
                    oracle.delta_rule(t.k[at], t.v[at], t.beta[at], t.g[at], state, t.q[at])[1]
                )
            out = torch.cat(pieces)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        grads = torch.autograd.grad((out * weight).sum(), [t.q, t.k, t.v, t.beta, t.g])
        results.append([out, *grads])
    error = max(relative(a, b) for a, b in zip(*results, strict=True))
    assert error < (1e-12 if dtype == torch.float64 else 1e-6)
