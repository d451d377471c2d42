"""The HTML report: one file, no network, light and dark, usable by keyboard.

Run names and settings are untrusted text: all of it goes through `html.escape` or into JSON with
`<` escaped, names reach no plot label (the legend is HTML), and a Content-Security-Policy forbids
every request. Plots are Bokeh's, embedded as JSON items with Bokeh's script inlined.
"""

import html
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.fs import write_atomic
from stage2_train import verdict
from stage2_train.runs import Arm
from stage2_train.stats import Interval

ASSETS = Path(__file__).parent / "report_assets"


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown and what it is sorted by."""

    text: str
    value: float | str | None = None
    key: str | None = None


def write_report(path: Path, summary: dict[str, Any], arms: list[Arm]) -> None:
    """Writes the comparison's report.

    Raises:
        CacheError: the file can't be written.
    """
    from stage2_train import plots

    items = plots.comparison(summary, arms)
    sections = [
        section("Verdict", verdict_html(summary)),
        section("Arms", table(arm_rows(summary), "arms")),
        section("Differences from the baseline", differences_html(summary)),
        section("Plots", legend(list(summary["arms"])) + "".join(plot_html(i) for i in items)),
        section("At matched budgets", matched_html(summary)),
        *transfer_sections(summary),
        section("Stability", table(stability_rows(summary), "stability")),
        section("What was compared", inputs_html(summary)),
    ]
    names = ", ".join(summary["arms"])
    write_page(path, f"drafttape: {names}", sections, items)


def write_page(path: Path, title: str, sections: list[str], items: list[Any]) -> None:
    """Writes sections and plots as one self-contained page."""
    from bokeh.resources import Resources

    scripts = Resources(mode="inline", components=["bokeh"]).js_raw
    scripts = [text for text in scripts if "Bokeh.set_log_level" not in text[:200]]  # it chats
    data = json.dumps({item.name: item.document for item in items}, allow_nan=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(verdict.printable(title)),
        "style": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "body": "\n".join(sections),
        "plots": data,
        "bokeh": "\n".join(scripts) if items else "",
        "script": (ASSETS / "page.js").read_text(encoding="utf-8"),
    }
    pieces = page.split("%%")
    text = "".join(parts[piece] if odd else piece for odd, piece in _alternate(pieces))
    write_atomic(path, text.encode())


def _alternate(pieces: list[str]):
    return ((index % 2 == 1, piece) for index, piece in enumerate(pieces))


def section(title: str, body: str) -> str:
    """A titled section."""
    return f"<section><h2>{html.escape(title)}</h2>\n{body}\n</section>"


def escape(text: Any) -> str:
    """Untrusted text as HTML."""
    return html.escape(verdict.printable(str(text)))


def table(rows: list[list[Cell]], name: str) -> str:
    """A sortable table; the first row is the header."""
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(cell.text)}</button></th>'
        for cell in rows[0]
    )
    body = []
    for row in rows[1:]:
        cells = []
        for index, cell in enumerate(row):
            tag = "th scope=row" if index == 0 else "td"
            value = cell.text if cell.value is None else cell.value
            if isinstance(value, float) and not math.isfinite(value):
                value = ""
            key = f' data-key="{escape(cell.key)}"' if cell.key else ""
            cells.append(
                f'<{tag} data-value="{escape(value)}"{key}>{escape(cell.text)}</{tag.split()[0]}>'
            )
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}">'
        f'<table id="table-{escape(name)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def numeric(value: float | None, key: str | None = None) -> Cell:
    """A number's cell; an absent one is a dash that sorts last."""
    text = str(value) if isinstance(value, int) else verdict.number(value)
    return Cell(text, float("nan") if value is None else float(value), key)


COLUMNS = (
    ("held-out loss", "heldout_loss"), ("accuracy", "accuracy"),
    ("estimated acceptance", "estimated_acceptance"), ("real acceptance", "real_acceptance"),
    ("tokens/s", "tokens_per_s"), ("speed-up", "speedup"), ("final training loss", "final_loss"),
    ("training s", "seconds"), ("training tokens", "tokens"), ("model FLOPs", "flops"),
)  # fmt: skip


