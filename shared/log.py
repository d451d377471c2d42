"""What a person sees (stderr lines, progress bars) and what a program reads (JSON lines)."""

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO


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
    """

    def __init__(self, path: Path, keep=None) -> None:
        self.path = path
        if keep is not None and path.exists():
            lines = [line for line in read_json_lines(path) if keep(line)]
            temporary = path.with_suffix(path.suffix + ".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
            temporary.replace(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        values.setdefault("time", round(time.time(), 3))
        self._file.write(json.dumps(values, allow_nan=True) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Reads whole lines; a last line that a kill cut short is left out."""
    lines = []
    with path.open(encoding="utf-8") as file:
        for text in file:
            if not text.endswith("\n"):
                break
            lines.append(json.loads(text))
    return lines
