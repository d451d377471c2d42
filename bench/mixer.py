"""The mixer against transformers' op and masked attention, and the loss's memory (CPU)."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from stage2_train.attention import BlockAttention, block_mask
from stage2_train.geometry import Geometry
from stage2_train.mixer import GDNMixer
from stage2_train.scan import Tokens, blocks_from_context, delta_rule

HEADS, SIZE, BLOCK = 8, 64, 16


def seconds(functions, rounds: int = 7) -> list[float]:
    """Least CPU seconds of each function over interleaved rounds, after one warm-up."""
    best = [float("inf")] * len(functions)
    for round_ in range(rounds + 1):
        for i, function in enumerate(functions):
            start = time.process_time()
            function()
            if round_:
                best[i] = min(best[i], time.process_time() - start)
    return best


def _tokens(shape, generator, dtype=torch.float32) -> Tokens:
    def normal(*size):
        return torch.randn(*shape, HEADS, *size, generator=generator, dtype=dtype)

    tokens = Tokens(
        F.normalize(normal(SIZE), dim=-1) * SIZE**-0.5,
        F.normalize(normal(SIZE), dim=-1),
        normal(SIZE),
        normal().sigmoid(),
        -0.1 * normal().sigmoid(),
    )
    for name in ("q", "k", "v", "beta", "g"):
        getattr(tokens, name).requires_grad_()
    return tokens


def _inputs(tokens: Tokens) -> list[torch.Tensor]:
    return [tokens.q, tokens.k, tokens.v, tokens.beta, tokens.g]


def mixer_vs_transformers(num_tokens: int) -> tuple[float, float]:
    """Forward + backward of the delta rule over one document: speed-up and relative difference."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule
    theirs = getattr(theirs, "__wrapped__", theirs)
    tokens = _tokens((num_tokens,), torch.Generator().manual_seed(0))
    geometry = Geometry.one_document(
        num_tokens, torch.tensor([num_tokens - 1]), block=BLOCK, chunk=32
    )
    weight = torch.randn_like(tokens.v)

    def ours_out():
        return delta_rule(tokens, geometry)

    def theirs_out():
        q, k, v, beta, g = (x[None] for x in _inputs(tokens))
        return theirs(q * SIZE**0.5, k, v, g, beta, use_qk_l2norm_in_kernel=False)[0][0]

    def step(out):
        return [out(), *torch.autograd.grad((out() * weight).sum(), _inputs(tokens))]

    pairs = zip(step(ours_out), step(theirs_out), strict=True)
    difference = max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    def run(out):
        torch.autograd.grad((out() * weight).sum(), _inputs(tokens))

    ours, other = seconds([lambda: run(ours_out), lambda: run(theirs_out)])
    return other / ours, difference


def block_vs_sdpa(num_tokens: int = 1024, num_anchors: int = 128) -> float:
    """Blocks' reads of their context, forward + backward: in-scan reading against dense SDPA."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randperm(num_tokens, generator=generator)[:num_anchors].sort()[0]
    geometry = Geometry.one_document(num_tokens, anchors, block=BLOCK, chunk=32)
    context, block = _tokens((num_tokens,), generator), _tokens((num_anchors, BLOCK), generator)
    weight = torch.randn_like(block.v)
    shape = (geometry.num_chunks, geometry.chunk)
    mask = block_mask(geometry, 0, num_anchors, 0, num_tokens, None)

    def scan():
        rows = geometry.num_chunks * geometry.chunk
        chunks = Tokens(None, *(x[:rows].unflatten(0, shape) for x in _inputs(context)[1:]))
        out = blocks_from_context(chunks, block, geometry)
        torch.autograd.grad((out * weight).sum(), _inputs(context)[1:] + _inputs(block))

    def attention():
        q = block.q.flatten(0, 1).transpose(0, 1)[None]
        k = torch.cat([context.k, block.k.flatten(0, 1)]).transpose(0, 1)[None]
        v = torch.cat([context.v, block.v.flatten(0, 1)]).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out[0].transpose(0, 1).unflatten(0, (num_anchors, BLOCK))
        inputs = [context.k, context.v, block.q, block.k, block.v]
        torch.autograd.grad((out * weight).sum(), inputs)

    ours, dense = seconds([scan, attention])
    return dense / ours


def bounded_context(lengths=(1024, 16384, 65536)) -> dict[str, float]:
    """One layer drafting a block behind a long context: milliseconds and MiB of state.

    GDN's state doesn't grow; a full attention layer keeps and reads every token.
    """
    torch.manual_seed(0)
    gdn = GDNMixer(576, 6, 6, SIZE, SIZE, 4, 1e-6)
    attention = BlockAttention(576, 6, 3, SIZE, 1e4, 1e-6)
    block, figures = torch.randn(1, BLOCK, 576), {}
    for length in lengths:
        gdn_state, cache = gdn.new_state(), attention.new_state()
        gdn_state.state_HKV.normal_()
        cache.k_JTE, cache.v_JTE = torch.randn(2, 3, length, SIZE)
        cache.seen = length
        with torch.no_grad():
            times = seconds(
                [partial(gdn.draft, gdn_state, block), partial(attention.draft, cache, block)]
            )
        for name, state, time_s in zip(
            ("gdn", "attention"), (gdn_state, cache), times, strict=True
        ):
            tensors = [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
            key = f"train.draft_{name}_{length // 1024}k"
            figures[f"{key}_ms"] = time_s * 1e3
            figures[f"{key}_mib"] = sum(x.nbytes for x in tensors) / 2**20
    return figures


def loss_memory(slots: int = 8192, vocabulary: int = 49152, width: int = 576) -> float:
    """Peak memory of the loss over its inputs, as a share of float32 logits of all slots."""
    code = f"from bench.mixer import peak; print(peak({slots}, {vocabulary}, {width}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout) / (slots * vocabulary * 4)


def peak(slots: int, vocabulary: int, width: int) -> int:
    """Bytes that this process's peak grows by during a loss, forward and backward."""
    from stage2_train.loss import block_loss

    head = torch.randn(vocabulary, width)
    h = torch.randn(slots // 15 + 1, 16, width, requires_grad=True)
    label = torch.randint(0, vocabulary, (len(h), 15))
    small = h[:2].detach().requires_grad_()  # threads and buffers of the libraries
    block_loss(small, label[:2], torch.ones(2, 15), head, denominator=1.0, chunk=512)[0].backward()
    weight = torch.ones(label.shape)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
    before = _memory("VmRSS")
    block_loss(h, label, weight, head, denominator=1.0, chunk=512)[0].backward()
    return _memory("VmHWM") - before


def _memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def run() -> dict[str, float]:
    """The figures of `build/bench.json`; one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        short, error = mixer_vs_transformers(1024)
        long, error_long = mixer_vs_transformers(4096)
        return {
            "train.mixer_vs_transformers_1k": short,
            "train.mixer_vs_transformers_4k": long,
            "train.mixer_error": max(error, error_long),
            "train.block_vs_sdpa": block_vs_sdpa(),
            "train.loss_memory": loss_memory(),
            **bounded_context(),
        }
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value:.3g}")
