"""speculators' own package: its loader reads our export, its converter our DFlash directory.

Skipped unless it is importable here, or DRAFTTAPE_SPECULATORS_PYTHON names an interpreter that has
it (`pip install speculators==0.9.0`).
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import INFO, drafter_config, settings, trained

from shared.config import Dtype
from stage2_train import export
from stage2_train.batch import Batch
from stage2_train.config import Layout
from stage2_train.drafter import Drafter
from stage2_train.warm_start import warm_start

PYTHON = os.environ.get("DRAFTTAPE_SPECULATORS_PYTHON") or (
    sys.executable if importlib.util.find_spec("speculators") else None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="DRAFTTAPE_SPECULATORS_PYTHON names no interpreter"),
]
SCRIPT = Path(__file__).with_name("speculators_main.py")
TOKENS, ANCHORS, WINDOW = 60, [1, 7, 19, 33, 50], 64


def theirs(*arguments):
    done = subprocess.run(
        [str(PYTHON), SCRIPT, *map(str, arguments)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(directory, model) of a target in Hugging Face's layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=40, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("target")
    model = LlamaForCausalLM(sizes)
    model.save_pretrained(path)
    return path, model


def ours(drafter, model, inputs):
    """Hidden states [N, B, D] and logits [N, B, S] of every anchor's block."""
    tokens = inputs["tokens"]
    batch = Batch.pack(
        ["a"], [tokens], inputs["hidden"].unflatten(1, (3, -1)),
        [torch.ones(TOKENS, dtype=torch.bool)], [inputs["anchors"]],
    )  # fmt: skip
    with torch.no_grad():
        hidden = drafter(batch, model.get_input_embeddings().weight)
        return hidden, hidden @ drafter.head_rows(model.lm_head.weight).T


def make(tmp_path, target, layers, layout, **changes):
    path, model = target
    cfg = drafter_config(*layers, sliding_window=WINDOW, **changes)
    drafter = trained(cfg)
    head = None
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(torch.tensor([0, 3, 4, 7, 38]))
        head = drafter.head_rows(model.lm_head.weight.detach())
    info = INFO | {"target": {"model": str(path)}, "architecture": "LlamaForCausalLM"}
    out = tmp_path / "out"
    out.mkdir()
    export.write(out, drafter, cfg, info, settings(layout=layout, dtype=Dtype.float32), head)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden": torch.randn(TOKENS, 3 * 32, generator=generator),
        "tokens": torch.randint(0, 38, (TOKENS,), generator=generator),
        "anchors": torch.tensor(ANCHORS),
    }
    save_file(inputs, tmp_path / "inputs")
    return out, drafter, cfg, inputs


def differences(tmp_path, directory, drafter, model, inputs):
    theirs("load", directory, tmp_path / "inputs", tmp_path / "outputs")
    found = load_file(tmp_path / "outputs")
    for name, mine in zip(("hidden", "logits"), ours(drafter, model, inputs), strict=True):
        yield float((found[name] - mine).abs().max() / mine.abs().max())


@pytest.mark.parametrize("size", [None, 5])
def test_their_loader_reads_our_export(tmp_path, target, size):
    layers = ("full_attention", "sliding_attention", "full_attention")
    made = make(tmp_path, target, layers, Layout.speculators, draft_vocabulary=size)
    directory, drafter, _, inputs = made
    assert max(differences(tmp_path, directory, drafter, target[1], inputs)) < 1e-5
    if size is not None:
        found = load_file(tmp_path / "outputs")
        rows = torch.arange(size) + found["d2t"]
        assert torch.equal(rows, drafter.draft_ids)
        assert torch.equal(found["t2d"].nonzero()[:, 0], drafter.draft_ids)


def test_their_converter_takes_our_dflash_directory(tmp_path, target):
    path, model = target
    made = make(tmp_path, target, ("full_attention",) * 2, Layout.dflash)
    directory, drafter, cfg, inputs = made
    converted = tmp_path / "converted"
    theirs("convert", directory, path, converted)
    assert max(differences(tmp_path, converted, drafter, model, inputs)) < 1e-5
    again = Drafter(cfg, 3, 32)
    warm_start(again, cfg, tuple(INFO["layer_ids"]), str(converted))
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
