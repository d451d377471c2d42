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


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, the mean square in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class RMSNormGated(RMSNorm):
    """RMSNorm(x) * SiLU(gate)."""

    def forward(self, x, gate):
        return super().forward(x) * F.silu(gate)


class ShortConv(nn.Module):
    """SiLU of a causal depthwise convolution of a few taps."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        nn.init.uniform_(self.weight, -(kernel**-0.5), kernel**-0.5)

    def forward(self, x, same=None):
        """[R, L, channels] -> same shape; taps before the first token are zero.

        Args:
            x: R runs of L tokens.
            same: per distance j a factor [L-j, 1]: 0 where the tap is of another document.
        """
        weight = self.weight[:, 0].T.to(x.dtype)
        out = x * weight[-1]
        for j in range(1, min(self.kernel, x.shape[1])):
            tap = x[:, :-j] * weight[-1 - j]
            if same is not None:
                tap = tap * same[j].to(x.dtype)
            out = out + F.pad(tap, (0, 0, j, 0))
        return F.silu(out)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def parts(self) -> dict:
        """Muon's parts of the matrices (see `param_rules`)."""
        from stage2_train.param_rules import whole

        return {
            "gate_proj.weight": whole("gate"),
            "up_proj.weight": whole("up"),
            "down_proj.weight": whole("down"),
        }


def l2norm(x, eps: float = 1e-6):
    """Unit vectors along the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
