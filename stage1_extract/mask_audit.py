"""drafttape mask-audit: which tokens of the data are trained on, token by token.

Supervised tokens are green, others dim; special tokens stand out in both. The statistics are over
all samples, the coloured text over a few.
"""

import html
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ConfigError
from shared.fs import check_writable, write_atomic
from shared.log import say
from shared.target import load_tokenizer, mask_token_id
from stage1_extract.config import MaskAuditConfig
from stage1_extract.plan_word import target_sizes
from stage1_extract.prompts import Prepared, Sample, prepare

# Control characters but tab and newline, and those that turn the writing direction.
_CONTROL = dict.fromkeys(
    [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)],
    "�",
)
_GREEN, _DIM, _END = "\033[30;42m", "\033[2m", "\033[0m"


def mask_audit(cfg: MaskAuditConfig) -> int:
    """Runs the word.

    Raises:
        DataError: no usable sample.
        ConfigError: a negative number of samples.
    """
    if cfg.samples < 0:
        raise ConfigError("samples must not be negative", where="samples")
    if cfg.html is not None:
        check_writable(Path(cfg.html))
    tokenizer = load_tokenizer(cfg.target)
    mask_token = mask_token_id(cfg.target, tokenizer)
    prepared = prepare(cfg.data, tokenizer, mask_token, target_sizes(cfg.target)[2])
    count = len(prepared.samples)
    step = max(1, count // max(cfg.samples, 1))
    shown = prepared.samples[::step][: cfg.samples]
    coloured = sys.stdout.isatty()
    for sample in shown:
        say(f"--- {sample.source} {sample.name or ''} ({sample.split})")
        say(terminal(pieces(sample, tokenizer), coloured))
    for line in statistics(prepared):
        say(line)
    if cfg.html is not None:
        write_atomic(Path(cfg.html), page(prepared, shown, tokenizer).encode())
        say(f"page      {cfg.html}")
    return 0


def pieces(sample: Sample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Runs of tokens with the same mask as (text, supervised).

    Whole runs are decoded: a single token may be a part of a character.
    """
    mask_T = sample.mask_T
    cuts = [0, *(np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1).tolist(), len(mask_T)]
    return [
        (tokenizer.decode(sample.tokens_T[start:stop].tolist()), bool(mask_T[start]))
        for start, stop in pairwise(cuts)
    ]


def terminal(runs: list[tuple[str, bool]], coloured: bool) -> str:
    """Runs in colour, or with supervised ones in ⟦ ⟧ where there is none; data commands nothing."""
    runs = [(text.translate(_CONTROL), supervised) for text, supervised in runs]
    if not coloured:
        return "".join(f"⟦{text}⟧" if supervised else text for text, supervised in runs)
    return "".join(f"{_GREEN if supervised else _DIM}{text}{_END}" for text, supervised in runs)


def statistics(prepared: Prepared) -> list[str]:
    """Coverage over all samples."""
    shares = np.asarray([sample.mask_T.mean() for sample in prepared.samples])
    turns = [_turns(sample.mask_T) for sample in prepared.samples]
    ends = sum(bool(sample.mask_T[-2:].any()) for sample in prepared.samples)
    low, middle, high = np.quantile(shares, [0.05, 0.5, 0.95])
    out = [
        f"samples   {len(shares):,}, {len(prepared.rejects):,} rejects, "
        f"{prepared.num_duplicates:,} duplicates, {prepared.num_cut:,} cut",
        f"tokens    {prepared.num_tokens:,}, {prepared.num_supervised:,} supervised "
        f"({prepared.num_supervised / prepared.num_tokens:.1%})",
        f"coverage  {low:.0%} / {middle:.0%} / {high:.0%} of a sample "
        "(5th percentile, median, 95th)",
        f"turns     {np.mean(turns):.2f} supervised spans a sample, at most {max(turns)}",
        f"ends      {ends:,} samples supervised up to their end",
    ]
    out += [f"reject    {count:,} x {reason}" for reason, count in prepared.reasons()]
    return out


def _turns(mask_T: np.ndarray) -> int:
    """Supervised runs in a mask."""
    return int(mask_T[0]) + int((mask_T[1:] & ~mask_T[:-1]).sum())


def page(prepared: Prepared, shown: list[Sample], tokenizer: Any) -> str:
    """A page of its own: statistics, then the samples with supervised text marked."""
    blocks = []
    for sample in shown:
        body = "".join(
            f"<mark>{html.escape(text)}</mark>" if supervised else html.escape(text)
            for text, supervised in pieces(sample, tokenizer)
        )
        title = html.escape(f"{sample.source} {sample.name or ''} ({sample.split})")
        blocks.append(f"<section><h2>{title}</h2><pre>{body}</pre></section>")
    rows = "".join(
        f"<tr><th>{line[:10].strip()}</th><td>{html.escape(line[10:])}</td></tr>"
        for line in statistics(prepared)
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>Mask audit</title><style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1a1a1a;background:#fff}}
th{{text-align:left;padding-right:1.5rem;font-weight:600}}h2{{font-size:1rem}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #ccc;border-radius:6px;
padding:.75rem}}mark{{background:#b9e6c2;color:#0b2e13}}
@media(prefers-color-scheme:dark){{body{{color:#e8e8e8;background:#16181b}}
mark{{background:#1f5c33;color:#eafff0}}}}
</style></head><body><h1>Which tokens are trained on</h1>
<p>Marked text is supervised.</p><table>{rows}</table>{"".join(blocks)}</body></html>
"""
