"""Products of float32 matrices in one CPU thread, by the faster of two libraries.

torch multiplies by MKL, numpy by OpenBLAS. On AMD processors without AVX-512 OpenBLAS is ahead by
10 to 25 % (80 against 60 to 72 GFLOPS at 512 x 2048 x 576 on Zen 3), and three quarters of the
drafter's step are products. A rule from measurements, so that a run's arithmetic never depends on a
stopwatch: OpenBLAS where processor and thread count are these, torch everywhere else.

`torch.mm` and `F.linear` are the naive twins.
"""

import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ALLOWED = True  # `sharding` forbids it: a tensor that numpy has seen can't be freed and made again


@cache
def _amd_without_avx512() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in text and "avx512f" not in text


@cache
def _numpy_has_one_thread() -> bool:
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return next((os.environ[name] for name in names if name in os.environ), "") == "1"


def by_numpy(*tensors: torch.Tensor) -> bool:
    """Whether numpy multiplies these: plain float32 matrices, one thread, the processor it wins on.

    OpenBLAS reads its thread count from the environment when the process starts.
    """
    return (
        ALLOWED
        and _amd_without_avx512()
        and _numpy_has_one_thread()
        and torch.get_num_threads() == 1
        and not torch.compiler.is_compiling()
        and all(
            t.device.type == "cpu"
            and t.dtype == torch.float32
            and type(t) in (torch.Tensor, torch.nn.Parameter)
            for t in tensors
        )
    )


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b of two matrices, without gradient."""
    if not by_numpy(a, b):
        return torch.mm(a, b, out=out)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    np.matmul(a.detach().numpy(), b.detach().numpy(), out=out.detach().numpy())
    return out


class _Linear(torch.autograd.Function):
    """y = x W^T; x [..., in], W [out, in]."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return mm(x.flatten(0, -2), weight.T).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_RO, grad_x, grad_weight = grad.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            grad_x = mm(grad_RO, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = mm(grad_RO.T, x.flatten(0, -2))
        return grad_x, grad_weight


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with gradients; x [..., in], weight [out, in]."""
    if by_numpy(x, weight) and x.ndim > 1 and x.numel():
        return _Linear.apply(x, weight)
    return F.linear(x, weight)
