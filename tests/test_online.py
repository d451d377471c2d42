"""The target in the training loop against the cache: same digests, states and losses."""

import json

import numpy as np
import pytest
import torch
from tiny_cache import tiny_config

from shared.config import compose
from shared.errors import MismatchError
from shared.log import read_json_lines
from shared.record import read_record
from shared.store import Store
from stage1_extract.build import extract
from stage1_extract.config import ExtractConfig
from stage2_train.build import train_run
from stage2_train.config import LongDocuments, Source
from stage2_train.online import open_online

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online")
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}."},
                {"role": "assistant", "content": f"{n} is what you asked for, " * (1 + n % 3)},
            ]
        }
        for n in range(12)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = [
        "target=tiny_qwen3_5",
        f"data.paths=[{folder / 'chats.jsonl'}]",
        f"cache.root={folder / 'cache'}",
        "device=cpu",
    ]
    assert not extract(compose("extract", ExtractConfig, overrides))
    return folder / "cache"


def test_online_and_cached_runs_are_the_same_run(cache, tmp_path):
    for name, source in (("cache", Source.cache), ("online", Source.online)):
        for long in (LongDocuments.error, LongDocuments.window):
            cfg = tiny_config(cache, tmp_path / f"{name}-{long.value}", steps=3, source=source)
            cfg.batch.tokens_per_row = 300 if long is LongDocuments.error else 48
            cfg.batch.long_documents = long
            train_run(cfg)
    for long in ("error", "window"):
        runs = [tmp_path / f"{name}-{long}" for name in ("cache", "online")]
        assert len({read_record(run).result["digest"] for run in runs}) == 1
        losses = [
            [line["loss"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line]
            for run in runs
        ]
        # Documents are batched otherwise than at extraction: rounding in bfloat16, no more.
        assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_online_states_are_the_caches_within_rounding(cache):
    store = Store.open(cache)
    feed = open_online(store, torch.device("cpu"), 200)
    names = store.snapshot().ids[:5]
    states = feed.states([feed.reader.read_tokens(name) for name in names])
    for name, state in zip(names, states, strict=True):
        stored = store.reader().read(name)[1]
        pair = [
            torch.from_numpy(np.array(part).view(np.int16)).view(torch.bfloat16).float()
            for part in (state, stored)
        ]
        assert pair[0].shape == pair[1].shape
        assert (pair[0] - pair[1]).norm() / pair[1].norm() < 5e-3


def test_another_target_on_this_machine_is_refused(cache, monkeypatch):
    store = Store.open(cache)
    info = store.target_assets().info
    changed = {**info, "target": {**info["target"], "model": "random://qwen3_5?seed=5"}}
    monkeypatch.setattr(store, "target_assets", lambda: type("Assets", (), {"info": changed})())
    with pytest.raises(MismatchError, match="weights are"):
        open_online(store, torch.device("cpu"), 200)
