"""Run alone: loads an exported directory without drafttape and answers one drafting step.

    python reload.py DIRECTORY INPUTS OUTPUT auto|dflash

INPUTS holds `hidden` [T, L*D] and `noise` [B, D], OUTPUT gets `out` [B, D]; float32 safetensors.
"""

import sys

import torch
from safetensors.torch import load_file, save_file


def main(directory: str, inputs: str, output: str, loader: str) -> None:
    """Loads, drafts, writes."""
    given = load_file(inputs)
    if loader == "dflash":
        from dflash import DFlashDraftModel

        model = DFlashDraftModel.from_pretrained(directory, dtype=torch.float32).eval()
        length = len(given["hidden"]) + len(given["noise"])
        kwargs = {"position_ids": torch.arange(length)[None]}
    else:
        from transformers import AutoModel

        model = AutoModel.from_pretrained(
            directory, trust_remote_code=True, dtype=torch.float32
        ).eval()
        kwargs = {}
    with torch.no_grad():
        out = model(
            noise_embedding=given["noise"][None], target_hidden=given["hidden"][None], **kwargs
        )
    save_file({"out": out[0].float().contiguous()}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
