"""Hydra glue: one dataclass schema a word, one conversion to typed objects at the edge.

`conf/<word>.yaml` names the groups; the schema types every key, so an unknown key, a wrong type
or a bad choice fails at compose, before torch is imported. Hydra's compose API is used instead of
`@hydra.main` so that a word's own help and one-sentence errors come out; sweeps start
their trials through Hydra's launchers (see `stage2_train/sweep.py`).
"""

import importlib
import math
import operator
import re
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from omegaconf import MISSING

from shared.errors import ConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"


def opt(default: Any, meaning: str, **bounds: float) -> Any:
    """A dataclass field with its meaning for `--help`; lists, dicts and dataclasses are copied.

    Args:
        bounds: `low`, `high` (inclusive), `above`, `below` (exclusive) of a number, or of each
            number in a list; `size` of a list. `compose` refuses what is outside.
    """
    metadata = {"help": meaning, "bounds": bounds}
    if isinstance(default, type) and is_dataclass(default):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


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
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name=f"{word}_schema", node=schema)
    GlobalHydra.instance().clear()
    overrides = [_quoted(override) for override in overrides]
    try:
        groups = groups_of(word)
        plain = [o for o in overrides if _hides_a_group(o, groups)]
        rest = [_opened(o, schema) for o in overrides if o not in plain]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra_compose(word, overrides=rest)
        for override in plain:
            parsed = OverridesParser.create().parse_override(override)
            OmegaConf.update(composed, parsed.key_or_group, parsed.value())
        if unknown := _unknown(schema, OmegaConf.to_container(composed)):
            raise ConfigError(
                f"there is no key {', '.join(unknown)}",
                where=f"configuration of {word}",
                do=f"See drafttape {word} --help",
            )
        missing = sorted(OmegaConf.missing_keys(composed))
        config = None if missing else OmegaConf.to_object(composed)
        missing = missing or _blank(config)
        if missing:
            raise ConfigError(
                f"{word} needs a value for {', '.join(missing)}",
                do=f"Give it as {missing[0]}=… (see drafttape {word} --help)",
            )
        check_bounds(config, word)
        return config
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise ConfigError(
            _first_lines(error), where=f"configuration of {word}", do=f"See drafttape {word} --help"
        ) from None


def _hides_a_group(override: str, groups: list[str]) -> bool:
    """A plain key of a word, such as eval's `data`, that Hydra takes for another word's group."""
    key, equals, _ = override.partition("=")
    return bool(equals) and key.isidentifier() and key not in groups and (CONF / key).is_dir()


def _opened(override: str, schema: type) -> str:
    """Lets new keys into a dict such as data.template; Hydra wants a `++` before them."""
    key, equals, _ = override.partition("=")
    hints, parts = get_type_hints(schema), key.split(".")
    while equals and parts and is_dataclass(kind := hints.get(parts.pop(0))):
        hints = get_type_hints(kind)
    return f"++{override}" if equals and get_origin(kind) is dict else override


def _unknown(schema: Any, composed: Any, prefix: str = "") -> list[str]:
    """Keys that came in by `+key=value` and that nothing would read."""
    hints, found = get_type_hints(schema), []
    for key, value in composed.items():
        kind = hints.get(key)
        if kind is None:
            found.append(f"{prefix}{key}")
        elif is_dataclass(kind) and isinstance(value, dict):
            found += _unknown(kind, value, f"{prefix}{key}.")
    return found


def _blank(config: Any, prefix: str = "") -> list[str]:
    """Texts that are there but empty, as from `run_dir=$UNSET`; `key=null` means none."""
    found = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            found += _blank(value, f"{prefix}{item.name}.")
        elif isinstance(value, str) and not value.strip():
            found.append(prefix + item.name)
    return found


