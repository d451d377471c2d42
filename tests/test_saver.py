"""Saving in a thread: one at a time, errors surface, an unfinished save changes nothing."""

import threading

import pytest
from tiny_cache import tiny_cache, tiny_config

from shared.errors import CacheError
from stage2_train import checkpoint
from stage2_train.build import train_run
from stage2_train.saver import Saver


def test_one_at_a_time_and_the_error_is_raised_at_the_next():
    saver, running, gate = Saver(), [], threading.Event()

    def slow():
        running.append("first")
        gate.wait(5)
        running.append("first ends")

    saver.submit(slow)
    threading.Timer(0.05, gate.set).start()
    saver.submit(lambda: running.append("second"))
    saver.wait()
    assert running == ["first", "first ends", "second"]

    def fails():
        raise CacheError("the disk is full")

    saver.submit(fails)
    with pytest.raises(CacheError, match="full"):
        saver.submit(lambda: None)
    saver.submit(fails)
    saver.close()
    saver.wait()
    with pytest.raises(CacheError):
        Saver(background=False).submit(fails)


@pytest.mark.slow
def test_a_save_that_fails_ends_the_run_and_leaves_the_one_before(tmp_path, monkeypatch):
    tiny_cache(tmp_path / "cache")
    cfg = tiny_config(tmp_path / "cache", tmp_path / "run", steps=3, trainer__checkpoint_every=1)
    original = checkpoint.finish

    def finish(run_dir, step, state):
        if step == 2:
            raise OSError(28, "No space left on device")
        return original(run_dir, step, state)

    monkeypatch.setattr(checkpoint, "finish", finish)
    with pytest.raises((CacheError, OSError), match="No space left"):
        train_run(cfg)
    assert checkpoint.steps(tmp_path / "run") == [1]
    assert checkpoint.temporary(tmp_path / "run", 2).exists()  # as after a kill
    monkeypatch.undo()
    train_run(cfg)
    assert checkpoint.steps(tmp_path / "run")[-1] == 3
    assert not list((tmp_path / "run" / checkpoint.FOLDER).glob(".tmp*"))
