"""drafttape plan: what an extraction takes, before it runs and without the target's weights.

What is printed is also collected as plain numbers, for `summary=FILE`.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import TargetConfig, group_options
from shared.drafter_config import drafter_size
from shared.errors import ConfigError
from shared.fs import write_atomic
from shared.log import note, say
from shared.target import (
    Target,
    choose_device,
    load_target,
    mask_token_id,
    resolve_layer_ids,
    text_config,
)
from stage1_extract import bottleneck
from stage1_extract.batching import expected_batching, is_candidate, keeps_apart
from stage1_extract.checks import self_test_samples
from stage1_extract.config import Batching, Codec, PlanConfig
from stage1_extract.plan import BITS, JobPlan, plan_job
from stage1_extract.probe import probe
from stage1_extract.prompts import Prepared, prepare

_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def plan(cfg: PlanConfig) -> int:
    """Runs the word.

    Raises:
        ConfigError: neither data nor tokens given; sizes unknown.
        DataError: the data files hold no usable sample.
    """
    if cfg.tokens is None and not cfg.data.paths and not cfg.data.dataset:
        raise ConfigError(
            "plan needs data or a number of tokens",
            do="Give data.paths=[chats.jsonl], data.dataset=NAME or tokens=1.67e9",
        )
    num_layers, hidden_size, vocab_size = target_sizes(cfg.target)
    layer_ids = resolve_layer_ids(cfg.target, num_layers)
    rule = cfg.target.tap_rule.value
    say(f"target    {cfg.target.name}: {num_layers} layers, width {hidden_size}")
    say(f"taps      {', '.join(map(str, layer_ids))} ({rule}; 0-based layer outputs)")
    bytes_per_token = (len(layer_ids) + int(cfg.last_hidden)) * hidden_size * 2
    found: dict[str, Any] = {
        "target": cfg.target.name,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "layer_ids": layer_ids,
        "bytes_per_token": bytes_per_token,
    }
    if cfg.tokens is None:
        prepared = _data(cfg, vocab_size, found)
        sequences = {sample.id: sample.tokens_T for sample in prepared.samples}
        shard_bytes, tokens = cfg.shard_bytes, float(prepared.num_tokens)
    else:
        sequences = _made_up(cfg, vocab_size)
        shard_bytes, tokens = 1 << 62, cfg.tokens
        say(f"tokens    {tokens:,.0f}")
    target = None
    if cfg.probe:
        device = choose_device(cfg.device)
        note(f"loading {cfg.target.name} on {device}")
        target = load_target(cfg.target, device)
    packed = _packed(cfg, target, sequences)
    lengths = [(name, len(tokens_T)) for name, tokens_T in sequences.items()]
    job = plan_job(lengths, bytes_per_token, shard_bytes, cfg.batch_tokens, packed)
    if cfg.tokens is None:
        _batches(job, packed, found)
    speed, bits, how = cfg.tokens_per_s, BITS, "about"
    # A stated speed counts pads, a measured one has paid for them.
    computed = tokens if cfg.tokens is not None else job.computed_tokens(packed)
    if target is not None:
        measured = probe(target, job, sequences, packed=packed, last_hidden=cfg.last_hidden)
        speed, bits, how = measured.tokens_per_s, measured.bits, "measured:"
        computed = tokens
    found["tokens"] = tokens
    _sizes(cfg, tokens, bytes_per_token, bits, how, found)
    longest = max(map(len, sequences.values()))
    found["memory_bytes"] = 4 * max(longest, cfg.batch_tokens) * bytes_per_token
    say(
        f"memory    {size_text(found['memory_bytes'])} a worker beside the target: "
        "four batches of states"
    )
    if speed is not None:
        found |= {"tokens_per_s": speed, "hours": computed / speed / 3600}
        say(f"hours     {found['hours']:,.2f} at {speed:,.0f} tokens/s")
    _drafter(cfg, len(layer_ids), hidden_size, found)
    _sheet(cfg, found)
    if cfg.summary is not None:
        write_atomic(Path(cfg.summary), (json.dumps(found, indent=1) + "\n").encode())
    return 0


def _packed(cfg: PlanConfig, target: Target | None, sequences: dict[str, np.ndarray]) -> bool:
    """Whether an extraction would pack its batches; proven where the target is loaded."""
    if target is None or cfg.batching is not Batching.auto:
        return expected_batching(cfg.batching, cfg.target, cfg.device)
    return is_candidate(target.info, str(target.device)) and keeps_apart(
        target, self_test_samples(sequences), last_hidden=cfg.last_hidden
    )


def target_sizes(cfg: TargetConfig) -> tuple[int, int, int]:
    """(layers, width, vocabulary) as the configuration states them, else from config.json.

    Raises:
        TargetError: neither is there.
    """
    if cfg.num_layers and cfg.hidden_size and cfg.vocab_size:
        return cfg.num_layers, cfg.hidden_size, cfg.vocab_size
    from shared import target_files, tiny

    if cfg.model.startswith(tiny.PREFIX):
        config, _ = tiny.describe(cfg.model)
    else:
        config = target_files.read_config(target_files.locate(cfg, weights=False), cfg)
    config = text_config(config)
    return config.num_hidden_layers, config.hidden_size, config.vocab_size


def _data(cfg: PlanConfig, vocab_size: int, found: dict[str, Any]) -> Prepared:
    """Prints what the data files hold."""
    from shared.target import load_tokenizer

    tokenizer = load_tokenizer(cfg.target)
    prepared = prepare(cfg.data, tokenizer, mask_token_id(cfg.target, tokenizer), vocab_size)
    lengths = [len(sample.tokens_T) for sample in prepared.samples]
    tokens, supervised = sum(lengths), prepared.num_supervised
    say(
        f"rows      {prepared.num_rows:,}: {len(lengths):,} samples, "
        f"{prepared.num_duplicates:,} duplicates, {len(prepared.rejects):,} rejects"
    )
    for reason, count in prepared.reasons():
        say(f"          {count:,} x {reason}")
    held = sum(sample.split == "heldout" for sample in prepared.samples)
    say(f"samples   {held:,} held out, {prepared.num_cut:,} cut at {cfg.data.max_tokens:,} tokens")
    say(f"tokens    {tokens:,}, {supervised:,} supervised ({supervised / tokens:.0%})")
    for line in histogram(lengths):
        say(f"          {line}")
    found |= {
        "rows": prepared.num_rows,
        "samples": len(lengths),
        "duplicates": prepared.num_duplicates,
        "rejects": dict(prepared.reasons()),
        "heldout": held,
        "cut": prepared.num_cut,
        "tokens": tokens,
        "supervised_tokens": supervised,
    }
    return prepared


def _batches(job: JobPlan, packed: bool, found: dict[str, Any]) -> None:
    """Prints how the data would be batched."""
    batches = sum(len(shard.batches) for shard in job.shards)
    computed = job.computed_tokens(packed)
    waste = "nothing is padded" if packed else (
        f"{1 - found['tokens'] / computed:.1%} of computed tokens are pads"
    )  # fmt: skip
    say(f"batches   {batches:,} {_word(packed)} in {len(job.shards):,} shards, {waste}")
    found |= {
        "batching": _word(packed),
        "batches": batches,
        "shards": len(job.shards),
        "computed_tokens": computed,
    }


def _word(packed: bool) -> str:
    return "packed" if packed else "padded"


def _made_up(cfg: PlanConfig, vocab_size: int) -> dict[str, np.ndarray]:
    """Random samples of one length for the probe, where there are no data."""
    length = min(cfg.data.max_tokens, 512, cfg.batch_tokens)
    count = 4 * max(1, cfg.batch_tokens // length)
    rng = np.random.default_rng(0)
    return {f"{i:032x}": rng.integers(0, vocab_size, length) for i in range(count)}


def histogram(lengths: Sequence[int]) -> list[str]:
    """Lines of a length histogram with doubling buckets."""
    edges = [edge for edge in _BUCKETS if edge < 2 * max(lengths)] or [_BUCKETS[0]]
    if max(lengths) > edges[-1]:
        edges.append(max(lengths))
    counts, low, out = [], 0, []
    for edge in edges:
        counts.append(sum(low < length <= edge for length in lengths))
        low = edge
    for edge, count in zip(edges, counts, strict=True):
        if count:
            out.append(f"<= {edge:>6,} {count:>9,} {'#' * max(1, 40 * count // max(counts))}")
    return out


def size_text(size: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def count_text(count: int) -> str:
    """A number of parameters."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return str(count)


