"""The processes of a run: one, or those that torchrun started.

Every rank computes every W-th row of a step. What it holds whole has its gradients summed once an
update, after accumulation, in float32, in flat buckets; what is cut (`sharding`) has them summed
with every row. The loss has been divided by the step's global denominator, so a sum is all there is
to do and the number of ranks changes nothing but rounding.
"""

import datetime
import os
from collections.abc import Iterable
from typing import Any

import torch

from stage2_train.sharding import is_cut

# The first rank alone measures the held-out split and writes checkpoints; the others wait.
TIMEOUT = datetime.timedelta(hours=2)
BUCKET = 1 << 26  # elements of one reduction (256 MiB of float32)


class Ranks:
    """This process among W.

    Args:
        device: "cpu" (gloo) or "cuda…" (nccl).

    Attributes:
        cut: the drafter's matrices are cut over ranks, which must then pass equally many rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.cut, self._host = False, None
        self.rank = int(os.environ.get("RANK", "0")) if self.world > 1 else 0
        if self.world > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT
                )

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sums `.grad` of whole parameters over all ranks in place; a rank without rows takes part
        with zeros."""
        if self.world == 1:
            return
        import torch.distributed as dist

        gradients: list[torch.Tensor] = []
        buckets: list[list[torch.Tensor]] = [[]]
        size = 0
        for parameter in parameters:
            if is_cut(parameter):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for gradient in gradients:
            if buckets[-1] and size + gradient.numel() > BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(gradient)
            size += gradient.numel()
        for bucket in filter(None, buckets):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            totals = flat.split([gradient.numel() for gradient in bucket])
            for gradient, total in zip(bucket, totals, strict=True):
                gradient.copy_(total.view_as(gradient))

    def gather(self, value: Any) -> list[Any]:
        """Small values of all ranks, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def host_group(self) -> Any:
        """A group over host memory for checkpoints, apart from training's; all ranks ask for it."""
        import torch.distributed as dist

        if self._host is None:
            self._host = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return self._host

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def close(self) -> None:
        """Leaves the group."""
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
