"""What a sweep's report draws: schedules at one peak, cooldowns, batch against noise, budgets."""

import json
import math

import numpy as np
import pytest

from stage2_train import sweep_plots, sweep_report
from tests import browser

LRS = [1e-3, 3e-3, 1e-2]


def row(arm, loss, seed=0, **columns):
    return {
        "trial": f"{arm}-{abs(hash((loss, *columns.values())))}-{seed}", "arm": arm,
        "state": "done", "attempts": 0, "error": None, "seconds": 1.0, "rung": 0,
        "set.seed": seed, "heldout_loss": loss, "accuracy": 0.1,
    } | {key.replace("__", "."): value for key, value in columns.items()}  # fmt: skip


def full_sweep():
    """Two arms over lr x batch x schedule at three budgets, noise scale 400, and cooldowns."""
    rows = []
    for arm, gain in (("adamw", 0.0), ("<b>muon", 0.2)):
        for batch in (1, 2, 4, 8):
            for budget in (1e15, 4e15, 1.6e16):
                best = 3e-3 * (budget / 1e15) ** -0.25 * math.sqrt(batch)
                for lr in LRS:
                    for shape in ("cosine", "wsd"):
                        loss = 4 - gain - budget / 1e17 + math.log(lr / best) ** 2 / 20
                        rows.append(row(
                            arm, loss + 0.01 * (shape == "wsd"), set__optimizer__lr=lr,
                            set__batch__rows_per_step=batch, set__schedule=shape,
                            result__flops=budget, result__supervised=100 * batch * 50,
                            result__step=50, result__tokens=512 * batch * 50,
                            result__noise_scale=400.0 + batch,
                        ))  # fmt: skip
    rows += [row("adamw", 4 - at / 400, set__cooldown__at=at) for at in (100, 200, 400)]
    return rows


@pytest.mark.slow
def test_every_axis_has_its_plot():
    rows = full_sweep()
    assert [i.name for i in sweep_plots.shapes(rows)] == ["shapes-0", "shapes-1"]
    (cooled,) = sweep_plots.cooldowns(rows)
    assert "One trunk, several budgets" in cooled.caption
    sizes = sweep_plots.per_batch(rows)["adamw"]
    assert [size for size, _, _ in sizes] == [100, 200, 400, 800]
    lrs = [lr for _, lr, _ in sizes]
    assert lrs == sorted(lrs)
    assert lrs[-1] > lrs[0], "the planted best lr grows with the batch"
    noise, surge = sweep_plots.batches(rows)
    assert "adamw 403.0" in noise.caption
    assert "surge" in surge.caption
    assert sweep_plots.noise_of(rows)["adamw"] == 403.0
    assert not sweep_plots.batches([r for r in rows if r.get("set.batch.rows_per_step") == 1])


def test_best_lr_and_best_batch_are_fitted_over_budgets_with_residuals():
    budgets = [1e15, 4e15, 1.6e16]
    rows = [
        row("a", 3 + abs(math.log(lr / (0.3 * c**-0.125))), set__optimizer__lr=lr,
            result__flops=c, result__tokens=1000.0 * (c / 1e15) ** 0.5, result__step=1)
        for c in budgets for lr in np.geomspace(1e-3, 1e-2, 41)
    ]  # fmt: skip
    fits = sweep_report.analyse(rows, tolerance=0.01)["budgets"]
    assert [what for _, what, _ in fits] == ["learning rate", "batch in tokens"]
    law = fits[0][2]
    assert law.exponent == pytest.approx(-0.125, abs=0.01)
    assert law.low < law.predicted < law.high
    assert len(law.residuals) == 3
    assert fits[1][2].exponent == pytest.approx(0.5)
    html = sweep_report.fits_html(rows, sweep_report.analyse(rows, tolerance=0.01))
    assert "prediction interval" in html
    assert "residual of log" in html
    assert "Priors at C" in html
    assert "not fitted here" in html


@pytest.mark.slow
def test_the_whole_report_in_a_browser(tmp_path):
    rows = full_sweep()
    found = sweep_report.analyse(rows, tolerance=0.01) | {"bias": "a <bias>"}
    sweep_report.write(tmp_path / "report.html", "full", rows, found)
    script = """return [document.querySelectorAll('.plot .bk-Figure, .plot canvas').length > 0,
      document.querySelectorAll('.plot').length, document.body.innerText.includes('a <bias>'),
      document.querySelectorAll('b').length];"""
    page = browser.load(tmp_path / "report.html", script=script)
    assert page.console == []
    _, plots, bias, tags = json.loads(browser.result(page))
    assert plots == len(sweep_plots.all_plots(rows, found)) > 8
    assert bias
    assert tags == 0, "an arm's name is text"
