"""Exported drafters: loaded from disk alone, they say what ours says."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_cache import tiny_cache, tiny_config

from shared.config import Dtype
from shared.errors import ConfigError, TrainingError
from stage2_train import checkpoint
from stage2_train.config import DrafterConfig, ExportConfig, Layout
from stage2_train.drafter import Drafter
from stage2_train.evaluate import FORMAT
from stage2_train.export import export, model_config, reload_difference, write

INFO = {"hidden_size": 32, "vocab_size": 40, "num_layers": 6, "layer_ids": [0, 2, 3]}


def drafter_config(*layer_types, **changes):
    settings = {
        "layer_types": list(layer_types), "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
        "block_size": 4, "sliding_window": 20, "mask_token_id": 39, "init_std": 0.2,
        "rope_theta": 1234.0,
    }  # fmt: skip
    return DrafterConfig(**settings | changes)


def trained(cfg):
    """A drafter none of whose parameters has the value that it starts from."""
    torch.manual_seed(0)
    drafter = Drafter(cfg, 3, 32)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter


def settings(**keys):
    return ExportConfig(run_dir="", output="", **keys)


MIXED = ("linear_attention", "full_attention", "linear_attention", "sliding_attention")


@pytest.mark.slow
def test_trap_23_reloaded_from_disk_alone(tmp_path):
    cfg = drafter_config(*MIXED, bidirectional_block=True)
    done = write(tmp_path, trained(cfg), cfg, INFO, settings(dtype=Dtype.bfloat16))
    assert set(done) == {"auto"}
    assert done["auto"] < 1e-5
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1234.0}


@pytest.mark.slow
def test_all_attention_in_dflashs_layout(tmp_path):
    pytest.importorskip("dflash")
    cfg = drafter_config("full_attention", "sliding_attention", "full_attention")
    done = write(tmp_path, trained(cfg), cfg, INFO, settings(dtype=Dtype.float32))
    assert set(done) == {"auto", "dflash"}
    assert max(done.values()) < 1e-5


@pytest.mark.slow
def test_a_wrong_export_is_refused(tmp_path, monkeypatch):
    cfg = drafter_config("full_attention")
    drafter = trained(cfg)
    with monkeypatch.context() as patch:
        patch.setattr("stage2_train.export.reload_difference", lambda *_: 0.0)
        write(tmp_path, drafter, cfg, INFO, settings(dtype=Dtype.float32))
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 10.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainingError, match="differs by"):
        reload_difference(tmp_path, drafter, "auto")


def test_gdn_has_no_place_in_dflashs_layout(tmp_path):
    cfg = drafter_config("linear_attention")
    with pytest.raises(ConfigError, match="attention layers only"):
        write(tmp_path, trained(cfg), cfg, INFO, settings(layout=Layout.dflash))


@pytest.mark.slow
def test_exported_code_decodes_what_the_target_would():
    from transformers import LlamaConfig, LlamaForCausalLM

    from stage2_train.exported_model import DrafttapeConfig, DrafttapeModel

    torch.manual_seed(1)
    sizes = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=40,
    )  # fmt: skip
    target = LlamaForCausalLM(sizes).eval()
    cfg = drafter_config(*MIXED)
    model = DrafttapeModel(
        DrafttapeConfig(**model_config(cfg, INFO, Layout.drafttape, Dtype.float32))
    ).eval()
    model.load_state_dict(trained(cfg).state_dict())
    prompt = torch.randint(0, 39, (1, 9))
    expected = target.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert torch.equal(model.spec_generate(target, prompt, max_new_tokens=30), expected)
    stop = int(expected[0, 20])
    stopped = model.spec_generate(target, prompt, max_new_tokens=30, stop_token_ids=[stop])
    first = expected[0, 9:].tolist().index(stop)
    assert torch.equal(stopped, expected[:, : 9 + first + 1])


@pytest.mark.slow
def test_the_word(tmp_path, capsys):
    from stage2_train.build import train_run

    tiny_cache(tmp_path / "cache")
    train_run(tiny_config(tmp_path / "cache", tmp_path / "run", steps=2))
    cfg = ExportConfig(run_dir=str(tmp_path / "run"), output=str(tmp_path / "out"))
    assert export(cfg) == 0
    assert "reloaded from disk" in "".join(capsys.readouterr())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "modeling_drafttape.py"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 of 2" in card
    assert "Not evaluated" in card
    with pytest.raises(ConfigError, match="already"):
        export(cfg)
    # Figures of other weights don't get into the card.
    run = tmp_path / "run"
    own = checkpoint.weights_key(checkpoint.find(run, "last"))
    way = {"data": "d", "way": "tree 8", "acceptance": 1.5, "identical": 2, "prompts": 2}
    way |= {"tokens_per_s": 1.0, "speedup": 1.0, "estimated_speedup": 1.0}
    for weights, there in (("other", False), (own, True)):
        evaluation = {"format": FORMAT, "key": {"weights": weights}, "heldout_loss": 1.25}
        (run / "eval.json").write_text(json.dumps(evaluation))
        (run / "eval_table.json").write_text(json.dumps({"weights": weights, "rows": [way]}))
        assert export(replace(cfg, output=str(tmp_path / weights))) == 0
        card = (tmp_path / weights / "README.md").read_text()
        assert ("1.250" in card, "| d | tree 8 | 1.500 |" in card) == (there, there)
        assert ("Not evaluated" in card) != there
    assert "another checkpoint" in capsys.readouterr().err
