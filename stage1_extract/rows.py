"""Data files to rows: one chat, prompt list, text or token list each, with file and line.

Files: JSONL, a JSON array, Parquet; .gz and .zst around the first two; or a dataset of the Hugging
Face hub (see hub_data). Rows, by their keys:
`messages` (OpenAI), `conversations` (ShareGPT), `turns` (user prompts only), `instruction` and
`output` (Alpaca), `prompt` and `completion` (or `response`), `text` (preformatted), `input_ids`
(with `loss_mask`). `split` of a row (train; heldout, eval, test, validation) puts it there.
"""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.errors import DataError
from stage1_extract.config import DataConfig
from stage1_extract.hub_data import HUB, hub_rows

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

SPLITS = {"train": "train"} | dict.fromkeys(
    ("heldout", "held-out", "eval", "test", "validation"), "heldout"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or as bytes


class BadRow(Exception):
    """A row that can't be used; the text is the reason."""


@dataclass(frozen=True)
class Row:
    """One usable line. Exactly one of messages, turns, text, input_ids is set."""

    source: str
    name: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    turns: list[str] | None = None
    system: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    split: str | None = None  # "train" or "heldout"; None: chosen by the sample id


@dataclass(frozen=True)
class Reject:
    """A line that was not used, and why."""

    source: str
    reason: str
    name: str | None = None


def data_sources(cfg: DataConfig) -> list[str]:
    """Everything that rows are read from: files, then the dataset as `hf://NAME`.

    Raises:
        DataError: nothing is named, or a path matches nothing, or the dataset is a file.
    """
    if cfg.dataset and Path(cfg.dataset).is_file():
        raise DataError(
            "it is a file", where=f"data.dataset={cfg.dataset}", do="Name files in data.paths"
        )
    files = data_files(cfg.paths) if cfg.paths or not cfg.dataset else []
    return [*files, f"{HUB}{cfg.dataset}"] if cfg.dataset else files


def data_files(paths: Sequence[str]) -> list[str]:
    """Paths and globs as files, in the order given, each once.

    Raises:
        DataError: none is named, or one matches nothing.
    """
    if not paths:
        raise DataError(
            "no data is named",
            where="data.paths",
            do="Give data.paths=[chats.jsonl] or data.dataset=NAME",
        )
    files: dict[str, None] = {}
    for path in paths:
        expanded = os.path.expanduser(path)  # noqa: PTH111  (Path's fails for an unknown user)
        found = [expanded] if Path(expanded).is_file() else _matches(expanded)
        found = [name for name in found if Path(name).is_file()]
        if not found:
            what = "it is a directory" if Path(expanded).is_dir() else "no such file"
            do = "Name files or a glob in data.paths"
            if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).suffix:
                do += f"; a dataset of the Hugging Face hub is data.dataset={path}"
            raise DataError(what, where=path, do=do)
        files.update(dict.fromkeys(found))
    return list(files)


