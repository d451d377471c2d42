"""Greedy chain decoding of several prompts in one target forward a pass.

`decode.speculative` is the twin: one prompt at a time, as a single user is served. Here the
verification blocks of P prompts are one batch, which a CPU multiplies several times faster. Keys
are never removed: a rejected position is masked out for its prompt from then on. So every layer of
the target must keep all its keys; recurrent targets and sliding windows decode one prompt a time.

Legend: P prompts, N new tokens a prompt, S cached positions, B block, K = B-1 slots, L tapped
states, D width, V vocab.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stage2_train.decode import Decoded, Draft, TargetCursor, accept_greedy, as_stored, cut, tapped


def batchable(model: Any) -> bool:
    """Whether every layer of the target keeps all keys, so that prompts can be masked apart."""
    return TargetCursor(model).maskable


class BatchCursor:
    """A target's cache behind P prompts; positions count only what was kept."""

    def __init__(self, model: Any, taps: Sequence[torch.nn.Module], num_prompts: int) -> None:
        from transformers import DynamicCache

        self.model, self.taps = model, list(taps)
        self.device, self.dtype = next(model.parameters()).device, next(model.parameters()).dtype
        self.cache = DynamicCache(config=model.config)
        self.kept_PS = torch.zeros(num_prompts, 0, dtype=torch.bool, device=self.device)

    def forward(self, ids_PN: Tensor, real_PN: Tensor) -> tuple[Tensor, Tensor | None]:
        """Appends tokens; those that are not `real` are pads and stay invisible.

        Returns:
            logits_PNV float32 and hidden_PNLD, None without taps.
        """
        past = self.kept_PS.shape[1]
        causal_NN = torch.ones(ids_PN.shape[1], ids_PN.shape[1], device=self.device).tril().bool()
        seen = torch.cat(
            [
                self.kept_PS[:, None].expand(-1, ids_PN.shape[1], past),
                causal_NN & real_PN[:, None],
            ],
            2,
        )[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~seen, torch.finfo(self.dtype).min)
        position_PN = self.kept_PS.sum(1, keepdim=True) + (real_PN.cumsum(1) - 1).clamp_min(0)
        logits_PNV, states = tapped(
            self.model,
            self.taps,
            input_ids=ids_PN,
            cache=self.cache,
            attention_mask=mask,
            position_ids=position_PN,
        )
        self.kept_PS = torch.cat([self.kept_PS, real_PN], 1)
        return logits_PNV, torch.stack(states, 2) if states else None

    def keep(self, num_block: int, kept_P: Sequence[int]) -> None:
        """Of each prompt's last `num_block` tokens keeps the first `kept`."""
        index_B = torch.arange(num_block, device=self.device)
        self.kept_PS[:, -num_block:] &= index_B < torch.tensor(kept_P, device=self.device)[:, None]

    def select(self, rows: Sequence[int]) -> None:
        """Goes on with these prompts alone."""
        index_P = torch.tensor(rows, device=self.device)
        self.cache.batch_select_indices(index_P)
        self.kept_PS = self.kept_PS[index_P]


@dataclass
class _Text:
    """A prompt's output, and of its drafter the states not taken in yet and its own state."""

    result: Decoded
    hidden_TLD: Tensor | None = None
    state: Any = None


def _prefill(
    cursor: BatchCursor, prompts: Sequence[Sequence[int]]
) -> tuple[list[int], list[Tensor | None]]:
    """Each prompt's first token and its tapped states [T, L, D]."""
    longest = max(map(len, prompts))
    ids_PT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    real_PT = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_PT[row, : len(prompt)] = torch.tensor(prompt)
        real_PT[row, : len(prompt)] = True
    logits_PTV, hidden = cursor.forward(ids_PT.to(cursor.device), real_PT.to(cursor.device))
    first = [int(logits_PTV[row, len(prompt) - 1].argmax()) for row, prompt in enumerate(prompts)]
    states = [None if hidden is None else hidden[row, : len(p)] for row, p in enumerate(prompts)]
    return first, states


