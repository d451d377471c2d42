"""Fault campaigns against a cache: kills, bit flips, truncations, full disks.

`python -m bench.faults [seed=0] [kill=40] [flip=200] [truncate=50] [full=20]` writes
build/faults.json: for each campaign `tried`; `lost`, finished work that had to be done again or
could not be read; `silent`, damage that was not reported or bad data that was handed out.
The extractions are real ones, of a tiny random target over made-up chats.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from shared.errors import DrafttapeError
from shared.store import Store

WORK = Path("build/faults")
RESULTS = Path("build/faults.json")  # written after each campaign
OWN = ("cache.json", "shards", "snapshots", "jobs", "rejects", "target")
WORDS = ("red", "green", "blue", "long", "short", "round", "river", "stone", "quick", "slow")


def chats(path: Path, count: int = 24) -> Path:
    """A JSONL file of made-up conversations."""
    rng = random.Random(0)
    lines = []
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        answer = " ".join(rng.choices(WORDS, k=rng.randint(5, 60))) + f" {number}"
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"c{number}", "messages": messages}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def words(root: Path, data: Path, container: str = "zarr") -> list[str]:
    """An extraction as it could be typed: a target so small that the disk is what takes time."""
    return [
        "extract", "target=tiny_qwen3_5", "target.name=tiny", "target.model=random://llama",
        f"data.paths=[{data}]", f"cache.root={root}", "cache.shard_bytes=60000",
        "batch_tokens=512", "device=cpu", "self_test=false", f"cache.container={container}",
    ]  # fmt: skip


def warm(data: Path) -> None:
    """Runs one extraction here: forked children find everything imported and built."""
    from shared.cli import main

    with (
        (WORK / "warm.log").open("w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        main(words(WORK / "warm", data))


def extract(root: Path, data: Path, container: str = "zarr", *, check_space: bool = True) -> int:
    """Starts an extraction in a forked child; its pid.

    Args:
        check_space: without it, the disk is found to be full only while writing.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        log = os.open(WORK / f"{root.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from shared.cli import main

        if not check_space:
            Store.require_space = lambda *_: None  # type: ignore[method-assign]
        code = main(words(root, data, container))
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(root: Path, data: Path, container: str = "zarr", *, check_space: bool = True) -> int:
    """Runs an extraction to its end; its exit code (negative: killed by that signal)."""
    pid = extract(root, data, container, check_space=check_space)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shards(root: Path) -> dict[str, bytes]:
    """What has to be the same whatever happened: shards, snapshots (but for their date), latest."""
    found = {
        str(path.relative_to(root)): path.read_bytes()
        for folder in ("shards", "snapshots")
        for path in (root / folder).rglob("*")
        if path.is_file() and "/." not in str(path)  # a killed writer's: nothing reads it
    }
    return {
        name: b"" if name.startswith("snapshots/") and name.endswith(".json") else data
        for name, data in found.items()
    }


def campaign_kill(count: int, rng: random.Random, data: Path, calm: Path) -> dict[str, int]:
    """kill -9 at random moments of an extraction that goes on each time."""
    lost = silent = 0
    begin = time.perf_counter()
    finish(WORK / "timed", data)
    usual_s = time.perf_counter() - begin
    root, done = WORK / "killed", {}
    for number in range(count):
        if number % 10 == 0:
            shutil.rmtree(root, ignore_errors=True)
            done = {}
        pid = extract(root, data)
        time.sleep(rng.uniform(0.05, usual_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if (root / "cache.json").exists():
            problems = Store.open(root).verify().problems
            # Killed between the snapshot and its pointer: said, and made by the next run.
            problems = [text for text in problems if "latest is missing" not in text]
            silent += bool(problems)
            if problems:
                print(f"DAMAGED by kill {number}: {problems[:2]}")
        lost += sum(
            not (root / name).exists() or (root / name).stat().st_mtime_ns != stamp
            for name, stamp in done.items()
        )
        done = {
            str(path.relative_to(root)): path.stat().st_mtime_ns
            for path in (root / "shards").glob("*.json")
        }
        if number % 10 == 9 or number == count - 1:
            lost += finish(root, data) != 0
            lost += sum((root / n).stat().st_mtime_ns != stamp for n, stamp in done.items())
            silent += shards(root) != shards(calm)
    return {"tried": count, "lost": lost, "silent": silent}


def read_all(root: Path, truth: dict[str, np.ndarray]) -> None:
    """Reads as training does. Raises on damage; AssertionError if data is wrong without a word."""
    store = Store.open(root)
    reader = store.reader()
    for sample in store.snapshot().ids:
        _, hidden_TLD = reader.read(sample)
        assert np.array_equal(hidden_TLD, truth[sample])


def campaign_damage(
    count: int, rng: random.Random, caches: list[Path], cut: bool
) -> dict[str, int]:
    """Flips a bit, or cuts a file, in every kind of file in turn."""
    lost = silent = 0
    kinds: dict[str, list[tuple[Path, Path]]] = {}
    truth = {}
    for root in caches:
        store = Store.open(root)
        truth[root] = {name: store.reader().read(name)[1] for name in store.snapshot().ids}
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            if path.is_file() and path.stat().st_size and name.parts[0] in OWN:
                stem = "/".join(part for part in name.parts if len(part) < 32)
                kinds.setdefault(f"{root.name}:{stem}{path.suffix}", []).append((root, path))
    order = sorted(kinds)
    for number in range(count):
        root, path = rng.choice(kinds[order[number % len(order)]])
        whole = path.read_bytes()
        place = rng.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(whole[:place] if cut else damaged)
        try:
            problems = Store.open(root).verify().problems
        except DrafttapeError as error:
            problems = [str(error)]
        parts = path.relative_to(root).parts
        label = parts[1].partition(".")[0] if len(parts) > 1 and parts[0] == "shards" else path.stem
        if not any(label in problem for problem in problems):
            silent += 1
            print(f"SILENT {path} byte {place}: {problems[:2]}")
        try:
            with contextlib.suppress(DrafttapeError):
                read_all(root, truth[root])
        except AssertionError:
            silent += 1
        path.write_bytes(whole)
        try:
            read_all(root, truth[root])
        except DrafttapeError:
            lost += 1
    return {"tried": count, "lost": lost, "silent": silent, "kinds": len(order)}


def campaign_full(count: int, rng: random.Random, data: Path, calm: Path) -> dict[str, int]:
    """A disk that is full at a random point of the extraction, then has room again."""
    needed = sum(len(part) for part in shards(calm).values())
    disk = WORK / "disk"
    disk.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False)
    if mounted.returncode:
        print("no permission to mount a small tmpfs: the campaign is left out")
        return {"tried": 0, "lost": 0, "silent": 0}
    tried = lost = silent = 0
    try:
        for number in range(count):
            size = rng.randrange(20_000, int(needed * 0.95))
            _remount(disk, size)
            root = disk / "cache"
            # Every fourth is refused before it starts; the others run into the wall.
            code = finish(root, data, check_space=number % 4 == 0)
            log = (WORK / "cache.log").read_text()
            tried += 1
            if code != 2 or "Traceback" in log or "space" not in log:
                silent += 1
                print(f"UNCLEAR at {size} bytes: code {code}, {log[-300:]!r}")
            before = {p.name: p.stat().st_mtime_ns for p in (root / "shards").glob("*.json")}
            _remount(disk, 64 << 20)
            lost += finish(root, data) != 0
            lost += sum((root / "shards" / n).stat().st_mtime_ns != t for n, t in before.items())
            silent += shards(root) != shards(calm)
            shutil.rmtree(root)
    finally:
        subprocess.run(["umount", disk], check=False)
    return {"tried": tried, "lost": lost, "silent": silent}


def _remount(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def main(arguments: list[str]) -> int:
    counts = {"seed": 0, "kill": 40, "flip": 200, "truncate": 50, "full": 20}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in counts or not value.isdigit():
            print(f"unknown {argument!r}; there are {', '.join(f'{k}=N' for k in counts)}")
            return 2
        counts[key] = int(value)
    import torch

    torch.set_num_threads(1)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    os.environ.setdefault("DRAFTTAPE_HOME", str((WORK / "home").absolute()))
    data = chats(WORK / "chats.jsonl")
    warm(data)
    calm, tar = WORK / "calm", WORK / "tar"
    if finish(calm, data) or finish(tar, data, "webdataset"):
        print((WORK / "calm.log").read_text())
        return 1
    seed = counts["seed"]
    results = {}
    for name, run in {
        "kill": lambda rng: campaign_kill(counts["kill"], rng, data, calm),
        "flip": lambda rng: campaign_damage(counts["flip"], rng, [calm, tar], cut=False),
        "truncate": lambda rng: campaign_damage(counts["truncate"], rng, [calm, tar], cut=True),
        "full": lambda rng: campaign_full(counts["full"], rng, data, calm),
    }.items():
        if not counts[name]:
            continue
        begin = time.perf_counter()
        results[name] = run(random.Random(f"{seed}:{name}"))
        print(f"{name:<9} {results[name]} ({time.perf_counter() - begin:.0f} s)", flush=True)
        RESULTS.write_text(json.dumps({"seed": seed, **results}, indent=1) + "\n")
    bad = any(result["lost"] or result["silent"] for result in results.values())
    shutil.rmtree(WORK, ignore_errors=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
