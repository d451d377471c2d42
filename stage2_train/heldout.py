"""Held-out loss and accuracy: fixed documents, fixed anchors, so equal weights give equal numbers.

N anchors, B block, K = B-1 predicted slots.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shared.errors import DataError, TrainingError
from stage2_train.batch import Batch
from stage2_train.config import LossConfig
from stage2_train.loss import block_loss, estimated_acceptance, slot_weights


@torch.no_grad()
def heldout(
    drafter: Any,
    batches: Iterable[Batch],
    embed_VD: Tensor,
    head_VD: Tensor,
    loss_cfg: LossConfig,
    block_size: int,
    *,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Evaluates a drafter over held-out batches, best one document a row.

    A label outside the draft vocabulary counts as wrong, and costs what chance over the whole
    vocabulary does (ln V) in the loss.

    Returns:
        `heldout_loss` (weighted as in training, over all slots), `accuracy` (all slots),
        `slot_accuracy` [K], `slot_count` [K], `estimated_acceptance` (tokens per target pass with
        the bonus token, if slots were right independently), and `samples`: one row a batch with
        `sample_id`, `loss_sum`, `weight`, `correct`, `count`, which paired intervals need.

    Raises:
        TrainingError: the loss is not finite; names the sample.
        DataError: nothing to evaluate.
    """
    training, rows = drafter.training, []
    slots = block_size - 1
    correct_K, count_K = torch.zeros(slots), torch.zeros(slots)
    drafter.eval()
    try:
        for batch in batches:
            batch = batch if device is None else batch.to(device)
            label_NK, mask_NK = batch.labels(block_size)
            weight_NK = slot_weights(mask_NK, loss_cfg.gamma)
            loss, sums = block_loss(
                drafter(batch, embed_VD),
                label_NK,
                weight_NK,
                head_VD,
                denominator=1.0,
                chunk=loss_cfg.chunk,
                ids_S=drafter.draft_ids,
            )
            loss = loss + sums["missed"] * math.log(len(embed_VD))
            names = ",".join(batch.sample_ids)
            if not torch.isfinite(loss):
                raise TrainingError(
                    "the held-out loss is not finite", where=f"sample {names}",
                    do="Check the cache (drafttape cache verify) and the run's metrics",
                )  # fmt: skip
            correct_K += sums["correct"].cpu()
            count_K += sums["count"].cpu()
            rows.append(
                {
                    "sample_id": names,
                    "loss_sum": float(loss),
                    "weight": float(weight_NK.double().sum()),
                    "correct": int(sums["correct"].sum()),
                    "count": int(sums["count"].sum()),
                }
            )
    finally:
        drafter.train(training)
    weight = sum(row["weight"] for row in rows)
    if not weight:
        raise DataError(
            "the held-out split has no supervised position to predict",
            do="Extract with a larger data.heldout",
        )
    return {
        "heldout_loss": sum(row["loss_sum"] for row in rows) / weight,
        "accuracy": float(correct_K.sum() / count_K.sum()),
        "slot_accuracy": (correct_K / count_K.clamp(min=1)).tolist(),
        "slot_count": count_K.int().tolist(),
        "estimated_acceptance": estimated_acceptance(correct_K, count_K),
        "samples": rows,
    }
