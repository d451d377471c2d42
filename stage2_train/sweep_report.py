"""The report of a sweep: table, heat maps, near-optimal region, robust pick, fits, priors."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from stage2_train import maps, sweep_plots, verdict
from stage2_train.report import Cell, escape, numeric, plot_html, section, table, write_page


def analyse(rows: list[dict[str, Any]], *, tolerance: float) -> dict[str, Any]:
    """What the sweep says, from its table; of a halved sweep, its last rung decides."""
    last = max((row.get("rung") or 0 for row in rows), default=0)
    cells = maps.cells_of([row for row in rows if (row.get("rung") or 0) == last])
    near = maps.near_optimal(cells, tolerance)
    best = min(range(len(cells)), key=lambda n: cells[n].mean, default=None)
    if best is not None and not math.isfinite(cells[best].mean):
        best = None
    fits = []
    for group in maps.groups_of(cells):
        members = [cells[index] for index in group]
        batches = sorted({cell.settings.get(maps.BATCH, 1) for cell in members})
        for batch in batches:
            line = [c for c in members if c.settings.get(maps.BATCH, 1) == batch]
            line = [c for c in line if maps.LR in c.settings]
            label = members[0].arm + (f", batch {batch}" if len(batches) > 1 else "")
            rest = [f"{k}={v}" for k, v in members[0].settings.items() if isinstance(v, str)]
            label = ", ".join([label, *rest])
            fit = maps.fit_lr(label, [c.settings[maps.LR] for c in line], [c.mean for c in line])
            if fit is not None:
                fits.append(fit)
    return {
        "cells": cells,
        "tolerance": tolerance,
        "best": best,
        "near": near,
        "robust": maps.robust_pick(cells),
        "fits": fits,
        "budgets": _budget_fits(rows),
    }


def _budget_fits(rows: list[dict[str, Any]]) -> list[tuple[str, str, maps.PowerLaw]]:
    """(arm, what, law) of best lr and best batch over FLOPs, from three budgets on."""
    fits = []
    usable = sweep_plots.done(rows, "result.flops", f"set.{maps.LR}")
    for arm in dict.fromkeys(row["arm"] for row in usable):
        best: dict[float, dict[str, Any]] = {}
        for row in (row for row in usable if row["arm"] == arm):
            budget = float(f"{row['result.flops']:.2g}")
            if budget not in best or row["heldout_loss"] < best[budget]["heldout_loss"]:
                best[budget] = row
        budgets = sorted(best)
        for what, value in (
            ("learning rate", lambda row: row[f"set.{maps.LR}"]),
            ("batch in tokens", _tokens_per_step),
        ):
            values = [value(best[budget]) for budget in budgets]
            if len(budgets) >= 3 and all(values) and len(set(values)) > 1:
                law = maps.fit_power_law(budgets, values, 4 * budgets[-1])
                if law is not None:
                    fits.append((arm, what, law))
    return fits


def _tokens_per_step(row: dict[str, Any]) -> float | None:
    tokens, steps = row.get("result.tokens"), row.get("result.step")
    return tokens / steps if tokens and steps else None


def terminal_text(rows: list[dict[str, Any]], found: dict[str, Any]) -> str:
    """Count, best, robust pick and the region, in a few lines."""
    states = [row["state"] for row in rows]
    lines = [f"{states.count('done')} of {len(rows)} trials done, {states.count('failed')} failed"]
    cells = found["cells"]
    if found["best"] is not None:
        lines.append(f"best point:   {_describe(cells[found['best']])}")
    if found["robust"] is not None:
        index, worst = found["robust"]
        text = f"robust pick:  {_describe(cells[index])}, its worst neighbour "
        lines.append(text + verdict.number(worst))
    if found["near"]:
        lines.append(
            f"near-optimal (within {100 * found['tolerance']:g} %): "
            f"{len(found['near'])} of {len(cells)} points"
        )
    lines += [
        f"{verdict.printable(fit.label)}: the best learning rate lies outside the grid; extend it"
        for fit in found["fits"]
        if not fit.inside
    ]
    return "\n".join(lines)


def _describe(cell: maps.Cell) -> str:
    return f"{verdict.printable(cell.label)}  held-out loss {verdict.number(cell.mean)}"


def write(path: Path, name: str, rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Writes the page."""
    items = sweep_plots.all_plots(rows, found)
    sections = [
        section("Result", result_html(rows, found)),
        section("Maps", "".join(plot_html(item) for item in items)),
        section("Points", table(point_rows(found), "points")),
        section("Fits and priors", fits_html(rows, found)),
        section("Trials", table(trial_rows(rows), "trials")),
    ]
    write_page(path, f"drafttape sweep: {name}", sections, items)


