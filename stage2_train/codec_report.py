"""The word `codec-report`: what each codec costs on a given cache, as a table and plots.

Writes `report.html`, `report.md` and `report.json` into `out`. `codec_measure.py` says what each
figure is, `codec_train.py` what the acceptance after training is.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.codec import NAMES, get_codec
from shared.fs import check_writable, write_atomic
from shared.log import note, progress, say
from shared.store import Store
from stage2_train import plots
from stage2_train.codec_measure import (
    choose,
    code,
    entropy_limits,
    measure_next_token,
    pread_seconds,
)
from stage2_train.config import CodecReportConfig
from stage2_train.report import Cell, escape, numeric, plot_html, section, table, write_page
from stage2_train.stats import Interval, none_if_nan
from stage2_train.verdict import span

FORMAT = "drafttape.codec-report.v1"
EXPERIMENTAL = ("int4",)


def codec_report(cfg: CodecReportConfig) -> int:
    """Measures, writes the three files and prints the table.

    Raises:
        ConfigError: an unknown codec. DataError: the cache has lost bits already.
        MismatchError, TargetError: the target isn't the cache's.
        CacheError: `out` can't be written; it is looked at first.
    """
    out = Path(cfg.out)
    for name in ("report.json", "report.md", "report.html"):
        check_writable(out / name)
    found = measure(cfg)
    write_atomic(out / "report.json", json.dumps(_plain(found), indent=1).encode() + b"\n")
    text = markdown(found)
    write_atomic(out / "report.md", text.encode())
    _write_html(out / "report.html", found)
    say(text)
    say(f"report: {out / 'report.html'}")
    return 0


def measure(cfg: CodecReportConfig) -> dict[str, Any]:
    """All figures, JSON-ready but for intervals."""
    names = list(cfg.codecs) or list(NAMES)
    for name in names:
        get_codec(name)
    store = Store.open(cfg.root)
    samples = choose(store, cfg.snapshot, cfg.samples, cfg.max_tokens)
    tokens = sum(len(sample.ids_T) for sample in samples)
    whole, by_channel = entropy_limits([sample.hidden_TLD for sample in samples])
    read_s = pread_seconds(samples)
    coded = []
    with progress(len(names), "encode and decode", "codecs") as bar:
        for name in names:
            coded.append(code(name, samples, read_s))
            bar.update(1)
    rows: dict[str, dict[str, Any]] = {
        c.name: {
            "lossy": c.lossy,
            "bits": c.bits,
            "share_of_bf16": c.bits / 16,
            "limit_bits": c.limit_bits,
            "layer_error": c.layer_error,
            "decode_x_pread": c.decode_x_pread,
        }
        for c in coded
    }
    found: dict[str, Any] = {
        "format": FORMAT,
        "cache": cfg.root,
        "target": store.target_assets().info.get("name") or store.spec.architecture,
        "snapshot": store.resolve(cfg.snapshot),
        "samples": len(samples),
        "tokens": tokens,
        "layer_ids": list(store.spec.layer_ids),
        "last_hidden": store.spec.last_hidden,
        "entropy": {"values": whole, "exponents_given_the_channel": by_channel},
        "codecs": rows,
    }
    if cfg.logits:
        with progress(tokens, "next token", "tokens") as bar:
            figures = measure_next_token(
                _target(cfg, store), samples, coded, store.spec, every_tap=cfg.every_tap,
                advance=bar.update,
            )  # fmt: skip
        for name, places in figures.items():
            row = found if name == "bf16" else rows[name]
            row["next_token"] = {p: {"kl": kl, "top1": top1} for p, (kl, top1) in places.items()}
    if cfg.train:
        from stage2_train.codec_train import changes, train_all

        lossy = [c.name for c in coded if c.lossy]
        trained = train_all(cfg, lossy, note)
        for name in lossy:
            rows[name]["training"] = changes(trained["lossless"], trained[name])
            rows[name]["training"]["loss"] = [
                float(np.mean([t.loss for t in trained[arm]])) for arm in ("lossless", name)
            ]
        found["training"] = {"seeds": cfg.seeds, "overrides": list(cfg.overrides)}
    return found


def _target(cfg: CodecReportConfig, store: Store) -> Any:
    from stage2_train.build import resolve_device
    from stage2_train.evaluate import load_target_of

    return load_target_of(store, cfg.target, str(resolve_device(cfg.device)))


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return none_if_nan(value)


def label(name: str) -> str:
    """A codec's name, with its mark."""
    return f"{name} (experimental)" if name in EXPERIMENTAL else name


