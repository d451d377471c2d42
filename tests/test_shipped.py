"""Every shipped YAML is not only composed but built, tiny, and run for a step."""

import json

import pytest
import torch

from shared import cli
from shared.config import CONF, compose, describe, load_object
from shared.errors import ConfigError
from shared.store import Store
from shared.target import load_target
from stage1_extract.config import ExtractConfig, PlanConfig
from stage1_extract.plan_word import plan
from stage2_train import trainer
from stage2_train.build import assemble, begin, mask_token, open_source, train_run
from stage2_train.config import DrafterConfig, TrainConfig
from stage2_train.ranks import Ranks

OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))
TRAIN = {"diagnostics", "drafter", "experiment", "loader", "trainer"}
# Optimizers and schedules are built and run in test_optimizer_conf.py.
ELSEWHERE = {"optimizer", "schedule"}
EXTRACT = {"cache", "data"}
FAST, SLOW = {"drafter", "experiment=demo"}, pytest.mark.slow
SMALL = [
    "drafter.hidden_size=null",
    "drafter.intermediate_size=24",
    "drafter.num_attention_heads=2",
    "drafter.num_key_value_heads=1",
    "drafter.head_dim=8",
    "drafter.linear_num_key_heads=2",
    "drafter.linear_num_value_heads=2",
    "drafter.linear_key_head_dim=8",
    "drafter.linear_value_head_dim=8",
    "drafter.mask_token_id=null",
    "batch.tokens_per_row=48",
    "trainer.tensorboard=false",
    "device=cpu",
]


def of(*groups):
    return [option for option in OPTIONS if option.partition("=")[0] in groups]


def test_every_group_is_built_somewhere():
    groups = {option.partition("=")[0] for option in OPTIONS}
    assert groups == TRAIN | ELSEWHERE | EXTRACT | {"target"}


@pytest.mark.parametrize("word", sorted(cli.WORDS))
def test_every_words_own_file_composes(word):
    schema = load_object(cli.WORDS[word].schema)
    required = [
        f"{key}=[x]" if key == "runs" else f"{key}=x"
        for key, default, _ in describe(schema)
        if default == "required" and not key.startswith("target.")
    ]
    assert isinstance(compose(word, schema, required), schema)


def composed(cache, run_dir, *overrides):
    keys = [f"cache.root={cache}", f"run_dir={run_dir}", *SMALL]
    return compose("train", TrainConfig, [*overrides, *keys])


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        option if {option, option.partition("=")[0]} & FAST else pytest.param(option, marks=SLOW)
        for option in of(*TRAIN)
    ],
)
def test_options_of_train_are_built_and_make_an_update(cache, tmp_path, option):
    overrides = [option]
    if option == "experiment=switch_midrun":
        parent = composed(cache, tmp_path / "parent", "experiment=demo", "trainer.steps=2")
        train_run(parent)
        overrides.append(f"branch.run_dir={tmp_path / 'parent'}")
    source = open_source(composed(cache, tmp_path / "run", *overrides))
    device, run_dir = torch.device("cpu"), tmp_path / "run"
    run_dir.mkdir()
    with assemble(source, begin(source, run_dir), run_dir, device, Ranks(device)) as job:
        state = trainer.restore(job)
        assert state.step == (2 if "switch" in option else 0)
        rows = job.plan.step(state.step, job.total_rows)
        weight = trainer.denominator(job, job.plan.slot_counts(rows))
        share = trainer.accumulate(job, rows, job.loader.batches(rows), weight)
        assert share.error is None
        job.optimizer.set_lr(job.factor(state.step))
        job.optimizer.step()
        assert all(p.isfinite().all() for p in job.drafter.parameters())


@pytest.mark.parametrize("option", of("target"))
def test_targets_are_planned_without_files_and_the_tiny_one_loaded(option, capsys, monkeypatch):
    monkeypatch.setattr("shared.target_files.locate", lambda *a, **k: pytest.fail("no files"))
    cfg = compose("plan", PlanConfig, [option, "tokens=1e6"])
    assert plan(cfg) == 0
    assert f"{cfg.target.name}: {cfg.target.num_layers} layers" in capsys.readouterr().out
    assert cfg.target.mask_token
    if cfg.target.model.startswith("random://"):
        target = load_target(cfg.target)
        sizes = target.info.num_layers, target.info.hidden_size, target.embed.weight.shape[0]
        assert sizes == (cfg.target.num_layers, cfg.target.hidden_size, cfg.target.vocab_size)


@pytest.mark.slow
def test_the_options_of_extract_fill_a_cache_that_knows_its_special_tokens(tmp_path):
    assert len(of(*EXTRACT)) == 2
    chats = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"say {n}", "completion": f"{n}!"} for n in range(3)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["target=tiny_qwen3_5", *of(*EXTRACT), f"data.paths=[{chats}]", "device=cpu"]
    words = [*overrides, f"cache.root={tmp_path / 'cache'}"]
    assert compose("extract", ExtractConfig, words).cache.codec.value == "lossless"
    assert cli.main(["extract", *words, "snapshot=latest"]) == 2
    assert not (tmp_path / "cache").exists()
    assert cli.main(["extract", *words]) == 0
    info = Store.open(tmp_path / "cache").target_assets().info
    # Trap 43: the pad token is known, so that nobody can take it for MASK.
    assert (info["mask_token_id"], info["eos_token_ids"], info["pad_token_id"]) == (259, [258], 256)
    assert mask_token(DrafterConfig(), info) == 259
    for token in (256, 258):
        with pytest.raises(ConfigError, match="ends, begins or pads"):
            mask_token(DrafterConfig(mask_token_id=token), info)
