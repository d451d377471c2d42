"""Typed configuration of stage two's words (torch-free)."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from shared.config import Dtype, TargetConfig, opt
from shared.drafter_config import DrafterConfig


class OptimizerName(Enum):
    """The optimizer of a run."""

    adamw = "adamw"
    muon = "muon"
    sgd = "sgd"


class Polynomial(Enum):
    """Orthogonalisation of a Muon update (see `stage2_train/orthogonalize.py`)."""

    kj = "kj"
    taylor = "taylor"
    polar_express = "polar_express"
    svd = "svd"


class MuonScale(Enum):
    """Shape factor of a Muon update."""

    moonlight = "moonlight"
    kj = "kj"
    none = "none"


class Clip(Enum):
    """Gradient clipping before the optimizer."""

    global_norm = "global_norm"
    value = "value"
    none = "none"


class ScheduleName(Enum):
    """Shape of the learning rate over the run."""

    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"
    multistep = "multistep"
    inverse_sqrt = "inverse_sqrt"


class Cooldown(Enum):
    """Shape of the WSD decay."""

    linear = "linear"
    cosine = "cosine"
    one_minus_sqrt = "one_minus_sqrt"


@dataclass
class OptimizerConfig:
    """The optimizer; muon uses the adamw keys for what Muon doesn't own."""

    name: OptimizerName = opt(OptimizerName.adamw, "which optimizer")
    lr: float = opt(6e-4, "peak learning rate (muon: of the matrices)", low=0)
    weight_decay: float = opt(0.0, "decoupled weight decay", low=0)
    betas: list[float] = opt([0.9, 0.95], "AdamW moment decays", low=0, below=1, size=2)
    eps: float = opt(1e-8, "AdamW epsilon, added to sqrt(v)", low=0)
    adamw_lr: float | None = opt(None, "muon: learning rate of the AdamW group (null: lr)", low=0)
    momentum: float = opt(0.95, "muon, sgd: momentum", low=0, below=1)
    nesterov: bool = opt(True, "muon, sgd: Nesterov momentum")
    polynomial: Polynomial = opt(Polynomial.polar_express, "muon: orthogonalisation")
    polynomial_steps: int = opt(5, "muon: iterations", low=1)
    scale: MuonScale = opt(MuonScale.moonlight, "muon: shape factor")
    target_rms: float = opt(0.2, "muon: update RMS under scale=moonlight", above=0)
    head_group: int = opt(1, "muon: heads orthogonalised together; 0: the whole projection", low=0)
    muon_dtype: Dtype | None = opt(
        None, "muon: dtype of the multiplications; null: bfloat16 where the device multiplies it"
    )
    mup_base: str | None = opt(
        None, "base-shapes file of a narrower drafter (drafttape mup): its lr is scaled by muP"
    )


@dataclass
class ScheduleConfig:
    """The learning rate over optimizer steps."""

    name: ScheduleName = opt(ScheduleName.cosine, "shape after the warmup")
    warmup: float = opt(
        0.04, "linear warmup: a share of the steps (<1) or a number of steps", low=0
    )
    floor: float = opt(0.0, "lowest factor of cosine and wsd", low=0, high=1)
    decay: float = opt(0.2, "wsd: cooldown, a share of the steps (<1) or a number of steps", low=0)
    cooldown: Cooldown = opt(Cooldown.one_minus_sqrt, "wsd: shape of the cooldown")
    milestones: list[float] = opt(
        [0.8, 0.9], "multistep: shares of the steps after which lr drops", low=0
    )
    drop: float = opt(0.316, "multistep: factor of each drop", above=0, high=1)
    horizon: int | None = opt(
        None, "steps that the schedule is laid out for; null: the run's", low=1
    )


@dataclass
class LossConfig:
    """The training objective."""

    gamma: float = opt(7.0, "slot weights exp(-(k-1)/gamma)", above=0)
    chunk: int = opt(512, "slots whose logits exist at once", low=1)
    cross_entropy: float = opt(1.0, "weight of the cross entropy to the text's tokens", low=0)
    kl: float = opt(
        0.0, "weight of KL(target || drafter); needs last_hidden=true at extraction", low=0
    )
    l1: float = opt(
        0.0, "weight of sum |drafter - target|; needs last_hidden=true at extraction", low=0
    )
    top_k: int = opt(0, "kl: only the target's so many most likely tokens; 0: all", low=0)
    dpace_alpha: float = opt(
        0.0, "D-PACE: weights times (probability of the slots before)^alpha", low=0
    )


class Packing(Enum):
    """`balanced` puts a document into the fullest open row; `greedy` keeps the epoch's order."""

    balanced = "balanced"
    greedy = "greedy"


