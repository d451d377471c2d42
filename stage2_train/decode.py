"""Speculative decoding of a target by a drafter: chain verification, greedy or by sampling.

The target's prefill gives the first token. From then on every pass drafts a block that starts at
the last committed token (the anchor) and verifies anchor + drafts in one target forward. Greedy
verification commits the longest prefix of the drafts that the target itself would have taken,
then the target's own next token; sampled verification commits by rejection (Leviathan et al.,
arXiv 2211.17192), so that every token has the target's distribution. The tapped states of the
committed positions extend the drafter's context; a state at or after the anchor is never read.

Real acceptance = tokens committed by verification passes / verification passes. The prefill and
its one token don't count; tokens after an end token don't count; a last pass that overshoots
`max_new_tokens` counts whole (the limit is the measurement's, not the drafter's).

Recurrent targets can't forget a rejected token: their states are copied before the pass, and
after a rejection the committed tokens are run again from the copy (`Decoded.replays`).

Legend: T tokens, B block (anchor and B-1 slots), K = B-1 slots, L tapped states, D width, V vocab.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Decoded:
    """What one prompt's decoding gave.

    Attributes:
        tokens: new tokens, the prefill's first, cut at the end token and at `max_new_tokens`.
        commits: tokens committed by each verification pass (at least 1).
        replays: extra target passes that put a recurrent target back after a rejection.
        seconds: wall time in s: prefill, draft, verify (replays included).
    """

    tokens: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    replays: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
    )

    @property
    def acceptance(self) -> float:
        """Tokens committed per verification pass; NaN when there was none."""
        return sum(self.commits) / len(self.commits) if self.commits else float("nan")


class TargetCursor:
    """A target's cache that stands behind the committed tokens.

    Args:
        model: a transformers causal LM in evaluation mode.
        taps: modules whose output is a tapped state, in the drafter's order; () taps nothing.
    """

    def __init__(self, model: Any, taps: Sequence[torch.nn.Module] = ()) -> None:
        from transformers import DynamicCache

        self.model, self.taps = model, list(taps)
        self.device = next(model.parameters()).device
        self.cache = DynamicCache(config=model.config)
        self.num_tokens = 0
        self.replays = 0
        self._before: dict[int, Any] = {}
        for layer in self.cache.layers:
            # A sliding window that is full forgets what a rollback needs, unless told not to.
            if hasattr(layer, "activate_past_recording") and not _is_recurrent(layer):
                layer.activate_past_recording()

    def forward(
        self, tokens: Sequence[int], *, last_only: bool = False, **extra: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Appends tokens and returns their logits and tapped states.

        Args:
            tokens: N ids that follow the cache.
            last_only: logits of the last position only (prefill).
            extra: passed to the model (mask and positions of a tree).

        Returns:
            logits_NV float32 (N = 1 with `last_only`) and hidden_NLD, or None without taps.
        """
        if len(tokens) > 1 and self.num_tokens:
            self._before = {
                index: copy.deepcopy(layer)
                for index, layer in enumerate(self.cache.layers)
                if _is_recurrent(layer)
            }
        logits_1NV, states = tapped(
            self.model,
            self.taps,
            input_ids=torch.tensor([list(tokens)], device=self.device),
            cache=self.cache,
            logits_to_keep=1 if last_only else 0,
            **extra,
        )
        self.num_tokens += len(tokens)
        hidden_NLD = torch.stack([state[0] for state in states], 1) if states else None
        return logits_1NV[0], hidden_NLD

    def keep(self, block: Sequence[int], num_kept: int) -> None:
        """Keeps the first `num_kept` tokens of the block that the last `forward` appended."""
        removed = len(block) - num_kept
        recurrent = bool(self._before) and removed > 0
        for index, layer in enumerate(self.cache.layers):
            if _is_recurrent(layer):
                if recurrent:
                    self.cache.layers[index] = self._before[index]
            else:
                layer.crop(-(len(block) if recurrent else removed))
        self.num_tokens -= removed
        self._before = {}
        if recurrent and num_kept:
            self.num_tokens -= num_kept
            taps, self.taps = self.taps, []
            self.forward(block[:num_kept], last_only=True)
            self.taps = taps
            self._before = {}
            self.keep((), 0)
            self.replays += 1

    def select(self, num_block: int, kept: Sequence[int]) -> None:
        """Keeps these positions of the last `num_block` ones, in this order (a path of a tree)."""
        start = self.num_tokens - num_block
        order = [*range(start), *(start + index for index in kept)]
        index = torch.tensor(order, device=self.device)
        for layer in self.cache.layers:
            layer.keys = layer.keys.index_select(-2, index)
            layer.values = layer.values.index_select(-2, index)
        self.num_tokens = len(order)

    @property
    def maskable(self) -> bool:
        """True when every layer keeps all keys, so that a tree can be masked."""
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer for layer in self.cache.layers)

    @property
    def recurrent(self) -> bool:
        """True when some layer's state can't be cropped."""
        return any(_is_recurrent(layer) for layer in self.cache.layers)


