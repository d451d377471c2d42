"""The plots of a sweep's report: maps with lr rules, shapes, cooldowns, batch and noise, trials.

Names of arms are untrusted text: they stand in captions (escaped there), never in a plot.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stage2_train import maps, verdict
from stage2_train.plots import Item, colour, dash, figure, item
from stage2_train.sweep_plan import AT

MOST_MAPS = 12
SHADES = "Viridis256"
SHAPE = ("schedule", "schedule.name")  # keys by which a plan varies the schedule


def heat_maps(found: dict[str, Any]) -> list[Item]:
    """Loss over learning rate and batch, a map a group, with both lr rules drawn over it."""
    from bokeh.models import ColorBar, ColumnDataSource, LinearColorMapper

    cells: list[maps.Cell] = found["cells"]
    known = [c.mean for c in cells if math.isfinite(c.mean) and maps.LR in c.settings]
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
    for rule, style in (("linear", "solid"), ("square root", "dashed")):
        wanted = [maps.lr_rules(anchor.settings[maps.LR], batches[0], b)[rule] for b in batches]
        places = np.arange(len(lrs))
        x = np.interp(np.log(wanted), np.log(lrs), places, left=np.nan, right=np.nan)
        plot.line(x.tolist(), list(range(len(batches))), line_color="#ff5fa2", line_dash=style,
                  line_width=2)  # fmt: skip


def scatter(rows: list[dict[str, Any]]) -> list[Item]:
    """Every finished trial: held-out loss against log10 of the learning rate."""
    from bokeh.models import ColumnDataSource

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


def named(arms: Iterable[str]) -> str:
    """`blue adamw, orange muon`: which colour is which arm."""
    return ", ".join(f"{colour_name(n)} {arm}" for n, arm in enumerate(arms))


def done(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Finished trials that have all these numbers, and a finite held-out loss."""
    return [
        row
        for row in rows
        if row["state"] == "done"
        and all(row.get(key) is not None for key in (*keys, "heldout_loss"))
        and math.isfinite(row["heldout_loss"])
    ]


def means(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], float]:
    """Mean held-out loss by the values of some columns."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row["heldout_loss"])
    return {key: float(np.mean(values)) for key, values in found.items()}


def curves(
    name: str, caption: str, labels: tuple[str, str], lines: Sequence[Sequence[tuple[float, float]]]
) -> Item:
    """Lines through points, one colour each."""
    from bokeh.models import ColumnDataSource

    points = np.array([point for line in lines for point in line])
    (x0, y0), (x1, y1) = points.min(0).tolist(), points.max(0).tolist()
    plot = figure(*labels, (x0, x1), (y0, y1))
    for number, line in enumerate(lines):
        x, y = np.array(sorted(line), dtype=np.float64).reshape(-1, 2).T
        source = ColumnDataSource(data={"x": x, "y": y})
        style = {"source": source, "color": colour(number)}
        plot.line("x", "y", line_width=2, line_dash=dash(number), **style)
        plot.scatter("x", "y", size=7, **style)
    return item(name, caption, plot)


def shapes(rows: list[dict[str, Any]]) -> list[Item]:
    """Held-out loss against the peak learning rate, a line a schedule: shapes at fixed peak."""
    items = []
    for key in SHAPE:
        usable = done(rows, f"set.{key}", f"set.{maps.LR}")
        for arm in dict.fromkeys(row["arm"] for row in usable):
            mine = [row for row in usable if row["arm"] == arm]
            table = means(mine, f"set.{key}", f"set.{maps.LR}")
            names = list(dict.fromkeys(str(row[f"set.{key}"]) for row in mine))
            if len(names) < 2:
                continue
            lines = [
                [(math.log10(lr), loss) for (shape, lr), loss in table.items() if str(shape) == n]
                for n in names
            ]
            caption = (
                f"{arm}: schedules at the same peak learning rate ({named(names)}). Shapes are "
                "compared point by point, at equal peaks and budgets."
            )
            labels = ("log10(peak learning rate)", "held-out loss")
            items.append(curves(f"shapes-{len(items)}", caption, labels, lines))
    return items


def cooldowns(rows: list[dict[str, Any]]) -> list[Item]:
    """Held-out loss after equal cooldowns from one trunk, against where they began."""
    usable = done(rows, f"set.{AT}")
    arms = list(dict.fromkeys(row["arm"] for row in usable))
    table = means(usable, "arm", f"set.{AT}")
    lines = [[(float(at), loss) for (arm, at), loss in table.items() if arm == n] for n in arms]
    if not lines or max(map(len, lines)) < 2:
        return []
    caption = (
        f"One trunk, several budgets: every point is a cooldown of its own ({named(arms)}). "
        "Cooled points are compared with cooled ones; the trunk's own loss is not on the plot."
    )
    return [curves("cooldowns", caption, ("updates before the cooldown", "held-out loss"), lines)]


def per_batch(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float, float]]]:
    """Arm -> (batch in supervised elements, best learning rate, its held-out loss)."""
    usable = done(rows, "result.supervised", "result.step", f"set.{maps.LR}")
    sizes: dict[tuple[str, Any], list[float]] = {}
    key = f"set.{maps.BATCH}"
    for row in usable:
        size = row["result.supervised"] / row["result.step"]
        sizes.setdefault((row["arm"], row.get(key)), []).append(size)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for (arm, rows_per_step), elements in sizes.items():
        mine = [r for r in usable if r["arm"] == arm and r.get(key) == rows_per_step]
        table = means(mine, f"set.{maps.LR}")
        (lr,) = min(table, key=lambda k: table[k])
        found.setdefault(arm, []).append((float(np.mean(elements)), lr, table[(lr,)]))
    return {arm: sorted(points) for arm, points in found.items()}


def noise_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Arm -> median noise scale of its trials, in supervised elements."""
    usable = done(rows, "result.noise_scale")
    arms = dict.fromkeys(row["arm"] for row in usable)
    scales = {a: [r["result.noise_scale"] for r in usable if r["arm"] == a] for a in arms}
    return {a: float(np.median(s)) for a, s in scales.items() if math.isfinite(np.median(s))}


