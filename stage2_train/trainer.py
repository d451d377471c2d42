"""The training loop.

An update, in order: accumulate the step's rows -> sum over ranks -> finite check -> global norm ->
clip -> optimizer -> next learning rate. The loss of every row is divided by the weight of all
supervised slots of the *step*, known from the plan before anything is read, so rows, micro-batches
and ranks only group a sum. A run is a pure function of its record: stopping and going on from a
checkpoint gives the same bits on the CPU.
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from shared.errors import DrafttapeError, Interrupted, TrainingError
from shared.log import note, progress
from stage2_train import checkpoint, noise_scale
from stage2_train.batch import Batch
from stage2_train.diagnostics import Diagnostics
from stage2_train.gradients import clip_gradients
from stage2_train.job import Job, Progress
from stage2_train.loss import batch_loss, slot_weights
from stage2_train.metrics import Metrics, step_flops
from stage2_train.noise_scale import RowNorms
from stage2_train.profiling import ProfileWindow
from stage2_train.saver import Saver, restore, save
from stage2_train.sharding import idle_batch
from stage2_train.steps import Row, chain


class StopSignals:
    """Turns SIGTERM, SIGUSR1 (a scheduler's warning before it ends a job) and the first Ctrl-C into
    a flag that is looked at between updates."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopSignals":
        self._old = {
            number: signal.signal(number, self._request)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        }
        return self

    def _request(self, number: int, _: Any) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def run(job: Job) -> dict[str, Any]:
    """Trains to the planned number of updates, from the newest checkpoint if there is one.

    Returns:
        The run's result: steps, final loss, held-out numbers, totals, digest.

    Raises:
        TrainingError: a loss or gradient is not finite.
        Interrupted: SIGTERM, SIGUSR1 or Ctrl-C; a checkpoint has been saved.
    """
    state = restore(job)
    asked = job.cfg.trainer
    metrics = Metrics(
        job.run_dir,
        state.step,
        tensorboard=asked.tensorboard,
        trackers=job.trackers(),
        is_main=job.ranks.is_main,
    )
    window = ProfileWindow(job.run_dir / "profile", asked.profile_start, asked.profile_steps)
    bar = progress(job.steps, "train", "step", initial=state.step, disable=not job.ranks.is_main)
    batches = job.loader.batches(_rows(job, state.step))
    saver = Saver(background=asked.async_checkpoint)
    last: dict[str, Any] = {}
    try:
        with StopSignals() as stop:
            while state.step < job.steps:
                window.before(state.step + 1)
                last = update(job, state, batches, metrics)
                window.after(state.step)
                bar.update()
                bar.set_postfix_str(_postfix(last, state), refresh=False)
                stopping = any(job.ranks.gather(stop.requested))
                done = state.step == job.steps
                due = _due(job, state.step)
                takes_part = job.ranks.is_main or job.ranks.cut
                measured = _measure(job, state, metrics) if due and takes_part else None
                every = asked.checkpoint_every
                if due or done or stopping or (every and state.step % every == 0):
                    save(job, state, last, measured, saver)
                if stopping and not done:
                    saver.wait()
                    raise Interrupted(
                        f"stopped after update {state.step} of {job.steps}; it is saved",
                        where=job.run_dir,
                        do="The same command goes on",
                    )
            saver.wait()
    finally:
        saver.close()
        window.close()
        bar.close()
        metrics.close()
    job.ranks.barrier()  # the first rank has put the last checkpoint in its place
    saved = checkpoint.load_state(checkpoint.find(job.run_dir, "last"))
    return {
        "step": state.step,
        "loss": saved["line"]["loss"],
        "digest": state.digest.hex(),
        "heldout": saved["heldout"],
        **state.totals,
    }


def _rows(job: Job, start: int) -> Iterator[Row]:
    for step in range(start, job.steps):
        yield from job.plan.step(step, job.total_rows)[job.ranks.rank :: job.ranks.world]


def update(
    job: Job, state: Progress, batches: Iterator[tuple[Row, Batch]], metrics: Metrics
) -> dict[str, Any]:
    """One update: all rows of the next step, then the optimizer. Advances `state`."""
    began = time.perf_counter()
    cfg, plan = job.cfg, job.plan
    rows = plan.step(state.step, job.total_rows)
    counts_K = plan.slot_counts(rows)
    job.optimizer.zero_grad(set_to_none=True)
    share = accumulate(job, rows, batches, denominator(job, counts_K), noise=_noise_due(job, state))
    shares = job.ranks.gather(share)
    for other in shares:
        if other.error is not None:
            raise other.error  # the same one on every rank
    named = list(job.drafter.named_parameters())
    job.ranks.sum_gradients(parameter for _, parameter in named if parameter.requires_grad)
    if not counts_K.any():
        job.optimizer.zero_grad(set_to_none=True)  # nothing to learn from, so nothing moves
    losses = _interleave([other.losses for other in shares])
    loss = float(np.sum(losses))
    report = clip_gradients(named, cfg.trainer.clip.value, cfg.trainer.clip_norm)
    finite = bool(np.isfinite(loss)) and not report.nonfinite
    job.optimizer.set_lr(job.factor(state.step))
    measured: dict[str, float] = {}
    if finite:
        watch = Diagnostics(job.optimizer, cfg.diagnostics.every, layers=cfg.diagnostics.layers)
        watch.before(state.step + 1)
        job.optimizer.step(checked=True)
        measured = watch.after(report)
        noise = noise_scale.estimate([r for s in shares for r in s.noise], report.norm**2)
        if noise is not None:
            measured |= {f"noise/{key}": value for key, value in asdict(noise).items()}
        state.bad_in_row = 0
    else:
        state.bad_in_row += 1
        state.totals["skipped"] += 1
        _explain(job, state, rows, losses, report.nonfinite)
    state.step += 1
    state.digest = chain(state.digest, _interleave([other.digests for other in shares]))
    tokens, blocks = sum(other.tokens for other in shares), sum(other.blocks for other in shares)
    totals = state.totals
    totals["tokens"] += tokens
    totals["blocks"] += blocks
    totals["supervised"] += int(counts_K.sum())
    totals["flops"] += step_flops(
        job.drafter, job.head, tokens=tokens, blocks=blocks, block=plan.block
    )
    totals["data_wait"] += share.wait
    totals["seconds"] += time.perf_counter() - began
    line = {
        "loss": loss,
        "accuracy": sum(other.correct for other in shares) / max(1, int(counts_K.sum())),
        "lr": job.optimizer.param_groups[0]["lr"],
        "grad_norm": report.norm,
        "clipped": report.clipped,
        "epoch": rows[-1].epoch,
    }
    line |= {f"lr_{group['name']}": group["lr"] for group in job.optimizer.param_groups[1:]}
    metrics.write(state.step, **line, **measured, **(totals | {"skipped": not finite}))
    metrics.digest(state.step, state.digest)
    if state.bad_in_row >= cfg.trainer.max_bad_steps:
        raise TrainingError(
            f"{state.bad_in_row} updates in a row had a non-finite loss or gradient, the last one "
            f"update {state.step} with samples {_names(job, rows)}",
            where=job.run_dir,
            do="Lower the learning rate, or look at these samples; the last checkpoint is whole",
        )
    return line


def denominator(job: Job, counts_K: np.ndarray) -> float:
    """The weight of all supervised slots of a step, over all rows and ranks."""
    ones = torch.ones(1, len(counts_K), dtype=torch.float64)
    weight_K = slot_weights(ones, job.cfg.loss.gamma)[0]
    return float(weight_K @ torch.from_numpy(counts_K).double())


@dataclass
class Share:
    """What this rank's rows of a step gave; gradients stay in the parameters."""

    digests: list[bytes] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    correct: float = 0.0
    tokens: int = 0
    blocks: int = 0
    wait: float = 0.0
    noise: list[tuple[float, float]] = field(default_factory=list)
    error: DrafttapeError | None = None


def _noise_due(job: Job, state: Progress) -> bool:
    """Whether the next update measures gradient noise; cut gradients are not measured."""
    every = job.cfg.diagnostics.noise_every
    return bool(every) and (state.step + 1) % every == 0 and not job.ranks.cut


def accumulate(
    job: Job,
    rows: list[Row],
    batches: Iterator[tuple[Row, Batch]],
    weight: float,
    *,
    noise: bool = False,
) -> Share:
    """Forward and backward over this rank's rows; an error becomes part of the share."""
    share = Share()
    norms = RowNorms(job.drafter.parameters(), weight) if noise else None
    numbers: list[torch.Tensor] = []
    mine = len(rows[job.ranks.rank :: job.ranks.world])
    passes = -(-len(rows) // job.ranks.world) if job.ranks.cut else mine
    for turn in range(passes):
        if job.ranks.cut and hasattr(job.drafter, "set_requires_all_reduce"):
            job.drafter.set_requires_all_reduce(turn == passes - 1)
        job.upload.release()
        batch = _next(batches, share) if turn < mine and share.error is None else None
        if batch is not None:
            share.digests.append(batch.digest(job.plan.block))
            share.tokens += batch.num_tokens
            share.blocks += batch.num_anchors
            loss, stats = forward(job, job.upload(batch), weight)
        elif job.ranks.cut:
            loss, stats = _idle(job), None
        else:
            break
        if loss.requires_grad:
            loss.backward()
        if norms is not None and stats:
            row = rows[job.ranks.rank + turn * job.ranks.world]
            counts_K = job.plan.slot_counts([row])
            norms.add(float(counts_K.sum()), denominator(job, counts_K))
        if stats is not None:
            right = stats["correct"].sum() if stats else loss.detach()
            numbers.append(torch.stack([loss.detach().double(), right.double()]))
    if numbers:  # one wait for the device a step
        pairs = torch.stack(numbers).tolist()
        share.losses, share.correct = [p[0] for p in pairs], sum(p[1] for p in pairs)
    if norms is not None:
        share.noise = norms.rows
    return share


def _next(batches: Iterator[tuple[Row, Batch]], share: Share) -> Batch | None:
    """The next row; an error becomes part of the share, so that all ranks end with it."""
    asked = time.perf_counter()
    try:
        return next(batches)[1]
    except DrafttapeError as error:
        share.error = error
        return None
    finally:
        share.wait += time.perf_counter() - asked


def _idle(job: Job) -> torch.Tensor:
    """A pass that adds nothing: where matrices are cut, all ranks gather them together."""
    drafter = job.drafter
    batch = idle_batch(drafter.num_states, drafter.hidden_size, job.device)
    return drafter(batch, job.embed).sum() * 0


def forward(job: Job, batch: Batch, weight: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """A row's part of the step's loss, and what its slots did.

    A row without a slot that counts adds nothing and is not computed.

    Args:
        job: drafter, frozen head and embedding, loss settings.
        batch: the row, on the device.
        weight: the denominator of the whole step.
    """
    if weight == 0 or not batch.num_anchors:
        return _idle(job) if job.ranks.cut else torch.zeros((), device=job.device), {}
    return batch_loss(
        job.drafter(batch, job.embed),
        batch,
        job.head,
        job.cfg.loss,
        num_states=job.drafter.num_states,
        denominator=weight,
        ids_S=job.drafter.draft_ids,
    )


def _interleave(parts: list[list[Any]]) -> list[Any]:
    """Rank r has rows r, r+W, …: back to the order of the rows."""
    longest = max(map(len, parts))
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def _explain(
    job: Job, state: Progress, rows: list[Row], losses: list[float], gradients: tuple[str, ...]
) -> None:
    """Says which samples and gradients are behind a skipped update.

    Raises:
        TrainingError: the stored states themselves are not finite.
    """
    bad = [row for row, loss in zip(rows, losses, strict=True) if not np.isfinite(loss)] or rows
    for row in bad:
        for index in row.samples:
            name = job.plan.snapshot.ids[index]
            hidden = job.reader.read(name)[1]
            if ((np.asarray(hidden) & 0x7F80) == 0x7F80).any():
                source = getattr(job.plan.snapshot, "source", None)
                raise TrainingError(
                    "its stored states are not finite"
                    + (f" (from {source[index]})" if source is not None else ""),
                    where=f"sample {name}",
                    do="Extract into a new cache; stage one rejects such samples",
                )
    where = f", first in {gradients[0]}" if gradients else ""
    if job.ranks.is_main:
        note(
            f"update {state.step + 1} skipped: the loss or a gradient is not finite{where}; "
            f"samples {_names(job, bad)}"
        )


def _names(job: Job, rows: list[Row], most: int = 8) -> str:
    names = [job.plan.snapshot.ids[index] for row in rows for index in row.samples]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _postfix(line: dict[str, Any], state: Progress) -> str:
    totals = state.totals
    seconds = max(totals["seconds"], 1e-9)
    return (
        f"loss {line['loss']:.3f} lr {line['lr']:.1e} {totals['tokens'] / seconds:.0f} tok/s "
        f"wait {totals['data_wait'] / seconds:.0%}"
    )


def _due(job: Job, step: int) -> bool:
    """Whether the held-out split is measured after this update."""
    every = job.cfg.trainer.eval_every
    return job.heldout is not None and (step == job.steps or bool(every and step % every == 0))


def _measure(job: Job, state: Progress, metrics: Metrics) -> dict[str, Any]:
    assert job.heldout is not None
    measured = job.heldout()
    measured = {key: value for key, value in measured.items() if key != "samples"}
    metrics.write(state.step, **measured)
    return measured
