"""Targets of every family: found, described without weights, tapped at the right place."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shared import target as target_module
from shared import target_files, target_kernels, tiny
from shared.capture import capture, pad_batch
from shared.config import Dtype, TapRule, TargetConfig
from shared.errors import ConfigError, DrafttapeError, MismatchError, TargetError
from shared.store import Store
from shared.target import (
    TargetInfo,
    describe_target,
    dflash_layer_ids,
    load_target,
    locate_parts,
    mask_token_id,
    resolve_layer_ids,
)
from shared.target_kernels import GDN_FUNCTIONS, dispatch_gdn_by_device

FAMILIES = sorted(tiny.FAMILIES)


def tiny_target(family: str, **changes) -> target_module.Target:
    cfg = TargetConfig(
        name=family, model=f"random://{family}", dtype=Dtype.float32, num_taps=3, **changes
    )
    return load_target(cfg)


@functools.cache
def one_target(family: str) -> target_module.Target:
    """A target that tests share; they leave it as it is."""
    return tiny_target(family)


def states(target, sequences, layer_ids=None, last_hidden=False):
    """[T, L, D] float32 of each sequence, from one padded batch."""
    ids_BT, lengths = pad_batch(sequences, 7)
    taps = target.info.layer_ids if layer_ids is None else layer_ids
    hidden = capture(target, ids_BT, lengths, taps, last_hidden).float()
    return [hidden[row, :length] for row, length in enumerate(lengths)]


def tokens(length: int, seed: int = 0) -> list[int]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (length,), generator=made).tolist()


def error(ours, theirs) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_dflash_rule_gives_the_published_ids():
    assert dflash_layer_ids(36, 5) == [1, 9, 17, 25, 33]  # Qwen3-8B-DFlash
    assert dflash_layer_ids(64, 5) == [1, 16, 31, 46, 61]  # Qwen3.6-27B
    assert dflash_layer_ids(30, 5) == [1, 8, 14, 20, 27]
    assert dflash_layer_ids(30, 1) == [15]


def test_layer_ids_are_never_guessed():
    cfg = TargetConfig(name="x", model="x")
    with pytest.raises(ConfigError, match="don't fit"):
        dflash_layer_ids(6, 5)
    for ids in ([], [3, 1], [1, 1], [-1, 2], [4, 7]):
        with pytest.raises(ConfigError):
            resolve_layer_ids(replace(cfg, tap_rule=TapRule.explicit, layer_ids=ids), 7)
    with pytest.raises(ConfigError, match="explicit"):
        resolve_layer_ids(replace(cfg, layer_ids=[1, 2]), 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_03_a_tap_is_the_output_of_its_layer(family):
    target = one_target(family)
    ids = torch.tensor([tokens(20)])
    output = target.decoder(input_ids=ids, output_hidden_states=True, use_cache=False)
    (ours,) = states(target, [tokens(20)], range(6))
    for layer in range(6):
        theirs = output.hidden_states[layer + 1][0].to(torch.bfloat16).float()
        assert torch.equal(ours[:, layer], theirs), layer


def test_trap_03_on_a_toy_whose_layer_i_adds_2_to_the_i():
    class Layer(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            assert self.number < 6, "layers after the last tap are not run"
            return x + 2**self.number

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(10, 4)
            self.embed_tokens.weight.data.zero_()
            self.layers = torch.nn.ModuleList(Layer(i) for i in range(8))
            self.norm = torch.nn.Identity()

        def forward(self, input_ids, use_cache):
            x = self.embed_tokens(input_ids)
            for layer in self.layers:
                x = layer(x)
            return SimpleNamespace(last_hidden_state=self.norm(x))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Decoder()
            self.lm_head = torch.nn.Linear(4, 10)

        def get_output_embeddings(self):
            return self.lm_head

    config = SimpleNamespace(hidden_size=4, num_hidden_layers=8)
    config.get_text_config = lambda decoder: config
    info = TargetInfo(TargetConfig(name="toy", model="toy"), config, "Toy", "w", "none", None)
    target = locate_parts(Model(), info, "cpu", None)
    hidden = capture(target, torch.tensor([[1, 2, 3]]), [3], [0, 2, 5])
    assert hidden[0, :, :, 0].tolist() == [[1.0, 7.0, 63.0]] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_04_the_last_tap_is_before_the_final_norm(family):
    target = one_target(family)
    ids = torch.tensor([tokens(16)])
    (ours,) = states(target, [tokens(16)], [6], last_hidden=True)
    logits = target.model(input_ids=ids, use_cache=False).logits[0]
    # bf16 states: compare within their rounding.
    assert error(target.head(target.norm(ours[:, 0])), logits) < 2e-2
    assert error(target.head(ours[:, 1]), logits) < 2e-2
    assert error(target.head(ours[:, 0]), logits) > 5e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_01_a_sample_is_the_same_alone_in_any_slot_and_again(family):
    target = one_target(family)
    sample, longer = tokens(37), tokens(70, 1)
    (alone,) = states(target, [sample])
    batched = states(target, [sample, longer, tokens(5, 2), sample])
    for other in (batched[0], batched[3], states(target, [sample])[0]):
        assert other.shape == alone.shape
        assert error(other, alone) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_02_a_shared_prefix_changes_nothing(family):
    target = one_target(family)
    prefix = tokens(100)
    first, second = prefix + tokens(9, 1), prefix + tokens(13, 2)
    (cold,) = states(tiny_target(family), [second])
    states(target, [first])
    (warm,) = states(target, [second])
    assert warm.shape == (113, 3, 32)
    assert torch.equal(warm, cold)


@pytest.mark.parametrize("length", [63, 64, 65])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_trap_05_and_06_pads_do_not_reach_real_tokens_at_chunk_edges(family, length):
    target = one_target(family)
    sample = tokens(length)
    (alone,) = states(target, [sample])
    padded, _ = states(target, [sample, tokens(90, 1)])
    assert error(padded, alone) < 1e-3
    ids = torch.tensor([sample])
    whole = target.decoder(input_ids=ids, output_hidden_states=True, use_cache=False)
    taps = torch.stack([whole.hidden_states[i + 1][0] for i in target.info.layer_ids], 1)
    assert error(alone, taps) < 1e-2


def test_trap_05_the_delta_rule_backend_is_in_the_spec_and_another_is_refused(
    tmp_path, monkeypatch
):
    info = describe_target(TargetConfig(name="q", model="random://qwen3_5", num_taps=3))
    spec = info.spec("cpu")
    assert spec.backend["gdn"] == "torch"
    Store.create(tmp_path / "cache", spec)
    monkeypatch.setattr(target_module, "gdn_backend", lambda device: "fla 9.9")
    with pytest.raises(MismatchError, match=r"backend\.gdn"):
        Store.create(tmp_path / "cache", info.spec("cpu"))


def test_trap_07_packed_samples_are_refused_by_the_cpu_delta_rule():
    target = one_target("qwen3_5")
    ids = torch.tensor([tokens(20)])
    cuts = torch.tensor([0, 8, 20], dtype=torch.int32)
    with pytest.raises(TargetError, match="leak"):
        target.decoder(input_ids=ids, use_cache=False, cu_seq_lens_q=cuts)


def test_trap_07_on_cpu_torch_code_runs_even_where_kernels_can_be_imported(monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    target = tiny_target("qwen3_5")
    (wanted,) = states(target, [tokens(30)])
    for name in GDN_FUNCTIONS:
        plain = getattr(modeling, name).__wrapped__

        def crash(*args, **kwargs):
            raise RuntimeError("0 active drivers: there is no GPU")

        crash.__wrapped__ = plain
        monkeypatch.setattr(modeling, name, crash)
    with pytest.raises(RuntimeError, match="no GPU"):
        target.decoder(input_ids=torch.tensor([tokens(30)]), use_cache=False)
    dispatch_gdn_by_device(target.layers)
    (ours,) = states(target, [tokens(30)])
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_11_a_gguf_of_a_delta_rule_target_is_refused(family):
    config = tiny._config(f"random://{family}")
    if family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        target_files.refuse_gguf(config, "x.gguf")
        return
    with pytest.raises(TargetError, match="GGUF"):
        target_files.refuse_gguf(config, "x.gguf")


def test_a_model_without_a_known_layer_list_is_refused_naming_the_paths():
    class Odd(torch.nn.Module):
        def get_output_embeddings(self):
            return None

    info = describe_target(TargetConfig(name="q", model="random://qwen3", num_taps=3))
    with pytest.raises(TargetError, match=r"model\.language_model\.\{layers\|h\}"):
        locate_parts(Odd(), info, "cpu", None)


def test_a_layer_that_does_not_run_is_an_error():
    target = tiny_target("qwen3")
    target.layers = [*target.layers[:3], torch.nn.Identity(), *target.layers[4:]]
    with pytest.raises(TargetError, match="were tapped"):
        capture(target, torch.tensor([[1, 2]]), [2], [1, 3], last_hidden=True)


def saved(tmp_path, family: str = "qwen3"):
    """A tiny model as a local directory."""
    folder = tmp_path / "model"
    tiny.build(f"random://{family}", "float32", "sdpa").save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return TargetConfig(name="dir", model=str(folder), dtype=Dtype.float32, num_taps=3)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_directory_loads_to_the_same_states(family, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))
    target = load_target(saved(tmp_path, family))
    direct = tiny_target(family)
    assert type(target.model) is type(direct.model)
    assert target.tied == direct.tied == (family == "llama")
    (ours,), (theirs,) = states(target, [tokens(20)]), states(direct, [tokens(20)])
    assert torch.equal(ours, theirs)
    assert (
        target.tokenizer("<|im_end|>x")["input_ids"] == direct.tokenizer("<|im_end|>x")["input_ids"]
    )


def test_the_weights_digest_covers_bytes_and_config_and_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))
    cfg = saved(tmp_path)
    first = describe_target(cfg).weights
    monkeypatch.setattr(target_files, "_hash_file", lambda path: pytest.fail("hashed again"))
    assert describe_target(cfg).weights == first
    monkeypatch.undo()
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    second = describe_target(cfg).weights
    assert second != first
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert describe_target(cfg).weights not in (first, second)


def test_missing_models_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTAPE_HOME", str(tmp_path / "home"))
    cases = [
        ("package://no_such_package_here", None, "not installed"),
        (str(tmp_path), None, "no weight files"),
        (str(tmp_path), "x.gguf", "there is no x.gguf"),
        ("random://gpt9", None, "families"),
    ]
    for model, gguf, part in cases:
        with pytest.raises(DrafttapeError, match=part):
            describe_target(TargetConfig(name="x", model=model, gguf_file=gguf))


def test_trap_43_the_mask_token_is_explicit_and_unused():
    tokenizer = tiny.byte_tokenizer()
    cfg = TargetConfig(name="x", model="x")
    assert mask_token_id(cfg, tokenizer) is None
    assert mask_token_id(replace(cfg, mask_token="<|mask|>"), tokenizer) == 259
    assert mask_token_id(replace(cfg, mask_token="259"), tokenizer) == 259
    for text, part in (("<|im_end|>", "pad, start or end"), ("nonsense", "not one token")):
        with pytest.raises(TargetError, match=part):
            mask_token_id(replace(cfg, mask_token=text), tokenizer)


def test_attention_auto_is_recorded_by_the_name_of_what_it_picks(monkeypatch):
    info = describe_target(TargetConfig(name="q", model="random://qwen3_5", num_taps=3))
    named = replace(info, cfg=replace(info.cfg, attention="sdpa"))
    assert info.backend("cpu")["attention"] == "sdpa"
    assert info.spec("cpu").digest == named.spec("cpu").digest
    # A GPU that has it, as far as transformers and torch can tell.
    monkeypatch.setattr(target_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr("transformers.utils.import_utils.is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert info.attention("cuda:1") == "flash_attention_2"
    assert named.attention("cuda:1") == "sdpa"
    assert replace(named, cfg=replace(info.cfg, attention="eager")).attention("cuda") == "eager"
    for changes in (
        {"cfg": replace(info.cfg, dtype=Dtype.float32)},
        {"architecture": "ModelThatTransformersHasNot"},
        {"config": SimpleNamespace(get_text_config=lambda **k: SimpleNamespace(head_dim=512))},
    ):
        assert replace(info, **changes).attention("cuda") == "sdpa"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert info.attention("cuda") == "sdpa"
    assert info.attention("cpu") == "sdpa"
