"""The block-diffusion drafter: masked blocks are filled in one pass from the target's states.

A block starts at an anchor token a: the embeddings of [x_a, MASK, …] become hidden states whose
slot k predicts token a+k through the target's own head. Context features come from the target's
states at the tapped layers. Embedding and head are the target's, frozen, and passed in: they are
not parameters of the drafter.

Letters: T context tokens, L tapped states, D width, N anchors, B block size.
"""

from dataclasses import dataclass

import torch
from torch import nn

from shared.drafter_config import DrafterConfig, check_drafter
from shared.errors import ConfigError
from stage2_train.attention import BlockAttention, CacheState
from stage2_train.geometry import Context, Geometry
from stage2_train.layers import MLP, Linear, RMSNorm
from stage2_train.mixer import GDNMixer, MixerState
from stage2_train.scan import read_by_scan


class DrafterLayer(nn.Module):
    """x += mixer(norm(x), context); x += MLP(norm(x))."""

    def __init__(self, cfg: DrafterConfig, kind: str, hidden_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(hidden_size, cfg.intermediate_size)
        if kind == "linear_attention":
            self.linear_attn = GDNMixer(
                hidden_size, cfg.linear_num_key_heads, cfg.linear_num_value_heads,
                cfg.linear_key_head_dim, cfg.linear_value_head_dim, cfg.conv_kernel_size,
                cfg.rms_norm_eps, cfg.bidirectional_block,
            )  # fmt: skip
        else:
            self.self_attn = BlockAttention(
                hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim,
                cfg.rope_theta, cfg.rms_norm_eps,
                cfg.sliding_window if kind == "sliding_attention" else None,
            )  # fmt: skip

    @property
    def mixer(self) -> GDNMixer | BlockAttention:
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn

    def forward(self, x_NBD, context: Context, geometry: Geometry) -> torch.Tensor:
        return self.feed_forward(x_NBD + self.mixer(self.input_layernorm(x_NBD), context, geometry))

    def feed_forward(self, x_NBD) -> torch.Tensor:
        """The half of a layer that looks at one position."""
        return x_NBD + self.mlp(self.post_attention_layernorm(x_NBD))

    def draft(self, state, x_1BD) -> torch.Tensor:
        return self.feed_forward(x_1BD + self.mixer.draft(state, self.input_layernorm(x_1BD)))


@dataclass
class DraftState:
    """What drafting needs of the accepted tokens, one entry a layer. There is no rollback: only
    accepted tokens ever enter."""

    layers: list[MixerState | CacheState]
    num_tokens: int = 0


class Drafter(nn.Module):
    """The trainable part: `fc`, the layers and the final norm.

    Args:
        cfg: architecture.
        num_states: L, tapped states that are read (a cached last hidden state is not one of them).
        target_hidden: D of the target.

    Raises:
        ConfigError: sizes that don't fit together.
    """

    def __init__(self, cfg: DrafterConfig, num_states: int, target_hidden: int) -> None:
        super().__init__()
        check_drafter(cfg, num_states, target_hidden)
        self.cfg, self.num_states, self.hidden_size = cfg, num_states, target_hidden
        self.compute_dtype: torch.dtype | None = None  # None: that of the weights
        self.fc = Linear(num_states * target_hidden, target_hidden)
        self.hidden_norm = RMSNorm(target_hidden, cfg.rms_norm_eps)
        self.layers = nn.ModuleList(
            DrafterLayer(cfg, kind, target_hidden) for kind in cfg.layer_types
        )
        self.norm = RMSNorm(target_hidden, cfg.rms_norm_eps)
        size = cfg.draft_vocabulary
        # The ids of the head's rows, ascending (see `draft_vocabulary`); -1: not known yet.
        self.register_buffer(
            "draft_ids", None if size is None else torch.full((size,), -1), persistent=False
        )
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=cfg.init_std)

    @property
    def dtype(self) -> torch.dtype:
        """What the layers compute in."""
        return self.compute_dtype or self.fc.weight.dtype

    def use_kernels(self, device: torch.device) -> bool:
        """Lets layers use kernels on a CUDA device, after a check there: FLA's in GDN layers, flex
        attention in the others.

        Returns:
            whether FLA's is used; without FLA or CUDA the scan is.

        Raises:
            TrainingError: a kernel's results or gradients differ from its twin's.
        """
        from stage2_train import flex, kernels

        fast = kernels.available(device)
        if fast:
            kernels.check(device, self.cfg.linear_key_head_dim, self.cfg.linear_value_head_dim)
        for layer in self.layers:
            if isinstance(layer.mixer, GDNMixer):
                layer.mixer.read = kernels.read_by_kernel if fast else read_by_scan
            elif flex.available(device):
                flex.check(device, self.cfg.head_dim, layer.mixer.window)
                layer.mixer.attend = flex.blocks_attend
        return fast

    @torch.no_grad()
    def match_head(self, head_VD) -> None:
        """Starts the final norm at the scale where a random state's logits have `cfg.logit_std`.

        A block starts as embeddings. Under a tied head their logits for their own token are huge
        (at SmolLM2 the first loss is 40 with a weight of 1, 19 with a deviation of 1; 11 is
        chance), and the first updates go into undoing that. AdamW wants the small start: held-out
        loss 6.62 against 7.00 at a weight of 1 after 60 steps. Muon undoes it within ten steps and
        then gains from larger logits: 5.97 at a deviation of 3.25 (a weight of 1), 6.07 at 1, 6.74
        at 5.9 after 50.
        """
        rms = float(head_VD.float().pow(2).sum(1).mean().sqrt())
        self.norm.weight.fill_(self.cfg.logit_std / rms)

    def head_rows(self, head_VD) -> torch.Tensor:
        """The rows of the target's head that drafting uses: all, or the draft vocabulary's."""
        return head_VD if self.draft_ids is None else head_VD[self.draft_ids]

    def parts(self) -> dict:
        """Parameter name -> Muon's parts (see `param_rules`), every matrix."""
        from stage2_train.param_rules import whole

        parts = {"fc.weight": whole("fc")}
        for prefix, module in self.named_modules():
            if isinstance(module, GDNMixer | BlockAttention | MLP):
                parts.update({f"{prefix}.{name}": part for name, part in module.parts().items()})
        return parts

    def features(self, hidden_TLD) -> torch.Tensor:
        """The target's states [T, >= L, D] to context features [T, D]."""
        flat = hidden_TLD[:, : self.num_states].flatten(1)
        return self.hidden_norm(self.fc(flat.to(self.dtype)))

    def embed_blocks(self, token_N, embed) -> torch.Tensor:
        """[x_a, MASK, …] as embeddings [N, B, D]; `embed`: the target's [vocabulary, D]."""
        if self.cfg.mask_token_id is None:
            raise ConfigError("the drafter has no mask token", where="drafter.mask_token_id")
        block_NBD = embed[self.cfg.mask_token_id].expand(
            len(token_N), self.cfg.block_size, self.hidden_size
        )
        return torch.cat([embed[token_N][:, None], block_NBD[:, 1:]], 1).to(self.dtype)

    def forward(self, batch, embed) -> torch.Tensor:
        """Hidden states behind the final norm, [N, B, D]; slot k predicts token anchor + k.

        Args:
            batch: a `Batch` (its hidden_TLD, input_ids_T, document_T, position_T and anchor_N).
            embed: the target's input embedding [vocabulary, D].
        """
        geometry = Geometry.of(
            batch.document_T, batch.position_T, batch.anchor_N,
            block=self.cfg.block_size, chunk=self.cfg.chunk_size,
        )  # fmt: skip
        if not geometry.num_anchors:
            return self.fc.weight.new_zeros(0, self.cfg.block_size, self.hidden_size)
        context_TD = self.features(batch.hidden_TLD)
        context = Context(context_TD, geometry.spread(context_TD))
        x_NBD = self.embed_blocks(batch.input_ids_T[batch.anchor_N], embed)
        for layer in self.layers:
            x_NBD = layer(x_NBD, context, geometry)
        return self.norm(x_NBD)

    def new_state(self) -> DraftState:
        """The state before the first token of a text."""
        return DraftState([layer.mixer.new_state() for layer in self.layers])

    @torch.no_grad()
    def extend(self, state: DraftState, hidden_TLD) -> None:
        """Takes in the target's states [T, >= L, D] of the next accepted tokens, in place."""
        if not len(hidden_TLD):
            return
        context_TD = self.features(hidden_TLD)
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            layer.mixer.extend(layer_state, context_TD, self.cfg.chunk_size)
        state.num_tokens += len(hidden_TLD)

    @torch.no_grad()
    def draft(self, state: DraftState, embeds_BD) -> torch.Tensor:
        """Fills the block whose anchor is the token right behind the state's tokens.

        Args:
            embeds_BD: the target's embeddings of [anchor, MASK, …].

        Returns:
            [B, D]; slot k predicts the k-th token after the anchor.
        """
        x_1BD = embeds_BD[None].to(self.dtype)
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x_1BD = layer.draft(layer_state, x_1BD)
        return self.norm(x_1BD[0])