def _is_recurrent(layer: Any) -> bool:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    return isinstance(layer, LinearAttentionCacheLayerMixin)


def tapped(model: Any, taps: Sequence[torch.nn.Module], **inputs: Any) -> tuple[Tensor, list]:
    """A forward pass: logits float32 and each tapped module's output [batch, N, D]."""
    states: list[Tensor] = []

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [tap.register_forward_hook(hook) for tap in taps]
    try:
        return model(use_cache=True, **inputs).logits.float(), states
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Draft:
    """What drafting needs: the drafter, the frozen embedding and head, and the mask token.

    Attributes:
        embed_VD, head_VD: frozen rows; drafting computes in the drafter's dtype.
        ids_S: the draft vocabulary, if `head_VD` has only its rows.
    """

    drafter: Any
    embed_VD: Tensor
    head_VD: Tensor
    mask_token_id: int
    block_size: int
    ids_S: Tensor | None = None

    def logits(self, state: Any, anchor: int) -> Tensor:
        """Logits_KV float32 of the block's slots after the anchor token; -inf: never drafted."""
        ids = torch.full((self.block_size,), self.mask_token_id, device=self.embed_VD.device)
        ids[0] = anchor
        h_BD = self.drafter.draft(state, F.embedding(ids, self.embed_VD))
        h_KD = h_BD.reshape(self.block_size, -1)[1:]
        logits_KS = F.linear(h_KD.to(self.head_VD.dtype), self.head_VD).float()
        if self.ids_S is None:
            return logits_KS
        logits_KV = logits_KS.new_full((len(logits_KS), len(self.embed_VD)), -math.inf)
        logits_KV[:, self.ids_S] = logits_KS
        return logits_KV


@torch.no_grad()
def greedy(
    model: Any, prompt: Sequence[int], max_new_tokens: int, end_tokens: Sequence[int] = ()
) -> Decoded:
    """The target's own greedy output, one token a pass, with the same kind of cache."""
    cursor, decoded = TargetCursor(model), Decoded()
    started = time.perf_counter()
    logits_NV, _ = cursor.forward(prompt, last_only=True)
    cursor.keep(prompt, len(prompt))
    decoded.tokens.append(int(logits_NV[-1].argmax()))
    decoded.seconds["prefill"] = time.perf_counter() - started
    while len(decoded.tokens) < max_new_tokens and decoded.tokens[-1] not in end_tokens:
        logits_NV, _ = cursor.forward(decoded.tokens[-1:], last_only=True)
        cursor.keep(decoded.tokens[-1:], 1)
        decoded.tokens.append(int(logits_NV[-1].argmax()))
        decoded.commits.append(1)
    decoded.seconds["verify"] = time.perf_counter() - started - decoded.seconds["prefill"]
    return decoded


@torch.no_grad()
def speculative(
    model: Any,
    taps: Sequence[torch.nn.Module],
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    end_tokens: Sequence[int] = (),
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    most_drafts: int | None = None,
) -> Decoded:
    """Decodes one prompt with chain verification.

    Args:
        taps: the target's tapped modules, in the order of the cache's states.
        prompt: at least one id.
        temperature: 0 verifies greedily; above it, by sampling with `generator`.
        most_drafts: verify only the first so many drafts of a block.

    Returns:
        At temperature 0 the tokens of `greedy`; above it, tokens of the target's distribution.
    """

    def propose(logits_KV: Tensor) -> tuple[list[int], Tensor]:
        drafted_KV = logits_KV[:most_drafts]
        return _choose_all(drafted_KV, temperature, generator), drafted_KV

    def verify(cursor: TargetCursor, anchor: int, proposal: Any) -> tuple[list[list[int]], Tensor]:
        drafts, drafted_KV = proposal
        block = [anchor, *drafts]
        logits_BV, hidden_BLD = cursor.forward(block)
        if temperature > 0:
            accepted, following = accept_sampled(
                torch.softmax(logits_BV / temperature, -1),
                torch.softmax(drafted_KV / temperature, -1),
                drafts,
                generator,
            )
        else:
            accepted, following = accept_greedy(logits_BV.argmax(-1).tolist(), drafts)
        cursor.keep(block, accepted + 1)
        return [[*drafts[:accepted], following]], hidden_BLD[: accepted + 1]

    def first(logits_V: Tensor) -> int:
        return _choose_all(logits_V[None], temperature, generator)[0]

    return by_blocks(
        TargetCursor(model, taps), draft, prompt, max_new_tokens, end_tokens,
        first=first, propose=propose, verify=verify,
    )  # fmt: skip


