"""The gradient noise scale at a checkpoint: one estimate from many rows at fixed parameters.

Sampling: rows of the run's plan after the checkpoint, packed as in training, all of one epoch (the
next one, if the rest of this one is too short): each document once, without replacement, anchors as
drawn for that epoch.
"""

from dataclasses import replace
from pathlib import Path

import torch

from shared.errors import ConfigError
from shared.log import note, progress
from stage2_train import checkpoint
from stage2_train.build import build_drafter, frozen, open_source
from stage2_train.config import LoaderConfig, TrainConfig
from stage2_train.loader import Loader, open_feed
from stage2_train.loss import batch_loss
from stage2_train.noise_scale import Estimate, RowNorms, estimate
from stage2_train.steps import Row, StepPlan
from stage2_train.trainer import denominator


def noise_at(run_dir: Path, which: str, train: TrainConfig, num_rows: int) -> Estimate | None:
    """Forward and backward over `num_rows` rows on the CPU, without an update.

    Raises:
        ConfigError: fewer than two rows, or more than an epoch has.
        CacheError, DataError: the run's cache can't be replayed.
    """
    path = checkpoint.find(run_dir, which)
    weights, _, state = checkpoint.load(path)
    # The ids lie in the checkpoint, whatever became of their file.
    source = open_source(replace(train, drafter=replace(train.drafter, draft_vocabulary_ids=None)))
    rows = rows_of_one_epoch(source.plan, int(state["step"]), num_rows)
    spec, token = source.store.spec, source.cfg.drafter.mask_token_id
    drafter = build_drafter(source.cfg.drafter, spec, 0)
    checkpoint.load_parameters(drafter, weights, path)
    embed, head = frozen(source.store, torch.device("cpu"), torch.float32)
    head = drafter.head_rows(head)
    tokens = sum(piece.stop - piece.start for row in rows for piece in row.pieces)
    gigabytes = tokens * spec.num_states * spec.hidden_size * 2 / 1e9
    note(f"gradient noise: {num_rows} rows, {tokens:,} tokens, {gigabytes:.2g} GB of states")
    counts = [source.plan.slot_counts([row]) for row in rows]
    weight = denominator(source, sum(counts))
    feed = open_feed(
        source.plan, source.store.reader(), num_states=spec.num_states,
        hidden_size=spec.hidden_size, config=LoaderConfig(workers=0),
    )  # fmt: skip
    norms = RowNorms(drafter.parameters(), weight)
    bar = progress(num_rows, "gradient noise", "row")
    with Loader(source.plan, feed, mask_token_id=token) as loader, bar:
        for counts_K, (_, batch) in zip(counts, loader.batches(rows), strict=True):
            bar.update()
            if not counts_K.any():
                continue
            loss, _ = batch_loss(
                drafter(batch, embed), batch, head, source.cfg.loss,
                num_states=drafter.num_states, denominator=weight, ids_S=drafter.draft_ids,
            )  # fmt: skip
            loss.backward()
            norms.add(float(counts_K.sum()), denominator(source, counts_K))
    total = sum(float(p.grad.double().square().sum()) for p in norms.parameters
                if p.grad is not None)  # fmt: skip
    return estimate(norms.rows, total)


def rows_of_one_epoch(plan: StepPlan, step: int, num_rows: int) -> list[Row]:
    """So many rows of one epoch, the first ones after `step` updates that have so many behind them.

    Raises:
        ConfigError: fewer than two, or more than the epoch has.
    """
    first = plan.row(step * plan.batch.rows_per_step)
    start, epoch = first.number, first.epoch
    if plan.first_row(epoch + 1) - start < num_rows:
        start, epoch = plan.first_row(epoch + 1), epoch + 1
    most = plan.first_row(epoch + 1) - start
    if not 2 <= num_rows <= most:
        raise ConfigError(
            f"{num_rows} rows: an estimate needs two, and an epoch of this run has {most}",
            where="noise_rows", do="Set it to 0 for none",
        )  # fmt: skip
    return [plan.row(number) for number in range(start, start + num_rows)]