def result_html(rows: list[dict[str, Any]], found: dict[str, Any]) -> str:
    """The terminal's lines and what the words mean."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in terminal_text(rows, found).split("\n"))
    note = (
        "A point is a setting, its value the mean over seeds; a setting with a failed trial never "
        "wins. The robust pick is good itself and has no bad neighbour on the grid. The "
        "single best point of many is partly luck: confirm the pick with new seeds before you rely "
        "on it."
    )
    bias = f"<p class=note>{escape(found['bias'])}</p>" if "bias" in found else ""
    return f"{lines}{bias}<p class=note>{note}</p>"


def point_rows(found: dict[str, Any]) -> list[list[Cell]]:
    """One row a point: settings, mean, spread, place in the region."""
    cells: list[maps.Cell] = found["cells"]
    keys = list(dict.fromkeys(key for cell in cells for key in cell.settings))
    head = ["arm", *keys, "held-out loss", "spread over seeds", "seeds", "failed", "region"]
    rows = [[Cell(text) for text in head]]
    robust = found["robust"][0] if found["robust"] else None
    for index, cell in enumerate(cells):
        marks = [
            text
            for text, holds in (
                ("best", index == found["best"]),
                ("robust pick", index == robust),
                ("near-optimal", index in found["near"]),
            )
            if holds
        ]
        spread = float(np.std(cell.values, ddof=1)) if len(cell.values) > 1 else None
        row = [Cell(cell.arm)]
        row += [_setting(cell.settings.get(key)) for key in keys]
        mean = cell.mean if math.isfinite(cell.mean) else None
        row += [numeric(mean, f"point-{index}"), numeric(spread), numeric(len(cell.values))]
        row += [numeric(cell.failed), Cell(", ".join(marks))]
        rows.append(row)
    return rows


def _setting(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(f"{value:g}", float(value))
    return Cell("–" if value is None else str(value))


def trial_rows(rows: list[dict[str, Any]]) -> list[list[Cell]]:
    """The results table, without the configurations."""
    keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key.startswith("set.")]
    numbers = ("heldout_loss", "accuracy", "estimated_acceptance", "real_acceptance", "seconds")
    head = ["trial", "state", *(key.removeprefix("set.") for key in keys), *numbers, "error"]
    made = [[Cell(text) for text in head]]
    for row in rows:
        line = [Cell(row["trial"]), Cell(row["state"])]
        line += [_setting(row.get(key)) for key in keys]
        line += [
            numeric(row.get(key), f"{row['trial']}.{key}")
            if isinstance(row.get(key), int | float)
            else Cell("–", float("nan"))
            for key in numbers
        ]
        made.append([*line, Cell((row.get("error") or "")[:200])])
    return made


def fits_html(rows: list[dict[str, Any]], found: dict[str, Any]) -> str:
    """Local fits with residuals and intervals, then the published priors, labelled as such."""
    parts = []
    if found["fits"]:
        head = ["group", "best lr (parabola)", "95 % interval", "residual", "points", "inside"]
        made = [[Cell(text) for text in head]]
        for fit in found["fits"]:
            span = f"{fit.low:.2g} to {fit.high:.2g}" if math.isfinite(fit.low) else "–"
            made.append(
                [
                    Cell(fit.label), numeric(fit.best), Cell(span, fit.low), numeric(fit.residual),
                    numeric(fit.points), Cell("yes" if fit.inside else "no: extend the grid"),
                ]
            )  # fmt: skip
        parts.append("<h3>Parabola over log(lr)</h3>" + table(made, "fits"))
    for arm, what, law in found["budgets"]:
        text = (
            f"{arm}: best {what} = {law.factor:.3g} C^{law.exponent:.3f} over {law.points} budgets "
            f"(residual {law.residual:.2g} in the logarithm); at C = {law.at:.2g} it predicts "
            f"{law.predicted:.2g}, 95 % prediction interval {law.low:.2g} to {law.high:.2g}."
        )
        rows_ = [[Cell("FLOPs"), Cell(f"best {what}"), Cell("fitted"), Cell("residual of log")]]
        rows_ += [
            [numeric(c), numeric(y), numeric(y / math.exp(r)), numeric(r)]
            for c, y, r in law.residuals
        ]
        parts.append(f"<h3>Local fit over budgets</h3><p>{escape(text)}</p>")
        parts.append(table(rows_, f"budgets-{len(parts)}"))
    flops = [row["result.flops"] for row in rows if row.get("result.flops")]
    if flops:
        budget = float(np.median(flops))
        text = (
            f"Priors at C = {budget:.3g} FLOPs, not fitted here: lr 0.3118 C^-0.1250 = "
            f"{maps.prior_lr(budget):.3g}, batch 0.2920 C^0.3271 = {maps.prior_batch(budget):.3g} "
            "tokens. They come from dense language model pretraining with AdamW (C = 6ND) and are "
            "a place to start a grid, nothing more."
        )
        parts.append(f"<p class=note>{escape(text)}</p>")
    return "".join(parts) or "<p>Too few points for a fit.</p>"
