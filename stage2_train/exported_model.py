"""A drafter trained by drafttape, for inference with transformers; needs nothing else.

    model = AutoModel.from_pretrained(directory, trust_remote_code=True)
    text = model.spec_generate(target, input_ids, max_new_tokens=256, stop_token_ids=[...])

The target's hidden states of the layers `target_layer_ids` (outputs of these decoder layers, that
is `hidden_states[id + 1]`), concatenated per token, become context features. A block of tokens
[last, MASK, ...] in the target's embedding becomes hidden states; the target's own head at slot k
gives the k-th next token. GDN layers keep a state of fixed size, attention layers a cache of the
context; both only ever take in accepted tokens.

Letters: T tokens, D width, B block, H heads, K / V key and value head dims, E attention head dim.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config


class DrafttapeConfig(PretrainedConfig):
    """Sizes of a drafter; the names are those of Qwen3.5's text configuration."""

    model_type = "drafttape"

    def __init__(
        self, hidden_size=576, intermediate_size=640, num_hidden_layers=1, layer_types=None,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, linear_num_key_heads=8,
        linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4, bidirectional_block=False, sliding_window=None,
        rope_parameters=None, rms_norm_eps=1e-6, block_size=16, vocab_size=None,
        draft_vocab_size=None, dflash_config=None, **kwargs,
    ):  # fmt: skip
        given = {name: value for name, value in locals().items() if name not in _NOT_FIELDS}
        super().__init__(**kwargs)
        for name, value in given.items():
            setattr(self, name, value)


