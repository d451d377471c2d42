"""What a person sees (stderr lines, progress bars) and what a program reads (JSON lines)."""

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from shared.errors import CorruptionError
from shared.fs import disk_errors


def say(text: str = "") -> None:
    """Prints a result line to stdout: a word's summary, never progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Prints a remark to stderr, above a running progress bar."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def progress(total: float | None, what: str, unit: str, *, initial: float = 0, **extra: Any):
    """A tqdm bar on stderr with rate and ETA; quiet (one line a minute) when not a terminal."""
    from tqdm import tqdm

    interactive = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        initial=initial,
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.2 if interactive else 20.0,
        file=sys.stderr,
        **extra,
    )


class JsonLines:
    """Append-only JSON lines with a wall-clock time; each line is flushed, so a kill loses none.

    Args:
        path: the file; its folder must exist.
        keep: on resume, the predicate that says which existing lines stay.

    Raises:
        CacheError: the disk is full, read-only or gone (also from `write`).
        CorruptionError: an existing line is not JSON.
    """

    def __init__(self, path: Path, keep=None) -> None:
        self.path = path
        with disk_errors(path):
            if keep is not None and path.exists():
                lines = [line for line in read_json_lines(path) if keep(line)]
                temporary = path.with_suffix(path.suffix + ".tmp")
                temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
                temporary.replace(path)
            self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        values.setdefault("time", round(time.time(), 3))
        with disk_errors(self.path):
            self._file.write(json.dumps(values, allow_nan=True) + "\n")
            self._file.flush()

    def close(self) -> None:
        with disk_errors(self.path):
            self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Reads whole lines; a last line that a kill cut short is left out.

    Raises:
        CorruptionError: a line is not a JSON object; names it.
    """
    lines = []
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                break
            try:
                line = json.loads(text)
            except ValueError as error:
                raise CorruptionError(f"not JSON ({error})", where=f"{path}:{number}") from None
            if not isinstance(line, dict):
                raise CorruptionError("not a JSON object", where=f"{path}:{number}")
            lines.append(line)
    return lines
