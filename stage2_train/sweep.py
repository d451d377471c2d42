"""The `sweep` word: a plan file's trials through Hydra's launchers, resumable, into one table.

1. Read the plan, compose every trial's configuration (an unknown key fails before anything runs),
   check that all trials have the same token budget, and store them under `<out>/trials/`.
2. Start what is not done through `hydra/launcher` (basic, joblib, submitit_*, ray). A trial that
   fails is retried once; one that was killed goes on from its checkpoint.
3. Write `results.parquet` and the report with maps.

Trials on one machine share what they have read and decoded (`shared_reads`): each sample is read
from the cache once, whoever needs it first, as far as it fits into memory (`bench/sweep.py`
measures it). With `devices` a trial takes the least used one when it begins.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.config import compose, quote, to_plain
from shared.errors import ConfigError, Interrupted, MismatchError, TrainingError
from shared.fs import Lock
from shared.log import note, say
from stage2_train import sweep_halving
from stage2_train.config import EvalConfig, SweepConfig, TrainConfig
from stage2_train.shared_reads import forget, shared_folder
from stage2_train.sweep_job import read_state, write_state
from stage2_train.sweep_plan import AT, SweepPlan, read_plan, to_overrides

MOST_ATTEMPTS = 2


def prepare(
    cfg: SweepConfig, plan: SweepPlan | None = None, earlier: list[Path] | None = None
) -> tuple[SweepPlan, list[Path]]:
    """Writes every trial's folder that isn't there yet; returns them in the plan's order.

    Args:
        plan: the trials of a rung; None: those of the plan file.
        earlier: folders of the rungs before.

    Raises:
        ConfigError: the plan or a trial's configuration is wrong; nothing has been written.
        MismatchError: `out` holds a sweep of another plan.
    """
    plan = plan or first_rung(read_plan(cfg.plan))
    out = Path(cfg.out)
    configs = {}
    for trial in plan.trials:
        folder = out / "trials" / trial.id
        overrides = {"run_dir": str(folder / "run")} | trial.overrides
        configs[trial.id] = compose("train", TrainConfig, to_overrides(overrides))
    compose("eval", EvalConfig, to_overrides({"run_dir": "trial"} | plan.eval))
    if not plan.unequal_budgets:
        _equal_budgets(plan, configs)
    if cfg.dry_run:
        return plan, [out / "trials" / trial.id for trial in plan.trials]
    known = {path.name for path in (out / "trials").glob("*")} if out.exists() else set()
    planned = {trial.id for trial in plan.trials} | {path.name for path in earlier or []}
    later = {name for name in known if read_state(out / "trials" / name).get("rung", 0)}
    strange = sorted(known - planned - later)
    if strange and not cfg.grow:
        raise MismatchError(
            f"{len(strange)} trials there are not in the plan, the first is {strange[0]}",
            where=out,
            do="Choose another out, or say grow=true if the plan was changed on purpose "
            "(the table will say so)",
        )
    folders = []
    for trial in plan.trials:
        folder = out / "trials" / trial.id
        folders.append(folder)
        if not (folder / "trial.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_state(
                folder,
                {
                    "id": trial.id, "arm": trial.arm, "varied": trial.varied, "state": "new",
                    "attempts": 0, "config": to_plain(configs[trial.id]), "eval": plan.eval,
                    "rung": trial.rung,
                },
            )  # fmt: skip
    return plan, folders


def first_rung(plan: SweepPlan) -> SweepPlan:
    """The plan as it begins."""
    if plan.halving is None:
        return plan
    return replace(plan, trials=tuple(sweep_halving.rung_of(plan, 0, [])))


def _equal_budgets(plan: SweepPlan, configs: dict[str, TrainConfig]) -> None:
    """Steps times rows must not vary inside a sweep; equal epochs are equal tokens."""
    budgets: dict[tuple[Any, ...], str] = {}
    for trial in plan.trials:
        if AT in trial.varied:
            continue  # budgets are what cooldowns vary
        config = configs[trial.id]
        trainer, batch = config.trainer, config.batch
        if trainer.steps is None:
            key: tuple[Any, ...] = ("epochs", trainer.epochs)
        else:
            key = ("rows", trainer.steps * batch.rows_per_step, batch.tokens_per_row)
        budgets.setdefault(key, trial.id)
    if len(budgets) > 1:
        (one, first), (two, second) = list(budgets.items())[:2]
        raise ConfigError(
            f"trials have unequal token budgets: {first} {one}, {second} {two}",
            where="plan",
            do="Set trainer.epochs (equal passes whatever the batch), or say "
            "unequal_budgets: true in the plan",
        )


def pending(folders: list[Path]) -> list[Path]:
    """Trials that are neither done nor failed for good."""
    open_ = []
    for folder in folders:
        state = read_state(folder)
        if state["state"] != "done" and state["attempts"] < MOST_ATTEMPTS:
            open_.append(folder)
    return open_


def _lock(path: Path, patience_s: float = 60.0) -> Lock:
    """The sweep's lock; trials of a killed sweep hold it until they have saved and ended.

    Raises:
        ConfigError: another process keeps running this sweep.
    """
    deadline = time.monotonic() + patience_s
    while True:
        lock = Lock.take(path, wait=False)
        if lock is not None:
            return lock
        if time.monotonic() > deadline:
            raise ConfigError("another process is running this sweep", where=path.parent)
        time.sleep(0.5)


def run_all(cfg: SweepConfig, folders: list[Path], lock: Lock) -> None:
    """Launches until nothing is pending.

    Raises:
        Interrupted: a signal stopped it; the same command goes on.
        TrainingError: the launcher itself fails without running anything.
    """
    todo = pending(folders)
    while todo:
        before = {folder: read_state(folder) for folder in todo}
        code = launch(cfg, todo, folders, lock)
        interrupted = code in (-signal.SIGINT, -signal.SIGTERM, 130, 143)
        progressed = False
        for folder in todo:
            state = read_state(folder)
            progressed |= state["state"] != before[folder]["state"]
            progressed |= state["attempts"] != before[folder]["attempts"]
            if state["state"] == "running" and interrupted:
                write_state(folder, state | {"state": "stopped"})
            elif state["state"] == "running":
                # Its process died without a word (out of memory, a crash in native code).
                state |= {
                    "state": "failed",
                    "attempts": state["attempts"] + 1,
                    "error": f"the process ended by itself (launcher's exit code {code})",
                }
                write_state(folder, state)
                progressed = True
        if interrupted or any(read_state(folder)["state"] == "stopped" for folder in todo):
            raise Interrupted("the sweep was stopped", where=cfg.out, do="The same command goes on")
        if code and not progressed:
            raise TrainingError(
                f"hydra/launcher={cfg.launcher} ended with exit code {code} before any trial",
                where=cfg.out,
                do="Is its package installed? pip install 'drafttape[sweep]' has joblib's",
            )
        todo = pending(folders)


def launch(cfg: SweepConfig, todo: list[Path], folders: list[Path], lock: Lock) -> int:
    """One multirun of Hydra over the trials of `todo`; returns its exit code.

    Meanwhile the table of all `folders` is written anew every half minute. Signals go on to the
    launcher, whose trial saves and ends.

    The launcher's process holds the sweep's lock too, so a second sweep can't start beside it when
    this process is killed; its trials notice that their parent is gone, save, and end.
    """
    out = Path(cfg.out).resolve()
    shared = shared_folder(out) if cfg.share and cfg.launcher != "submitit_slurm" else None
    trials = ",".join(folder.name for folder in todo)
    command = [
        sys.executable, "-m", "stage2_train.sweep_job", "--multirun",
        f"hydra/launcher={cfg.launcher}", "hydra.job.chdir=false", "hydra.output_subdir=null",
        f"hydra.sweep.dir={quote(str(out / 'hydra'))}", "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled", f"sweep={quote(str(out))}", f"trial={trials}",
        f"device={cfg.device}", f"devices={quote(','.join(cfg.devices))}",
        f"trials_per_device={cfg.trials_per_device}", f"share={quote(str(shared or ''))}",
    ]  # fmt: skip
    jobs = max(cfg.jobs, len(cfg.devices) * cfg.trials_per_device)
    if cfg.launcher == "joblib":
        command.append(f"hydra.launcher.n_jobs={jobs}")
    command += cfg.launcher_overrides
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (root, environment.get("PYTHONPATH")) if part
    )
    if jobs > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // jobs)))
    process = subprocess.Popen(command, env=environment, pass_fds=[lock.descriptor])
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {n: signal.signal(n, lambda n, _: process.send_signal(n)) for n in numbers}
    try:
        while True:
            try:
                return process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                write_parquet(out / "results.parquet", results(folders))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def results(folders: list[Path]) -> list[dict[str, Any]]:
    """One row a trial: what was varied, how it stands, what came out."""
    rows = []
    for folder in folders:
        state = read_state(folder)
        row: dict[str, Any] = {
            "trial": state["id"], "arm": state["arm"], "state": state["state"],
            "attempts": state["attempts"], "error": state.get("error"),
            "seconds": state.get("seconds"), "run_dir": state["config"]["run_dir"],
        }  # fmt: skip
        row |= {f"set.{key}": value for key, value in state["varied"].items()}
        row |= state.get("metrics") or {}
        row |= {f"result.{key}": value for key, value in (state.get("result") or {}).items()}
        row["rung"] = state.get("rung", 0)
        row["device"] = state.get("device") or state["config"]["device"]
        row["config"] = json.dumps(state["config"], sort_keys=True)
        rows.append(row)
    return rows


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """The table as one Parquet file; a column of mixed kinds becomes text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if kinds == {int, float}:
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1 or kinds & {list, dict}:
            values = [None if value is None else json.dumps(value) for value in values]
        columns[key] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns), temporary)
    temporary.replace(path)