def batches(rows: list[dict[str, Any]]) -> list[Item]:
    """Best loss at each batch with the noise scale; best lr at each batch with the surge curve."""
    from bokeh.models import Span

    points = {arm: p for arm, p in per_batch(rows).items() if len(p) > 1}
    if not points:
        return []
    noise, arms = noise_of(rows), list(points)
    lines = [[(math.log10(size), loss) for size, _, loss in p] for p in points.values()]
    sizes = [x for line in lines for x, _ in line]
    losses = [y for line in lines for _, y in line]
    reach = [math.log10(noise[arm]) for arm in arms if noise.get(arm, 0) > 0]
    plots = [
        figure("log10(batch, supervised elements)", "best held-out loss",
               (min(sizes + reach), max(sizes + reach)), (min(losses), max(losses))),
        figure("log10(batch, supervised elements)", "best lr over that of the smallest batch",
               (min(sizes), max(sizes)), (0.0, _highest(points))),
    ]  # fmt: skip
    for number, arm in enumerate(arms):
        x, y = np.array(lines[number]).T
        plots[0].line(x, y, color=colour(number), line_width=2)
        plots[0].scatter(x, y, color=colour(number), size=7)
        first = points[arm][0]
        ratio = [lr / first[1] for _, lr, _ in points[arm]]
        plots[1].scatter(x, ratio, color=colour(number), size=8)
        if noise.get(arm, 0) > 0:
            place = math.log10(noise[arm])
            span = {"dimension": "height", "line_color": colour(number), "line_dash": "dashed"}
            plots[0].add_layout(Span(location=place, line_width=1.5, **span))
            size = np.logspace(min(sizes), max(sizes), 60)
            # |g| / sigma of one element from the noise scale: sqrt(1 / scale)
            curve = maps.surge(1.0, math.sqrt(noise[arm]), size)
            start = maps.surge(1.0, math.sqrt(noise[arm]), np.array([first[0]]))[0]
            plots[1].line(np.log10(size), curve / start, color=colour(number), line_width=1.5)
    told = ", ".join(f"{arm} {verdict.number(noise[arm])}" for arm in arms if arm in noise)
    captions = (
        f"Best held-out loss over learning rates at each batch ({named(arms)}); dashed: the "
        f"measured noise scale ({told or 'not measured: diagnostics=noise'}). Below it a larger "
        "batch buys nearly a proportional gain per update, above it little; it is a local figure.",
        "Best learning rate at each batch (dots) and the sign model's surge curve "
        "erf(g sqrt(B) / (sqrt(2) sigma)) at the measured noise scale (line): a model of SignSGD "
        "with equal noise in all coordinates, a diagnostic and no rule.",
    )
    names = ("batch-noise", "batch-surge")
    return [item(n, c, p) for n, c, p in zip(names, captions, plots, strict=True)]


def _highest(points: dict[str, list[tuple[float, float, float]]]) -> float:
    return max(lr / p[0][1] for p in points.values() for _, lr, _ in p) * 1.3


def all_plots(rows: list[dict[str, Any]], found: dict[str, Any]) -> list[Item]:
    """Every plot that the sweep's axes allow."""
    return [
        *heat_maps(found), *shapes(rows), *cooldowns(rows), *batches(rows), *scatter(rows)
    ]  # fmt: skip
