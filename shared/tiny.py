"""Tiny random targets of the real model classes, and a byte tokenizer with a chat template.

`model: random://FAMILY?seed=N` builds one; tests and the first minutes of a new setup use them, for
they need no download. Sizes are odd on purpose (fewer key than value heads, 7 layers).
"""

import hashlib
from functools import lru_cache
from typing import Any

from shared.errors import ConfigError

PREFIX = "random://"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<think>", "</think>")
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {"shared_expert_intermediate_size": 16}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
# family: (config class, model class, sizes); a "text" wrapper takes them as text_config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _BASE | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _BASE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _BASE),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _BASE | _MOE),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _BASE | _GDN | _MOE | _SHARED),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _BASE | _GDN),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _BASE | _GDN),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        _BASE | _GDN | _MOE | _SHARED,
    ),
}


def _parse(model: str) -> tuple[str, int]:
    family, _, query = model.removeprefix(PREFIX).partition("?")
    if family not in FAMILIES or (query and not query.removeprefix("seed=").isdigit()):
        raise ConfigError(
            f"{model!r} is not random://FAMILY?seed=N; families: {', '.join(FAMILIES)}",
            where="target.model",
        )
    return family, int(query.removeprefix("seed=") or 0)


def _config(model: str) -> Any:
    import transformers

    family, _ = _parse(model)
    config_class, model_class, sizes = FAMILIES[family]
    kind = getattr(transformers, config_class)
    if model_class.endswith("ForConditionalGeneration"):
        config = kind(text_config=dict(sizes), vision_config=dict(_VISION))
    else:
        config = kind(**sizes)
    config.architectures = [model_class]
    return config


def build(model: str, dtype: str, attention: str) -> Any:
    """The random model: the same weights for the same family and seed."""
    import torch
    import transformers

    _, seed = _parse(model)
    config = _config(model)
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = getattr(transformers, config.architectures[0])(config)
        # Untrained weights of .02 leave every layer's output near its input: louder ones test more.
        for name, parameter in sorted(built.named_parameters()):
            if parameter.ndim == 2 and "embed" not in name:
                torch.nn.init.normal_(parameter, std=0.15)
    built.tie_weights()
    return built.to(getattr(torch, dtype))


@lru_cache(maxsize=16)
def describe(model: str) -> tuple[Any, str]:
    """(config, digest of the weights)."""
    built = build(model, "float32", "sdpa")
    digest = hashlib.blake2b(b"drafttape.random.v1", digest_size=16)
    for name, tensor in sorted(built.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return _config(model), digest.hexdigest()


def byte_tokenizer() -> Any:
    """One token a byte, plus SPECIAL, with ChatML as its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    return fast
