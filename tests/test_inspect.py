"""The `inspect` word on a tiny trained run."""

import json

import pytest
from tiny_cache import tiny_cache, tiny_config

from shared.errors import DrafttapeError
from stage2_train.build import train
from stage2_train.config import DiagnosticsConfig, InspectConfig, OptimizerName
from stage2_train.inspect_run import inspect, load_matrices


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OptimizerName))
def test_inspect_writes_one_page(tmp_path, name, capsys):
    tiny_cache(tmp_path / "cache")
    run_dir = tmp_path / "run"
    config = tiny_config(tmp_path / "cache", run_dir, optimizer=name.value)
    config.diagnostics = DiagnosticsConfig(every=1, layers=True)
    train(config)
    lines = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert any(f"{name.value}/update_rms" in line for line in lines)
    assert inspect(InspectConfig(run_dir=str(run_dir))) == 0
    page = (run_dir / "inspect.html").read_text()
    for word in ("update RMS", "Entropy by role", "What is not covered", "Spectra of the updates"):
        assert word in page
    assert "Content-Security-Policy" in page
    weights, updates, routing = load_matrices(run_dir, "last", config)
    assert {row.name for row in routing.owned("muon")} == set(updates)
    assert all(updates[key].shape == weights[key].shape for key in updates)
    assert "inspect.html" in capsys.readouterr().out


def test_inspect_of_nothing_is_one_sentence(tmp_path):
    with pytest.raises(DrafttapeError):
        inspect(InspectConfig(run_dir=str(tmp_path / "nowhere")))
