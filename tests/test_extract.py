"""Extraction end to end on a tiny target: resume, rejects, mask-only changes, signals, kills."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shared.capture import capture
from shared.cli import main
from shared.config import compose
from shared.errors import (
    CacheError,
    ConfigError,
    DataError,
    Interrupted,
    MismatchError,
    TargetError,
)
from shared.recode import check_codec
from shared.sample import sample_id
from shared.spec import CaptureSpec
from shared.store import Store
from shared.target import describe_target, load_target
from stage1_extract import build, worker
from stage1_extract.build import extract
from stage1_extract.checks import finite, self_test
from stage1_extract.config import ExtractConfig
from stage1_extract.executors import stop_on_signals
from stage1_extract.host_copy import HostCopies

WORDS = "the a quick brown fox jumps over lazy dog and runs away from here".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))


def rows(count: int = 24, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    return [
        {
            "id": f"chat-{i}",
            "messages": [
                {"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))},
                {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=5)) + f" {i}"},
            ],
        }
        for i in range(count)
    ]


def write(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(tmp_path: Path, *overrides: str, cache: str = "cache") -> ExtractConfig:
    data = tmp_path / "chats.jsonl"
    if not data.exists():
        write(data, rows())
    return compose(
        "extract",
        ExtractConfig,
        [
            "target=tiny_qwen3_5",
            f"data.paths=[{data}]",
            f"cache.root={tmp_path / cache}",
            "cache.shard_bytes=80000",
            "batch_tokens=400",
            *overrides,
        ],
    )


def tree(root: Path) -> dict[str, bytes]:
    """Every file of the shards and snapshots of a cache (sidecars by their files' hashes)."""
    files = {}
    for folder in ("shards", "jobs"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "/." not in str(path.relative_to(root)):
                files[str(path.relative_to(root))] = path.read_bytes()
    return files


def forwards(monkeypatch) -> list[int]:
    """Records the number of samples of every forward pass of the worker."""
    seen: list[int] = []

    def counted(target, ids, lengths, *args):
        seen.append(len(lengths))
        return capture(target, ids, lengths, *args)

    monkeypatch.setattr(worker, "capture", counted)
    return seen


def test_what_is_stored_is_what_the_target_gives_for_each_sample_alone(tmp_path, capsys):
    cfg = config(tmp_path)
    assert extract(cfg) == 0
    shown = capsys.readouterr().out
    store = Store.open(tmp_path / "cache")
    snapshot = store.snapshot()
    assert "24 samples" in shown
    assert snapshot.id in shown
    assert len(snapshot) == 24
    assert len(store.shard_ids()) > 2
    assert store.verify().problems == []
    reader, target = store.reader(), load_target(cfg.target)
    for index, name in enumerate(snapshot.ids):
        tokens, hidden = reader.read(name)
        alone = capture(target, torch.tensor(tokens)[None].long(), [len(tokens)], [1, 2, 4])[0]
        stored = torch.from_numpy(hidden.view(np.int16).copy()).view(torch.bfloat16)
        error = (stored.double() - alone.double()).norm() / alone.double().norm()
        assert error < 1e-3
        text = target.tokenizer.decode(tokens[snapshot.mask(index)])
        assert text.endswith("<|im_end|>")
    info = store.target_assets().info
    assert (info["mask_token_id"], info["eos_token_ids"], info["tied"]) == (259, [258], False)
    assert info["target"]["model"] == "random://qwen3_5"


@pytest.mark.slow
def test_a_second_run_runs_nothing_and_loads_no_model(tmp_path, monkeypatch):
    extract(config(tmp_path))
    first = Store.open(tmp_path / "cache").resolve()
    before = tree(tmp_path / "cache")
    monkeypatch.setattr(build, "load_target", lambda *a: pytest.fail("the model was loaded"))
    assert extract(config(tmp_path)) == 0
    assert Store.open(tmp_path / "cache").resolve() == first
    assert tree(tmp_path / "cache") == before


@pytest.mark.slow
def test_trap_12_new_masks_run_nothing_and_new_tokens_run_only_themselves(tmp_path, monkeypatch):
    extract(config(tmp_path))
    root = tmp_path / "cache"
    store = Store.open(root)
    old, old_files = store.snapshot(), tree(root)
    seen = forwards(monkeypatch)
    chats = rows()
    chats[0]["messages"][1]["finish_reason"] = "length"  # changes the mask only
    write(tmp_path / "chats.jsonl", chats)
    extract(config(tmp_path))
    masked = Store.open(root).snapshot()
    assert seen == []
    assert masked.id != old.id
    assert masked.ids == old.ids
    assert tree(root).keys() >= old_files.keys()
    chats[5]["messages"][1]["content"] += " edited"
    chats = chats[:-2] + rows(3, seed=9)  # one edited, two removed, three added
    write(tmp_path / "chats.jsonl", chats)
    extract(config(tmp_path, "self_test=false"))
    assert sum(seen) == 4
    assert len(Store.open(root).snapshot()) == 25
    again = Store.open(root).snapshot(old.id)
    assert [again.mask(i).tolist() for i in range(24)] == [old.mask(i).tolist() for i in range(24)]
    for name, data in old_files.items():
        assert (root / name).read_bytes() == data


@pytest.mark.slow
def test_trap_12_a_smaller_max_tokens_runs_only_what_it_cuts(tmp_path, monkeypatch):
    extract(config(tmp_path))
    store = Store.open(tmp_path / "cache")
    old = store.snapshot()
    limit = int(np.sort(old.num_tokens)[-3]) - 1  # cuts the three longest, or a few more
    seen = forwards(monkeypatch)
    extract(config(tmp_path, f"data.max_tokens={limit}", "self_test=false"))
    new = store.snapshot()
    assert 3 <= sum(seen) == int((old.num_tokens > limit).sum()) < len(old)
    assert len(set(new.ids) - set(old.ids)) == sum(seen)
    assert store.snapshot(old.id).ids == old.ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("target.num_taps=2", "layer_ids"),
        ("target.model='random://qwen3_5?seed=1'", "weights"),
        ("target.dtype=bfloat16", "compute_dtype"),
        ("target.attention=eager", "attention"),
        ("last_hidden=true", "last_hidden"),
        ("target.model=random://qwen3", "architecture"),
    ],
)
def test_trap_12_another_spec_is_refused_naming_the_field(tmp_path, override, field):
    extract(config(tmp_path, "data.limit=2"))
    before = tree(tmp_path / "cache")
    with pytest.raises(MismatchError, match=field):
        extract(config(tmp_path, "data.limit=2", override))
    assert tree(tmp_path / "cache") == before


