"""Several ranks over gloo: the same losses, digests and stops as one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_cache import tiny_cache

from shared.log import read_json_lines
from shared.record import read_record
from stage2_train import checkpoint

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def _run(world, cache, run_dir, steps, stop=0, parallel="ddp", optimizer="adamw"):
    """Starts the ranks as torchrun does and returns (exit codes, stderr texts)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = os.environ | {
            "WORLD_SIZE": str(world),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE.parent}:{HERE}",
        }
        command = [sys.executable, HERE / "rank_main.py", cache, run_dir, str(steps), str(stop)]
        command += [parallel, optimizer]
        ranks.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    texts = [process.communicate(timeout=400)[1][-2000:] for process in ranks]
    return [process.returncode for process in ranks], texts


def _losses(run_dir):
    return [line["loss"] for line in read_json_lines(run_dir / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks") / "cache"
    tiny_cache(root, count=17)
    return root


def test_trap_20_24_one_two_and_four_ranks_are_one_run(cache, tmp_path):
    """Three rows a step: with two ranks the shares are unequal, with four one rank has none."""
    for world in (1, 2, 4):
        codes, texts = _run(world, cache, tmp_path / str(world), 5)
        assert codes == [0] * world, texts
    one = tmp_path / "1"
    for world in (2, 4):
        run = tmp_path / str(world)
        assert _losses(run) == pytest.approx(_losses(one), rel=1e-6)
        assert [line["digest"] for line in read_json_lines(run / "digests.jsonl")] == [
            line["digest"] for line in read_json_lines(one / "digests.jsonl")
        ]
        for key in ("tokens", "supervised", "blocks", "digest"):
            assert read_record(run).result[key] == read_record(one).result[key]
        assert read_record(run).result["heldout"]["heldout_loss"] == pytest.approx(
            read_record(one).result["heldout"]["heldout_loss"], rel=1e-6
        )


def test_trap_21_resume_on_another_number_of_ranks(cache, tmp_path):
    codes, texts = _run(2, cache, tmp_path / "run", 6, stop=3)
    assert codes == [4, 4], texts
    assert "stopped after update 3 of 6" in texts[0]
    assert checkpoint.steps(tmp_path / "run") == [3]
    codes, texts = _run(1, cache, tmp_path / "run", 6)
    assert codes == [0], texts
    _run(1, cache, tmp_path / "straight", 6)
    assert _losses(tmp_path / "run") == pytest.approx(_losses(tmp_path / "straight"), rel=1e-6)
    results = [read_record(tmp_path / name).result["digest"] for name in ("run", "straight")]
    assert results[0] == results[1]
    assert [s["ranks"] for s in read_record(tmp_path / "run").sessions] == [2, 1]


def test_trap_20_an_error_on_one_rank_ends_all_with_the_same_sentence(tmp_path):
    store = tiny_cache(tmp_path / "cache", count=17)
    for name in store.shard_ids()[:1]:
        for path in (tmp_path / "cache" / "shards" / name).rglob("*"):
            if path.is_file() and path.stat().st_size > 2000:
                path.write_bytes(path.read_bytes()[:-40])
    codes, texts = _run(2, tmp_path / "cache", tmp_path / "run", 6)
    assert codes == [1, 1], texts
    assert texts[0].splitlines()[-1] == texts[1].splitlines()[-1]
    assert store.shard_ids()[0] in texts[0]