class LongDocuments(Enum):
    """`window`: pieces that overlap by half a row; no state is carried from one to the next."""

    error = "error"
    window = "window"


@dataclass
class BatchConfig:
    """What one optimizer step sees; a pure function of snapshot and seed."""

    tokens_per_row: int = opt(4096, "most tokens of a packed row of whole documents (micro-batch)")
    rows_per_step: int = opt(1, "packed rows of an optimizer step, over all ranks")
    anchors_per_sample: int = opt(512, "most anchors drawn in a sample")
    anchors_per_row: int | None = opt(None, "most anchors of a row (bounds memory); null: any")
    packing: Packing = opt(Packing.balanced, "how documents fill rows")
    long_documents: LongDocuments = opt(
        LongDocuments.error, "a document longer than a row: error, or cut into windows"
    )


@dataclass
class LoaderConfig:
    """How batches are read: changes when, never what."""

    workers: int = opt(1, "reader processes; 0 reads in the training process", low=0)
    prefetch: int = opt(4, "rows read ahead per worker", low=1)
    ram: bool = opt(False, "read the whole training split into memory at start; needs no workers")
    share: str | None = opt(
        None, "folder in memory (/dev/shm/…) where trials share decoded samples; sweep sets it"
    )


class Parallel(Enum):
    """How several ranks hold the drafter: a copy each, one copy cut over all, or in groups."""

    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


@dataclass
class TrainerConfig:
    """The training loop."""

    steps: int | None = opt(None, "optimizer steps; null: epochs decides", low=1)
    epochs: float = opt(6.0, "passes over the training split when steps is null", above=0)
    clip: Clip = opt(Clip.global_norm, "gradient clipping")
    clip_norm: float = opt(1.0, "threshold of clipping", above=0)
    dtype: Dtype = opt(Dtype.float32, "compute dtype; masters are float32")
    checkpoint_every: int = opt(
        500, "steps between checkpoints; the last step is always saved", low=0
    )
    async_checkpoint: bool = opt(True, "write checkpoints while training goes on")
    keep: int = opt(2, "checkpoints kept besides the best", low=0)
    eval_every: int = opt(0, "steps between held-out losses; 0: at the end only", low=0)
    max_bad_steps: int = opt(3, "stop after so many non-finite gradients in a row", low=1)
    tensorboard: bool = opt(True, "write TensorBoard files beside metrics.jsonl")
    parallel: Parallel = opt(
        Parallel.ddp, "under torchrun: ddp (a copy a rank), fsdp (one copy cut over all), hsdp"
    )
    shard_ranks: int | None = opt(
        None, "hsdp: ranks that share a copy; null: those of a machine", low=1
    )
    compile: bool = opt(False, "fuse the layers' norms and MLPs by torch.compile")
    kernels: bool = opt(True, "CUDA: FLA and flex attention, after a check against their twins")
    recompute: bool = opt(False, "recompute layers in the backward pass: less memory, more time")
    profile_start: int | None = opt(
        None, "first update (1-based) of a profiler trace; null: none", low=1
    )
    profile_steps: int = opt(3, "updates of the trace, written to profile/ in run_dir", low=1)


class Tracker(Enum):
    """Services that a run can report to; each is imported only when it is chosen."""

    wandb = "wandb"
    mlflow = "mlflow"
    trackio = "trackio"


@dataclass
class TrackingConfig:
    """Where a run reports besides metrics.jsonl and TensorBoard."""

    trackers: list[Tracker] = opt([], "wandb, mlflow, trackio; each must be installed")
    project: str = opt("drafttape", "project or experiment there")
    name: str | None = opt(None, "name of the run there; null: that of run_dir")


class Source(Enum):
    """Where hidden states come from: the cache, or the target itself in the training loop."""

    cache = "cache"
    online = "online"


@dataclass
class BranchConfig:
    """A run that begins at another run's checkpoint."""

    run_dir: str | None = opt(None, "run to begin from; null: from initial weights")
    checkpoint: str = opt("last", "last, best or step-NNNNNN of that run")
    restart_schedule: bool | None = opt(
        None, "warm up again from the branch on; null: when the optimizer's states are dropped"
    )


@dataclass
class CacheInput:
    """The cache and snapshot that a run replays."""

    root: str = opt(MISSING, "the cache")
    snapshot: str = opt("latest", "snapshot id, unique prefix or name")


