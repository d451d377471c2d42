"""Speculative decoding: equal to the target's own output, whatever the drafter says."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from stage2_train import decode
from stage2_train.decode_batch import batchable, greedy_batch, speculative_batch

VOCAB, BLOCK = 97, 6


def tiny_target(kind: str = "llama"):
    torch.manual_seed(3)
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()
    if kind == "sliding":
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4,
            use_sliding_window=True, sliding_window=9, max_window_layers=1,
        )  # fmt: skip
        return Qwen2ForCausalLM(config).eval()
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention"] * 3 + ["full_attention"], initializer_range=0.4,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config).eval()


class Prophet:
    """Drafts the target's known output, wrong in some slots; records what extends its context."""

    def __init__(self, output: list[int], prompt_length: int, wrong: float, seed: int = 0) -> None:
        self.output, self.prompt_length = output, prompt_length
        self.wrong, self.rng = wrong, np.random.default_rng(seed)
        self.states: list[torch.Tensor] = []

    def new_state(self):
        self.states = []
        return self.states

    def extend(self, state, hidden_TLD):
        state.append(hidden_TLD)

    def draft(self, state, embeds_BD):
        done = sum(len(states) for states in state) - self.prompt_length
        assert int(embeds_BD[0].argmax()) == self.output[done], "the anchor is the last committed"
        assert int(embeds_BD[1].argmax()) == VOCAB - 1, "the other slots are masked"
        following = self.output[done + 1 : done + BLOCK]
        following = following + [0] * (BLOCK - 1 - len(following))
        wrong = self.rng.random(BLOCK - 1) < self.wrong
        tokens = [(token + 1) % VOCAB if bad else token
                  for token, bad in zip(following, wrong, strict=True)]  # fmt: skip
        h_BD = torch.zeros(BLOCK, VOCAB)
        h_BD[range(1, BLOCK), tokens] = 10.0
        return h_BD


def as_draft(drafter) -> decode.Draft:
    return decode.Draft(drafter, torch.eye(VOCAB), torch.eye(VOCAB), VOCAB - 1, BLOCK)


PROMPT = [5, 17, 3, 44, 8, 9, 21]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "sliding", "qwen3_5"])
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_output_is_the_targets_own(kind, wrong):
    model = tiny_target(kind)
    own = decode.greedy(model, PROMPT, 25)
    assert len(own.tokens) == 25
    drafter = Prophet(decode.greedy(model, PROMPT, 60).tokens, len(PROMPT), wrong)
    taps = [model.model.layers[0], model.model.layers[2]]
    fast = decode.speculative(model, taps, as_draft(drafter), PROMPT, 25)
    assert fast.tokens == own.tokens
    if wrong == 0.0:
        assert fast.commits == [BLOCK] * math.ceil(24 / BLOCK)
        assert fast.acceptance == BLOCK
    if wrong == 1.0:
        assert fast.commits == [1] * 24
    assert (fast.replays > 0) == (kind == "qwen3_5" and wrong > 0)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_drafter_sees_exactly_the_committed_states(kind):
    model = tiny_target(kind)
    drafter = Prophet(decode.greedy(model, PROMPT, 60).tokens, len(PROMPT), 0.4)
    taps = [model.model.layers[0], model.model.layers[2]]
    fast = decode.speculative(model, taps, as_draft(drafter), PROMPT, 30)
    seen_TLD = torch.cat(drafter.states)
    ids = torch.tensor([PROMPT + fast.tokens])[:, : len(seen_TLD)]
    with torch.no_grad():
        whole = model(ids, output_hidden_states=True).hidden_states
    expected_TLD = torch.stack([whole[1][0], whole[3][0]], 1)
    if kind == "qwen3_5":
        assert seen_TLD.shape == expected_TLD.shape
    # hidden_states[-1] is after the final norm; only the first tap compares directly.
    torch.testing.assert_close(
        seen_TLD[:, 0].float(), expected_TLD[:, 0].to(torch.bfloat16).float(), rtol=0.02, atol=0.02
    )


class Prophets:
    """One prophet a prompt: states are asked for in the prompts' order."""

    def __init__(self, prophets: list[Prophet]) -> None:
        self.prophets, self.following = prophets, iter(prophets)

    def new_state(self):
        prophet = next(self.following)
        return prophet, prophet.new_state()

    def extend(self, state, hidden_TLD):
        state[0].extend(state[1], hidden_TLD)

    def draft(self, state, embeds_BD):
        return state[0].draft(state[1], embeds_BD)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_prompts_together_are_decoded_as_alone(wrong):
    model = tiny_target()
    prompts = [PROMPT, [3, 1], [7] * 12, [60, 2, 33, 4]]
    long = [decode.greedy(model, prompt, 60).tokens for prompt in prompts]
    end = long[2][9]
    alone = [decode.greedy(model, prompt, 20, [end]) for prompt in prompts]
    together = greedy_batch(model, prompts, 20, [end])
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert len({len(d.tokens) for d in alone}) > 1, "one ends early"
    taps = [model.model.layers[0], model.model.layers[2]]
    fast = [
        decode.speculative(model, taps, as_draft(Prophet(o, len(p), wrong, i)), p, 20, [end])
        for i, (o, p) in enumerate(zip(long, prompts, strict=True))
    ]
    prophets = [
        Prophet(o, len(p), wrong, i) for i, (o, p) in enumerate(zip(long, prompts, strict=True))
    ]
    batch = speculative_batch(model, taps, as_draft(Prophets(prophets)), prompts, 20, [end])
    assert [d.tokens for d in batch] == [d.tokens for d in fast] == [d.tokens for d in alone]
    assert [d.commits for d in batch] == [d.commits for d in fast]
    assert batchable(model)
    assert not batchable(tiny_target("qwen3_5"))
    assert not batchable(tiny_target("sliding"))