def _matches(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  (pattern may be absolute)


def read_rows(
    files: Sequence[str], limit: int | None = None, cfg: DataConfig | None = None
) -> Iterator[Row | Reject]:
    """Every line of every file as a Row or a Reject.

    Args:
        cfg: says which part of a dataset is wanted.

    Raises:
        DataError: a file can't be read at all.
    """
    count = 0
    for path in files:
        for line, item in hub_rows(cfg) if cfg and path.startswith(HUB) else _items(path):
            if limit is not None and count >= limit:
                return
            count += 1
            source = f"{path}:{line}"
            if isinstance(item, BadRow):
                yield Reject(source, str(item))
                continue
            name = item.get("id") if isinstance(item, dict) else None
            name = None if name is None else str(name)
            try:
                yield normalize(item, source, name)
            except BadRow as error:
                yield Reject(source, str(error), name)


def _items(path: str) -> Iterator[tuple[int, Any]]:
    """(line or row number from 1, parsed value or BadRow)."""
    try:
        if path.endswith(".parquet"):
            yield from _parquet(path)
            return
        with _open(path) as file:
            is_json = path.removesuffix(".gz").removesuffix(".zst").endswith(".json")
            if is_json and file.peek(1).lstrip()[:1] == b"[":
                for number, item in enumerate(json.load(file), start=1):
                    yield number, _unicode(item)
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    item = json.loads(line)
                    yield number, _unicode(item) if _SURROGATE.search(line) else item
                except RecursionError:
                    yield number, BadRow("not JSON (nested too deeply)")
                except UnicodeDecodeError:
                    yield number, BadRow("the line is not UTF-8")
                except ValueError as error:
                    yield number, BadRow(f"not JSON ({error})")
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise DataError(f"the file can't be read ({error})", where=path) from None


def _unicode(item: Any) -> Any:
    """The item; a BadRow if a text in it is no Unicode, which no tokenizer takes."""
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRow("a text holds half of a surrogate pair")
    return item


def _open(path: str) -> Any:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return Path(path).open("rb")


def _parquet(path: str) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for item in batch.to_pylist():
                    number += 1
                    yield number, {k: v for k, v in item.items() if v is not None}
    except pyarrow.ArrowException as error:
        raise DataError(f"not a Parquet file ({error})", where=path) from None


def normalize(item: Any, source: str, name: str | None = None) -> Row:
    """A parsed line as a Row.

    Raises:
        BadRow: nothing usable is in it.
    """
    if not isinstance(item, dict):
        raise BadRow(f"the line is a {type(item).__name__}, not an object")
    row = _by_keys(item, source, name)
    if item.get("split") is None:
        return row
    if not isinstance(item["split"], str) or item["split"] not in SPLITS:
        raise BadRow(f"split is none of {', '.join(SPLITS)} ({item['split']!r})")
    return replace(row, split=SPLITS[item["split"]])


def _by_keys(item: dict[str, Any], source: str, name: str | None) -> Row:
    system = item.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRow("system is not text")
    for key in ("messages", "conversations", "conversation"):
        if key in item:
            messages = _messages(item[key], key)
            if system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
            return Row(source, name, messages=messages, tools=item.get("tools") or None)
    if "turns" in item:
        turns = item["turns"]
        if not isinstance(turns, list) or not turns:
            raise BadRow("turns is not a list of user prompts")
        if not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise BadRow("a turn is empty or not text")
        return Row(source, name, turns=turns, system=system)
    if "input_ids" in item:
        return _tokens(item, source, name)
    if "instruction" in item and "output" in item:
        question = _text(item, "instruction")
        if item.get("input"):
            question += "\n\n" + _text(item, "input")
        return _pair(source, name, system, question, _text(item, "output"))
    if "prompt" in item:
        for key in ("completion", "response", "answer"):
            if key in item:
                return _pair(source, name, system, _text(item, "prompt"), _text(item, key))
        return Row(source, name, turns=[_text(item, "prompt")], system=system)
    if "text" in item:
        return Row(source, name, text=_text(item, "text"))
    raise BadRow(f"no messages, conversations, turns, … in it (keys: {', '.join(map(str, item))})")


def _text(item: dict[str, Any], key: str) -> str:
    value = item[key]
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{key} is empty or not text")
    return value


def _pair(source: str, name: str | None, system: str | None, prompt: str, answer: str) -> Row:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Row(source, name, messages=messages)


def _tokens(item: dict[str, Any], source: str, name: str | None) -> Row:
    ids, mask = item["input_ids"], item.get("loss_mask")
    for key, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(
            isinstance(value, int) and value >= 0 for value in values
        ):
            raise BadRow(f"{key} is not a list of numbers")
    if any(value >= 1 << 31 for value in ids):
        raise BadRow("input_ids has an id over 31 bits")
    if len(ids) != len(mask) or not set(mask) <= {0, 1}:
        raise BadRow("loss_mask doesn't have one 0 or 1 for each of input_ids")
    return Row(source, name, input_ids=ids, loss_mask=mask)


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"{key} is empty or not a list")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise BadRow(f"{key} {number} is not an object")
        role = _first(message, "role", "from")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRow(f"{key} {number} has the unknown role {role!r}")
        content = _first(message, "content", "value")
        if isinstance(content, list):
            content = _parts(content, f"{key} {number}")
        calls = message.get("tool_calls")
        if calls and not _are_calls(calls):
            raise BadRow(f"{key} {number} has tool_calls that are not a list of objects")
        if not isinstance(message.get("reasoning_content") or "", str):
            raise BadRow(f"{key} {number} has a reasoning_content that is not text")
        if content is None and calls:
            content = ""
        if not isinstance(content, str):
            raise BadRow(f"{key} {number} has no text")
        clean = {"role": ROLES[role], "content": content}
        for extra in ("reasoning_content", "tool_calls", "tool_call_id", "name", "finish_reason"):
            if message.get(extra):
                clean[extra] = message[extra]
        messages.append(clean)
    return messages


def _first(message: dict[str, Any], *keys: str) -> Any:
    """The first value that isn't null: Parquet gives every row the keys of all."""
    return next((message[key] for key in keys if message.get(key) is not None), None)


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    )


def _parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise BadRow(f"{where} holds something other than text")
        texts.append(part["text"])
    return "".join(texts)
