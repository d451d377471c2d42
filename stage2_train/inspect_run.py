"""The word `inspect`: one HTML page on what a run's updates did to its parameters."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.config import typed
from shared.fs import check_writable
from shared.log import read_json_lines, say
from stage2_train import checkpoint, plots
from stage2_train.config import InspectConfig, Polynomial, TrainConfig
from stage2_train.diagnostics import entropy, spectra
from stage2_train.drafter import Drafter
from stage2_train.noise_scale import Estimate, from_lines, summary
from stage2_train.orthogonalize import orthogonalize
from stage2_train.param_rules import RoutingTable, blocks, route
from stage2_train.report import Cell, numeric, plot_html, section, table, write_page
from stage2_train.runs import read_run

FIGURES = {
    "update_rms": "update RMS",
    "update_over_weight": "update / weight (norms)",
    "lr": "learning rate",
    "effective_decay": "effective decay lr*wd",
}
NOT_COVERED = (
    "Not on this page: activations (drafttape mup checks them over widths), and whether a flatter "
    "spectrum is better: entropy shows neither capacity nor compressibility."
)


def inspect(config: InspectConfig) -> int:
    """Writes the page and says where it is.

    Raises:
        DataError: the directory is not a run, or has made no update yet.
        CorruptionError: the checkpoint is damaged.
    """
    run_dir = Path(config.run_dir)
    train = typed(TrainConfig, read_run(run_dir).config)
    page = Path(config.report) if config.report else run_dir / "inspect.html"
    check_writable(page)
    lines = [line for line in read_json_lines(run_dir / "metrics.jsonl") if "loss" in line]
    items, sections = [], []
    items += update_plots(lines)
    sections.append(section("Gradients", _gradients_html(lines)))
    probe = None
    if config.noise_rows:
        from stage2_train.noise_probe import noise_at

        probe = noise_at(run_dir, config.checkpoint, train, config.noise_rows)
    items += noise_plots(lines)
    sections.append(section("Gradient noise", noise_html(lines, probe, config.checkpoint)))
    if config.spectra:
        weights, updates, routing = load_matrices(run_dir, config.checkpoint, train)
        head_group = train.optimizer.head_group
        found = {
            "weights": spectra(weights, routing, head_group),
            "updates": spectra(updates, routing, head_group),
        }
        items += [spectrum_plot(what, roles) for what, roles in found.items()]
        sections.append(section("Entropy by role", table(entropy_rows(found), "entropy")))
    sections.insert(1, section("Plots", "".join(plot_html(item) for item in items)))
    sections.append(section("What is not covered", f"<p>{NOT_COVERED}</p>"))
    write_page(page, f"drafttape inspect: {run_dir.name}", sections, items)
    say(f"{page}: {len(lines)} updates, {_clip_rate(lines):.0%} clipped")
    return 0


def load_matrices(
    run_dir: Path, which: str, train: TrainConfig
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], RoutingTable]:
    """(weights, updates, routing) of a checkpoint; updates are the directions its states point in.

    Muon's is its orthogonalised momentum, AdamW's m / (sqrt(v) + eps), SGD's its momentum buffer.
    """
    weights, state, _ = checkpoint.load(checkpoint.find(run_dir, which))
    with torch.device("meta"):
        width = len(weights["fc.weight"])  # the target's: embedding and head are shared
        drafter = Drafter(train.drafter, weights["fc.weight"].shape[1] // width, width)
    routing = route(drafter.named_parameters(), drafter.parts())
    updates = {}
    for row in routing.owned("muon"):
        if f"{row.name}/momentum" in state:
            updates[row.name] = _directions(state[f"{row.name}/momentum"], row, train)
        elif f"{row.name}/exp_avg" in state:
            second = state[f"{row.name}/exp_avg_sq"].sqrt() + train.optimizer.eps
            updates[row.name] = state[f"{row.name}/exp_avg"] / second
        elif f"{row.name}/momentum_buffer" in state:
            updates[row.name] = state[f"{row.name}/momentum_buffer"]
    return weights, updates, routing


def _directions(momentum: torch.Tensor, row: Any, train: TrainConfig) -> torch.Tensor:
    options = train.optimizer
    result = torch.empty_like(momentum)
    for block in blocks(row.parts, options.head_group):
        part = torch.cat([momentum[slice(*piece)] for piece in block.slices])
        exact = options.polynomial is Polynomial.svd
        part = orthogonalize(
            part, options.polynomial.value, options.polynomial_steps,
            dtype=torch.float32 if not exact else None,
        )  # fmt: skip
        start = 0
        for piece in block.slices:
            size = len(range(*piece))
            result[slice(*piece)] = part[start : start + size]
            start += size
    return result


def update_plots(lines: list[dict[str, Any]]) -> list[plots.Item]:
    """Each figure over updates, a line a parameter group; and the gradient norm with clipping."""
    items = []
    steps = np.array([line["step"] for line in lines], dtype=np.float64)
    norms = np.array([line["grad_norm"] for line in lines], dtype=np.float64)
    usable = np.isfinite(norms) & (norms > 0)
    if usable.any():
        items.append(
            _lines_plot("grad_norm", "Gradient norm before clipping, log10.",
                        {"all": (steps[usable], np.log10(norms[usable]))}, "log10 gradient norm")
        )  # fmt: skip
        counts, edges = np.histogram(np.log10(norms[usable]), bins=min(30, 1 + usable.sum() // 4))
        plot = plots.figure("log10 gradient norm", "updates", (edges[0], edges[-1]),
                            (0.0, float(counts.max())))  # fmt: skip
        plot.quad(top=counts, bottom=0, left=edges[:-1], right=edges[1:], color=plots.colour(0))
        items.append(plots.item("grad_norms", "Distribution of the gradient norm.", plot))
    groups = sorted({key.split("/")[0] for line in lines for key in line if key.count("/") == 1})
    for figure, label in FIGURES.items():
        series = {}
        for group in groups:
            key = f"{group}/{figure}"
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                series[group] = tuple(np.array(points, dtype=np.float64).T)
        if series:
            items.append(_lines_plot(figure, f"{label} by parameter group.", series, label))
    return items


def noise_plots(lines: list[dict[str, Any]]) -> list[plots.Item]:
    """Noise scale and SNR over updates, each from the mean of the last five estimates."""
    found = from_lines(lines)
    series: dict[str, list[tuple[int, float]]] = {"noise_scale": [], "snr": []}
    for place, (step, _) in enumerate(found):
        numbers = summary(e for _, e in found[max(0, place - 4) : place + 1]) or {}
        for key, points in series.items():
            if 0 < numbers[key] < float("inf"):
                points.append((step, float(np.log10(numbers[key]))))
    labels = {
        "noise_scale": "log10 noise scale",
        "snr": "log10 SNR of a step",
    }
    return [
        _lines_plot(key, f"{labels[key]} (means of five estimates; unit: supervised elements).",
                    {"all": tuple(np.array(points, dtype=np.float64).T)}, labels[key])
        for key, points in series.items() if len(points) > 1
    ]  # fmt: skip


def noise_html(lines: list[dict[str, Any]], probe: Estimate | None, which: str) -> str:
    """The numbers, how they were sampled, and what they are not."""
    found = [e for _, e in from_lines(lines)]
    rows = [[Cell(text) for text in ("measured", "noise scale", "batch", "SNR of the batch",
                                     "trace", "signal", "estimates")]]  # fmt: skip
    for label, group in (
        ("while training, second half of the run", found[len(found) // 2 :]),
        (f"at checkpoint {which}", [probe] if probe is not None else []),
    ):
        numbers = summary(group)
        if numbers is not None:
            keys = ("noise_scale", "batch", "snr", "trace", "signal", "estimates")
            rows.append([Cell(label), *(numeric(numbers[key]) for key in keys)])
    if len(rows) == 1:
        return (
            "<p>Not measured. diagnostics=noise measures it while training (steps of two rows or "
            "more), noise_rows=N here, from N rows of the cache.</p>"
        )
    note = (
        "Simple noise scale tr(S)/|G|^2 in supervised loss elements, from the squared norms of the "
        "rows' gradients against the step's. Rows are packed documents, drawn without replacement; "
        "elements of a document are correlated, so this is an upper bound. It is local to these "
        "parameters and no batch size to keep; a negative signal is shown as an infinite scale."
    )
    return table(rows, "noise") + f"<p class=note>{note}</p>"


def _lines_plot(name: str, caption: str, series: dict[str, Any], label: str) -> plots.Item:
    xs, ys = (np.concatenate([pair[i] for pair in series.values()]) for i in (0, 1))
    plot = plots.figure(
        "updates", label, (float(xs.min()), float(xs.max())), (float(ys.min()), float(ys.max()))
    )
    for number, (group, (x, y)) in enumerate(series.items()):
        named = {"legend_label": group} if len(series) > 1 else {}
        plot.line(x, y, color=plots.colour(number), line_width=1.6, **named)
    return plots.item(name, caption, plot)


def spectrum_plot(what: str, roles: dict[str, list[list[float]]]) -> plots.Item:
    """Mean singular values over the parts of each role, against their place from 0 to 1."""
    place = np.linspace(0, 1, 64)
    plot = plots.figure(f"place among the singular values of the {what}", "share of the largest",
                        (0.0, 1.0), (0.0, 1.0))  # fmt: skip
    for number, (role, parts) in enumerate(roles.items()):
        curves = [np.interp(place, np.linspace(0, 1, len(s)), s) for s in parts]
        plot.line(place, np.mean(curves, axis=0), color=plots.colour(number),
                  line_dash=plots.dash(number), legend_label=role)  # fmt: skip
    caption = f"Spectra of the {what} by role, means over parts; never mixed with the other kind."
    return plots.item(f"spectra_{what}", caption, plot)


def entropy_rows(found: dict[str, dict[str, list[list[float]]]]) -> list[list[Cell]]:
    """Normalised entropies: mean over a role's parts, weights and updates apart."""
    rows = [[Cell("role"), Cell("parts"), Cell("weights"), Cell("updates")]]
    for role, parts in found["weights"].items():
        means = [
            float(np.mean([entropy(torch.tensor(s)) for s in kind[role]])) if role in kind else None
            for kind in (found["weights"], found["updates"])
        ]
        rows.append([Cell(role), numeric(float(len(parts))), *(numeric(mean) for mean in means)])
    return rows


def _clip_rate(lines: list[dict[str, Any]]) -> float:
    return sum(bool(line.get("clipped")) for line in lines) / len(lines)


def _gradients_html(lines: list[dict[str, Any]]) -> str:
    norms = np.array([line["grad_norm"] for line in lines], dtype=np.float64)
    norms = norms[np.isfinite(norms)]
    skipped = sum(bool(line.get("skipped")) for line in lines)
    low, middle, high = np.quantile(norms, [0.05, 0.5, 0.95]) if len(norms) else [np.nan] * 3
    return (
        f"<p>{len(lines)} updates, {_clip_rate(lines):.1%} clipped, {skipped} skipped. "
        f"Gradient norm before clipping: median {middle:.3g}, 5 % to 95 % "
        f"{low:.3g} to {high:.3g}.</p>"
    )
