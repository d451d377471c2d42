"""From numbers to words: the verdict, the terminal's text and the decision record.

Only an interval over seeds may say "adopt" or "keep". With one seed the difference is real on
these inputs at best, and the verdict is "undecided" whatever the per-step interval says.

A claim asks for half the error that the level allows (p < 2.5 % at 95 %): Student's t is exact for
normal noise alone (with three seeds of uniform noise a 5 % test errs in 5.3 %), and a verdict looks
at both directions. `tests/test_studies.py` counts false claims over 200 simulated studies.
"""

import math
import time
from typing import Any

from stage2_train.stats import Interval, seeds_to_resolve


def claim_error(level: float) -> float:
    """The largest p-value that may decide, at this level of the intervals."""
    return (1 - level) / 2


def decide(summary: dict[str, Any]) -> dict[str, Any]:
    """Decides every arm against the baseline.

    Returns:
        `metric` (what was decided by), `fallback` (whether the wanted one was not measured),
        `pairs` (arm -> decision, text, seeds_needed) and `text`, all sentences together.
    """
    rows_of = summary["pairs"]
    wanted = summary["decide_by"]
    order = [wanted, "heldout_loss", "final_loss"]
    metric = next(key for key in order if all(key in rows for rows in rows_of.values()))
    pairs = {
        name: _decide_pair(summary, name, rows[metric], summary["tolerance"])
        for name, rows in rows_of.items()
    }
    sentences = [pair["text"] for pair in pairs.values()]
    if metric != wanted:
        sentences.insert(
            0, f"{wanted} was not measured in every run (drafttape eval); decided by {metric}."
        )
    return {
        "metric": metric,
        "fallback": metric != wanted,
        "pairs": pairs,
        "text": " ".join(sentences),
    }


def _decide_pair(
    summary: dict[str, Any], name: str, row: dict[str, Any], tolerance: float
) -> dict[str, Any]:
    across, within, better = row["across"], row["within"], row["better"]
    seeds, level = len(summary["seeds"]), summary["confidence"]
    base = summary["baseline"]
    gain = across.mean * better > 0
    direction = "better" if gain else "worse"
    numbers = (
        f"{row['label']} {number(row['arm'])} against {number(row['baseline'])} "
        f"({signed(across.mean)}"
    )
    needed: int | None = None
    known = summary.get("noise") == "baseline"
    if (seeds < 2 and not known) or not math.isfinite(across.low):
        text = f"{name} against {base}: {numbers}"
        if math.isfinite(within.low):
            text += f", {percent(level)} interval {span(within)} on these inputs"
        text += f"): {direction} with one seed, which is no verdict: undecided."
        text += " Train every arm with at least 2 more seeds."
        return {"decision": "undecided", "text": text, "seeds_needed": None, "direction": direction}
    p = row.get("p_holm", across.p)
    found = p < claim_error(level) and abs(across.mean) >= tolerance
    matters_not = across.low > -tolerance and across.high < tolerance
    text = f"{name} against {base}: {numbers}, {percent(level)} interval {span(across)} over "
    text += f"{seeds} seed{'s' * (seeds > 1)}, p = {p:.2g}"
    text += ", noise of repeated baselines): " if known else "): "
    if found:
        decision = "adopt" if gain else "keep"
        text += f"{direction}. " + (f"Adopt {name}." if gain else f"Keep {base}.")
    elif matters_not:
        decision = "keep"
        text += f"no difference of {number(tolerance)} or more. Keep {base}."
    else:
        decision = "undecided"
        noise = _noise(row, seeds)
        wanted = max(abs(across.mean), tolerance)
        needed = seeds_to_resolve(wanted, noise, 1 - claim_error(level))
        text += "undecided. "
        if needed is None:
            text += f"Over 1000 seeds would be needed to resolve a difference of {number(wanted)}."
        elif needed <= seeds:
            text += (
                "Too close: by the noise of these seeds it should be found, the correction for "
                "several arms or the noise of all arms says no. Repeat with more seeds."
            )
        else:
            text += (
                f"{needed - seeds} more seeds ({needed} in all) would resolve a difference of "
                f"{number(wanted)} at this noise."
            )
    return {"decision": decision, "text": text, "seeds_needed": needed, "direction": direction}


def _noise(row: dict[str, Any], seeds: int) -> float:
    """Standard deviation of a paired difference over seeds."""
    if "noise" in row:
        return float(row["noise"])
    differences = [b - a for _, a, b in row["by_seed"]]
    mean = sum(differences) / seeds
    return math.sqrt(sum((d - mean) ** 2 for d in differences) / (seeds - 1))


