"""The target's frozen embedding and head beside the cache, so that training needs no target.

target/target.json          info and the weights' size and sha256
target/weights.safetensors  "embed" [V, D] and, unless tied, "lm_head" [V, D], bf16
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.errors import CacheError, CorruptionError, MismatchError
from shared.fs import seal_json, unseal_json

if TYPE_CHECKING:
    from shared.store import Store

_INFO, _WEIGHTS = "target/target.json", "target/weights.safetensors"


@dataclass(frozen=True)
class TargetAssets:
    """What training needs to know of the target.

    Args:
        info: model, revision, vocab_size, hidden_size, tied, mask_token_id, eos_token_ids,
            pad_token_id and bos_token_id (or None), tokenizer digest, special token ids,
            num_layers, rms_norm_eps, layer_ids, and the target's configuration to load it again.
        weights: (bytes, sha256) of the weights file.
    """

    info: dict[str, Any]
    weights: tuple[int, str]


def write_assets(store: "Store", embed: Any, lm_head: Any, info: dict[str, Any]) -> None:
    """Stores embedding and head (torch [V, D]) once.

    Raises:
        MismatchError: the cache holds other weights already.
    """
    import torch
    from safetensors.torch import save

    tensors = {"embed": embed.detach().to("cpu", torch.bfloat16).contiguous()}
    if lm_head is not None:
        tensors["lm_head"] = lm_head.detach().to("cpu", torch.bfloat16).contiguous()
    data = save(tensors)
    document = {
        "info": info,
        "weights": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
    }
    if store.files.exists(_INFO):
        if read_assets(store).weights[1] != document["weights"]["sha256"]:
            raise MismatchError(
                "the cache holds another embedding or head", where=f"{store.root}/target"
            )
        return
    store.files.write(_WEIGHTS, data)
    store.files.write(_INFO, seal_json(document))


def read_assets(store: "Store") -> TargetAssets:
    """
    Raises:
        CacheError: the cache has none.
        CorruptionError: they are damaged.
    """
    where = f"{store.root}/{_INFO}"
    try:
        document = unseal_json(store.files.read(_INFO), where)
    except FileNotFoundError:
        raise CacheError(
            "the cache has no embedding and head of its target",
            where=store.root,
            do="Run drafttape extract on it again",
        ) from None
    weights = document["weights"]
    return TargetAssets(document["info"], (weights["bytes"], weights["sha256"]))


def load_frozen(store: "Store") -> tuple[Any, Any]:
    """(embedding, head) as bf16 tensors [V, D]; the same object when they are tied.

    Raises:
        CacheError: the cache has none.
        CorruptionError: they are damaged.
    """
    from safetensors.torch import load

    tensors = load(verify_assets(store))
    embed = tensors["embed"]
    return embed, tensors.get("lm_head", embed)


def verify_assets(store: "Store") -> bytes:
    """The weights file's bytes, checked.

    Raises:
        CorruptionError: it is missing or damaged.
    """
    assets, where = read_assets(store), f"{store.root}/{_WEIGHTS}"
    try:
        data = store.files.read(_WEIGHTS)
    except FileNotFoundError:
        raise CorruptionError("the file is missing", where=where) from None
    if (len(data), hashlib.sha256(data).hexdigest()) != assets.weights:
        raise CorruptionError("the file is damaged (its checksum doesn't match)", where=where)
    return data
