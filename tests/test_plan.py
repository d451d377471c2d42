"""Planning is a pure function: shards, batches, sizes; the sheet names the bottleneck."""

import functools
import json
import random
import re

import pytest

from shared.config import compose
from shared.errors import ConfigError
from shared.sample import sample_id
from shared.tiny import byte_tokenizer
from stage1_extract import plan_word
from stage1_extract.bottleneck import lines, sheet
from stage1_extract.config import DataConfig, PlanConfig
from stage1_extract.plan import JobPlan, job_id, pack_batches, plan_batches, plan_job
from stage1_extract.plan_word import histogram, plan, size_text
from stage1_extract.probe import probe
from stage1_extract.prompts import prepare


def job(count: int = 300, seed: int = 0):
    rng = random.Random(seed)
    return [(sample_id([i]), rng.randint(5, 400)) for i in range(count)]


def brute_force(lengths, budget, overhead):
    """Cheapest batching of a short list, by trying every cut."""
    if not lengths:
        return 0
    costs = []
    for stop in range(1, len(lengths) + 1):
        if stop > 1 and lengths[0] * stop > budget:
            break
        costs.append(lengths[0] * stop + overhead + brute_force(lengths[stop:], budget, overhead))
    return min(costs)


@pytest.mark.parametrize("seed", range(8))
def test_batches_are_the_cheapest_ones(seed, monkeypatch):
    monkeypatch.setattr("stage1_extract.plan.BATCH_OVERHEAD_TOKENS", 20)
    rng = random.Random(seed)
    lengths = sorted((rng.randint(1, 60) for _ in range(9)), reverse=True)
    ranges = plan_batches(lengths, 150)
    cost = sum(lengths[a] * (b - a) + 20 for a, b in ranges)
    assert cost == brute_force(lengths, 150, 20)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(9))


def test_every_sample_is_in_one_shard_and_one_batch_within_the_budgets():
    samples = job()
    planned = plan_job(samples, 100, 200_000, 1000)
    names = [name for shard in planned.shards for name in shard.ids]
    assert sorted(names) == sorted(name for name, _ in samples)
    lengths = dict(samples)
    for shard in planned.shards:
        assert shard.num_tokens * 100 <= 200_000
        assert list(shard.lengths) == [lengths[name] for name in shard.ids]
        assert list(shard.lengths) == sorted(shard.lengths, reverse=True)
        for start, stop in shard.batches:
            assert stop - start == 1 or shard.lengths[start] * (stop - start) <= 1000


def test_the_plan_does_not_depend_on_the_order_of_the_data():
    samples = job()
    shuffled = random.Random(1).sample(samples, len(samples))
    assert plan_job(samples, 10, 9999, 800) == plan_job(shuffled, 10, 9999, 800)
    names = [name for name, _ in samples]
    assert job_id(("a", 1), names) == job_id(("a", 1), names[::-1])
    assert job_id(("a", 1), names) != job_id(("a", 2), names)
    assert job_id(("a", 1), names) != job_id(("a", 1), names[1:])


def test_a_plan_survives_json_and_dropping_samples():
    planned = plan_job(job(), 10, 99_999, 800)
    assert JobPlan.from_json(json.loads(json.dumps(planned.to_json()))) == planned
    shard = planned.shards[0]
    dropped = {shard.ids[0], shard.ids[3]}
    rest = shard.without(dropped)
    assert rest.ids == tuple(name for name in shard.ids if name not in dropped)
    assert [i for a, b in rest.batches for i in range(a, b)] == list(range(len(rest.ids)))
    assert shard.without(set(shard.ids)).batches == ()


def test_padding_waste_is_small_even_with_few_samples_a_batch():
    planned = plan_job(job(2000), 1, 10**9, 8192)
    tokens = sum(shard.num_tokens for shard in planned.shards)
    computed = planned.computed_tokens(packed=False)
    assert 1 - tokens / computed <= 0.03


def test_the_seeds_numbers_reproduce_their_conclusion():
    """3 target GPUs at .24 batch/s, 1 drafter GPU at .33: gated on the target."""
    result = sheet(0.24, 0.33, 3, 1, trials=2, batches=1000, epochs=6)
    assert result.bound_by == "target"
    assert result.online_rate == 0.24
    assert result.drafter_idle == pytest.approx(0.27, abs=0.005)
    assert result.faster_step_gain == 1.0
    assert result.best_target_gpus == 3
    text = "\n".join(lines(result, 0.24, 0.33, 4))
    assert "can't change the wall clock" in text
    # extract once at .32 batch/s on 4 GPUs, train twice at 1.32 batch/s.
    assert result.cached_hours == pytest.approx((1000 / 0.32 + 2 * 6000 / 1.32) / 3600)
    assert result.online_hours == pytest.approx(2 * 6000 / 0.24 / 3600)


def test_a_drafter_bound_pipeline_is_told_what_a_faster_step_gains():
    result = sheet(1.0, 0.5, 2, 2, trials=1, batches=None, epochs=1)
    assert (result.bound_by, result.faster_step_gain, result.cached_hours) == ("drafter", 2.0, None)
    assert "2.00x" in "\n".join(lines(result, 1.0, 0.5, 4))
    with pytest.raises(ConfigError):
        sheet(0.0, 1.0, 1, 1, 1, 1, 1)