def test_drafter_sees_the_same_states_in_a_batch():
    model, prompts = tiny_target(), [PROMPT, [3, 1], [7] * 12]
    taps = [model.model.layers[0], model.model.layers[2]]
    long = [decode.greedy(model, prompt, 60).tokens for prompt in prompts]
    alone = [Prophet(o, len(p), 0.4, i) for i, (o, p) in enumerate(zip(long, prompts, strict=True))]
    batched = [
        Prophet(o, len(p), 0.4, i) for i, (o, p) in enumerate(zip(long, prompts, strict=True))
    ]
    for prophet, prompt in zip(alone, prompts, strict=True):
        decode.speculative(model, taps, as_draft(prophet), prompt, 20)
    speculative_batch(model, taps, as_draft(Prophets(batched)), prompts, 20)
    for one, other in zip(alone, batched, strict=True):
        torch.testing.assert_close(
            torch.cat(other.states), torch.cat(one.states), rtol=0.01, atol=0.01
        )


def test_stops_at_an_end_token():
    model = tiny_target()
    own = decode.greedy(model, PROMPT, 30).tokens
    end = own[11]
    stop = own.index(end)
    drafter = Prophet(own + [0] * 20, len(PROMPT), 0.0)
    fast = decode.speculative(model, model.model.layers[:1], as_draft(drafter), PROMPT, 30, [end])
    assert fast.tokens == own[: stop + 1] == decode.greedy(model, PROMPT, 30, [end]).tokens
    assert sum(fast.commits) == stop, "the prefill's token is not counted, nor any after the end"


def test_accept_greedy_and_cut():
    assert decode.accept_greedy([1, 2, 3, 4], [1, 2, 9]) == (2, 3)
    assert decode.accept_greedy([1, 2, 3, 4], [1, 2, 3]) == (3, 4)
    assert decode.accept_greedy([1, 2, 3, 4], [9, 2, 3]) == (0, 1)
    assert decode.cut([1, 2, 3], [2]) == [1, 2]
    assert decode.cut([1, 2, 3], []) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("sharp", [0.5, 3.0])
def test_sampled_verification_keeps_the_targets_distribution(sharp):
    """Chi-square over all 3-token continuations of a 4-word vocabulary, drafter quite wrong."""
    vocab, slots, tries = 4, 2, 4000
    generator = torch.Generator().manual_seed(11)
    table = torch.softmax(sharp * torch.randn(vocab, vocab, generator=generator), -1)
    drafter_KV = torch.softmax(sharp * torch.randn(slots, vocab, generator=generator), -1)
    counts = np.zeros((vocab,) * 3)
    for _ in range(tries):
        anchor, out = 0, []
        while len(out) < 3:
            drafts = torch.multinomial(drafter_KV, 1, generator=generator)[:, 0].tolist()
            target_BV = table[[anchor, *drafts]]
            accepted, following = decode.accept_sampled(target_BV, drafter_KV, drafts, generator)
            out += [*drafts[:accepted], following]
            anchor = following
        counts[tuple(out[:3])] += 1
    t = table.double().numpy()
    t /= t.sum(-1, keepdims=True)
    expected = tries * (t[0][:, None, None] * t[:, :, None] * t[None, :, :])
    keep = expected.ravel() >= 5
    observed = np.append(counts.ravel()[keep], counts.ravel()[~keep].sum())
    wanted = np.append(expected.ravel()[keep], expected.ravel()[~keep].sum())
    used = wanted > 0
    assert stats.chisquare(observed[used], wanted[used]).pvalue > 1e-3


def test_sampling_end_to_end_runs_and_is_reproducible():
    model = tiny_target()

    class Uniform:
        def new_state(self):
            return SimpleNamespace()

        def extend(self, state, hidden_TLD):
            pass

        def draft(self, state, embeds_BD):
            return torch.zeros(BLOCK, VOCAB)

    outputs = [
        decode.speculative(
            model, model.model.layers[:1], as_draft(Uniform()), PROMPT, 12, temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        ).tokens
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert outputs[0] == outputs[1] != outputs[2]
    assert len(outputs[0]) == 12
