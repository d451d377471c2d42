"""drafttape generate: the target answers prompts, turn after turn; finished chats are appended.

A chat is known by its prompts (`key`), so a second run goes on where the first one stopped. When
all is done the file is put into the prompts' order.
"""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, CorruptionError, DataError, Interrupted, MismatchError
from shared.fs import Lock, disk_errors, write_atomic
from shared.log import JsonLines, note, progress, read_json_lines, say
from shared.target import Target, choose_device, load_target
from stage1_extract.config import GenerateConfig
from stage1_extract.decoding import greedy, group_prompts
from stage1_extract.executors import stop_on_signals
from stage1_extract.masking import ChatTemplate
from stage1_extract.remote import AnswerError, Server, answer_chats
from stage1_extract.rows import BadRow, Reject, Row, data_sources, read_rows


@dataclass
class Chat:
    """A chat in the making: its user turns, and the messages so far."""

    source: str
    name: str | None
    system: str | None
    turns: list[str]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": self.turns[0]})

    @property
    def key(self) -> str:
        """32 hex digits over system prompt and user turns."""
        text = json.dumps([self.system or "", self.turns])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def answer(self, text: str, cut: bool) -> bool:
        """Adds an answer and the next user turn; false when that was the last."""
        message = {"role": "assistant", "content": text}
        # A cut answer has no end token of the target's own: extract leaves it unsupervised.
        return self.add(message | ({"finish_reason": "length"} if cut else {}))

    def add(self, message: dict[str, Any]) -> bool:
        """Adds an assistant message and the next user turn; false when that was the last."""
        self.messages.append(message)
        asked = sum(message["role"] == "user" for message in self.messages)
        if asked == len(self.turns):
            return False
        self.messages.append({"role": "user", "content": self.turns[asked]})
        return True

    def record(self, target: str) -> dict[str, Any]:
        return {
            "id": self.name or self.key,
            "key": self.key,
            "target": target,
            "messages": self.messages,
        }


def generate(cfg: GenerateConfig) -> int:
    """Runs the word. Returns 0, or 3 when some rows had no usable prompt.

    Raises:
        DrafttapeError: no prompts, no target, an output that can't be written; `Interrupted`.
    """
    if cfg.max_new_tokens < 1 or cfg.batch_size < 1:
        raise ConfigError("max_new_tokens and batch_size must be positive")
    chats, rejects = read_prompts(cfg)
    server = Server(cfg.server, cfg.max_new_tokens)
    output = Path(cfg.output)
    lock = _lock(output)
    try:
        return _generate(cfg, server, output, chats, rejects)
    finally:
        lock.release()


def _lock(output: Path) -> Lock:
    """
    Raises:
        ConfigError: another process writes this file: it would rewrite it without our chats.
    """
    with disk_errors(output):
        lock = Lock.take(output.with_name(f".{output.name}.lock"), wait=False)
    if lock is None:
        raise ConfigError(
            "another drafttape generate is writing it",
            where=output,
            do="Wait for it, or give another output=FILE.jsonl",
        )
    return lock


def _generate(
    cfg: GenerateConfig, server: Server, output: Path, chats: list[Chat], rejects: list[Reject]
) -> int:
    done = _existing(output, _answering(cfg, server))
    todo = [chat for chat in chats if chat.key not in done]
    started = time.perf_counter()
    tokens, failures = 0, 0
    if todo:
        with disk_errors(output):
            lines = JsonLines(output, keep=lambda line: True)
        try:
            if cfg.server.endpoints:
                tokens, failures = _ask_all(server, todo, cfg, lines)
            else:
                device = choose_device(cfg.device)
                note(f"loading {cfg.target.name} on {device}")
                target = load_target(cfg.target, device)
                started = time.perf_counter()
                tokens = _answer_all(target, todo, cfg, lines)
        finally:
            lines.close()
            if not output.stat().st_size:
                output.unlink()  # nothing came of it: no empty file is left
        if output.exists():
            _reorder(output, chats)
    seconds = time.perf_counter() - started
    for reject in rejects[:5]:
        note(f"{reject.source}: {reject.reason}")
    if failures:
        note(f"{failures:,} chats failed; see {_errors_file(output)}; the same command retries")
    speed = f", {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s" if tokens else ""
    say(
        f"{len(todo) - failures:,} chats generated, {len(chats) - len(todo):,} kept, "
        f"{len(rejects) + failures:,} rejected{speed}: {output}"
    )
    return 3 if rejects or failures else 0


def _answering(cfg: GenerateConfig, server: Server) -> str | None:
    """Name of the model that answers: the target's, or the served one's; None: no server says."""
    if not cfg.server.endpoints:
        return cfg.target.name
    try:
        return server.model(cfg.server.endpoints[0])
    except AnswerError:
        return None


def read_prompts(cfg: GenerateConfig) -> tuple[list[Chat], list[Reject]]:
    """The chats to have, each prompt list once; of rows with messages the user turns.

    Raises:
        DataError: no file or no usable prompt.
    """
    chats: dict[str, Chat] = {}
    rejects = []
    sources = data_sources(cfg.data)
    for row in read_rows(sources, cfg.data.limit, cfg.data):
        try:
            if isinstance(row, Reject):
                raise BadRow(row.reason)
            chat = _chat(row)
            chats.setdefault(chat.key, chat)
        except BadRow as error:
            rejects.append(Reject(row.source, str(error), row.name))
    if not chats:
        first = f"; the first: {rejects[0].reason}" if rejects else ""
        raise DataError(f"no usable prompt{first}", where=", ".join(sources))
    return list(chats.values()), rejects


