"""The `eval` word: how good a run's drafter is, without and with the target.

Without it: held-out loss, accuracy per slot and estimated acceptance over fixed anchors. With it:
speculative decoding of the held-out prompts (a sample's tokens before its first supervised one),
in float32, held token for token against the target's own greedy output. `eval.json` keeps every
sample's and prompt's row, for paired intervals.

Legend: V vocabulary, D width.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.config import Dtype, TargetConfig, typed
from shared.errors import CacheError, ConfigError, CorruptionError, DataError, MismatchError
from shared.fs import check_writable, disk_errors, write_atomic
from shared.log import note, progress, read_json_lines, say
from shared.record import read_record
from stage2_train import checkpoint, decode, draft_vocabulary
from stage2_train.config import EvalConfig, TrainConfig
from stage2_train.decode_batch import batchable, greedy_batch, speculative_batch
from stage2_train.eval_table import evaluate_table, wanted
from stage2_train.heldout import heldout
from stage2_train.tree import speculative_tree

FORMAT = "drafttape.eval.v1"


@dataclass
class LoadedRun:
    """A run's drafter with what it was trained on.

    Attributes:
        embed_VD, head_VD: the target's frozen embedding and head, float32; one tensor when tied
            (of the head the draft vocabulary's rows only, if there is one).
        state: state.json of the checkpoint.
    """

    path: Path
    config: TrainConfig
    record: Any
    state: dict[str, Any]
    drafter: Any
    store: Any
    snapshot: Any
    embed_VD: Tensor
    head_VD: Tensor


def open_run(run_dir: str | Path, cache: str | None = None) -> tuple[Any, TrainConfig, Any]:
    """(record, configuration, store) of a run; `cache`: where its cache lies now, if it has moved.

    Raises:
        DataError: no run there. MismatchError: another cache than the run's.
        CacheError: the cache is gone or can't be read.
    """
    from shared.store import Store

    path = Path(run_dir)
    record = read_record(path)
    config = typed(TrainConfig, record.config, where=path / "run.json")
    root = cache or record.cache_root(path)
    if not Path(root).exists() and "://" not in root:
        raise CacheError(
            "the run's cache is not there any more",
            where=root,
            do="If it has moved, give its new place: cache=NEW_ROOT",
        )
    store = Store.open(root)
    if store.spec.digest != record.spec_digest:
        raise MismatchError(
            f"the cache's spec is {store.spec.digest}, the run was trained on {record.spec_digest}",
            where=store.root,
        )
    return record, config, store


def load_run(
    run_dir: str | Path, which: str = "last", device: str = "cpu", cache: str | None = None
) -> LoadedRun:
    """Loads the drafter of a run's checkpoint, its cache and snapshot.

    Args:
        which: `last`, `best` or `step-NNNNNN`.
        cache: where the run's cache lies now, if it has moved.

    Raises:
        DataError: no run there. MismatchError: no such checkpoint, or it or the cache doesn't fit.
        CorruptionError, CacheError: the checkpoint or the cache can't be read.
    """
    from stage2_train.build import build_drafter, frozen

    path = Path(run_dir)
    record, config, store = open_run(path, cache)
    folder = checkpoint.find(path, which)
    parameters, _, state = checkpoint.load(folder)
    drafter = build_drafter(config.drafter, store.spec, config.init_seed)
    checkpoint.load_parameters(drafter, parameters, folder)
    embed_VD, head_VD = frozen(store, torch.device(device), torch.float32)
    drafter = drafter.to(device).eval()
    return LoadedRun(
        path, config, record, state, drafter, store,
        store.snapshot(record.snapshot), embed_VD, drafter.head_rows(head_VD),
    )  # fmt: skip


def _same_loss(run: LoadedRun) -> None:
    """Held-out numbers of a run are those on the states that it was trained on.

    Raises:
        MismatchError: the cache was recoded since, and has lost other bits than the run's.
    """
    from shared.codec import get_codec

    there = {run.store.shard(name).codec for name in run.store.shard_ids()[:1]}  # all are alike
    lossy = (
        {name for name in names if get_codec(name).lossy} for names in (there, run.record.codecs)
    )
    if len({frozenset(names) for names in lossy}) > 1:
        raise MismatchError(
            f"its states are stored as {', '.join(there)}, the run was trained on "
            f"{', '.join(run.record.codecs)}",
            where=run.store.root,
            do="Give the run's own cache or a copy of it; codec-report measures what a codec costs",
        )


def prompts_of(run: LoadedRun, most: int | None) -> list[tuple[str, list[int]]]:
    """(sample id, tokens before its first supervised one) of held-out samples."""
    reader, prompts = run.store.reader(), []
    for index in np.asarray(run.snapshot.indices("heldout")).tolist():
        if most is not None and len(prompts) == most:
            break
        supervised = np.flatnonzero(run.snapshot.mask(index))
        if len(supervised) and supervised[0] > 0:
            name = run.snapshot.ids[index]
            tokens = reader.read_tokens(name)[: supervised[0]]
            prompts.append((name, [int(token) for token in tokens]))
    return prompts


def measure(cfg: EvalConfig) -> dict[str, Any]:
    """Evaluates a run and writes `eval.json`; a result that is up to date is read, not redone.

    Raises:
        DataError: there is no held-out sample. MismatchError: another target than the cache's.
    """
    from stage2_train.build import open_reader, resolve_device
    from stage2_train.loader import heldout_batches

    if cfg.tree < 0 or (cfg.tree and cfg.temperature > 0):
        raise ConfigError(
            f"tree={cfg.tree} with temperature={cfg.temperature}: a tree is verified greedily",
            do="Set tree=0 to sample, or temperature=0",
        )
    device = str(resolve_device(cfg.device))
    path = Path(cfg.run_dir)
    read_record(path)  # no run is a clearer fault than no checkpoint
    folder = checkpoint.find(path, cfg.checkpoint)
    key = {
        "checkpoint": folder.name,
        "weights": checkpoint.weights_key(folder),
        "decode": cfg.decode,
        "max_prompts": cfg.max_prompts,
        "max_new_tokens": cfg.max_new_tokens,
        "batch_size": cfg.batch_size,
        "temperature": cfg.temperature,
        "tree": cfg.tree,
    }
    known = read_evaluation(path)
    if known is not None and known.get("key") == key and not cfg.again:
        return known
    check_writable(path / "eval.json")
    run = load_run(path, cfg.checkpoint, device, cfg.cache)
    _same_loss(run)
    batches = heldout_batches(
        run.snapshot,
        open_reader(run.store, run.config.loader),
        run.config,
        run.config.drafter.mask_token_id,
    )
    block = run.config.drafter.block_size
    result: dict[str, Any] = {"format": FORMAT, "key": key, "step": run.state["step"]}
    result |= {"snapshot": run.snapshot.id, "spec_digest": run.store.spec.digest}
    result |= {"draft_vocabulary": run.record.draft_vocabulary}
    result |= heldout(
        run.drafter, batches, run.embed_VD, run.head_VD, run.config.loss, block, device=device
    )
    if cfg.decode:
        result |= decode_prompts(run, cfg, device)
    write_atomic(path / "eval.json", json.dumps(result, indent=1).encode() + b"\n")
    return result


def read_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """eval.json of a run, None where there is none or it is of another format."""
    try:
        found = json.loads((run_dir / "eval.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def decode_prompts(run: LoadedRun, cfg: EvalConfig, device: str) -> dict[str, Any]:
    """Real acceptance, speed and losslessness over the held-out prompts."""
    prompts = prompts_of(run, cfg.max_prompts)
    if not prompts:
        raise DataError(
            "no held-out sample starts with a prompt", where=f"snapshot {run.snapshot.id}",
            do="Extract with a larger data.heldout, or eval with decode=false",
        )  # fmt: skip
    target, taps, ends, draft = open_decoding(run, cfg, device)
    own = OwnOutputs(run, cfg, device)
    chain = not cfg.tree and cfg.temperature <= 0
    together = cfg.batch_size if chain and batchable(target.model) else 1
    rows, bar = [], progress(len(prompts), "decode", "prompt")
    for first in range(0, len(prompts), together):
        group = prompts[first : first + together]
        plain = _own_outputs(own, target.model, group, cfg, ends)
        if together > 1:
            fast = speculative_batch(
                target.model, taps, draft, [ids for _, ids in group], cfg.max_new_tokens, ends
            )
        else:
            fast = [decode_one(target.model, taps, draft, *group[0], cfg, ends)]
        for (name, prompt), ours, theirs in zip(group, fast, plain, strict=True):
            rows.append(_row(name, prompt, ours, theirs))
        bar.update(len(group))
    bar.close()
    extra = {"prompts": rows, "plain_reused": own.reused, "prompts_together": together}
    return summarise(rows, cfg.temperature) | extra


def open_decoding(
    run: LoadedRun, cfg: EvalConfig, device: str
) -> tuple[Any, list, list[int], decode.Draft]:
    """The target, its tapped layers, its end tokens, and what drafting needs."""
    target = load_target_of(run.store, cfg.target, device)
    taps = [target.layers[index] for index in run.store.spec.layer_ids]
    ends = [int(token) for token in run.store.target_assets().info.get("eos_token_ids") or []]
    draft = decode.Draft(
        run.drafter,
        run.embed_VD,
        run.head_VD,
        run.config.drafter.mask_token_id,
        run.config.drafter.block_size,
        run.drafter.draft_ids,
    )
    return target, taps, ends, draft


def _own_outputs(
    own: "OwnOutputs", model: Any, group: list[tuple[str, list[int]]], cfg: EvalConfig, ends: list
) -> list[dict[str, Any]]:
    """The target's own greedy outputs of a group of prompts, decoded if not known."""
    known = {name: own.get(name) for name, _ in group}
    todo = [(name, prompt) for name, prompt in group if known[name] is None]
    if len(todo) == 1:
        made = [decode.greedy(model, todo[0][1], cfg.max_new_tokens, ends)]
    elif todo:
        made = greedy_batch(model, [prompt for _, prompt in todo], cfg.max_new_tokens, ends)
    else:
        made = []
    known |= {name: own.add(name, decoded) for (name, _), decoded in zip(todo, made, strict=True)}
    return [known[name] for name, _ in group]


def decode_one(
    model: Any, taps: list, draft: decode.Draft, name: str, prompt: list[int], cfg: EvalConfig,
    ends: list[int], most_drafts: int | None = None,
) -> decode.Decoded:  # fmt: skip
    """One prompt as the configuration says: chain or tree, greedy or sampled."""
    if cfg.tree:
        return speculative_tree(
            model, taps, draft, prompt, cfg.max_new_tokens, ends, budget=cfg.tree
        )
    seed = int(hashlib.blake2b(name.encode(), digest_size=6).hexdigest(), 16)
    return decode.speculative(
        model, taps, draft, prompt, cfg.max_new_tokens, ends,
        temperature=cfg.temperature, generator=torch.Generator().manual_seed(seed),
        most_drafts=most_drafts,
    )  # fmt: skip


def _row(
    name: str, prompt: list[int], ours: decode.Decoded, theirs: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": name,
        "prompt_tokens": len(prompt),
        "new_tokens": len(ours.tokens),
        "committed": sum(ours.commits),
        "passes": len(ours.commits),
        "replays": ours.replays,
        "identical": ours.tokens == theirs["tokens"],
        "seconds": round(sum(ours.seconds.values()), 4),
        "draft_seconds": round(ours.seconds["draft"], 4),
        "plain_tokens": len(theirs["tokens"]),
        "plain_seconds": theirs["seconds"],
    }


def summarise(rows: list[dict[str, Any]], temperature: float = 0.0) -> dict[str, Any]:
    """Totals over prompts; real acceptance = committed tokens per verification pass."""
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key != "id"}
    speed = total["new_tokens"] / total["seconds"] if total["seconds"] else None
    plain = total["plain_tokens"] / total["plain_seconds"] if total["plain_seconds"] else None
    return {
        "real_acceptance": total["committed"] / total["passes"] if total["passes"] else None,
        "output_identical": [total["identical"], len(rows)] if temperature <= 0 else None,
        "tokens_per_s": speed,
        "plain_tokens_per_s": plain,
        "speedup": speed / plain if speed and plain else None,
    }


