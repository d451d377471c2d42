"""torch.compile for the drafter's layers, checked on the device before the first step.

Compiled is what looks at one position (norm and MLP), once for all row lengths. Mixers stay as they
are: their loops follow a row's documents, so each row would compile anew, and on CUDA they are
kernels already.
"""

import torch

from shared.errors import ConfigError, TrainingError
from stage2_train.drafter import Drafter, DrafterLayer

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative, results and gradients


def compile_layers(drafter: Drafter, device: torch.device, backend: str = "inductor") -> float:
    """Compiles in place, before matrices are cut over ranks.

    Returns:
        the largest relative difference of the first layer's result and gradients.

    Raises:
        ConfigError: the compiler can't be used here.
        TrainingError: what it made differs from the layer as it is.
    """
    layer = drafter.layers[0]
    plain = _probe(layer, drafter, device)
    for each in drafter.layers:
        each.feed_forward = torch.compile(each.feed_forward, dynamic=True, backend=backend)
    try:
        found = _probe(layer, drafter, device)
    except Exception as error:  # a missing compiler shows in many ways
        cause = getattr(error, "inner_exception", error)
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise ConfigError(
            f"torch.compile can't be used on {device} ({reason})",
            where="trainer.compile", do="Set it to false, or install a C++ compiler (g++)",
        ) from None  # fmt: skip
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, plain, strict=True))
    if not worst < TOLERANCE[drafter.dtype]:
        raise TrainingError(
            f"compiled layers differ from plain ones by {worst:.2g} on {device}",
            where="trainer.compile", do="Set it to false",
        )  # fmt: skip
    return worst


def _probe(layer: DrafterLayer, drafter: Drafter, device: torch.device) -> list[torch.Tensor]:
    """Result and gradients of two blocks through one layer's compiled part."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, drafter.cfg.block_size, drafter.hidden_size)
    x, weight = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    x = x.to(drafter.dtype).requires_grad_()
    y = layer.feed_forward(x)
    used = [*layer.mlp.parameters(), *layer.post_attention_layernorm.parameters()]
    gradients = torch.autograd.grad((y.float() * weight).sum(), [x, *used])
    return [tensor.detach().float() for tensor in (y, *gradients)]