_NOT_FIELDS = ("self", "kwargs", "__class__")


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Slots see the context (in a sliding layer its last tokens) and the whole block."""

    def __init__(self, config, kind):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        self.window = config.sliding_window if kind == "sliding_attention" else None
        size = config.hidden_size
        self.q_proj = nn.Linear(size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def new_state(self):
        empty = self.k_proj.weight.new_zeros(self.kv_heads, 0, self.head_dim)
        return {"k": empty, "v": empty, "seen": 0}

    def _rotated(self, x, first):  # [T, heads, E] -> [heads, T, E]
        exponent = torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        position = torch.arange(first, first + len(x), device=x.device).float()
        angle = position[:, None] / self.theta**exponent
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.transpose(0, 1).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _keys_values(self, x, first):
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(0, 1)
        return self._rotated(k, first), v

    def extend(self, state, context_TD):
        k, v = self._keys_values(context_TD, state["seen"])
        keep = slice(None) if self.window is None else slice(-self.window, None)
        state["k"] = torch.cat([state["k"], k], 1)[:, keep]
        state["v"] = torch.cat([state["v"], v], 1)[:, keep]
        state["seen"] += len(context_TD)

    def draft(self, state, x_BD):
        q = self.q_norm(self.q_proj(x_BD).unflatten(-1, (self.heads, self.head_dim)))
        k, v = self._keys_values(x_BD, state["seen"])
        mask, cached = None, state["k"].shape[1]
        if self.window is not None:
            place = torch.arange(cached + len(x_BD), device=x_BD.device)
            mask = (place[cached:, None] - place < self.window) | (place >= cached)
        share = self.heads // self.kv_heads
        out = F.scaled_dot_product_attention(
            self._rotated(q, state["seen"])[None],
            torch.cat([state["k"], k], 1).repeat_interleave(share, 0)[None],
            torch.cat([state["v"], v], 1).repeat_interleave(share, 0)[None],
            attn_mask=mask,
        )[0]
        return self.o_proj(out.transpose(0, 1).flatten(1))


class ShortConv(nn.Module):
    """SiLU of a causal depthwise convolution over [T, channels]."""

    def __init__(self, channels, kernel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))

    def forward(self, x):
        taps = self.weight.shape[-1]
        padded = F.pad(x.T[None], (taps - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=len(self.weight))[0].T)


class GatedDeltaNet(nn.Module):
    """S_t = e^g (I - beta k k^T) S_{t-1} + beta k v^T; a block goes on from the context's state."""

    def __init__(self, config):
        super().__init__()
        self.key_heads, self.value_heads = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
        )
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.bidirectional = config.bidirectional_block
        size, kernel = config.hidden_size, config.linear_conv_kernel_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        for name, rows in (
            ("q", keys), ("k", keys), ("v", values), ("g", values),
            ("b", self.value_heads), ("a", self.value_heads),
        ):  # fmt: skip
            setattr(self, f"{name}_proj", nn.Linear(size, rows, bias=False))
        self.o_proj = nn.Linear(values, size, bias=False)
        self.q_conv1d, self.k_conv1d = ShortConv(keys, kernel), ShortConv(keys, kernel)
        self.v_conv1d = ShortConv(values, kernel)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))
        self.o_norm = RMSNorm(self.value_dim, config.rms_norm_eps)

    def new_state(self):
        weight = self.k_proj.weight
        tail = self.k_conv1d.weight.shape[-1] - 1
        return {
            "S": weight.new_zeros(
                self.value_heads, self.key_dim, self.value_dim, dtype=torch.float32
            ),
            "k": weight.new_zeros(tail, self.k_proj.out_features),
            "v": weight.new_zeros(tail, self.v_proj.out_features),
        }

    def _heads(self, x, unit):  # [T, h * dim] -> float32 [H, T, dim]
        x = x.float().unflatten(-1, (self.key_heads if unit else self.value_heads, -1))
        if unit:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
            x = x.repeat_interleave(self.value_heads // self.key_heads, -2)
        return x.transpose(0, 1)

    def _gates(self, x):  # beta, g: [H, T]
        g = -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias.float())
        return self.b_proj(x).float().sigmoid().T, g.T

    def extend(self, state, context_TD, chunk=64):
        tail = len(state["k"])
        k = torch.cat([state["k"], self.k_proj(context_TD)])
        v = torch.cat([state["v"], self.v_proj(context_TD)])
        keys = self._heads(self.k_conv1d(k)[tail:], True)
        values = self._heads(self.v_conv1d(v)[tail:], False)
        beta, g = self._gates(context_TD)
        for start in range(0, len(context_TD), chunk):
            part = slice(start, start + chunk)
            u, w, total, _ = _solve(keys[:, part], values[:, part], beta[:, part], g[:, part])
            end = total[:, -1:]
            k_end = keys[:, part] * (end - total).exp().float()[..., None]
            delta = u - w @ state["S"]
            state["S"] = end.exp().float()[..., None] * state["S"] + k_end.mT @ delta
        state["k"], state["v"] = k[len(k) - tail :], v[len(v) - tail :]

    def draft(self, state, x_BD):
        q = self._heads(self.q_conv1d(self.q_proj(x_BD)), True) * self.key_dim**-0.5
        k = self._heads(self.k_conv1d(self.k_proj(x_BD)), True)
        v = self._heads(self.v_conv1d(self.v_proj(x_BD)), False)
        beta, g = self._gates(x_BD)
        u, w, total, between = _solve(k, v, beta, g)
        products = q @ k.mT
        o = (q * total.exp().float()[..., None]) @ state["S"]
        o = o + products * between @ (u - w @ state["S"])
        if self.bidirectional:
            u, _, _, between = _solve(k.flip(1), v.flip(1), beta.flip(1), g.flip(1))
            o = o + ((products.flip(1, 2) * between).tril(-1) @ u).flip(1)
        o = self.o_norm(o).transpose(0, 1).flatten(1) * F.silu(self.g_proj(x_BD).float())
        return self.o_proj(o.to(x_BD.dtype))


