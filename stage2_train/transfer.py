"""Transfer: how the arms' drafters do on other data sets, from what `drafttape eval data=…` wrote.

An arm that wins on held-out samples of its training data may lose elsewhere, so a comparison shows
both. Acceptance on a data set is compared per seed, as everything is; p-values are corrected by
Holm over all rows, since many data sets are many chances. Transfer doesn't decide: the metric that
does was named before.
"""

import json
import math
from typing import Any

import numpy as np

from stage2_train import stats
from stage2_train.runs import Arm, Run

FILE = "eval_table.json"
Seed = tuple[int, int]


def acceptance(run: Run) -> dict[tuple[str, str], float]:
    """(data set, way of verification) -> tokens a pass; empty where no table was measured."""
    try:
        document = json.loads((run.path / FILE).read_text(encoding="utf-8"))
        return {
            (str(row["data"]), str(row["way"])): float(row["acceptance"])
            for row in document["rows"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def compare(arms: list[Arm], seeds: list[Seed], level: float) -> list[dict[str, Any]]:
    """A row an arm, data set and way that the runs of all seeds and arms have."""
    tables = {arm.name: [acceptance(arm.runs[seed]) for seed in seeds] for arm in arms}
    common = [
        key
        for key in tables[arms[0].name][0]
        if all(key in table for own in tables.values() for table in own)
    ]
    rows = []
    for arm in arms[1:]:
        for key in common:
            pair = [[table[key] for table in tables[a.name]] for a in (arms[0], arm)]
            rows.append(
                {
                    "arm": arm.name,
                    "data": key[0],
                    "way": key[1],
                    "baseline": float(np.mean(pair[0])),
                    "value": float(np.mean(pair[1])),
                    "across": stats.paired_t(np.subtract(pair[1], pair[0]), level),
                }
            )
    adjusted = stats.holm([row["across"].p for row in rows])
    for row, p in zip(rows, adjusted, strict=True):
        row["p_holm"] = p if math.isfinite(p) else None
    return rows
