"""The word `export`: a run's drafter as a directory that transformers loads without drafttape.

Three layouts. `drafttape` has its own modelling code (`exported_model.py`, copied along). `dflash`,
for all-attention drafters, has the names and configuration of z-lab's published drafters, which
their package and servers load; the modelling code lies beside it for plain transformers.
`speculators`, for the same drafters, is what that library's own loader reads: what its converter
makes of the latter, and what that leaves out (slots of sliding layers see each other; head rows of
a draft vocabulary). Before the directory gets its name, it is loaded from disk and must give the
same outputs.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shared.config import Dtype
from shared.errors import ConfigError, TrainingError
from shared.fs import check_writable, library_writes
from shared.log import note, say
from shared.store import load_frozen
from stage2_train import checkpoint
from stage2_train.build import build_drafter
from stage2_train.config import DrafterConfig, ExportConfig, Layout
from stage2_train.draft_vocabulary import IDS
from stage2_train.drafter import Drafter
from stage2_train.eval_table import FILE as TABLE
from stage2_train.eval_table import markdown
from stage2_train.evaluate import open_run, read_evaluation
from stage2_train.model_card import model_card
from stage2_train.warm_start import warm_start

CODE = "modeling_drafttape"
TOLERANCE = 1e-4  # of the largest output; float32 in another order of sums stays near 1e-6


def export(cfg: ExportConfig) -> int:
    """The word `export`. Returns the exit code."""
    output = Path(cfg.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError("it is there already and not empty", where=output, do="Name another one")
    check_writable(output / "config.json")
    record, config, store = open_run(cfg.run_dir, cfg.cache)
    drafter = build_drafter(config.drafter, store.spec, config.init_seed)
    folder = checkpoint.find(Path(cfg.run_dir), cfg.checkpoint)
    parameters, _, state = checkpoint.load(folder)
    checkpoint.load_parameters(drafter, parameters, folder)
    info = store.target_assets().info | {"architecture": store.spec.architecture}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        head_SD = None
        if drafter.draft_ids is not None:
            head_SD = drafter.head_rows(load_frozen(store)[1])
        differences = write(made, drafter, config.drafter, info, cfg, head_SD)
        evaluation = _evaluation(Path(cfg.run_dir), folder)
        card = model_card(record, config, info, state["step"], evaluation, differences)
        (made / "README.md").write_text(card)
        if output.exists():
            output.rmdir()
        made.rename(output)
    checks = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    say(
        f"{output}: the drafter of {folder}, {sum(p.numel() for p in drafter.parameters()):,} "
        f"parameters in {cfg.dtype.value}; reloaded from disk, largest difference: {checks}"
    )
    return 0


def write(
    directory: Path, drafter: Drafter, drafter_cfg: DrafterConfig, info: dict[str, Any],
    cfg: ExportConfig, head_SD: torch.Tensor | None = None,
) -> dict[str, float]:  # fmt: skip
    """Writes configuration, weights and code into an empty directory and reloads them.

    Args:
        info: what the cache says of the target.
        head_SD: the target's head rows of the draft vocabulary, if there is one.

    Returns:
        loader -> largest relative difference of its outputs to the drafter's.

    Raises:
        ConfigError: the dflash layout for a drafter with GDN layers or a draft vocabulary.
        TrainingError: a loader fails or differs.
    """
    layout = cfg.layout
    recurrent = "linear_attention" in drafter_cfg.layer_types
    ids_S = drafter.draft_ids
    if layout is Layout.auto:
        layout = Layout.dflash if not recurrent and ids_S is None else Layout.drafttape
    if layout is not Layout.drafttape and recurrent:
        raise ConfigError(
            f"the {layout.value} layout has attention layers only",
            where="layout", do="Use layout=drafttape",
        )  # fmt: skip
    if layout is Layout.dflash and ids_S is not None:
        raise ConfigError(
            "the dflash layout has no place for a draft vocabulary",
            where="layout", do="Use layout=drafttape or layout=speculators",
        )  # fmt: skip
    dtype = getattr(torch, cfg.dtype.value)
    weights = {
        name: tensor.detach().to(dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    document = model_config(drafter_cfg, info, layout, cfg.dtype)
    (directory / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    ids = {} if ids_S is None else vocabulary_tensors(ids_S, info["vocab_size"], layout)
    if layout is Layout.speculators and head_SD is not None:  # it reads the rows from here alone
        ids["lm_head.weight"] = head_SD.to(dtype)
    with library_writes(directory):
        save_file(weights | ids, directory / "model.safetensors", metadata={"format": "pt"})
    _check_ids(directory, ids)
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    if layout is Layout.speculators:
        if "sliding_attention" in drafter_cfg.layer_types:
            note(
                "speculators counts the window of sliding layers from the block's anchor, this "
                f"drafter from each slot: outputs differ once the context is longer than "
                f"{drafter_cfg.sliding_window} tokens"
            )
        return {"read again": reread_difference(directory, drafter, drafter_cfg, info)}
    code = Path(__file__).with_name("exported_model.py")
    shutil.copyfile(code, directory / f"{CODE}.py")
    loaders = ["auto"]
    if layout is Layout.dflash and importlib.util.find_spec("dflash"):
        loaders.append("dflash")
    return {loader: reload_difference(directory, drafter, loader) for loader in loaders}


def vocabulary_tensors(
    ids_S: torch.Tensor, vocabulary: int, layout: Layout
) -> dict[str, torch.Tensor]:
    """A draft vocabulary as a layout has it.

    speculators: `d2t` [S], what is to be added to a row of the draft head to get the token, and
    `t2d` [V], whether a token has a row; rows are in the tokens' order, as ours are.
    """
    ids_S = ids_S.cpu()
    if layout is Layout.drafttape:
        return {IDS: ids_S}
    t2d_V = torch.zeros(vocabulary, dtype=torch.bool)
    t2d_V[ids_S] = True
    return {"d2t": ids_S - torch.arange(len(ids_S)), "t2d": t2d_V}


def _check_ids(directory: Path, ids: dict[str, torch.Tensor]) -> None:
    read = load_file(directory / "model.safetensors")
    for name, tensor in ids.items():
        if not torch.equal(read[name], tensor):
            raise TrainingError(f"{name} of the export is not the drafter's", where=directory)


def model_config(
    cfg: DrafterConfig, info: dict[str, Any], layout: Layout, dtype: Dtype
) -> dict[str, Any]:
    """`config.json`. Everything is the drafter's own; nothing is inherited from the target's."""
    document: dict[str, Any] = {
        "hidden_size": info["hidden_size"],
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": len(cfg.layer_types),
        "layer_types": list(cfg.layer_types),
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": cfg.sliding_window,
        "use_sliding_window": "sliding_attention" in cfg.layer_types,
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "is_causal": False,
        "block_size": cfg.block_size,
        "vocab_size": info["vocab_size"],
        "num_target_layers": info.get("num_layers"),
        "tie_word_embeddings": False,
        "dflash_config": {
            "target_layer_ids": list(info["layer_ids"]),
            "mask_token_id": cfg.mask_token_id,
        },
        "dtype": dtype.value,
    }
    if layout is Layout.speculators:
        return _speculators(document, cfg, info)
    if cfg.draft_vocabulary is not None:
        document["draft_vocab_size"] = cfg.draft_vocabulary
    if layout is Layout.dflash:
        return document | {
            "model_type": "qwen3",
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": f"{CODE}.DFlashDraftModel"},
        }
    return document | {
        "model_type": "drafttape",
        "architectures": ["DrafttapeModel"],
        "auto_map": {
            "AutoConfig": f"{CODE}.DrafttapeConfig",
            "AutoModel": f"{CODE}.DrafttapeModel",
        },
        "linear_num_key_heads": cfg.linear_num_key_heads,
        "linear_num_value_heads": cfg.linear_num_value_heads,
        "linear_key_head_dim": cfg.linear_key_head_dim,
        "linear_value_head_dim": cfg.linear_value_head_dim,
        "linear_conv_kernel_dim": cfg.conv_kernel_size,
        "bidirectional_block": cfg.bidirectional_block,
    }


def _speculators(
    document: dict[str, Any], cfg: DrafterConfig, info: dict[str, Any]
) -> dict[str, Any]:
    """As speculators 0.9 writes it after converting a DFlash directory.

    Its layer ids count hidden_states, whose first entry is the embedding. That slots of a sliding
    layer see each other (`sliding_window_non_causal`) its converter doesn't say.
    """
    other = ("block_size", "dflash_config", "num_target_layers", "dtype", "rope_theta")
    layers = {key: value for key, value in document.items() if key not in other}
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": cfg.block_size - 1,
        "accept_tolerance": 0.0, "verifier_accept_k": 1,
    }  # fmt: skip
    target = info.get("target") or {}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {"model_type": "qwen3", **layers},
        "draft_vocab_size": cfg.draft_vocabulary or info["vocab_size"],
        "block_size": cfg.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in info["layer_ids"]],
        "mask_token_id": cfg.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": document["dtype"],
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target.get("model") or info.get("model"),
                "architectures": [info["architecture"]] if info.get("architecture") else [],
            },
        },
    }


@torch.no_grad()
def reread_difference(
    directory: Path, drafter: Drafter, cfg: DrafterConfig, info: dict[str, Any]
) -> float:
    """Largest difference of a drafter that is warm-started from the directory, as below."""
    again = Drafter(cfg, drafter.num_states, drafter.hidden_size)
    warm_start(again, cfg, tuple(info["layer_ids"]), str(directory))
    hidden, noise = _inputs(drafter)
    return _difference(_draft(drafter, hidden, noise), _draft(again, hidden, noise), "read again")


def _inputs(drafter: Drafter, tokens: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size, block = drafter.hidden_size, drafter.cfg.block_size
    hidden = torch.randn(tokens, drafter.num_states, size, generator=generator)
    return hidden, torch.randn(block, size, generator=generator) * 0.1


def _draft(drafter: Drafter, hidden: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    state = drafter.new_state()
    drafter.extend(state, hidden)
    return drafter.draft(state, noise)


def _difference(mine: torch.Tensor, theirs: torch.Tensor, loader: str) -> float:
    difference = ((theirs - mine).abs().max() / mine.abs().max()).item()
    if not difference <= TOLERANCE:
        raise TrainingError(
            f"the reloaded drafter ({loader}) differs by {difference:.2g} of its largest output"
        )
    return difference


@torch.no_grad()
def reload_difference(directory: Path, drafter: Drafter, loader: str) -> float:
    """Largest difference of a reloaded drafter's outputs, relative to the largest output.

    Raises:
        TrainingError: it can't be loaded, or differs by more than rounding.
    """
    hidden, noise = _inputs(drafter)
    mine = _draft(drafter, hidden, noise)
    with tempfile.TemporaryDirectory() as temporary:
        inputs, output = Path(temporary) / "in.safetensors", Path(temporary) / "out.safetensors"
        save_file({"hidden": hidden.flatten(1), "noise": noise}, inputs)
        script = Path(__file__).with_name("reload.py")
        # -P: the script's own directory must not come into the import path.
        done = subprocess.run(
            [sys.executable, "-P", script, directory.resolve(), inputs, output, loader],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": temporary},
            cwd=temporary, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise TrainingError(f"the export can't be loaded ({loader}): {last[0]}")
        theirs = load_file(output)["out"]
    return _difference(mine, theirs, loader)


def _evaluation(run_dir: Path, folder: Path) -> dict[str, Any]:
    """What eval.json and eval_table.json say of these weights: `table` is the latter's Markdown."""
    weights = checkpoint.weights_key(folder)
    found = read_evaluation(run_dir) or {}
    if found and found["key"].get("weights") != weights:
        note(f"{run_dir / 'eval.json'} is about another checkpoint: the model card leaves it out")
        found = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads((run_dir / TABLE).read_text())
        if document["weights"] == weights:
            found["table"] = markdown(document)
    return found