def _solve(k, v, beta, g):
    """Pseudo-values u - w S of a run of tokens that starts from S; log decay sums; decay matrix."""
    total = g.double().cumsum(-1)
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).float()
    between = between.masked_fill(later, float("-inf")).exp()
    system = beta[..., None] * (k @ k.mT) * between
    right = torch.cat([beta[..., None] * v, (beta * total.exp().float())[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    return u, w, total, between


class Layer(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config, kind)

    @property
    def mixer(self):
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn

    def draft(self, state, x_BD):
        x_BD = x_BD + self.mixer.draft(state, self.input_layernorm(x_BD))
        return x_BD + self.mlp(self.post_attention_layernorm(x_BD))


class DrafttapeModel(PreTrainedModel):
    """The drafter. Embedding and head are the target's and not part of it."""

    config_class = DrafttapeConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        settings = config.dflash_config
        self.target_layer_ids = list(settings["target_layer_ids"])
        self.mask_token_id, self.block_size = settings["mask_token_id"], config.block_size
        size = config.hidden_size
        self.fc = nn.Linear(len(self.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        drafted = getattr(config, "draft_vocab_size", None)  # None: all tokens of the target
        ids = None if drafted is None else torch.zeros(drafted, dtype=torch.int64)
        self.register_buffer("draft_ids", ids)  # row of the draft head -> token
        self.post_init()

    def _init_weights(self, module):
        """Weights come from the checkpoint."""

    def new_state(self):
        """One entry a layer, before the first token."""
        return [layer.mixer.new_state() for layer in self.layers]

    @torch.no_grad()
    def extend(self, state, target_hidden):
        """Takes in accepted tokens: [T, layers * D] target states, in place."""
        context_TD = self.hidden_norm(self.fc(target_hidden.to(self.fc.weight.dtype)))
        for layer, layer_state in zip(self.layers, state, strict=True):
            layer.mixer.extend(layer_state, context_TD)

    @torch.no_grad()
    def draft(self, state, noise_embedding):
        """[B, D] embeddings of [last token, MASK, ...] to hidden states; leaves the state."""
        x_BD = noise_embedding.to(self.fc.weight.dtype)
        for layer, layer_state in zip(self.layers, state, strict=True):
            x_BD = layer.draft(layer_state, x_BD)
        return self.norm(x_BD)

    def forward(self, noise_embedding, target_hidden, state=None, **_):
        """[1, B, D] and [1, T, layers * D] to [1, B, D]; `state` goes on with earlier tokens."""
        state = self.new_state() if state is None else state
        self.extend(state, target_hidden[0])
        return self.draft(state, noise_embedding[0])[None]

    @torch.no_grad()
    def spec_generate(self, target, input_ids, max_new_tokens=256, stop_token_ids=()):
        """Greedy speculative decoding of one prompt [1, T].

        The target's cache must be croppable, and none of the tapped layers its last one, whose
        `hidden_states` entry stands behind the final norm.
        """
        layers = target.config.get_text_config().num_hidden_layers
        if max(self.target_layer_ids) + 1 >= layers:
            raise ValueError("the target's last layer is tapped: capture it with a hook")
        embed, head = target.get_input_embeddings(), target.get_output_embeddings()
        rows = None if self.draft_ids is None else head.weight[self.draft_ids]
        accepts = inspect.signature(target.forward).parameters
        name = "cache" if "cache" in accepts else "past_key_values"  # renamed in transformers 5
        out = target(input_ids, use_cache=True, output_hidden_states=True)
        cache, state = out.past_key_values, self.new_state()
        tokens, fresh = input_ids[0].tolist(), len(input_ids[0])
        tokens.append(int(out.logits[0, -1].argmax()))
        limit = len(input_ids[0]) + max_new_tokens
        while len(tokens) < limit and tokens[-1] not in stop_token_ids:
            taps = [out.hidden_states[i + 1][0, :fresh] for i in self.target_layer_ids]
            self.extend(state, torch.cat(taps, -1))
            ids = torch.full((self.block_size,), self.mask_token_id, device=input_ids.device)
            ids[0] = tokens[-1]
            hidden = self.draft(state, embed(ids))[1:]
            hidden = hidden.to(head.weight.dtype)
            if rows is None:
                ids[1:] = head(hidden).argmax(-1)
            else:
                ids[1:] = self.draft_ids[F.linear(hidden, rows).argmax(-1)]
            out = target(ids[None], **{name: cache}, use_cache=True, output_hidden_states=True)
            choice = out.logits[0].argmax(-1)
            accepted = int((ids[1:] == choice[:-1]).long().cumprod(0).sum())
            new = [*ids[1 : accepted + 1].tolist(), int(choice[accepted])]
            stop = next((i for i, t in enumerate(new) if t in stop_token_ids), len(new) - 1)
            tokens += new[: stop + 1]
            fresh = accepted + 1
            if fresh < self.block_size:
                cache.crop(fresh - self.block_size)
        return torch.tensor([tokens[:limit]], device=input_ids.device)


class DFlashDraftModel(DrafttapeModel):
    """An all-attention drafter in DFlash's layout, whose configuration is Qwen3's."""

    config_class = Qwen3Config
