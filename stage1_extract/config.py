"""Typed configuration of stage one's words (torch-free)."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from shared.config import TargetConfig, opt
from shared.drafter_config import DrafterConfig


class Container(Enum):
    """File layout of a shard."""

    zarr = "zarr"
    webdataset = "webdataset"


class Codec(Enum):
    """How hidden states are stored (see `shared/codec.py` for each one's loss)."""

    lossless = "lossless"
    fast = "fast"
    int8 = "int8"
    bits5 = "bits5"
    bits4 = "bits4"
    bits3 = "bits3"
    int4 = "int4"


class TrainOn(Enum):
    """Which assistant turns are supervised."""

    all = "all"
    last = "last"


class Thinking(Enum):
    """What becomes of think parts in assistant turns."""

    keep = "keep"
    drop = "drop"
    mask = "mask"


@dataclass
class DataConfig:
    """Chat data and how it becomes tokens and a loss mask."""

    paths: list[str] = opt([], "files or globs: JSONL, JSON or Parquet, optionally .gz or .zst")
    dataset: str | None = opt(
        None, "a dataset of the Hugging Face hub, or a folder that `datasets` saved"
    )
    subset: str | None = opt(None, "configuration of the dataset")
    split: str = opt("train", "split of the dataset, as in train_sft or train[:1000]")
    streaming: bool = opt(False, "read the dataset over the network instead of downloading it")
    max_tokens: int = opt(4096, "a longer sample is cut here; its mask is cut with it", low=2)
    min_supervised: int = opt(2, "a sample with fewer supervised tokens is rejected", low=1)
    heldout: float = opt(
        0.1, "share held out from training, by sample id, of rows without a split", low=0, below=1
    )
    heldout_seed: int = opt(0, "another seed holds out another share")
    limit: int | None = opt(None, "use only the first so many rows", low=1)
    train_on: TrainOn = opt(TrainOn.all, "supervise all assistant turns, or only the last")
    thinking: Thinking = opt(
        Thinking.keep, "think parts: keep as the template shows them, drop, or mask (unsupervised)"
    )
    template: dict[str, Any] = opt({}, "extra variables of the chat template")


@dataclass
class CacheConfig:
    """Where and how hidden states are stored."""

    root: str = opt(MISSING, "the cache: a directory")
    container: Container = opt(Container.zarr, "file layout of new shards")
    codec: Codec = opt(Codec.lossless, "encoding of new shards")
    shard_bytes: int = opt(2 << 30, "bytes of bf16 hidden states in a shard", low=1)


class Batching(Enum):
    """How samples share a forward pass."""

    auto = "auto"
    packed = "packed"
    padded = "padded"


class Executor(Enum):
    """Who runs the shards of a job."""

    auto = "auto"
    local = "local"
    torchrun = "torchrun"
    ray = "ray"


@dataclass
class ExtractConfig:
    """drafttape extract"""

    target: TargetConfig = opt(TargetConfig, "the target model")
    data: DataConfig = opt(DataConfig, "chat data")
    cache: CacheConfig = opt(CacheConfig, "the cache")
    snapshot: str | None = opt(None, "name of the new snapshot")
    batch_tokens: int = opt(8192, "token budget of a forward pass, pads included", low=1)
    batching: Batching = opt(
        Batching.auto,
        "samples packed end to end or padded to equal lengths; auto: packed where attention is "
        "flash_attention_* and a test at the start proves that nothing leaks",
    )
    device: str = opt("auto", "auto, cpu, cuda, cuda:N")
    workers: int = opt(
        1, "processes on this machine, one a GPU (0: as many as there are GPUs)", low=0
    )
    executor: Executor = opt(Executor.auto, "who runs the shards")
    ray_address: str | None = opt(
        None, "executor=ray: a cluster's address, or auto; null starts Ray on this machine"
    )
    until: str | None = opt(None, "stop in time for this hour, HH:MM; the same command goes on")
    last_hidden: bool = opt(False, "also store the post-norm last hidden state (KL and L1 losses)")
    reject_threshold: float = opt(
        0.05, "exit with code 3 if a larger share of rows is rejected", low=0
    )
    self_test: bool = opt(True, "compare a batched sample with itself alone before the run")


@dataclass
class ServerConfig:
    """OpenAI-compatible servers that answer instead of a local target."""

    endpoints: list[str] = opt([], "base URLs, such as http://localhost:8000/v1; empty: local")
    model: str | None = opt(None, "served model (default: the first one the server lists)")
    concurrency: int = opt(32, "chats in flight", low=1)
    retries: int = opt(5, "tries again after errors that may pass", low=0)
    timeout_s: float = opt(600.0, "seconds to wait for one answer", above=0)
    key_variable: str = opt("OPENAI_API_KEY", "environment variable that holds the API key")


@dataclass
class GenerateConfig:
    """drafttape generate"""

    target: TargetConfig = opt(TargetConfig, "the target model")
    data: DataConfig = opt(DataConfig, "prompts")
    output: str = opt(MISSING, "JSONL file of the conversations; existing ones are kept")
    max_new_tokens: int = opt(128, "longest answer in tokens", low=1)
    batch_size: int = opt(32, "prompts answered together", low=1)
    device: str = opt("auto", "auto, cpu, cuda, cuda:N")
    server: ServerConfig = opt(ServerConfig, "answers over HTTP")


@dataclass
class SheetConfig:
    """Rates for plan's bottleneck sheet; it is printed when both rates are given."""

    target_rate: float | None = opt(None, "batches/s of the target on all its GPUs together")
    drafter_rate: float | None = opt(None, "batches/s of drafter training on all its GPUs")
    target_gpus: int = opt(3, "GPUs that run the target")
    drafter_gpus: int = opt(1, "GPUs that train the drafter")
    trials: int = opt(2, "training runs on the same data")
    batches: int | None = opt(None, "batches in the data set")
    epochs: int = opt(6, "passes over the data per run")


@dataclass
class PlanConfig:
    """drafttape plan"""

    target: TargetConfig = opt(TargetConfig, "the target model")
    data: DataConfig = opt(DataConfig, "chat data")
    tokens: float | None = opt(
        None, "plan for so many tokens instead of reading data.paths", above=0
    )
    tokens_per_s: float | None = opt(
        None, "target speed in computed tokens/s, pads included, for the hours", above=0
    )
    last_hidden: bool = opt(False, "also store the post-norm last hidden state")
    shard_bytes: int = opt(2 << 30, "bytes of bf16 hidden states in a shard", low=1)
    batch_tokens: int = opt(8192, "token budget of a forward pass, pads included", low=1)
    batching: Batching = opt(Batching.auto, "as for extract; without probe, auto trusts the test")
    drafter: DrafterConfig = opt(DrafterConfig, "the drafter whose size is stated, as for train")
    disk: str | None = opt(None, "directory whose free space is shown")
    probe: bool = opt(False, "load the target and measure its tokens/s for half a minute")
    device: str = opt("auto", "for probe and batching: auto, cpu, cuda, cuda:N")
    summary: str | None = opt(None, "also write the numbers as JSON here")
    sheet: SheetConfig = opt(SheetConfig, "the bottleneck sheet")


@dataclass
class MaskAuditConfig:
    """drafttape mask-audit"""

    target: TargetConfig = opt(TargetConfig, "the target model (only its tokenizer is loaded)")
    data: DataConfig = opt(DataConfig, "chat data")
    samples: int = opt(3, "samples shown, spread over the data", low=0)
    html: str | None = opt(None, "also write a page with these samples")


@dataclass
class StatusConfig:
    """drafttape status"""

    root: str = opt(MISSING, "a cache that is being filled, or the directory of a training run")


@dataclass
class CacheWordConfig:
    """drafttape cache"""

    action: str = opt(
        "ls", "ls | verify | diff | tag | rm | gc | repair | convert | recode | import | export"
    )
    root: str = opt(MISSING, "the cache")
    args: list[str] = opt(
        [],
        "after ROOT: diff OLD NEW, tag SNAPSHOT NAME, rm SNAPSHOT, convert CONTAINER, "
        "recode CODEC NEW_ROOT, import|export KIND PATH",
    )
    full: bool = opt(True, "verify: read every byte (false: sizes and sidecars only)")
    recompute: int = opt(
        0, "verify: run so many samples through the target again and compare", low=0
    )
    dry_run: bool = opt(True, "gc, repair: only say what would be done")
    keep_days: float = opt(7.0, "gc: keep unreferenced shards younger than this", low=0)
    threshold: float = opt(
        0.5, "gc: rewrite shards whose used share of tokens is below this", low=0, high=1
    )
    codec: Codec = opt(Codec.lossless, "import: encoding of the new shards")
    container: Container = opt(Container.zarr, "import: file layout of the new shards")
    layer_ids: list[int] | None = opt(None, "import: the tapped layers, where files don't say")
    weights: str | None = opt(None, "import: name or digest of the target's weights")
    target: TargetConfig | None = opt(
        None, "import: the model that made the states; proves them, and lets one train from them"
    )
    device: str = opt("auto", "verify recompute, repair, import: auto, cpu, cuda, cuda:N")
