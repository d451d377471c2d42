"""`python -m bench.plots`: computes the pictures of docs/muon.md and writes them as SVG."""

import math
import statistics
from pathlib import Path

import torch

from shared.config import compose
from stage2_train import mup_check
from stage2_train import orthogonalize as ortho
from stage2_train.config import MupConfig, ScheduleConfig, ScheduleName
from stage2_train.muon import shape_factor
from stage2_train.schedule import build_schedule

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c8c")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 300, 60, 16, 170, 44


def chart(
    series: dict[str, tuple[list[float], list[float]]],
    x_label: str,
    y_label: str,
    x_ticks: dict[float, str],
    y_ticks: dict[float, str],
) -> str:
    """A line chart as SVG; ticks map values to labels and span the axes."""
    x0, x1, y0, y1 = min(x_ticks), max(x_ticks), min(y_ticks), max(y_ticks)
    plot_w, plot_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> str:
        y = min(max(y, y0), y1)
        across = LEFT + (x - x0) / (x1 - x0) * plot_w
        return f"{across:.1f},{TOP + (y1 - y) / (y1 - y0) * plot_h:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value, label in x_ticks.items():
        x, y = place(value, y0).split(",")
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{label}</text>')
    for value, label in y_ticks.items():
        y = place(x0, value).split(",")[1]
        end = LEFT + plot_w
        parts.append(f'<line x1="{LEFT}" x2="{end}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4}" text-anchor="end">{label}</text>')
    middle = LEFT + plot_w / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{x_label}</text>')
    parts.append(
        f'<text transform="translate(14 {TOP + plot_h / 2}) rotate(-90)" '
        f'text-anchor="middle">{y_label}</text>'
    )
    for number, (name, (xs, ys)) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(x, y) for x, y in zip(xs, ys, strict=True))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        y = TOP + 14 + 18 * number
        x = WIDTH - RIGHT + 12
        parts.append(f'<line x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
                     'stroke-width="3"/>')  # fmt: skip
        parts.append(f'<text x="{x + 26}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def polynomials() -> str:
    """Singular value after all steps against the one before, in float64."""
    exponents = torch.linspace(-4, 0, 241, dtype=torch.float64)
    series = {}
    for label, name, steps in (
        ("KJ x5", "kj", 5), ("Polar Express x5", "polar_express", 5),
        ("Polar Express x8", "polar_express", 8), ("Taylor x8", "taylor", 8),
    ):  # fmt: skip
        s = 10**exponents
        for a, b, c in ortho.coefficients(name, steps):
            s = a * s + b * s**3 + c * s**5
        series[label] = (exponents.tolist(), s.tolist())
    return chart(
        series, "singular value before", "after",
        {-4: "1e-4", -3: "1e-3", -2: "1e-2", -1: "0.1", 0: "1"},
        {0: "0", 0.5: "0.5", 1: "1", 1.25: "1.25"},
    )  # fmt: skip


def restarts() -> str:
    """Largest singular value of the gram form in bfloat16 against the condition number."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(128, 32, generator=generator, dtype=torch.float64))[0]
    decades = [0.5 * k for k in range(1, 11)]
    series = {}
    for label, steps in (("no restart", ()), ("after 2", (2,)), ("after 2 and 4", (2, 4))):
        highest = []
        for decade in decades:
            s = torch.logspace(0, -decade, 32, dtype=torch.float64)
            x = ((u * s) @ v.mT).float()
            y = ortho.orthogonalize(
                x, "polar_express", 5, dtype=torch.bfloat16, form="gram", restarts=steps
            ).float()
            finite = bool(y.isfinite().all())
            highest.append(float(torch.linalg.svdvals(y)[0]) if finite else float("inf"))
        series[label] = (decades, [min(value, 3.0) for value in highest])
    return chart(
        series, "condition number (log10)", "largest singular value (cut at 3)",
        {0: "0", 1: "1", 2: "2", 3: "3", 4: "4", 5: "5"}, {0: "0", 1: "1", 2: "2", 3: "3"},
    )  # fmt: skip


def schedules() -> str:
    """Factor against the update, of 1000 updates."""
    series = {}
    for name in ScheduleName:
        fn = build_schedule(ScheduleConfig(name=name), 1000)
        steps = list(range(0, 1000, 5))
        series[name.value] = ([float(s) for s in steps], [fn(s) for s in steps])
    return chart(
        series, "update", "factor of the peak learning rate",
        {0: "0", 250: "250", 500: "500", 750: "750", 1000: "1000"}, {0: "0", 0.5: "0.5", 1: "1"},
    )  # fmt: skip


def scales() -> str:
    """RMS of the update of a head of 64 rows, by its columns, for each scale."""
    generator = torch.Generator().manual_seed(0)
    columns = [64, 128, 256, 512, 1024]
    series = {}
    for scale in ("moonlight", "kj"):
        rms = []
        for width in columns:
            polar = ortho.svd_polar(torch.randn(1, 64, width, generator=generator))
            update = polar * shape_factor(scale, 64, width, 0.2)
            rms.append(float(update.pow(2).mean().sqrt()))
        series[scale] = ([math.log2(width) for width in columns], rms)
    return chart(
        series, "columns of a head with 64 rows", "RMS of the update at lr = 1",
        {math.log2(width): str(width) for width in columns}, {0: "0", 0.1: "0.1", 0.2: "0.2"},
    )  # fmt: skip


def dtypes() -> str:
    """Relative error of the polar factor against SVD, by steps and dtype."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, 256, generator=generator)
    exact = ortho.svd_polar(x.clone())
    series = {}
    for name in ("polar_express", "kj"):
        for dtype in (torch.float32, torch.bfloat16):
            errors = []
            for steps in range(3, 10):
                got = ortho.orthogonalize(x.clone(), name, steps, dtype=dtype).float()
                error = float((got - exact).norm() / exact.norm())
                errors.append(math.log10(max(error, 1e-7)))
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            series[label] = ([float(k) for k in range(3, 10)], errors)
    return chart(
        series, "steps", "relative error (log10)",
        {float(k): str(k) for k in range(3, 10)},
        {-7: "-7", -6: "-6", -5: "-5", -4: "-4", -3: "-3", -2: "-2", -1: "-1", 0: "0"},
    )  # fmt: skip


def widths() -> str:
    """Median change of activations by width, with and without muP (the word `mup` measures it)."""
    series = {}
    for optimizer in ("adamw", "muon"):
        config = compose("mup", MupConfig, [f"optimizer={optimizer}"])
        for use in (False, True):
            rows = list(mup_check.measure(config, use_mup=use).change.values())
            change = [statistics.median(row[width] / row[config.widths[0]] for row in rows)
                      for width in config.widths]  # fmt: skip
            label = f"{optimizer}, {'muP' if use else 'without'}"
            series[label] = ([math.log2(w) for w in config.widths], [math.log2(c) for c in change])
    return chart(
        series, "width", "activation change over the narrowest's",
        {math.log2(width): str(width) for width in config.widths},
        {-1: "1/2", 0: "1", 1: "2", 2: "4", 3: "8", 4: "16", 5: "32"},
    )  # fmt: skip


def main() -> None:
    docs = Path(__file__).parent.parent / "docs"
    (docs / "muon_polynomials.svg").write_text(polynomials())
    (docs / "muon_restarts.svg").write_text(restarts())
    (docs / "schedules.svg").write_text(schedules())
    (docs / "muon_scales.svg").write_text(scales())
    (docs / "muon_dtypes.svg").write_text(dtypes())
    (docs / "mup_widths.svg").write_text(widths())


if __name__ == "__main__":
    main()