def test_attention_auto_goes_on_with_what_the_cache_holds(tmp_path):
    cfg = config(tmp_path)
    info = describe_target(cfg.target)
    assert build._with_attention(cfg, info, "cpu").cfg.attention == "sdpa"
    assert cfg.target.attention == "sdpa"  # what workers are sent
    eager = replace(info, cfg=replace(info.cfg, attention="eager"))
    Store.create(tmp_path / "cache", eager.spec("cpu"))
    for words, name in (([], "eager"), (["target.attention=sdpa"], "sdpa")):
        assert build._with_attention(config(tmp_path, *words), info, "cpu").cfg.attention == name


@pytest.mark.slow
def test_trap_09_a_nan_is_left_out_and_counted(tmp_path, monkeypatch, capsys):
    poisoned: dict = {}

    def poison(target, ids, lengths, *args):
        hidden = capture(target, ids, lengths, *args)
        for row, length in enumerate(lengths):
            poisoned.setdefault("ids", ids[row, :length].tolist())
            if ids[row, :length].tolist() == poisoned["ids"]:
                hidden[row, 2, 1, 5] = float("nan")
        return hidden

    monkeypatch.setattr(worker, "capture", poison)
    assert extract(config(tmp_path)) == 0  # 1 of 24 is under the threshold of 5 %
    assert "1 x a hidden state is not finite" in capsys.readouterr().out
    store = Store.open(tmp_path / "cache")
    snapshot = store.snapshot()
    assert len(snapshot) == 23
    assert store.verify().problems == []
    (reject,) = store.rejects(snapshot.meta["job"])
    assert reject["reason"] == "a hidden state is not finite"
    assert reject["source"].startswith(str(tmp_path / "chats.jsonl") + ":")
    assert reject["id"] not in snapshot.ids
    # It is known now: a second run computes nothing, and beyond the threshold the code is 3.
    seen = forwards(monkeypatch)
    assert extract(config(tmp_path, "reject_threshold=0.01")) == 3
    assert seen == []


