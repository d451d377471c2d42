"""The drafter's architecture as configuration, and its size as arithmetic (torch-free).

Stage two builds it, stage one states its size in `plan`. A test holds the arithmetic against the
built drafter for every kind of layer.

Letters: D width, L tapped states, H heads.
"""

from dataclasses import dataclass

from shared.config import opt
from shared.errors import ConfigError

LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")
MAX_CONV_TAPS = 4  # the packed layout has three zero rows between documents


@dataclass
class DrafterConfig:
    """The drafter's architecture; null sizes are taken from the target."""

    layer_types: list[str] = opt(
        ["linear_attention"] * 4 + ["full_attention"],
        "one of linear_attention, full_attention, sliding_attention per layer",
    )
    hidden_size: int | None = opt(None, "width; must equal the target's (shared embedding)")
    intermediate_size: int = opt(1024, "width of the SwiGLU MLP", low=1)
    num_attention_heads: int = opt(8, "query heads of attention layers", low=1)
    num_key_value_heads: int = opt(4, "key/value heads of attention layers", low=1)
    head_dim: int = opt(64, "head size of attention layers", low=2)
    linear_num_key_heads: int = opt(8, "key heads of GDN layers", low=1)
    linear_num_value_heads: int = opt(8, "value heads of GDN layers", low=1)
    linear_key_head_dim: int = opt(64, "key head size of GDN layers", low=1)
    linear_value_head_dim: int = opt(64, "value head size of GDN layers", low=1)
    conv_kernel_size: int = opt(4, "taps of the short convolutions", low=1)
    block_size: int = opt(16, "tokens of a block: the anchor and block_size-1 masked slots", low=2)
    sliding_window: int = opt(1024, "window of sliding_attention layers, tokens", low=1)
    rope_theta: float = opt(10000.0, "base of the rotary embedding of attention layers", above=0)
    rms_norm_eps: float = opt(1e-6, "epsilon of RMSNorm", low=0)
    bidirectional_block: bool = opt(False, "GDN layers also read the block from its end")
    chunk_size: int = opt(32, "chunk of the GDN context scan on CPU", low=1)
    mask_token_id: int | None = opt(None, "id of MASK; null: the one recorded in the cache")
    draft_vocabulary: int | None = opt(
        None, "draft only the training split's so many most frequent tokens; null: all", low=1
    )
    draft_vocabulary_ids: str | None = opt(
        None, "file of the ids to draft instead: a JSON list, or one id a line; null: counted"
    )
    init_std: float = opt(0.02, "standard deviation of initial weights", low=0)
    logit_std: float = opt(
        1.0, "standard deviation of a random state's logits at the start (Muon: 3)", above=0
    )


@dataclass(frozen=True)
class DrafterSize:
    """Trainable parameters by part; `norms` are those outside of the mixers."""

    fc: int
    gdn: int
    attention: int
    mlp: int
    norms: int

    @property
    def total(self) -> int:
        return self.fc + self.gdn + self.attention + self.mlp + self.norms


def drafter_size(cfg: DrafterConfig, num_states: int, target_hidden: int) -> DrafterSize:
    """What `stage2_train.drafter.Drafter` of the same arguments has to train.

    Raises:
        ConfigError: sizes that don't fit together.
    """
    check_drafter(cfg, num_states, target_hidden)
    width, layers = target_hidden, len(cfg.layer_types)
    keys = cfg.linear_num_key_heads * cfg.linear_key_head_dim
    values = cfg.linear_num_value_heads * cfg.linear_value_head_dim
    gdn = width * (2 * keys + 3 * values)  # q, k; v, output gate, o
    gdn += 2 * width * cfg.linear_num_value_heads  # a, b
    gdn += cfg.conv_kernel_size * (2 * keys + values)  # convolutions behind q, k, v
    gdn += 2 * cfg.linear_num_value_heads + cfg.linear_value_head_dim  # A_log, dt_bias; o_norm
    heads = 2 * cfg.num_attention_heads + 2 * cfg.num_key_value_heads  # q, o; k, v
    attention = width * heads * cfg.head_dim + 2 * cfg.head_dim  # q_norm, k_norm
    num_gdn = cfg.layer_types.count("linear_attention")
    return DrafterSize(
        fc=num_states * width * width,
        gdn=num_gdn * gdn,
        attention=(layers - num_gdn) * attention,
        mlp=layers * 3 * width * cfg.intermediate_size,
        norms=(2 * layers + 2) * width,
    )


def check_drafter(cfg: DrafterConfig, num_states: int, target_hidden: int) -> None:
    """
    Raises:
        ConfigError: sizes that don't fit together.
    """
    unknown = [kind for kind in cfg.layer_types if kind not in LAYER_TYPES]
    if unknown or not cfg.layer_types:
        raise ConfigError(
            f"{unknown[0]!r} is no layer type" if unknown else "there are no layers",
            where="drafter.layer_types",
            do=f"Choose from {', '.join(LAYER_TYPES)}",
        )
    if cfg.hidden_size not in (None, target_hidden):
        raise ConfigError(
            f"{cfg.hidden_size} is not the target's width {target_hidden}",
            where="drafter.hidden_size",
            do="Leave it null: the embedding and head are shared",
        )
    if num_states < 1:
        raise ConfigError("the cache holds no tapped states", where="drafter")
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(cfg, few) < 1 or getattr(cfg, many) % getattr(cfg, few):
            raise ConfigError(
                f"{getattr(cfg, many)} heads can't share {getattr(cfg, few)}",
                where=f"drafter.{few}",
            )
    if cfg.block_size < 2:
        raise ConfigError("a block needs at least one masked slot", where="drafter.block_size")
    if not 1 <= cfg.conv_kernel_size <= MAX_CONV_TAPS:
        raise ConfigError(
            f"convolutions have 1 to {MAX_CONV_TAPS} taps", where="drafter.conv_kernel_size"
        )
    if cfg.head_dim % 2:
        raise ConfigError("an odd head can't be rotated", where="drafter.head_dim")
