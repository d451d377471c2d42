"""Worker processes that misbehave; a module of its own, because spawned processes import it."""

import os
import time
from pathlib import Path

from shared.errors import TargetError
from stage1_extract.ray_actors import Actor
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


class DyingActor(Actor):
    """Dies inside a shard, after its first batch, as long as it finds `die-*` beside the cache."""

    def run(self, shard, tokens):
        for mark in Path(self.root).parent.glob("die-*"):
            mark.unlink()
            self.worker.run(shard, tokens, lambda count: os._exit(9))
        return super().run(shard, tokens)


class RefusingActor(Actor):
    def load(self):
        if self.codec == "die":
            os._exit(9)
        raise TargetError("no such kernel", where="here", do="Wait")


class QuietActor(Actor):
    """Writes nothing and takes a while over a shard."""

    def load(self):
        return

    def run(self, shard, tokens):
        time.sleep(0.5)
        return ShardResult(shard, None, 0.0)
