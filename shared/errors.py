"""Errors that a user can act on: what is wrong, where, and what to do.

Every error that a user's input, disk or cache can cause is a `DrafttapeError`; the command line
prints it as one sentence and exits with `exit_code`. Anything else is a bug and keeps its
traceback.
"""


class DrafttapeError(Exception):
    """Base of all errors that are reported without a traceback.

    Args:
        what: the fault in one clause, with the values that show it.
        where: file, line, shard, sample or configuration key.
        do: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, do: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.do = do
        message = what if self.where is None else f"{self.where}: {what}"
        super().__init__(message if do is None else f"{message}. {do}")

    def __reduce__(self):
        # Worker processes send errors to their parent: keep all three parts on the way.
        return _rebuild, (type(self), self.what, self.where, self.do)


def _rebuild(kind: type, what: str, where: str | None, do: str | None) -> "DrafttapeError":
    return kind(what, where=where, do=do)


class ConfigError(DrafttapeError):
    """A key, a type or a value in the configuration is wrong."""


class DataError(DrafttapeError):
    """The user's data can't be used: a missing file, no usable sample, a bad field."""


class MismatchError(DrafttapeError):
    """Two things that must agree don't: specs, snapshots, digests, checkpoints."""


class CacheError(DrafttapeError):
    """The cache can't be opened or written: not a cache, read-only, no space, unknown version."""


class CorruptionError(DrafttapeError):
    """Stored bytes are not what was written. Names the file, and the sample where one is known."""

    exit_code = 1


class TargetError(DrafttapeError):
    """The target model can't be loaded, tapped or trusted."""


class TrainingError(DrafttapeError):
    """A run can't go on honestly: non-finite loss, no supervised element, a broken kernel."""

    exit_code = 1


class Interrupted(DrafttapeError):
    """Stopped on request with everything finished so far committed; the same command goes on."""

    exit_code = 4
