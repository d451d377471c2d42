"""Muon over semantic parts: momentum, orthogonalise each part alone, update.

One step, for every matrix with a gradient:

    buf = mu*buf + (1-mu)*g                   float32, in the parameter's own shape
    u   = mu*buf + (1-mu)*g  (Nesterov) or buf
    p   = (1 - lr*decay) * p                  lr before any shape factor
    p  -= lr * scale(part) * polar(u[part])   for each part of p

Parts of one shape are gathered over all matrices into chunks of a bounded size, so many small heads
cost one batched call. Memory beyond the momentum is two copies of a chunk, its parts and their
iterate or what is sent and what is received, and the n x n scratch of the parts in one call.
`p.grad` is never written; without a gradient a matrix is not even decayed. Under FSDP2 momentum is
cut as its parameter is, and `ownership` says who orthogonalises what: exchanges are not overlapped
with work, for a rank's share of them is small (1.7 B parameters on 64 ranks: 0.1 GB a step).

The published implementations differ in convention: torch and Keller Jordan's average (EMA, as
here), Moonlight and dion sum (`buf = mu*buf + g`, `u = g + mu*buf`). Orthogonalisation forgets the
scale, so at a constant mu both give one direction.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shared.errors import TrainingError
from stage2_train import orthogonalize as ortho
from stage2_train import ownership
from stage2_train.muon_chunks import Chunk, Run, placed, plan_chunks
from stage2_train.ownership import local
from stage2_train.param_rules import Parts

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # most elements orthogonalised in one call


def shape_factor(scale: str, rows: int, cols: int, target_rms: float) -> float:
    """What an orthogonalised part is multiplied by; rows and cols are the part's own.

    moonlight: a full-rank polar factor has RMS 1/sqrt(max), so the update's RMS is `target_rms`.
    kj: sqrt(max(1, rows/cols)), with Keller Jordan's own learning rates.
    """
    if scale == "moonlight":
        return target_rms * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols)) if scale == "kj" else 1.0


class Muon(torch.optim.Optimizer):
    """Muon for matrices with declared parts.

    Args:
        groups: param groups with `params`, `lr`, `weight_decay`; each its own lr.
        parts: resolved parts by `id` of the parameter; every parameter needs an entry.
        names: parameter names by `id`, for errors.
        polynomial, steps: see `orthogonalize.coefficients`, or "svd".
        scale, target_rms: see `shape_factor`.
        head_group: heads of a role orthogonalised together; 0: all.
        dtype: of the multiplications; None takes `orthogonalize.compute_dtype`.
    """

    def __init__(
        self,
        groups: Sequence[dict],
        parts: Mapping[int, Parts],
        names: Mapping[int, str],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        polynomial: str = "polar_express",
        steps: int = 5,
        scale: str = "moonlight",
        target_rms: float = 0.2,
        head_group: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(list(groups), {"lr": 1e-3, "weight_decay": 0.0})
        self.momentum, self.nesterov = momentum, nesterov
        self.polynomial, self.steps = polynomial, steps
        self.scale, self.target_rms = scale, target_rms
        self.head_group, self.dtype = head_group, dtype
        self._parts, self._names = parts, names
        self._plans: dict[tuple[int, ...], tuple[list[Chunk], list[dict[int, int]]]] = {}
        self._buffers: dict[tuple, Tensor] = {}
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.grid = ownership.Grid.of(parameters[0])
        for parameter in parameters:
            self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure=None, *, checked: bool = False):
        """One update. `checked`: the gradients are known to be finite.

        Raises:
            TrainingError: a gradient is not finite; nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owners = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not owners:
            return loss
        if not checked:
            self._check_finite([p for p, _ in owners])
        self._accumulate(owners)
        for group in self.param_groups:
            shrunk = [local(p) for p in group["params"] if p.grad is not None]
            if group["weight_decay"] and shrunk:
                torch._foreach_mul_(shrunk, 1 - group["lr"] * group["weight_decay"])
        chunks, turns = self._plan(owners)
        for turn in turns:
            self._turn({rank: chunks[item] for rank, item in turn.items()}, owners)
        return loss

    def _turn(self, turn: dict[int, Chunk], owners: list[tuple[Tensor, dict]]) -> None:
        """One round: at most one chunk a rank is orthogonalised, and applied on all ranks."""
        grid = self.grid
        mine = turn.get(grid.rank)
        near = [turn.get(grid.replica * grid.shards + s) for s in range(grid.shards)]
        apart = any(chunk.home is None for chunk in turn.values()) and any(near)
        stage_BNM = self._gather(near, mine, owners) if apart else self._fill(mine, owners)
        result_BNM = None if stage_BNM is None else self._direction(stage_BNM)
        del stage_BNM
        for replica in range(grid.replicas):
            theirs = [turn.get(replica * grid.shards + s) for s in range(grid.shards)]
            size = sum(chunk.count(grid.shard) for chunk in theirs if chunk)
            if replica == grid.replica and apart:
                flat = self._scatter(near, mine, result_BNM)
            if not size:
                continue
            if replica != grid.replica:
                flat = torch.empty(size, dtype=self.compute_dtype(), device=self._device(owners))
            elif not apart:
                flat = result_BNM.contiguous().view(-1)
            if grid.replicas > 1:
                grid.copy(flat, replica)
            self._apply(theirs, owners, flat)

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the multiplications."""
        if self.polynomial == "svd":
            return torch.float32
        return self.dtype or ortho.compute_dtype(self.param_groups[0]["params"][0].device)

    def _check_finite(self, parameters: list[Tensor]) -> None:
        gradients = [local(p.grad) for p in parameters]
        bad = torch.stack([(~gradient.isfinite()).sum() for gradient in gradients]).double()
        if self.grid.total(bad).any():
            first = parameters[int(bad.nonzero()[0])]
            raise TrainingError("the gradient is not finite", where=self._names[id(first)])

    def _accumulate(self, owners: list[tuple[Tensor, dict]]) -> None:
        buffers = [local(self.state[p]["momentum"]) for p, _ in owners]
        gradients = [local(p.grad) for p, _ in owners]
        if all(gradient.dtype == torch.float32 for gradient in gradients):
            torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
            return
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.lerp_(gradient.float(), 1 - self.momentum)

    def _plan(self, owners: list[tuple[Tensor, dict]]) -> tuple[list[Chunk], list[dict[int, int]]]:
        """Chunks, and {owner: chunk} of each round: first those that need no exchange."""
        key = tuple(id(p) for p, _ in owners)
        if key not in self._plans:
            grid = self.grid
            matrices = [(i, tuple(p.shape), self._parts[id(p)]) for i, (p, _) in enumerate(owners)]
            most = CHUNK_ELEMENTS.get(self._device(owners).type, CHUNK_ELEMENTS["cuda"])
            chunks = plan_chunks(matrices, self.head_group, most, grid.shards)
            costs = [ownership.flops(c.rows, c.cols, c.size, self.steps) for c in chunks]
            bound = [
                None if c.home is None else range(c.home, grid.world, grid.shards) for c in chunks
            ]
            ranks = ownership.assign(costs, grid.world, bound)
            turns = []
            for apart in (False, True):
                items = [i for i, c in enumerate(chunks) if (c.home is None) == apart]
                turns += ownership.rounds(ranks, grid.world, items)
            self._plans[key] = chunks, turns
        return self._plans[key]

    def _device(self, owners: list[tuple[Tensor, dict]]) -> torch.device:
        return owners[0][0].device

    def _low(self, parameter: Tensor) -> int:
        """The first row of a parameter that this rank holds."""
        return ownership.edges(parameter.shape[0], self.grid.shards)[self.grid.shard][0]

    def _momentum(self, run: Run, parameter: Tensor, out: Tensor) -> None:
        """Writes what is orthogonalised (Nesterov's look ahead, or the average) for held rows."""
        low = self._low(parameter)
        buffer = run.of(local(self.state[parameter]["momentum"]), low)
        if self.nesterov:
            gradient = run.of(local(parameter.grad), low).float()
            torch.lerp(gradient, buffer, self.momentum, out=out)
        else:
            out.copy_(buffer)

    def _fill(self, chunk: Chunk | None, owners: list[tuple[Tensor, dict]]) -> Tensor | None:
        """A chunk [size, rows, cols], float32, whose rows this rank holds."""
        if chunk is None:
            return None
        stage_BNM = self._buffer("stage", chunk.shape, torch.float32, self._device(owners))
        for run in chunk.runs:
            self._momentum(run, owners[run.index][0], run.at(stage_BNM))
        return stage_BNM

    def _gather(
        self, near: list[Chunk | None], mine: Chunk | None, owners: list[tuple[Tensor, dict]]
    ) -> Tensor | None:
        """This rank's chunk, float32, from the rows that the shards hold; all shards take part."""
        grid, device = self.grid, self._device(owners)
        counts = [chunk.count(grid.shard) if chunk else 0 for chunk in near]
        sent = torch.empty(sum(counts), dtype=torch.float32, device=device)
        for _, run, part in placed(near, grid.shard, sent):
            self._momentum(run, owners[run.index][0], part)
        come = [mine.count(s) if mine else 0 for s in range(grid.shards)]
        received = grid.exchange(sent, counts, come)
        del sent
        if mine is None:
            return None
        stage_BNM = torch.empty(mine.shape, dtype=torch.float32, device=device)
        for s, rows in enumerate(received.split(come)):
            for _, run, part in placed([mine], s, rows):
                run.at(stage_BNM).copy_(part)
        return stage_BNM

    def _scatter(
        self, near: list[Chunk | None], mine: Chunk | None, result_BNM: Tensor | None
    ) -> Tensor:
        """The held rows of all results of this copy, flat, in the order of `near`."""
        grid = self.grid
        to = [mine.count(s) if mine else 0 for s in range(grid.shards)]
        device = self.param_groups[0]["params"][0].device
        sent = torch.empty(sum(to), dtype=self.compute_dtype(), device=device)
        for s, rows in enumerate(sent.split(to)):
            for _, run, part in placed([mine], s, rows):
                part.copy_(run.at(result_BNM))
        return grid.exchange(sent, to, [c.count(grid.shard) if c else 0 for c in near])

    def _direction(self, stage_BNM: Tensor) -> Tensor:
        """Orthogonalised momentum of a chunk, in the compute dtype; the input becomes scratch."""
        if self.polynomial == "svd":
            return ortho.svd_polar(ortho.normalize_(stage_BNM, 1.0))
        polar_express = self.polynomial == "polar_express"
        ortho.normalize_(stage_BNM, ortho.SAFETY if polar_express else 1.0)
        dtype = self.compute_dtype()
        work_BNM = stage_BNM
        if dtype != torch.float32:
            work_BNM = self._buffer("work", stage_BNM.shape, dtype, stage_BNM.device)
            work_BNM.copy_(stage_BNM)
        return ortho.iterate_(work_BNM, ortho.coefficients(self.polynomial, self.steps))

    def _buffer(self, use: str, shape: tuple[int, ...], dtype, device) -> Tensor:
        """A view of the one reused buffer of this use, grown to the largest chunk seen.

        Shards take fresh memory: what is sent and received stands beside it, in its place.
        """
        if self.grid.shards > 1:
            return torch.empty(shape, dtype=dtype, device=device)
        size = math.prod(shape)
        held = self._buffers.get((use, dtype, device))
        if held is None or held.numel() < size:
            held = self._buffers[use, dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def _apply(self, chunks: list[Chunk | None], owners, flat: Tensor) -> None:
        """Updates the held rows by results that stand flat, chunk after chunk."""
        for chunk, run, part in placed(chunks, self.grid.shard, flat):
            factor = shape_factor(self.scale, chunk.rows, chunk.cols, self.target_rms)
            parameter, group = owners[run.index]
            rows = run.of(local(parameter), self._low(parameter))
            rows.add_(part, alpha=-group["lr"] * factor)
