"""The report of a sweep: table, heat maps, near-optimal region, robust pick, fits, priors."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from stage2_train import maps, verdict
from stage2_train.report import Cell, escape, numeric, section, table, write_page

MOST_MAPS = 12
SHADES = "Viridis256"


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


def _budget_fits(rows: list[dict[str, Any]]) -> list[tuple[str, maps.PowerLaw]]:
    """Best lr against FLOPs per arm, where a sweep has three budgets or more."""
    fits = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        best: dict[float, tuple[float, float]] = {}
        for row in rows:
            flops, lr = row.get("result.flops"), row.get(f"set.{maps.LR}")
            loss = row.get("heldout_loss")
            if row["arm"] != arm or not flops or lr is None or loss is None:
                continue
            budget = float(f"{flops:.2g}")
            if budget not in best or loss < best[budget][0]:
                best[budget] = (loss, lr)
        if len(best) >= 3:
            budgets = sorted(best)
            law = maps.fit_power_law(budgets, [best[b][1] for b in budgets], 4 * budgets[-1])
            if law is not None:
                fits.append((arm, law))
    return fits


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
    items = [*heat_maps(found), *scatter(rows)]
    from stage2_train.report import plot_html

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
    for arm, law in found["budgets"]:
        text = (
            f"{arm}: best lr = {law.factor:.3g} C^{law.exponent:.3f} over {law.points} budgets "
            f"(residual {law.residual:.2g} in the logarithm); at C = {law.at:.2g} it predicts "
            f"{law.predicted:.2g}, 95 % prediction interval {law.low:.2g} to {law.high:.2g}."
        )
        parts.append(f"<p>{escape(text)}</p>")
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


def heat_maps(found: dict[str, Any]) -> list[Any]:
    """Loss over learning rate and batch, a map a group, with both lr rules drawn over it."""
    from bokeh.models import ColorBar, ColumnDataSource, LinearColorMapper

    from stage2_train.plots import figure, item

    cells: list[maps.Cell] = found["cells"]
    known = [c.mean for c in cells if math.isfinite(c.mean)]
    if not known:
        return []
    # Far-off points would flatten the colours: everything above the median reads as "bad".
    low, high = min(known), float(np.median(known)) + 1e-9
    items = []
    robust = found["robust"][0] if found["robust"] else None
    for number, group in enumerate(maps.groups_of(cells)[:MOST_MAPS]):
        members = [cells[i] for i in group if maps.LR in cells[i].settings]
        lrs = sorted({c.settings[maps.LR] for c in members})
        batches = sorted({c.settings.get(maps.BATCH, 1) for c in members})
        if len(lrs) < 2 or len(members) > 400:
            continue
        place = [(lrs.index(c.settings[maps.LR]), batches.index(c.settings.get(maps.BATCH, 1)))
                 for c in members]  # fmt: skip
        data = {
            "x": [x for x, _ in place],
            "y": [y for _, y in place],
            "loss": [c.mean if math.isfinite(c.mean) else float("nan") for c in members],
            "text": [verdict.number(c.mean) for c in members],
            "edge": [3 if i == robust else (1.5 if i in found["near"] else 0)
                     for i in group if maps.LR in cells[i].settings],
        }  # fmt: skip
        source = ColumnDataSource(data=data)
        mapper = LinearColorMapper(palette=SHADES, low=low, high=high, nan_color="#888888")
        plot = figure(
            "learning rate", "rows per step", (-0.5, len(lrs) - 0.5), (-0.5, len(batches) - 0.5),
            height=120 + 60 * len(batches),
        )  # fmt: skip
        plot.rect(
            "x", "y", 1, 1, source=source, line_width="edge", line_color="#d55e00",
            fill_color={"field": "loss", "transform": mapper},
        )  # fmt: skip
        plot.text(
            "x", "y", "text", source=source, text_align="center", text_baseline="middle",
            text_color="#ffffff", text_font_size="12px", text_outline_color="#000000",
        )  # fmt: skip
        for axis, values in ((plot.xaxis[0], lrs), (plot.yaxis[0], batches)):
            axis.ticker = list(range(len(values)))
            axis.major_label_overrides = {k: f"{v:g}" for k, v in enumerate(values)}
        _draw_rules(plot, members, lrs, batches)
        plot.add_layout(ColorBar(color_mapper=mapper, width=10), "right")
        label = members[0].arm + "".join(
            f", {k}={v}" for k, v in members[0].settings.items() if isinstance(v, str)
        )
        caption = f"{label}: held-out loss. Thick edge: robust pick; thin edge: near-optimal."
        if len(batches) > 1:
            caption += " Lines: linear (solid) and square-root (dashed) rule from the best point "
            caption += "of the smallest batch."
        items.append(item(f"map-{number}", caption, plot))
    return items


def _draw_rules(plot: Any, members: list[Any], lrs: list[float], batches: list[float]) -> None:
    """The two lr rules from the best point of the smallest batch, in the map's coordinates."""
    if len(batches) < 2:
        return
    first = [c for c in members if c.settings.get(maps.BATCH, 1) == batches[0]]
    anchor = min(first, key=lambda c: c.mean)
    for rule, dash in (("linear", "solid"), ("square root", "dashed")):
        wanted = [maps.lr_rules(anchor.settings[maps.LR], batches[0], b)[rule] for b in batches]
        x = np.interp(np.log(wanted), np.log(lrs), np.arange(len(lrs)))
        plot.line(x.tolist(), list(range(len(batches))), line_color="#ff5fa2", line_dash=dash,
                  line_width=2)  # fmt: skip


def scatter(rows: list[dict[str, Any]]) -> list[Any]:
    """Every finished trial: held-out loss against log10 of the learning rate."""
    from bokeh.models import ColumnDataSource

    from stage2_train.plots import colour, figure, item

    done = [
        row for row in rows if row.get("heldout_loss") is not None and row.get(f"set.{maps.LR}")
    ]
    if len(done) < 2:
        return []
    x = np.log10([row[f"set.{maps.LR}"] for row in done])
    y = np.array([row["heldout_loss"] for row in done], dtype=np.float64)
    top = float(np.quantile(y, 0.9))
    plot = figure(
        "log10(learning rate)", "held-out loss", (float(x.min()), float(x.max())),
        (float(y.min()), max(top, float(y.min()) + 1e-6)),
    )  # fmt: skip
    arms = list(dict.fromkeys(row["arm"] for row in done))
    for number, arm in enumerate(arms):
        chosen = [k for k, row in enumerate(done) if row["arm"] == arm]
        source = ColumnDataSource(
            data={"x": x[chosen].astype(np.float32), "y": y[chosen].astype(np.float32)}
        )
        plot.scatter("x", "y", source=source, color=colour(number), size=7, alpha=0.8)
    names = ", ".join(f"{colour_name(n)} {arm}" for n, arm in enumerate(arms))
    return [item("trials", f"All finished trials: {names}.", plot)]


def colour_name(number: int) -> str:
    """A word for the palette's colour, for captions."""
    words = ("blue", "orange", "green", "pink", "light blue", "red", "grey")
    return words[number % len(words)]
