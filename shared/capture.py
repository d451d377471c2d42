"""Hidden states of a target by hooks at decoder layer outputs.

Layer id L is the *output* of decoder layer L (0-based), before the final norm: transformers'
`hidden_states[L + 1]`. Layers after the last tap and the head are not run.

B: samples; T: tokens of the longest; L: states; D: channels.
"""

import threading
from collections.abc import Sequence
from typing import Any

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
    out: Any = None,
) -> Any:
    """States of a right-padded batch.

    A causal decoder never looks right, so pads after a sample can't touch it, and no attention mask
    is passed: attention stays on its fast causal path, and linear attention needs none.

    Args:
        target: the loaded model.
        input_ids: [B, T] int64, padded on the right with any valid token.
        lengths: B numbers of real tokens; states at and after them are of pads.
        layer_ids: ascending taps.
        last_hidden: append the last layer's output after the final norm.
        out: [B, T, L, D] bfloat16 to write into, or None.

    Returns:
        [B, T, L, D] bfloat16 on the target's device.

    Raises:
        TargetError: a tapped layer didn't run, or gave another shape than [B, T, D].
    """
    import torch

    batch, tokens = input_ids.shape
    if len(lengths) != batch or max(lengths) > tokens or min(lengths) < 1:
        raise TargetError(f"lengths {list(lengths)} don't fit a batch of shape {batch}x{tokens}")
    width = target.info.hidden_size
    num_states = len(layer_ids) + int(last_hidden)
    if out is None:
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
                result = target.decoder(input_ids=input_ids, use_cache=False)
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


def pad_batch(sequences: Sequence[Any], pad: int) -> tuple[Any, list[int]]:
    """Token sequences as one right-padded [B, T] int64 tensor, and their lengths."""
    import torch

    lengths = [len(tokens) for tokens in sequences]
    ids_BT = torch.full((len(sequences), max(lengths)), pad, dtype=torch.int64)
    for row, tokens in enumerate(sequences):
        ids_BT[row, : lengths[row]] = torch.as_tensor(tokens, dtype=torch.int64)
    return ids_BT, lengths
