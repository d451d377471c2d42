"""A draft vocabulary: chosen by count, honest in loss and accuracy, kept, unseen in the output."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from run_tools import write_run
from safetensors.torch import load_file
from scipy import stats
from test_decode import PROMPT, VOCAB, tiny_target
from test_export import INFO, drafter_config, settings, trained
from test_loss import materialised

from shared.config import Dtype
from shared.errors import ConfigError, MismatchError
from stage2_train import decode, export
from stage2_train.compare import analyse
from stage2_train.config import CompareConfig, DecideBy, Layout
from stage2_train.decode_batch import speculative_batch
from stage2_train.distill import Mixture
from stage2_train.draft_vocabulary import choose, take_ids
from stage2_train.drafter import Drafter
from stage2_train.exported_model import DrafttapeConfig, DrafttapeModel
from stage2_train.heldout import heldout
from stage2_train.loss import batch_loss, block_loss, slot_weights
from stage2_train.tree import build_tree, speculative_tree


def test_the_most_frequent_tokens_with_the_end_tokens():
    counts = np.array([0, 5, 2, 5, 2, 0, 9])
    assert choose(counts, 3, [0]).tolist() == [0, 1, 6]  # 1 before 3: ties by id
    assert choose(counts, 5, [5, 5]).tolist() == [1, 2, 3, 5, 6]
    for size in (1, 7):
        with pytest.raises(ConfigError, match="draft_vocabulary"):
            choose(counts, size, [0])


@pytest.fixture
def slots():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(9, 5, 16, generator=generator, dtype=torch.float64) * 3
    head = torch.randn(53, 16, generator=generator, dtype=torch.float64)
    label = torch.randint(0, 53, (9, 4), generator=generator)
    mask = torch.rand(9, 4, generator=generator) < 0.8
    ids = torch.randperm(53, generator=generator)[:20].sort().values
    return h, label, slot_weights(mask, 7.0), head, ids


def test_loss_equals_all_logits_then_the_index(slots):
    h, label, weight, head, ids = slots
    h1, h2 = h.clone().requires_grad_(), h.clone().requires_grad_()
    total, sums = block_loss(
        h1, label, weight, head[ids], denominator=3.5, chunk=5, ids_S=ids
    )  # fmt: skip
    hidden = torch.full((53,), -torch.inf, dtype=torch.float64).index_fill(0, ids, 0.0)
    logits = h2[:, 1:] @ head.T + hidden
    covered = torch.isin(label, ids)
    nll = F.cross_entropy(logits[covered], label[covered], reduction="none")
    expected = (nll * weight[covered]).sum() / 3.5
    total.backward()
    expected.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(h1.grad, h2.grad)
    counts = weight > 0
    assert 0 < (counts & covered).sum() < counts.sum()
    assert torch.equal(sums["count"], counts.sum(0))
    right = (logits.argmax(-1) == label) & counts
    assert torch.equal(sums["correct"].long(), right.sum(0))
    assert not (right & ~covered).any()
    torch.testing.assert_close(sums["missed"], (weight * ~covered).sum())


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_mixtures_are_about_the_vocabularys_share_of_the_target(slots, alpha):
    h, label, weight, head, ids = slots
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(20, 16, generator=generator, dtype=torch.float64)
    target = states, torch.randint(0, 20, (9, 4), generator=generator)
    mixture = Mixture(0.1, 0.3, 0.9)
    h1, h2 = h.clone().requires_grad_(), h.clone().requires_grad_()
    total, _ = block_loss(
        h1, label, weight, head[ids], denominator=2.0, chunk=5, mixture=mixture,
        target_NKD=target, alpha=alpha, ids_S=ids,
    )  # fmt: skip
    # Nothing behind a label that can't be drafted is reached.
    covered = torch.isin(label, ids) | (weight == 0)
    reached = covered.cumprod(1).bool() if alpha else covered
    row = torch.searchsorted(ids, label).clamp(max=19)
    known = weight * reached
    expected = materialised(h2, row, known, head[ids], target, mixture, alpha)[0] / 2
    total.backward()
    expected.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(h1.grad, h2.grad)


class Guesser:
    """Drafts at random, from the committed tokens alone."""

    def new_state(self):
        return []

    def extend(self, state, hidden_TLD):
        state.append(hidden_TLD)

    def draft(self, state, embeds_BD):
        generator = torch.Generator().manual_seed(sum(map(len, state)))
        return torch.randn(embeds_BD.shape, generator=generator) * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_output_is_the_targets_own(kind):
    model = tiny_target(kind)
    own = decode.greedy(model, PROMPT, 25)
    ids = torch.unique(torch.tensor(own.tokens[::2]))
    assert set(own.tokens) - set(ids.tolist())
    draft = decode.Draft(Guesser(), torch.eye(VOCAB), torch.eye(VOCAB)[ids], VOCAB - 1, 6, ids)
    logits = draft.logits(draft.drafter.new_state(), 5)
    assert torch.equal(torch.isfinite(logits).all(0).nonzero()[:, 0], ids)
    taps = [model.model.layers[0], model.model.layers[2]]
    assert decode.speculative(model, taps, draft, PROMPT, 25).tokens == own.tokens
    for budget in (8, 400):  # more nodes than a slot has tokens
        tree = speculative_tree(model, taps, draft, PROMPT, 25, budget=budget)
        assert tree.tokens == own.tokens
    generator = torch.Generator().manual_seed(0)
    sampled = decode.speculative(
        model, taps, draft, PROMPT, 25, temperature=1.0, generator=generator
    )
    assert len(sampled.tokens) == 25
    if kind == "llama":
        assert speculative_batch(model, taps, draft, [PROMPT], 25)[0].tokens == own.tokens


def test_trees_have_only_what_can_be_drafted():
    logits = torch.full((2, 9), -torch.inf)
    logits[:, [2, 7]] = torch.tensor([1.0, 0.5])
    assert sorted(build_tree(logits, 50).tokens) == [2, 2, 2, 7, 7, 7]


def test_sampling_has_the_targets_distribution():
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    q = torch.softmax(torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.5]]), -1)
    seen = np.zeros(4)
    for _ in range(800):
        draft = int(torch.multinomial(q[0], 1, generator=generator))
        accepted, following = decode.accept_sampled(p, q, [draft], generator)
        seen[draft if accepted else following] += 1
    assert stats.chisquare(seen, p[0].numpy().astype(float) * 800).pvalue > 0.01


@pytest.mark.parametrize("layout", [Layout.drafttape, Layout.speculators, Layout.dflash])
def test_exports(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(export, "reload_difference", lambda *_: 0.0)  # another process: slow
    cfg = drafter_config("full_attention", draft_vocabulary=4)
    drafter = trained(cfg)
    drafter.draft_ids.copy_(torch.tensor([0, 3, 4, 38]))
    given = settings(layout=layout, dtype=Dtype.float32)
    if layout is Layout.dflash:
        with pytest.raises(ConfigError, match="draft vocabulary"):
            export.write(tmp_path, drafter, cfg, INFO, given)
        return
    head = torch.randn(4, 32)
    export.write(tmp_path, drafter, cfg, INFO, given, head)
    tensors = load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 4
    if layout is Layout.drafttape:
        assert tensors["draft_ids"].tolist() == [0, 3, 4, 38]
    else:
        assert tensors["d2t"].tolist() == [0, 2, 2, 35]
        assert tensors["t2d"].nonzero()[:, 0].tolist() == [0, 3, 4, 38]
        assert (len(tensors["t2d"]), tensors["t2d"].dtype) == (40, torch.bool)
        assert torch.equal(tensors["lm_head.weight"], head)


@pytest.mark.slow
def test_exported_code_decodes_what_the_target_would():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=40,
    )  # fmt: skip
    target = LlamaForCausalLM(sizes).eval()
    cfg = drafter_config("linear_attention", draft_vocabulary=9)
    document = export.model_config(cfg, INFO, Layout.drafttape, Dtype.float32)
    model = DrafttapeModel(DrafttapeConfig(**document)).eval()
    ids = torch.arange(3, 39, 4)
    model.load_state_dict(trained(cfg).state_dict() | {"draft_ids": ids})
    prompt = torch.randint(0, 39, (1, 9))
    expected = target.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(model.spec_generate(target, prompt, max_new_tokens=20), expected)


def test_other_ids_are_refused(tmp_path):
    drafter = Drafter(drafter_config("full_attention", draft_vocabulary=3), 3, 32)
    ids = {"draft_ids": torch.tensor([1, 2, 3])}
    with pytest.raises(MismatchError, match="there is none"):
        take_ids(drafter, {}, tmp_path)
    assert take_ids(drafter, ids | {"x": torch.ones(1)}, tmp_path).keys() == {"x"}
    assert drafter.draft_ids.tolist() == [1, 2, 3]
    with pytest.raises(MismatchError, match="1 of 3 ids differ"):
        take_ids(drafter, {"draft_ids": torch.tensor([1, 2, 4])}, tmp_path)
    with pytest.raises(MismatchError, match="2 tokens there, 3 here"):
        take_ids(drafter, {"draft_ids": torch.tensor([1, 2])}, tmp_path)


def test_a_missed_label_costs_chance_and_counts_as_wrong():
    generator = torch.Generator().manual_seed(0)
    cfg = drafter_config("full_attention", draft_vocabulary=10)
    drafter = trained(cfg)
    drafter.draft_ids.copy_(torch.arange(10))
    from stage2_train.batch import Batch
    from stage2_train.config import LossConfig

    batch = Batch.pack(
        ["a"], [torch.arange(8, 20)], torch.randn(12, 3, 32, generator=generator).bfloat16(),
        [torch.ones(12, dtype=torch.bool)], [torch.tensor([3, 6])],
    )  # fmt: skip
    embed = torch.randn(40, 32, generator=generator)
    found = heldout(drafter, [batch], embed, drafter.head_rows(embed), LossConfig(), 4)
    assert found["accuracy"] == 0
    assert found["estimated_acceptance"] == 1
    assert found["slot_count"] == [2, 2, 2]
    assert found["heldout_loss"] == pytest.approx(np.log(40))
    loss, _ = batch_loss(
        drafter(batch, embed), batch, drafter.head_rows(embed), LossConfig(), num_states=3,
        denominator=1.0, ids_S=drafter.draft_ids,
    )  # fmt: skip
    assert loss == 0


def test_losses_over_other_vocabularies_decide_nothing(tmp_path):
    runs = []
    for name, size, digest in (("all", None, None), ("some", 1000, "a"), ("given", 1000, "b")):
        path = write_run(tmp_path / name, loss=np.ones(3), evaluation={"real_acceptance": 1.5})
        record = json.loads((path / "run.json").read_text())
        record["config"]["drafter"]["draft_vocabulary"] = size
        record["draft_vocabulary"] = digest and {"size": size, "digest": digest}
        (path / "run.json").write_text(json.dumps(record))
        runs.append(str(path))
    for pair in (runs[:2], runs[1:]):
        with pytest.raises(ConfigError, match="another task"):
            analyse(CompareConfig(runs=pair))
        analyse(CompareConfig(runs=pair, decide_by=DecideBy.real_acceptance))
