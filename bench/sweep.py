"""A sweep from one cache against runs that ask the target again, and what two trials read.

Tiny random target and cache, CPU, one thread; models are loaded and heads placed untimed.

`sweep.of_limit`: N trials online cost N (target + train), with a cache target + N train. Reported
is the measured ratio over that limit, with target and train from the same trials; extraction,
decoding and verification are what it loses. Trials run as `drafttape sweep` runs them, in turn with
the online ones.

`sweep.disk_bytes_2_trials`: stored bytes that two trials at the same time take from the cache, as
their readers count them (training, its held-out split and the evaluation), over those of one.
"""

import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.config import compose
from shared.store import Store
from stage1_extract.build import extract
from stage1_extract.config import ExtractConfig
from stage2_train import sweep
from stage2_train.build import open_source, train_run
from stage2_train.config import Source, SweepConfig
from stage2_train.online import open_online
from stage2_train.shared_reads import forget, shared_folder
from stage2_train.sweep_job import read_state, run_trial

TRIALS, DOCUMENTS = 8, 16
TRAIN = {
    "drafter.hidden_size": None, "drafter.intermediate_size": 96,
    "drafter.layer_types": ["linear_attention", "full_attention"],
    "drafter.num_attention_heads": 2, "drafter.num_key_value_heads": 1, "drafter.head_dim": 16,
    "drafter.linear_num_key_heads": 2, "drafter.linear_num_value_heads": 2,
    "drafter.linear_key_head_dim": 16, "drafter.linear_value_head_dim": 16,
    "drafter.block_size": 8, "batch.tokens_per_row": 1024, "batch.anchors_per_sample": 16,
    "loader.workers": 0, "trainer.epochs": 1.0, "trainer.steps": None,
    "trainer.checkpoint_every": 0, "trainer.tensorboard": False,
}  # fmt: skip


def run() -> dict[str, float]:
    """Figures of this file."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-sweep-", dir="build"))
    try:
        cache = make_cache(folder)
        return of_limit(folder, cache) | disk_bytes(folder, cache)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder)


def make_cache(folder: Path) -> Path:
    """Chats answered by nobody, captured from a random target."""
    chats = folder / "chats.jsonl"
    with chats.open("w") as file:
        for n in range(DOCUMENTS):
            text = f"{n} is what you asked for, " * (8 + n)
            turns = [{"role": "user", "content": f"Say {n}."},
                     {"role": "assistant", "content": text}]  # fmt: skip
            file.write(json.dumps({"messages": turns}) + "\n")
    words = ["target=tiny_qwen3_5", "data.heldout=0.2", f"data.paths=[{chats}]"]
    words.append(f"cache.root={folder / 'cache'}")
    assert not extract(compose("extract", ExtractConfig, [*words, "device=cpu"]))
    return folder / "cache"


def prepared(folder: Path, cache: Path, trials: int) -> list[Path]:
    """Folders of a sweep over learning rates, as `drafttape sweep` prepares them."""
    plan = {
        "train": TRAIN | {"cache.root": str(cache)}, "eval": {"decode": False},
        "grid": {"optimizer.lr": {"log": [0.0001, 0.01, trials]}},
    }  # fmt: skip
    folder.mkdir()
    (folder / "plan.yaml").write_text(json.dumps(plan))
    cfg = SweepConfig(plan=str(folder / "plan.yaml"), out=str(folder / "out"), device="cpu")
    return sweep.prepare(cfg)[1]


def config(trial: Path, run_dir: Path) -> Any:
    """A trial's configuration for a run of its own."""
    from shared.config import typed
    from stage2_train.config import TrainConfig

    cfg = typed(TrainConfig, read_state(trial)["config"])
    cfg.run_dir, cfg.device = str(run_dir), "cpu"
    return cfg


def of_limit(folder: Path, cache: Path) -> dict[str, float]:
    """Eight trials each way, and the limit that their parts set."""
    trials = prepared(folder / "sweep", cache, TRIALS)
    online, cached, memory = [], [], []
    share = shared_folder(folder / "limit")
    for number, trial in enumerate(trials):
        cfg = config(trial, folder / f"online{number}")
        cfg.source = Source.online
        online.append(train_run(cfg))
        cached.append(run_trial(trial, "cpu", share and str(share))["result"])
        cfg = config(trial, folder / f"memory{number}")
        cfg.loader.ram = True
        memory.append(train_run(cfg))
    forget(share)
    target = statistics.median(result["data_wait"] for result in online)
    train = statistics.median(r["seconds"] - r["data_wait"] for r in memory)
    limit = TRIALS * (target + train) / (target + TRIALS * train)
    spent = extraction_seconds(folder, cache) + sum(r["seconds"] for r in cached)
    measured = sum(result["seconds"] for result in online) / spent
    return {
        "sweep.speedup": measured,
        "sweep.limit": limit,
        "sweep.of_limit": measured / limit,
        "sweep.seconds_target": target,
        "sweep.seconds_train": train,
    }


def extraction_seconds(folder: Path, cache: Path) -> float:
    """The target over the training documents once, written to a cache; the median of three."""
    trial = prepared(folder / "extraction", cache, 1)[0]
    source = open_source(config(trial, folder / "none"))
    names = [source.snapshot.ids[index] for index in source.snapshot.indices("train")]
    feed, seconds = open_online(source.store, torch.device("cpu"), 1024), []
    for turn in range(3):
        fresh = Store.create(folder / f"fresh{turn}", source.store.spec)
        started = time.perf_counter()
        samples = [(name, feed.reader.read_tokens(name)) for name in names]
        with fresh.write_shard(samples, "lossless", "zarr") as writer:
            for first in range(0, len(samples), 3):  # rows of the size that online runs have
                part = samples[first : first + 3]
                states = feed.states([tokens for _, tokens in part])
                for (name, _), hidden in zip(part, states, strict=True):
                    writer.append(name, np.ascontiguousarray(hidden))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _count(trial: Path, share: str | None, answers: Any) -> None:
    """Runs a trial in its own process and says how many stored bytes its readers took."""
    torch.set_num_threads(1)
    readers, open_reader = [], Store.reader

    def kept(store: Store) -> Any:
        readers.append(open_reader(store))
        return readers[-1]

    Store.reader = kept  # type: ignore[method-assign]
    state = run_trial(trial, "cpu", share)
    answers.put((state["state"], sum(reader.bytes_read for reader in readers)))


def disk_bytes(folder: Path, cache: Path) -> dict[str, float]:
    """Bytes of two trials at the same time over those of one."""
    trials = prepared(folder / "bytes", cache, 3)
    share = shared_folder(folder / "bytes")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()

    def together(chosen: list[Path], shared: Path | None) -> int:
        place = None if shared is None else str(shared)
        processes = [
            context.Process(target=_count, args=(trial, place, answers)) for trial in chosen
        ]
        for process in processes:
            process.start()
        found = [answers.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
        assert all(state == "done" for state, _ in found), found
        return sum(count for _, count in found)

    one = together(trials[:1], None)
    two = together(trials[1:], share)
    forget(share)
    return {"sweep.disk_bytes_2_trials": two / one, "sweep.disk_bytes_1_trial": float(one)}
