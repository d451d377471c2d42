"""Reports to Weights & Biases, MLflow and trackio: each a dozen lines, imported when chosen."""

import importlib
from pathlib import Path
from typing import Any, Protocol

from shared.errors import ConfigError
from stage2_train.config import Tracker, TrackingConfig


class Sink(Protocol):
    """A service that takes numbers."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Numbers of an update."""
        ...

    def close(self) -> None:
        """The run is over or stops."""
        ...


class _Wandb:
    """Weights & Biases; a resumed run goes on under the same id."""

    def __init__(self, module: Any, tracking: TrackingConfig, run: "RunName") -> None:
        self._run = module.init(
            project=tracking.project,
            name=run.name,
            id=run.id,
            dir=str(run.folder),
            config=run.config,
            resume="allow",
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """MLflow, at the tracking URI of its own environment variables."""

    def __init__(self, module: Any, tracking: TrackingConfig, run: "RunName") -> None:
        self._module = module
        module.set_experiment(tracking.project)
        module.start_run(run_name=run.name, tags={"drafttape.run": run.id})
        module.log_dict(run.config, "config.json")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._module.log_metrics(values, step=step)

    def close(self) -> None:
        self._module.end_run()


class _Trackio:
    """trackio, local by default."""

    def __init__(self, module: Any, tracking: TrackingConfig, run: "RunName") -> None:
        self._module = module
        module.init(project=tracking.project, name=run.name, config=run.config, resume="allow")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._module.log(values, step=step)

    def close(self) -> None:
        self._module.finish()


class RunName:
    """How a run is known to a service."""

    def __init__(self, folder: Path, config: dict[str, Any], digest: str, name: str | None) -> None:
        self.folder, self.config = folder, config
        self.name = name or folder.resolve().name
        self.id = f"{self.name}-{digest[:8]}"


_KINDS = {Tracker.wandb: _Wandb, Tracker.mlflow: _Mlflow, Tracker.trackio: _Trackio}


def open_trackers(tracking: TrackingConfig, run: RunName) -> list[Sink]:
    """Connects to the chosen services.

    Raises:
        ConfigError: a package is not installed.
    """
    modules = [(kind, import_tracker(kind)) for kind in tracking.trackers]
    return [_KINDS[kind](module, tracking, run) for kind, module in modules]


def import_tracker(kind: Tracker) -> Any:
    """The service's package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(kind.value)
    except ImportError as error:
        raise ConfigError(
            f"{kind.value} is not installed ({error})",
            where="tracking.trackers",
            do=f"pip install {kind.value}, or leave it out",
        ) from None
