"""What a cache keeps of the target itself: embedding, head, and what their users must know."""

from shared.config import to_plain
from shared.errors import CacheError
from shared.store import Store
from shared.target import (
    Target,
    end_token_ids,
    full_weight,
    mask_token_id,
    text_config,
    tokenizer_digest,
)


def has_assets(store: Store) -> bool:
    """They are stored and whole."""
    try:
        store.target_assets()
    except CacheError:
        return False
    return True


def write_assets(store: Store, target: Target, *, write: bool = True) -> None:
    """Stores the target's embedding, head and what training and decoding must know of it.

    Under tensor parallelism every rank calls this, and one of them writes.
    """
    embed = full_weight(target.embed)
    head = None if target.tied else full_weight(target.head)
    if not write:
        return
    config, tokenizer, cfg = text_config(target.info.config), target.tokenizer, target.info.cfg
    info = {
        "model": cfg.model,
        "revision": cfg.revision,
        "name": cfg.name,
        "architecture": target.info.architecture,
        "weights": target.info.weights,
        "vocab_size": int(embed.shape[0]),
        "hidden_size": store.spec.hidden_size,
        "tied": target.tied,
        "mask_token_id": mask_token_id(cfg, tokenizer),
        "eos_token_ids": end_token_ids(target),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "tokenizer": tokenizer_digest(tokenizer),
        "special_token_ids": sorted(int(i) for i in tokenizer.added_tokens_encoder.values()),
        "num_layers": target.info.num_layers,
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "layer_ids": list(store.spec.layer_ids),
        # A later load is by one process.
        "target": to_plain(cfg) | {"tensor_parallel": 1},
    }
    store.write_target_assets(embed, head, info)
