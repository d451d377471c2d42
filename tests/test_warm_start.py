"""Beginning with a published drafter's weights, and the layouts that they come in."""

import json

import pytest
import torch
from test_export import INFO, drafter_config, settings, trained
from tiny_cache import tiny_cache, tiny_config

from shared.config import Dtype
from shared.errors import CorruptionError, DataError, MismatchError
from stage2_train import checkpoint, export
from stage2_train.config import Layout
from stage2_train.drafter import Drafter
from stage2_train.warm_start import read_architecture, warm_start

ATTENTION = ("full_attention", "sliding_attention")
LAYERS = tuple(INFO["layer_ids"])


@pytest.fixture
def directory(tmp_path, monkeypatch, request):
    """(directory, its drafter, its configuration), in the layout that the test asks for."""
    layout = request.param
    monkeypatch.setattr(export, "reload_difference", lambda *_: 0.0)  # another process: slow
    types = ("linear_attention", *ATTENTION) if layout is Layout.drafttape else ATTENTION
    cfg = drafter_config(*types)
    drafter = trained(cfg)
    export.write(tmp_path, drafter, cfg, INFO, settings(layout=layout, dtype=Dtype.float32))
    return tmp_path, drafter, cfg


every_layout = pytest.mark.parametrize(
    "directory", [Layout.dflash, Layout.speculators, Layout.drafttape], indirect=True
)


@every_layout
def test_all_weights_arrive(directory):
    path, drafter, cfg = directory
    mine = Drafter(cfg, 3, 32)
    assert str(path) in warm_start(mine, cfg, LAYERS, str(path))
    for name, value in drafter.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value), name


@every_layout
def test_every_difference_is_named(directory):
    path, _, cfg = directory
    cfg.head_dim, cfg.rope_theta = 16, 5.0
    mine = Drafter(cfg, 3, 32)
    with pytest.raises(MismatchError) as caught:
        warm_start(mine, cfg, (0, 2, 4), str(path))
    text = str(caught.value)
    for part in ("head_dim is 8 there, 16 here", "rope_theta is 1234.0", "[0, 2, 3] there"):
        assert part in text


@pytest.mark.parametrize("directory", [Layout.speculators], indirect=True)
def test_speculators_layout(directory):
    """Names, ids and sizes as speculators 0.9's converter writes them."""
    path, _, _ = directory
    config = json.loads((path / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [1, 3, 4]  # hidden_states[0]: the embedding
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 1234.0
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["draft_vocab_size"] == 40
    assert read_architecture(path)["target_layer_ids"] == list(LAYERS)
    assert {entry.name for entry in path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("directory", [Layout.dflash], indirect=True)
def test_what_is_no_drafter_is_said(directory, tmp_path_factory):
    path, drafter, cfg = directory
    with pytest.raises(DataError, match=r"no config\.json"):
        warm_start(drafter, cfg, LAYERS, str(tmp_path_factory.mktemp("empty")))
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(CorruptionError, match=r"model\.safetensors"):
        warm_start(drafter, cfg, LAYERS, str(path))
    (path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CorruptionError, match="DFlash"):
        warm_start(drafter, cfg, LAYERS, str(path))


@pytest.mark.parametrize(
    ("directory", "key", "value", "says"),
    [
        (Layout.dflash, "rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "'yarn'"),
        (Layout.dflash, "rope_parameters", {"full_attention": {"rope_theta": 5.0}}, "by layer"),
        (Layout.dflash, "hidden_act", "gelu", "'gelu'"),
        (Layout.speculators, "sample_from_anchor", True, "the anchor's own slot"),
        (Layout.speculators, "sliding_window_non_causal", False, "don't see later ones"),
    ],
    indirect=["directory"],
)
def test_what_would_compute_something_else_is_refused(directory, key, value, says):
    path, drafter, cfg = directory
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(document | {key: value}))
    with pytest.raises(DataError, match=f"something else.*{says}"):
        warm_start(drafter, cfg, LAYERS, str(path))


@pytest.mark.slow
def test_a_run_begins_with_them(tmp_path, monkeypatch):
    from stage2_train.build import train_run
    from stage2_train.config import ExportConfig

    monkeypatch.setattr(export, "reload_difference", lambda *_: 0.0)
    tiny_cache(tmp_path / "cache")
    train_run(tiny_config(tmp_path / "cache", tmp_path / "first", steps=2))
    out = tmp_path / "out"
    export.export(
        ExportConfig(run_dir=str(tmp_path / "first"), output=str(out), dtype=Dtype.float32)
    )
    cfg = tiny_config(
        tmp_path / "cache", tmp_path / "second", steps=1, init_from=str(out), optimizer__lr=0.0
    )
    train_run(cfg)
    models = [
        checkpoint.load(checkpoint.find(tmp_path / name, "last"))[0] for name in ("first", "second")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
