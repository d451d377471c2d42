"""Muon over semantic parts: momentum, orthogonalise each part alone, update.

One step, for every matrix with a gradient:

    buf = mu*buf + (1-mu)*g                   float32, in the parameter's own shape
    u   = mu*buf + (1-mu)*g  (Nesterov) or buf
    p   = (1 - lr*decay) * p                  lr before any shape factor
    p  -= lr * scale(part) * polar(u[part])   for each part of p

Parts of one shape are gathered over all matrices into chunks of a bounded size, so many small heads
cost one batched call, and memory beyond the momentum is one chunk in float32 plus two in the
compute dtype. `p.grad` is never written; without a gradient a matrix is not even decayed.

The published implementations differ in convention: torch and Keller Jordan's average (EMA, as
here), Moonlight and dion sum (`buf = mu*buf + g`, `u = g + mu*buf`). Orthogonalisation forgets the
scale, so at a constant mu both give one direction.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.errors import ConfigError, TrainingError
from stage2_train import orthogonalize as ortho
from stage2_train import ownership
from stage2_train.param_rules import Parts, blocks

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # most elements orthogonalised in one call


def shape_factor(scale: str, rows: int, cols: int, target_rms: float) -> float:
    """What an orthogonalised part is multiplied by; rows and cols are the part's own.

    moonlight: a full-rank polar factor has RMS 1/sqrt(max), so the update's RMS is `target_rms`.
    kj: sqrt(max(1, rows/cols)), with Keller Jordan's own learning rates.
    """
    if scale == "moonlight":
        return target_rms * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols)) if scale == "kj" else 1.0


@dataclass(frozen=True)
class Piece:
    """`heads` equal row blocks of parameter `index`, at rows `offset`.. of a chunk's slots."""

    index: int
    rows: tuple[int, int, int]  # start, stop, step
    heads: int
    slot: int
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """View [heads, rows, cols] of a matrix."""
        start, stop, step = self.rows
        return tensor[start:stop:step].unflatten(0, (self.heads, -1))

    def at(self, stage_BNM: Tensor) -> Tensor:
        """The matching view of the chunk."""
        height = len(range(*self.rows)) // self.heads
        return stage_BNM[self.slot : self.slot + self.heads, self.offset : self.offset + height]


@dataclass
class Chunk:
    """Up to a bounded number of equally shaped parts that are orthogonalised in one call."""

    rows: int
    cols: int
    size: int = 0  # parts
    pieces: list[Piece] = field(default_factory=list)