class OwnOutputs:
    """The target's own greedy outputs, shared by the runs that lie in one folder.

    They depend on the target, the prompts (that is the snapshot, whose masks end them) and the
    length alone, their seconds on the device too; so arms of an experiment decode them once:
    `<folder of the runs>/.target-outputs-<key>.jsonl`.
    """

    def __init__(self, run: LoadedRun, cfg: EvalConfig, device: str) -> None:
        kind = device.partition(":")[0]
        text = json.dumps(
            [run.store.spec.weights, run.snapshot.id, cfg.max_new_tokens, cfg.batch_size, kind]
        )
        key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.path = run.path.resolve().parent / f".target-outputs-{key}.jsonl"
        self.reused = 0
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(CorruptionError, FileNotFoundError):  # then they are made again
            lines = [] if cfg.again else read_json_lines(self.path)
        self.rows = {line["id"]: line for line in lines}
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def get(self, name: str) -> dict[str, Any] | None:
        row = self.rows.get(name)
        self.reused += row is not None
        return row

    def add(self, name: str, decoded: decode.Decoded) -> dict[str, Any]:
        row = {
            "id": name,
            "tokens": decoded.tokens,
            "seconds": round(sum(decoded.seconds.values()), 4),
        }
        with disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row


def load_target_of(store: Any, given: TargetConfig | None, device: str) -> Any:
    """The target in float32, proven to be the one whose states the cache holds.

    Raises:
        MismatchError: its weights are others.
    """
    from shared.target import load_target

    info = store.target_assets().info
    if given is None and "target" not in info:
        raise ConfigError(
            "the cache doesn't say how to load its target",
            where=store.root,
            do="Name it, as in target=smollm2",
        )
    if given is None:
        given = typed(TargetConfig, info["target"], where=f"{store.root}/target")
    # Flash attention takes 16 bits and no masks of trees: auto is sdpa in float32.
    plain = "auto" if given.attention.startswith("flash") else given.attention
    target = load_target(replace(given, dtype=Dtype.float32, attention=plain), device)
    if target.weights_digest != store.spec.weights:
        raise MismatchError(
            f"the target's weights are {target.weights_digest}, the cache was extracted with "
            f"{store.spec.weights}",
            where=given.model,
            do="Decode with the target of the cache",
        )
    return target


