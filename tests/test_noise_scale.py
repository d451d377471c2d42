"""Gradient noise: planted covariances are found, rows of unequal size included."""

import math

import pytest
import torch
from tiny_cache import tiny_cache, tiny_config

from shared.errors import ConfigError
from shared.log import read_json_lines
from stage2_train import noise_scale
from stage2_train.build import open_source, train_run
from stage2_train.noise_probe import noise_at, rows_of_one_epoch
from stage2_train.noise_scale import RowNorms, estimate, summary

DIMS, SIGNAL, SIGMA = 300, 0.5, 3.0


@pytest.mark.parametrize("sizes", [[16] * 8, [4, 8, 16, 64, 2, 30]])
def test_a_planted_noise_scale_is_found(sizes):
    """Elements with gradient N(G, S): tr(S) = 300 * 9, |G|^2 = 300 / 4, so the scale is 36."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(60):
        rows = [SIGNAL + SIGMA * torch.randn(n, DIMS, generator=generator) for n in sizes]
        total = float(torch.cat(rows).mean(0).square().sum())
        found.append(estimate([(len(r), float(r.mean(0).square().sum())) for r in rows], total))
    numbers = summary(found)
    assert numbers["trace"] == pytest.approx(DIMS * SIGMA**2, rel=0.05)
    assert numbers["signal"] == pytest.approx(DIMS * SIGNAL**2, rel=0.1)
    assert numbers["noise_scale"] == pytest.approx(36, rel=0.12)
    assert numbers["snr"] == pytest.approx(sum(sizes) / 36, rel=0.12)


def test_one_row_tells_nothing_apart():
    assert estimate([(8.0, 1.0)], 1.0) is None
    assert estimate([(8.0, 1.0), (0.0, 0.0)], 1.0) is None
    assert summary([]) is None
    assert summary([noise_scale.Estimate(1.0, -1.0, 2.0)])["noise_scale"] == math.inf


def test_row_norms_are_those_of_each_rows_own_mean_gradient():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    rows = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 4.0]])]
    norms = RowNorms([weight], weight=4.0)
    for row in rows:
        ((row @ weight).sum() / 4.0).backward()
        norms.add(float(len(row)), float(len(row)))
    expected = [(len(row), float(row.mean(0).square().sum())) for row in rows]
    assert norms.rows == [pytest.approx(pair) for pair in expected]


@pytest.mark.slow
def test_a_run_measures_it_without_changing_and_inspect_probes_a_checkpoint(tmp_path):
    tiny_cache(tmp_path / "cache")
    plain = tiny_config(tmp_path / "cache", tmp_path / "plain", steps=4)
    noisy = tiny_config(tmp_path / "cache", tmp_path / "noisy", steps=4,
                        diagnostics__noise_every=2, batch__rows_per_step=2)  # fmt: skip
    results = [train_run(cfg) for cfg in (plain, noisy)]
    assert results[0]["loss"] == results[1]["loss"], "measuring changes nothing"
    lines = [line for line in read_json_lines(tmp_path / "noisy/metrics.jsonl") if "loss" in line]
    assert ["noise/trace" in line for line in lines] == [False, True, False, True]
    assert lines[1]["noise/trace"] > 0
    assert lines[1]["noise/batch"] == lines[1]["supervised"] - lines[0]["supervised"]
    plan = open_source(noisy).plan
    most = len(plan.epoch_rows(2))  # more than are left of the epoch at update 4
    found = noise_at(tmp_path / "noisy", "last", noisy, most)
    assert found.trace > 0
    assert found.batch > lines[1]["noise/batch"]
    for number in (1, 1_000_000):
        with pytest.raises(ConfigError, match="an epoch of this run has"):
            noise_at(tmp_path / "noisy", "last", noisy, number)
    for step in range(6):
        rows = rows_of_one_epoch(plan, step, 4)
        samples = [index for row in rows for index in row.samples]
        assert len(samples) == len(set(samples)), "without replacement"
        assert rows[0].number >= 2 * step
