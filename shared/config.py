"""Hydra glue: one dataclass schema a word, one conversion to typed objects at the edge.

`conf/<word>.yaml` names the groups; the schema types every key, so an unknown key, a wrong type
or a bad choice fails at compose, before torch is imported. Hydra's compose API is used instead of
`@hydra.main` so that a word's own help and one-sentence errors come out; sweeps start
their trials through Hydra's launchers (see `stage2_train/sweep.py`).
"""

import importlib
import re
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import MISSING

from shared.errors import ConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"


def opt(default: Any, meaning: str) -> Any:
    """A dataclass field with its meaning for `--help`; lists, dicts and dataclasses are copied."""
    if isinstance(default, type) and is_dataclass(default):
        return field(default_factory=default, metadata={"help": meaning})
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": meaning})
    return field(default=default, metadata={"help": meaning})


def load_object(path: str) -> Any:
    """`module:name` to the object."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def compose(word: str, schema: type, overrides: list[str]) -> Any:
    """Composes `conf/<word>.yaml` with overrides and returns an instance of `schema`.

    Raises:
        ConfigError: unknown key, wrong type, bad choice, missing mandatory value.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name=f"{word}_schema", node=schema)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra_compose(word, overrides=overrides)
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(
                f"{word} needs a value for {', '.join(missing)}",
                do=f"Give it as {missing[0]}=… (see drafttape {word} --help)",
            )
        return OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(
            _first_lines(error), where=f"configuration of {word}", do=f"See drafttape {word} --help"
        ) from None


def _first_lines(error: BaseException) -> str:
    """Hydra's message without its references to internals, on one line."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__
    text = " ".join(line.strip() for line in "\n".join(dict.fromkeys(chain)).splitlines())
    text = re.sub(r"(full_key|reference_type|object_type|location)[:=] ?\S*", "", text)
    text = re.sub(r"To append to your config use \S+", "", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".")


def to_plain(config: Any) -> Any:
    """A typed config as JSON-ready dicts and lists (enums by value, paths as text)."""
    if is_dataclass(config) and not isinstance(config, type):
        return {item.name: to_plain(getattr(config, item.name)) for item in fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, dict):
        return {str(key): to_plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(value) for value in config]
    if isinstance(config, Path):
        return str(config)
    return config


def typed(schema: type, plain: dict[str, Any], *, where: object = None) -> Any:
    """The inverse of `to_plain`: an instance of `schema` from a stored configuration.

    Keys that this version no longer knows are left out; keys it adds take their defaults.

    Raises:
        ConfigError: a value doesn't fit its key.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        known = _known_keys(schema, plain)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), known))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(_first_lines(error), where=where) from None


def _known_keys(schema: type, plain: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(schema)
    kept: dict[str, Any] = {}
    for key, value in plain.items():
        kind = hints.get(key)
        if kind is None:
            continue
        nested = is_dataclass(kind) and isinstance(value, dict)
        kept[key] = _known_keys(kind, value) if nested else value
    return kept


def describe(schema: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """Rows (key, default, meaning) of a schema, nested keys dotted, for `--help`."""
    rows = []
    hints = get_type_hints(schema)
    for item in fields(schema):
        key, kind = prefix + item.name, hints[item.name]
        meaning = item.metadata.get("help", "")
        if isinstance(kind, type) and is_dataclass(kind):
            rows += describe(kind, key + ".")
            continue
        made = item.default_factory
        default = item.default if made is NO_DEFAULT else made()
        if default == MISSING:
            shown = "required"
        else:
            shown = "null" if default is None else str(to_plain(default))
        if isinstance(kind, type) and issubclass(kind, Enum):
            meaning += f" ({' | '.join(str(choice.value) for choice in kind)})"
        rows.append((key, shown, meaning))
    return rows


def group_options(group: str) -> list[tuple[str, str]]:
    """The files of a config group with their first comment line."""
    options = []
    for path in sorted((CONF / group).glob("*.yaml")):
        first = path.read_text().splitlines()[0] if path.stat().st_size else ""
        if first.startswith("# @package"):
            first = path.read_text().splitlines()[1]
        options.append((path.stem, first.removeprefix("#").strip()))
    return options


def groups_of(word: str) -> list[str]:
    """The config groups that `conf/<word>.yaml` names in its defaults list."""
    import yaml

    document = yaml.safe_load((CONF / f"{word}.yaml").read_text()) or {}
    names = []
    for entry in document.get("defaults", []):
        if isinstance(entry, dict):
            names += [str(key).removeprefix("optional ").split("@")[0] for key in entry]
    return names


class Dtype(Enum):
    """Element types of weights and of compute."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


class TapRule(Enum):
    """How layer ids are chosen: `dflash` spreads them as DFlash does, `explicit` takes the list."""

    explicit = "explicit"
    dflash = "dflash"


@dataclass
class TargetConfig:
    """The target model, as both stages name it."""

    name: str = opt(MISSING, "label of the target in reports")
    model: str = opt(
        MISSING, "hub id, local directory, or package://PACKAGE/ for files inside a Python package"
    )
    gguf_file: str | None = opt(None, "GGUF file inside `model`, dequantised at loading")
    revision: str | None = opt(None, "revision of a hub model")
    trust_remote_code: bool = opt(False, "run Python code that comes with the model")
    dtype: Dtype = opt(Dtype.bfloat16, "dtype of weights and forward pass")
    attention: str = opt("sdpa", "attention implementation of transformers (sdpa, eager, …)")
    tap_rule: TapRule = opt(TapRule.dflash, "how the tapped layers are chosen")
    num_taps: int = opt(5, "number of tapped layers under tap_rule=dflash")
    layer_ids: list[int] | None = opt(None, "tapped layers (0-based outputs), tap_rule=explicit")
    mask_token: str | None = opt(None, "token that stands for MASK; must not occur in the data")
    num_layers: int | None = opt(None, "for plan without weights: decoder layers")
    hidden_size: int | None = opt(None, "for plan without weights: width")
    vocab_size: int | None = opt(None, "for plan without weights: vocabulary")
