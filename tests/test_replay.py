"""Replay on a real cache: container and workers change nothing, one other anchor is refused."""

import shutil

import pytest
import torch
from rank_main import Run
from test_ranks import start
from tiny_cache import MASK_TOKEN, STATES, WIDTH, tiny_config

from shared import cli
from shared.log import read_json_lines
from shared.store import Store
from stage2_train import noise
from stage2_train.build import open_source, train_run
from stage2_train.compare import analyse
from stage2_train.config import CompareConfig, LoaderConfig
from stage2_train.loader import Loader, open_feed

STEPS = 6


def batches(root, workers):
    """Everything that an optimizer is fed in a few steps over more than one epoch."""
    source = open_source(tiny_config(root, root / "run"))
    plan = source.plan
    feed = open_feed(
        plan,
        source.store.reader(),
        num_states=STATES,
        hidden_size=WIDTH,
        config=LoaderConfig(workers=workers, prefetch=2),
    )
    rows = [row for step in range(STEPS) for row in plan.step(step)]
    assert {row.epoch for row in rows} > {0}
    with Loader(plan, feed, mask_token_id=MASK_TOKEN) as loader:
        return [
            (
                row.number,
                batch.sample_ids,
                batch.digest(plan.block),
                batch.input_ids_T.tolist(),
                batch.hidden_TLD.view(torch.int16).numpy().tobytes(),
            )
            for row, batch in loader.batches(rows)
        ]


@pytest.mark.slow
def test_trap_19_both_containers_and_0_and_2_workers_give_the_same_batches(cache, tmp_path):
    shutil.copytree(cache, tmp_path / "tar")
    assert Store.open(tmp_path / "tar").convert("webdataset") > 1
    plain = batches(cache, workers=0)
    assert len(plain) == 2 * STEPS
    assert batches(tmp_path / "tar", workers=2) == plain


def trained(run_dir):
    """(digest chain, losses) of a finished run, as they stand in its files."""
    losses = [line["loss"] for line in read_json_lines(run_dir / "metrics.jsonl") if "loss" in line]
    return [line["digest"] for line in read_json_lines(run_dir / "digests.jsonl")], losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_container_place_workers_and_ranks_change_nothing(cache, tmp_path, s3, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    shutil.copytree(cache, tmp_path / "tar")
    Store.open(tmp_path / "tar").convert("webdataset")
    import s3fs

    for name, root in (("zarr", cache), ("tar", tmp_path / "tar")):
        s3fs.S3FileSystem().put(str(root), f"{s3}-{name}", recursive=True)
    ways = [(cache, 0), (cache, 1), (tmp_path / "tar", 2), (f"{s3}-zarr", 0), (f"{s3}-tar", 1)]
    found = []
    for number, (root, workers) in enumerate(ways):
        keys = {"batch__rows_per_step": 3, "batch__tokens_per_row": 30, "loader__workers": workers}
        train_run(tiny_config(root, tmp_path / str(number), steps=5, **keys))
        found.append(trained(tmp_path / str(number)))
    assert len(found[0][0]) == 5
    assert all(other == found[0] for other in found[1:])
    for number, root in enumerate((cache, f"{s3}-tar")):
        run_dir = tmp_path / f"ranks-{number}"
        codes, texts = start(2, [Run(str(root), str(run_dir), optimizer="adamw")])
        assert codes == [[0], [0]], texts
        digests, losses = trained(run_dir)
        assert digests == found[0][0]
        assert losses == pytest.approx(found[0][1], rel=1e-6)


@pytest.mark.slow
def test_one_changed_anchor_seed_makes_compare_refuse_and_name_the_step(
    cache, tmp_path, monkeypatch, capsys
):
    def train(name, optimizer):
        train_run(tiny_config(cache, tmp_path / name, steps=STEPS, optimizer=optimizer))
        return str(tmp_path / name)

    adamw, muon = train("adamw", "adamw"), train("muon", "muon")
    report = tmp_path / "report.html"
    summary, _ = analyse(CompareConfig(runs=[adamw, muon], report=str(report)))
    assert summary["digests_equal"] is True

    plan = open_source(tiny_config(cache, tmp_path / "x")).plan
    draw = noise.anchors

    def changes(row, index):
        key = row.epoch, plan.snapshot.ids[index], plan.snapshot.mask(index)
        most = plan.batch.anchors_per_sample, plan.block
        return draw(0, *key, *most).tolist() != draw(1, *key, *most).tolist()

    step, epoch, name = next(
        (step, row.epoch, plan.snapshot.ids[index])
        for step in range(2, STEPS)
        for row in plan.step(step)
        for index in row.samples
        if changes(row, index)
    )

    def anchors(seed, at, sample, *rest):
        return draw(seed + ((at, sample) == (epoch, name)), at, sample, *rest)

    monkeypatch.setattr(noise, "anchors", anchors)
    changed = train("changed", "muon")
    assert cli.main(["compare", adamw, changed, f"report={report}"]) == 2
    assert f"from step {step + 1} on" in capsys.readouterr().err
    assert not report.exists()
