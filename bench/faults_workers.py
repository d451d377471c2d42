"""One worker of several is killed at a random moment, again and again; the run goes on.

`python -m bench.faults_workers [20]` adds `workers` to build/faults.json: `tried` kills; `lost`
runs that did not end well; `silent` snapshots or shards that differ from an undisturbed run's.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.faults import chats, shards

WORK, RESULTS = Path("build/faults-workers"), Path("build/faults.json")
# A shard that loses three workers ends a run by design, so a run gets fewer kills than that.
KILLS_PER_RUN = 2


def start(root: Path, data: Path, workers: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "shared.cli", "extract", "target=tiny_qwen3_5"]
    command += [f"data.paths=[{data}]", f"cache.root={root}", f"workers={workers}"]
    command += ["cache.shard_bytes=60000", "batch_tokens=512", "device=cpu", "self_test=false"]
    with (WORK / f"{root.name}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def victims(parent: int) -> list[int]:
    """Worker processes of a run (spawned ones; the resource tracker is none)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            of = int(status.read_text().rpartition(")")[2].split()[1])
            line = (status.parent / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if of == parent and b"spawn_main" in line and b"fork" in line:
            found.append(int(status.parent.name))
    return found


def campaign(count: int, rng: random.Random) -> dict[str, int]:
    """Kills `count` workers that are inside a shard."""
    data = chats(WORK / "chats.jsonl", 48)
    calm = WORK / "calm"
    if start(calm, data, 1).wait():
        raise SystemExit((WORK / "calm.log").read_text())
    wanted = shards(calm)
    tried = lost = silent = runs = 0
    while tried < count:
        runs += 1
        root = WORK / f"run-{runs}"
        process, kills = start(root, data, 3), 0
        while process.poll() is None and kills < min(KILLS_PER_RUN, count - tried):
            busy = list((root / "shards").glob(".tmp-*.lock"))
            alive = victims(process.pid)
            if not busy or not alive:
                time.sleep(0.02)
                continue
            time.sleep(rng.random() * 0.3)
            try:
                os.kill(rng.choice(alive), signal.SIGKILL)
            except ProcessLookupError:
                continue
            kills += 1
        lost += process.wait() != 0
        silent += shards(root) != wanted
        tried += kills
        print(f"{tried} killed in {runs} runs, {lost} lost, {silent} differ", flush=True)
        shutil.rmtree(root)
    return {"tried": tried, "runs": runs, "lost": lost, "silent": silent}


def main(arguments: list[str]) -> int:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    os.environ.setdefault("DRAFTTAPE_HOME", str((WORK / "home").absolute()))
    result = campaign(int(arguments[0]) if arguments else 20, random.Random(0))
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | {"workers": result}, indent=1) + "\n")
    shutil.rmtree(WORK, ignore_errors=True)
    return int(bool(result["lost"] or result["silent"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
