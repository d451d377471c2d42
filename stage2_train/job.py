"""What a run is made of, and what changes while it goes on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shared.record import RunRecord
from stage2_train.branch import Branch
from stage2_train.config import TrainConfig
from stage2_train.loader import Loader, Upload
from stage2_train.ranks import Ranks
from stage2_train.steps import StepPlan
from stage2_train.trackers import Sink

TOTALS = ("tokens", "supervised", "blocks", "flops", "seconds", "data_wait", "skipped")


@dataclass
class Job:
    """Everything the loop needs; `build.assemble` makes it.

    Attributes:
        cfg: the resolved configuration.
        run_dir: where everything is written.
        record: what is proven about the run.
        plan: rows and denominators.
        steps: planned updates.
        total_rows: rows of the run; None when steps were given, not epochs.
        loader: reads rows.
        reader: reads one sample (to find what is wrong in it).
        drafter: fp32 masters.
        embed, head: the target's, frozen.
        optimizer, factor: updates; learning-rate factor of a 0-based update.
        heldout: measures the held-out split; None when there is none.
        branch: where a run without a checkpoint of its own begins; None: at initial weights.
        trackers: connects to the chosen services.
        device, upload, ranks: where this process computes, how rows get there, and among which.
    """

    cfg: TrainConfig
    run_dir: Path
    record: RunRecord
    plan: StepPlan
    steps: int
    total_rows: int | None
    loader: Loader
    reader: Any
    drafter: Any
    embed: torch.Tensor
    head: torch.Tensor
    optimizer: Any
    factor: Callable[[int], float]
    heldout: Callable[[], dict[str, Any]] | None
    branch: Branch | None
    trackers: Callable[[], list[Sink]]
    device: torch.device
    upload: Upload
    ranks: Ranks


@dataclass
class Progress:
    """What changes while a run goes on; saved in every checkpoint."""

    step: int = 0
    digest: bytes = b""
    bad_in_row: int = 0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