def check_bounds(config: Any, word: str, prefix: str = "") -> None:
    """Holds every number against its key's `bounds`; NaN fits nowhere.

    Raises:
        ConfigError: names the key, its value and what it must be.
    """
    for item in fields(config):
        value, bounds = getattr(config, item.name), item.metadata.get("bounds", {})
        if is_dataclass(value):
            check_bounds(value, word, f"{prefix}{item.name}.")
            continue
        numbers = value if isinstance(value, list) else [value]
        wrong = next((_rule(n, bounds) for n in numbers if _rule(n, bounds)), None)
        if isinstance(value, list) and len(value) != bounds.get("size", len(value)):
            wrong = f"must have {bounds['size']} values"
        if wrong:
            raise ConfigError(
                f"{prefix}{item.name}={to_plain(value)} {wrong}",
                where=f"configuration of {word}",
                do=f"See drafttape {word} --help",
            )


def _rule(number: Any, bounds: dict[str, float]) -> str | None:
    """What a number must be and isn't; None if it is, or is no number."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if math.isnan(number) or (bounds and math.isinf(number)):
        return "must be a finite number"
    rules = {
        "low": ("at least", operator.ge),
        "high": ("at most", operator.le),
        "above": ("above", operator.gt),
        "below": ("below", operator.lt),
    }
    for key, (name, fits) in rules.items():
        if key in bounds and not fits(number, bounds[key]):
            return f"must be {name} {bounds[key]:g}"
    return None


def _quoted(override: str) -> str:
    """An override as Hydra reads it without the quotes that its grammar asks for.

    `key=[a=1,b=2]`: its lists take no `=` outside of quotes. `key=what (is) this, then?`: text.
    """
    found = re.fullmatch(r"([^=]+=)\[([^\[\]{}'\"\\]*=[^\[\]{}'\"\\]*)\]", override, re.DOTALL)
    if found is not None:
        return found[1] + "[" + ",".join(quote(item.strip()) for item in found[2].split(",")) + "]"
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, text = override.partition("=")
    if text[:1] in {"", "[", "{", "'", '"'}:
        return override
    try:
        if not OverridesParser.create().parse_override(override).is_sweep_override():
            return override
    except HydraException:
        pass
    return f"{key}={quote(text)}"


def quote(text: str) -> str:
    """Text as one of Hydra's values; a backslash counts there only before a quote."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _first_lines(error: BaseException) -> str:
    """Hydra's message without its references to internals, on one line."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__
    text = " ".join(line.strip() for line in "\n".join(dict.fromkeys(chain)).splitlines())
    text = re.sub(r"(full_key|reference_type|object_type|location)[:=] ?\S*", "", text)
    text = re.sub(r"To append to your (config|default list) use \S+", "", text)
    text = re.sub(r"Config search path:.*", "", text)
    text = re.sub(r"Invalid value assigned: \w+ is not a ListConfig.*", "it is a list: [a,b]", text)
    if re.search(r"Lexer|extraneous input|mismatched input|no viable alternative", text):
        named = re.search(r"override '(.+?)' |Exception: (\S+)", text)
        what = (named[1] or named[2]) if named else "an override"
        return f"{what} can't be read; quote special characters, as in \"key='a (b)'\""
    if text.startswith("Unexpected type for root"):
        return "a key of a group is set, but the group is null; choose one first, as in target=…"
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
    attention: str = opt(
        "auto",
        "attention implementation of transformers (sdpa, eager, flash_attention_2, …); auto: the "
        "cache's, else flash_attention_2 where flash-attn is installed and GPU, dtype and model "
        "fit it, else sdpa",
    )
    device_map: str | None = opt(
        None, "spread a large target over this machine's GPUs, layer by layer (auto, balanced, …)"
    )
    tensor_parallel: int = opt(
        1, "split each layer over so many ranks of torchrun, which act as one worker", low=1
    )
    quantization: dict[str, Any] = opt(
        {}, "quantise at loading: a quantization_config of transformers, with its quant_method"
    )
    tap_rule: TapRule = opt(TapRule.dflash, "how the tapped layers are chosen")
    num_taps: int = opt(5, "number of tapped layers under tap_rule=dflash", low=1)
    layer_ids: list[int] | None = opt(None, "tapped layers (0-based outputs), tap_rule=explicit")
    mask_token: str | None = opt(None, "token that stands for MASK; must not occur in the data")
    num_layers: int | None = opt(None, "for plan without weights: decoder layers")
    hidden_size: int | None = opt(None, "for plan without weights: width")
    vocab_size: int | None = opt(None, "for plan without weights: vocabulary")