def test_only_bad_samples_end_in_a_clear_error(tmp_path, monkeypatch):
    def poison(target, ids, lengths, *args):
        return torch.full_like(capture(target, ids, lengths, *args), float("inf"))

    monkeypatch.setattr(worker, "capture", poison)
    with pytest.raises(DataError, match="not finite"):
        extract(config(tmp_path))


def test_finite_looks_at_the_bits():
    values = torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-40]).to(torch.bfloat16)
    assert finite(values.view(torch.int16).numpy().view(np.uint16))
    for bad in (float("nan"), float("inf"), -float("inf")):
        values[3] = bad
        assert not finite(values.view(torch.int16).numpy().view(np.uint16))


def test_trap_01_the_self_test_names_the_layer_that_differs(tmp_path):
    cfg = config(tmp_path)
    target = load_target(cfg.target)
    spec = target.spec()
    samples = [np.arange(n, 2 * n, dtype=np.int32) for n in (12, 40, 25)]
    assert max(self_test(target, spec, samples).values()) < 1e-3

    def leak(_module, _args, output):
        return output + 0.05 * output.mean(0, keepdim=True)  # mixes the samples of a batch

    target.layers[2].register_forward_hook(leak)
    with pytest.raises(TargetError, match=r"layer 2 .*slot"):
        self_test(target, spec, samples)


@pytest.mark.slow
def test_tokens_that_are_not_the_plans_are_refused(tmp_path):
    cfg = config(tmp_path)
    extract(cfg)
    store = Store.open(tmp_path / "cache")
    name = store.snapshot().ids[0]
    tokens, _ = store.reader().read(name)
    plan = worker.ShardPlan((name,), (len(tokens),), ((0, 1),))
    runner = worker.Worker(store, load_target(cfg.target), "lossless", "zarr")
    with pytest.raises(TargetError, match="not those of the plan"):
        runner.run(plan, {name: tokens + 1})


