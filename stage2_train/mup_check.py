"""The word `mup`: a base-shapes file, and the coordinate check.

The check trains drafters of several widths for a few updates on one random batch, with and without
muP, and measures how far the outputs of `fc`, of every mixer and of every MLP have moved. Their
change per update has to be the same at all widths; without muP it grows. Random states stand in for
a target's, so no cache is needed: widths other than the target's could not be trained on one.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.config import to_plain, typed
from shared.errors import ConfigError
from shared.fs import check_writable
from shared.log import say
from stage2_train import mup, plots
from stage2_train.batch import Batch
from stage2_train.config import DrafterConfig, LossConfig, MupConfig
from stage2_train.drafter import Drafter
from stage2_train.loss import batch_loss
from stage2_train.optimizers import build_optimizer
from stage2_train.report import Cell, numeric, plot_html, section, table, write_page

VOCABULARY, TOKENS, MASK = 128, 48, 127
ANCHORS = (4, 13, 22, 31)
COVERED = (
    "Flat is right. The slope is that of log(change) over log(width): near 0 with muP; without it "
    "activations move more the wider the drafter. Not covered: logits (the head is the target's, "
    "frozen), depth, head sizes, data, and whether the best learning rate of the base is the best "
    "one of a wider drafter on real states."
)


@dataclass(frozen=True)
class Measured:
    """RMS change of each module's output after the check's updates, by width."""

    change: dict[str, dict[int, float]]

    @property
    def slopes(self) -> dict[str, float]:
        """log(change) over log(width) of each module."""
        return {
            name: float(np.polyfit(np.log(list(row)), np.log(list(row.values())), 1)[0])
            for name, row in self.change.items()
        }


def mup_word(config: MupConfig) -> int:
    """Writes what was asked for and says where it is.

    Raises:
        ConfigError: widths that the base's heads don't divide, or fewer than two of them.
    """
    if config.check and len(set(config.widths)) < 2:
        raise ConfigError(
            "a slope needs two different widths or more", where=f"widths={config.widths}",
            do="As in widths=[32,64,128], or check=false",
        )  # fmt: skip
    if config.check:
        check_writable(Path(config.report))
    if config.base_shapes is not None:
        drafter = on_meta(config.drafter, config.num_states, config.width)
        mup.write_base(config.base_shapes, drafter)
        say(f"{config.base_shapes}: shapes of the drafter at width {config.width}")
    if not config.check:
        return 0
    found = {use: measure(config, use_mup=use) for use in (False, True)}
    write(Path(config.report), config, found)
    texts = [
        f"{'with' if use else 'without'} muP {statistics.median(m.slopes.values()):+.2f}"
        for use, m in found.items()
    ]
    say(f"{config.report}: growth of activation change with width (slope): {', '.join(texts)}")
    return 0


def on_meta(drafter: DrafterConfig, num_states: int, width: int) -> Drafter:
    """A drafter without memory, for its shapes."""
    with torch.device("meta"):
        return Drafter(drafter, num_states, width)


def scaled(base: DrafterConfig, width: int, base_width: int) -> DrafterConfig:
    """The base drafter at another width: more heads and a wider MLP, heads of the same size.

    Raises:
        ConfigError: the heads don't come out whole.
    """
    drafter = typed(DrafterConfig, to_plain(base))
    for key in (
        "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "linear_num_key_heads", "linear_num_value_heads",
    ):  # fmt: skip
        value, rest = divmod(getattr(base, key) * width, base_width)
        if rest:
            raise ConfigError(
                f"at width {width} {key} would be {getattr(base, key) * width / base_width:g}",
                where="widths",
                do="Take multiples of the base width",
            )
        setattr(drafter, key, value)
    drafter.hidden_size, drafter.mask_token_id = width, MASK
    return drafter


def small(config: MupConfig) -> DrafterConfig:
    """The check's base: the drafter's layers, two of a kind at most, at the first width."""
    drafter = typed(DrafterConfig, to_plain(config.drafter))
    kinds = list(dict.fromkeys(drafter.layer_types))
    drafter.layer_types = kinds * 2 if len(kinds) == 1 else kinds
    width = config.widths[0]
    drafter.intermediate_size = 2 * width
    drafter.num_attention_heads = drafter.num_key_value_heads = 2
    drafter.linear_num_key_heads = drafter.linear_num_value_heads = 2
    drafter.head_dim = drafter.linear_key_head_dim = drafter.linear_value_head_dim = 16
    drafter.block_size, drafter.chunk_size = 4, 16
    drafter.hidden_size, drafter.mask_token_id = width, MASK
    return drafter


def measure(config: MupConfig, *, use_mup: bool) -> Measured:
    """Trains every width and measures; means over seeds."""
    base = small(config)
    shapes = mup.shapes(on_meta(base, config.num_states, config.widths[0]))
    change: dict[str, dict[int, float]] = {}
    for width in config.widths:
        drafter = scaled(base, width, config.widths[0])
        runs = [
            changes(config, drafter, shapes if use_mup else None, seed)
            for seed in range(config.seeds)
        ]
        for name in runs[0]:
            squares = [run[name] ** 2 for run in runs]
            change.setdefault(name, {})[width] = float(np.sqrt(np.mean(squares)))
    return Measured(change)


def changes(
    config: MupConfig, drafter: DrafterConfig, base: dict[str, Any] | None, seed: int
) -> dict[str, float]:
    """RMS change of each module's output over the check's updates at one width."""
    width = int(drafter.hidden_size or 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Drafter(drafter, config.num_states, width)
        if base is not None:
            mup.rescale_init_(model.named_parameters(), base)
        embed = torch.randn(VOCABULARY, width)
        head = torch.randn(VOCABULARY, width) / width**0.5
        states = torch.randn(TOKENS, config.num_states, width).bfloat16()
        tokens = torch.randint(0, MASK, (TOKENS,))
    batch = Batch.pack(
        ["0" * 32], [tokens], states, [torch.ones(TOKENS, dtype=torch.bool)],
        [torch.tensor(ANCHORS)],
    )  # fmt: skip
    model.match_head(head)
    optimizer = build_optimizer(
        dataclasses.replace(config.optimizer, mup_base=None),
        model.named_parameters(),
        model.parts(),
        base=base,
    )
    before = outputs(model, batch, embed)
    for _ in range(config.steps):
        optimizer.zero_grad()
        loss, _ = batch_loss(
            model(batch, embed), batch, head, LossConfig(),
            num_states=config.num_states, denominator=float(len(ANCHORS) * 3),
        )  # fmt: skip
        loss.backward()
        optimizer.step()
    after = outputs(model, batch, embed)
    return {name: float((after[name] - before[name]).pow(2).mean().sqrt()) for name in before}


@torch.no_grad()
def outputs(model: Drafter, batch: Batch, embed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of fc, mixers and MLPs."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str):
        return lambda _module, _inputs, output: found.__setitem__(name, output.detach().clone())

    hooks = [model.fc.register_forward_hook(keep("fc"))]
    for number, layer in enumerate(model.layers):
        kind = type(layer.mixer).__name__
        hooks.append(layer.mixer.register_forward_hook(keep(f"{number} {kind}")))
        hooks.append(layer.mlp.register_forward_hook(keep(f"{number} MLP")))
    try:
        model(batch, embed)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def write(path: Path, config: MupConfig, found: dict[bool, Measured]) -> None:
    """The page: a plot each, with and without, and the slopes."""
    items = [_plot(use, measured) for use, measured in found.items()]
    slopes = {use: measured.slopes for use, measured in found.items()}
    rows = [[Cell("module"), Cell("slope without muP"), Cell("slope with muP")]]
    rows += [
        [Cell(name), numeric(slopes[False][name]), numeric(slopes[True][name])]
        for name in slopes[True]
    ]
    what = (
        f"{config.optimizer.name.value}, {config.steps} updates, mean of {config.seeds} seeds, "
        f"widths {', '.join(map(str, config.widths))}."
    )
    sections = [
        section("Coordinate check", f"<p>{what}</p><p class=note>{COVERED}</p>"),
        section("Activation change against width", "".join(plot_html(item) for item in items)),
        section("Slopes", table(rows, "slopes")),
    ]
    write_page(path, "drafttape mup: coordinate check", sections, items)


def _plot(use: bool, measured: Measured) -> plots.Item:
    values = np.log2([list(row.values()) for row in measured.change.values()])
    widths = np.log2(list(next(iter(measured.change.values()))))
    plot = plots.figure(
        "log2(width)", "log2(RMS change of the output)", (widths[0], widths[-1]),
        (float(values.min()), float(values.max())),
    )  # fmt: skip
    for number, (name, row) in enumerate(zip(measured.change, values, strict=True)):
        plot.line(widths, row, color=plots.colour(number), line_width=1.6, legend_label=name)
    plot.legend.label_text_font_size = "10px"
    caption = "With muP: flat." if use else "Without muP: the change grows with the width."
    return plots.item("with_mup" if use else "without_mup", caption, plot)