def _chat(row: Row) -> Chat:
    if row.turns is not None:
        return Chat(row.source, row.name, row.system, row.turns)
    if row.messages is None:
        raise BadRow("no prompts in it, only text or tokens")
    if any(message["role"] == "tool" or "tool_calls" in message for message in row.messages):
        raise BadRow("it has tool calls, whose results can't be generated")
    system = [m["content"] for m in row.messages if m["role"] in ("system", "developer")]
    turns = [m["content"] for m in row.messages if m["role"] == "user"]
    if not turns or not all(turn.strip() for turn in turns):
        raise BadRow("no user turn, or an empty one")
    return Chat(row.source, row.name, system[0] if system else None, turns)


def _existing(output: Path, target: str | None) -> set[str]:
    """Keys of finished chats in the output file.

    Args:
        target: who will answer; None: not known.

    Raises:
        DataError: it holds something else. MismatchError: another target answered them.
    """
    if not output.exists():
        return set()
    if output.is_dir():
        raise DataError("it is a directory", where=output, do="Give output=FILE.jsonl")
    try:
        lines = read_json_lines(output)
        done = {line["key"] for line in lines}
    except (CorruptionError, KeyError, TypeError):
        raise DataError(
            "the file exists and holds something else than generated chats",
            where=output,
            do="Give another output=FILE.jsonl",
        ) from None
    others = sorted({str(line.get("target")) for line in lines} - {target})
    if others and target is not None:
        raise MismatchError(
            f"the file has chats of {', '.join(others)}, these would be of {target}",
            where=output,
            do="Give another output=FILE.jsonl",
        )
    return done


def _answer_all(target: Target, todo: list[Chat], cfg: GenerateConfig, lines: JsonLines) -> int:
    """Answers all turns of all chats; writes each chat when it is complete. Returns tokens made."""
    template = ChatTemplate(target.tokenizer, cfg.data.template)
    equal = target.info.has_linear_attention
    total, made, started = sum(len(chat.turns) for chat in todo), 0, time.perf_counter()
    with stop_on_signals(note) as stop, progress(total, "generate", "answer") as bar:

        def count(tokens: int) -> None:
            nonlocal made
            made += tokens
            speed = made / (time.perf_counter() - started)
            bar.set_postfix_str(f"{made:,} tokens, {speed:,.0f} tok/s", refresh=False)
            bar.update(0)

        waiting = todo
        while waiting:
            prompts = [_prompt_ids(template, chat) for chat in waiting]
            following: list[Chat] = []
            for group in group_prompts(list(map(len, prompts)), cfg.batch_size, equal=equal):
                batch = [waiting[i] for i in group]
                answers = greedy(
                    target,
                    [prompts[i] for i in group],
                    cfg.max_new_tokens,
                    on_tokens=count,
                    stopped=stop.is_set,
                )
                for chat, answer in zip(batch, answers, strict=True):
                    text = target.tokenizer.decode(answer.ids, skip_special_tokens=True)
                    if chat.answer(text, answer.cut):
                        following.append(chat)
                    else:
                        lines.write(**chat.record(cfg.target.name))
                bar.update(len(batch))
            waiting = following
        if stop.is_set() and waiting:
            raise Interrupted("stopped while generating", do="The same command goes on")
    return made


def _errors_file(output: Path) -> Path:
    return output.with_name(output.name + ".errors.jsonl")


def _ask_all(
    server: Server, todo: list[Chat], cfg: GenerateConfig, lines: JsonLines
) -> tuple[int, int]:
    """Lets servers answer; returns (tokens, failed chats).

    Raises:
        Interrupted: a signal came; chats in hand were finished.
    """
    path, lock = _errors_file(Path(cfg.output)), threading.Lock()
    path.unlink(missing_ok=True)
    made, failures, finished, started = 0, 0, 0, time.perf_counter()
    total = sum(len(chat.turns) for chat in todo)
    with stop_on_signals(note) as stop, progress(total, "generate", "answer") as bar:

        def turn(tokens: int) -> None:
            nonlocal made
            with lock:
                made += tokens
                speed = made / (time.perf_counter() - started)
                bar.set_postfix_str(f"{made:,} tokens, {speed:,.0f} tok/s", refresh=False)
                bar.update(1)

        def done(chat: Chat) -> None:
            nonlocal finished
            finished += 1
            served = cfg.server.model or next(iter(server.models.values()))
            lines.write(**chat.record(served))

        def failed(chat: Chat, reason: str) -> None:
            nonlocal failures
            failures += 1
            errors = JsonLines(path)
            errors.write(source=chat.source, id=chat.name, key=chat.key, reason=reason)
            errors.close()

        answer_chats(server, todo, stop, done, failed, turn)
        if stop.is_set() and finished + failures < len(todo):
            raise Interrupted("stopped while generating", do="The same command goes on")
    return made, failures


def _prompt_ids(template: ChatTemplate, chat: Chat) -> list[int]:
    try:
        text = template.text(chat.messages, prompt=True)
    except BadRow as error:
        raise DataError(str(error), where=chat.source) from None
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def _reorder(output: Path, chats: list[Chat]) -> None:
    """Puts the file into the prompts' order, so that it doesn't show how it came to be."""
    rank = {chat.key: i for i, chat in enumerate(chats)}
    lines = read_json_lines(output)
    for line in lines:
        line.pop("time", None)
    lines.sort(key=lambda line: rank.get(line["key"], len(rank)))
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomic(output, text.encode())
