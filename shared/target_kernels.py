"""Which code computes a target's layers on a device: what a CaptureSpec's backend records of it."""

import sys
from importlib.util import find_spec
from typing import Any

from shared.config import Dtype, TargetConfig
from shared.errors import TargetError

GDN_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
FP8_CAPABILITY = (8, 9)  # older GPUs and CPUs compute with dequantised weights
# What FlashAttention 2 asks for: https://github.com/Dao-AILab/flash-attention
FLASH_CAPABILITY, FLASH_HEAD_DIM = (8, 0), 256


def may_be_flash(cfg: TargetConfig) -> bool:
    """Whether `attention_backend` can be a flash attention at all; looks at no device."""
    if cfg.attention != "auto":
        return cfg.attention.startswith("flash_attention")
    return cfg.dtype is not Dtype.float32 and find_spec("flash_attn") is not None


def attention_backend(
    cfg: TargetConfig, device: str, architecture: str | None = None, config: Any = None
) -> str:
    """The attention implementation that `target.attention` means on this device.

    `auto` is flash_attention_2 where its package is installed and GPU, dtype, model class and head
    size fit it; else sdpa.

    Args:
        architecture: the model's class; None: any.
        config: the decoder's config; None: any.
    """
    if cfg.attention != "auto":
        return cfg.attention
    if not str(device).startswith("cuda") or not may_be_flash(cfg):
        return "sdpa"
    import torch
    import transformers
    from transformers.utils.import_utils import is_flash_attn_2_available

    kind = getattr(transformers, architecture, None) if architecture else None
    fits = architecture is None or getattr(kind, "_supports_flash_attn", False)
    fits = fits and (config is None or _head_dim(config) <= FLASH_HEAD_DIM)
    fits = fits and is_flash_attn_2_available()
    if fits and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY:
        return "flash_attention_2"
    return "sdpa"


def _head_dim(config: Any) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def computes_fp8(device: str) -> bool:
    """transformers keeps fp8 weights in fp8 on this kind of device."""
    import torch

    if not str(device).startswith("cuda") or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= FP8_CAPABILITY


def conv_backend() -> str:
    """Which causal convolution a delta rule layer has on a GPU."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"causal_conv1d {version('causal-conv1d')}"
    except PackageNotFoundError:
        return "torch"


def gdn_backend(device: str) -> str:
    """Which gated-delta-rule code runs on this kind of device: torch's, or fla with its version."""
    if str(device).startswith("cpu"):
        return "torch"
    try:
        import fla
        import fla.ops.gated_delta_rule
    except Exception:  # an fla without a working triton fails in many ways
        return "torch"
    return f"fla {fla.__version__}"


def dispatch_gdn_by_device(layers: Any) -> None:
    """On CPU tensors the delta rule and its conv run torch's code, whatever is installed.

    transformers chooses fla's kernels when fla can be imported, also for tensors on the CPU, where
    they crash. The module's functions are replaced by ones that look at the tensor.
    """
    modules = {type(part).__module__ for layer in layers for part in layer.modules()}
    for name in sorted(modules):
        module = sys.modules.get(name)
        for function_name in GDN_FUNCTIONS:
            function = getattr(module, function_name, None)
            if hasattr(function, "__wrapped__") and not hasattr(function, "chosen_by_device"):
                setattr(module, function_name, _by_device(function))


def _by_device(wrapped: Any) -> Any:
    import functools

    plain = wrapped
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__

    @functools.wraps(plain)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if first.device.type != "cpu":
            return wrapped(first, *args, **kwargs)
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            raise TargetError("packed sequences leak through torch's delta rule on CPU")
        return plain(first, *args, **kwargs)

    call.chosen_by_device = True  # type: ignore[attr-defined]
    return call
