"""The target model: found, described without its weights, loaded, and its parts located.

`describe_target` costs no weights in memory: it gives the config and the digest that a CaptureSpec
needs. `load_target` loads the model. Any transformers causal LM works whose decoder is found at one
of `DECODER_PATHS`; the text part of a vision wrapper is found the same way.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.config import TapRule, TargetConfig
from shared.errors import ConfigError, TargetError
from shared.spec import CaptureSpec
from shared.target_kernels import (
    attention_backend,
    computes_fp8,
    conv_backend,
    dispatch_gdn_by_device,
    gdn_backend,
)

DECODER_PATHS = (
    "model.language_model",
    "language_model.model",
    "language_model",
    "model.decoder",
    "model",
    "transformer",
)
LAYER_NAMES = ("layers", "h")
EMBED_NAMES = ("embed_tokens", "wte")
NORM_NAMES = ("norm", "final_layernorm", "ln_f")


def dflash_layer_ids(num_layers: int, num_taps: int) -> list[int]:
    """DFlash's rule: `num_taps` layers spread evenly from 1 to num_layers - 3.

    Raises:
        ConfigError: the target has too few layers for so many different taps.
    """
    if num_taps == 1:
        return [num_layers // 2]
    start, end = 1, num_layers - 3
    span = end - start
    ids = [round(start + i * span / (num_taps - 1)) for i in range(num_taps)]
    if span < 0 or len(set(ids)) < num_taps:
        raise ConfigError(
            f"{num_taps} taps don't fit into {num_layers} layers by DFlash's rule",
            where="target.num_taps",
            do="Take fewer taps, or tap_rule=explicit with target.layer_ids=[…]",
        )
    return ids


def resolve_layer_ids(cfg: TargetConfig, num_layers: int) -> list[int]:
    """The tapped layers, ascending: by the rule that the config names, never guessed.

    Raises:
        ConfigError: an id is out of range, repeated or missing.
    """
    if cfg.tap_rule is TapRule.dflash:
        if cfg.layer_ids:
            raise ConfigError(
                "target.layer_ids is set, but target.tap_rule=dflash chooses them",
                where="target.layer_ids",
                do="Add target.tap_rule=explicit",
            )
        return dflash_layer_ids(num_layers, cfg.num_taps)
    ids = list(cfg.layer_ids or [])
    if not ids:
        raise ConfigError("tap_rule=explicit needs target.layer_ids", where="target.layer_ids")
    wrong = [layer for layer in ids if not 0 <= layer < num_layers]
    if wrong or sorted(set(ids)) != ids:
        raise ConfigError(
            f"layer ids must ascend, differ, and lie in 0..{num_layers - 1}; got {ids}",
            where="target.layer_ids",
        )
    return ids


def text_config(config: Any) -> Any:
    """The decoder's config inside a wrapper's."""
    return config.get_text_config(decoder=True)


@dataclass(frozen=True)
class TargetInfo:
    """What is known of a target without loading its weights."""

    cfg: TargetConfig
    config: Any
    architecture: str
    weights: str
    quantization: str
    path: Path | None

    @property
    def num_layers(self) -> int:
        return int(text_config(self.config).num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(text_config(self.config).hidden_size)

    @property
    def layer_ids(self) -> list[int]:
        return resolve_layer_ids(self.cfg, self.num_layers)

    @property
    def has_linear_attention(self) -> bool:
        """Recurrent layers: left pads and packing are not safe there."""
        kinds = getattr(text_config(self.config), "layer_types", None) or []
        return any("linear" in kind or "mamba" in kind for kind in kinds)

    def attention(self, device: str) -> str:
        """The attention implementation on this device, by its name."""
        return attention_backend(self.cfg, device, self.architecture, text_config(self.config))

    def backend(self, device: str) -> dict[str, str]:
        """What changes the numbers besides weights and tokens (see CaptureSpec.backend)."""
        backend = {
            "device": str(device).split(":")[0],
            "compute_dtype": self.cfg.dtype.value,
            "attention": self.attention(device),
            "quantization": self.quantization,
        }
        if self.quantization == "fp8" and not computes_fp8(device):
            backend["quantization"] = "fp8-dequantized"
        if self.has_linear_attention:
            backend["gdn"] = gdn_backend(device)
            if backend["device"] == "cuda":
                backend["conv"] = conv_backend()
        if self.cfg.tensor_parallel > 1:
            backend["tensor_parallel"] = str(self.cfg.tensor_parallel)
        return backend

    def spec(self, device: str, *, last_hidden: bool = False, packed: bool = False) -> CaptureSpec:
        """The spec of a cache that this target fills on this kind of device."""
        return CaptureSpec(
            weights=self.weights,
            architecture=self.architecture,
            layer_ids=tuple(self.layer_ids),
            hidden_size=self.hidden_size,
            last_hidden=last_hidden,
            backend=self.backend(device) | ({"batching": "packed"} if packed else {}),
        )


@dataclass
class Target:
    """A loaded target and its parts. `decoder` is the text model without the head."""

    info: TargetInfo
    model: Any
    decoder: Any
    layers: list[Any]
    embed: Any
    norm: Any
    head: Any
    device: Any
    tokenizer: Any = None
    hooks: list[Any] = field(default_factory=list)

    @property
    def backend(self) -> dict[str, str]:
        return self.info.backend(str(self.device))

    @property
    def weights_digest(self) -> str:
        return self.info.weights

    @property
    def tied(self) -> bool:
        """The head is the embedding's own storage."""
        embed, head = self.embed.weight, self.head.weight
        if hasattr(embed, "to_local") and hasattr(head, "to_local"):
            embed, head = embed.to_local(), head.to_local()
        return head is embed or (not head.is_meta and head.data_ptr() == embed.data_ptr())

    def spec(self, layer_ids: Any = None, *, last_hidden: bool = False) -> CaptureSpec:
        spec = self.info.spec(str(self.device), last_hidden=last_hidden)
        if layer_ids is None or tuple(layer_ids) == spec.layer_ids:
            return spec
        from dataclasses import replace

        return replace(spec, layer_ids=tuple(layer_ids))


