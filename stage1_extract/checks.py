"""What is checked before and while states are captured.

T: tokens; L: states; D: channels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shared.capture import capture, pack_batch, pad_batch
from shared.errors import TargetError
from shared.spec import CaptureSpec
from shared.target import Target

# Mean relative error of a token's state between a batch and the sample alone. bf16 storage alone
# gives about 1e-4 on float32 compute; a leak through pads or packing gives 4e-3 and more.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
# The same between two packed batches that differ in the document before: only a leak, or rounding
# where experts group tokens of all documents, moves it.
LEAK = {"float32": 1e-4, "bfloat16": 2e-3, "float16": 1e-3}
_TEST_TOKENS = 128


def finite(hidden_TLD: np.ndarray) -> bool:
    """No NaN or infinity among bf16 values given as uint16."""
    flat = hidden_TLD.reshape(-1)
    for start in range(0, len(flat), 1 << 20):
        if int((flat[start : start + (1 << 20)] & 0x7FFF).max(initial=0)) >= 0x7F80:
            return False
    return True


def self_test_samples(tokens: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """A few token sequences of different lengths, out of those by sample id."""
    ordered = sorted(tokens, key=lambda name: (-len(tokens[name]), name))
    return [tokens[ordered[i]] for i in (0, -1, len(ordered) // 2)]


def self_test(target: Target, spec: CaptureSpec, samples: Sequence[np.ndarray]) -> dict[str, float]:
    """Compares a sample alone with itself in slots 0 and 3 of a padded batch, and when repeated.

    Args:
        samples: a few token sequences of different lengths; longer ones are cut for the test.

    Returns:
        The largest mean relative error per state, by name.

    Raises:
        TargetError: a state differs by more than the tolerance; names the layer.
    """
    cut = sorted((tokens[:_TEST_TOKENS] for tokens in samples), key=len)
    short, long = cut[0], cut[-1]
    if len(short) > 2 and len(short) == len(long):
        short = short[: len(short) // 2 + 1]
    packed = spec.backend.get("batching") == "packed"
    alone = _states(target, spec, [short])[0]
    batched = _states(target, spec, [short, long, cut[len(cut) // 2], short], packed)
    again = _states(target, spec, [short])[0]
    if packed:
        packing_test(target, spec, [long, short])
    limit = TOLERANCE[target.info.cfg.dtype.value]
    worst: dict[str, float] = {}
    for state in range(spec.num_states):
        taps = spec.layer_ids
        name = f"layer {taps[state]}" if state < len(taps) else "last hidden state"
        for where, other in (("slot 0", batched[0]), ("slot 3", batched[3]), ("twice", again)):
            error = relative_error(other[:, state], alone[:, state])
            worst[name] = max(worst.get(name, 0.0), error)
            if not error <= limit:
                raise TargetError(
                    f"{name} of a sample differs between alone and {where} of a batch by "
                    f"{error:.2g} (tolerance {limit:.2g})",
                    where=f"self-test of {spec.architecture} on {target.device}",
                    do="Use another attention backend or dtype; self_test=false records it anyway",
                )
    return worst


def packing_test(target: Target, spec: CaptureSpec, samples: Sequence[np.ndarray]) -> float:
    """Changes every token of the first packed document and looks at the second one.

    Returns:
        How far the second document's states moved; 0 where nothing leaks.

    Raises:
        TargetError: they moved, or the backend refuses packed samples.
    """
    first, second = samples[0][:_TEST_TOKENS], samples[1][:_TEST_TOKENS]
    other = first[::-1].copy()
    other = np.where(other == first, (first + 1) % target.embed.weight.shape[0], other)
    ours = _states(target, spec, [first, second], packed=True)[1]
    theirs = _states(target, spec, [other, second], packed=True)[1]
    moved = relative_error(ours, theirs)
    if not moved <= LEAK[target.info.cfg.dtype.value]:
        raise TargetError(
            f"packed documents leak: the second moves by {moved:.2g} when the first changes",
            where=f"self-test of {spec.architecture} on {target.device}",
            do="Use batching=padded, or target.attention=flash_attention_2",
        )
    return moved


def relative_error(ours_TD: Any, theirs_TD: Any) -> float:
    """Mean over tokens of |ours - theirs| / |theirs|, in L2 over channels."""
    difference = (ours_TD.double() - theirs_TD.double()).norm(dim=-1)
    return float((difference / theirs_TD.double().norm(dim=-1).clamp_min(1e-12)).mean())


def _states(
    target: Target, spec: CaptureSpec, sequences: list[np.ndarray], packed: bool = False
) -> list[Any]:
    """[T, L, D] of each sequence."""
    ids_BT, lengths = pack_batch(sequences) if packed else pad_batch(sequences, 0)
    hidden = capture(
        target, ids_BT.to(target.device), lengths, spec.layer_ids, spec.last_hidden, packed
    ).cpu()
    if packed:
        return list(hidden[0].split(lengths))
    return [hidden[row, :length] for row, length in enumerate(lengths)]