@pytest.mark.slow
def test_out_of_memory_halves_the_batch_and_names_a_lone_sample(tmp_path, monkeypatch):
    extract(config(tmp_path))
    limit = 2

    def small(target, ids, lengths, *args):
        if len(lengths) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(target, ids, lengths, *args)

    monkeypatch.setattr(worker, "capture", small)
    assert extract(config(tmp_path, cache="small")) == 0
    ours, theirs = Store.open(tmp_path / "small"), Store.open(tmp_path / "cache")
    assert ours.resolve() == theirs.resolve()
    limit = 0
    with pytest.raises(TargetError, match=r"sample [0-9a-f]{32} on cpu: out of memory"):
        extract(config(tmp_path, cache="none"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_finishes_the_shard_and_the_next_run_goes_on(tmp_path, monkeypatch, number):
    extract(config(tmp_path, cache="straight"))
    run = worker.Worker.run

    def interrupted(self, shard, tokens, advance=lambda n: None):
        os.kill(os.getpid(), number)
        return run(self, shard, tokens, advance)

    monkeypatch.setattr(worker.Worker, "run", interrupted)
    with pytest.raises(Interrupted) as stopped:
        extract(config(tmp_path))
    assert stopped.value.exit_code == 4
    store = Store.open(tmp_path / "cache")
    (first,) = store.shard_ids()
    assert store.snapshots() == []
    sidecar = tmp_path / "cache" / "shards" / f"{first}.json"
    written = sidecar.stat().st_mtime_ns
    monkeypatch.setattr(worker.Worker, "run", run)
    assert extract(config(tmp_path)) == 0
    assert sidecar.stat().st_mtime_ns == written
    assert Store.open(tmp_path / "straight").resolve() == store.resolve()
    assert tree(tmp_path / "cache") == tree(tmp_path / "straight")


def test_the_second_signal_interrupts_at_once():
    with stop_on_signals(lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    thread = threading.Thread(target=lambda: stop_on_signals(lambda text: None).__enter__())
    thread.start()
    thread.join()


def test_a_disk_error_in_the_writing_thread_ends_the_run(tmp_path, monkeypatch):
    def full(self, name, hidden):
        raise CacheError("no space is left on the device", where="disk")

    monkeypatch.setattr("shared.store.ShardWriter.append", full)
    with pytest.raises(CacheError, match="no space"):
        extract(config(tmp_path))
    store = Store.open(tmp_path / "cache")
    assert store.shard_ids() == []
    assert store.snapshots() == []


def test_another_codec_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    store = Store.create(tmp_path / "cache", describe_target(config(tmp_path).target).spec("cpu"))
    tokens = np.arange(5, dtype=np.int32)
    with store.write_shard([(sample_id(tokens), tokens)], "lossless", "zarr") as writer:
        writer.append(sample_id(tokens), np.ones((5, 3, 32), np.uint16))
    monkeypatch.setattr(build, "load_target", None)
    with pytest.raises(MismatchError, match=r"stored as lossless, cache\.codec=int8.*recode"):
        extract(config(tmp_path, "cache.codec=int8"))
    check_codec(store, "fast")
    monkeypatch.setattr(Store, "require_space", _no_room)
    with pytest.raises(CacheError, match="GB free"):
        extract(config(tmp_path, "cache.codec=fast"))
    assert len(store.shard_ids()) == 1


def _no_room(store, num_bytes):
    assert num_bytes > 1000
    raise CacheError("the disk has 0 GB free")


def test_bad_input_writes_nothing(tmp_path):
    for overrides in (["data.paths=[/no/such/file]"], ["data.paths=[]"], ["data.max_tokens=1"]):
        with pytest.raises((DataError, ConfigError)):
            extract(config(tmp_path, *overrides))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match="no usable sample in 0 rows"):
        extract(config(tmp_path, f"data.paths=[{empty}]"))
    assert not (tmp_path / "cache").exists()


def test_rejects_over_the_threshold_give_code_3_with_a_snapshot(tmp_path, capsys):
    chats = [*rows(6), {"messages": []}, "nonsense"]
    write(tmp_path / "chats.jsonl", chats)
    assert extract(config(tmp_path)) == 3
    store = Store.open(tmp_path / "cache")
    assert len(store.snapshot()) == 6
    listed = store.rejects(store.snapshot().meta["job"])
    assert [row["source"].rpartition(":")[2] for row in listed] == ["7", "8"]
    assert "2 rejects" in capsys.readouterr().out


@pytest.mark.slow
def test_trap_14_and_15_kill_9_at_random_moments_leads_to_the_same_bytes(tmp_path):
    extract(config(tmp_path, cache="straight"))
    data = tmp_path / "chats.jsonl"
    command = [sys.executable, "-m", "shared.cli", "extract", "target=tiny_qwen3_5"]
    command += [f"data.paths=[{data}]", f"cache.root={tmp_path / 'cache'}"]
    command += ["cache.shard_bytes=80000", "batch_tokens=400"]
    environment = os.environ | {"DRAFTTAPE_HOME": str(tmp_path / "home")}
    rng, kills = random.Random(0), 0
    root = tmp_path / "cache" / "shards"
    for _ in range(20):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        count = len(list(root.glob("*.json"))) if root.exists() else 0
        # Wait until this run has begun a shard, then kill at a random moment.
        while process.poll() is None and not (root.exists() and list(root.glob(".tmp-*"))):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        if process.poll() is None:
            process.kill()
            kills += 1
        finished = process.wait() == 0
        mtimes = {path: path.stat().st_mtime_ns for path in root.glob("*.json")}
        assert len(mtimes) >= count
        if finished:
            break
    else:
        subprocess.run(command, env=environment, check=True)
    assert kills >= 2
    assert all(path.stat().st_mtime_ns == when for path, when in mtimes.items())
    assert tree(tmp_path / "cache") == tree(tmp_path / "straight")
    ours, theirs = Store.open(tmp_path / "cache"), Store.open(tmp_path / "straight")
    assert ours.resolve() == theirs.resolve()
    assert ours.verify().problems == []


@pytest.mark.slow
def test_a_workers_memory_is_bounded_by_batches_not_by_shards(tmp_path):
    script = Path(__file__).parent / "memory_main.py"
    # Real batches are over glibc's 32 MB, so that freed ones leave the process; here they aren't.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, script, tmp_path / "cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    figures = json.loads(done.stdout)
    assert figures["shards"] == 3
    # Four batches (computed, two queued, being written) and what making one takes.
    assert figures["grown"] <= 6.5 * figures["batch"]
    assert figures["grown"] <= 2 * figures["shard"]


@pytest.mark.slow
def test_a_thousand_chats_of_which_a_few_change_take_a_few_forward_passes(
    tmp_path, monkeypatch, capsys
):
    def chat(*ids):
        return {"input_ids": [7, *ids, 9], "loss_mask": [0] * (len(ids)) + [1, 1]}

    chats = [chat(i // 250, i % 250, i % 13) for i in range(1000)]
    data = tmp_path / "chats.jsonl"
    settings = ["target.model=random://llama", "cache.shard_bytes=1000000", "self_test=false"]
    settings += ["batch_tokens=8000"]
    write(data, chats)
    extract(config(tmp_path, *settings, "snapshot=before"))
    seen = forwards(monkeypatch)
    chats[500]["input_ids"][1] = 99
    del chats[100:105]
    write(data, chats + [chat(200, i) for i in range(10)])
    began = time.perf_counter()
    extract(config(tmp_path, *settings, "snapshot=after"))
    assert time.perf_counter() - began < 60
    assert sum(seen) == 11
    capsys.readouterr()
    assert main(["cache", "diff", str(tmp_path / "cache"), "before", "after"]) == 0
    shown = capsys.readouterr().out
    for part in ("added +11 samples", "removed +6 samples", "unchanged +994 samples"):
        assert re.search(part, shown)


def test_after_running_out_of_memory_later_batches_are_smaller_from_the_start(monkeypatch):
    tried: list[int] = []

    def small(_target, ids, _lengths, *_args):
        tried.append(ids.numel())
        if ids.numel() > 100:
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(*ids.shape, 1, 4, dtype=torch.bfloat16)

    monkeypatch.setattr(worker, "capture", small)
    info = SimpleNamespace(cfg=SimpleNamespace(tensor_parallel=1))
    target = SimpleNamespace(device=torch.device("cpu"), info=info)
    store = SimpleNamespace(spec=CaptureSpec("w", "Fake", (1,), 4))
    runner = worker.Worker(store, target, "lossless", "zarr")
    batch = [np.arange(50)] * 4
    rows = [row for part in runner.forward(batch) for row in part.rows]
    assert rows == [0, 1, 2, 3]
    assert tried == [200, 100, 100]
    tried.clear()
    assert [row for part in runner.forward(batch) for row in part.rows] == rows
    assert tried == [100, 100]
    with pytest.raises(TargetError, match=r"sample [0-9a-f]{32} on cpu: out of memory with one"):
        list(runner.forward([np.arange(101)]))
    target.info.cfg.tensor_parallel = 2
    with pytest.raises(TargetError, match=r"can't halve together.*batch_tokens=100; committed"):
        list(worker.Worker(store, target, "lossless", "zarr").forward(batch))

    def broken(*args):
        raise RuntimeError("another fault")

    monkeypatch.setattr(worker, "capture", broken)
    with pytest.raises(RuntimeError, match="another"):
        list(runner.forward(batch))


@pytest.mark.slow
def test_the_parents_target_is_gone_before_workers_load_theirs(tmp_path, monkeypatch):
    models, freed = [], []

    def load(*args):
        target = load_target(*args)
        models.append(weakref.ref(target.model))
        return target

    def run(store, devices, work):
        freed.extend(model() is None for model in models)
        work.stop.set()

    monkeypatch.setattr(build, "load_target", load)
    monkeypatch.setattr(build, "run_local", run)
    with pytest.raises(Interrupted):
        extract(config(tmp_path, "workers=2"))
    assert freed == [True]


def test_host_buffers_are_used_again_whatever_their_order_and_never_pile_up():
    copies = HostCopies(torch.device("cpu"))
    small, large = copies.take(90), copies.take(100)
    copies.buffers += [small, large]  # as the writing thread gives them back
    assert copies.take(95) is large
    assert copies.take(80) is small
    copies.buffers += [small, large]
    grown = copies.take(110)
    assert (grown.numel(), copies.buffers) == (110, [])
    # A smaller batch gets a buffer that fits the largest one too.
    assert copies.take(10).numel() == 110
