"""Muon's speed against torch.optim.Muon, with the accuracy beside each time.

One thread, CPU seconds, the contestants in turn, medians. `muon.SHAPE` is the speed-up over torch's
function as shipped, which casts to bfloat16. A CPU without bfloat16 units emulates them ten to
fifty times slower than its float32 (`muon.torch_as_shipped_slowdown`), so that there the figure is
mostly the choice of the dtype; `muon.SHAPE_same_dtype` gives torch's code our dtype instead of its
own cast and compares algorithms alone. Full steps are compared in the same dtype only.

Polar error: Frobenius distance to the float64 polar factor over that factor's norm, on inputs with
the spectrum of a momentum (singular values over two decades), and on the momentum of the demo's
Muon run where there is one (`make demo`): the mean and the worst over the parts of each kind.

`muon.symmetric_from_THREADS_threads`: the smallest of a few sizes from which one triangle of
XX^T in panels beats the full product; `orthogonalize.SYMMETRIC_MIN_N` is the rule.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

from shared.config import typed
from stage2_train import checkpoint
from stage2_train import orthogonalize as ortho
from stage2_train.config import MuonScale, OptimizerConfig, OptimizerName, Polynomial, TrainConfig
from stage2_train.drafter import Drafter
from stage2_train.optimizers import build_optimizer
from stage2_train.param_rules import blocks, by_head, elementwise, route, stacked, whole
from stage2_train.runs import read_run

SHAPES = {
    "square_1024": (1, 1024, 1024),
    "rect_1024x3584": (1, 1024, 3584),
    "heads_32x128x1024": (32, 128, 1024),
    "batch_64x256": (256, 64, 256),
}
HIDDEN, HEADS, INNER, LAYERS = 512, 8, 1920, 4
ROUNDS = 3
SIZES = (256, 320, 384, 448, 512, 768)
DEMO_RUN = Path("build/demo/runs/muon")


def run() -> dict[str, float]:
    """Figures `muon.*`: speed-ups over torch's where named so, errors, seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _shapes() | momentum_errors(DEMO_RUN) | _steps() | _symmetric_from()
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def torch_in(dtype: torch.dtype):
    """torch's Muon with its cast to bfloat16 replaced by one to `dtype`."""
    shipped = torch.Tensor.bfloat16
    if dtype != torch.bfloat16:
        torch.Tensor.bfloat16 = lambda self: self.to(dtype, copy=True)
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = shipped


def torch_polar(x_BNM: Tensor) -> Tensor:
    """torch.optim.Muon's function on each matrix."""
    return torch.stack(
        [torch_muon._zeropower_via_newtonschulz(x, ortho.KJ, 5, 1e-7) for x in x_BNM]
    )


