"""DDTree: verify a tree of likely continuations instead of one chain (arXiv 2604.12989).

One drafting pass gives a distribution per slot. Slots are drafted independently, so a
continuation's probability is the product of its slots', and a best-first heap lists the most
probable prefixes: exactly the `budget` best ones, each behind its own parent. The target verifies
all of them in one pass: positions by depth, attention to the context and to ancestors only. Greedy
output is the target's own, as with a chain.

Targets whose layers can't be masked so (recurrent ones, sliding windows) verify path by path: the
most probable path first, then, if the target's own next token is in the tree beside it, the most
probable path below that one. Every such pass counts as a pass.

Legend: K slots, V vocabulary, M nodes of the tree.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stage2_train.decode import Decoded, Draft, TargetCursor, by_blocks


@dataclass(frozen=True)
class Tree:
    """Nodes in order of falling probability; a parent stands before its children.

    Attributes:
        tokens: the draft of each node.
        parents: index of the parent, -1 for the anchor.
        depths: slot of each node, from 1.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def children(self, node: int) -> dict[int, int]:
        """Token -> node, below a node (-1: the anchor)."""
        return {
            self.tokens[child]: child for child, parent in enumerate(self.parents) if parent == node
        }

    def path(self, node: int) -> list[int]:
        """Nodes from the first below the anchor down to this one."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def best_below(self, node: int) -> list[int]:
        """The most probable path below a node: at each step the first child, which is the best."""
        nodes = []
        while True:
            child = next((c for c, parent in enumerate(self.parents) if parent == node), None)
            if child is None:
                return nodes
            nodes.append(child)
            node = child


def build_tree(logits_KV: Tensor, budget: int) -> Tree:
    """The `budget` most probable prefixes.

    Args:
        logits_KV: the drafter's logits of the slots.
        budget: nodes, at least 1.
    """
    slots = len(logits_KV)
    width = min(budget, logits_KV.shape[1])
    top_KW, token_KW = torch.log_softmax(logits_KV.float(), -1).topk(width, -1)
    score, token = top_KW.tolist(), token_KW.tolist()
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    # (cost, insertion, slot, rank, parent): a prefix's best sibling and best child follow it.
    heap = [(-score[0][0], 0, 0, 0, -1)]
    counter = 1
    while heap and len(tokens) < budget:
        cost, _, slot, rank, parent = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token[slot][rank])
        parents.append(parent)
        depths.append(slot + 1)
        if rank + 1 < width and score[slot][rank + 1] > -math.inf:
            sibling = cost + score[slot][rank] - score[slot][rank + 1]
            heapq.heappush(heap, (sibling, counter, slot, rank + 1, parent))
            counter += 1
        if slot + 1 < slots:
            heapq.heappush(heap, (cost - score[slot + 1][0], counter, slot + 1, 0, node))
            counter += 1
    return Tree(tokens, parents, depths)


def ancestor_mask(tree: Tree, num_context: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, 1 + M, num_context + 1 + M]: context, the anchor, ancestors, itself."""
    size = 1 + len(tree.tokens)
    sees_MM = torch.zeros(size, size, dtype=torch.bool)
    sees_MM[:, 0] = True
    for node, parent in enumerate(tree.parents):
        sees_MM[node + 1] |= sees_MM[parent + 1]
        sees_MM[node + 1, node + 1] = True
    allowed = torch.cat([torch.ones(size, num_context, dtype=torch.bool), sees_MM], 1)
    mask = torch.zeros(allowed.shape, dtype=dtype)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


@torch.no_grad()
def speculative_tree(
    model: Any,
    taps: Sequence[torch.nn.Module],
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    end_tokens: Sequence[int] = (),
    *,
    budget: int = 32,
) -> Decoded:
    """Decodes one prompt greedily with tree verification; see `decode.speculative`."""
    cursor = TargetCursor(model, taps)
    return by_blocks(
        cursor, draft, prompt, max_new_tokens, end_tokens,
        first=lambda logits_V: int(logits_V.argmax()),
        propose=lambda logits_KV: build_tree(logits_KV, budget),
        verify=_verify_masked if cursor.maskable else _verify_paths,
    )  # fmt: skip


def _verify_masked(cursor: TargetCursor, anchor: int, tree: Tree) -> tuple[list[list[int]], Tensor]:
    """One pass over the whole tree. Returns the committed tokens and the kept positions' states."""
    start, block = cursor.num_tokens, [anchor, *tree.tokens]
    dtype = next(cursor.model.parameters()).dtype
    positions = torch.tensor([[start] + [start + depth for depth in tree.depths]])
    logits_MV, hidden_MLD = cursor.forward(
        block,
        attention_mask=ancestor_mask(tree, start, dtype).to(cursor.device),
        position_ids=positions.to(cursor.device),
    )
    chosen = logits_MV.argmax(-1).tolist()
    node, kept = -1, [0]
    while (child := tree.children(node).get(chosen[node + 1])) is not None:
        node = child
        kept.append(node + 1)
    cursor.select(len(block), kept)
    return [[block[index] for index in kept[1:]] + [chosen[node + 1]]], hidden_MLD[kept]


def _verify_paths(cursor: TargetCursor, anchor: int, tree: Tree) -> tuple[list[list[int]], Tensor]:
    """Path by path. Returns the tokens committed by each pass and the kept positions' states."""
    steps, hidden, node, token = [], [], -1, anchor
    while True:
        path = tree.best_below(node)
        block = [token, *(tree.tokens[n] for n in path)]
        logits_BV, hidden_BLD = cursor.forward(block)
        chosen = logits_BV.argmax(-1).tolist()
        accepted = 0
        while accepted < len(path) and tree.tokens[path[accepted]] == chosen[accepted]:
            accepted += 1
        cursor.keep(block, accepted + 1)
        hidden.append(hidden_BLD[: accepted + 1])
        token = chosen[accepted]
        steps.append([tree.tokens[n] for n in path[:accepted]] + [token])
        if accepted:
            node = path[accepted - 1]
        beside = tree.children(node).get(token)
        if beside is None or not tree.best_below(beside):
            return steps, torch.cat(hidden)
        node = beside
