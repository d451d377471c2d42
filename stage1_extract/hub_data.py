"""Rows of a Hugging Face dataset: by its name on the hub, or a folder that `datasets` wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, DataError
from stage1_extract.config import DataConfig

HUB = "hf://"


def hub_rows(cfg: DataConfig) -> Iterator[tuple[int, Any]]:
    """(row number from 1, row without its empty keys).

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: the dataset, subset or split isn't there.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "data.dataset needs the package datasets", do="pip install 'drafttape[hf]'"
        ) from None
    number = 0
    try:
        for number, row in enumerate(_load(datasets, cfg), start=1):
            yield number, {key: value for key, value in row.items() if value is not None}
    except Exception as error:  # the hub's client and each file format raise their own kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"the dataset can't be read after {number} rows ({reason})",
            where=f"data.dataset={cfg.dataset}",
            do="Check data.subset and data.split; private datasets need a login to the hub",
        ) from None


def _load(datasets: Any, cfg: DataConfig) -> Any:
    was_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        folder = Path(str(cfg.dataset)).expanduser()
        if (folder / "state.json").exists():
            return datasets.load_from_disk(str(folder))
        if (folder / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(folder))[cfg.split]
        name = str(folder) if folder.exists() else cfg.dataset
        return datasets.load_dataset(name, cfg.subset, split=cfg.split, streaming=cfg.streaming)
    finally:
        if was_on:
            datasets.enable_progress_bars()
