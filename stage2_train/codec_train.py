"""A drafter trained on each codec's decoded states: what a codec costs in acceptance.

Every arm replays the same snapshot, rows, anchors and initial weights (the digests prove it) and
differs in nothing but the codec of the states it reads. All arms are evaluated on the lossless
states and, for real acceptance, with the target itself.

K slots of a block after the anchor; S held-out samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import compose
from shared.errors import MismatchError
from shared.recode import recode
from shared.store import Store
from stage2_train.config import CodecReportConfig, EvalConfig, TrainConfig
from stage2_train.stats import Interval, from_draws, paired_t

DRAWS = 2000


@dataclass(frozen=True)
class Trained:
    """One run's evaluation: per held-out sample right and asked slots [S, K]; per prompt
    (committed tokens, passes) [P, 2], empty without decoding."""

    loss: float
    correct_SK: np.ndarray
    count_SK: np.ndarray
    prompts_P2: np.ndarray
    digest: str


def train_all(
    cfg: CodecReportConfig, codecs: list[str], say: Callable[[str], None]
) -> dict[str, list[Trained]]:
    """codec -> one evaluation a seed; `lossless` is the cache as it is. Goes on where it stopped.

    Raises:
        MismatchError: arms have seen different inputs.
    """
    from stage2_train.build import train_run

    store, out = Store.open(cfg.root), Path(cfg.out)
    snapshot = store.resolve(cfg.snapshot)
    found: dict[str, list[Trained]] = {}
    for codec in ["lossless", *codecs]:
        root = cfg.root
        if codec != "lossless":
            root = str(out / "caches" / codec)
            recode(store, codec, root)
        for seed in range(cfg.seeds):
            run_dir = out / "runs" / f"{codec}-{seed}"
            own = [
                f"cache.root={root}", f"cache.snapshot={snapshot}", f"run_dir={run_dir}",
                f"seed={seed}", f"init_seed={seed}", f"device={cfg.device}",
            ]  # fmt: skip
            train_run(compose("train", TrainConfig, [*cfg.overrides, *own]))
            found.setdefault(codec, []).append(_evaluate(cfg, store, run_dir))
            say(f"{codec}, seed {seed}: held-out loss {found[codec][-1].loss:.4f}")
    for seed in range(cfg.seeds):
        if len({runs[seed].digest for runs in found.values()}) > 1:
            raise MismatchError("the arms have seen different inputs", where=out / "runs")
    return found


def _evaluate(cfg: CodecReportConfig, store: Store, run_dir: Path) -> Trained:
    from stage2_train.build import resolve_device
    from stage2_train.evaluate import decode_prompts, load_run
    from stage2_train.heldout import heldout
    from stage2_train.loader import heldout_batches

    device = str(resolve_device(cfg.device))
    run = load_run(run_dir, device=device)
    run.store = store  # the lossless states, also for a drafter that was trained on others
    drafter = run.config.drafter
    batches = heldout_batches(run.snapshot, store.reader(), run.config, drafter.mask_token_id)
    rows = [
        heldout(
            run.drafter, [batch], run.embed_VD, run.head_VD, run.config.loss, drafter.block_size,
            device=device,
        )
        for batch in batches
    ]  # fmt: skip
    count_SK = np.array([row["slot_count"] for row in rows], np.float64)
    losses = [(row["samples"][0]["loss_sum"], row["samples"][0]["weight"]) for row in rows]
    prompts: list[list[float]] = []
    if cfg.max_prompts:
        settings = EvalConfig(
            run_dir=str(run_dir), max_prompts=cfg.max_prompts, max_new_tokens=cfg.max_new_tokens,
            batch_size=cfg.batch_size, target=cfg.target, device=cfg.device,
        )  # fmt: skip
        decoded = decode_prompts(run, settings, device)["prompts"]
        prompts = [[row["committed"], row["passes"]] for row in decoded]
    return Trained(
        loss=sum(loss for loss, _ in losses) / sum(weight for _, weight in losses),
        correct_SK=np.array([row["slot_accuracy"] for row in rows]) * count_SK,
        count_SK=count_SK,
        prompts_P2=np.array(prompts, np.float64).reshape(-1, 2),
        digest=run.record.result["digest"],
    )


def estimated(correct_K: np.ndarray, count_K: np.ndarray) -> np.ndarray:
    """1 + sum over slots of the product of accuracies up to it; leading axes are kept."""
    return 1 + np.cumprod(correct_K / np.maximum(count_K, 1), axis=-1).sum(-1)


def real(prompts_P2: np.ndarray) -> np.ndarray:
    """Committed tokens a pass; leading axes are kept."""
    return prompts_P2[..., 0] / np.maximum(prompts_P2[..., 1], 1)


def changes(lossless: list[Trained], other: list[Trained]) -> dict[str, Any]:
    """Relative change of acceptance, other / lossless - 1, each with its 95 % interval.

    Resamples held-out samples (estimated) and prompts (real), the same ones in both arms, seeds
    pooled; with three seeds or more there is also Student's t over the seeds' own changes.
    """
    found: dict[str, Any] = {}
    pairs = list(zip(lossless, other, strict=True))
    stacks = {
        "estimated": (
            [[np.stack([t.correct_SK, t.count_SK], 1) for t in pair] for pair in pairs],
            lambda sums: estimated(sums[..., 0, :], sums[..., 1, :]),
        ),
        "real": ([[t.prompts_P2 for t in pair] for pair in pairs], real),
    }
    for name, (items, figure) in stacks.items():
        if not items[0][0].size:
            continue
        sides = [np.sum([pair[side] for pair in items], axis=0) for side in (0, 1)]
        by_seed = [float(figure(b.sum(0)) / figure(a.sum(0)) - 1) for a, b in items]
        found[name] = {
            "lossless": float(figure(sides[0].sum(0))),
            "codec": float(figure(sides[1].sum(0))),
            "change": _ratio_change(sides[0], sides[1], figure),
            "by_seed": by_seed,
            "over_seeds": paired_t(by_seed) if len(by_seed) >= 3 else None,
        }
    return found


def _ratio_change(
    a_S: np.ndarray, b_S: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]
) -> Interval:
    """figure(sum b) / figure(sum a) - 1, resampling the first axis, the same items in both."""
    n, level, nan = len(a_S), 0.95, float("nan")
    mean = float(figure(b_S.sum(0)) / figure(a_S.sum(0)) - 1)
    if n < 4:
        return Interval(mean, nan, nan, level, "too few items", n)
    rng = np.random.Generator(np.random.Philox(0))
    counts = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(np.float64)
    drawn = figure(np.tensordot(counts, b_S, 1)) / figure(np.tensordot(counts, a_S, 1)) - 1
    method = f"bootstrap over {n} common items, {DRAWS} draws"
    return from_draws(mean, drawn, n, level, method, n)
