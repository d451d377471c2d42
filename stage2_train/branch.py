"""Beginning a run at another run's checkpoint.

Weights are taken as they are. With the parent's snapshot, seed and batch the run goes on in the
parent's data, update k+1 after update k, so that nothing is seen twice; with others it begins its
own plan. The optimizer's states are kept if this optimizer is the parent's (then, with an unchanged
schedule, the branch is bit for bit the parent's continuation), and dropped by name if it is not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.errors import MismatchError
from shared.record import read_record
from stage2_train import checkpoint
from stage2_train.config import BranchConfig


@dataclass
class Branch:
    """What a run takes over.

    Attributes:
        path: the checkpoint.
        model: weights by name.
        optimizer: states by name; None when dropped.
        states: which states the parent has.
        state: the checkpoint's state.json.
        same_data: the parent's steps are this run's steps.
        restart_schedule: the schedule is laid out from the branch on.
    """

    path: Path
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] | None
    states: str
    state: dict[str, Any]
    same_data: bool
    restart_schedule: bool

    @property
    def step(self) -> int:
        """Updates that count as done: the parent's if its data goes on, else none."""
        return int(self.state["step"]) if self.same_data else 0

    def sentence(self) -> str:
        """What was taken over, for a person."""
        what = self.record()
        return (
            f"branched from {self.path}: optimizer states {what['optimizer']} ({self.states} "
            f"parameters), data {what['data']}, schedule {what['schedule']}"
        )

    def record(self) -> dict[str, Any]:
        """The parent, for run.json."""
        return {
            "checkpoint": str(self.path),
            "step": self.state["step"],
            "digest": self.state["digest"],
            "data": "continued" if self.same_data else "begun anew",
            "optimizer": "dropped" if self.optimizer is None else "kept",
            "schedule": "restarted" if self.restart_schedule else "continued",
        }


def open_branch(config: BranchConfig, start_digest: str, steps: int, optimizer: Any) -> Branch:
    """Reads the parent's checkpoint and decides what of it goes on.

    Args:
        config: where the parent is.
        start_digest: digest 0 of this run's plan.
        steps: this run's planned updates.
        optimizer: this run's.

    Raises:
        DataError, CorruptionError: the parent can't be read.
        MismatchError: no such checkpoint, or nothing is left to do after it.
    """
    parent = Path(str(config.run_dir))
    record = read_record(parent)
    path = checkpoint.find(parent, config.checkpoint)
    model, states, state = checkpoint.load(path)
    same_data = record.start_digest == start_digest
    if same_data and state["step"] >= steps:
        raise MismatchError(
            f"the checkpoint has {state['step']} updates, the run plans {steps}",
            where=path,
            do="Set trainer.steps (of trunk and branch together) higher",
        )
    try:
        optimizer.check_settings(state["optimizer"])
        kept = states if states.keys() == optimizer.named_state().keys() else None
    except MismatchError:
        kept = None
    restart = config.restart_schedule
    if restart is None:
        restart = kept is None or not same_data
    return Branch(path, model, kept, _kinds(states), state, same_data, restart)


def _kinds(states: dict[str, torch.Tensor]) -> str:
    """How many parameters have which state, as text."""
    kinds: dict[str, int] = {}
    for key in states:
        kind = key.rsplit("/", 1)[-1]
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{kind} of {count}" for kind, count in sorted(kinds.items()))