@dataclass
class DiagnosticsConfig:
    """What is measured of updates besides loss and gradient norm; changes no update."""

    every: int = opt(10, "updates between measurements of update sizes and moments; 0: none", low=0)
    layers: bool = opt(False, "also by parameter, not only by group")
    noise_every: int = opt(
        0, "updates between gradient noise scales from a step's rows (two or more); 0: none", low=0
    )


@dataclass
class TrainConfig:
    """drafttape train"""

    run_dir: str = opt(MISSING, "directory of the run; an unfinished run in it goes on")
    cache: CacheInput = opt(CacheInput, "input")
    drafter: DrafterConfig = opt(DrafterConfig, "architecture")
    optimizer: OptimizerConfig = opt(OptimizerConfig, "optimizer")
    schedule: ScheduleConfig = opt(ScheduleConfig, "schedule")
    loss: LossConfig = opt(LossConfig, "objective")
    batch: BatchConfig = opt(BatchConfig, "batch")
    loader: LoaderConfig = opt(LoaderConfig, "reading")
    trainer: TrainerConfig = opt(TrainerConfig, "loop")
    diagnostics: DiagnosticsConfig = opt(DiagnosticsConfig, "measurements of updates")
    tracking: TrackingConfig = opt(TrackingConfig, "reports")
    branch: BranchConfig = opt(BranchConfig, "beginning at another run's checkpoint")
    init_from: str | None = opt(
        None, "exported drafter (z-lab's, speculators' or drafttape's directory) to begin with"
    )
    source: Source = opt(Source.cache, "where hidden states come from; online runs the target")
    seed: int = opt(0, "order, packing and anchors")
    init_seed: int = opt(0, "initial weights", low=0, high=2**63 - 1)
    device: str = opt("auto", "auto, cpu, cuda, cuda:N")


@dataclass
class InspectConfig:
    """drafttape inspect"""

    run_dir: str = opt(MISSING, "directory of a run")
    checkpoint: str = opt("last", "last, best or step-NNNNNN; for spectra")
    spectra: bool = opt(True, "singular values of weights and updates by role")
    noise_rows: int = opt(
        0,
        "gradient noise scale at the checkpoint, from so many rows, at most an epoch's; 0: none",
        low=0,
    )
    report: str | None = opt(None, "the HTML page; null: inspect.html in run_dir")


@dataclass
class MupConfig:
    """drafttape mup"""

    drafter: DrafterConfig = opt(DrafterConfig, "the base drafter; wider ones have more heads")
    optimizer: OptimizerConfig = opt(OptimizerConfig, "optimizer of the coordinate check")
    width: int = opt(576, "hidden size of the base drafter (its target's)", low=8)
    num_states: int = opt(5, "tapped states of the target", low=1)
    base_shapes: str | None = opt(None, "write the base-shapes file here; null: none")
    check: bool = opt(True, "the coordinate check: train each width with and without muP")
    widths: list[int] = opt([32, 64, 128, 256], "hidden sizes of the check, the base first", low=8)
    steps: int = opt(4, "updates of the check, all on one batch", low=1)
    seeds: int = opt(2, "initial weights and batches averaged", low=1)
    report: str = opt("mup.html", "the page with activation change against width")


@dataclass
class EvalConfig:
    """drafttape eval"""

    run_dir: str = opt(MISSING, "directory of a run")
    cache: str | None = opt(None, "the run's cache, if it has moved since")
    target: TargetConfig | None = opt(None, "target to decode with; null: the one of the cache")
    checkpoint: str = opt("last", "last, best or step-NNNNNN")
    decode: bool = opt(True, "speculative decoding against the target on held-out prompts")
    max_prompts: int | None = opt(None, "most prompts decoded; null: all held-out ones", low=1)
    max_new_tokens: int = opt(64, "tokens decoded a prompt", low=1)
    temperature: float = opt(0.0, "0: greedy; above it: verification by sampling", low=0)
    tree: int = opt(0, "verify a tree of so many drafts (DDTree, greedy only); 0: a chain", low=0)
    batch_size: int = opt(
        1,
        "prompts decoded together (greedy chain, targets that keep all keys); 1: as one user",
        low=1,
    )
    data: list[str] = opt(
        [], "table: JSONL files of prompts (turns, prompt or messages); []: the held-out prompts"
    )
    temperatures: list[float] = opt([], "table: temperatures of the chain besides 0", low=0)
    trees: list[int] = opt([], "table: node budgets of trees (DDTree) beside the chain", low=1)
    again: bool = opt(False, "measure again although eval.json is up to date")
    device: str = opt("auto", "auto, cpu, cuda, cuda:N")


