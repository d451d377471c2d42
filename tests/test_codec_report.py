"""codec-report: figures against naive twins, and the whole word on a tiny target's cache."""

import json

import numpy as np
import pytest
import torch

from shared.cli import main
from shared.config import Dtype, TargetConfig
from shared.errors import DataError
from shared.recode import recode
from shared.store import Store
from shared.target import load_target
from stage2_train import codec_measure, codec_report, codec_train
from tests.target_cache import target_cache

DRAFTER = [
    "drafter.layer_types=[linear_attention,full_attention]", "drafter.intermediate_size=24",
    "drafter.num_attention_heads=2", "drafter.num_key_value_heads=1", "drafter.head_dim=8",
    "drafter.linear_num_key_heads=2", "drafter.linear_num_value_heads=2",
    "drafter.linear_key_head_dim=8", "drafter.linear_value_head_dim=8", "drafter.block_size=4",
    "batch.tokens_per_row=48", "batch.anchors_per_sample=6", "trainer.steps=4", "loader.workers=0",
    "trainer.tensorboard=false", "optimizer.lr=1e-2",
]  # fmt: skip


@pytest.mark.slow
def test_entropy_against_counting():
    rng = np.random.default_rng(0)
    exponents = rng.integers(120, 124, (500, 2, 3))  # 2 bits, and independent of the channel
    bits = ((exponents << 7) | rng.integers(0, 8, exponents.shape)).astype(np.uint16)
    whole, given = codec_measure.entropy_limits([bits[:200], bits[200:]])
    assert whole == pytest.approx(5, abs=0.02)
    assert given == pytest.approx(whole, abs=0.02)
    exponents[:] = np.arange(120, 126).reshape(2, 3)  # decided by the channel
    bits = ((exponents << 7) | rng.integers(0, 8, exponents.shape)).astype(np.uint16)
    whole, given = codec_measure.entropy_limits([bits])
    assert whole == pytest.approx(3 + np.log2(6), abs=0.02)
    assert given == pytest.approx(3, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_the_targets_tail_equals_a_whole_pass_with_the_state_replaced(family):
    target = load_target(
        TargetConfig(name="t", model=f"random://{family}?seed=1", dtype=Dtype.float32, num_taps=2)
    )
    rng, tail = np.random.default_rng(0), codec_measure.Tail(target)
    ids_T = rng.integers(0, 250, 70).astype(np.int32)
    own_TD = tail.whole(ids_T)
    ids = torch.from_numpy(ids_T).long()[None]
    with torch.inference_mode():
        assert torch.equal(own_TD, target.decoder(input_ids=ids).last_hidden_state[0])
    given_TD = torch.randn(70, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits_TD = given_TD.view(torch.int16).numpy().view(np.uint16)

    def replaced(_module, _args, output):
        new = given_TD.float()[None]
        return (new, *output[1:]) if isinstance(output, tuple) else new

    for layer in (0, 3, 6):
        hook = target.layers[layer].register_forward_hook(replaced)
        with torch.inference_mode():
            naive_TD = target.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        hook.remove()
        assert torch.equal(tail.after(layer, ids_T, bits_TD), naive_TD)
    assert torch.equal(tail.whole(ids_T), own_TD), "the target is as it was"


def test_kl_and_top1_against_the_definition():
    rng = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False)
    torch.nn.init.normal_(head.weight, generator=rng)
    target = type("T", (), {"head": head})()
    a, b = torch.randn(700, 8, generator=rng), torch.randn(700, 8, generator=rng)
    found = codec_measure.next_token(target, a, {"same": a, "other": b})
    assert found["same"].tolist() == [0, 700, 700]
    with torch.no_grad():
        p, q = (head(x).double().softmax(-1) for x in (a, b))
    assert found["other"][0] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert found["other"][1] == int((p.argmax(-1) == q.argmax(-1)).sum())


def test_changes_of_acceptance():
    rng = np.random.default_rng(0)
    count = np.full((20, 3), 10.0)
    right = rng.binomial(10, [0.8, 0.6, 0.4], (20, 3)).astype(float)
    prompts = np.stack([rng.integers(20, 60, 20), np.full(20, 20)], 1).astype(float)
    arm = codec_train.Trained(1.0, right, count, prompts, "d")
    worse = codec_train.Trained(1.0, right - (right > 0), count, prompts * [0.9, 1], "d")
    found = codec_train.changes([arm], [arm])
    assert found["real"]["change"].mean == found["real"]["change"].width == 0
    found = codec_train.changes([arm] * 3, [worse] * 3)
    assert found["real"]["change"].mean == pytest.approx(-0.1)
    accuracy = right.sum(0) / 200
    estimate = 1 + accuracy[0] + accuracy[0] * accuracy[1] + accuracy.prod()
    assert found["estimated"]["lossless"] == pytest.approx(estimate)
    assert found["estimated"]["change"].high < 0
    assert found["estimated"]["over_seeds"].n == 3


@pytest.mark.slow
def test_the_word_measures_trains_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(codec_measure, "PREAD_BYTES", 1)
    store = target_cache(tmp_path / "cache")
    out, overrides = tmp_path / "out", ",".join(f"'{text}'" for text in DRAFTER)
    words = [
        "codec-report", str(tmp_path / "cache"), f"out={out}", "codecs=[lossless,int8,int4]",
        "every_tap=true", "train=true", f"overrides=[{overrides}]", "max_new_tokens=8",
    ]  # fmt: skip
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "int4 (experimental)" in text
    found = json.loads((out / "report.json").read_text())
    rows = found["codecs"]
    assert rows["lossless"]["layer_error"] == [0, 0]
    for name in ("int8", "int4"):
        infos = [Store.open(out / "caches" / name).shard(shard) for shard in
                 Store.open(out / "caches" / name).shard_ids()]  # fmt: skip
        assert rows[name]["layer_error"] == pytest.approx(infos[0].layer_error, rel=1e-4)
        assert rows[name]["bits"] > rows[name]["limit_bits"] > 0
        assert set(rows[name]["training"]) == {"real", "estimated", "loss"}
    layers = [f"layer {layer}" for layer in store.spec.layer_ids]
    kl = {name: [rows[name]["next_token"][layer]["kl"]["mean"] for layer in layers]
          for name in ("int8", "int4")}  # fmt: skip
    assert 0 < max(kl["int8"]) < min(kl["int4"])
    assert found["next_token"][layers[0]]["top1"] > 0.9
    assert (out / "report.md").read_text().count("\n| ") == 4
    assert "int4" in (out / "report.html").read_text()
    assert main(words) == 0  # goes on from what is there
    recode(store, "int8", str(tmp_path / "lossy"))
    with pytest.raises(DataError, match="lost bits"):
        codec_report.measure(type("C", (), {
            "codecs": [], "root": str(tmp_path / "lossy"), "snapshot": "latest", "samples": 1,
            "max_tokens": 9,
        }))  # fmt: skip
