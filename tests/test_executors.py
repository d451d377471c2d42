"""Several workers make the same bytes as one; dead ones are replaced; status and deadlines."""

import datetime
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shared.config import TargetConfig, compose
from shared.errors import CacheError, ConfigError, Interrupted, TargetError
from shared.fs import LocalFiles, Lock
from shared.store import Store
from shared.target import use_device
from stage1_extract import executors, local_workers, ranks, worker
from stage1_extract.build import extract
from stage1_extract.config import StatusConfig
from stage1_extract.executors import Deadline, Work, deadline, in_turn
from stage1_extract.local_workers import run_local, worker_devices
from stage1_extract.plan import ShardPlan
from stage1_extract.ranks import Ranks
from stage1_extract.status import Status, lines, page, status
from tests import worker_fakes
from tests.test_extract import config, rows, tree, write


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_make_the_same_bytes(tmp_path, workers):
    extract(config(tmp_path, cache="one"))
    assert extract(config(tmp_path, f"workers={workers}", cache="many")) == 0
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
    one, many = Store.open(tmp_path / "one"), Store.open(tmp_path / "many")
    assert many.resolve() == one.resolve()
    state = json.loads((tmp_path / "many" / "status.json").read_text())
    assert state["state"] == "done"
    assert sum(item["shards"] for item in state["workers"].values()) == state["shards"]
    assert state["tokens"] == state["tokens_total"]


@pytest.mark.slow
def test_a_worker_killed_at_random_moments_changes_nothing(tmp_path):
    write(tmp_path / "chats.jsonl", rows(60))
    extract(config(tmp_path, "cache.shard_bytes=30000", cache="straight"))
    rng, stop, kills = random.Random(0), threading.Event(), []

    def killer():
        # Only workers that have begun a shard: one that is killed while it loads costs seconds.
        # Two kills: a shard that loses three workers ends a run by design.
        while len(kills) < 2 and not stop.wait(rng.random() * 0.5):
            busy = list((tmp_path / "cache" / "shards").glob(".tmp-*.lock"))
            children = multiprocessing.active_children()
            if busy and children:
                victim = rng.choice(children)
                kills.append(victim.pid)
                os.kill(victim.pid, 9)
                stop.wait(6)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        code = extract(config(tmp_path, "cache.shard_bytes=30000", "workers=2"))
    finally:
        stop.set()
        thread.join()
    assert code == 0
    assert kills
    straight, ours = Store.open(tmp_path / "straight"), Store.open(tmp_path / "cache")
    assert ours.resolve() == straight.resolve()
    assert tree(tmp_path / "cache") == tree(tmp_path / "straight")


def bare(root: Path):
    """A store that is only a place."""
    return SimpleNamespace(root=str(root), files=LocalFiles(root))


def local_work(stop: threading.Event, count: int = 5):
    """Shards of no content, and what was reported about them."""
    shards = [ShardPlan((f"{i:032x}",), (10 + i,), ((0, 1),)) for i in range(count)]
    tokens = {shard.ids[0]: np.zeros(shard.num_tokens, np.int32) for shard in shards}
    done: list[str] = []
    counted: Counter = Counter()
    work = Work(
        shards, tokens, TargetConfig(name="x", model="x"), "lossless", "zarr", stop,
        lambda worker, count: counted.update({worker: count}),
        lambda worker, result: done.append(result.shard.ids[0]),
    )  # fmt: skip
    return work, done, counted


@pytest.mark.slow
def test_shards_of_dead_workers_are_handed_out_again(tmp_path, monkeypatch):
    monkeypatch.setattr(local_workers, "worker_main", worker_fakes.fake)
    for number in range(2):
        (tmp_path / f"die-{number}").touch()
    work, done, counted = local_work(threading.Event())
    run_local(bare(tmp_path), ["cpu", "cpu"], work)
    assert sorted(done) == [shard.ids[0] for shard in work.shards]
    # Tokens of work that was lost are taken back.
    assert sum(counted.values()) == sum(shard.num_tokens for shard in work.shards)
    assert list(tmp_path.rglob("*")) == [tmp_path / "shards"]  # no mark, no claim
    assert multiprocessing.active_children() == []


