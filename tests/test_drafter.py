"""The drafter: what a block may see, its size, its incremental state."""

from types import SimpleNamespace

import pytest
import torch

from shared.config import compose
from shared.drafter_config import drafter_size
from shared.errors import ConfigError
from stage2_train import config
from stage2_train.attention import attention_groups, block_mask, blocks_attend
from stage2_train.drafter import Drafter
from stage2_train.geometry import Geometry
from stage2_train.loss import block_loss
from stage2_train.param_rules import route

VOCABULARY, WIDTH, STATES = 40, 32, 3
TYPES = ["linear_attention", "full_attention", "sliding_attention", "linear_attention"]


def tiny(layer_types=TYPES, **changes):
    settings = {
        "layer_types": list(layer_types), "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
        "block_size": 4, "sliding_window": 6, "chunk_size": 4, "mask_token_id": 39,
        "init_std": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    return Drafter(config.DrafterConfig(**settings | changes), STATES, WIDTH).double()


def packed(lengths, anchors, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return SimpleNamespace(
        input_ids_T=torch.randint(0, 39, (total,), generator=generator),
        hidden_TLD=torch.randn(total, STATES, WIDTH, generator=generator, dtype=torch.float64),
        document_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        position_T=torch.cat([torch.arange(n) for n in lengths]),
        anchor_N=torch.tensor(anchors),
    )


@pytest.fixture(scope="module")
def embed():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("layer_types", [[kind] for kind in sorted(set(TYPES))] + [TYPES])
def test_trap_22_block_sees_only_its_document_before_its_anchor(layer_types, embed):
    drafter = tiny(layer_types)
    batch = packed([10, 13], [3, 8, 14, 19])
    batch.hidden_TLD.requires_grad_()
    h_NBD = drafter(batch, embed)
    for n, (start, anchor) in enumerate([(0, 3), (0, 8), (10, 14), (10, 19)]):
        for slot in (0, 3):
            (grad,) = torch.autograd.grad(h_NBD[n, slot].sum(), batch.hidden_TLD, retain_graph=True)
            moved = grad.abs().amax((1, 2)) > 0
            seen = torch.zeros(23, dtype=torch.bool)
            seen[start:anchor] = True
            assert not (moved & ~seen).any()
            assert moved[anchor - 1]
            if layer_types != ["sliding_attention"]:
                assert moved[start:anchor].all()


def test_trap_22_blocks_do_not_see_each_other(embed):
    drafter = tiny()
    batch = packed([10, 13], [3, 8, 14, 19])
    before = drafter(batch, embed)
    batch.input_ids_T[8] = (batch.input_ids_T[8] + 1) % 39
    after = drafter(batch, embed)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert (before[1] - after[1]).abs().amax(-1).min() > 0


def test_trap_07_packed_document_does_not_leak(embed):
    drafter = tiny()
    alone, together = packed([13], [4, 9]), packed([10, 13], [3, 8, 14, 19])
    for name in ("input_ids_T", "hidden_TLD"):
        setattr(alone, name, getattr(together, name)[10:].clone())
    torch.testing.assert_close(
        drafter(together, embed)[2:], drafter(alone, embed), rtol=1e-11, atol=1e-11
    )
    before, moved = _second_document(drafter, together, embed)
    together.hidden_TLD[:10] = 1e3
    together.input_ids_T[:10] = (together.input_ids_T[:10] + 1) % 39
    after, again = _second_document(drafter, together, embed)
    assert torch.equal(after, before)
    for ours, theirs in zip(again, moved, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def _second_document(drafter, batch, embed):
    """Hidden states of blocks 2 and 3, and the gradients of their loss."""
    drafter.zero_grad()
    h_NBD = drafter(batch, embed)[2:]
    h_NBD.square().sum().backward()
    return h_NBD.detach(), [p.grad.clone() for p in drafter.parameters()]


@pytest.mark.parametrize("cuts", [[14], [1] * 14, [5, 1, 7, 1], [12, 2]])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_incremental_drafting_equals_the_training_forward(cuts, bidirectional, embed):
    drafter = tiny(bidirectional_block=bidirectional)
    batch = packed([18], [14])
    state, start = drafter.new_state(), 0
    for size in cuts:
        drafter.extend(state, batch.hidden_TLD[start : start + size])
        drafter.draft(state, embed[[7, 39, 39, 39]])  # drafting changes nothing
        start += size
    h_BD = drafter.draft(state, embed[[int(batch.input_ids_T[14]), 39, 39, 39]])
    torch.testing.assert_close(h_BD, drafter(batch, embed)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 6])
def test_grouped_attention_equals_one_dense_mask(window):
    batch = packed([40, 3, 30], [0, *range(2, 40, 2), 41, 44, 50, 51, 72])
    geometry = Geometry.of(batch.document_T, batch.position_T, batch.anchor_N, block=4, chunk=4)
    anchors = geometry.num_anchors
    assert len(attention_groups(geometry, window)) > 3
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    q, kb, vb = (normal(2, anchors, 4, 8) for _ in range(3))
    kc, vc = normal(2, 73, 8), normal(2, 73, 8)
    mask = block_mask(geometry, 0, anchors, 0, 73, window)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.flatten(1, 2), torch.cat([kc, kb.flatten(1, 2)], 1),
        torch.cat([vc, vb.flatten(1, 2)], 1), attn_mask=mask,
    )  # fmt: skip
    grouped = blocks_attend(q, kc, vc, kb, vb, geometry, window)
    torch.testing.assert_close(grouped.flatten(1, 2), dense)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ["linear_attention"], "conv_kernel_size": 2},
        {"layer_types": ["full_attention", "sliding_attention"], "num_key_value_heads": 1},
        {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6},
        {"draft_vocabulary": 7, "bidirectional_block": True},
    ],
)
def test_the_stated_size_is_the_built_drafters(changes):
    drafter = tiny(**changes)
    size = drafter_size(drafter.cfg, STATES, WIDTH)
    assert size.total == sum(p.numel() for p in drafter.parameters())
    mixers = {"linear_attn": 0, "self_attn": 0, "mlp": 0}
    for name, parameter in drafter.layers.named_parameters():
        part = name.split(".")[1]
        if part in mixers:
            mixers[part] += parameter.numel()
    assert list(mixers.values()) == [size.gdn, size.attention, size.mlp]
    assert size.fc == drafter.fc.weight.numel()


