"""The report's plots as Bokeh JSON items; names never reach a label, only an arm's number."""

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stage2_train import analysis, stats
from stage2_train.runs import Arm, Run

# Okabe and Ito's palette: told apart with colour blindness, legible on light and dark.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
MOST_POINTS = 300


@dataclass(frozen=True)
class Item:
    """A plot: name in the page, caption, Bokeh's JSON."""

    name: str
    caption: str
    document: dict[str, Any]


def colour(arm: int) -> str:
    """The colour of the n-th arm."""
    return COLOURS[arm % len(COLOURS)]


def comparison(summary: dict[str, Any], arms: list[Arm]) -> list[Item]:
    """Loss curves, paired differences and acceptance per slot."""
    seeds = [tuple(seed) for seed in summary["seeds"]]
    items = [loss_curves(arms, seeds), difference_curves(arms, seeds, summary["confidence"])]
    slots = [values["slot_accuracy"] for values in summary["arms"].values()]
    if any(slots):
        items.append(slot_curves(slots))
    return items


def smoothed(run: Run) -> dict[str, np.ndarray]:
    """Means over at most MOST_POINTS bins of steps; abscissas at the bins' ends, float32."""
    steps = run.num_steps
    bins = min(MOST_POINTS, max(1, steps // 5) if steps > 50 else steps)
    edges = np.linspace(0, steps, bins + 1).round().astype(int)
    sums = np.add.reduceat(run.series["loss"], edges[:-1])
    columns = {"loss": sums / np.diff(edges)}
    for key in ("step", "tokens", "seconds"):
        columns[key] = run.series[key][edges[1:] - 1]
    return {key: values.astype(np.float32) for key, values in columns.items()}


def loss_curves(arms: list[Arm], seeds: list[tuple[int, int]]) -> Item:
    """Training loss against steps, tokens and seconds, a line a run."""
    from bokeh.layouts import column
    from bokeh.models import ColumnDataSource

    tables = [(number, smoothed(arm.runs[s])) for number, arm in enumerate(arms) for s in seeds]
    sources = [(number, ColumnDataSource(data=table)) for number, table in tables]
    highest = [float(np.nanmax(table["loss"])) for _, table in tables]
    lowest = [float(np.nanmin(table["loss"])) for _, table in tables]
    figures = []
    for key, label in (("step", "steps"), ("tokens", "training tokens"), ("seconds", "seconds")):
        last = [float(table[key][-1]) for _, table in tables]
        if not np.isfinite(last).all():
            continue
        plot = figure(label, "training loss", (0.0, max(last)), (min(lowest), max(highest)))
        for number, source in sources:
            line = plot.line(
                key, "loss", source=source, line_color=colour(number), line_width=1.6,
                line_dash=dash(number),
            )  # fmt: skip
            line.tags = [f"arm-{number}"]
        figures.append(plot)
    layout = column(*figures, sizing_mode="stretch_width")
    return item("loss", "Training loss (means over bins of steps), a line a run.", layout)


def difference_curves(arms: list[Arm], seeds: list[tuple[int, int]], level: float) -> Item:
    """Paired per-step difference from the baseline in bins of steps, with its interval."""
    from bokeh.models import ColumnDataSource, Span

    columns = []
    for arm in arms[1:]:
        difference = analysis.difference_series(arms[0], arm, seeds)
        steps = arms[0].runs[seeds[0]].series["step"]
        edges = np.linspace(0, len(steps), max(1, min(20, len(steps) // 8)) + 1).round().astype(int)
        parts = [
            (steps[(a + b - 1) // 2], stats.mean_interval(difference[a:b], level, draws=400))
            for a, b in pairwise(edges)
        ]
        columns.append(
            {
                "step": np.array([step for step, _ in parts], dtype=np.float32),
                "mean": np.array([i.mean for _, i in parts], dtype=np.float32),
                "low": np.nan_to_num([i.low for _, i in parts], nan=parts[0][1].mean),
                "high": np.nan_to_num([i.high for _, i in parts], nan=parts[0][1].mean),
            }
        )
    # The first bins (warm-up) may be far off; they are there but not what the axis is for.
    late = [c[key][len(c["low"]) // 5 :] for c in columns for key in ("low", "high")]
    low, high = min(0.0, *(float(v.min()) for v in late)), max(0.0, *(float(v.max()) for v in late))
    plot = figure(
        "steps", "loss minus baseline's", (0.0, float(max(c["step"][-1] for c in columns))),
        (low, high),
    )  # fmt: skip
    plot.add_layout(Span(location=0, dimension="width", line_width=1))
    shaded = len(columns) <= 8
    for number, data in enumerate(columns, start=1):
        source = ColumnDataSource(data=data)
        parts = [plot.line("step", "mean", source=source, line_color=colour(number), line_width=2)]
        if shaded:
            parts.append(
                plot.varea("step", "low", "high", source=source, fill_color=colour(number),
                           fill_alpha=0.25)
            )  # fmt: skip
        for part in parts:
            part.tags = [f"arm-{number}"]
    caption = (
        f"Paired difference of training loss from the baseline, with its {100 * level:g} % "
        "interval on these inputs (block bootstrap in each bin of steps). Below zero is better."
    )
    return item("difference", caption, plot)


def slot_curves(slots: list[list[float] | None]) -> Item:
    """Accuracy per slot, and the share of blocks accepted up to a slot."""
    from bokeh.layouts import row
    from bokeh.models import ColumnDataSource

    count = max(len(s) for s in slots if s)
    plots = [
        figure("slot", "accuracy", (1, count), (0, 1), height=260),
        figure("slot", "accepted up to the slot", (1, count), (0, 1), height=260),
    ]
    for number, accuracy in enumerate(slots):
        if not accuracy:
            continue
        data = {
            "slot": np.arange(1, len(accuracy) + 1, dtype=np.float32),
            "a": np.array(accuracy, dtype=np.float32),
            "b": np.cumprod(accuracy).astype(np.float32),
        }
        source = ColumnDataSource(data=data)
        for plot, key in zip(plots, "ab", strict=True):
            line = plot.line(
                "slot", key, source=source, line_color=colour(number), line_width=2,
                line_dash=dash(number),
            )  # fmt: skip
            dots = plot.scatter("slot", key, source=source, color=colour(number), size=5)
            line.tags = dots.tags = [f"arm-{number}"]
    caption = "Held-out accuracy per slot and its running product, whose sum + 1 is the estimate."
    return item("slots", caption, row(*plots, sizing_mode="stretch_width"))


def dash(arm: int) -> str:
    """Another dash for every round through the palette."""
    return ("solid", "dashed", "dotted", "dotdash")[arm // len(COLOURS) % 4]


def figure(
    x_label: str, y_label: str, x: tuple[float, float], y: tuple[float, float], *, height: int = 300
) -> Any:
    """A zoomable figure with set ranges (so that keys can put them back)."""
    from bokeh.models import HoverTool
    from bokeh.plotting import figure as bokeh_figure

    pad_x, pad_y = [0.04 * ((b - a) or 1.0) for a, b in (x, y)]
    plot = bokeh_figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=(x[0] - pad_x, x[1] + pad_x),
        y_range=(y[0] - pad_y, y[1] + pad_y),
        x_axis_label=x_label,
        y_axis_label=y_label,
        tools="pan,wheel_zoom,box_zoom,reset,save",
        active_scroll=None,
    )
    plot.toolbar.logo = None
    plot.add_tools(HoverTool(tooltips=[(x_label, "$x{0,0.[00]}"), (y_label, "$y{0.[0000]}")]))
    return plot


def item(name: str, caption: str, model: Any) -> Item:
    """Bokeh's JSON of a model."""
    from bokeh.embed import json_item

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remarks on layouts; the page is tested in a browser
        return Item(name, caption, json_item(model))
