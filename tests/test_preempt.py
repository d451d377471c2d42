"""A preempted job: SIGTERM to the command and its workers, kill -9, and the same command again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_cache import tiny_cache

from shared.log import read_json_lines
from shared.record import read_record
from stage2_train import checkpoint

pytestmark = pytest.mark.slow
STEPS = 200  # enough that the signal comes before the end on a busy machine


def _command(cache, run_dir):
    return [
        sys.executable,
        "-m",
        "shared.cli",
        "train",
        f"cache.root={cache}",
        f"run_dir={run_dir}",
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_every=20",
        "trainer.tensorboard=false",
        "batch.tokens_per_row=64",
        "batch.anchors_per_sample=4",
        "drafter.block_size=4",
        "drafter.layer_types=[linear_attention]",
        "drafter.intermediate_size=32",
        "loader.workers=2",
        "device=cpu",
    ]


def _start(cache, run_dir):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(
        _command(cache, run_dir),
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own process group, as a scheduler gives a job
    )


def _wait_for(run_dir, step, process):
    deadline = time.time() + 200
    while time.time() < deadline and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.exists() and len(read_json_lines(path)) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"no update {step}: {process.communicate()}")


def test_a_preempted_job_goes_on_and_ends_as_if_nothing_had_been(tmp_path):
    tiny_cache(tmp_path / "cache")
    run_dir = tmp_path / "run"
    process = _start(tmp_path / "cache", run_dir)
    _wait_for(run_dir, 3, process)
    os.killpg(process.pid, signal.SIGTERM)  # a scheduler signals every process of the job
    _, said = process.communicate(timeout=120)
    assert process.returncode == 4, said
    assert "The same command goes on" in said
    assert "Traceback" not in said
    saved = checkpoint.steps(run_dir)
    assert saved
    process = _start(tmp_path / "cache", run_dir)
    _wait_for(run_dir, saved[-1] + 2, process)
    os.killpg(process.pid, signal.SIGUSR1)  # the warning before the end
    _, said = process.communicate(timeout=120)
    assert process.returncode == 4, said
    saved = checkpoint.steps(run_dir)
    process = _start(tmp_path / "cache", run_dir)
    _wait_for(run_dir, min(STEPS - 1, saved[-1] + 7), process)
    process.kill()
    process.communicate()
    process = _start(tmp_path / "cache", run_dir)
    said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    straight = _start(tmp_path / "cache", tmp_path / "straight")
    assert straight.wait(timeout=200) == 0
    straight.communicate()
    runs = [run_dir, tmp_path / "straight"]
    models = [(checkpoint.find(run, "last") / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1]
    lines = [read_json_lines(run / "digests.jsonl") for run in runs]
    assert [line["step"] for line in lines[0]] == list(range(1, STEPS + 1))
    assert [line["digest"] for line in lines[0]] == [line["digest"] for line in lines[1]]
    assert read_record(run_dir).result["digest"] == read_record(runs[1]).result["digest"]
    again = _start(tmp_path / "cache", run_dir)
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0
    assert "was finished already" in out
