"""The learning-rate picture of a tuned study, as SVG.

python -m docs.studies.figures SWEEP_DIR OUT.svg
"""

import math
import sys
from pathlib import Path

import pyarrow.parquet as pq

from bench.plots import chart


def curves(rows: list[dict]) -> str:
    """Held-out loss against learning rate, one line an arm."""
    arms: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["state"] == "done":
            point = (math.log10(row["set.optimizer.lr"]), row["heldout_loss"])
            arms.setdefault(row["arm"], []).append(point)
    lowest = min(loss for points in arms.values() for _, loss in points)
    rates = sorted({rate for points in arms.values() for rate, _ in points})
    first = math.floor(lowest * 5) / 5
    return chart(
        {arm: tuple(zip(*sorted(points), strict=True)) for arm, points in arms.items()},
        "learning rate", "held-out loss (cut at the top)",
        {rate: f"{10**rate:.1e}" for rate in rates},
        {round(first + 0.2 * k, 1): f"{first + 0.2 * k:.1f}" for k in range(6)},
    )  # fmt: skip


if __name__ == "__main__":
    table = pq.read_table(Path(sys.argv[1]) / "results.parquet").to_pylist()
    Path(sys.argv[2]).write_text(curves(table))
