"""Batched greedy answers of a local target, equal to the unbatched ones up to rounding.

Prompts are padded on the left and pads are masked, with positions counted from the first real
token. Recurrent layers would take pads into their state, so a target that has any gets batches of
equal length. Rows that have ended leave the batch.

B: rows still open; T: tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.errors import Interrupted
from shared.target import Target, end_token_ids

# The batch is rebuilt when this share of it is still open: gathering the cache costs a step or so.
_COMPACT_AT = 0.75


@dataclass(frozen=True)
class Answer:
    """Generated ids without the end token, and whether the limit cut it."""

    ids: list[int]
    cut: bool


def group_prompts(lengths: Sequence[int], batch_size: int, *, equal: bool) -> list[list[int]]:
    """Indices of prompts answered together: neighbours in length, or of one length (`equal`)."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    groups: list[list[int]] = []
    for index in order:
        full = not groups or len(groups[-1]) >= batch_size
        if full or (equal and lengths[groups[-1][0]] != lengths[index]):
            groups.append([])
        groups[-1].append(index)
    return groups


def greedy(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    on_tokens: Callable[[int], None] = lambda count: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Greedy continuations of a batch of prompts.

    Args:
        prompts: token ids; of equal length when the target has recurrent layers.
        on_tokens: called after each step with the number of tokens it made.
        stopped: asked before each step; true ends it with `Interrupted`.

    Raises:
        Interrupted: `stopped` said so.
    """
    import torch
    from transformers import DynamicCache

    device, longest = target.device, max(map(len, prompts))
    padded = any(len(prompt) != longest for prompt in prompts)
    ids_BT = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask_BT = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids_BT[row, longest - len(prompt) :] = torch.as_tensor(prompt)
        mask_BT[row, longest - len(prompt) :] = 1
    ids_BT, mask_BT = ids_BT.to(device), mask_BT.to(device)
    position_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
    ends = torch.tensor(end_token_ids(target), device=device)
    cache = DynamicCache(config=target.decoder.config)
    # transformers 5.24 renamed the argument; both names are in use.
    parameters = inspect.signature(type(target.decoder).forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    rows = list(range(len(prompts)))
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            if stopped():
                raise Interrupted("stopped while generating", do="The same command goes on")
            extra = {"attention_mask": mask_BT, "position_ids": position_BT} if padded else {}
            output = target.decoder(
                input_ids=ids_BT, use_cache=True, **{cache_name: cache}, **extra
            )
            logits_BV = target.head(output.last_hidden_state[:, -1])
            token_B = logits_BV.argmax(-1)
            over_B = torch.isin(token_B, ends)
            made = 0
            for row, token, over in zip(rows, token_B.tolist(), over_B.tolist(), strict=True):
                if ended[row]:
                    continue
                made += 1
                if over:
                    ended[row] = True
                else:
                    answers[row].append(token)
            on_tokens(made)
            keep = [k for k, row in enumerate(rows) if not ended[row]]
            if not keep:
                break
            ids_BT, position_BT = token_B[:, None], position_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :1])], 1)
            if len(keep) <= _COMPACT_AT * len(rows):
                chosen = torch.tensor(keep, device=device)
                cache.batch_select_indices(chosen)
                ids_BT, position_BT, mask_BT = ids_BT[chosen], position_BT[chosen], mask_BT[chosen]
                rows = [rows[k] for k in keep]
    return [Answer(ids, not over) for ids, over in zip(answers, ended, strict=True)]
