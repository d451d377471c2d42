"""The main job on a real model, as a person would type it: `make demo`.

Five words of the command, each of which goes on from what exists:

1. generate  SmolLM2-135M-Instruct answers the prompts of examples/prompts.jsonl
2. extract   its hidden states become a cache (zarr, lossless) with a snapshot
3. train     two drafters, AdamW and Muon, on identical replayed inputs
4. eval      held-out loss, accuracy per slot, estimated and real acceptance length
5. compare   a report to decide from, refused if the inputs were not identical

Everything lies under build/demo/; summary.json has the numbers. One seed is no verdict:
`make demo-seeds` trains two more of each arm and compares all six (build/demo/seeds/).
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("build/demo")
ARMS = ("adamw", "muon")


def run(*words: str) -> None:
    """Runs one `drafttape` command, shown as it could be typed."""
    sys.stdout.write(f"\n$ drafttape {' '.join(words)}\n")
    sys.stdout.flush()
    finished = subprocess.run([sys.executable, "-m", "shared.cli", *words], cwd=ROOT, check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


def main(seeds: int) -> int:
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
    out = OUT if seeds == 1 else OUT / "seeds"
    (ROOT / out).mkdir(exist_ok=True)
    runs = [(arm, seed, f"{OUT}/runs/{arm}" + (f"-seed{seed}" if seed else ""))
            for seed in range(seeds) for arm in ARMS]  # fmt: skip
    for arm, seed, run_dir in runs:
        run(
            "train",
            "experiment=demo",
            f"optimizer={arm}",
            f"cache.root={OUT}/cache",
            f"run_dir={run_dir}",
            f"seed={seed}",
            f"init_seed={seed}",
        )
    for _, _, run_dir in runs:
        run("eval", run_dir, "max_new_tokens=24", "batch_size=16")
    run(
        "compare",
        *(run_dir for _, _, run_dir in runs),
        f"report={out}/report.html",
        f"summary={out}/summary.json",
    )
    path = ROOT / out / "summary.json"
    summary = json.loads(path.read_text())
    summary["seconds"] = round(time.time() - started, 1)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    sys.stdout.write(f"\n{summary['seconds']:.0f} s; the report: {ROOT / out / 'report.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
