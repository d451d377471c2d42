"""What tests of the trainer share: a job, its gradients, and what a run has left behind."""

import os
import signal
from pathlib import Path

import torch

from shared.log import read_json_lines
from stage2_train import checkpoint, trainer
from stage2_train.build import assemble, begin, open_source
from stage2_train.ranks import Ranks


def parameters(run_dir, which="last"):
    return checkpoint.load(checkpoint.find(Path(run_dir), which))[0]


def equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def lines_of(run_dir, key="loss"):
    return [line for line in read_json_lines(Path(run_dir) / "metrics.jsonl") if key in line]


def job_of(cfg, tmp_path):
    source = open_source(cfg)
    record = begin(source, tmp_path)
    device = torch.device("cpu")
    tmp_path.mkdir(exist_ok=True)
    return assemble(source, record, tmp_path, device, Ranks(device))


def gradients_of(job, state=None):
    """Gradients of the first step, before clipping."""
    state = state or trainer.restore(job)
    rows = job.plan.step(state.step, job.total_rows)
    weight = trainer.denominator(job, job.plan.slot_counts(rows))
    share = trainer.accumulate(job, rows, job.loader.batches(rows), weight)
    assert share.error is None
    return {name: p.grad.clone() for name, p in job.drafter.named_parameters()}


def stop_after(monkeypatch, step):
    """SIGTERM arrives while update `step` (1-based) is computed."""
    original = trainer.update

    def update(job, state, batches, metrics):
        line = original(job, state, batches, metrics)
        if state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return line

    monkeypatch.setattr(trainer, "update", update)
