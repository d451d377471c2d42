"""Saving while training goes on, and going on from what was saved.

A save copies parameters and optimizer states to the host; a thread writes, seals and renames. One
save is written at a time, and its error is raised at the next save or at the run's end. A process
that is killed meanwhile leaves the checkpoint before.
"""

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch

from shared.errors import CacheError, DrafttapeError
from stage2_train import checkpoint
from stage2_train.branch import Branch
from stage2_train.checkpoint_shards import begin_save, read_into
from stage2_train.draft_vocabulary import IDS, named_ids, take_ids
from stage2_train.job import Job, Progress


class Saver:
    """Runs one write at a time in a thread.

    Args:
        background: False writes in `submit`.
    """

    def __init__(self, *, background: bool = True) -> None:
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Starts a write when the one before has ended.

        Raises:
            what the write before raised; without a thread, what this one raises.
        """
        self.wait()
        if not self._background:
            write()
            return
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # raised again by `wait`
            self._error = error

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            what the write raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits; an error is dropped, for another one is on its way."""
        with contextlib.suppress(BaseException):
            self.wait()


def save(
    job: Job,
    state: Progress,
    line: dict[str, Any],
    measured: dict[str, Any] | None,
    saver: Saver,
) -> None:
    """Saves a checkpoint, marks it when it is the best, and deletes old ones.

    Raises:
        CacheError: this save or the one before couldn't be written.
    """
    step = state.step
    document = copy.deepcopy(
        {
            "digest": state.digest.hex(),
            "bad_in_row": state.bad_in_row,
            "totals": state.totals,
            "optimizer": job.optimizer.settings(),
            "line": line,
            "heldout": measured,
        }
    )

    def settle() -> None:
        loss = float("nan") if measured is None else measured["heldout_loss"]
        if checkpoint.is_better(loss, checkpoint.best(job.run_dir)):
            checkpoint.mark_best(job.run_dir, step, loss)
        checkpoint.prune(job.run_dir, job.cfg.trainer.keep)
        job.record.last = {"step": step, "digest": document["digest"]}
        job.record.write(job.run_dir)

    saver.wait()
    model = dict(job.drafter.named_parameters()) | named_ids(job.drafter)
    states = job.optimizer.named_state()
    if job.ranks.cut:
        if job.ranks.is_main:
            checkpoint.begin(job.run_dir, step)
        job.ranks.barrier()
        folder = checkpoint.temporary(job.run_dir, step)
        written = begin_save(folder, model | states, job.ranks.host_group())

        def write_rows() -> None:
            try:
                written.result()
            except Exception as error:
                first = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
                what = f"the checkpoint can't be written ({first})"
                raise CacheError(what, where=folder) from None
            if job.ranks.is_main:
                checkpoint.finish(job.run_dir, step, document)
                settle()

        saver.submit(write_rows)
    elif job.ranks.is_main:
        copied = [
            {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
            for tensors in (model, states)
        ]

        def write_whole() -> None:
            checkpoint.save(job.run_dir, step, *copied, document)
            settle()

        saver.submit(write_whole)


def restore(job: Job) -> Progress:
    """The state after the newest checkpoint, loaded into drafter and optimizer; or the start.

    Raises:
        CorruptionError: the checkpoint is damaged.
        MismatchError: it belongs to another drafter or optimizer.
    """
    existing = checkpoint.steps(job.run_dir)
    if not existing and job.branch is not None:
        return _take_over(job, job.branch)
    if not existing:
        return Progress(digest=job.plan.start_digest())
    path = job.run_dir / checkpoint.FOLDER / checkpoint.name_of(existing[-1])
    if job.ranks.cut:
        saved = checkpoint.load_state(path)
        job.optimizer.check_settings(saved["optimizer"])
        _verify_together(job, path, saved)
        tensors = dict(job.drafter.named_parameters()) | job.optimizer.named_state()
        found = {key: torch.empty_like(ids_S) for key, ids_S in named_ids(job.drafter).items()}
        with torch.no_grad():
            read_into(path, tensors | found, group=job.ranks.host_group())
        take_ids(job.drafter, {key: ids_S.cpu() for key, ids_S in found.items()}, path)
    else:
        model, optimizer, saved = checkpoint.load(path)
        checkpoint.load_parameters(job.drafter, model, path)
        job.optimizer.check_settings(saved["optimizer"])
        job.optimizer.load_named_state(optimizer)
    return Progress(
        saved["step"], bytes.fromhex(saved["digest"]), saved["bad_in_row"], saved["totals"]
    )


def _verify_together(job: Job, path: Any, saved: dict[str, Any]) -> None:
    """Each rank looks at some of the files; all raise what one has found."""
    error = None
    try:
        checkpoint.verify(path, saved, job.ranks.rank, job.ranks.world)
    except DrafttapeError as found:
        error = found
    for other in job.ranks.gather(error):
        if other is not None:
            raise other


def _take_over(job: Job, branch: Branch) -> Progress:
    # The parent's draft vocabulary is of its data; weights fit any.
    weights = {key: tensor for key, tensor in branch.model.items() if key != IDS}
    checkpoint.load_parameters(job.drafter, weights | named_ids(job.drafter), branch.path)
    if branch.optimizer is not None:
        job.optimizer.load_named_state(branch.optimizer)
    if not branch.same_data:
        return Progress(digest=job.plan.start_digest())
    saved = branch.state
    return Progress(saved["step"], bytes.fromhex(saved["digest"]), 0, dict(saved["totals"]))
