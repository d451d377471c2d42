"""The polar factor of a matrix by odd polynomials: what Muon does to its momentum.

Every iteration maps X to a*X + b*(XX^T)X + c*(XX^T)^2 X, which moves the singular values and keeps
the singular vectors. Three forms compute the same thing:

- standard: on X itself, 4n^2 m + 2n^3 FLOPs a step;
- symmetric: the same, but of XX^T and its square only one triangle is computed, in row panels;
- gram: on R = XX^T alone, X is touched once per restart; cheaper from m/n = 1.5 on. Rounding can
  make R indefinite, so X is renewed after some steps (restarts); without them bf16 diverges.

The input is scaled by a power of two and then by its float32 Frobenius norm, so the result doesn't
depend on the input's scale (1e-36 .. 1e30). A zero matrix gives zero, a NaN gives NaN.

Shapes: B matrices in a batch, N x M each with N <= M (a tall input is worked on transposed).
"""

from itertools import pairwise

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

# https://kellerjordan.github.io/posts/muon/
KJ = (3.4445, -4.7750, 2.0315)
# Taylor expansion of s^(-1/2) around 1, second order
TAYLOR = (15 / 8, -5 / 4, 3 / 8)
# https://arxiv.org/abs/2505.16932, Algorithm 1, before its safety factor
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # on the norm, and on all but the last Polar Express polynomial

# Measured on CPUs, one thread. A batched call beats single ones up to n = 128, if its operands stay
# in the second-level cache; a triangle in four row panels beats the full product from 384 on
# (bfloat16: 512).
BATCH_MAX_N = 128
BATCH_BYTES = 1 << 19
GRAM_MIN_ASPECT = 1.5
SYMMETRIC_MIN_N = {torch.float32: 384, torch.float64: 384, torch.bfloat16: 512}
PANELS = 4