def medians(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds (of the CPU, unless told) of each, run in turn after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for count in range(rounds + 1):
        for name, call in contestants.items():
            started = clock()
            call()
            if count:
                seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def momentum_like(count: int, n: int, m: int) -> Tensor:
    """Gaussian matrices with rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, n, m, generator=generator)
    return x * torch.logspace(0, -2, n)[:, None] * torch.logspace(0, -1, m)


def polar_error(result_BNM: Tensor, exact_BNM: Tensor) -> float:
    return float((result_BNM.double() - exact_BNM).norm() / exact_BNM.norm())


def _shapes() -> dict[str, float]:
    dtype = ortho.compute_dtype(torch.device("cpu"))
    figures = {}
    for name, (count, n, m) in SHAPES.items():
        x = momentum_like(count, n, m)
        exact = ortho.svd_polar(x.double())
        contestants = {
            "torch": lambda x=x: torch_polar(x),
            "ours": lambda x=x: ortho.orthogonalize(x, "kj", 5, dtype=dtype),
            "polar8": lambda x=x: ortho.orthogonalize(x, "polar_express", 8, dtype=dtype),
        }
        with torch_in(dtype):
            seconds = medians(contestants, ROUNDS)
            errors = {who: polar_error(call(), exact) for who, call in contestants.items()}
        shipped = seconds["torch"]
        if dtype != torch.bfloat16:
            started = time.process_time()
            errors["torch_as_shipped"] = polar_error(torch_polar(x), exact)
            shipped = time.process_time() - started
        figures[f"muon.{name}"] = shipped / seconds["ours"]
        figures[f"muon.{name}_same_dtype"] = seconds["torch"] / seconds["ours"]
        figures[f"muon.{name}_polar8_same_dtype"] = seconds["torch"] / seconds["polar8"]
        for who, error in errors.items():
            figures[f"muon.{name}_error_{who}"] = error
        slowdown = shipped / seconds["torch"]
    return figures | {"muon.torch_as_shipped_slowdown": slowdown}


def momentum_errors(run_dir: Path) -> dict[str, float]:
    """Polar Express x8 and KJ x5 on a run's momentum, heads alone and whole; {} without a run."""
    if not (run_dir / "run.json").exists():
        return {}
    train = typed(TrainConfig, read_run(run_dir).config)
    weights, state, _ = checkpoint.load(checkpoint.find(run_dir, "last"))
    width = len(weights["fc.weight"])
    with torch.device("meta"):
        drafter = Drafter(train.drafter, weights["fc.weight"].shape[1] // width, width)
    errors: dict[str, list[float]] = {}
    for row in route(drafter.named_parameters(), drafter.parts()).owned("muon"):
        momentum = state[f"{row.name}/momentum"]
        kinds = {1: "per_head", 0: "whole"} if row.parts[0].heads > 1 else {1: "unsplit"}
        for group, kind in kinds.items():
            for block in blocks(row.parts, group):
                x = torch.cat([momentum[slice(*piece)] for piece in block.slices])
                exact = ortho.svd_polar(x.double())
                for name, polynomial, steps in (
                    ("polar8", "polar_express", 8), ("kj5", "kj", 5)
                ):  # fmt: skip
                    y = ortho.orthogonalize(x, polynomial, steps)
                    errors.setdefault(f"{name}_{kind}", []).append(polar_error(y, exact))
                if kind == "per_head" and len(errors.get("polar8_bf16_per_head", [])) < 24:
                    y = ortho.orthogonalize(x, "polar_express", 8, dtype=torch.bfloat16)
                    errors.setdefault("polar8_bf16_per_head", []).append(polar_error(y, exact))
    figures = {}
    for name, found in errors.items():
        figures[f"muon.momentum_error_{name}"] = statistics.mean(found)
        figures[f"muon.momentum_error_{name}_worst"] = max(found)
    return figures


def _symmetric_from() -> dict[str, float]:
    """Sizes from which the symmetric form wins, with one thread and with two; wall seconds."""
    figures = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        first = float("inf")
        for n in reversed(SIZES):
            x = torch.randn(1, n, n, generator=torch.Generator().manual_seed(0))
            calls = {
                form: lambda x=x, form=form: ortho.orthogonalize(
                    x, "kj", 5, dtype=torch.float32, form=form
                )
                for form in ("standard", "symmetric")
            }
            seconds = medians(calls, 5, clock=time.perf_counter)
            if seconds["symmetric"] > seconds["standard"]:
                break
            first = n
        figures[f"muon.symmetric_from_{threads}_threads"] = float(first)
    torch.set_num_threads(1)
    return figures


class _Layer(nn.Module):
    """The matrices of a GDN layer and its SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norm = nn.Parameter(torch.ones(HIDDEN))


class _Model(nn.Module):
    """19 M parameters, 17 M of them Muon's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(4096, HIDDEN)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def parts(self) -> dict:
        parts: dict = {"embed.weight": elementwise("embedding")}
        for i in range(LAYERS):
            for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
                parts[f"layers.{i}.{name}.weight"] = by_head(name[0], HEADS, HIDDEN // HEADS)
            parts[f"layers.{i}.gate_up.weight"] = stacked([("gate", INNER, 1), ("up", INNER, 1)])
            parts[f"layers.{i}.o_proj.weight"] = whole("o")
            parts[f"layers.{i}.down.weight"] = whole("down")
        return parts


def _gradients(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def _ours(polynomial: Polynomial, steps: int) -> Callable[[], None]:
    model = _Model()
    _gradients(model)
    config = OptimizerConfig(
        name=OptimizerName.muon, lr=1e-3, polynomial=polynomial, polynomial_steps=steps,
        scale=MuonScale.moonlight, weight_decay=0.1,
    )  # fmt: skip
    return build_optimizer(config, model.named_parameters(), model.parts()).step


def _torch(per_head: bool) -> Callable[[], None]:
    """torch.optim.Muon on whole matrices, or on one parameter for each of the parts."""
    model = _Model()
    _gradients(model)
    matrices, rest = [], []
    for name, p in model.named_parameters():
        if p.ndim != 2 or name.startswith("embed"):
            rest.append(p)
        elif not per_head or "o_proj" in name or "down" in name:
            matrices.append(p)
        else:
            rows = INNER if "gate_up" in name else HIDDEN // HEADS
            for piece, gradient in zip(p.detach().split(rows), p.grad.split(rows), strict=True):
                part = nn.Parameter(piece.clone())
                part.grad = gradient.clone()
                matrices.append(part)
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1e-3, fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def _steps() -> dict[str, float]:
    model = _Model()
    _gradients(model)
    contestants = {
        "kj5": _ours(Polynomial.kj, 5),
        "polar5": _ours(Polynomial.polar_express, 5),
        "polar8": _ours(Polynomial.polar_express, 8),
        "torch_whole": _torch(per_head=False),
        "torch_head": _torch(per_head=True),
        "adamw": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).step,
    }
    dtype = ortho.compute_dtype(torch.device("cpu"))
    with torch_in(dtype):
        seconds = medians(contestants, ROUNDS)
    bound = _flops() / _matmul_peak(dtype)
    return {
        "muon.step_vs_torch_whole": seconds["torch_whole"] / seconds["kj5"],
        "muon.step_vs_torch_head": seconds["torch_head"] / seconds["kj5"],
        "muon.polar8_vs_torch_head": seconds["torch_head"] / seconds["polar8"],
        "muon.step_in_adamw_steps": seconds["kj5"] / seconds["adamw"],
        "muon.step_over_matmul_bound": seconds["kj5"] / bound,
        **{f"muon.seconds_{name}": value for name, value in seconds.items()},
    }


def _flops() -> float:
    """FLOPs of five standard steps on all parts: the bound that a symmetric form can undercut."""
    parts = [(HIDDEN // HEADS, HIDDEN)] * (4 * HEADS) + [(HIDDEN, HIDDEN)] + [(HIDDEN, INNER)] * 3
    return LAYERS * sum(5 * (4 * n * n * m + 2 * n**3) for n, m in parts)


def _matmul_peak(dtype: torch.dtype) -> float:
    """FLOP/s of a 1024^3 product."""
    a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = min(medians({"mm": lambda: torch.mm(a, b, out=out)}, 5).values())
    return 2 * 1024**3 / best
