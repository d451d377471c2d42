"""The `eval` word on a real (tiny, random) target: one train run, decoded losslessly."""

import json
from dataclasses import replace

import pytest

from shared.config import to_plain, typed
from shared.errors import CacheError, ConfigError, MismatchError
from shared.recode import recode
from shared.store import Store
from stage2_train import evaluate
from stage2_train.build import train_run
from stage2_train.config import EvalConfig, TrainConfig
from stage2_train.eval_table import FILE, ways
from tests.target_cache import TARGET, target_cache
from tests.tiny_cache import tiny_config


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(cache root, run directory): twelve samples of the target's own text, six training steps."""
    root = tmp_path_factory.mktemp("eval")
    target_cache(root / "cache")
    train_run(tiny_config(root / "cache", root / "run", steps=6))
    return root / "cache", root / "run"


@pytest.mark.slow
def test_measures_and_decodes_losslessly(world, capsys):
    _, run_dir = world
    assert evaluate.evaluate(EvalConfig(run_dir=str(run_dir), max_new_tokens=20)) == 0
    result = json.loads((run_dir / "eval.json").read_text())
    assert result["output_identical"] == [4, 4]
    assert result["real_acceptance"] >= 1
    assert 1 <= result["estimated_acceptance"] <= 4
    assert len(result["slot_accuracy"]) == 3
    assert len(result["prompts"]) == len(result["samples"]) == 4
    assert result["heldout_loss"] == pytest.approx(
        sum(s["loss_sum"] for s in result["samples"]) / sum(s["weight"] for s in result["samples"])
    )
    text = capsys.readouterr().out
    assert f"{result['heldout_loss']:.4f}" in text
    assert "4 of 4 prompts" in text


def test_trap_41_the_same_weights_give_the_same_number(world):
    _, run_dir = world
    one, two = (
        evaluate.measure(EvalConfig(run_dir=str(run_dir), decode=False, again=True))
        for _ in range(2)
    )
    assert one["heldout_loss"] == two["heldout_loss"]
    assert one["samples"] == two["samples"]


def test_an_up_to_date_result_is_read(world):
    _, run_dir = world
    config = EvalConfig(run_dir=str(run_dir), decode=False)
    first = evaluate.measure(config)
    (run_dir / "eval.json").write_text(json.dumps(first | {"marker": 1}))
    assert evaluate.measure(config).get("marker") == 1
    assert "marker" not in evaluate.measure(replace(config, again=True))
    assert "marker" not in evaluate.measure(replace(config, checkpoint="step-000006", again=True))


def test_a_moved_cache_is_found_where_one_says(world, tmp_path):
    root, run_dir = world
    config = EvalConfig(run_dir=str(run_dir), decode=False, again=True)
    known = evaluate.measure(config)
    root.rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(CacheError, match="moved"):
            evaluate.measure(config)
        found = evaluate.measure(replace(config, cache=str(tmp_path / "elsewhere")))
    finally:
        (tmp_path / "elsewhere").rename(root)
    assert found["samples"] == known["samples"]


def test_another_target_is_refused(world):
    _, run_dir = world
    other = replace(TARGET, model="random://llama?seed=2")
    with pytest.raises(MismatchError, match="weights"):
        evaluate.measure(EvalConfig(run_dir=str(run_dir), target=other, again=True))
    with pytest.raises(MismatchError, match="step-000099"):
        evaluate.measure(EvalConfig(run_dir=str(run_dir), checkpoint="step-000099"))


@pytest.mark.slow
def test_a_recoded_cache_is_not_the_runs(world, tmp_path):
    root, run_dir = world
    for codec in ("fast", "int8"):
        recode(Store.open(root), codec, str(tmp_path / codec))
    asked = EvalConfig(run_dir=str(run_dir), decode=False, again=True)
    same = evaluate.measure(replace(asked, cache=str(tmp_path / "fast")))
    assert same["heldout_loss"] == evaluate.measure(asked)["heldout_loss"]
    with pytest.raises(MismatchError, match="stored as int8, the run was trained on lossless"):
        evaluate.measure(replace(asked, cache=str(tmp_path / "int8")))


@pytest.mark.slow
def test_sampling_runs(world):
    _, run_dir = world
    result = evaluate.measure(
        EvalConfig(run_dir=str(run_dir), temperature=1.0, max_new_tokens=8, max_prompts=2)
    )
    assert result["output_identical"] is None
    assert result["real_acceptance"] >= 1


@pytest.mark.slow
def test_a_table_of_data_sets_and_ways(world, tmp_path, capsys):
    _, run_dir = world
    (tmp_path / "mbpp.jsonl").write_text('{"turns": ["abcd"]}\n{"prompt": "efg"}\n')
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    config = EvalConfig(
        run_dir=str(run_dir), max_new_tokens=12, temperatures=[1.0], trees=[2, 8],
        data=[str(tmp_path / "mbpp.jsonl"), str(tmp_path / "chats.jsonl")],
    )  # fmt: skip
    assert evaluate.evaluate(config) == 0
    rows = json.loads((run_dir / "eval_table.json").read_text())["rows"]
    names = ["chain T=0", "chain T=1", "chain 2 T=0", "tree 2", "tree 8"]
    assert [(row["data"], row["way"]) for row in rows] == [
        (data, way) for data in ("mbpp", "chats") for way in names
    ]
    for row in rows:
        assert row["identical"] == (None if row["way"] == "chain T=1" else row["prompts"])
        assert row["acceptance"] == pytest.approx(1 + sum(row["slot_acceptance"]))
        assert row["estimated_speedup"] > 0
    by_way = {row["way"]: row["acceptance"] for row in rows[:5]}
    assert by_way["tree 2"] >= by_way["chain 2 T=0"]
    assert by_way["tree 8"] >= by_way["chain T=0"]
    assert "| mbpp | tree 8 |" in capsys.readouterr().out


def test_a_tables_keys_are_used_or_refused(world):
    _, run_dir = world
    config = EvalConfig(run_dir=str(run_dir), temperature=1.0, tree=3, trees=[8])
    names = ["chain T=0", "chain T=1", "tree 8", "tree 3"]
    assert [way.name for way in ways(config, 4)] == names
    for changes in ({"decode": False}, {"max_new_tokens": 1}):
        with pytest.raises(ConfigError, match="decoded prompts"):
            evaluate.evaluate(replace(config, **changes))
    (run_dir / FILE).unlink(missing_ok=True)
    (run_dir / FILE).mkdir()
    try:
        with pytest.raises(CacheError, match="it is a directory"):
            evaluate.evaluate(config)
    finally:
        (run_dir / FILE).rmdir()


def test_wrong_output_is_not_a_success(world, monkeypatch, capsys):
    _, run_dir = world
    monkeypatch.setattr(evaluate, "measure", lambda cfg: {
        "step": 1, "heldout_loss": 1.0, "accuracy": 0.5, "estimated_acceptance": 1.0,
        "real_acceptance": 1.0, "output_identical": [1, 2], "tokens_per_s": 1.0,
        "plain_tokens_per_s": 1.0, "speedup": 1.0, "slot_accuracy": [0.5],
        "prompts": [{"id": "a", "identical": True}, {"id": "b", "identical": False}],
    })  # fmt: skip
    assert evaluate.evaluate(EvalConfig(run_dir=str(run_dir))) == 1
    assert "b" in capsys.readouterr().err


def test_stored_configurations_are_read_back():
    plain = to_plain(TrainConfig(run_dir="r"))
    plain["cache"]["root"] = "c"
    back = typed(TrainConfig, plain | {"gone": 1})
    assert to_plain(back) == plain