def measured_text(found: dict[str, Any]) -> str:
    """What stands in the table, in sentences."""
    limit = found["entropy"]
    text = (
        f"{found['samples']} samples, {found['tokens']} tokens of {found['target']}, layers "
        f"{', '.join(map(str, found['layer_ids']))}. Bits are stored bits a value, checksums "
        f"included. Order-0 entropy of these bf16 values: {limit['values']:.2f} bits, "
        f"{limit['exponents_given_the_channel']:.2f} with exponents given their channel; in "
        "brackets stands the entropy of what a codec keeps. Error is relative L2 of the worst "
        "state. Decoding speed is bf16 a CPU second, from memory, over raw pread of the bf16."
    )
    if "next_token" in found:
        places = found["next_token"]
        floors = "; ".join(
            f"{place}: KL {row['kl'].mean:.2g}, top-1 {row['top1']:.4f}"
            for place, row in places.items()
        )
        text += (
            " KL and top-1: the state of the named layer is replaced by its decoded self, the "
            "target's remaining layers and head run on it in float32, and its next-token "
            "distribution is held against the one from the stored bf16 state, at every position. "
            f"bf16 itself against the target's own float32 states ({floors})."
        )
    if "training" in found:
        text += (
            f" Acceptance: a drafter trained on the decoded states against one on the lossless "
            f"ones, {found['training']['seeds']} seeds, identical inputs; both evaluated on "
            "lossless states and with the target itself. Intervals resample held-out samples or "
            "prompts of these seeds."
        )
    return text


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """The table as text, its header first."""
    places = list(found.get("next_token", {}))
    head = ["codec", "bits (limit)", "of bf16", "error"]
    for place in places:
        head += [f"KL, {place} (95 %)", f"top-1, {place}"]
    head.append("decode / pread")
    if "training" in found:
        head += ["real acceptance (95 %)", "estimated (95 %)"]
    rows = [head]
    for name, row in found["codecs"].items():
        cells = [
            label(name),
            f"{row['bits']:.2f} ({row['limit_bits']:.2f})",
            f"{row['share_of_bf16']:.3f}",
            f"{max(row['layer_error']):.2g}" if row["lossy"] else "0",
        ]
        for place in places:
            there = row.get("next_token", {}).get(place)
            if there is None:
                cells += ["0", "1"]
                continue
            kl = there["kl"]
            ends = f" ({kl.low:.2g} to {kl.high:.2g})" if math.isfinite(kl.low) else ""
            cells += [f"{kl.mean:.2g}{ends}", f"{there['top1']:.4f}"]
        cells.append(f"{row['decode_x_pread']:.2f}")
        if "training" in found:
            trained = row.get("training", {})
            cells += [_change(trained.get(kind)) for kind in ("real", "estimated")]
        rows.append(cells)
    return rows


def _change(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    change = row["change"]
    ends = f" ({100 * change.low:+.2f} to {100 * change.high:+.2f})"
    return f"{100 * change.mean:+.2f} %" + (ends if math.isfinite(change.low) else "")


def markdown(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    head, *rows = rows_of(found)
    lines = [f"# Codecs on {found['target']}", "", measured_text(found), ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _write_html(path: Path, found: dict[str, Any]) -> None:
    head, *rows = rows_of(found)
    cells = [[Cell(text) for text in head]]
    cells += [[Cell(text) for text in row] for row in rows]
    states = [f"layer {layer}" for layer in found["layer_ids"]]
    states += ["last"] if found["last_hidden"] else []
    lossy = {name: row for name, row in found["codecs"].items() if row["lossy"]}
    errors = [[Cell("codec"), *(Cell(state) for state in states)]]
    errors += [[Cell(label(n)), *map(numeric, row["layer_error"])] for n, row in lossy.items()]
    items = _plots(found, lossy) if lossy else []
    sections = [
        section("Codecs", table(cells, "codecs") + f"<p>{escape(measured_text(found))}</p>"),
        section("Relative error by state", table(errors, "errors")),
        section("Plots", "".join(plot_html(item) for item in items)),
    ]
    if "training" in found:
        sections.insert(1, section("After training", table(_training_rows(lossy), "training")))
    write_page(path, f"drafttape codecs: {found['target']}", sections, items)


def _training_rows(lossy: dict[str, dict[str, Any]]) -> list[list[Cell]]:
    head = ["codec", "acceptance", "lossless", "codec's", "change, %", "95 % on these inputs",
            "changes by seed, %", "95 % over seeds"]  # fmt: skip
    rows = [[Cell(text) for text in head]]
    for name, row in lossy.items():
        for kind in ("real", "estimated"):
            if (found := row["training"].get(kind)) is None:
                continue
            percent, over = found["change"], found["over_seeds"]
            rows.append(
                [
                    Cell(label(name)), Cell(kind), numeric(found["lossless"]),
                    numeric(found["codec"]), numeric(100 * percent.mean),
                    Cell(span(replace(percent, low=100 * percent.low, high=100 * percent.high))),
                    Cell(", ".join(f"{100 * x:+.2f}" for x in found["by_seed"])),
                    Cell("–" if over is None else
                         span(replace(over, low=100 * over.low, high=100 * over.high))),
                ]
            )  # fmt: skip
    return rows


def _plots(found: dict[str, Any], lossy: dict[str, dict[str, Any]]) -> list[plots.Item]:
    points = {}
    for name, row in lossy.items():
        error = max(row["layer_error"])
        for there in row.get("next_token", {}).values():
            error = there["kl"].mean
        points[name] = row["bits"], math.log10(max(error, 1e-12))
    what = "KL of the next token" if "next_token" in found else "relative error"
    xs, ys = zip(*points.values(), strict=True)
    plot = plots.figure("stored bits a value", f"log10 of the {what}", (min(xs), max(xs)),
                        (min(ys), max(ys)))  # fmt: skip
    for number_, (name, (x, y)) in enumerate(points.items()):
        plot.scatter([x], [y], size=11, color=plots.colour(number_), legend_label=label(name))
    caption = f"Size against loss: {what} of every lossy codec. Left and low is better."
    items = [plots.item("size_loss", caption, plot)]
    logs = {name: np.log10(np.maximum(row["layer_error"], 1e-12)) for name, row in lossy.items()}
    low, high = (float(f(list(map(f, logs.values())))) for f in (min, max))
    count = len(next(iter(logs.values())))
    plot = plots.figure("stored state", "log10 of the relative error", (0.0, float(count - 1)),
                        (low, high))  # fmt: skip
    for number_, (name, values) in enumerate(logs.items()):
        plot.line(np.arange(count), values, color=plots.colour(number_), line_width=2,
                  line_dash=plots.dash(number_), legend_label=label(name))  # fmt: skip
    items.append(plots.item("layer_error", "Relative L2 error of each stored state.", plot))
    return items
