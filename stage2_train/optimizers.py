"""One optimizer object for a run: Muon for matrices, AdamW (torch's, fused) or SGD for the rest.

Every trainable parameter has one owner and one state, decided by `param_rules.route`. Param groups
carry `name`, `lr` and `base_lr`; the trainer sets lr = base_lr * factor in all of them alike. State
is saved under the parameter's name, in the parameter's shape, so neither the split into parts nor
the number of ranks is written into a checkpoint.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shared.errors import CorruptionError, MismatchError
from stage2_train import mup
from stage2_train.config import OptimizerConfig, OptimizerName
from stage2_train.muon import Muon
from stage2_train.param_rules import Elementwise, Parts, RoutingTable, route
from stage2_train.sharding import copy_


def build_optimizer(
    config: OptimizerConfig,
    named_parameters: Iterable[tuple[str, Tensor]],
    parts: Mapping[str, Parts | Elementwise],
    *,
    base: Mapping[str, Any] | None = None,
) -> "DrafterOptimizer":
    """Routes every parameter and builds the optimizer of a run.

    Args:
        named_parameters: (name, parameter) pairs; frozen and tied ones are listed, not owned.
        parts: the modules' declarations by parameter name.
        base: base shapes for muP (see `mup`); None reads `config.mup_base`, if there is one.

    Raises:
        ConfigError: see `param_rules.route` and `mup.multipliers`.
    """
    pairs = list(named_parameters)
    routing = route(pairs, parts, muon=config.name is OptimizerName.muon)
    by_name = dict(pairs)
    decayed = [(r.name, by_name[r.name]) for r in routing.owned("adamw") if len(r.shape) > 1]
    others = [(r.name, by_name[r.name]) for r in routing.owned("adamw") if len(r.shape) <= 1]
    matrices = [(r.name, by_name[r.name]) for r in routing.owned("muon")]
    is_muon = config.name is OptimizerName.muon
    if base is None and config.mup_base is not None:
        base = mup.read_base(config.mup_base)
    scale = {} if base is None else mup.multipliers(config, routing, base)
    lr = config.adamw_lr if is_muon and config.adamw_lr is not None else config.lr
    rule = "sgd" if config.name is OptimizerName.sgd else "adamw"
    inner: list[torch.optim.Optimizer] = []
    if matrices:
        inner.append(_muon(config, matrices, routing, scale))
    groups = [
        # norms, biases, A_log and dt_bias are offsets and gains: decay would pull them off 1 or 0
        *_groups(rule, decayed, lr, config.weight_decay, scale),
        *_groups(f"{rule}_no_decay", others, lr, 0.0, scale),
    ]
    if groups:
        inner.append(_sgd(config, groups) if rule == "sgd" else _adamw(config, groups))
    return DrafterOptimizer(config, inner, pairs, routing)


def _groups(
    name: str,
    named: list[tuple[str, Tensor]],
    lr: float,
    decay: float,
    scale: Mapping[str, float],
) -> list[dict]:
    """A group for each muP factor (see `mup`); one group without muP, none without parameters."""
    by_factor: dict[float, list[Tensor]] = {}
    for parameter_name, parameter in named:
        by_factor.setdefault(scale.get(parameter_name, 1.0), []).append(parameter)
    return [
        {
            "name": name if factor == 1.0 else f"{name}_x{factor:.4g}",
            "params": parameters,
            "lr": lr * factor,
            "base_lr": lr * factor,
            "weight_decay": decay / factor,
        }
        for factor, parameters in by_factor.items()
    ]


def _muon(
    config: OptimizerConfig, matrices, routing: RoutingTable, scale: Mapping[str, float]
) -> Muon:
    parts = {row.name: row.parts for row in routing.owned("muon")}
    return Muon(
        _groups("muon", matrices, config.lr, config.weight_decay, scale),
        {id(parameter): parts[name] for name, parameter in matrices},
        {id(parameter): name for name, parameter in matrices},
        momentum=config.momentum,
        nesterov=config.nesterov,
        polynomial=config.polynomial.value,
        steps=config.polynomial_steps,
        scale=config.scale.value,
        target_rms=config.target_rms,
        head_group=config.head_group,
        dtype=None if config.muon_dtype is None else getattr(torch, config.muon_dtype.value),
    )


def _adamw(config: OptimizerConfig, groups: list[dict]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups, betas=tuple(config.betas), eps=config.eps, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # torch makes these at the first step; a checkpoint needs all of them from the start
            optimizer.state[parameter].update(
                step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                exp_avg=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.preserve_format),
            )
    return optimizer


def _sgd(config: OptimizerConfig, groups: list[dict]) -> torch.optim.SGD:
    nesterov = config.nesterov and config.momentum > 0
    optimizer = torch.optim.SGD(groups, momentum=config.momentum, nesterov=nesterov)
    if config.momentum:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class DrafterOptimizer:
    """The optimizers of a run behind torch's interface: `param_groups`, `step`, `zero_grad`.

    Attributes:
        routing: who owns which parameter and why.
        named_parameters: the owned parameters by name.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        inner: list[torch.optim.Optimizer],
        pairs: list[tuple[str, Tensor]],
        routing: RoutingTable,
    ) -> None:
        self.config, self.inner, self.routing = config, inner, routing
        owned = {r.name for r in routing.rows if r.owner in {"muon", "adamw"}}
        self.named_parameters = {name: p for name, p in pairs if name in owned}

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    def group_of(self) -> dict[str, dict]:
        """The param group of each owned parameter, by name."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return {name: groups[id(p)] for name, p in self.named_parameters.items()}

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The state tensors of one owned parameter."""
        parameter = self.named_parameters[name]
        return next((o.state[parameter] for o in self.inner if parameter in o.state), {})

    def set_lr(self, factor: float) -> None:
        """lr = base_lr * factor in every group."""
        for group in self.param_groups:
            group["lr"] = group["base_lr"] * factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, *, checked: bool = False) -> None:
        """One update of every parameter that has a gradient.

        Args:
            checked: `clip_gradients` has found all gradients finite; else Muon looks itself.

        Raises:
            TrainingError: a gradient of a matrix is not finite; no parameter has been changed.
        """
        for optimizer in self.inner:
            if isinstance(optimizer, Muon):
                optimizer.step(checked=checked)
            else:
                optimizer.step()

    def named_state(self) -> dict[str, Tensor]:
        """Every state tensor under "parameter name/state name"; the optimizer's own tensors."""
        names = {id(p): name for name, p in self.named_parameters.items()}
        return {
            f"{names[id(parameter)]}/{key}": value
            for optimizer in self.inner
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_named_state(self, saved: Mapping[str, Tensor]) -> None:
        """Copies a checkpoint's state in; keys, dtypes and shapes must be exactly the same.

        Raises:
            MismatchError: a key is missing or not wanted: another optimizer or model wrote it.
            CorruptionError: a tensor has another dtype or shape than this optimizer's.
        """
        own = self.named_state()
        for keys, what in (
            (own.keys() - saved.keys(), "lacks"),
            (saved.keys() - own.keys(), "has"),
        ):
            if keys:
                raise MismatchError(
                    f"the saved optimizer state {what} {min(keys)}"
                    + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
                    + ("" if what == "lacks" else ", which this optimizer doesn't know"),
                    do="Resume with the optimizer that wrote it, or branch the run",
                )
        for key, value in saved.items():
            if value.dtype != own[key].dtype or value.shape != own[key].shape:
                raise CorruptionError(
                    f"{value.dtype} {list(value.shape)} is saved where "
                    f"{own[key].dtype} {list(own[key].shape)} belongs",
                    where=f"optimizer state {key}",
                )
        with torch.no_grad():
            for key, value in saved.items():
                copy_(own[key], value)

    def settings(self) -> dict[str, str]:
        """What a resumed run must share besides its state; saved with the checkpoint."""
        config = self.config
        result = {"optimizer": config.name.value}
        if config.mup_base is not None:
            result["mup"] = mup.digest(mup.read_base(config.mup_base))
        for optimizer in self.inner:
            if isinstance(optimizer, Muon):
                dtype = optimizer.compute_dtype()
                result |= {
                    "polynomial": f"{config.polynomial.value} x{config.polynomial_steps}",
                    "scale": f"{config.scale.value} {config.target_rms}",
                    "momentum": f"EMA {config.momentum}, nesterov {config.nesterov}",
                    "head_group": str(config.head_group),
                    "parts": self.routing.parts_digest,
                    "dtype": str(dtype).removeprefix("torch."),
                }
        return result

    def check_settings(self, saved: Mapping[str, str]) -> None:
        """Compares `settings()` with a checkpoint's.

        Raises:
            MismatchError: names each setting that differs, old and new value.
        """
        mine = self.settings()
        different = [
            f"{key} was {saved.get(key)!r}, is {mine.get(key)!r}"
            for key in sorted(mine.keys() | saved.keys())
            if mine.get(key) != saved.get(key)
        ]
        if different:
            raise MismatchError(
                "; ".join(different),
                where="optimizer settings",
                do="Resume with the settings of the run, or branch it",
            )