def arm_rows(summary: dict[str, Any]) -> list[list[Cell]]:
    """One row an arm: means over seeds."""
    rows = [[Cell("arm"), Cell("seeds"), *(Cell(label) for label, _ in COLUMNS)]]
    for name, values in summary["arms"].items():
        row = [Cell(name), numeric(len(values["seeds"]))]
        row += [numeric(values.get(key), f"{name}.{key}") for _, key in COLUMNS]
        rows.append(row)
    return rows


def interval_cell(interval: Interval) -> Cell:
    """An interval's cell, sorted by its lower end."""
    if not math.isfinite(interval.low):
        return Cell("–", float("nan"))
    return Cell(verdict.span(interval), interval.low)


def differences_html(summary: dict[str, Any]) -> str:
    """All differences with the three intervals and what pairing gained."""
    level = verdict.percent(summary["confidence"])
    head = [
        "arm", "metric", "baseline", "arm's", "difference", f"{level} over seeds", "p (Holm)",
        f"{level} on these inputs", "unpaired", "pairing narrows by",
    ]  # fmt: skip
    rows = [[Cell(text) for text in head]]
    for name, pair in summary["pairs"].items():
        for key, row in pair.items():
            within, across, unpaired = row["within"], row["across"], row["unpaired"]
            paired = within if key in ("train_loss", "final_loss") else across
            narrower = unpaired.width / paired.width if paired.width > 0 else float("nan")
            rows.append(
                [
                    Cell(name), Cell(row["label"]), numeric(row["baseline"]), numeric(row["arm"]),
                    Cell(verdict.signed(across.mean), across.mean, f"{name}.{key}.difference"),
                    interval_cell(across), numeric(row.get("p_holm", across.p)),
                    interval_cell(within), interval_cell(unpaired),
                    Cell("–" if math.isnan(narrower) else f"x{narrower:.1f}", narrower),
                ]
            )  # fmt: skip
    methods = sorted(
        {row["within"].method for pair in summary["pairs"].values() for row in pair.values()}
    )
    note = (
        "Over seeds: Student's t on one paired difference a seed; only this interval decides. "
        "On these inputs: resampled steps, held-out samples or prompts of these seeds ("
        + "; ".join(methods)
        + "). Unpaired: what it would be if the arms had not seen the same inputs."
    )
    return table(rows, "differences") + f"<p class=note>{escape(note)}</p>"


def matched_html(summary: dict[str, Any]) -> str:
    """Training loss at equal tokens, FLOPs and seconds."""
    head = ["arm", "matched", "budget", "steps (baseline, arm)", "baseline", "arm's",
            "difference", "interval"]  # fmt: skip
    rows = [[Cell(text) for text in head]]
    for name, pair in summary["matched"].items():
        for row in pair.values():
            across = row["across"] if math.isfinite(row["across"].low) else row["within"]
            rows.append(
                [
                    Cell(name), Cell(row["label"]), numeric(row["budget"]),
                    Cell(f"{row['steps'][0]}, {row['steps'][1]}", row["steps"][1]),
                    numeric(row["baseline"]), numeric(row["arm"]),
                    Cell(verdict.signed(row["across"].mean), row["across"].mean),
                    interval_cell(across),
                ]
            )  # fmt: skip
    note = (
        "Training loss over the last tenth of the steps before the largest budget that both arms "
        "reached. Equal tokens are equal steps and paired; at equal FLOPs or seconds the windows "
        "hold different inputs. The three answer different questions and are not equivalent."
    )
    return table(rows, "matched") + f"<p class=note>{note}</p>"