def choose_device(name: str) -> str:
    """`auto` is the first GPU when there is one.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available", where="device", do="Use device=cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{name!r} can't be used ({reason})", where="device", do="Choose auto, cpu or cuda"
        ) from None
    return name


def use_device(device: str) -> None:
    """Makes a numbered GPU the current one; pinned memory would else open the first GPU as well."""
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)


def free_memory() -> None:
    """Gives the memory of targets that nobody refers to any more back to their devices."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def describe_target(cfg: TargetConfig) -> TargetInfo:
    """Config, class and weights digest of a target; reads files, loads no weights.

    Raises:
        TargetError: the model can't be found or read.
    """
    from shared import target_files, tiny

    if cfg.model.startswith(tiny.PREFIX):
        config, digest = tiny.describe(cfg.model)
        for key in ("device_map", "quantization"):
            if getattr(cfg, key):
                raise ConfigError(
                    f"{cfg.model} is made in memory, nothing is loaded", where=f"target.{key}",
                    do="Leave it out, or name a model with weights",
                )  # fmt: skip
        return TargetInfo(cfg, config, config.architectures[0], digest, "none", None)
    path = target_files.locate(cfg)
    digest = target_files.weights_digest(path, cfg.gguf_file)
    path = target_files.prepared(path, cfg, digest)
    config = target_files.read_config(path, cfg)
    if not config.architectures:
        raise TargetError("config.json names no architecture", where=path)
    quantization = "gguf-dequantized" if cfg.gguf_file else "none"
    stored = getattr(config, "quantization_config", None)
    if stored:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        quantization = str(getattr(method, "value", method))
    if cfg.quantization:
        if stored or cfg.gguf_file:
            raise ConfigError(
                f"the weights are {quantization} already", where="target.quantization"
            )
        quantization = json.dumps(cfg.quantization, sort_keys=True)
    return TargetInfo(cfg, config, config.architectures[0], digest, quantization, path)


def load_tokenizer(cfg: TargetConfig, info: TargetInfo | None = None) -> Any:
    """The target's tokenizer (a fast one: masks need character offsets).

    Raises:
        TargetError: there is none, or only a slow one.
    """
    from shared import target_files, tiny

    if cfg.model.startswith(tiny.PREFIX):
        return tiny.byte_tokenizer()
    if info is not None and info.path is not None:
        path = info.path
    else:
        path = target_files.locate(cfg, weights=False)
        if cfg.gguf_file:
            digest = target_files.weights_digest(path, cfg.gguf_file)
            path = target_files.prepared(path, cfg, digest)
    return target_files.read_tokenizer(path, cfg)


