"""The main job on a real model, as a person would type it: `make demo`.

Five words of the command, each of which goes on from what exists:

1. generate  SmolLM2-135M-Instruct answers the prompts of examples/prompts.jsonl
2. extract   its hidden states become a cache (zarr, lossless) with a snapshot
3. train     two drafters, AdamW and Muon, on identical replayed inputs
4. eval      held-out loss, accuracy per slot, estimated and real acceptance length
5. compare   a report to decide from, refused if the inputs were not identical

Everything lies under build/demo/; summary.json has the numbers.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("build/demo")
ARMS = ("adamw", "muon")


def run(*words: str) -> float:
    """Runs one `drafttape` command, shown as it could be typed. Returns its wall seconds."""
    sys.stdout.write(f"\n$ drafttape {' '.join(words)}\n")
    sys.stdout.flush()
    started = time.time()
    finished = subprocess.run([sys.executable, "-m", "shared.cli", *words], cwd=ROOT, check=False)
    if finished.returncode:
        sys.exit(finished.returncode)
    return time.time() - started


def main() -> int:
    started = time.time()
    (ROOT / OUT).mkdir(parents=True, exist_ok=True)
    conversations = OUT / "conversations.jsonl"
    run(
        "generate",
        "data.paths=[examples/prompts.jsonl]",
        f"output={conversations}",
        "max_new_tokens=80",
        "batch_size=96",
    )
    run(
        "extract",
        f"data.paths=[{conversations}]",
        f"cache.root={OUT}/cache",
        "snapshot=demo",
    )
    for arm in ARMS:
        run(
            "train",
            "experiment=demo",
            f"optimizer={arm}",
            f"cache.root={OUT}/cache",
            f"run_dir={OUT}/runs/{arm}",
        )
    for arm in ARMS:
        run("eval", f"{OUT}/runs/{arm}", "max_new_tokens=24")
    run(
        "compare",
        *(f"{OUT}/runs/{arm}" for arm in ARMS),
        f"report={OUT}/report.html",
        f"summary={OUT}/summary.json",
    )
    path = ROOT / OUT / "summary.json"
    summary = json.loads(path.read_text())
    summary["seconds"] = round(time.time() - started, 1)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    sys.stdout.write(f"\n{summary['seconds']:.0f} s; the report: {ROOT / OUT / 'report.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
