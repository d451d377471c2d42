"""Golden numbers: what must not move unless it is meant to.

`golden.json` holds the losses of 20 updates with AdamW and with Muon (float32, CPU), the digest of
everything these updates were fed, and the snapshot id of a few chats. When a change is meant to
move them:

    python tests/test_golden.py

and the reason goes into the commit message.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tiny_cache import tiny_cache, tiny_config

from shared import tiny
from shared.config import Dtype, compose
from shared.log import read_json_lines
from shared.snapshot import build_snapshot
from shared.spec import CaptureSpec
from stage1_extract.config import DataConfig
from stage1_extract.prompts import prepare
from stage2_train import trainer
from stage2_train.build import assemble, begin, open_source, train_run
from stage2_train.config import TrainConfig
from stage2_train.drafter import Drafter
from stage2_train.param_rules import route
from stage2_train.ranks import Ranks

FILE = Path(__file__).with_name("golden.json")
OPTIMIZERS = ("adamw", "muon")
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "It is 4."}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Blue."},
            {"role": "user", "content": "Another."},
            {"role": "assistant", "content": "Grün."},
        ]
    },
]


def config(folder: Path, name: str, **keys) -> TrainConfig:
    if name == "muon":  # else the processor decides in which dtype it multiplies
        keys["optimizer__muon_dtype"] = Dtype.float32
    return tiny_config(folder / "cache", folder / name, optimizer=name, **keys)


def losses(folder: Path, name: str) -> tuple[list[float], str]:
    """(losses of 20 updates, digest of their inputs)."""
    digest = train_run(config(folder, name, steps=20))["digest"]
    lines = read_json_lines(folder / name / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line], digest


def snapshot_of_chats(folder: Path) -> str:
    """The id: rows, template, tokens, masks, split and spec all take part."""
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    prepared = prepare(DataConfig(paths=[str(path)], heldout=0.5), tiny.byte_tokenizer())
    spec = CaptureSpec("00" * 16, "Golden", (0, 2), 8, backend={"device": "cpu"})
    rows = [sample.row() for sample in prepared.samples]
    return build_snapshot(spec.digest, rows, ["0" * 32] * len(rows), {}).id


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    tiny_cache(root / "cache")
    return root


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_inputs_of_twenty_updates(folder, name):
    golden = json.loads(FILE.read_text())
    found, digest = losses(folder, name)
    assert digest == golden["digest"]
    assert len(found) == 20
    assert found == pytest.approx(golden["losses"][name], rel=1e-4)


def test_the_snapshot_id_of_chats(tmp_path):
    assert snapshot_of_chats(tmp_path) == json.loads(FILE.read_text())["snapshot"]


DEMO_ROUTING = """\
fc.weight                                     576x2880  muon   fc: 576 rows
hidden_norm.weight                            576       adamw  1-D
layers.*.input_layernorm.weight x5            576       adamw  1-D
layers.*.post_attention_layernorm.weight x5   576       adamw  1-D
layers.*.mlp.gate_proj.weight x5              640x576   muon   gate: 640 rows
layers.*.mlp.up_proj.weight x5                640x576   muon   up: 640 rows
layers.*.mlp.down_proj.weight x5              576x640   muon   down: 576 rows
layers.*.linear_attn.A_log x4                 6         adamw  1-D
layers.*.linear_attn.dt_bias x4               6         adamw  1-D
layers.*.linear_attn.q_proj.weight x4         384x576   muon   q: 6 heads of 64 rows
layers.*.linear_attn.k_proj.weight x4         384x576   muon   k: 6 heads of 64 rows
layers.*.linear_attn.v_proj.weight x4         384x576   muon   v: 6 heads of 64 rows
layers.*.linear_attn.b_proj.weight x4         6x576     adamw  one row a head: a gate, no map between features
layers.*.linear_attn.a_proj.weight x4         6x576     adamw  one row a head: a gate, no map between features
layers.*.linear_attn.g_proj.weight x4         384x576   muon   g: 6 heads of 64 rows
layers.*.linear_attn.o_proj.weight x4         576x384   muon   o: 576 rows
layers.*.linear_attn.q_conv1d.weight x4       384x1x4   adamw  3-D
layers.*.linear_attn.k_conv1d.weight x4       384x1x4   adamw  3-D
layers.*.linear_attn.v_conv1d.weight x4       384x1x4   adamw  3-D
layers.*.linear_attn.o_norm.weight x4         64        adamw  1-D
layers.4.self_attn.q_proj.weight              384x576   muon   q: 6 heads of 64 rows
layers.4.self_attn.k_proj.weight              192x576   muon   k: 3 heads of 64 rows
layers.4.self_attn.v_proj.weight              192x576   muon   v: 3 heads of 64 rows
layers.4.self_attn.o_proj.weight              576x384   muon   o: 576 rows
layers.4.self_attn.q_norm.weight              64        adamw  1-D
layers.4.self_attn.k_norm.weight              64        adamw  1-D
norm.weight                                   576       adamw  1-D
"""  # noqa: E501


def test_trap_29_the_demo_drafters_routing_table():
    cfg = compose("train", TrainConfig, ["experiment=demo", "run_dir=x", "cache.root=x"])
    with torch.device("meta"):
        drafter = Drafter(cfg.drafter, 5, 576)
    table = route(drafter.named_parameters(), drafter.parts())
    assert [line.split() for line in table.folded().splitlines()] == [
        line.split() for line in DEMO_ROUTING.splitlines()
    ]
    assert 10e6 < sum(p.numel() for p in drafter.parameters()) < 15e6


def test_trap_29_each_parameter_has_one_group_and_moves_within_five_updates(folder):
    source = open_source(config(folder, "muon", steps=5))
    device, run_dir = torch.device("cpu"), folder / "moves"
    run_dir.mkdir()
    with assemble(source, begin(source, run_dir), run_dir, device, Ranks(device)) as job:
        named = dict(job.drafter.named_parameters())
        owned = [id(p) for group in job.optimizer.param_groups for p in group["params"]]
        assert sorted(owned) == sorted(id(p) for p in named.values())
        before = {name: p.detach().clone() for name, p in named.items()}
        trainer.run(job)
        assert [name for name, p in named.items() if torch.equal(p, before[name])] == []


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny_cache(folder / "cache")
        found = {name: losses(folder, name) for name in OPTIMIZERS}
        document = {
            "snapshot": snapshot_of_chats(folder),
            "digest": found["adamw"][1],
            "losses": {name: [round(x, 6) for x in found[name][0]] for name in OPTIMIZERS},
        }
    FILE.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(f"{FILE} is written\n")


if __name__ == "__main__":
    main()
