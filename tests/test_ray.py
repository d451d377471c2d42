"""Actors on a local Ray make the same bytes as one worker, also when some of them are lost."""

import threading
import warnings
from dataclasses import replace

import pytest

from shared.errors import ConfigError, TargetError
from shared.store import Store
from stage1_extract import ray_actors
from stage1_extract.build import extract
from tests import worker_fakes
from tests.test_executors import bare, local_work
from tests.test_extract import config, tree


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_actors_make_the_same_bytes_and_a_lost_one_is_replaced(tmp_path, monkeypatch, capsys):
    extract(config(tmp_path, cache="one"))
    monkeypatch.setattr(ray_actors, "Actor", worker_fakes.DyingActor)
    (tmp_path / "die-0").touch()
    assert extract(config(tmp_path, "executor=ray", "workers=2", "self_test=false")) == 0
    assert list(tmp_path.glob("die-*")) == []
    assert capsys.readouterr().err.count("was lost; its shard goes to another") == 1
    assert tree(tmp_path / "cache") == tree(tmp_path / "one")
    assert Store.open(tmp_path / "cache").resolve() == Store.open(tmp_path / "one").resolve()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_actors_that_keep_dying_or_refuse_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_actors, "Actor", worker_fakes.RefusingActor)
    work, done, _ = local_work(threading.Event())
    store = bare(tmp_path)
    with pytest.raises(TargetError, match="no such kernel") as refused:
        ray_actors.run_ray(store, work, "cpu", 2, None)
    assert (refused.value.where, refused.value.do) == ("here", "Wait")
    with pytest.raises(TargetError, match="3 actors were lost on the same work"):
        ray_actors.run_ray(store, replace(work, codec="die"), "cpu", 2, None)
    assert done == []


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_actors_that_no_node_can_hold_end_the_run_at_once(tmp_path):
    work, done, _ = local_work(threading.Event())
    with pytest.raises(ConfigError, match=r"needs 1 CPU and 1 GPU, and no node .* 2 CPU, 0 GPU"):
        ray_actors.run_ray(bare(tmp_path), work, "cuda", 2, None)
    assert done == []


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_actors_that_are_queued_are_spoken_of_and_the_others_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ray_actors, "Actor", worker_fakes.QuietActor)
    monkeypatch.setattr(ray_actors, "_EVERY_S", 0.2)
    work, done, _ = local_work(threading.Event())
    ray_actors.run_ray(bare(tmp_path), work, "cpu", 4, None)
    assert sorted(done) == [shard.ids[0] for shard in work.shards]
    assert "2 actors wait for a node with a free CPU" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"drafttape\[ray\]"):
        ray_actors.run_ray(None, None, "cpu", 1, None)
