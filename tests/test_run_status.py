"""`drafttape status RUN`."""

import json
import time

import pytest

from shared import run_status
from shared.cli import main
from shared.fs import Lock
from shared.record import RunRecord


@pytest.fixture
def run_dir(tmp_path):
    """A run of 100 updates, stopped after 30: 2 s an update in the first session, then 1 s."""
    record = RunRecord({}, "s", "d", ["lossless"], {}, 100, "00")
    record.sessions = [{"from_step": 0}, {"from_step": 10}]
    record.last = {"step": 25, "digest": "00"}
    record.write(tmp_path)
    lines, seconds = [], 0.0
    for step in range(1, 31):
        seconds += 2.0 if step <= 10 else 1.0
        lines.append(
            {
                "step": step,
                "loss": 5 - step / 10,
                "lr": 1e-3,
                "grad_norm": 1.5,
                "skipped": step == 3,
                "tokens": 512 * step,
                "seconds": seconds,
                "data_wait": 0.1 * step,
                "time": 1000.0 + step,
            }
        )
        if step in (10, 20):
            lines.append({"step": step, "heldout_loss": 4.0 + step / 10, "time": 1000.0 + step})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_dead_run_says_how_far_it_got(run_dir, capsys):
    assert main(["status", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "not running" in text
    assert "30 of 100 (30.0%)" in text
    assert "loss        2.0000" in text
    assert "1 updates skipped" in text
    assert "512 tokens/s, 1.00 s an update" in text  # of the last session, not of all
    assert "10.0% of the time" in text
    assert "0:01:10 at this speed" in text
    assert "6.0000 at step 20, best 5.0000 at step 10" in text
    assert "step 25; 5 updates since" in text
    assert "same drafttape train command" in text


def test_a_running_one_holds_the_lock(run_dir):
    lock = Lock.take(run_dir / ".lock", wait=False)
    try:
        assert run_status.run_lines(run_dir, now=1031.0)[0] == "state       running"
        assert "silent" in run_status.run_lines(run_dir, now=time.time())[0]
    finally:
        lock.release(delete=False)  # as after kill -9: the file stays
    assert "not running" in run_status.run_lines(run_dir, now=1031.0)[0]


def test_a_finished_and_a_fresh_run(run_dir):
    record = run_status.read_record(run_dir)
    record.result = {"step": 30}
    record.write(run_dir)
    assert run_status.run_lines(run_dir)[0] == "state       finished"
    (run_dir / "metrics.jsonl").unlink()
    record.result, record.last = {}, {}
    record.write(run_dir)
    assert run_status.run_lines(run_dir)[1:3] == [
        "step        0 of 100 (0.0%)",
        "checkpoint  none yet",
    ]
