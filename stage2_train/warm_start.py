"""Warm start: initial weights from a drafter that somebody published or exported.

Read are z-lab's DFlash directories, speculators' (`speculators_model_type: dflash`) and our own
exports; a run of ours begins at another run by `branch.run_dir`. The names of the weights are the
same in all. Embedding, head and vocabulary maps in a directory are the target's: they aren't read.
"""

import json
from pathlib import Path
from typing import Any

import torch

from shared.errors import CorruptionError, DataError, MismatchError
from stage2_train.checkpoint import load_parameters
from stage2_train.config import DrafterConfig
from stage2_train.draft_vocabulary import IDS, named_ids

FOREIGN = ("embed_tokens.", "lm_head.", "verifier_", "t2d", "d2t", IDS)
RECURRENT = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "bidirectional_block",
)  # fmt: skip


def read_architecture(directory: Path) -> dict[str, Any]:
    """What a drafter's directory says about it, under the names of `DrafterConfig`.

    Also `target_layer_ids` in our convention: the id is that of the layer whose output is tapped.

    Raises:
        DataError: it is no drafter's directory, or the drafter does what ours doesn't.
        CorruptionError: config.json can't be read.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise DataError(
            "there is no config.json", where=directory,
            do="Name a directory of z-lab's, speculators' or drafttape's export; to begin at a "
            "run, use branch.run_dir",
        )  # fmt: skip
    try:
        document = json.loads(path.read_text())
        if document.get("speculators_model_type") == "dflash":
            # speculators counts hidden_states, whose first entry is the embedding.
            layers = [layer - 1 for layer in document["aux_hidden_state_layer_ids"]]
            mask_token = document["mask_token_id"]
            causal = not document.get("sliding_window_non_causal", False)
            document |= document["transformer_layer_config"] | {"causal": causal}
        else:
            own = document["dflash_config"]
            layers, mask_token = list(own["target_layer_ids"]), own["mask_token_id"]
        found, faults = _common(document, layers, mask_token), _what_ours_dont(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"it doesn't describe a DFlash drafter ({type(error).__name__}: {error})", where=path,
            do="Known are z-lab's, speculators' and drafttape's directories",
        ) from None  # fmt: skip
    if faults:
        raise DataError(
            f"a drafter of ours would compute something else with these weights: "
            f"{'; '.join(faults)}",
            where=path, do="Begin with another drafter, or set init_from=null",
        )  # fmt: skip
    return found


def _common(document: dict[str, Any], layers: list[int], mask_token: int) -> dict[str, Any]:
    count = document["num_hidden_layers"]
    types = list(document.get("layer_types") or ["full_attention"] * count)
    found = {
        key: document[key]
        for key in (
            "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "rms_norm_eps",
        )
    }  # fmt: skip
    rope = document.get("rope_parameters") or {}
    found |= {
        "layer_types": types,
        "rope_theta": float(rope.get("rope_theta", document.get("rope_theta", 10000.0))),
        "mask_token_id": mask_token,
        "target_layer_ids": layers,
    }
    if "sliding_attention" in types:
        found["sliding_window"] = document["sliding_window"]
    if "linear_attention" in types:
        found |= {key: document[key] for key in RECURRENT}
        found["conv_kernel_size"] = document["linear_conv_kernel_dim"]
    return found


def _what_ours_dont(document: dict[str, Any]) -> list[str]:
    """What a configuration asks for that none of our layers does."""
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    rotation, activation = rope.get("rope_type", rope.get("type")), document.get("hidden_act")
    faults = []
    if rotation not in (None, "default"):
        faults.append(f"its rotary embedding is {rotation!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        faults.append("its rotary embedding differs by layer")
    if activation not in (None, "silu"):
        faults.append(f"its activation is {activation!r}")
    if document.get("sample_from_anchor"):
        faults.append("it predicts a token at the anchor's own slot")
    if document.get("causal") and "sliding_attention" in (document.get("layer_types") or []):
        faults.append("slots of its sliding layers don't see later ones")
    return faults


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The drafter's own tensors of all safetensors files, float32.

    Raises:
        DataError: there are none. CorruptionError: a file can't be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError("there are no safetensors files", where=directory)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CorruptionError(f"it can't be read ({error})", where=file) from None
    return {key: value.float() for key, value in weights.items() if not key.startswith(FOREIGN)}


def warm_start(
    drafter: torch.nn.Module, cfg: DrafterConfig, layer_ids: tuple[int, ...], where: str
) -> str:
    """Copies a directory's weights into a drafter; returns a sentence about it.

    Raises:
        MismatchError: the architecture differs; names every difference.
        DataError, CorruptionError: see `read_architecture` and `read_weights`.
    """
    directory = Path(where)
    theirs = read_architecture(directory)
    mine = {key: getattr(cfg, key) for key in theirs if key != "target_layer_ids"}
    mine["target_layer_ids"] = list(layer_ids)
    different = [
        f"{key} is {theirs[key]!r} there, {mine[key]!r} here"
        for key in theirs
        if theirs[key] != mine[key]
    ]
    if different:
        raise MismatchError(
            "; ".join(different), where=directory,
            do="Give drafter.* its values; other target layers need another cache",
        )  # fmt: skip
    weights = read_weights(directory)
    load_parameters(drafter, weights | named_ids(drafter), directory)
    count = sum(value.numel() for value in weights.values())
    return f"began with the {count:,} weights of {directory}"
