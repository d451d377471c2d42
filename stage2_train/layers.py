"""The small pieces of the drafter's layers: linear maps, norms, short convolutions, the MLP.

Weights are float32 masters; a module computes in the dtype of its input.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Linear):
    """y = x W^T in the dtype of x, without bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class _Normalize(torch.autograd.Function):
    """y = x * r * weight with r = (mean or sum of x^2 + eps)^-1/2 along the last dim."""

    @staticmethod
    def forward(ctx, x, weight, eps, mean):
        count = x.shape[-1] if mean else 1
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(count)
        r = r.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.count = count
        y = x * r
        return y if weight is None else y.mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        y, grad_weight = x * r, None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                grad_weight = (grad * y).flatten(0, -2).sum(0)
            grad = grad * weight
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None
        inner = (grad * y).sum(-1, keepdim=True).div_(-ctx.count)
        return torch.addcmul(grad, y, inner).mul_(r), grad_weight, None, None


class _ShortConv(torch.autograd.Function):
    """Causal depthwise convolution: y_t = sum_j w_j x_{t-j}; x [R, L, d], w [taps, d]."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        y = x * weight[0]
        for j in range(1, min(len(weight), x.shape[1])):
            y[:, j:].addcmul_(x[:, :-j], weight[j])
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = grad * weight[0], torch.zeros_like(weight)
        torch.sum((grad * x).flatten(0, 1), 0, out=grad_weight[0])
        for j in range(1, min(len(weight), x.shape[1])):
            grad_x[:, :-j].addcmul_(grad[:, j:], weight[j])
            torch.sum((grad[:, j:] * x[:, :-j]).flatten(0, 1), 0, out=grad_weight[j])
        return grad_x, grad_weight


class _SwiGLU(torch.autograd.Function):
    """SiLU(gate) * up; keeps its two inputs only."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)


def swiglu(gate, up):
    """SiLU(gate) * up."""
    return _SwiGLU.apply(gate, up)


def l2norm(x, eps: float = 1e-6):
    """Unit vectors along the last dim."""
    return _Normalize.apply(x, None, eps, False)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return _Normalize.apply(wide, self.weight, self.eps, True).to(x.dtype)


class RMSNormGated(RMSNorm):
    """RMSNorm(x) * SiLU(gate)."""

    def forward(self, x, gate):
        return swiglu(gate, super().forward(x).to(gate.dtype))


class ShortConv(nn.Module):
    """SiLU of a causal depthwise convolution of a few taps; zeros before the first token."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        nn.init.uniform_(self.weight, -(kernel**-0.5), kernel**-0.5)

    def forward(self, x):
        """[R, L, channels] -> same shape: R runs of L tokens."""
        weight = self.weight[:, 0].flip(-1).T.to(x.dtype).contiguous()
        return F.silu(_ShortConv.apply(x, weight))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    def parts(self) -> dict:
        """Muon's parts of the matrices (see `param_rules`)."""
        from stage2_train.param_rules import whole

        return {
            "gate_proj.weight": whole("gate"),
            "up_proj.weight": whole("up"),
            "down_proj.weight": whole("down"),
        }
