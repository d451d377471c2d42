"""Hidden states of a target by hooks at decoder layer outputs.

Layer id L is the *output* of decoder layer L (0-based), before the final norm: transformers'
`hidden_states[L + 1]`. Layers after the last tap and the head are not run.

B: samples; T: tokens of the longest; L: states; D: channels.
"""

import threading
from collections.abc import Sequence
from typing import Any

from shared import tensor_parallel
from shared.errors import TargetError
from shared.target import Target


class _Stop(Exception):  # ends a forward pass after the last tap
    pass


def capture(
    target: Target,
    input_ids: Any,
    lengths: Sequence[int],
    layer_ids: Sequence[int],
    last_hidden: bool = False,
    packed: bool = False,
) -> Any:
    """States of a right-padded batch, or of samples packed one after another.

    A causal decoder never looks right, so pads after a sample can't touch it, and no attention mask
    is passed: attention stays on its fast causal path, and linear attention needs none. Packed
    samples are told apart by positions that restart and by their cumulative lengths; not every
    backend minds them, so `stage1_extract.checks.packing_test` has to pass first.

    Args:
        target: the loaded model.
        input_ids: [B, T] int64, padded on the right with any valid token; packed: [1, T].
        lengths: B numbers of real tokens; states at and after them are of pads. Packed: the
            lengths of the samples, T together.
        layer_ids: ascending taps.
        last_hidden: append the last layer's output after the final norm.
        packed: the samples are packed.

    Returns:
        [B, T, L, D] bfloat16 on the target's device.

    Raises:
        TargetError: a tapped layer didn't run, or gave another shape than [B, T, D].
    """
    import torch

    batch, tokens = input_ids.shape
    fits = (1, sum(lengths)) == (batch, tokens) if packed else len(lengths) == batch
    if not fits or max(lengths) > tokens or min(lengths) < 1:
        raise TargetError(f"lengths {list(lengths)} don't fit a batch of shape {batch}x{tokens}")
    if target.info.cfg.tensor_parallel > 1:
        tensor_parallel.announce(input_ids, (list(lengths), list(layer_ids), last_hidden, packed))
    inputs = _packing(lengths, input_ids.device) if packed else {}
    width = target.info.hidden_size
    num_states = len(layer_ids) + int(last_hidden)
    out = torch.empty(
        (batch, tokens, num_states, width), dtype=torch.bfloat16, device=input_ids.device
    )
    seen: list[int] = []
    # Hooks live on shared modules: one forward pass of a target at a time.
    with _LOCK, torch.inference_mode():
        hooks = []

        def tap(state: int, layer: int, stop: bool) -> None:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                hidden_BTD = output[0] if isinstance(output, tuple) else output
                if tuple(hidden_BTD.shape) != (batch, tokens, width):
                    raise TargetError(
                        f"layer {layer} gave {tuple(hidden_BTD.shape)}, "
                        f"not {(batch, tokens, width)}",
                        where=type(target.model).__name__,
                    )
                out[:, :, state] = hidden_BTD
                seen.append(layer)
                if stop:
                    raise _Stop

            hooks.append(target.layers[layer].register_forward_hook(hook))

        try:
            for state, layer in enumerate(layer_ids):
                tap(state, layer, stop=not last_hidden and state == len(layer_ids) - 1)
            try:
                result = target.decoder(input_ids=input_ids, use_cache=False, **inputs)
            except _Stop:
                result = None
        finally:
            for hook in hooks:
                hook.remove()
        if last_hidden:
            out[:, :, -1] = result.last_hidden_state
    if seen != list(layer_ids):
        raise TargetError(f"layers {list(layer_ids)} were tapped, but {seen} ran")
    return out


_LOCK = threading.Lock()


def out_of_memory(error: BaseException) -> bool:
    """Torch's own error, or what a library inside says when the device's memory is full."""
    import torch

    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        "CUDA error: out of memory" in said or "STATUS_ALLOC_FAILED" in said
    )


def _packing(lengths: Sequence[int], device: Any) -> dict[str, Any]:
    """What a decoder has to be told of packed samples: positions [1, T], cumulative lengths."""
    import torch

    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return {
        "position_ids": positions,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def pack_batch(sequences: Sequence[Any]) -> tuple[Any, list[int]]:
    """Token sequences one after another as [1, T] int64, and their lengths."""
    import torch

    parts = [torch.as_tensor(tokens, dtype=torch.int64) for tokens in sequences]
    return torch.cat(parts)[None], [len(tokens) for tokens in sequences]


def pad_batch(sequences: Sequence[Any], pad: int) -> tuple[Any, list[int]]:
    """Token sequences as one right-padded [B, T] int64 tensor, and their lengths."""
    import torch

    lengths = [len(tokens) for tokens in sequences]
    ids_BT = torch.full((len(sequences), max(lengths)), pad, dtype=torch.int64)
    for row, tokens in enumerate(sequences):
        ids_BT[row, : lengths[row]] = torch.as_tensor(tokens, dtype=torch.int64)
    return ids_BT, lengths
