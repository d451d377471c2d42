"""`python -m bench [part …]`: runs the parts and merges their figures into build/bench.json.

A part is a module of this folder with `run() -> dict[str, float]`, a flat map of names such as
`storage.lossless_bytes`. Figures of parts that did not run stay as they were.
"""

import importlib
import json
import sys
import time
from pathlib import Path

PARTS = ("storage", "extract", "mixer", "train", "common", "muon", "sweep")
RESULTS = Path("build/bench.json")


def merge(figures: dict[str, float]) -> None:
    """Adds figures to build/bench.json, keeping the others."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known.update({name: float(f"{value:.6g}") for name, value in figures.items()})
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    temporary.replace(RESULTS)


def main(names: list[str]) -> int:
    present = [part for part in PARTS if (Path(__file__).parent / f"{part}.py").exists()]
    for name in names or present:
        if name not in present:
            print(f"no benchmark {name!r}; there are: {', '.join(present)}", file=sys.stderr)
            return 2
        started = time.time()
        print(f"== {name}", flush=True)
        figures = importlib.import_module(f"bench.{name}").run()
        merge(figures)
        for figure, value in figures.items():
            print(f"{figure:<40} {value:.4g}")
        print(f"   ({time.time() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
