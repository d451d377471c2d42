"""muP: learning rates and initial weights that keep their meaning when a drafter gets wider.

A *base-shapes file* holds the shapes of a small drafter on which a learning rate was found. A wider
one that names it (`optimizer.mup_base`) gets, by function:

- matrices under AdamW: lr * base_in / in. Their inputs' coordinates add up (`dy = x dW`), so with
  one lr for all widths an update would move activations in proportion to the width.
- matrices under Muon: a part's update has the spectral norm `shape_factor`; what keeps activations
  is sqrt(rows / cols). lr * the ratio of the two here over the ratio in the base.
- vectors (norms, biases, A_log, dt_bias) and convolutions, whose fan-in is their kernel: lr as is.
- decay is divided by the same factor, so lr * decay, the rate at which weights fade, is kept.
- initial matrices: std * sqrt(base_in / in).

Input embedding and head are the target's and frozen: nothing to scale, and logits are outside of
what muP promises here. Head sizes must be the base's; widths grow by more heads. Depth, block size
and data are not covered either. https://arxiv.org/abs/2203.03466 (Table 3 and 8), for Muon
https://arxiv.org/abs/2310.17813.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.fs import write_atomic
from stage2_train.config import OptimizerConfig, OptimizerName
from stage2_train.muon import shape_factor
from stage2_train.param_rules import Elementwise, RoutingTable, blocks, resolve

FORMAT = "drafttape.mup.v1"


def shapes(drafter: Any) -> dict[str, Any]:
    """Parameter name -> shape, and (role, rows of a head, heads) of its Muon parts."""
    declared, found = drafter.parts(), {}
    for name, parameter in drafter.named_parameters():
        parts = declared.get(name, ())
        parts = () if isinstance(parts, Elementwise) else parts
        resolved = resolve(name, parts, len(parameter)) if parts else ()
        found[name] = {
            "shape": list(parameter.shape),
            "heads": [[part.role, part.rows // part.heads, part.heads] for part in resolved],
        }
    return found


def write_base(path: str | Path, drafter: Any) -> None:
    """Writes the base-shapes file of a drafter (which may be on the meta device)."""
    text = json.dumps({"format": FORMAT, "parameters": shapes(drafter)}, indent=1)
    write_atomic(Path(path), text.encode() + b"\n")


def read_base(path: str | Path) -> dict[str, Any]:
    """Parameter name -> its base shape.

    Raises:
        ConfigError: it is missing or no base-shapes file.
    """
    where = "optimizer.mup_base"
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError("another format")
        return dict(document["parameters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no base-shapes file ({getattr(error, 'strerror', None) or error})",
            where=where,
            do="Write one with drafttape mup base_shapes=FILE",
        ) from None


def digest(base: Mapping[str, Any]) -> str:
    """Names a base in the checkpoint's settings."""
    text = json.dumps(base, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def multipliers(
    config: OptimizerConfig, routing: RoutingTable, base: Mapping[str, Any]
) -> dict[str, float]:
    """Learning-rate factor of every owned parameter, by name.

    Raises:
        ConfigError: the base is of another architecture, or the optimizer has no such rule.
    """
    if config.name is OptimizerName.sgd:
        raise ConfigError("muP is here for adamw and muon, not for sgd", where="optimizer.mup_base")
    found = {}
    for row in routing.rows:
        if row.owner not in ("adamw", "muon"):
            continue
        if row.name not in base or len(base[row.name]["shape"]) != len(row.shape):
            raise ConfigError(
                f"the base-shapes file doesn't know {row.name} {list(row.shape)}",
                where="optimizer.mup_base",
                do="Base and drafter must differ in widths alone",
            )
        before = base[row.name]["shape"]
        if row.owner == "adamw":
            found[row.name] = before[1] / row.shape[1] if len(row.shape) == 2 else 1.0
            continue
        factors = {
            _gain(config, block.rows, row.shape[1]) / _gain(config, rows, before[1])
            for block, rows in zip(*_first_blocks(config, row, base[row.name]), strict=True)
        }
        if len(factors) != 1:
            raise ConfigError(
                f"the parts of {row.name} grow by different factors", where="optimizer.mup_base"
            )
        found[row.name] = factors.pop()
    return found


def _first_blocks(config: OptimizerConfig, row: Any, before: Mapping[str, Any]) -> tuple:
    """One block of each role, and the rows that such a block has in the base."""
    firsts = {block.role: block for block in reversed(blocks(row.parts, config.head_group))}
    units = {role: (rows, heads) for role, rows, heads in before["heads"]}
    if units.keys() != firsts.keys():
        raise ConfigError(
            f"{row.name} has other parts than in the base", where="optimizer.mup_base"
        )
    wanted = []
    for role in firsts:
        rows, heads = units[role]
        wanted.append(rows * (min(config.head_group, heads) or heads))
    return list(firsts.values()), wanted


def _gain(config: OptimizerConfig, rows: int, cols: int) -> float:
    """Spectral norm that keeps activations over the one that the scale gives."""
    given = shape_factor(config.scale.value, rows, cols, config.target_rms)
    return math.sqrt(rows / cols) / given


@torch.no_grad()
def rescale_init_(named_parameters: Iterable[tuple[str, Tensor]], base: Mapping[str, Any]) -> None:
    """Initial matrices to std * sqrt(base_in / in), in place; before a checkpoint is loaded."""
    for name, parameter in named_parameters:
        if parameter.ndim == 2 and name in base:
            parameter.mul_(math.sqrt(base[name]["shape"][1] / parameter.shape[1]))
