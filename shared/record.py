"""RunRecord: what a run was a function of, what computed it, and the digest of all its inputs."""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from shared.errors import CorruptionError, DataError
from shared.fs import write_atomic

FORMAT = 1
PACKAGES = ("torch", "transformers", "numpy", "zarr", "numcodecs", "safetensors", "triton")


@dataclass
class RunRecord:
    """`run.json` of a run directory.

    Attributes:
        config: the resolved configuration.
        snapshot: id of the replayed snapshot.
        spec_digest: digest of the capture spec.
        codecs: codecs of the shards that were read; a lossy one is a declared difference.
        plan: what the steps are a function of besides the snapshot (seed, block, batch).
        steps: planned updates.
        start_digest: digest 0 of the chain.
        parameters: counts: trainable, and by owner.
        code: version, revision, dirty.
        versions: Python and packages.
        sessions: every start: time, first step, machine.
        draft_vocabulary: size, digest and coverage of it; None: all tokens are drafted.
        parent: the checkpoint that the run was branched from.
        last: step and digest of the newest checkpoint.
        result: the final numbers; empty until the run is finished.
    """

    config: dict[str, Any]
    snapshot: str
    spec_digest: str
    codecs: list[str]
    plan: dict[str, Any]
    steps: int
    start_digest: str
    parameters: dict[str, int] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    draft_vocabulary: dict[str, Any] | None = None
    parent: dict[str, Any] | None = None
    last: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, run_dir: Path) -> None:
        """Replaces `run.json` atomically."""
        write_atomic(run_dir / "run.json", json.dumps(asdict(self), indent=1).encode() + b"\n")

    def cache_root(self, run_dir: Path) -> str:
        """Where the run's cache is, from any working directory.

        A relative path counts from where the run was started, and there the relative `run_dir` of
        its configuration shows.
        """
        root = str(self.config["cache"]["root"])
        began = Path(os.path.normpath(str(self.config.get("run_dir"))))
        if "://" in root or Path(root).is_absolute() or began.is_absolute():
            return root
        here, count = run_dir.resolve(), len(began.parts)
        if here.parts[-count:] != began.parts:
            return root
        start = here.parents[count - 1]
        return root if start == Path.cwd() else str(start / root)


def read_record(run_dir: Path) -> RunRecord:
    """The record of a run directory.

    Raises:
        DataError: there is none.
        CorruptionError: it isn't one.
    """
    path = run_dir / "run.json"
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(
            "no run is there", where=run_dir, do="Give the run_dir of drafttape train"
        ) from None
    except ValueError as error:
        raise CorruptionError(f"not JSON ({error})", where=path) from None
    known = {item.name for item in fields(RunRecord)}
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptionError(f"not a run record of format {FORMAT}", where=path)
    try:
        return RunRecord(**{key: value for key, value in document.items() if key in known})
    except TypeError as error:
        raise CorruptionError(f"not a run record ({error})", where=path) from None


def differences(mine: Any, theirs: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, mine, theirs) of every leaf that differs between two plain configs."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        rows = []
        for key in sorted(mine.keys() | theirs.keys()):
            rows += differences(mine.get(key), theirs.get(key), f"{prefix}{key}.")
        return rows
    return [] if mine == theirs else [(prefix.rstrip("."), mine, theirs)]


def code_state() -> dict[str, Any]:
    """Version of the package; revision and whether files differ from it, when in a git checkout."""
    root = Path(__file__).resolve().parent.parent
    state: dict[str, Any] = {"version": _version("drafttape"), "revision": None, "dirty": None}
    if (root / ".git").exists():
        state["revision"] = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        state["dirty"] = None if changed is None else bool(changed)
    return state


def versions() -> dict[str, str]:
    """Python and the packages whose version can change a number."""
    found = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {k: v for k, v in found.items() if v}


def machine(device: str) -> dict[str, Any]:
    """Where a session runs: device, processor, threads."""
    description = {
        "device": device,
        "platform": f"{sys.platform} {platform.machine()}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        description["threads"] = torch.get_num_threads()
        if device.startswith("cuda"):
            description["gpu"] = torch.cuda.get_device_name(device)
    return description


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
