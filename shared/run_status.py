"""How a training run stands, read from its directory: `drafttape status RUN`.

The speed is that of the newest updates of the last session; a run is alive while its process holds
the directory's lock.
"""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from shared.fs import Lock
from shared.log import read_json_lines
from shared.record import RunRecord, read_record

WINDOW = 50  # updates whose speed is shown
SILENT_S = 600.0  # alive, but without an update for so long: worth a look


def alive(run_dir: Path) -> bool:
    """Whether a process of this machine trains here."""
    path = run_dir / ".lock"
    if not path.exists():
        return False
    lock = Lock.take(path, wait=False)
    if lock is None:
        return True
    lock.release(delete=False)
    return False


def run_lines(run_dir: Path, now: float | None = None) -> list[str]:
    """The status as text.

    Raises:
        DataError, CorruptionError: there is no run, or its files can't be read.
    """
    record = read_record(run_dir)
    path = run_dir / "metrics.jsonl"
    lines = read_json_lines(path) if path.exists() else []
    updates = [line for line in lines if "loss" in line]
    now = time.time() if now is None else now
    is_alive, is_done = alive(run_dir), bool(record.result)
    step = updates[-1]["step"] if updates else 0
    out = [f"state       {_state(record, updates, is_alive, now)}"]
    out.append(f"step        {step:,} of {record.steps:,} ({step / max(record.steps, 1):.1%})")
    if updates:
        out += _numbers(record, updates, is_done)
    heldout = [line for line in lines if "heldout_loss" in line]
    if heldout:
        best = min(heldout, key=lambda line: line["heldout_loss"])
        out.append(
            f"held-out    {heldout[-1]['heldout_loss']:.4f} at step {heldout[-1]['step']:,}, "
            f"best {best['heldout_loss']:.4f} at step {best['step']:,}"
        )
    saved = record.last.get("step")
    out.append(
        "checkpoint  none yet" if saved is None else f"checkpoint  step {saved:,}"
        + ("" if saved == step else f"; {step - saved:,} updates since")
    )  # fmt: skip
    if not is_alive and not is_done:
        out.append("to go on    type the same drafttape train command again")
    return out


def _state(record: RunRecord, updates: list[dict[str, Any]], is_alive: bool, now: float) -> str:
    if record.result:
        return "finished"
    if not is_alive:
        return "not running on this machine"
    silent = now - updates[-1]["time"] if updates else 0.0
    return f"running, but silent for {_span(silent)}" if silent > SILENT_S else "running"


def _numbers(record: RunRecord, updates: list[dict[str, Any]], is_done: bool) -> list[str]:
    last = updates[-1]
    first = record.sessions[-1].get("from_step", 0) if record.sessions else 0
    recent = [line for line in updates if line["step"] >= first][-WINDOW - 1 :]
    begin = recent[0] if len(recent) > 1 else {"step": 0, "tokens": 0, "seconds": 0, "data_wait": 0}
    seconds = max(last["seconds"] - begin["seconds"], 1e-9)
    per_update = seconds / max(1, last["step"] - begin["step"])
    skipped = sum(bool(line.get("skipped")) for line in updates)
    out = [
        f"loss        {last['loss']:.4f}, lr {last['lr']:.2e}, gradient norm "
        f"{last['grad_norm']:.3g}" + (f", {skipped} updates skipped" if skipped else ""),
        f"speed       {(last['tokens'] - begin['tokens']) / seconds:,.0f} tokens/s, "
        f"{per_update:.2f} s an update",
        f"data wait   {(last['data_wait'] - begin['data_wait']) / seconds:.1%} of the time",
        f"time        {_span(last['seconds'])} of training",
    ]
    if not is_done:
        left = (record.steps - last["step"]) * per_update
        out.append(f"left        {_span(left)} at this speed")
    return out


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
