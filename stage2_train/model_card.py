"""The README.md of an exported drafter: what it is for, how it was made, what it reaches."""

from typing import Any

from shared.config import to_plain
from shared.record import RunRecord
from stage2_train.config import TrainConfig
from stage2_train.draft_vocabulary import sentence

FIGURES = (
    ("real_acceptance", "accepted tokens per target pass (greedy, held-out prompts)", ".3f"),
    ("estimated_acceptance", "the same, estimated from accuracy per slot", ".3f"),
    ("accuracy", "accuracy over all slots", ".3f"),
    ("heldout_loss", "held-out loss", ".3f"),
    ("tokens_per_s", "tokens/s while that was measured", ".1f"),
)


def model_card(
    record: RunRecord, config: TrainConfig, info: dict[str, Any], step: int,
    evaluation: dict[str, Any], differences: dict[str, float],
) -> str:  # fmt: skip
    """Markdown with the front matter that model hubs read."""
    drafter, vocabulary = config.drafter, record.draft_vocabulary
    target, name = info.get("model", "unknown"), info.get("name", "the target")
    base = f"base_model: {target}\n" if "://" not in target and "/" in target else ""
    rows = [
        f"| {meaning} | {evaluation[key]:{shape}} |"
        for key, meaning, shape in FIGURES
        if isinstance(evaluation.get(key), int | float)
    ]
    if len(identical := evaluation.get("output_identical") or ()) == 2:
        rows.append(f"| outputs identical to the target's own | {identical[0]} of {identical[1]} |")
    slots = evaluation.get("slot_accuracy") or []
    optimizer = dict(to_plain(config.optimizer))
    facts = {
        "target": f"{target} (revision {info.get('revision') or 'as given'})",
        "tapped layers (outputs)": info.get("layer_ids"),
        "mask token id": drafter.mask_token_id,
        "layers": ", ".join(drafter.layer_types),
        "block size": drafter.block_size,
        "drafted tokens": f"{sentence(vocabulary)}, digest {vocabulary['digest']}"
        if vocabulary
        else "all",
        "parameters": f"{record.parameters.get('trainable', 0):,}",
        "optimizer steps": f"{step} of {record.steps}",
        "optimizer": ", ".join(f"{key} {value}" for key, value in optimizer.items()),
        "seeds (order, weights)": f"{config.seed}, {config.init_seed}",
        "data": f"snapshot {record.snapshot}, capture spec {record.spec_digest}",
        "input digest": f"{record.last.get('digest', 'unknown')} after step "
        f"{record.last.get('step', step)}",
        "code": record.code.get("version", "unknown")
        + " "
        + str(record.code.get("revision") or ""),
        "reload check (relative)": ", ".join(f"{k} {v:.1e}" for k, v in differences.items()),
    }
    text = f"""---
{base}library_name: transformers
tags: [speculative-decoding, drafter, dflash, drafttape]
---

# Block-diffusion drafter for {name}

Proposes {drafter.block_size - 1} tokens at once for speculative decoding with the target below. It
reads the target's hidden states and uses the target's embedding and head, which are not in this
directory: it is of no use with another target.

```python
from transformers import AutoModel

drafter = AutoModel.from_pretrained("this directory", trust_remote_code=True).eval()
tokens = drafter.spec_generate(target, input_ids, max_new_tokens=256, stop_token_ids=[...])
```

## Measured

"""
    if rows:
        text += "| | |\n|---|---|\n" + "\n".join(rows) + "\n"
    elif "table" not in evaluation:
        text += "Not evaluated (`drafttape eval` writes the figures that stand here).\n"
    if slots:
        shown = " ".join(f"{value:.3f}" for value in slots)
        text += f"\nAccuracy of slots 1 to {len(slots)}: {shown}\n"
    if table := evaluation.get("table"):
        text += f"\n{table}\n"
    text += "\n## Made from\n\n| | |\n|---|---|\n"
    return text + "".join(f"| {key} | {value} |\n" for key, value in facts.items())
