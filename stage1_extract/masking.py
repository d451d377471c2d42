"""A chat as the template renders it, and which characters the assistant wrote.

The chat is rendered twice: as it is, and with every assistant text replaced by a marker. What
stands between the markers is the template's own; so each assistant text is found exactly, in
templates with or without a generation block, and also where a thinking template drops or moves the
think parts of earlier turns. A span runs from the assistant's first character to its end token.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.errors import DataError
from stage1_extract.rows import BadRow

# Private-use characters: no template strips or splits at them.
_MARK = re.compile("\ue000(\\d+)([tac])\ue001")
_THINK = re.compile(r"^\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """A chat's text and the assistant's spans in it, as (start, end) character positions."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class _Assistant:
    """One assistant message: its texts by marker kind (t think, a answer, c first tool's name)."""

    texts: dict[str, str]
    marked: dict[str, Any]
    cut: bool


class ChatTemplate:
    """The tokenizer's chat template with what masks need to know of it.

    Args:
        tokenizer: a fast transformers tokenizer that has a chat template.
        variables: extra variables of the template (such as enable_thinking).
    """

    def __init__(self, tokenizer: Any, variables: dict[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, so chats can't become tokens",
                where="target.model",
                do="Use rows with input_ids and loss_mask, or a chat model",
            )
        self.tokenizer, self.variables = tokenizer, dict(variables or {})

    def text(self, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """The rendered chat; with `prompt`, also the start of the next answer.

        Raises:
            BadRow: the template refuses the chat.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except Exception as error:  # jinja errors and whatever templates raise
            reason = " ".join(str(error).split())[:200]
            raise BadRow(f"the chat template refuses it ({reason})") from None

    @cached_property
    def header(self) -> str:
        """What the template puts before an answer, as in `<|im_start|>assistant`; may be empty."""
        question = [{"role": "user", "content": "x"}]
        try:
            plain, prompted = self.text(question), self.text(question, prompt=True)
        except BadRow:
            return ""
        return prompted.removeprefix(plain) if prompted.startswith(plain) else ""

    @cached_property
    def end_token(self) -> str:
        """The special token that ends an answer, or "" where the template has none."""
        chat = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "\ue0000a\ue001"},
        ]
        try:
            _, _, tail = self.text(chat).partition("\ue0000a\ue001")
        except BadRow:
            return ""
        special = {str(token) for token in self.tokenizer.added_tokens_encoder}
        special |= set(self.tokenizer.all_special_tokens)
        found = [(tail.index(token), -len(token), token) for token in special if token in tail]
        return min(found)[2] if found else ""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        *,
        last_only: bool = False,
        mask_thinking: bool = False,
    ) -> Rendered:
        """The chat's text with the assistant's spans.

        Raises:
            BadRow: the template refuses it, or rewrites assistant text so that it isn't found.
        """
        marked, assistants = [], {}
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                assistants[number] = _mark(number, message)
                message = assistants[number].marked
            marked.append(message)
        if not assistants:
            raise BadRow("no assistant turn in it")
        text = self.text(messages, tools)
        skeleton = _MARK.split(self.text(marked, tools))
        literals = skeleton[::3]
        marks = list(zip(map(int, skeleton[1::3]), skeleton[2::3], strict=True))
        places = _align(text, literals, [assistants[i].texts[kind] for i, kind in marks])
        spans = []
        wanted = [max(assistants)] if last_only else list(assistants)
        for number in wanted:
            own = [k for k, (i, _) in enumerate(marks) if i == number]
            if not own:
                continue  # the template shows nothing of this turn
            first, last = own[0], own[-1]
            kinds = {marks[k][1]: k for k in own}
            start = places[first][0]
            if mask_thinking and "a" in kinds:
                start = places[kinds["a"]][0]
            elif marks[first][1] != "a":
                # A think part or a tool call: the tags before it are the assistant's own.
                start -= self._own_tags(literals[first])
            end = places[last][1]
            if not assistants[number].cut and self.end_token:
                limit = places[last + 1][0] if last + 1 < len(places) else len(text)
                found = text.find(self.end_token, end, limit)
                end = found + len(self.end_token) if found >= 0 else end
            if end > start:
                spans.append((start, end))
        return Rendered(text, spans)

    def _own_tags(self, literal: str) -> int:
        """How many characters at the end of `literal` come after the header, or are a think tag."""
        place = literal.rfind(self.header) if self.header else -1
        if place >= 0:
            return len(literal) - place - len(self.header)
        tag = re.search(r"<think>\s*$", literal)
        return len(literal) - tag.start() if tag else 0

    def render_text(self, text: str, *, last_only: bool = False) -> Rendered:
        """Spans of text that was rendered before: from each header to the end token after it.

        Raises:
            BadRow: no header of this template is in it.
        """
        header = self.header.partition("<think>")[0]
        spans, position = [], text.find(header) if header else -1
        while position >= 0:
            start = position + len(header)
            end = text.find(self.end_token, start) if self.end_token else -1
            end = len(text) if end < 0 else end + len(self.end_token)
            spans.append((start, end))
            position = text.find(header, end)
        if not spans:
            raise BadRow("the text has no assistant turn in this chat template's form")
        return Rendered(text, spans[-1:] if last_only else spans)


def split_thinking(message: dict[str, Any]) -> tuple[str | None, str]:
    """(think part or None, answer) of an assistant message."""
    if message.get("reasoning_content"):
        return message["reasoning_content"], message["content"]
    match = _THINK.match(message["content"])
    if match is None:
        return None, message["content"]
    return match[1], message["content"][match.end() :]


def drop_thinking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with the assistant's think parts removed."""
    kept = []
    for message in messages:
        if message["role"] == "assistant":
            think, answer = split_thinking(message)
            if think is not None:
                message = {k: v for k, v in message.items() if k != "reasoning_content"}
                message["content"] = answer.lstrip("\n")
        kept.append(message)
    return kept


def _mark(number: int, message: dict[str, Any]) -> _Assistant:
    think, answer = split_thinking(message)
    marked, texts = dict(message), {}
    answer_mark = ""
    if answer.strip():
        texts["a"], answer_mark = answer, f"\ue000{number}a\ue001"
    elif message.get("tool_calls"):
        call = message["tool_calls"][0]
        inner = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(inner.get("name"), str):
            raise BadRow("a tool call has no name")
        texts["c"] = inner["name"]
        inner = {**inner, "name": f"\ue000{number}c\ue001"}
        call = {**call, "function": inner} if "function" in call else inner
        marked["tool_calls"] = [call, *message["tool_calls"][1:]]
    if think is not None:
        texts["t"] = think
        mark = f"\ue000{number}t\ue001"
        if message.get("reasoning_content"):
            marked["reasoning_content"], marked["content"] = mark, answer_mark
        else:
            gap = re.match(r"\s*", answer)[0] if answer_mark else answer
            texts["t"] = think.strip("\n")
            lead, _, trail = think.partition(texts["t"]) if texts["t"] else (think, "", "")
            marked["content"] = f"<think>{lead}{mark}{trail}</think>{gap}{answer_mark}"
            if answer_mark:
                texts["a"] = answer[len(gap) :]
    else:
        marked["content"] = answer_mark
    return _Assistant(texts, marked, message.get("finish_reason") == "length")


def _align(text: str, literals: list[str], values: list[str]) -> list[tuple[int, int]]:
    """Where each marked text stands: (start, end) in `text`.

    Templates may strip a text; each stripped form is tried, and the literal after it must follow.
    """
    if not text.startswith(literals[0]):
        raise BadRow(_REWRITTEN)
    position, places = len(literals[0]), []
    for value, literal in zip(values, literals[1:], strict=True):
        forms = (value, value.strip(), value.lstrip(), value.rstrip())
        forms += (value.strip("\n"), value.lstrip("\n"), value.rstrip("\n"))
        for form in forms:
            end = position + len(form)
            if text.startswith(form, position) and text.startswith(literal, end):
                places.append((position, end))
                position = end + len(literal)
                break
        else:
            raise BadRow(_REWRITTEN)
    if position != len(text):
        raise BadRow(_REWRITTEN)
    return places


_REWRITTEN = "the chat template rewrites an assistant text, so it can't be found for the loss mask"
