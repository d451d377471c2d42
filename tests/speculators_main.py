"""Run by an interpreter that has speculators (not by ours): their loader and their converter.

    python speculators_main.py load DIRECTORY INPUTS OUTPUT
    python speculators_main.py convert DIRECTORY VERIFIER OUTPUT

INPUTS holds `hidden` [T, L*D], `tokens` [T] and `anchors` [N]; OUTPUT of `load` gets `hidden`
[N, B, D] and `logits` [N, B, S]; safetensors.
"""

import sys

import torch
from safetensors.torch import load_file, save_file


def load(directory: str, inputs: str, output: str) -> None:
    """Loads a speculators directory and drafts a block at every anchor."""
    from speculators import SpeculatorModel
    from speculators.models.dflash import DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    given = load_file(inputs)
    hidden, tokens, anchors = given["hidden"][None], given["tokens"][None], given["anchors"]
    loss_mask = torch.zeros_like(tokens)
    loss_mask[:, anchors] = 1
    with torch.no_grad():
        found, logits, *_ = model._backbone_forward(
            hidden_states=hidden, input_ids=tokens, loss_mask=loss_mask,
            verifier_last_hidden_states=hidden[..., : model.hidden_size],
            document_ids=torch.zeros_like(tokens), max_anchors=len(anchors),
        )  # fmt: skip
    shape = (len(anchors), model.block_size, -1)
    extra = {} if model.d2t is None else {"d2t": model.d2t, "t2d": model.t2d}
    save_file(
        {"hidden": found.reshape(shape).contiguous(), "logits": logits.reshape(shape), **extra},
        output,
    )


def convert(directory: str, verifier: str, output: str) -> None:
    """A DFlash directory through their own converter."""
    from speculators.convert import convert_model

    convert_model(
        directory, verifier=verifier, algorithm="dflash", output_path=output, validate_device="cpu"
    )


if __name__ == "__main__":
    {"load": load, "convert": convert}[sys.argv[1]](*sys.argv[2:])