@torch.no_grad()
def greedy_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_tokens: Sequence[int] = (),
) -> list[Decoded]:
    """The target's own greedy outputs; each prompt's seconds are its share of the batch's."""
    started = time.perf_counter()
    cursor = BatchCursor(model, (), len(prompts))
    first, _ = _prefill(cursor, prompts)
    results = [Decoded([token]) for token in first]
    texts = [_Text(result) for result in results]
    while texts := _going(cursor, texts, max_new_tokens, end_tokens):
        last_P1 = torch.tensor([[t.result.tokens[-1]] for t in texts], device=cursor.device)
        logits_P1V, _ = cursor.forward(last_P1, torch.ones_like(last_P1, dtype=torch.bool))
        for text, token in zip(texts, logits_P1V[:, -1].argmax(-1).tolist(), strict=True):
            if _open(text.result, max_new_tokens, end_tokens):
                text.result.tokens.append(token)
                text.result.commits.append(1)
    _share(results, "verify", time.perf_counter() - started)
    return results


@torch.no_grad()
def speculative_batch(
    model: Any,
    taps: Sequence[torch.nn.Module],
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_tokens: Sequence[int] = (),
) -> list[Decoded]:
    """Greedy chain verification of all prompts; see `decode.speculative` for the terms.

    Prompts that have ended leave the batch once they are a quarter of it. Each prompt's seconds are
    its share of the batch's.
    """
    clock = time.perf_counter()
    cursor = BatchCursor(model, taps, len(prompts))
    first, hidden = _prefill(cursor, prompts)
    results = [Decoded([token]) for token in first]
    texts = [_Text(*text, draft.drafter.new_state()) for text in zip(results, hidden, strict=True)]
    clock = _lap(results, "prefill", clock)
    while texts := _going(cursor, texts, max_new_tokens, end_tokens):
        block_PB = torch.full((len(texts), draft.block_size), draft.mask_token_id)
        block_PB[:, 0] = torch.tensor([text.result.tokens[-1] for text in texts])
        slots = []
        for row, text in enumerate(texts):
            if not _open(text.result, max_new_tokens, end_tokens):
                slots.append(
                    draft.embed_VD.new_zeros(draft.block_size - 1, draft.embed_VD.shape[1])
                )
                continue
            draft.drafter.extend(text.state, as_stored(text.hidden_TLD))
            embedded_BD = F.embedding(block_PB[row].to(draft.embed_VD.device), draft.embed_VD)
            h_BD = draft.drafter.draft(text.state, embedded_BD)
            slots.append(h_BD.reshape(draft.block_size, -1)[1:].to(draft.embed_VD.dtype))
        row_PK = F.linear(torch.stack(slots).to(draft.head_VD.dtype), draft.head_VD).argmax(-1)
        block_PB[:, 1:] = (row_PK if draft.ids_S is None else draft.ids_S[row_PK]).cpu()
        clock = _lap(results, "draft", clock)
        ids_PB = block_PB.to(cursor.device)
        logits_PBV, hidden_PBLD = cursor.forward(ids_PB, torch.ones_like(ids_PB, dtype=torch.bool))
        chosen_PB = logits_PBV.argmax(-1).tolist()
        kept = []
        for row, (text, block) in enumerate(zip(texts, block_PB.tolist(), strict=True)):
            if not _open(text.result, max_new_tokens, end_tokens):
                kept.append(0)
                continue
            accepted, following = accept_greedy(chosen_PB[row], block[1:])
            committed = cut([*block[1 : accepted + 1], following], end_tokens)
            text.result.tokens += committed
            text.result.commits.append(len(committed))
            text.hidden_TLD = hidden_PBLD[row, : accepted + 1]
            kept.append(accepted + 1)
        cursor.keep(draft.block_size, kept)
        clock = _lap(results, "verify", clock)
    for result in results:
        result.tokens = result.tokens[:max_new_tokens]
    return results


def _going(
    cursor: BatchCursor, texts: list[_Text], max_new_tokens: int, end_tokens: Sequence[int]
) -> list[_Text]:
    """The batch, without the prompts that have ended once they are a quarter of it."""
    rows = [row for row, text in enumerate(texts) if _open(text.result, max_new_tokens, end_tokens)]
    if 4 * len(rows) > 3 * len(texts):
        return texts
    if rows:
        cursor.select(rows)
    return [texts[row] for row in rows]


def _open(result: Decoded, max_new_tokens: int, end_tokens: Sequence[int]) -> bool:
    return len(result.tokens) < max_new_tokens and result.tokens[-1] not in end_tokens


def _share(results: Sequence[Decoded], name: str, seconds: float) -> None:
    for result in results:
        result.seconds[name] += seconds / len(results)


def _lap(results: Sequence[Decoded], name: str, since: float) -> float:
    now = time.perf_counter()
    _share(results, name, now - since)
    return now