def by_blocks(
    cursor: TargetCursor, draft: Draft, prompt: Sequence[int], max_new_tokens: int,
    end_tokens: Sequence[int], *, first: Callable, propose: Callable, verify: Callable,
) -> Decoded:  # fmt: skip
    """The loop of speculative decoding: prefill, then draft and verify until the end.

    Args:
        first: logits [V] behind the prompt -> the first token.
        propose: the drafter's logits [K, V] -> what is to be verified.
        verify: (cursor, anchor, proposal) -> the tokens that each pass committed, and the states
            of the positions kept in the cursor.
    """
    state, decoded = draft.drafter.new_state(), Decoded()
    clock = _Clock(decoded.seconds)
    logits_NV, hidden_TLD = cursor.forward(prompt, last_only=True)
    cursor.keep(prompt, len(prompt))
    decoded.tokens.append(first(logits_NV[-1]))
    clock.lap("prefill")
    while len(decoded.tokens) < max_new_tokens and decoded.tokens[-1] not in end_tokens:
        anchor = decoded.tokens[-1]
        draft.drafter.extend(state, as_stored(hidden_TLD))
        proposal = propose(draft.logits(state, anchor))
        clock.lap("draft")
        passes, hidden_TLD = verify(cursor, anchor, proposal)
        for tokens in passes:
            committed = cut(tokens, end_tokens)
            decoded.tokens += committed
            decoded.commits.append(len(committed))
            if committed[-1] in end_tokens:
                break
        clock.lap("verify")
    decoded.replays = cursor.replays
    decoded.tokens = decoded.tokens[:max_new_tokens]
    return decoded


def accept_greedy(chosen: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """Number of drafts that agree with the target's choices, and the target's next token.

    Args:
        chosen: the target's argmax after the anchor and after each draft (len(drafts) + 1).
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return accepted, chosen[accepted]


def accept_sampled(
    target_BV: Tensor, drafter_KV: Tensor, drafts: Sequence[int], generator: Any
) -> tuple[int, int]:
    """Rejection sampling of a chain: each committed token has the target's distribution.

    Draft k is kept with probability min(1, p/q); the first one refused is replaced by a sample
    of max(p - q, 0), normalised; after K kept ones the next token is a sample of the target's.

    Args:
        target_BV: target probabilities after the anchor and after each draft, B = K + 1.
        drafter_KV: the probabilities that the drafts were sampled from.
    """
    for k, token in enumerate(drafts):
        p, q = float(target_BV[k, token]), float(drafter_KV[k, token])
        if float(torch.rand((), generator=generator)) * q >= p:
            rest_V = (target_BV[k] - drafter_KV[k]).clamp(min=0)
            if float(rest_V.sum()) <= 0:  # rounding only: p and q are the same distribution
                rest_V = target_BV[k]
            return k, sample(rest_V[None], generator)[0]
    return len(drafts), sample(target_BV[len(drafts)][None], generator)[0]


def as_stored(hidden_TLD: Tensor) -> Tensor:
    """States as the cache would hold them: rounded to bfloat16, the drafter's training input."""
    return hidden_TLD.to(torch.bfloat16)


def cut(tokens: list[int], end_tokens: Sequence[int]) -> list[int]:
    """Tokens up to and with the first end token."""
    for index, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: index + 1]
    return tokens


def _choose_all(logits_KV: Tensor, temperature: float, generator: Any) -> list[int]:
    if temperature <= 0:
        return logits_KV.argmax(-1).tolist()
    return sample(torch.softmax(logits_KV / temperature, -1), generator)


def sample(probability_KV: Tensor, generator: torch.Generator | None) -> list[int]:
    """A token a row, drawn where the generator lives: on the CPU the same on every device."""
    if generator is not None:
        probability_KV = probability_KV.to(generator.device)
    return torch.multinomial(probability_KV, 1, generator=generator)[:, 0].tolist()


class _Clock:
    """Adds the time since the last lap to a named total."""

    def __init__(self, totals: dict[str, float]) -> None:
        self.totals, self.last = totals, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.totals[name] += now - self.last
        self.last = now