def terminal_text(summary: dict[str, Any]) -> str:
    """Table of arms, differences and the verdict, for the terminal."""
    arms = summary["arms"]
    columns = [
        ("arm", "name"), ("held-out loss", "heldout_loss"), ("accuracy", "accuracy"),
        ("estimated", "estimated_acceptance"), ("real acceptance", "real_acceptance"),
        ("tokens/s", "tokens_per_s"), ("train s", "seconds"),
    ]  # fmt: skip
    rows = [[title for title, _ in columns]]
    rows += [
        [printable(name)] + [number(values.get(key)) for _, key in columns[1:]]
        for name, values in arms.items()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    seeds = len(summary["seeds"])
    lines.append("")
    lines.append(
        f"inputs identical at all {summary['steps']} steps"
        + (f" from step {summary['first_step']} on" if summary["first_step"] > 1 else "")
        + f", {seeds} seed{'s' * (seeds > 1)} (snapshot {summary['inputs']['snapshot']})"
    )
    if summary["output_identical"]:
        same, tried = summary["output_identical"]
        lines.append(f"speculative output identical to the target's own: {same} of {tried}")
    lines += [f"not finished: {printable(text)}" for text in summary.get("unfinished", [])]
    lines += [printable(pair["text"]) for pair in summary["verdict"]["pairs"].values()]
    for name, rows_ in summary["pairs"].items():
        row = rows_.get("real_acceptance")
        if row is not None and summary["verdict"]["metric"] != "real_acceptance":
            interval = row["across"] if math.isfinite(row["across"].low) else row["within"]
            change = f"{signed(row['across'].mean)} ({span(interval)})"
            lines.append(f"{printable(name)}: real acceptance {change}")
    return "\n".join(lines)


def printable(text: str) -> str:
    """Names come from the file system: control characters never reach a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def number(value: float | None) -> str:
    """Four significant digits or so; a dash where nothing was measured."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.3g}"
    return f"{value:.{max(0, 3 - max(0, math.floor(math.log10(size))))}f}"


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def span(interval: Interval) -> str:
    """`low to high`."""
    return f"{signed(interval.low)} to {signed(interval.high)}"


def percent(level: float) -> str:
    return f"{100 * level:g} %"


def markdown(text: Any) -> str:
    """Untrusted text inside a Markdown table or sentence."""
    escaped = printable(str(text))
    for char in "\\`*_[]<>|#":
        escaped = escaped.replace(char, "\\" + char)
    return escaped


def decision_record(summary: dict[str, Any], *, question: str | None = None) -> str:
    """A dated Markdown file: question, inputs, arms, numbers, verdict, what would change it."""
    arms, outcome = summary["arms"], summary["verdict"]
    base, level = summary["baseline"], percent(summary["confidence"])
    names = list(arms)
    others = " or ".join(name for name in names if name != base)
    question = question or f"Is {others} better than {base}?"
    lines = [
        f"# Decision: {markdown(question)}",
        "",
        f"Date: {time.strftime('%Y-%m-%d', time.gmtime())}. Decided by: "
        f"{outcome['metric']}, {level} intervals over seeds, Holm's correction over arms.",
        "",
        "## Verdict",
        "",
    ]
    for name, pair in outcome["pairs"].items():
        lines.append(f"- **{pair['decision']}** ({markdown(name)}): {markdown(pair['text'])}")
    lines += ["", "## Inputs", ""]
    inputs = summary["inputs"]
    lines.append(f"- snapshot `{inputs['snapshot']}`, capture spec `{inputs['spec_digest']}`")
    lines.append(f"- codecs: {markdown(inputs['codecs'])}; plan: {markdown(inputs['plan'])}")
    for seed, digest in inputs["final_digests"]:
        lines.append(f"- seeds (order, init) {tuple(seed)}: digest of all inputs `{digest}`")
    lines += ["", "## Arms", "", "| setting | " + " | ".join(map(markdown, names)) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for key, values in summary["settings"].items():
        lines.append(f"| {markdown(key)} | " + " | ".join(map(markdown, values)) + " |")
    measured = [
        ("held-out loss", "heldout_loss"), ("accuracy", "accuracy"),
        ("estimated acceptance", "estimated_acceptance"), ("real acceptance", "real_acceptance"),
        ("training loss, last quarter", "final_loss"), ("decoding tokens/s", "tokens_per_s"),
        ("training seconds", "seconds"), ("model FLOPs", "flops"), ("training tokens", "tokens"),
    ]  # fmt: skip
    for label, key in measured:
        cells = " | ".join(number(arms[name].get(key)) for name in names)
        lines.append(f"| {label} | {cells} |")
    lines += ["", "## Differences from the baseline", ""]
    lines.append(
        f"| arm | metric | difference | {level} over seeds | p (Holm) | {level} on these inputs "
        "| unpaired |"
    )
    lines.append("|---" * 7 + "|")
    for name, rows in summary["pairs"].items():
        for row in rows.values():
            lines.append(
                f"| {markdown(name)} | {row['label']} | {signed(row['across'].mean)} | "
                f"{span(row['across'])} | {number(row.get('p_holm', row['across'].p))} | "
                f"{span(row['within'])} | {span(row['unpaired'])} |"
            )
    if summary.get("transfer"):
        lines += ["", "## Transfer (acceptance on other data, does not decide)", ""]
        lines.append(f"| arm | data | verification | baseline | arm | difference | {level} | p |")
        lines.append("|---" * 8 + "|")
        for row in summary["transfer"]:
            cells = [markdown(row[key]) for key in ("arm", "data", "way")]
            cells += [number(row["baseline"]), number(row["value"])]
            cells += [signed(row["across"].mean), span(row["across"]), number(row["p_holm"])]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## At matched budgets (training loss)", ""]
    lines.append("| arm | matched | budget | baseline | arm | difference | interval |")
    lines.append("|---" * 7 + "|")
    for name, rows in summary["matched"].items():
        for row in rows.values():
            interval = row["across"] if math.isfinite(row["across"].low) else row["within"]
            lines.append(
                f"| {markdown(name)} | {row['label']} | {number(row['budget'])} | "
                f"{number(row['baseline'])} | {number(row['arm'])} | "
                f"{signed(row['across'].mean)} | {span(interval)} |"
            )
    lines += ["", "## Bottleneck", "", "| arm | s/step | waiting for data | tokens/s trained |"]
    lines.append("|---" * 4 + "|")
    for name, values in arms.items():
        sheet = bottleneck(values)
        lines.append(f"| {markdown(name)} | " + " | ".join(sheet) + " |")
    lines += ["", "## What would change it", ""]
    lines += [f"- {text}" for text in caveats(summary)]
    return "\n".join(lines) + "\n"


def bottleneck(values: dict[str, Any]) -> list[str]:
    """Seconds a step, share of waiting for data, training tokens/s, as text."""
    seconds, steps = values.get("seconds"), values["steps"]
    if not seconds:
        return ["–", "–", "–"]
    wait = values.get("data_wait")
    tokens = values.get("tokens")
    return [
        number(seconds / steps),
        "–" if wait is None else f"{100 * wait / seconds:.1f} %",
        number(tokens / seconds) if tokens else "–",
    ]


def caveats(summary: dict[str, Any]) -> list[str]:
    """What limits the verdict, from what was compared."""
    seeds = len(summary["seeds"])
    texts = []
    if seeds < 2:
        texts.append("More seeds: one seed can't separate an arm from its initialisation.")
    else:
        texts.append(f"More seeds: the intervals rest on {seeds}.")
    texts.append(
        "Another horizon: the arms were compared after "
        f"{summary['steps']} steps; early leads can vanish."
    )
    if any("lr" in key.split(".")[-1] for key in summary["settings"]):
        texts.append("Tuning: the verdict holds for these learning rates, not for each arm's best.")
    for name, rows in summary["matched"].items():
        signs = {axis: math.copysign(1, row["across"].mean) for axis, row in rows.items()}
        if len(set(signs.values())) > 1:
            each = ", ".join(f"{axis} {signed(rows[axis]['across'].mean)}" for axis in signs)
            texts.append(
                f"Budget: {markdown(name)} leads or trails depending on what is matched ({each})."
            )
    texts += [
        f"An end: {markdown(text)}; its learning rate is not down yet."
        for text in summary.get("unfinished", [])
    ]
    if summary["left_out"]:
        texts.append(
            f"{len(summary['left_out'])} runs were left out: their seeds are not in every arm."
        )
    if not summary.get("transfer"):
        texts.append(
            "Other data: held-out samples are of the training data's kind (eval with data=… adds "
            "other sets)."
        )
    for row in summary.get("transfer", []):
        direction = summary["pairs"][row["arm"]].get("real_acceptance")
        if direction and row["across"].mean * direction["across"].mean < 0:
            texts.append(
                f"Transfer: {markdown(row['arm'])} changes sign on {markdown(row['data'])} "
                f"({markdown(row['way'])}: {signed(row['across'].mean)})."
            )
    return texts