def transfer_sections(summary: dict[str, Any]) -> list[str]:
    """Acceptance on other data sets; no section where none was measured."""
    found = summary.get("transfer")
    if not found:
        return []
    level = verdict.percent(summary["confidence"])
    head = ["arm", "data", "verification", "baseline", "arm's", "difference",
            f"{level} over seeds", "p (Holm)"]  # fmt: skip
    rows = [[Cell(text) for text in head]]
    rows += [
        [
            Cell(row["arm"]), Cell(row["data"]), Cell(row["way"]), numeric(row["baseline"]),
            numeric(row["value"]), Cell(verdict.signed(row["across"].mean), row["across"].mean),
            interval_cell(row["across"]), numeric(row["p_holm"]),
        ]
        for row in found
    ]  # fmt: skip
    note = (
        "Tokens a pass on other data sets, from drafttape eval data=…; p-values are corrected over "
        "all rows. Transfer doesn't decide."
    )
    return [section("Transfer", table(rows, "transfer") + f"<p class=note>{note}</p>")]


def stability_rows(summary: dict[str, Any]) -> list[list[Cell]]:
    """Spikes, skipped steps and clipping, a row a run."""
    head = ["arm", "seeds (order, init)", "loss spikes", "skipped steps", "steps clipped"]
    rows = [[Cell(text) for text in head]]
    for name, values in summary["arms"].items():
        for seed, found in zip(values["seeds"], values["stability"], strict=True):
            share = found["clipped_share"]
            rows.append(
                [
                    Cell(name), Cell(f"{seed[0]}, {seed[1]}"), numeric(found["spikes"]),
                    numeric(found["skipped"]),
                    Cell("–" if share is None else f"{100 * share:.0f} %", share),
                ]
            )  # fmt: skip
    return rows


def verdict_html(summary: dict[str, Any]) -> str:
    """The verdict's sentences, one paragraph an arm."""
    outcome = summary["verdict"]
    parts = []
    for pair in outcome["pairs"].values():
        decision = pair["decision"]
        parts.append(
            f'<p class="verdict {decision}"><strong>{decision}</strong> {escape(pair["text"])}</p>'
        )
    if outcome["fallback"]:
        text = f"{summary['decide_by']} was not measured in every run; see drafttape eval."
        parts.append(f"<p class=note>{escape(text)}</p>")
    parts += [
        f"<p class=note>Not finished: {escape(text)}.</p>" for text in summary.get("unfinished", [])
    ]
    return "".join(parts)


def inputs_html(summary: dict[str, Any]) -> str:
    """What proves that the inputs are equal, and in what the configurations differ."""
    inputs = summary["inputs"]
    facts = [
        ("steps, equal inputs at every one", summary["steps"]),
        ("first step compared (branches share what is before)", summary["first_step"]),
        ("snapshot", inputs["snapshot"]),
        ("capture spec", inputs["spec_digest"]),
        ("codecs", inputs["codecs"]),
        ("plan", json.dumps(inputs["plan"])),
    ]
    if summary["output_identical"]:
        same, tried = summary["output_identical"]
        facts.append(("speculative output identical to the target's own", f"{same} of {tried}"))
    facts += [
        (f"digest of all inputs, seeds {tuple(seed)}", digest)
        for seed, digest in inputs["final_digests"]
    ]
    facts += [("left out (seed not in every arm)", path) for path in summary["left_out"]]
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts)
    rows = [[Cell("setting"), *(Cell(name) for name in summary["arms"])]]
    rows += [
        [Cell(key), *(Cell(str(value)) for value in values)]
        for key, values in summary["settings"].items()
    ]
    return f"<dl>{listed}</dl><h3>Settings that differ</h3>" + table(rows, "settings")


def legend(names: list[str]) -> str:
    """Check boxes that show and hide an arm in every plot."""
    from stage2_train.plots import colour

    boxes = "".join(
        f'<label><input type="checkbox" checked data-arm="{index}">'
        f'<span class="swatch" style="background:{colour(index)}"></span>{escape(name)}</label>'
        for index, name in enumerate(names)
    )
    return f'<fieldset class="legend"><legend>Show</legend>{boxes}</fieldset>'


def plot_html(item: Any) -> str:
    """A plot's place: focusable, with its description."""
    return (
        f'<figure><figcaption id="caption-{item.name}">{escape(item.caption)}</figcaption>'
        f'<div class="plot" id="plot-{item.name}" tabindex="0" role="group" '
        f'aria-labelledby="caption-{item.name}"></div></figure>'
    )
