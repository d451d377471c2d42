"""A drafter over several data sets and ways of verification, in one table.

    drafttape eval runs/muon data=[gsm8k.jsonl,mt-bench.jsonl] temperatures=[0,1] trees=[8,32]

Rows: data set x (chain at each temperature, tree at each node budget behind the chain of as many
drafts); `temperature` and `tree` are one more of each. Every prompt is decoded by the target alone
once and by every way; greedy ways must give the target's own output. Data sets are JSONL files of
prompts, named after the file: `turns` (the first is asked), `prompt` or `messages` (up to the first
answer), as the DFlash evaluations use gsm8k, humaneval, mbpp, mt-bench and so on. Without `data`
the run's held-out prompts are the data.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, DataError
from shared.fs import check_writable, write_atomic
from shared.log import progress, say
from stage2_train import checkpoint, decode
from stage2_train.config import EvalConfig

FILE = "eval_table.json"


@dataclass(frozen=True)
class Way:
    """One way of verification."""

    temperature: float = 0.0
    tree: int = 0
    most_drafts: int | None = None

    @property
    def name(self) -> str:
        if self.tree:
            return f"tree {self.tree}"
        return f"chain {self.most_drafts or ''}".rstrip() + f" T={self.temperature:g}"


def wanted(cfg: EvalConfig) -> bool:
    """Whether a table is asked for."""
    return bool(cfg.data or cfg.temperatures or cfg.trees)


def ways(cfg: EvalConfig, block: int) -> list[Way]:
    """The greedy chain, sampled ones, and every tree behind the chain of as many drafts."""
    found = [Way(t) for t in sorted({0.0, cfg.temperature, *cfg.temperatures})]
    for budget in dict.fromkeys(filter(None, (*cfg.trees, cfg.tree))):
        if budget < block - 1:
            found.append(Way(most_drafts=budget))
        found.append(Way(tree=budget))
    return found


def names_of(paths: list[str]) -> dict[str, str]:
    """Name -> file of each data set: the file's name, or the path where two are named alike."""
    stems = [Path(path).stem for path in dict.fromkeys(paths)]
    return {
        stem if stems.count(stem) == 1 else path: path
        for stem, path in zip(stems, dict.fromkeys(paths), strict=True)
    }


def read_prompts(path: str, tokenizer: Any, most: int | None) -> list[tuple[str, list[int]]]:
    """(name, token ids) of a JSONL file's prompts, through the target's chat template if any.

    Raises:
        DataError: the file is not there, or a row has none of the known keys.
    """
    if not Path(path).is_file():
        raise DataError("the file is not there", where=path, do="Give a JSONL file of prompts")
    prompts: list[tuple[str, list[int]]] = []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(prompts) == most:
            break
        try:
            messages = _messages(row := json.loads(line))
        except ValueError as error:
            raise DataError(f"it is not JSON ({error})", where=f"{path}:{number}") from None
        if not messages:
            raise DataError(
                "it has no `turns`, `prompt` or `messages` to ask", where=f"{path}:{number}",
                do="Give JSONL with one of these keys a row",
            )  # fmt: skip
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
        prompts.append((str(row.get("id", f"{Path(path).stem}:{number}")), list(map(int, ids))))
    if not prompts:
        raise DataError("there is no prompt in it", where=path)
    return prompts


def _messages(row: Any) -> list[dict[str, str]]:
    if not isinstance(row, dict):
        return []
    if isinstance(row.get("messages"), list):
        asked = []
        for message in row["messages"]:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                return []
            if message.get("role") == "assistant":
                break
            asked.append(message)
        return asked
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
    return [{"role": "user", "content": text}] if isinstance(text, str) and text else []


