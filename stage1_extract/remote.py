"""Answers from OpenAI-compatible servers (vLLM, SGLang, …): concurrent, retried, several endpoints.

Each chat is one task; its turns go one after another to the same endpoint, so that a server's
prefix cache helps. What still fails after the retries goes to `OUTPUT.errors.jsonl` with its
reason, and the next run tries it again.
"""

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ConfigError
from stage1_extract.config import ServerConfig

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
_LONGEST_WAIT_S = 30.0


class AnswerError(Exception):
    """A request that failed for good; the text is the reason."""


@dataclass
class Server:
    """A client of one or more endpoints; safe to use from many threads."""

    cfg: ServerConfig
    max_new_tokens: int
    sleep: Callable[[float], None] = time.sleep
    models: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = [url for url in self.cfg.endpoints if not url.startswith(("http://", "https://"))]
        if wrong or self.cfg.concurrency < 1 or self.cfg.retries < 0:
            raise ConfigError(
                f"{wrong[0]!r} is not http(s)://…" if wrong else "concurrency must be positive",
                where="server",
                do="As in server.endpoints=[http://localhost:8000/v1]",
            )

    def model(self, endpoint: str) -> str:
        """The served model: as configured, else the first one that the endpoint lists."""
        if self.cfg.model:
            return self.cfg.model
        if endpoint not in self.models:
            listed = self._send(endpoint, "/models", None)
            try:
                self.models[endpoint] = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise AnswerError("the server lists no model; set server.model") from None
        return self.models[endpoint]

    def answer(self, endpoint: str, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The next assistant message, greedy, with the number of tokens under `tokens`.

        Raises:
            AnswerError: the server refused it, or every retry failed.
        """
        clean = [{"role": m["role"], "content": m["content"]} for m in messages]
        body = {
            "model": self.model(endpoint),
            "messages": clean,
            "max_tokens": self.max_new_tokens,
            "temperature": 0,
        }
        reply = self._send(endpoint, "/chat/completions", body)
        try:
            choice = reply["choices"][0]
            content = choice["message"]["content"]
            thought = choice["message"].get("reasoning_content")
            usage = reply.get("usage") or {}
            tokens = int(usage.get("completion_tokens") or 0)
            cut = choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise AnswerError(f"not a chat completion: {str(reply)[:200]}") from None
        if not isinstance(content, str):
            raise AnswerError("the answer has no text")
        message = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        return message | ({"finish_reason": "length"} if cut else {}) | {"tokens": tokens}

    def _send(self, endpoint: str, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.cfg.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(endpoint.rstrip("/") + path, data, headers)
        reason = ""
        for attempt in range(self.cfg.retries + 1):
            wait = min(0.5 * 2**attempt, _LONGEST_WAIT_S)
            try:
                with urllib.request.urlopen(request, timeout=self.cfg.timeout_s) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                with error:
                    text = error.read(300).decode("utf-8", "replace")
                reason = f"HTTP {error.code}: {' '.join(text.split())}"
                if error.code not in _RETRIED:
                    break
                after = error.headers.get("Retry-After", "")
                wait = min(float(after), _LONGEST_WAIT_S) if after.isdigit() else wait
            # Refused, reset, timed out; a reply that is cut or no JSON.
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt < self.cfg.retries:
                self.sleep(wait)
        raise AnswerError(reason)


def answer_chats(
    server: Server,
    chats: Sequence[Any],
    stop: threading.Event,
    done: Callable[[Any], None],
    failed: Callable[[Any, str], None],
    turn: Callable[[int], None],
) -> None:
    """Answers every turn of every chat, `concurrency` chats at a time.

    `done` and `failed` are called in this thread, in the order of completion; `turn` with an
    answer's tokens, in any thread. After `stop` chats in hand are finished, no new ones begun.
    """
    endpoints = server.cfg.endpoints

    def one(number: int, chat: Any) -> bool:
        endpoint = endpoints[number % len(endpoints)]
        if stop.is_set():
            return False
        more = True
        while more:
            message = server.answer(endpoint, chat.messages)
            turn(message.pop("tokens"))
            more = chat.add(message)
        return True

    with ThreadPoolExecutor(server.cfg.concurrency, "generate") as pool:
        tasks = {pool.submit(one, number, chat): chat for number, chat in enumerate(chats)}
        for task in as_completed(tasks):
            try:
                if task.result():
                    done(tasks[task])
            except AnswerError as error:
                failed(tasks[task], str(error))