def coefficients(polynomial: str, steps: int, *, safety: bool = True) -> Coefficients:
    """(a, b, c) of each step, first step first. Polar Express is taken from the list's start.

    Beyond its eight published steps Polar Express repeats the last, which is Taylor's.
    """
    if polynomial == "kj":
        return (KJ,) * steps
    if polynomial == "taylor":
        return (TAYLOR,) * steps
    if polynomial != "polar_express":
        raise ValueError(f"no polynomial {polynomial!r}")
    last = len(POLAR_EXPRESS) - 1
    listed = [POLAR_EXPRESS[min(i, last)] for i in range(steps)]
    if not safety:
        return tuple(listed)
    return tuple(
        (a, b, c) if i >= last else (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
        for i, (a, b, c) in enumerate(listed)
    )


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it faster than float32, else float32.

    A rule from measurements, so that a run's arithmetic never depends on a stopwatch: GPUs and CPUs
    with AVX512_BF16 or AMX gain 2x and more; a CPU without them emulates bfloat16, ten to fifty
    times slower than its float32.
    """
    if device.type != "cpu":
        return torch.bfloat16
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if getattr(torch.cpu, probe, bool)():
            return torch.bfloat16
    return torch.float32


def orthogonalize(
    x: Tensor,
    polynomial: str = "polar_express",
    steps: int = 5,
    *,
    dtype: torch.dtype | None = None,
    form: str = "auto",
    restarts: tuple[int, ...] | None = None,
) -> Tensor:
    """Approximate polar factor of each matrix of `x` [..., rows, cols], in a new tensor.

    Args:
        polynomial: kj, taylor, polar_express, or svd (exact; null directions stay zero).
        dtype: of the multiplications and the result; None takes `compute_dtype` (svd: x's own).
        form: auto, standard, symmetric, gram.
        restarts: steps after which the gram form renews XX^T; None takes what the dtype needs.
    """
    if dtype is None:
        dtype = x.dtype if polynomial == "svd" else compute_dtype(x.device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    x_BNM, result_BNM = (t.reshape(-1, *x.shape[-2:]) for t in (x, result))
    size = batch_size(*x.shape[-2:], dtype, x.device)
    for piece_BNM, out_BNM in zip(x_BNM.split(size), result_BNM.split(size), strict=True):
        stage_BNM = piece_BNM.to(wide, copy=True)
        if polynomial == "svd":
            out_BNM.copy_(svd_polar(normalize_(stage_BNM, 1.0)))
            continue
        normalize_(stage_BNM, SAFETY if polynomial == "polar_express" else 1.0)
        listed = coefficients(polynomial, steps)
        out_BNM.copy_(iterate_(stage_BNM.to(dtype), listed, form=form, restarts=restarts))
    return result


def batch_size(n: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many n x m matrices are worked on in one call."""
    if device.type != "cpu":
        return 1 << 30
    return max(1, BATCH_BYTES // (n * m * dtype.itemsize))


def normalize_(x_BNM: Tensor, safety: float) -> Tensor:
    """Divides each matrix by safety * its Frobenius norm, in place, in float32 or float64.

    The squares of the entries are summed after a division by the power of two of the largest one,
    which is exact. Where no square can leave float32's range the division is left out.
    """
    norm_B = torch.linalg.vector_norm(x_BNM, dim=(1, 2))
    if x_BNM.device.type != "cpu" or not ((norm_B > 1e-12) & (norm_B < 1e15)).all():
        peak_B = torch.linalg.vector_norm(x_BNM, ord=float("inf"), dim=(1, 2))
        exponent_B = torch.frexp(peak_B).exponent.clamp(-120, 120)
        x_BNM.mul_(torch.ldexp(torch.ones_like(peak_B), -exponent_B)[:, None, None])
        norm_B = torch.linalg.vector_norm(x_BNM, dim=(1, 2))
    factor_B = torch.where(norm_B == 0, torch.zeros_like(norm_B), 1 / (safety * norm_B))
    return x_BNM.mul_(factor_B[:, None, None])


def svd_polar(x_BNM: Tensor) -> Tensor:
    """U V^T over the singular values above the rank threshold: exact, for tests and tiny models."""
    u, s, vh = torch.linalg.svd(x_BNM, full_matrices=False)
    threshold = torch.finfo(s.dtype).eps * max(x_BNM.shape[-2:]) * s[..., :1]
    kept = (s > threshold).to(u.dtype)
    return (u * kept[..., None, :]) @ vh


def choose_form(n: int, m: int, dtype: torch.dtype) -> str:
    """The cheapest form of an n x m matrix, n <= m."""
    if m >= GRAM_MIN_ASPECT * n:
        return "gram"
    return "symmetric" if n >= SYMMETRIC_MIN_N[dtype] else "standard"


def default_restarts(dtype: torch.dtype, listed: Coefficients) -> tuple[int, ...]:
    """Steps after which the gram form must start anew from X.

    The fewest that keep the largest singular value where the standard form has it, over random,
    rank 1, rank 8 and condition 1e2 .. 1e6 inputs (`tests/test_orthogonalize.py`). Rounding gives R
    small negative eigenvalues, and the polynomials blow them up: Polar Express by 69 in its first
    step, KJ by 12. So bfloat16 affords two steps of the one and, once, three of the other.
    """
    steps = len(listed)
    if dtype != torch.bfloat16:
        return tuple(range(4, steps, 4)) if steps > 5 else ()
    if listed[0] == KJ and steps <= 5:
        return (3,) if steps > 3 else ()
    return tuple(range(2, steps, 2))


def iterate_(
    x_BNM: Tensor,
    listed: Coefficients,
    *,
    form: str = "auto",
    restarts: tuple[int, ...] | None = None,
) -> Tensor:
    """Runs the polynomials on normalised matrices; `x_BNM` (contiguous) is used as scratch.

    Returns:
        `x_BNM`, now holding the result.
    """
    tall = x_BNM.shape[1] > x_BNM.shape[2]
    x = x_BNM.mT if tall else x_BNM
    n, m = x.shape[1:]
    if form == "auto":
        form = choose_form(n, m, x.dtype)
    if restarts is None:
        restarts = default_restarts(x.dtype, listed)

    def run(piece: Tensor) -> Tensor:
        if form == "gram":
            return _gram(piece, listed, restarts)
        return _standard(piece, listed, symmetric=form == "symmetric")

    size = batch_size(n, m, x.dtype, x.device) if n <= BATCH_MAX_N else 1
    for piece in x.split(size):
        view = piece[0] if size == 1 else piece
        result = run(view)
        if result.data_ptr() != view.data_ptr():
            view.copy_(result)
    return x_BNM


def _standard(x: Tensor, listed: Coefficients, *, symmetric: bool) -> Tensor:
    n = x.shape[-2]
    r, p = (x.new_empty(*x.shape[:-2], n, n) for _ in range(2))
    other = torch.empty_like(x)
    for abc in listed:
        _product(x, x.mT, out=r, symmetric=symmetric)
        rest = _polynomial(r, abc, out=p, symmetric=symmetric)
        _product(p, x, out=other, base=x, beta=rest)
        x, other = other, x
    return x


def _gram(x: Tensor, listed: Coefficients, restarts: tuple[int, ...]) -> Tensor:
    """X is multiplied by Q = product of the polynomials of R, once per stretch between restarts."""
    n = x.shape[-2]
    symmetric = n >= SYMMETRIC_MIN_N[x.dtype]
    r, p, q, spare = (x.new_empty(*x.shape[:-2], n, n) for _ in range(4))
    other = torch.empty_like(x)
    cuts = [0, *(k for k in restarts if 0 < k < len(listed)), len(listed)]
    for first, last in pairwise(cuts):
        _product(x, x.mT, out=r, symmetric=symmetric)
        for k in range(first, last):
            rest = _polynomial(r, listed[k], out=p, symmetric=symmetric)
            if k > first:
                _product(p, q, out=spare, base=q, beta=rest, symmetric=symmetric)
                q, spare = spare, q
            elif k + 1 < last:
                q.copy_(p).diagonal(dim1=-2, dim2=-1).add_(rest)
            if k + 1 < last:
                _product(p, r, out=spare, base=r, beta=rest, symmetric=symmetric)
                _product(p, spare, out=r, base=spare, beta=rest, symmetric=symmetric)
        if last - first == 1:
            _product(p, x, out=other, base=x, beta=rest)
        else:
            _product(q, x, out=other)
        x, other = other, x
    return x


def _polynomial(r: Tensor, abc: tuple, *, out: Tensor, symmetric: bool) -> float:
    """out = bR + cR^2 and returns a, which stays in the next product's epilogue: bfloat16.

    In wider types out = aI + bR + cR^2 and 0 is returned: the epilogue's copy is saved. In bfloat16
    the rounding of aI + p would cost accuracy.
    """
    a, b, c = abc
    _product(r, r, out=out, base=r, beta=b, alpha=c, symmetric=symmetric)
    if r.dtype == torch.bfloat16:
        return a
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return 0.0


def _product(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor,
    base: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
    symmetric: bool = False,
) -> None:
    """out = beta*base + alpha*a@b (alpha: only with a base); symmetric: lower panels, mirrored."""
    if not symmetric:
        if beta == 0.0:
            torch.matmul(a, b, out=out)
        elif out.ndim == 2:
            torch.addmm(base, a, b, beta=beta, alpha=alpha, out=out)
        else:
            torch.baddbmm(base, a, b, beta=beta, alpha=alpha, out=out)
        return
    n = out.shape[-1]
    size = -(-n // PANELS)
    for low in range(0, n, size):
        high = min(low + size, n)
        _product(
            a[..., low:high, :],
            b[..., :high],
            out=out[..., low:high, :high],
            base=None if beta == 0.0 else base[..., low:high, :high],
            beta=beta,
            alpha=alpha,
        )
        if low:
            out[..., :low, low:high].copy_(out[..., low:high, :low].mT)
