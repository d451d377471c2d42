"""Products through numpy's library against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from stage2_train import gemm


def error_ratio(got, exact) -> float:
    got, exact = got.detach().double(), exact.detach()
    return float((got - exact).norm() / exact.norm())


@pytest.fixture
def numpy_only(monkeypatch):
    """As on the processor where numpy's library is chosen, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(gemm, "_amd_without_avx512", lambda: True)
    monkeypatch.setattr(gemm, "_numpy_has_one_thread", lambda: True)
    yield
    torch.set_num_threads(threads)


def test_products_equal_torchs(numpy_only):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(37, 50, generator=generator)
    b = torch.randn(29, 50, generator=generator)
    for left, right in ((a, b.T), (b, a.T), (a.T, a), (a[:, ::2], b.T[::2])):
        exact = left.double() @ right.double()
        assert gemm.by_numpy(left, right)
        assert error_ratio(gemm.mm(left, right), exact) < 2e-7
        out = torch.empty(left.shape[0], right.shape[1])
        assert gemm.mm(left, right, out=out) is out
        assert error_ratio(out, exact) < 2e-7


@pytest.mark.parametrize("shape", [(50,), (3, 50), (2, 5, 50)])
def test_linear_and_its_gradients_equal_torchs(numpy_only, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(20, 50, generator=generator))
    grad = torch.randn(*shape[:-1], 20, generator=generator)
    got = gemm.linear(x, weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = F.linear(*wide)
    assert error_ratio(got, exact) < 2e-7
    pairs = zip(
        torch.autograd.grad(got, (x, weight), grad),
        torch.autograd.grad(exact, wide, grad.double()),
        strict=True,
    )
    for mine, reference in pairs:
        assert error_ratio(mine, reference) < 2e-7


def test_other_dtypes_and_threads_stay_with_torch(numpy_only):
    x = torch.ones(2, 2)
    assert not gemm.by_numpy(x.double(), x.double())
    assert not gemm.by_numpy(x.bfloat16(), x)
    assert not gemm.by_numpy(torch.empty(2, 2, device="meta"))
    torch.set_num_threads(2)
    assert not gemm.by_numpy(x, x)