def plan_chunks(
    matrices: Sequence[tuple[int, tuple[int, int], Parts]], head_group: int, most_elements: int
) -> list[Chunk]:
    """Gathers equal parts of all matrices (index, shape, parts) into chunks, in a fixed order."""
    chunks: list[Chunk] = []
    open_chunks: dict[tuple[int, int], Chunk] = {}
    for index, (_, cols), parts in matrices:
        for block in blocks(parts, head_group):
            shape = (block.rows, cols)
            capacity = max(1, most_elements // (block.rows * cols))
            chunk = open_chunks.get(shape)
            if chunk is None or chunk.size == capacity:
                chunk = open_chunks[shape] = Chunk(*shape)
                chunks.append(chunk)
            _place(chunk, index, block.slices)
    return chunks


def _place(chunk: Chunk, index: int, slices: tuple[tuple[int, int, int], ...]) -> None:
    """Adds a part; a part right below the last piece's rows extends that piece."""
    last = chunk.pieces[-1] if chunk.pieces else None
    start, stop, step = slices[0]
    if last is not None and len(slices) == 1 and last.index == index and last.offset == 0:
        height = len(range(*last.rows)) // last.heads
        begin, end = last.rows[0], range(*last.rows)[-1]
        if height == chunk.rows and last.rows[2] == step and end + step == start:
            grown = Piece(index, (begin, stop, step), last.heads + 1, last.slot, 0)
            chunk.pieces[-1] = grown
            chunk.size += 1
            return
    offset = 0
    for piece in slices:
        chunk.pieces.append(Piece(index, piece, 1, chunk.size, offset))
        offset += len(range(*piece))
    chunk.size += 1


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
        self.rank, self.world = ownership.here()
        self._parts, self._names = parts, names
        self._plans: dict[tuple[int, ...], list[Chunk]] = {}
        self._buffers: dict[tuple, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if hasattr(parameter, "full_tensor"):
                    raise ConfigError(
                        "Muon can't own a sharded parameter (DTensor)",
                        where=names[id(parameter)],
                        do="Use data parallelism (torchrun), where Muon's work is shared by ranks",
                    )
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
            shrunk = [p for p in group["params"] if p.grad is not None]
            if group["weight_decay"] and shrunk:
                torch._foreach_mul_(shrunk, 1 - group["lr"] * group["weight_decay"])
        chunks = self._plan(owners)
        if self.world == 1:
            for chunk in chunks:
                self._apply(chunk, owners, self._direction(chunk, owners))
        else:
            self._step_by_owner(chunks, owners)
        return loss

    def _step_by_owner(self, chunks: list[Chunk], owners: list[tuple[Tensor, dict]]) -> None:
        """Each rank orthogonalises its own chunks; see `ownership`."""
        costs = [ownership.flops(c.rows, c.cols, c.size, self.steps) for c in chunks]
        for turn in ownership.rounds(ownership.assign(costs, self.world), self.world):
            mine = [item for owner, item in turn if owner == self.rank]
            result_BNM = self._direction(chunks[mine[0]], owners) if mine else None
            for owner, item in turn:
                chunk = chunks[item]
                shape = (chunk.size, chunk.rows, chunk.cols)
                if owner == self.rank:
                    received_BNM = result_BNM.contiguous()
                else:
                    device = owners[0][0].device
                    received_BNM = self._buffer("received", shape, self.compute_dtype(), device)
                ownership.receive(received_BNM, owner)
                self._apply(chunk, owners, received_BNM)

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the multiplications."""
        if self.polynomial == "svd":
            return torch.float32
        return self.dtype or ortho.compute_dtype(self.param_groups[0]["params"][0].device)

    def _check_finite(self, parameters: list[Tensor]) -> None:
        norms = torch._foreach_norm([p.grad for p in parameters], float("inf"))
        if not torch.stack(norms).isfinite().all():
            bad = [
                self._names[id(p)]
                for p, n in zip(parameters, norms, strict=True)
                if not n.isfinite()
            ]
            raise TrainingError("the gradient is not finite", where=bad[0])

    def _accumulate(self, owners: list[tuple[Tensor, dict]]) -> None:
        buffers = [self.state[p]["momentum"] for p, _ in owners]
        gradients = [p.grad for p, _ in owners]
        if all(gradient.dtype == torch.float32 for gradient in gradients):
            torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
            return
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.lerp_(gradient.float(), 1 - self.momentum)

    def _plan(self, owners: list[tuple[Tensor, dict]]) -> list[Chunk]:
        key = tuple(id(p) for p, _ in owners)
        if key not in self._plans:
            matrices = [(i, tuple(p.shape), self._parts[id(p)]) for i, (p, _) in enumerate(owners)]
            most = CHUNK_ELEMENTS.get(owners[0][0].device.type, CHUNK_ELEMENTS["cuda"])
            self._plans[key] = plan_chunks(matrices, self.head_group, most)
        return self._plans[key]

    def _direction(self, chunk: Chunk, owners: list[tuple[Tensor, dict]]) -> Tensor:
        """Orthogonalised momentum of a chunk [size, rows, cols], in the compute dtype."""
        shape = (chunk.size, chunk.rows, chunk.cols)
        device = owners[0][0].device
        stage_BNM = self._buffer("stage", shape, torch.float32, device)
        for piece in chunk.pieces:
            parameter = owners[piece.index][0]
            buffer, slot = piece.of(self.state[parameter]["momentum"]), piece.at(stage_BNM)
            if self.nesterov:
                gradient = piece.of(parameter.grad).float()
                torch.lerp(gradient, buffer, self.momentum, out=slot)
            else:
                slot.copy_(buffer)
        if self.polynomial == "svd":
            return ortho.svd_polar(ortho.normalize_(stage_BNM, 1.0))
        polar_express = self.polynomial == "polar_express"
        ortho.normalize_(stage_BNM, ortho.SAFETY if polar_express else 1.0)
        dtype = self.compute_dtype()
        work_BNM = stage_BNM
        if dtype != torch.float32:
            work_BNM = self._buffer("work", shape, dtype, device).copy_(stage_BNM)
        return ortho.iterate_(work_BNM, ortho.coefficients(self.polynomial, self.steps))

    def _buffer(self, use: str, shape: tuple[int, ...], dtype, device) -> Tensor:
        """A view of the one reused buffer of this use, grown to the largest chunk seen."""
        size = math.prod(shape)
        held = self._buffers.get((use, dtype, device))
        if held is None or held.numel() < size:
            held = self._buffers[use, dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def _apply(self, chunk: Chunk, owners, result_BNM: Tensor) -> None:
        factor = shape_factor(self.scale, chunk.rows, chunk.cols, self.target_rms)
        for piece in chunk.pieces:
            parameter, group = owners[piece.index]
            piece.of(parameter).add_(piece.at(result_BNM), alpha=-group["lr"] * factor)
