"""Worker processes that misbehave; a module of its own, because spawned processes import it."""

import os
import time
from pathlib import Path

from shared.errors import TargetError
from stage1_extract.worker import ShardResult


def die(*args):
    os._exit(5)


def refuse(pipe, *args):
    pipe.send(("error", TargetError("no such kernel")))
    time.sleep(5)


def fake(pipe, device, count, root, *args):
    """Answers at once; each time it finds `die` in `root` it removes that file and is gone."""
    pipe.send(("ready", None))
    try:
        while True:
            shard, tokens = pipe.recv()
            assert set(tokens) == set(shard.ids)
            pipe.send(("advance", 1))
            for mark in Path(root).glob("die-*"):
                mark.unlink()
                os._exit(9)
            pipe.send(("advance", shard.num_tokens - 1))
            pipe.send(("done", ShardResult(shard, None, 0.0)))
    except EOFError:
        return
