"""Several ranks over gloo: the same losses, digests and stops as one."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_main import Run, execute
from safetensors.torch import load_file
from tiny_cache import tiny_cache

from shared.errors import CorruptionError
from shared.log import read_json_lines
from shared.record import read_record
from stage2_train import checkpoint

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def start(world, runs):
    """Starts ranks as torchrun does; returns (exit codes of the runs by rank, stderr by rank)."""
    probes = [socket.socket() for _ in runs]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    tasks = json.dumps([(p.getsockname()[1], run) for p, run in zip(probes, runs, strict=True)])
    for probe in probes:
        probe.close()
    ranks = []
    for rank in range(world):
        environment = os.environ | {
            "WORLD_SIZE": str(world),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE.parent}:{HERE}",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, HERE / "rank_main.py", tasks],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=1200) for process in ranks]
    texts = [text[-3000:] for _, text in said]
    assert not any(process.returncode for process in ranks), texts
    return [json.loads(out) for out, _ in said], texts


def _losses(run_dir):
    return [line["loss"] for line in read_json_lines(run_dir / "metrics.jsonl") if "loss" in line]


def _parameters(run_dir):
    return checkpoint.load(checkpoint.find(run_dir, "last"))[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every run of this file. Three rows a step: with two ranks the shares are unequal, with four
    one rank has none."""
    root = tmp_path_factory.mktemp("ranks")
    cache = root / "cache"
    store = tiny_cache(cache, count=17)

    def run(name, *settings):
        return Run(str(cache), str(root / name), *settings)

    assert execute(run("update-1", "update")) == 0
    assert execute(run("one")) == 0
    assert execute(run("one-adamw", "ddp", "adamw")) == 0
    assert execute(run("whole", "ddp", "muon", 3)) == 4
    broken = root / "broken"
    shutil.copytree(cache, broken)
    for path in (broken / "shards" / store.shard_ids()[0]).rglob("*"):
        if path.is_file() and path.stat().st_size > 2000:
            path.write_bytes(path.read_bytes()[:-40])
    two, texts = start(
        2,
        [
            run("two-adamw", "ddp", "adamw", 3),
            run("two", "fsdp"),
            run("cut", "fsdp", "muon", 3, str(root / "saved")),
            run("cut", "fsdp"),
            run("whole", "fsdp"),
            Run(str(broken), str(root / "broken-ddp")),
            Run(str(broken), str(root / "broken-fsdp"), "fsdp"),
            run("update-2", "update"),
        ],
    )
    assert two == [[4, 0, 4, 0, 0, 1, 1, 0]] * 2, texts
    for name in ("cut-1", "cut-3"):
        shutil.copytree(root / "saved", root / name)
    assert execute(run("cut-1")) == 0
    assert execute(run("two-adamw", "ddp", "adamw")) == 0
    codes, said = start(3, [run("cut-3", "fsdp"), run("update-3", "update")])
    assert codes == [[0, 0]] * 3, said
    four = [run("four-adamw", "ddp", "adamw"), run("four", "fsdp"), run("grid", "hsdp")]
    codes, said = start(4, four)
    assert codes == [[0, 0, 0]] * 4, said
    return root, texts, store.shard_ids()[0]


def test_trap_20_24_one_two_and_four_ranks_are_one_run(runs):
    root = runs[0]
    for name in ("two", "four", "grid", "two-adamw", "four-adamw"):
        one = root / ("one-adamw" if "adamw" in name else "one")
        run = root / name
        assert _losses(run) == pytest.approx(_losses(one), rel=1e-6)
        assert [line["digest"] for line in read_json_lines(run / "digests.jsonl")] == [
            line["digest"] for line in read_json_lines(one / "digests.jsonl")
        ]
        for key in ("tokens", "supervised", "blocks", "digest"):
            assert read_record(run).result[key] == read_record(one).result[key]
        assert read_record(run).result["heldout"]["heldout_loss"] == pytest.approx(
            read_record(one).result["heldout"]["heldout_loss"], rel=1e-6
        )
        pairs = zip(*map(_measured, (run, one)), strict=True)
        assert all(a == pytest.approx(b, rel=1e-4, abs=1e-9) for a, b in pairs)


def _measured(run_dir):
    """Diagnostics of the updates that were measured."""
    lines = [line for line in read_json_lines(run_dir / "metrics.jsonl") if "loss" in line]
    found = [{k: v for k, v in line.items() if "/" in k or k == "grad_norm"} for line in lines]
    assert len(found[1]) > 10
    return found


def test_trap_33_given_gradients_cut_and_whole_parameters_get_the_same_update(runs):
    """67 rows, heads that shard edges cut, and a [1, N] weight, on 1, 2 and 3 ranks."""
    one = load_file(runs[0] / "update-1")
    for world in (2, 3):
        for name, value in load_file(runs[0] / f"update-{world}").items():
            assert torch.allclose(value, one[name], rtol=0, atol=1e-6), (world, name)


def test_trap_21_resume_on_another_number_of_ranks(runs):
    """Two cut ranks to two, one and three; one whole to two cut; two whole to one."""
    root = runs[0]
    straight = read_record(root / "one").result["digest"]
    for name, ranks in (
        ("cut-1", [2, 1]),
        ("cut-3", [2, 3]),
        ("whole", [1, 2]),
        ("two-adamw", [2, 1]),
    ):
        one = root / ("one-adamw" if "adamw" in name else "one")
        assert _losses(root / name) == pytest.approx(_losses(one), rel=1e-6), name
        assert read_record(root / name).result["digest"] == straight
        assert [s["ranks"] for s in read_record(root / name).sessions] == ranks
    for key, value in _parameters(root / "cut").items():
        assert torch.equal(value, _parameters(root / "two")[key]), key


def test_cut_checkpoints_are_tensor_files_alone(runs):
    path = checkpoint.find(runs[0] / "two", "last")
    names = sorted(file.name for file in path.iterdir())
    assert len(names) == 3
    assert names[-1] == "state.json"
    assert all(name.endswith(".safetensors") for name in names[:-1])
    assert not list((runs[0] / "two" / checkpoint.FOLDER).glob(".tmp*"))
    data = bytearray((path / names[0]).read_bytes())
    data[-5] ^= 1
    (path / names[0]).write_bytes(data)
    with pytest.raises(CorruptionError, match=names[0]):
        checkpoint.load(path)


def test_trap_20_an_error_on_one_rank_ends_all_with_the_same_sentence(runs):
    _, texts, shard = runs
    said = [[line for line in text.splitlines() if shard in line] for text in texts]
    assert len(said[0]) == 2
    assert said[0] == said[1]