def test_size_for_qwen3_6_27b():
    cfg = compose("train", config.TrainConfig, ["drafter=qwen3_6_27b", "run_dir=x", "cache.root=x"])
    with torch.device("meta"):
        drafter = Drafter(cfg.drafter, 5, 5120)
    count = sum(p.numel() for p in drafter.parameters())
    assert abs(count - 1.731e9) < 1.731e6
    assert drafter_size(cfg.drafter, 5, 5120).total == count


def test_every_matrix_has_its_parts():
    drafter = tiny(linear_num_key_heads=16, linear_num_value_heads=16)
    table = route(drafter.named_parameters(), drafter.parts())
    assert {row.owner for row in table.rows} == {"muon", "adamw"}
    owner = {row.name: row.owner for row in table.rows}
    assert owner["layers.0.linear_attn.q_proj.weight"] == "muon"
    assert owner["layers.0.linear_attn.b_proj.weight"] == "adamw"
    assert owner["layers.0.linear_attn.q_conv1d.weight"] == "adamw"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": ["mamba"]}, "mamba"),
        ({"layer_types": []}, "no layers"),
        ({"num_key_value_heads": 3}, "share"),
        ({"block_size": 1}, "slot"),
        ({"hidden_size": 31}, "width"),
    ],
)
def test_bad_sizes_are_named(changes, word):
    with pytest.raises(ConfigError, match=word):
        tiny(**changes)


def test_bfloat16_compute_keeps_float32_masters(embed):
    drafter = tiny().float()
    batch = packed([10, 13], [3, 8, 14, 19])
    label = torch.randint(0, 39, (4, 3), generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter.compute_dtype = dtype
        drafter.zero_grad()
        h_NBD = drafter(batch, embed.to(dtype))
        assert h_NBD.dtype == dtype
        loss, _ = block_loss(
            h_NBD, label, torch.ones(4, 3), embed.to(dtype), denominator=12.0, chunk=5
        )
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in drafter.parameters())
        results.append([loss.detach(), *(p.grad.clone() for p in drafter.parameters())])
    assert abs(results[0][0] - results[1][0]) < 0.05 * results[0][0]
    for exact, rounded in zip(*results, strict=True):
        assert (exact - rounded).norm() < 0.2 * exact.norm() + 1e-3


def test_extended_in_bfloat16(embed):
    drafter = tiny().float()
    drafter.compute_dtype = torch.bfloat16
    batch, state = packed([12], [11]), drafter.new_state()
    for part in batch.hidden_TLD[:11].bfloat16().split(4):
        drafter.extend(state, part)
    h_BD = drafter.draft(state, embed[[3, 39, 39, 39]])
    batch.input_ids_T[11] = 3
    expected = drafter(batch, embed)[0]
    torch.testing.assert_close(h_BD, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_logits_start_with_the_stated_deviation(deviation):
    drafter = tiny(logit_std=deviation)
    rng = torch.Generator().manual_seed(0)
    head_VD = torch.randn(500, 32, generator=rng) * torch.rand(500, 1, generator=rng)
    drafter.match_head(head_VD)
    states_ND = torch.randn(400, 32, generator=rng)
    logits_NV = drafter.norm(states_ND).detach() @ head_VD.T
    assert float(logits_NV.pow(2).mean().sqrt()) == pytest.approx(deviation, rel=0.03)
