"""What a run measures: one JSON line an update, TensorBoard beside it, and a progress bar."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shared.log import JsonLines
from stage2_train.trackers import Sink


class Metrics:
    """`metrics.jsonl` and, if asked, TensorBoard files.

    Lines of updates have `step` (updates done), `loss`, `lr`, `grad_norm`, `clipped`, `skipped` and
    the totals since the run began: `tokens`, `supervised` (labels that counted), `blocks`, `flops`,
    `seconds` (training, without the time between a stop and a resume), `data_wait` (seconds).
    Lines of a held-out measurement have `step` and `heldout_loss`, and no `loss`.

    Args:
        run_dir: the run.
        step: updates done; lines after it belong to work that was lost and are removed.
        tensorboard: also write `tensorboard/`.
        trackers: services that get the same numbers.
        is_main: other ranks write nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        *,
        tensorboard: bool,
        trackers: Sequence[Sink] = (),
        is_main: bool = True,
    ) -> None:
        self._is_main = is_main
        self._trackers = list(trackers)
        self._board: Any = None
        if not is_main:
            return
        self._lines = JsonLines(run_dir / "metrics.jsonl", keep=lambda line: line["step"] <= step)
        self._digests = JsonLines(run_dir / "digests.jsonl", keep=lambda line: line["step"] <= step)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: Any) -> None:
        """One line; numbers also go to TensorBoard and trackers."""
        if not self._is_main:
            return
        self._lines.write(step=step, **values)
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
        for tracker in self._trackers:
            tracker.write(step, numbers)

    def digest(self, step: int, digest: bytes) -> None:
        """The digest of what update `step` was fed."""
        if self._is_main:
            self._digests.write(step=step, digest=digest.hex())

    def close(self) -> None:
        """Closes all files."""
        if not self._is_main:
            return
        self._lines.close()
        self._digests.close()
        for tracker in self._trackers:
            tracker.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()


CONTEXT_NAMES = (".k_proj.", ".v_proj.", ".a_proj.", ".b_proj.")


def step_flops(
    drafter: torch.nn.Module, head: torch.Tensor, *, tokens: int, blocks: int, block: int
) -> float:
    """Model FLOPs of forward and backward: 6 a parameter and position, matrices only.

    Context positions pass through `fc` and the key, value, decay and beta projections; block
    positions through everything but `fc`; predicted slots through the frozen head (no weight
    gradient: 4 a weight). Recomputation is not counted.
    """
    context = slots = 0
    for name, parameter in drafter.named_parameters():
        if parameter.ndim != 2:
            continue
        is_fc = name.startswith("fc.")
        context += parameter.numel() if is_fc or any(k in name for k in CONTEXT_NAMES) else 0
        slots += 0 if is_fc else parameter.numel()
    positions = blocks * block
    return 6.0 * (context * tokens + slots * positions) + 4.0 * head.numel() * blocks * (block - 1)