def _sizes(
    cfg: PlanConfig,
    tokens: float,
    bytes_per_token: int,
    bits: dict[Codec, float],
    how: str,
    found: dict[str, Any],
) -> None:
    raw = tokens * bytes_per_token
    say(f"raw       {size_text(raw)} of bf16, {bytes_per_token:,} bytes a token")
    for codec, value in bits.items():
        say(f"  {codec.value:<9}{size_text(raw * value / 16)} ({how} {value:.4g} bits of 16)")
    found |= {
        "raw_bytes": raw,
        "codecs": {
            codec.value: {"bits": value, "bytes": raw * value / 16} for codec, value in bits.items()
        },
    }
    if cfg.disk is None:
        return
    if "://" in cfg.disk:
        raise ConfigError(
            "the free space behind a URL isn't known", where="disk", do="Give a directory"
        )
    folder = Path(cfg.disk).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    found["free_bytes"] = shutil.disk_usage(folder).free
    say(f"free      {size_text(found['free_bytes'])} at {folder}")


def _drafter(cfg: PlanConfig, num_states: int, hidden_size: int, found: dict[str, Any]) -> None:
    """Prints the size of the drafter that `train` would build with the same drafter keys."""
    size = drafter_size(cfg.drafter, num_states, hidden_size)
    parts = asdict(size)
    names = {"fc": "fc", "gdn": "GDN", "attention": "attention", "mlp": "MLP", "norms": "norms"}
    shown = ", ".join(f"{names[part]} {count_text(n)}" for part, n in parts.items() if n)
    say(f"drafter   {count_text(size.total)} trainable: {shown}")
    say(
        f"          {size_text(4 * size.total)} of float32 weights, "
        f"{size_text(2 * size.total)} exported as bf16"
    )
    own = cfg.target.name
    if cfg.drafter.hidden_size is None and own in dict(group_options("drafter")):
        say(f"          drafter={own} is the one made for this target")
    found["drafter"] = {
        "layers": list(cfg.drafter.layer_types),
        "parameters": size.total,
        "parts": parts,
        "float32_bytes": 4 * size.total,
        "bf16_bytes": 2 * size.total,
    }


def _sheet(cfg: PlanConfig, found: dict[str, Any]) -> None:
    given = cfg.sheet
    if given.target_rate is None or given.drafter_rate is None:
        return
    result = bottleneck.sheet(
        given.target_rate,
        given.drafter_rate,
        given.target_gpus,
        given.drafter_gpus,
        given.trials,
        given.batches,
        given.epochs,
    )
    gpus = given.target_gpus + given.drafter_gpus
    for line in bottleneck.lines(result, given.target_rate, given.drafter_rate, gpus):
        say(line)
    found["sheet"] = asdict(result)
