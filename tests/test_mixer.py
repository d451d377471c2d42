"""The mixer against the sequential float64 oracle."""

import dataclasses
from itertools import pairwise

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import TrainingError
from stage2_train import kernels
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


def compare(
    lengths, anchors, *, chunk, dtype=torch.float64, block=BLOCK, decay=0.3, same_keys=0.0,
    read=None, bidirectional=False,
):  # fmt: skip
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
            out = blocks_from_context(
                by_chunk(c, geometry), b, geometry, read=read, bidirectional=bidirectional
            )
        else:
            out = oracle.blocks_from_context(
                c,
                b,
                documents.tolist(),
                anchors,
                geometry.anchor_document_N.tolist(),
                bidirectional,
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


@st.composite
def rows(draw):
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    total, chunk = sum(lengths), draw(st.sampled_from([1, 4, 8]))
    edges = {0, total - 1, *range(0, total, chunk), *range(chunk - 1, total, chunk)}
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    edges |= {*starts, *(start + n - 1 for start, n in zip(starts, lengths, strict=True))}
    if len(lengths) == 1:
        edges.add(total)  # right behind the context, as in drafting
    anchors = draw(st.lists(st.sampled_from(sorted(edges)), min_size=1, max_size=6))
    return lengths, sorted(anchors), chunk


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows(), st.sampled_from([1e-3, 0.3, 3.0, 50.0]), st.sampled_from([0.0, 0.99]), st.booleans())
def test_any_packing_anchor_and_decay_matches_the_oracle(row, decay, same_keys, bidirectional):
    lengths, anchors, chunk = row
    error = compare(
        lengths, anchors, chunk=chunk, decay=decay, same_keys=same_keys,
        bidirectional=bidirectional,
    )  # fmt: skip
    assert error < 1e-10


def token_by_token(tokens, cu_seqlens):
    """What FLA's chunk_gated_delta_rule computes."""
    pieces = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        q, k, v, beta, g = (t[start:stop] for t in vars(tokens).values())
        state = k.new_zeros(*k.shape[1:], v.shape[-1])
        pieces.append(oracle.delta_rule(k, v, beta, g, state, q)[1])
    return torch.cat(pieces)


@pytest.mark.parametrize(
    ("lengths", "anchors"),
    [([5, 8, 3], [0, 4, 5, 5, 6, 12, 13, 15]), ([3, 9], [3]), ([9], [4, 9])],
)
def test_interleaved_reading_matches_the_oracle(lengths, anchors):
    def read(context, x, geometry):
        return kernels.read_by_kernel(context, x, geometry, token_by_token)

    assert compare(lengths, anchors, chunk=4, read=read) < 1e-12


@pytest.mark.slow
def test_trap_34_a_broken_kernel_is_refused():
    cpu = torch.device("cpu")
    assert kernels.check(cpu, 8, 4, token_by_token) < 1e-5

    def forgets_documents(tokens, cu_seqlens):
        return token_by_token(tokens, cu_seqlens[[0, -1]])

    def detached(tokens, cu_seqlens):
        held = Tokens(*(t.detach() for t in vars(tokens).values()))
        return token_by_token(held, cu_seqlens) + 0 * sum(t.sum() for t in vars(tokens).values())

    def not_a_number(tokens, cu_seqlens):
        return token_by_token(tokens, cu_seqlens) * float("nan")

    for broken in (forgets_documents, detached, not_a_number):
        with pytest.raises(TrainingError, match="differs from the reference"):
            kernels.check(cpu, 8, 4, broken)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_trap_34_flas_kernel_on_this_device():
    device = torch.device("cuda")
    assert kernels.available(device)
    kernels.check(device, 64, 64)


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