def test_plan_of_the_27b_target_needs_no_weights(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("shared.target_files.locate", lambda *a, **k: pytest.fail("no files"))
    summary = tmp_path / "plan.json"
    words = ["target=qwen3_6_27b", "tokens=1.67e9", "tokens_per_s=16000"]
    cfg = compose("plan", PlanConfig, [*words, "drafter=qwen3_6_27b", f"summary={summary}"])
    assert plan(cfg) == 0
    shown = capsys.readouterr().out
    assert "1, 16, 31, 46, 61" in shown
    assert "85.5 TB of bf16, 51,200 bytes a token" in shown
    assert "61.5 TB" in shown
    assert "28.99 at 16,000 tokens/s" in shown
    assert "drafter   1.731 B trainable: fc 131.1 M, GDN 210.5 M, attention 52.43 M, MLP" in shown
    assert "6.9 GB of float32 weights, 3.5 GB exported as bf16" in shown
    numbers = json.loads(summary.read_text())
    assert abs(numbers["drafter"]["parameters"] - 1.731e9) < 1.731e6
    assert sum(numbers["drafter"]["parts"].values()) == numbers["drafter"]["parameters"]
    assert numbers["raw_bytes"] == 85.504e12
    assert numbers["codecs"]["int8"]["bytes"] < numbers["codecs"]["lossless"]["bytes"] < 62e12
    assert "made for this target" not in shown
    cfg.drafter.hidden_size = None
    assert plan(cfg) == 0
    assert "drafter=qwen3_6_27b is the one made for this target" in capsys.readouterr().out


def test_plan_reads_data_with_the_tokenizer_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_word, "load_target", lambda *a, **k: pytest.fail("no weights"))
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": "p" * i, "completion": "yes"} for i in range(1, 40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "oops\n")
    overrides = ["target=tiny_qwen3_5", f"data.paths=[{path}]", f"disk={tmp_path}"]
    assert plan(compose("plan", PlanConfig, overrides)) == 0
    shown = capsys.readouterr().out
    for part in ("39 samples", "1 rejects", "1 x not JSON", "<=     64", "pads", "free"):
        assert part in shown
    with pytest.raises(ConfigError, match="tokens"):
        plan(compose("plan", PlanConfig, ["target=tiny_qwen3_5"]))
    # Else the disk of the current directory would be shown.
    with pytest.raises(ConfigError, match="behind a URL"):
        plan(compose("plan", PlanConfig, ["target=tiny_qwen3_5", "tokens=1", "disk=s3://x/y"]))


def test_packed_batches_are_counted_as_packed_ones(tmp_path, capsys):
    path, summary = tmp_path / "x.jsonl", tmp_path / "plan.json"
    rows = [{"prompt": "p" * 9 * i, "completion": "yes"} for i in range(1, 40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["target=tiny_qwen3_5", f"data.paths=[{path}]", f"summary={summary}"]
    words += ["batch_tokens=1000", "tokens_per_s=10"]
    found = {}
    for batching in ("padded", "packed"):
        assert plan(compose("plan", PlanConfig, [*words, f"batching={batching}"])) == 0
        assert f"{batching} in 1 shards" in capsys.readouterr().out
        found[batching] = json.loads(summary.read_text())
    padded, packed = found["padded"], found["packed"]
    lengths = sorted((len(sample.tokens_T) for sample in prepared_samples(path)), reverse=True)
    assert packed["batches"] == len(pack_batches(lengths, 1000)) < padded["batches"]
    assert packed["computed_tokens"] == packed["tokens"] == sum(lengths)
    assert packed["hours"] == pytest.approx(sum(lengths) / 10 / 3600)
    assert padded["computed_tokens"] > padded["tokens"] == sum(lengths)
    assert padded["hours"] == pytest.approx(padded["computed_tokens"] / 10 / 3600)


def prepared_samples(path):
    return prepare(DataConfig(paths=[str(path)]), byte_tokenizer()).samples


@pytest.mark.slow
def test_a_probe_measures_speed_and_bits_on_the_plans_own_batches(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_word, "probe", functools.partial(probe, seconds=0.2))
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": "p" * i, "completion": "yes"} for i in range(1, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["target=tiny_qwen3_5", "batch_tokens=512", "probe=true"]
    packed = ["target.model=random://qwen3", "batching=packed", "tokens=1e6"]
    for words in ([f"data.paths=[{path}]"], ["tokens=1e6"], packed):
        assert plan(compose("plan", PlanConfig, [*overrides, *words])) == 0
        shown = capsys.readouterr().out
        assert shown.count("(measured: ") == 7
        assert re.search(r"hours +[\d.]+ at [\d,]+ tokens/s", shown)
        assert "four batches of states" in shown


def test_sizes_and_histograms_read_well():
    assert size_text(85.5e12) == "85.5 TB"
    assert size_text(1500) == "1.5 kB"
    assert histogram([10, 20, 70, 70]) == [
        "<=     64         2 " + "#" * 40,
        "<=    128         2 " + "#" * 40,
    ]
    assert histogram([100_000])[-1].startswith("<= 100,000")
