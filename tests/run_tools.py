"""Run directories as `drafttape train` and `eval` leave them, made from numbers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np


def chain(steps: int, seed: int, changed_at: int | None = None) -> list[str]:
    """A digest chain; from `changed_at` on it is another one."""
    digest, found = f"seed {seed}".encode(), []
    for step in range(1, steps + 1):
        extra = b"another anchor" if step == changed_at else b""
        digest = hashlib.blake2b(digest + extra, digest_size=16).digest()
        found.append(digest.hex())
    return found


def write_run(
    path: Path,
    *,
    loss: np.ndarray,
    seed: int = 0,
    init_seed: int | None = None,
    optimizer: dict[str, Any] | None = None,
    seconds_per_step: float = 1.0,
    digests: list[str] | None = None,
    evaluation: dict[str, Any] | None = None,
    **record: Any,
) -> Path:
    """Writes one run directory and returns it."""
    path.mkdir(parents=True)
    steps = len(loss)
    config = {
        "run_dir": str(path),
        "seed": seed,
        "init_seed": seed if init_seed is None else init_seed,
        "optimizer": optimizer or {"name": "adamw", "lr": 6e-4},
        "batch": {"tokens_per_row": 512, "rows_per_step": 1, "anchors_per_sample": 8},
        "drafter": {"block_size": 16},
        "trainer": {"steps": steps, "keep": 2},
        "cache": {"root": "cache", "snapshot": "latest"},
    }
    run = {
        "config": config, "snapshot": "5n4p", "spec_digest": "5p3c", "codecs": ["lossless"],
        "plan": {"seed": seed, "block": 16}, "steps": steps, "format": 1,
    } | record  # fmt: skip
    (path / "run.json").write_text(json.dumps(run))
    lines = [
        {
            "step": k + 1, "loss": float(loss[k]), "tokens": 512 * (k + 1),
            "supervised": 100 * (k + 1), "seconds": seconds_per_step * (k + 1),
            "flops": 1e9 * (k + 1), "data_wait": 0.01 * (k + 1), "lr": 1e-3, "grad_norm": 1.0,
            "clipped": k % 4 == 0, "skipped": False, "time": 0.0,
        }
        for k in range(steps)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    links = digests or chain(steps, seed)
    (path / "digests.jsonl").write_text(
        "".join(json.dumps({"step": k + 1, "digest": d}) + "\n" for k, d in enumerate(links))
    )
    if evaluation is not None:
        (path / "eval.json").write_text(json.dumps(evaluation))
    return path


def evaluation(loss: float, *, acceptance: float = 1.5, samples: int = 12, noise: float = 0.0,
               seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """eval.json around a held-out loss; samples differ much, runs little."""
    rng = np.random.default_rng(7)
    hard = rng.normal(0, 0.5, samples)
    hard -= hard.mean()
    jitter = np.random.default_rng(seed).normal(0, noise, samples)
    losses = loss + hard + jitter
    passes = rng.integers(20, 40, samples)
    return {
        "format": "drafttape.eval.v1",
        "step": 100,
        "heldout_loss": float(losses.mean()),
        "accuracy": 0.25,
        "slot_accuracy": [0.5 / (1 + 0.2 * k) for k in range(15)],
        "estimated_acceptance": acceptance + 0.1,
        "real_acceptance": acceptance,
        "output_identical": [samples, samples],
        "tokens_per_s": 40.0,
        "plain_tokens_per_s": 30.0,
        "speedup": 40 / 30,
        "samples": [
            {"sample_id": f"s{i}", "loss_sum": float(losses[i] * 10), "weight": 10.0,
             "correct": 25, "count": 100}
            for i in range(samples)
        ],
        "prompts": [
            {"id": f"s{i}", "committed": float(acceptance * passes[i]), "passes": int(passes[i])}
            for i in range(samples)
        ],
    }  # fmt: skip


def learning(steps: int, *, seed: int = 0, gain: float = 0.0, own: float = 0.01,
             arm: int = 0) -> np.ndarray:  # fmt: skip
    """A loss curve: a trend, batch noise common to all arms of a seed, and a little of its own."""
    batches = np.random.default_rng([seed, 1]).normal(0, 0.15, steps)
    rough = np.random.default_rng([seed, 2, arm]).normal(0, own, steps)
    trend = 4 + 4 * np.exp(-np.arange(steps) / 30)
    return trend + batches + rough - gain
