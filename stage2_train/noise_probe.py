"""The gradient noise scale at a checkpoint: one estimate from many rows at fixed parameters.

Sampling: the rows that the run's plan has next after the checkpoint, packed as in training, each
document once, without replacement, anchors as drawn for that epoch.
"""

from pathlib import Path

import torch

from stage2_train import checkpoint
from stage2_train.build import build_drafter, frozen, open_source
from stage2_train.config import LoaderConfig, TrainConfig
from stage2_train.loader import Loader, open_feed
from stage2_train.loss import batch_loss
from stage2_train.noise_scale import Estimate, RowNorms, estimate
from stage2_train.trainer import denominator


def noise_at(run_dir: Path, which: str, train: TrainConfig, num_rows: int) -> Estimate | None:
    """Forward and backward over `num_rows` rows on the CPU, without an update.

    Raises:
        CacheError, DataError: the run's cache can't be replayed.
    """
    path = checkpoint.find(run_dir, which)
    weights, _, state = checkpoint.load(path)
    source = open_source(train)
    spec, token = source.store.spec, source.cfg.drafter.mask_token_id
    drafter = build_drafter(source.cfg.drafter, spec, 0)
    checkpoint.load_parameters(drafter, weights, path)
    embed, head = frozen(source.store, torch.device("cpu"), torch.float32)
    head = drafter.head_rows(head)
    rows, step = [], int(state["step"])
    while len(rows) < num_rows:
        rows += source.plan.step(step)
        step += 1
    rows = rows[:num_rows]
    counts = [source.plan.slot_counts([row]) for row in rows]
    weight = denominator(source, sum(counts))
    feed = open_feed(
        source.plan, source.store.reader(), num_states=spec.num_states,
        hidden_size=spec.hidden_size, config=LoaderConfig(workers=0),
    )  # fmt: skip
    norms = RowNorms(drafter.parameters(), weight)
    with Loader(source.plan, feed, mask_token_id=token) as loader:
        for counts_K, (_, batch) in zip(counts, loader.batches(rows), strict=True):
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