def sweep(cfg: SweepConfig) -> int:
    """The word. Exit code 1 when a trial failed for good."""
    from stage2_train import sweep_report

    whole = read_plan(cfg.plan)
    plan, folders = prepare(cfg, first_rung(whole))
    if cfg.dry_run:
        for trial in plan.trials:
            say(f"{trial.id}  {' '.join(to_overrides(trial.varied))}")
        rungs = f", the first of {len(plan.halving.steps)} rungs" if plan.halving else ""
        say(f"{len(plan.trials)} trials{rungs}")
        return 0
    out = Path(cfg.out)
    lock = _lock(out / "sweep.lock")
    done: list[Path] = []
    try:
        for rung in range(1 if plan.halving is None else len(plan.halving.steps)):
            if rung:
                trials = sweep_halving.rung_of(whole, rung, results(folders))
                plan, folders = prepare(cfg, replace(plan, trials=tuple(trials)), done)
            done += folders
            run_all(cfg, folders, lock)
    finally:
        rows = results(done or folders)
        write_parquet(out / "results.parquet", rows)
        forget(shared_folder(out))
        lock.release()
        found = sweep_report.analyse(rows, tolerance=cfg.tolerance)
        if plan.halving is not None:
            found["bias"] = sweep_halving.bias(plan.halving, rows)
        sweep_report.write(out / "report.html", plan.name, rows, found)
    say(sweep_report.terminal_text(rows, found))
    say(f"results: {out / 'results.parquet'}\nreport: {out / 'report.html'}")
    failed = [row for row in rows if row["state"] != "done"]
    for row in failed:
        note(f"{row['trial']} failed {row['attempts']} times: {row['error']}")
    return 1 if failed else 0
