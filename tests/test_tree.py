"""DDTree: the most probable prefixes, lossless, and never worse than a chain of the same size."""

import itertools

import pytest
import torch

from stage2_train import decode, tree
from tests.test_decode import BLOCK, PROMPT, VOCAB, Prophet, as_draft, tiny_target


def test_the_tree_holds_exactly_the_most_probable_prefixes():
    torch.manual_seed(0)
    logits_KV = 2 * torch.randn(3, 5)
    logp = torch.log_softmax(logits_KV, -1)
    prefixes = {
        path: float(sum(logp[k, v] for k, v in enumerate(path)))
        for depth in (1, 2, 3)
        for path in itertools.product(range(5), repeat=depth)
    }
    best = sorted(prefixes, key=prefixes.get, reverse=True)
    for budget in (1, 4, 17, 60):
        built = tree.build_tree(logits_KV, budget)
        got = {tuple(built.tokens[n] for n in built.path(node)) for node in range(budget)}
        assert got == set(best[:budget])
        assert all(parent < node for node, parent in enumerate(built.parents))
        assert [len(built.path(node)) for node in range(budget)] == built.depths


def test_ancestor_mask_by_definition():
    built = tree.Tree([7, 8, 9, 7], [-1, 0, -1, 2], [1, 2, 1, 2])
    mask = tree.ancestor_mask(built, 2, torch.float32)[0, 0] == 0
    assert mask[:, :3].all()
    sees = mask[1:, 3:].int().tolist()
    assert sees == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


class Unsure(Prophet):
    """Knows the output, but where its favourite is wrong, the truth is its second choice."""

    def draft(self, state, embeds_BD):
        h_BD = super().draft(state, embeds_BD)
        done = sum(len(states) for states in state) - self.prompt_length
        for slot, token in enumerate(self.output[done + 1 : done + BLOCK], start=1):
            h_BD[slot, token] = max(float(h_BD[slot, token]), 9.5)
        return h_BD


@pytest.mark.parametrize(
    "kind", ["llama", "sliding", pytest.param("qwen3_5", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("budget", [1, 24])
def test_output_is_the_targets_own(kind, budget):
    model = tiny_target(kind)
    own = decode.greedy(model, PROMPT, 40).tokens
    taps = [model.model.layers[0]]
    drafter = Unsure(own, len(PROMPT), 0.4, seed=budget)
    fast = tree.speculative_tree(model, taps, as_draft(drafter), PROMPT, 20, budget=budget)
    assert fast.tokens == own[:20]
    seen = sum(len(states) for states in drafter.states)
    assert seen <= len(PROMPT) + len(own)
    if kind == "llama":
        chain = decode.speculative(
            model, taps, as_draft(Unsure(own, len(PROMPT), 0.4, seed=budget)), PROMPT, 20,
            most_drafts=budget,
        )  # fmt: skip
        assert fast.acceptance >= chain.acceptance


@pytest.mark.slow
def test_a_tree_beats_a_chain_when_the_second_choice_is_right():
    model = tiny_target()
    own = decode.greedy(model, PROMPT, 60).tokens
    taps = [model.model.layers[0]]
    made = [Unsure(own, len(PROMPT), 1.0) for _ in range(2)]
    chain = decode.speculative(model, taps, as_draft(made[0]), PROMPT, 25)
    wide = tree.speculative_tree(model, taps, as_draft(made[1]), PROMPT, 25, budget=62)
    assert chain.acceptance == 1.0
    assert wide.acceptance == BLOCK
    assert chain.tokens == wide.tokens == own[:25]


def test_stops_at_an_end_token():
    model = tiny_target()
    own = decode.greedy(model, PROMPT, 30).tokens
    end = own[11]
    drafter = Unsure(own + [0] * 20, len(PROMPT), 0.3)
    fast = tree.speculative_tree(
        model, [model.model.layers[0]], as_draft(drafter), PROMPT, 30, [end], budget=9
    )
    assert fast.tokens == own[: own.index(end) + 1]
    assert sum(fast.commits) == own.index(end)
    assert end < VOCAB
