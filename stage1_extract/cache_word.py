"""The word `cache`: what a cache holds, whether it is whole, and its upkeep."""

from collections.abc import Callable

from shared.errors import CacheError, ConfigError, CorruptionError
from shared.log import progress, say
from shared.shards import CONTAINERS
from shared.store import Store
from stage1_extract.config import CacheWordConfig


def cache(cfg: CacheWordConfig) -> int:
    """Runs one action; returns the exit code.

    Raises:
        ConfigError: there is no such action, or it needs other arguments.
    """
    if cfg.action not in ACTIONS:
        raise ConfigError(
            f"cache has no action {cfg.action!r}", do=f"Choose one of {', '.join(ACTIONS)}"
        )
    run, usage = ACTIONS[cfg.action]
    counts = {len(form.split()) for form in usage.split("|")}
    if "…" not in usage and len(cfg.args) not in counts:
        raise ConfigError(
            f"cache {cfg.action} got {len(cfg.args)} arguments",
            do=f"Use drafttape cache {cfg.action} ROOT {usage}".rstrip(),
        )
    return run(cfg)


def size_text(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{int(num_bytes)} B"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def ls(cfg: CacheWordConfig) -> int:
    """Prints spec, shards by container and codec, and snapshots."""
    store = Store.open(cfg.root)
    spec = store.spec
    last = " and the last hidden" if spec.last_hidden else ""
    taps = ", ".join(map(str, spec.layer_ids)) + last
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
            f"{size_text(stored)} ({ratio:.3f} of bf16)"
        )
        if errors := worst.get(codec):
            say(f"    largest relative error by state: {', '.join(f'{x:.2g}' for x in errors)}")
    if not kinds:
        say("  no shards yet")
    latest = store.resolve() if store.files.exists("snapshots/latest") else None
    for snapshot in store.snapshots():
        marks = snapshot["names"] + (["latest"] if snapshot["snapshot"] == latest else [])
        say(
            f"  snapshot {snapshot['snapshot']}: {snapshot['num_samples']} samples, "
            f"{snapshot['num_tokens']} tokens, {snapshot['num_supervised']} supervised"
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
    how = f"{size_text(report.bytes)} read" if cfg.full else "sizes and sealed files only"
    say(f"{report.files} files, {report.samples} samples, {how}: {len(report.problems)} problems")
    if report.problems:
        say(
            f"{len(report.bad_samples)} samples can't be trusted; "
            f"drafttape cache repair {cfg.root} says what can be done"
        )
        return 1
    if cfg.recompute:
        from stage1_extract.cache_target import recompute

        return recompute(store, cfg.recompute, cfg.device)
    return 0


def diff(cfg: CacheWordConfig) -> int:
    """Compares two snapshots."""
    from shared.upkeep import diff as compare

    store = Store.open(cfg.root)
    result = compare(store, cfg.args[0], cfg.args[1])
    for label in ("added", "removed", "unchanged"):
        samples, tokens, size = getattr(result, label)
        say(f"{label:<9} {samples} samples, {tokens} tokens, {size_text(size)}")
    say(f"of the unchanged, {result.relabelled} have another mask or split")
    return 0


def tag(cfg: CacheWordConfig) -> int:
    """Gives a snapshot a name."""
    store = Store.open(cfg.root)
    snapshot = store.resolve(cfg.args[0])
    store.tag(cfg.args[1], snapshot)
    say(f"{cfg.args[1]} is snapshot {snapshot}")
    return 0


def rm(cfg: CacheWordConfig) -> int:
    """Forgets a snapshot."""
    from shared.upkeep import remove_snapshot

    name = remove_snapshot(Store.open(cfg.root), cfg.args[0])
    say(f"snapshot {name} is forgotten; drafttape cache gc {cfg.root} says what it frees")
    return 0


def gc(cfg: CacheWordConfig) -> int:
    """Drops what no snapshot refers to."""
    from shared.upkeep import gc as collect

    store = Store.open(cfg.root)
    report = collect(store, dry_run=cfg.dry_run, keep_days=cfg.keep_days, threshold=cfg.threshold)
    for name in report.drop:
        say(f"drop shard {name}: no snapshot refers to it")
    for name, kept in report.compact:
        say(f"shrink shard {name} to the {kept} samples that snapshots refer to")
    for name in report.orphans:
        say(f"drop shards/{name}: it has no sidecar")
    if report.young:
        say(f"{len(report.young)} unreferenced shards stay: younger than {cfg.keep_days:g} days")
    say(f"{'would free' if cfg.dry_run else 'freed'} about {size_text(report.freed)}")
    if cfg.dry_run and (report.drop or report.compact or report.orphans):
        say(f"to do it: drafttape cache gc {cfg.root} dry_run=false")
    return 0


def repair(cfg: CacheWordConfig) -> int:
    """Drops what verify finds bad and runs the lost samples through the target again."""
    from shared.upkeep import repair as mend
    from shared.verify import total_bytes

    store = Store.open(cfg.root)
    with progress(total_bytes(store), "verify", "B") as bar:
        found = store.verify(progress=bar.update)
    if found.ok:
        say("nothing is damaged")
        return 0
    report = mend(store, found, dry_run=cfg.dry_run)
    for name in report.removed:
        say(f"{'would mend or drop' if cfg.dry_run else 'mended or dropped'} {name}")
    for name in report.left:
        say(f"can't be mended: {name}; write the snapshot again with drafttape extract")
    again = f"{len(report.lost)} samples to run again"
    say(f"{again}, {len(report.unreadable)} more must come from the data set")
    if cfg.dry_run:
        say(f"to do it: drafttape cache repair {cfg.root} dry_run=false")
        return 1
    if report.lost:
        from stage1_extract.cache_target import recapture

        recapture(store, report.lost, cfg)
    after = Store.open(cfg.root).verify()
    for problem in after.problems:
        say(f"BAD {problem}")
    if after.bad_samples:
        say("run drafttape extract with the same data: it runs only what is missing")
    return 1 if after.problems else 0


def convert(cfg: CacheWordConfig) -> int:
    """Moves all shards to the other container."""
    container = cfg.args[0]
    if container not in CONTAINERS:
        raise ConfigError(
            f"there is no container {container!r}", do=f"Use {' or '.join(CONTAINERS)}"
        )
    store = Store.open(cfg.root)
    with progress(sum(store.shard(s).stored_bytes for s in store.shard_ids()), "convert", "B") as b:
        moved = store.convert(container, progress=b.update)
    say(f"{moved} shards moved to {container}; snapshots and decoded bits are the same")
    return 0


def recode(cfg: CacheWordConfig) -> int:
    """Writes a copy of the cache in another codec."""
    from shared.recode import recode as encode

    codec, root = cfg.args
    store = Store.open(cfg.root)
    total = sum(store.shard(name).stored_bytes for name in store.shard_ids())
    with progress(total, "recode", "B") as bar:
        copy = encode(store, codec, root, bar.update)
    stored = sum(copy.shard(name).stored_bytes for name in copy.shard_ids())
    say(f"{root}: the same samples and snapshots as {codec}, {size_text(stored)}")
    return 0


def exchange_import(cfg: CacheWordConfig) -> int:
    """Makes a cache from another tool's files."""
    from stage1_extract.exchange import import_from

    kind, source = cfg.args
    with progress(None, "import", "samples") as bar:
        report = import_from(
            kind,
            source,
            cfg.root,
            codec=cfg.codec.value,
            container=cfg.container.value,
            layer_ids=cfg.layer_ids,
            weights=cfg.weights,
            target=cfg.target,
            device=cfg.device,
            progress=bar.update,
        )
    for source_name, reason in report.rejected:
        say(f"left out {source_name}: {reason}")
    say(f"{report.samples} samples imported, {len(report.rejected)} left out")
    if cfg.target is None:
        say("to train from them, import again with target=…: it proves the states and stores "
            "embedding and head")  # fmt: skip
    if not report.samples:
        raise CorruptionError("no sample could be imported", where=source)
    return 0 if not report.rejected else 3


def exchange_export(cfg: CacheWordConfig) -> int:
    """Writes a snapshot as another tool's files."""
    from stage1_extract.exchange import export_to

    kind, target = cfg.args[:2]
    ref = cfg.args[2] if len(cfg.args) > 2 else "latest"
    with progress(None, "export", "samples") as bar:
        count = export_to(kind, Store.open(cfg.root), ref, target, progress=bar.update)
    if not count:
        raise CacheError("the snapshot is empty", where=cfg.root)
    say(f"{count} samples written to {target}")
    return 0


# action -> (function, the arguments after ROOT; forms separated by "|")
ACTIONS: dict[str, tuple[Callable[[CacheWordConfig], int], str]] = {
    "ls": (ls, ""),
    "verify": (verify, ""),
    "diff": (diff, "OLD NEW"),
    "tag": (tag, "SNAPSHOT NAME"),
    "rm": (rm, "SNAPSHOT"),
    "gc": (gc, ""),
    "repair": (repair, ""),
    "convert": (convert, "zarr|webdataset"),
    "recode": (recode, "CODEC NEW_ROOT"),
    "import": (exchange_import, "KIND PATH"),
    "export": (exchange_export, "KIND PATH|KIND PATH SNAPSHOT"),
}
