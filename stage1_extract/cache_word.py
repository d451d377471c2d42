"""The word `cache`: what a cache holds, whether it is whole."""

from collections.abc import Callable

from shared.errors import ConfigError
from shared.log import progress, say
from shared.store import Store
from stage1_extract.config import CacheWordConfig


def cache(cfg: CacheWordConfig) -> int:
    """Runs one action; returns the exit code.

    Raises:
        ConfigError: there is no such action.
    """
    if cfg.action not in ACTIONS:
        raise ConfigError(
            f"cache has no action {cfg.action!r}", do=f"Choose one of {', '.join(ACTIONS)}"
        )
    return ACTIONS[cfg.action](cfg)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{int(num_bytes)} B"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def ls(cfg: CacheWordConfig) -> int:
    """Prints spec, shards by container and codec, and snapshots."""
    store = Store.open(cfg.root)
    spec = store.spec
    taps = ", ".join(map(str, spec.layer_ids)) + (
        " and the last hidden" if spec.last_hidden else ""
    )
    say(f"{cfg.root}: {spec.architecture}, weights {spec.weights[:12]}")
    say(f"  layers {taps}; {spec.num_states} x {spec.hidden_size} {spec.dtype} a token")
    say("  " + ", ".join(f"{key} {value}" for key, value in spec.backend.items()))
    kinds: dict[tuple[str, str], list[int]] = {}
    worst: dict[str, tuple[float, ...]] = {}
    for name in store.shard_ids():
        info = store.shard(name)
        row = kinds.setdefault((info.container, info.codec), [0, 0, 0, 0])
        tokens = int(info.num_tokens.sum(dtype="int64"))
        if info.layer_error:
            old = worst.get(info.codec, info.layer_error)
            worst[info.codec] = tuple(map(max, old, info.layer_error))
        for place, amount in enumerate((1, len(info.ids), tokens, info.stored_bytes)):
            row[place] += amount
    for (container, codec), (shards, samples, tokens, stored) in sorted(kinds.items()):
        ratio = stored / max(1, tokens * spec.bytes_per_token)
        say(
            f"  {container}/{codec}: {shards} shards, {samples} samples, {tokens} tokens, "
            f"{_size(stored)} ({ratio:.3f} of bf16)"
        )
        if errors := worst.get(codec):
            say(f"    largest relative error by state: {', '.join(f'{x:.2g}' for x in errors)}")
    if not kinds:
        say("  no shards yet")
    latest = store.resolve() if store.files.exists("snapshots/latest") else None
    for info in store.snapshots():
        marks = info["names"] + (["latest"] if info["snapshot"] == latest else [])
        say(
            f"  snapshot {info['snapshot']}: {info['num_samples']} samples, "
            f"{info['num_tokens']} tokens, {info['num_supervised']} supervised"
            + (f" ({', '.join(marks)})" if marks else "")
        )
    return 0


def verify(cfg: CacheWordConfig) -> int:
    """Checks the cache; exit code 1 and a list when something is bad."""
    from shared.verify import total_bytes

    store = Store.open(cfg.root)
    with progress(total_bytes(store) if cfg.full else None, "verify", "B") as bar:
        report = store.verify(full=cfg.full, progress=bar.update)
    for problem in report.problems:
        say(f"BAD {problem}")
    how = f"{_size(report.bytes)} read" if cfg.full else "sizes and checksums of indexes only"
    say(f"{report.files} files, {report.samples} samples, {how}: {len(report.problems)} problems")
    if report.bad_samples:
        say(f"{len(report.bad_samples)} samples can't be trusted; cache repair lists what to do")
    return 1 if report.problems else 0


ACTIONS: dict[str, Callable[[CacheWordConfig], int]] = {"ls": ls, "verify": verify}