@dataclass
class SweepConfig:
    """drafttape sweep"""

    plan: str = opt(MISSING, "the plan file (YAML): trials as a grid or at random")
    out: str = opt(MISSING, "directory of the sweep; an unfinished one in it goes on")
    launcher: str = opt("basic", "Hydra's launcher: basic, joblib, submitit_local, submitit_slurm…")
    launcher_overrides: list[str] = opt([], "more Hydra overrides, e.g. hydra.launcher.mem_gb=32")
    jobs: int = opt(1, "joblib: trials at the same time on `device`", low=1)
    device: str = opt("auto", "device of every trial: auto, cpu, cuda, cuda:N")
    devices: list[str] = opt(
        [], "devices dealt out to the trials that run, e.g. [cuda:0,cuda:1]; empty: device"
    )
    trials_per_device: int = opt(1, "trials at the same time on each of devices", low=1)
    share: bool = opt(True, "trials share decoded samples in /dev/shm where they fit")
    tolerance: float = opt(0.01, "near-optimal: held-out loss within this share of the best", low=0)
    grow: bool = opt(False, "go on although the plan no longer has trials that are there")
    dry_run: bool = opt(False, "list the trials and run nothing")


class DecideBy(Enum):
    """Metrics that can decide a comparison."""

    heldout_loss = "heldout_loss"
    real_acceptance = "real_acceptance"
    estimated_acceptance = "estimated_acceptance"
    accuracy = "accuracy"
    final_loss = "final_loss"


class Noise(Enum):
    """`paired`: the arms' own differences, pooled over arms; `baseline`: repeats of the baseline.

    With `baseline` all runs of the baseline arm count, also those whose seeds no other arm has, and
    an arm of one run can be judged. Their spread includes what pairing removes, so it is careful.
    """

    paired = "paired"
    baseline = "baseline"


class Layout(Enum):
    """Files of an export; `auto` is dflash for all-attention drafters, else drafttape."""

    auto = "auto"
    drafttape = "drafttape"
    dflash = "dflash"
    speculators = "speculators"


@dataclass
class ExportConfig:
    """drafttape export"""

    run_dir: str = opt(MISSING, "directory of a run")
    output: str = opt(MISSING, "directory to make; must not exist or be empty")
    cache: str | None = opt(None, "the run's cache, if it has moved since")
    checkpoint: str = opt("last", "last, best or step-NNNNNN")
    layout: Layout = opt(Layout.auto, "names and configuration of the exported model")
    dtype: Dtype = opt(Dtype.bfloat16, "dtype of the exported weights")


@dataclass
class CompareConfig:
    """drafttape compare"""

    runs: list[str] = opt(MISSING, "run directories; the first is the baseline")
    report: str = opt("report.html", "the HTML report to write")
    summary: str | None = opt(None, "also write the numbers as JSON here")
    record: str | None = opt(None, "also write a dated decision record (Markdown) here")
    question: str | None = opt(None, "the question, as the decision record states it")
    confidence: float = opt(0.95, "level of the intervals", above=0, below=1)
    decide_by: DecideBy = opt(DecideBy.heldout_loss, "the metric that the verdict is about")
    tolerance: float = opt(0.0, "smallest difference of that metric that matters", low=0)
    noise: Noise = opt(
        Noise.paired, "seed noise: paired differences, or known from repeats of the baseline"
    )
    allow_codec: bool = opt(False, "compare runs although their caches' codecs differ")


@dataclass
class CodecReportConfig:
    """drafttape codec-report"""

    root: str = opt(MISSING, "the cache; its states must be lossless")
    out: str = opt("codec-report", "directory of report.html, report.md and report.json")
    snapshot: str = opt("latest", "snapshot id, unique prefix or name")
    codecs: list[str] = opt([], "codecs to measure; empty: all")
    samples: int = opt(32, "most samples measured", low=1)
    max_tokens: int = opt(8192, "most tokens measured", low=1)
    logits: bool = opt(True, "KL and top-1 of the target's next token (loads the target)")
    every_tap: bool = opt(False, "logits: each tapped layer alone, not only the deepest")
    target: TargetConfig | None = opt(None, "the target; null: the one of the cache")
    train: bool = opt(False, "train a drafter on each codec's states and compare acceptance")
    overrides: list[str] = opt(
        [], "train: configuration of the runs, e.g. [experiment=demo,optimizer=muon]"
    )
    seeds: int = opt(1, "train: seeds a codec", low=1)
    max_prompts: int = opt(32, "train: held-out prompts decoded with the target; 0: none", low=0)
    max_new_tokens: int = opt(64, "train: tokens decoded a prompt", low=1)
    batch_size: int = opt(16, "train: prompts decoded together", low=1)
    device: str = opt("auto", "auto, cpu, cuda, cuda:N")
