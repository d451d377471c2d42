"""The target in the training loop: states are computed when a row is needed, and forgotten.

The honest opponent of a cache: the same snapshot, rows, anchors and digests, only the states are
computed again in every epoch. The token ids come from the cache; its states are not read.

B documents of a batch, T tokens of the longest, L states, D width.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shared.capture import capture
from shared.config import TargetConfig, typed
from shared.errors import MismatchError
from shared.spec import CaptureSpec
from shared.store import Store
from shared.target import Target, load_target
from stage2_train.feed import Part


class OnlineFeed:
    """Rows from the target itself.

    Args:
        target: the loaded model.
        spec: which layers, and whether the last hidden state, are taken.
        reader: gives the tokens of a sample.
        tokens_per_row: bounds a batch of the target's forward pass, pads included.
    """

    def __init__(
        self, target: Target, spec: CaptureSpec, reader: Any, *, tokens_per_row: int
    ) -> None:
        self.target, self.spec, self.reader = target, spec, reader
        self.tokens_per_row = tokens_per_row

    def rows(
        self, tasks: Iterable[tuple[Any, tuple[Part, ...]]]
    ) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yields (key, tokens int32 [T], hidden uint16 [T, L, D]) for every (key, parts)."""
        for key, parts in tasks:
            tokens = [self.reader.read_tokens(name) for name, *_ in parts]
            states = self.states(tokens)
            windows = [slice(start, stop) for *_, start, stop in parts]
            yield (
                key,
                np.concatenate([t[window] for t, window in zip(tokens, windows, strict=True)]),
                np.concatenate([s[window] for s, window in zip(states, windows, strict=True)]),
            )

    @torch.no_grad()
    def states(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        """uint16 [T, L, D] a document, in length-sorted batches of a row's tokens."""
        order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
        states: list[Any] = [None] * len(tokens)
        while order:
            batch = [order.pop()]
            longest = len(tokens[batch[0]])
            while order and longest * (len(batch) + 1) <= self.tokens_per_row:
                batch.append(order.pop())
            padded_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
            for place, index in enumerate(batch):
                padded_BT[place, : len(tokens[index])] = torch.from_numpy(tokens[index].copy())
            lengths = [len(tokens[index]) for index in batch]
            hidden_BTLD = capture(
                self.target,
                padded_BT.to(self.target.device),
                lengths,
                self.spec.layer_ids,
                self.spec.last_hidden,
            )
            bits_BTLD = hidden_BTLD.cpu().view(torch.int16).numpy().view(np.uint16)
            for place, index in enumerate(batch):
                states[index] = bits_BTLD[place, : lengths[place]]
        return states

    def close(self) -> None:
        """Nothing was started."""


def open_online(store: Store, device: torch.device, tokens_per_row: int) -> OnlineFeed:
    """Loads the cache's own target, as its record says, and checks that it is that target.

    Raises:
        MismatchError: the weights on this machine are not those that the cache was made with.
        TargetError: it can't be loaded.
    """
    described = store.target_assets().info.get("target")
    if described is None:
        raise MismatchError(
            "the cache doesn't say how to load its target",
            where=store.root,
            do="Extract into it again, or train with source=cache",
        )
    config = typed(TargetConfig, described, where=f"{store.root}/target")
    target = load_target(config, str(device))
    if target.weights_digest != store.spec.weights:
        raise MismatchError(
            f"the target's weights are {target.weights_digest}, the cache's {store.spec.weights}",
            where=config.model,
        )
    return OnlineFeed(target, store.spec, store.reader(), tokens_per_row=tokens_per_row)