def table(path: Path, result: dict[str, Any]) -> str:
    """The result as terminal text."""
    lines = [f"{path.name} at step {result['step']}"]
    if result.get("draft_vocabulary"):
        lines.append(f"  {draft_vocabulary.sentence(result['draft_vocabulary'])}")
    lines.append(f"  held-out loss          {result['heldout_loss']:.4f}")
    lines.append(f"  accuracy               {result['accuracy']:.4f}")
    lines.append(f"  estimated acceptance   {result['estimated_acceptance']:.3f} tokens/pass")
    if result.get("real_acceptance") is not None:
        lines.append(f"  real acceptance        {result['real_acceptance']:.3f} tokens/pass")
        if result.get("output_identical"):
            same, tried = result["output_identical"]
            lines.append(f"  output identical       {same} of {tried} prompts")
        lines.append(
            f"  tokens/s               {result['tokens_per_s']:.1f} "
            f"(target alone {result['plain_tokens_per_s']:.1f}, x{result['speedup']:.2f}; "
            f"{result.get('prompts_together', 1)} prompts together)"
        )
    slots = result["slot_accuracy"]
    lines.append("  slot      " + " ".join(f"{k:>5}" for k in range(1, len(slots) + 1)))
    lines.append("  accuracy  " + " ".join(f"{value:5.3f}" for value in slots))
    return "\n".join(lines)


def evaluate(cfg: EvalConfig) -> int:
    """The word: measures, prints the table. Exit code 1 when an output is not the target's own."""
    if wanted(cfg):
        return evaluate_table(cfg)
    result = measure(cfg)
    say(table(Path(cfg.run_dir), result))
    identical = result.get("output_identical")
    if identical and identical[0] != identical[1]:
        names = [row["id"] for row in result["prompts"] if not row["identical"]]
        note(f"not the target's own output: {', '.join(names[:5])}")
        return 1
    return 0
