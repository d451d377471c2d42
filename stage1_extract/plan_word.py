"""drafttape plan: what an extraction takes, before it runs and without the target's weights."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared.config import TargetConfig
from shared.errors import ConfigError
from shared.log import say
from shared.target import choose_device, mask_token_id, resolve_layer_ids, text_config
from stage1_extract import bottleneck
from stage1_extract.config import Codec, PlanConfig
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
    if cfg.tokens is not None and cfg.tokens <= 0:
        raise ConfigError("tokens must be positive", where="tokens")
    num_layers, hidden_size, vocab_size = target_sizes(cfg.target)
    layer_ids = resolve_layer_ids(cfg.target, num_layers)
    num_states = len(layer_ids) + int(cfg.last_hidden)
    rule = cfg.target.tap_rule.value
    say(f"target    {cfg.target.name}: {num_layers} layers, width {hidden_size}")
    say(f"taps      {', '.join(map(str, layer_ids))} ({rule}; 0-based layer outputs)")
    bytes_per_token = num_states * hidden_size * 2
    if cfg.tokens is None:
        prepared, job = _data(cfg, vocab_size, bytes_per_token)
        sequences = {sample.id: sample.tokens_T for sample in prepared.samples}
        tokens = float(prepared.num_tokens)
    else:
        sequences, job = _made_up(cfg, vocab_size)
        tokens = cfg.tokens
        say(f"tokens    {tokens:,.0f}")
    speed, bits, how = cfg.tokens_per_s, BITS, "about"
    if cfg.probe:
        device = choose_device(cfg.device)
        found = probe(cfg.target, device, job, sequences, last_hidden=cfg.last_hidden)
        speed, bits, how = found.tokens_per_s, found.bits, "measured:"
    _sizes(cfg, tokens, bytes_per_token, bits, how)
    longest = max(map(len, sequences.values()))
    batch = max(longest, cfg.batch_tokens) * bytes_per_token
    say(f"memory    {size_text(4 * batch)} a worker beside the target: four batches of states")
    if speed is not None:
        if speed <= 0:
            raise ConfigError("tokens_per_s must be positive", where="tokens_per_s")
        say(f"hours     {tokens / speed / 3600:,.2f} at {speed:,.0f} tokens/s")
    _sheet(cfg)
    return 0


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


def _data(cfg: PlanConfig, vocab_size: int, bytes_per_token: int) -> tuple[Prepared, JobPlan]:
    """Prints what the data files hold; returns the samples and the job over them."""
    from shared.target import load_tokenizer

    tokenizer = load_tokenizer(cfg.target)
    prepared = prepare(cfg.data, tokenizer, mask_token_id(cfg.target, tokenizer), vocab_size)
    lengths = np.asarray([len(sample.tokens_T) for sample in prepared.samples])
    tokens, supervised = int(lengths.sum()), prepared.num_supervised
    say(
        f"rows      {prepared.num_rows:,}: {len(lengths):,} samples, "
        f"{prepared.num_duplicates:,} duplicates, {len(prepared.rejects):,} rejects"
    )
    for reason, count in prepared.reasons():
        say(f"          {count:,} x {reason}")
    held = sum(sample.split == "heldout" for sample in prepared.samples)
    say(f"samples   {held:,} held out, {prepared.num_cut:,} cut at {cfg.data.max_tokens:,} tokens")
    say(f"tokens    {tokens:,}, {supervised:,} supervised ({supervised / tokens:.0%})")
    for line in histogram(lengths.tolist()):
        say(f"          {line}")
    job = planned(prepared, bytes_per_token, cfg.shard_bytes, cfg.batch_tokens)
    computed = sum(shard.computed_tokens for shard in job.shards)
    batches = sum(len(shard.batches) for shard in job.shards)
    say(
        f"batches   {batches:,} in {len(job.shards):,} shards, "
        f"{1 - tokens / computed:.1%} of computed tokens are pads"
    )
    return prepared, job


def _made_up(cfg: PlanConfig, vocab_size: int) -> tuple[dict[str, np.ndarray], JobPlan]:
    """Random samples of one length for the probe, where there are no data."""
    length = min(cfg.data.max_tokens, 512, cfg.batch_tokens)
    count = 4 * max(1, cfg.batch_tokens // length)
    rng = np.random.default_rng(0)
    sequences = {f"{i:032x}": rng.integers(0, vocab_size, length) for i in range(count)}
    lengths = [(name, length) for name in sequences]
    return sequences, plan_job(lengths, 1, count * length, cfg.batch_tokens)


def planned(
    prepared: Prepared, bytes_per_token: int, shard_bytes: int, batch_tokens: int
) -> JobPlan:
    """The job that would run over all samples."""
    lengths = [(sample.id, len(sample.tokens_T)) for sample in prepared.samples]
    return plan_job(lengths, bytes_per_token, shard_bytes, batch_tokens)


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


def _sizes(
    cfg: PlanConfig, tokens: float, bytes_per_token: int, bits: dict[Codec, float], how: str
) -> None:
    raw = tokens * bytes_per_token
    say(f"raw       {size_text(raw)} of bf16, {bytes_per_token:,} bytes a token")
    for codec, value in bits.items():
        say(f"  {codec.value:<9}{size_text(raw * value / 16)} ({how} {value:.4g} bits of 16)")
    if cfg.disk is not None:
        folder = Path(cfg.disk).expanduser().absolute()
        while not folder.exists():
            folder = folder.parent
        say(f"free      {size_text(shutil.disk_usage(folder).free)} at {folder}")


def _sheet(cfg: PlanConfig) -> None:
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