def measure_table(cfg: EvalConfig) -> dict[str, Any]:
    """Decodes everything and writes `eval_table.json` beside the run.

    Returns:
        step, snapshot and `rows`: data set, way, and what `figures` gives.

    Raises:
        ConfigError: decoding is switched off, or so short that nothing is verified.
        DataError: a data set can't be read; see also `load_run`.
    """
    from stage2_train.build import resolve_device
    from stage2_train.evaluate import load_run, open_decoding, prompts_of

    if not cfg.decode or cfg.max_new_tokens < 2:
        raise ConfigError(
            f"decode={str(cfg.decode).lower()} with max_new_tokens={cfg.max_new_tokens}: a table "
            "is about decoded prompts, whose first token is the prefill's",
            do="Set decode=true and max_new_tokens=2 or more",
        )
    check_writable(Path(cfg.run_dir) / FILE)
    device = str(resolve_device(cfg.device))
    run = load_run(cfg.run_dir, cfg.checkpoint, device, cfg.cache)
    target, taps, ends, draft = open_decoding(run, cfg, device)
    if cfg.data:
        sets = {
            name: read_prompts(path, target.tokenizer, cfg.max_prompts)
            for name, path in names_of(cfg.data).items()
        }
    else:
        sets = {"held-out": prompts_of(run, cfg.max_prompts)}
    bar = progress(sum(map(len, sets.values())), "table", "prompt")
    rows = []
    for data, prompts in sets.items():
        plain, results = [], {way: [] for way in ways(cfg, draft.block_size)}
        for name, prompt in prompts:
            plain.append(decode.greedy(target.model, prompt, cfg.max_new_tokens, ends))
            for way, done in results.items():
                done.append(_decode(target.model, taps, draft, name, prompt, cfg, way, ends))
            bar.update()
        rows += [
            {"data": data, "way": way.name, **figures(done, plain, way, draft.block_size)}
            for way, done in results.items()
        ]
    bar.close()
    weights = checkpoint.weights_key(checkpoint.find(run.path, cfg.checkpoint))
    result = {"step": run.state["step"], "weights": weights, "snapshot": run.snapshot.id}
    result["rows"] = rows
    write_atomic(Path(cfg.run_dir) / FILE, json.dumps(result, indent=1).encode() + b"\n")
    return result


def _decode(model, taps, draft, name, prompt, cfg: EvalConfig, way: Way, ends) -> decode.Decoded:
    from stage2_train.evaluate import decode_one

    asked = replace(cfg, temperature=way.temperature, tree=way.tree)
    return decode_one(model, taps, draft, name, prompt, asked, ends, most_drafts=way.most_drafts)


def figures(
    done: list[decode.Decoded], plain: list[decode.Decoded], way: Way, block: int
) -> dict[str, Any]:
    """Totals of one row.

    `speedup` is measured, prefill included; `estimated_speedup` is what one pass gives and costs:
    acceptance x the target's seconds a token / (seconds of drafting + of verification a pass).
    `slot_acceptance`: share of passes that committed the draft of slot 1, 2, …
    """
    commits = [count for result in done for count in result.commits]
    seconds = {key: sum(r.seconds[key] for r in done) for key in ("prefill", "draft", "verify")}
    tokens, passes = sum(len(result.tokens) for result in done), max(1, len(commits))
    own_tokens = sum(len(result.commits) for result in plain)  # behind the prefill's
    own_seconds = sum(result.seconds["verify"] for result in plain) / max(1, own_tokens)
    own_speed = sum(len(r.tokens) for r in plain) / sum(sum(r.seconds.values()) for r in plain)
    acceptance = sum(commits) / passes
    speed = tokens / sum(seconds.values())
    greedy = way.temperature == 0
    same = sum(a.tokens == b.tokens for a, b in zip(done, plain, strict=True))
    return {
        "prompts": len(done),
        "acceptance": acceptance,
        "identical": same if greedy else None,
        "passes": len(commits),
        "replays": sum(result.replays for result in done),
        "tokens_per_s": speed,
        "plain_tokens_per_s": own_speed,
        "speedup": speed / own_speed,
        "estimated_speedup": acceptance * own_seconds * passes
        / max(1e-12, seconds["draft"] + seconds["verify"]),
        "draft_ms": 1e3 * seconds["draft"] / passes,
        "verify_ms": 1e3 * seconds["verify"] / passes,
        "plain_ms": 1e3 * own_seconds,
        "slot_acceptance": [
            sum(count > slot for count in commits) / passes for slot in range(1, block)
        ],
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The table, for terminal and model card."""
    lines = [
        "| data | verification | acceptance | identical | tokens/s | speed-up | estimated |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        same = "" if row["identical"] is None else f"{row['identical']} of {row['prompts']}"
        lines.append(
            f"| {row['data']} | {row['way']} | {row['acceptance']:.3f} | {same} | "
            f"{row['tokens_per_s']:.1f} | x{row['speedup']:.2f} | x{row['estimated_speedup']:.2f} |"
        )
    return "\n".join(lines)


def evaluate_table(cfg: EvalConfig) -> int:
    """Measures and prints. Exit code 1 when a greedy output is not the target's own."""
    result = measure_table(cfg)
    say(markdown(result))
    broken = [
        f"{row['data']}, {row['way']}"
        for row in result["rows"]
        if row["identical"] is not None and row["identical"] != row["prompts"]
    ]
    if broken:
        say(f"not the target's own output: {'; '.join(broken)}")
    return int(bool(broken))
