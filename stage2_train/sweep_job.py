"""One trial of a sweep, as Hydra's launchers start it (`python -m stage2_train.sweep_job`).

A trial's whole state is its folder: `trial.json` (what it is, how it stands) and the run's own
files. A trial that died goes on from its run's checkpoint; one that is done is never run again.
"""

import json
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from shared.errors import DrafttapeError, Interrupted
from shared.fs import Lock, write_atomic


@dataclass
class JobConfig:
    """Which trials of which sweep."""

    sweep: str = MISSING
    trial: str = MISSING
    device: str = "auto"
    devices: str = ""
    trials_per_device: int = 1
    share: str = ""


ConfigStore.instance().store(name="sweep_job", node=JobConfig)


def read_state(folder: Path) -> dict[str, Any]:
    """trial.json of a trial's folder."""
    found: dict[str, Any] = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    return found


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Replaces trial.json atomically."""
    write_atomic(folder / "trial.json", json.dumps(state, indent=1).encode() + b"\n")


def watch_parent(every_s: float = 1.0) -> None:
    """Stops this process as SIGTERM does (save, then end) when its parent is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        os.kill(os.getpid(), signal.SIGTERM)

    if not any(thread.name == "drafttape-parent" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="drafttape-parent", daemon=True).start()


def take_device(slots: Path, devices: list[str], per_device: int) -> tuple[str, Lock]:
    """The device with the most room, held until the lock is released or the process ends."""
    while True:
        for slot in range(per_device):
            for device in devices:
                name = f"{device.replace(':', '-')}.{slot}.lock"
                lock = Lock.take(slots / name, wait=False)
                if lock is not None:
                    return device, lock
        time.sleep(0.5)


def run_trial(folder: Path, device: str = "auto", share: str | None = None) -> dict[str, Any]:
    """Trains and evaluates one trial; its faults end in its state, not in an exception.

    Args:
        folder: the trial's.
        device: where it runs; "auto" leaves it to the configuration.
        share: folder in which trials share decoded samples.

    Returns:
        The state: `done` with metrics or `failed` with the error.

    Raises:
        SystemExit: a signal stopped it; the state is `stopped`.
    """
    from shared.config import typed
    from stage2_train.build import train_run
    from stage2_train.config import EvalConfig, TrainConfig
    from stage2_train.evaluate import measure

    state = read_state(folder)
    if state["state"] == "done":
        return state
    state |= {"state": "running", "pid": os.getpid(), "started": time.time(), "error": None}
    write_state(folder, state)
    watch_parent()
    try:
        config = typed(TrainConfig, state["config"], where=folder / "trial.json")
        if device != "auto":
            config.device = state["device"] = device
        if share:
            Path(share).mkdir(parents=True, exist_ok=True)
            config.loader.share = share
        result = train_run(config)
        settings = {"run_dir": config.run_dir, "device": config.device} | state["eval"]
        evaluation = measure(typed(EvalConfig, settings, where=folder / "trial.json"))
        kept = ("heldout_loss", "accuracy", "estimated_acceptance", "real_acceptance",
                "tokens_per_s", "speedup")  # fmt: skip
        state["metrics"] = {key: evaluation.get(key) for key in kept}
        state["result"] = {
            key: value for key, value in result.items() if isinstance(value, int | float | str)
        }
        state["result"] |= noise_of(Path(config.run_dir))
        state["state"] = "done"
    except (Interrupted, KeyboardInterrupt):
        state["state"] = "stopped"
        raise SystemExit(130) from None  # Hydra goes on to the next trial after any other exception
    except DrafttapeError as error:
        state |= {"state": "failed", "error": str(error), "attempts": state["attempts"] + 1}
    except Exception as error:
        (folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
        text = f"{type(error).__name__}: {error}"
        state |= {"state": "failed", "error": text, "attempts": state["attempts"] + 1}
    finally:
        state["seconds"] = state.get("seconds", 0.0) + time.time() - state["started"]
        state["pid"] = None
        write_state(folder, state)
    return state


def noise_of(run_dir: Path) -> dict[str, float]:
    """The gradient noise scale over the second half of a run that measured it."""
    from shared.log import read_json_lines
    from stage2_train.noise_scale import from_lines, summary

    found = [estimate for _, estimate in from_lines(read_json_lines(run_dir / "metrics.jsonl"))]
    numbers = summary(found[len(found) // 2 :])
    return {} if numbers is None else {"noise_scale": numbers["noise_scale"]}


@hydra.main(version_base="1.3", config_path=None, config_name="sweep_job")
def main(cfg: Any) -> str:
    """Runs the trial that Hydra names."""
    sweep, device, lock = Path(cfg.sweep), str(cfg.device), None
    if cfg.devices:
        devices = cfg.devices.split(",")
        device, lock = take_device(sweep / "devices", devices, cfg.trials_per_device)
    try:
        return str(run_trial(sweep / "trials" / cfg.trial, device, cfg.share or None)["state"])
    finally:
        if lock is not None:
            lock.release()


if __name__ == "__main__":
    main()