def load_target(cfg: TargetConfig, device: str = "cpu", info: TargetInfo | None = None) -> Target:
    """Loads model and tokenizer for inference and locates layers, embedding, norm and head.

    Raises:
        TargetError: files are missing, the class is unknown, the layer list can't be found.
    """
    from shared import target_files, tiny

    info = info or describe_target(cfg)
    if info.path is None:
        model = tiny.build(cfg.model, cfg.dtype.value, info.attention(device))
    else:
        model = target_files.read_model(info.path, cfg, info, device)
    model = model.eval().requires_grad_(False)
    if info.path is None or not target_files.places_itself(cfg, info):
        model = model.to(device)
    return locate_parts(model, info, device, load_tokenizer(cfg, info))


def locate_parts(model: Any, info: TargetInfo, device: Any, tokenizer: Any) -> Target:
    """Finds the decoder's layers, embedding, final norm and head by their usual names.

    Raises:
        TargetError: nothing was found; says which paths were looked at.
    """
    for path in DECODER_PATHS:
        decoder = model
        for name in path.split("."):
            decoder = getattr(decoder, name, None)
        parts = [_first(decoder, names) for names in (LAYER_NAMES, EMBED_NAMES, NORM_NAMES)]
        head = model.get_output_embeddings()
        if all(part is not None for part in parts) and head is not None:
            layers, embed, norm = parts
            dispatch_gdn_by_device(layers)
            return Target(info, model, decoder, list(layers), embed, norm, head, device, tokenizer)
    looked = ", ".join(f"{path}.{{{'|'.join(LAYER_NAMES)}}}" for path in DECODER_PATHS)
    raise TargetError(
        f"no decoder layers found in {type(model).__name__}; looked for {looked} beside "
        f"{'|'.join(EMBED_NAMES)}, {'|'.join(NORM_NAMES)} and an output embedding",
        where="target.model",
    )


def _first(module: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(module, n) for n in names if getattr(module, n, None) is not None), None)


def full_weight(module: Any) -> Any:
    """A module's whole weight, also where ranks hold parts of it or accelerate has it elsewhere.

    Under tensor parallelism every rank has to call this.
    """
    weight = module.weight
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    if not weight.is_meta:
        return weight
    hooks = getattr(module._hf_hook, "hooks", [module._hf_hook])
    maps = (getattr(hook, "weights_map", None) for hook in hooks)
    return next(found["weight"] for found in maps if found is not None)


def mask_token_id(cfg: TargetConfig, tokenizer: Any) -> int | None:
    """The id of `target.mask_token` (a token, or its id in digits); None when none is named.

    Raises:
        TargetError: it is no single token, or one that already has a use in chats.
    """
    if cfg.mask_token is None:
        return None
    text = cfg.mask_token
    token = int(text) if text.isdigit() else tokenizer.convert_tokens_to_ids(text)
    unknown = tokenizer.unk_token_id is not None and token == tokenizer.unk_token_id
    if token is None or (unknown and text != tokenizer.unk_token):
        raise TargetError(
            f"{text!r} is not one token of the tokenizer",
            where="target.mask_token",
            do="Name a token that chats never contain, or its id in digits",
        )
    used = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    if token in used:
        raise TargetError(
            f"{text!r} is also the pad, start or end token",
            where="target.mask_token",
            do="Name a token that chats never contain, or its id in digits",
        )
    return int(token)


def end_token_ids(target: Target) -> list[int]:
    """Ids that end an answer: the generation config's and the tokenizer's, ascending."""
    stored = getattr(target.model.generation_config, "eos_token_id", None)
    ids = set(stored if isinstance(stored, list) else [stored])
    ids |= {target.tokenizer.eos_token_id, text_config(target.info.config).eos_token_id}
    flat = {i for item in ids if item is not None for i in _as_list(item)}
    return sorted(int(i) for i in flat)


def _as_list(item: Any) -> list[int]:
    return list(item) if isinstance(item, list | tuple) else [item]


def tokenizer_digest(tokenizer: Any) -> str:
    """32 hex digits over vocabulary, merges and special tokens."""
    import hashlib

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Padding and truncation are call settings, not part of what text becomes.
    backend["padding"] = backend["truncation"] = None
    text = json.dumps([backend, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