def test_a_shard_that_another_run_has_in_hand_comes_last(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(executors, "POLL_S", 0.01)
    work, _, _ = local_work(threading.Event())
    ids, seen = [shard.ids[0] for shard in work.shards], []
    held = Lock.take(tmp_path / "shards" / f".claim-{ids[1]}", wait=False)
    for shard in in_turn(bare(tmp_path), work, work.shards, "cpu"):
        seen.append(shard.ids[0])
        if len(seen) == 4:
            threading.Timer(0.05, held.release).start()
    assert seen == [ids[0], *ids[2:], ids[1]]
    assert "in the hands of another run" in capsys.readouterr().err
    assert list((tmp_path / "shards").iterdir()) == []


def test_a_shard_that_another_run_commits_meanwhile_is_done_for_ranks_too(tmp_path, monkeypatch):
    work, done, _ = local_work(threading.Event(), 2)
    (own,), (other,) = (shard.ids for shard in work.shards)
    index = {other: ("f" * 32, 0)}

    class Fake:
        def __init__(self, *args):
            pass

        def run(self, shard, tokens, advance):
            index[shard.ids[0]] = ("e" * 32, 0)
            return worker.ShardResult(shard, "e" * 32, 1.0)

    monkeypatch.setattr(ranks, "Worker", Fake)
    store = bare(tmp_path)
    store.committed = lambda: index
    alone = SimpleNamespace(rank=0, size=1, gather=lambda value: [value])
    found = ranks.run_rank(store, None, work, alone)
    assert [(item.shard.ids, item.shard_id[0], item.ran) for item in found] == [
        ((own,), "e", True),
        ((other,), "f", False),
    ]
    assert done == [own]


@pytest.mark.slow
def test_two_runs_into_one_cache_share_the_work(tmp_path):
    extract(config(tmp_path, cache="one"))
    command = [sys.executable, "-m", "shared.cli", "extract", "target=tiny_qwen3_5"]
    command += [f"data.paths=[{tmp_path / 'chats.jsonl'}]", f"cache.root={tmp_path / 'both'}"]
    command += ["cache.shard_bytes=80000", "batch_tokens=400", "self_test=false"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    counted = [re.search(r"samples +(\d+) run, (\d+) in the cache before", text) for text in said]
    assert sum(int(found[1]) for found in counted) == 24
    assert all(int(found[1]) + int(found[2]) == 24 for found in counted)
    assert tree(tmp_path / "both") == tree(tmp_path / "one")


def test_a_stop_finishes_shards_in_hand_only(tmp_path, monkeypatch):
    monkeypatch.setattr(local_workers, "worker_main", worker_fakes.fake)
    stop = threading.Event()
    work, done, _ = local_work(stop)
    stopping = replace(work, finished=lambda *a: (work.finished(*a), stop.set()))
    run_local(bare(tmp_path), ["cpu"], stopping)
    assert done == [work.shards[0].ids[0]]


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(local_workers, "worker_main", worker_fakes.die)
    work, _, _ = local_work(threading.Event())
    with pytest.raises(TargetError, match=r"3 workers died \(exit code 5\)"):
        run_local(bare(tmp_path), ["cpu", "cpu"], work)


@pytest.mark.slow
def test_what_a_worker_refuses_reaches_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(local_workers, "worker_main", worker_fakes.refuse)
    work, _, _ = local_work(threading.Event())
    with pytest.raises(TargetError, match="no such kernel"):
        run_local(bare(tmp_path), ["cpu", "cpu"], work)


@pytest.mark.slow
def test_torchrun_ranks_make_the_same_bytes(tmp_path):
    extract(config(tmp_path, cache="one"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "shared.cli", "extract", "target=tiny_qwen3_5", "cache.shard_bytes=80000"]
    command += [f"data.paths=[{tmp_path / 'chats.jsonl'}]", f"cache.root={tmp_path / 'many'}"]
    done = subprocess.run([*command, "batch_tokens=400"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("snapshot ") == 1
    state = json.loads((tmp_path / "many" / "status.json").read_text())
    assert state["tokens"] == state["tokens_total"]
    assert set(state["workers"]) <= {"rank 0", "rank 1"}
    assert not list((tmp_path / "many").glob(".status*"))
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
    assert Store.open(tmp_path / "many").resolve() == Store.open(tmp_path / "one").resolve()


def test_ranks_come_from_the_launcher(monkeypatch):
    assert Ranks.from_environment({}) is None
    assert Ranks.from_environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == (
        Ranks(1, 4, 1)
    )
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        Ranks.from_environment(slurm)
    found = Ranks.from_environment(slurm | {"MASTER_ADDR": "node1"})
    assert found == Ranks(5, 8, 1)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: None)
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(key, "")
    found.start()  # transformers reads torchrun's variables, also under SLURM
    assert [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["5", "8", "1"]
    left: list[int] = []
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: left.append(1))
    for kind in (None, Interrupted, TargetError):
        found.leave(kind, None, None)
    assert len(left) == 2  # a rank that fails must not wait for the others
    assert (found.device("cuda"), found.device("cpu")) == ("cuda:1", "cpu")
    assert worker_devices("cpu", 3) == ["cpu"] * 3
    assert worker_devices("cuda:1", 2) == ["cuda:1"] * 2
    current: list[str] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    for device in ("cpu", "cuda", "cuda:1"):
        use_device(device)
    assert current == ["cuda:1"]


def test_until_is_the_next_such_time():
    now = datetime.datetime(2026, 5, 4, 23, 30)
    assert deadline(None) is None
    assert deadline("07:00", now) == datetime.datetime(2026, 5, 5, 7).timestamp()
    assert deadline("23:45", now) == datetime.datetime(2026, 5, 4, 23, 45).timestamp()
    for wrong in ("7 o'clock", "25:00"):
        with pytest.raises(ConfigError, match="HH:MM"):
            deadline(wrong)


def test_the_deadline_leaves_time_for_a_shard_as_long_as_the_longest():
    stop = threading.Event()
    limit = Deadline(time.time() + 100, stop)
    assert not limit.finished(40)
    assert limit.finished(120)
    assert stop.is_set()
    assert not Deadline(None, threading.Event()).finished(1e9)


@pytest.mark.slow
def test_until_stops_with_code_4_and_commits_what_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr("stage1_extract.build.deadline", lambda until: time.time())
    with pytest.raises(Interrupted):
        extract(config(tmp_path, "until=07:00"))
    assert len(Store.open(tmp_path / "cache").shard_ids()) == 1
    state = json.loads((tmp_path / "cache" / "status.json").read_text())
    assert (state["state"], state["shards"]) == ("stopped", 1)


def test_the_status_word_tells_how_it_stands(tmp_path, capsys):
    with pytest.raises(CacheError, match="no extraction"):
        status(compose("status", StatusConfig, [f"root={tmp_path}"]))
    store = Store.create(tmp_path / "cache", spec_of(tmp_path))
    running = Status(store, "tiny <b>", 1000, 4, 1, 2)
    running.advance("cpu", 250)
    running.finished("cpu", worker.ShardResult(None, None, 1.0, {"x": "bad"}))
    state = json.loads((tmp_path / "cache" / "status.json").read_text())
    text = "\n".join(lines(state, state["updated"] + 1))
    for part in ("running", "250 of 1,000 (25.0%)", "1 of 4", "3 rejects", "left"):
        assert part in text
    assert "was it killed" in "\n".join(lines(state, state["updated"] + 999))
    shown = page(state)
    assert "tiny &lt;b&gt;" in shown
    assert "http-equiv" in shown
    running.close("done")
    assert status(compose("status", StatusConfig, [f"root={tmp_path / 'cache'}"])) == 0
    assert "state     done" in capsys.readouterr().out
    assert "http-equiv" not in (tmp_path / "cache" / "status.html").read_text()
    (tmp_path / "cache" / "status.json").write_text("{")
    with pytest.raises(CacheError, match="can't be read"):
        status(compose("status", StatusConfig, [f"root={tmp_path / 'cache'}"]))


def test_the_status_of_ranks_is_their_sum(tmp_path):
    root = tmp_path / "cache"
    store = Store.create(root, spec_of(tmp_path))
    old = Status(store, "tiny", 1000, 4, 1, 2, rank=1, size=2, run="before")
    old.advance("rank 1", 999)
    zero = Status(store, "tiny", 1000, 4, 1, 2, rank=0, size=2, run="now")
    assert json.loads((root / "status.json").read_text())["tokens"] == 0
    one = Status(store, "tiny", 1000, 4, 1, 2, rank=1, size=2, run="now")
    one.advance("rank 1", 300)
    one.finished("rank 1", worker.ShardResult(None, None, 1.0, {"x": "bad"}))
    zero.advance("rank 0", 200)
    zero.finished("rank 0", worker.ShardResult(None, None, 1.0))
    one.close("done")
    zero.close("done")
    state = json.loads((root / "status.json").read_text())
    assert (state["state"], state["tokens"], state["shards"], state["rejects"]) == (
        "done", 500, 2, 3,
    )  # fmt: skip
    assert state["workers"] == {
        "rank 0": {"tokens": 200, "shards": 1},
        "rank 1": {"tokens": 300, "shards": 1},
    }
    assert not list(root.glob(".status*"))


def spec_of(tmp_path: Path):
    from shared.spec import CaptureSpec

    return CaptureSpec("w", "Tiny", (1,), 4)
