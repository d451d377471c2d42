"""The second stage of a tuned study: each arm at its own robust learning rate, on new seeds.

second_stage.py SWEEP_DIR PLAN      prints the plan of the second stage (seeds 1, 2, 3)
second_stage.py --runs SWEEP_DIR    prints the runs of a sweep, baseline arm first
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from stage2_train import maps

SEEDS = [1, 2, 3]
EVAL = {"max_prompts": 16, "max_new_tokens": 24, "batch_size": 16}


def tuned(rows: list[dict], plan: dict) -> dict:
    """The plan with every arm's learning rate set to its robust pick, without the grid."""
    arms = {}
    for arm, own in plan["arms"].items():
        cells = maps.cells_of([row for row in rows if row["arm"] == arm])
        pick = maps.robust_pick(cells)
        if pick is None:
            raise SystemExit(f"{arm}: no finished trial")
        chosen = dict(cells[pick[0]].settings)
        arms[arm] = {key: value for key, value in (own or {}).items() if key != "grid"} | chosen
    rest = {key: value for key, value in plan.items() if key not in ("grid", "arms", "seeds")}
    return rest | {"arms": arms, "seeds": SEEDS, "eval": EVAL}


def main(words: list[str]) -> None:
    if words[0] == "--runs":
        rows = pq.read_table(Path(words[1]) / "results.parquet").to_pylist()
        print(" ".join(row["run_dir"] for row in rows if row["state"] == "done"))  # noqa: T201
        return
    rows = pq.read_table(Path(words[0]) / "results.parquet").to_pylist()
    plan = yaml.safe_load(Path(words[1]).read_text())
    yaml.safe_dump(tuned(rows, plan), sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main(sys.argv[1:])
