"""How model families write calls of tools into completions.

A format is a plugin: `trivium.testing.check_tool_format` tests one. The chat template of a model decides which it is
(`format_of`), unless the config names another (`model.tool_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trivium.registry import resolve
from trivium.types import ToolCall

MAX_DEPTH = 48
"""How deep arguments may be nested. Agents send them back inside a request, whose depth is limited as well."""
REASONING_TAIL = 16
"""Tokens at the end of a prompt that may open a reasoning block."""
Calls = tuple[str, tuple[ToolCall, ...]]
"""(the text before the calls, the calls)."""


class ToolFormat:
    """One notation. `read` and `write` see a completion without its reasoning."""

    marks: tuple[str, ...] = ()
    """Texts that begin or separate calls. Special tokens among them are kept in the text of a completion."""
    starts: tuple[str, ...] = ()
    """Beginnings of completions that may be calls without a mark before them. White space may precede them."""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    """What begins and ends the reasoning of a completion."""
    answers: tuple[str, ...] = ()
    """What may precede the content of a completion, and is no part of it. If there are any, reasoning is never content.
    """

    def read(self, text: str) -> Calls | None:
        """The calls of a completion; None if it has none, or anything else after the first one."""
        raise NotImplementedError

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The end of a completion with these calls, for a history that the policy did not write."""
        raise NotImplementedError

    def opens(self, prompt_end: str) -> bool:
        """Whether the end of a prompt begins a reasoning block, as some chat templates write it."""
        return prompt_end.rstrip().endswith(self.reasoning[0])

    def split(self, text: str, *, opened: bool = False) -> tuple[str | None, str]:
        """(the text of the reasoning block, the content and the calls after it) of a completion. The first is None
        without a block.

        A reasoning block begins the text, or is `opened` by the prompt. If it has no end, nothing is after it.
        """
        start, (begin, end) = text.lstrip(), self.reasoning
        thought, rest = None, text
        if opened or start.startswith(begin):
            thought, _, rest = start.removeprefix(begin).partition(end)
        start = rest.lstrip()
        mark = next((mark for mark in self.answers if start.startswith(mark)), None)
        return thought, rest if mark is None else start.removeprefix(mark)

    def instructions(self) -> str:
        """What a system message says about calls, if the chat template does not describe tools."""
        return f"For each function call, write:\n{self.write([ToolCall('<function-name>', '<args-json-object>')])}"


class Json(ToolFormat):
    """`{"name": ..., "parameters": {...}}` alone, several separated by `;`, as Llama 3 writes them, with or without
    `<|python_tag|>` before them."""

    marks = ("<|python_tag|>",)
    starts = ("{",)

    def read(self, text: str) -> Calls | None:
        content, tag, body = text.partition(self.marks[0])
        content, body = (content, body) if tag else ("", text)
        return _all(content, _separated(body, ";", _named))

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = [f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls]
        return self.marks[0] + "; ".join(objects)


class Hermes(ToolFormat):
    """`<tool_call>` blocks of JSON, as Hermes and Qwen write them. Also reads a completion that is nothing but JSON
    objects without blocks, as `Json` does."""

    marks = ("<tool_call>",)
    starts = ("{",)

    def read(self, text: str) -> Calls | None:
        content, mark, body = text.partition(self.marks[0])
        if mark:
            return _all(content, _separated(body, self.marks[0], _block))
        return None if LLAMA3.marks[0] in text else LLAMA3.read(text)

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = (f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls)
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)

    def instructions(self) -> str:
        return """For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class Mistral(ToolFormat):
    """`[TOOL_CALLS]` before a JSON list of calls; newer models write `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, text: str) -> Calls | None:
        content, mark, body = text.partition(self.marks[0])
        if not mark:
            return None
        if body.lstrip().startswith("["):
            entries, rest = _decoded(body)
            calls = entries if isinstance(entries, list) and not rest.strip() else [None]
            return _all(content, map(_call_of, calls))
        return _all(content, _separated(body, self.marks[0], self._call))

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
        return f"[TOOL_CALLS][{', '.join(objects)}]"

    @staticmethod
    def _call(text: str) -> tuple[ToolCall | None, str]:
        name, mark, body = text.partition("[ARGS]")
        arguments, rest = _decoded(body)
        return _checked(name.partition("[CALL_ID]")[0].strip() if mark else None, arguments), rest


class DeepSeek(ToolFormat):
    """DeepSeek's blocks: of V3.1, and with a `function` type and fenced JSON of V3 and R1."""

    _BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _CALL, _SEP, _OVER = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    marks = (_BEGIN, _END, _CALL, _SEP, _OVER)

    def read(self, text: str) -> Calls | None:
        content, mark, body = text.partition(self._BEGIN)
        body = body.strip()
        if not mark or not body.startswith(self._CALL):
            return None
        body = body.removeprefix(self._CALL).removesuffix(self._END)
        return _all(content, _separated(body, self._CALL, self._call))

    def write(self, calls: Sequence[ToolCall]) -> str:
        blocks = "".join(f"{self._CALL}{name}{self._SEP}{arguments}{self._OVER}" for name, arguments in calls)
        return self._BEGIN + blocks + self._END

    def _call(self, text: str) -> tuple[ToolCall | None, str]:
        name, mark, body = text.partition(self._SEP)
        fence = ""
        if name.strip() == "function" and "\n```json\n" in body:
            name, fence, body = body.partition("\n```json\n")
        arguments, rest = _decoded(body)
        before, over, rest = rest.partition(self._OVER)
        complete = mark and over and before.strip() == ("```" if fence else "")
        return _checked(name.strip() if complete else None, arguments), rest


class GptOss(ToolFormat):
    """OpenAI's Harmony: calls are messages in the commentary channel to a function, reasoning is in the analysis
    channel, and content in the final one."""

    marks = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>")
    starts = (" to=functions.",)  # the prompt ends with `<|start|>assistant`
    reasoning = ("<|channel|>analysis<|message|>", "<|end|>")
    answers = ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>")
    _HEAD = re.compile(
        r"(?:(?:<\|start\|>assistant)?<\|channel\|>\w+ to=functions\.(?P<a>[^\s<]+)"
        r"|(?:<\|start\|>assistant|\A) to=functions\.(?P<b>[^\s<]+)<\|channel\|>\w+)"
        r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
    )

    def read(self, text: str) -> Calls | None:
        head = self._HEAD.search(text)
        if head is None:
            return None
        calls: list[ToolCall | None] = []
        content, rest = text[: head.start()], text[head.start() :]
        while rest.strip():
            head = self._HEAD.match(rest)
            arguments, rest = _decoded(rest[head.end() :]) if head is not None else (None, "")
            calls.append(_checked(head and (head["a"] or head["b"]), arguments))
            rest = re.sub(r"^\s*<\|(?:call|end)\|>", "", rest)
        return _all(content, calls)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "<|end|>".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
            for name, arguments in calls
        )


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that a completion may call, and how it writes that."""

    names: frozenset[str] = frozenset()
    format: ToolFormat = field(default_factory=Hermes)

    def read(self, text: str) -> Calls:
        """The calls of a completion. If any part is not a valid call of one of these tools, the whole completion is
        text."""
        calls = self.format.read(text) if self.names else None
        if calls is None or any(call.name not in self.names for call in calls[1]):
            return text, ()
        return calls

    def certain(self, text: str) -> str:
        """The beginning of an incomplete completion that is text, however the completion continues. White space at its
        end is left out: `read` drops it before calls."""
        start, how = text.lstrip(), self.format
        if not self.names:
            return text
        begins = (each.startswith(mark[: len(each)]) for each in (text, start) for mark in how.starts)
        if not start or any(begins):
            return ""
        ends = [at for mark in how.marks if (at := text.find(mark)) >= 0]
        return (text[: min(ends)] if ends else without_partial(text, how.marks)).rstrip()


HERMES, LLAMA3, MISTRAL, DEEPSEEK, GPT_OSS = Hermes(), Json(), Mistral(), DeepSeek(), GptOss()
FORMATS = (HERMES, LLAMA3, MISTRAL, DEEPSEEK, GPT_OSS)
_SIGNS = {
    "<|channel|>": "gpt_oss",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    '"parameters": ': "llama3",
}
"""What the chat template of a model contains -> its format, the first that fits."""


def format_of(template: str, name: str = "auto") -> ToolFormat:
    """The format with this name, which may be an import path; with `auto`, the one that the chat template writes, else
    `hermes`."""
    if name == "auto":
        name = next((kind for sign, kind in _SIGNS.items() if sign in template), "hermes")
    return resolve("tool_calls", name)


def without_partial(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may become one of these marks."""
    longest = max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: len(text) - longest]


def _refuse(constant: str) -> None:
    raise ValueError(constant)


_JSON = json.JSONDecoder(parse_constant=_refuse)


def _all(content: str, calls: Any) -> Calls | None:
    """The calls, if there are some and each is one."""
    entries: list[ToolCall | None] = list(calls)
    complete = tuple(call for call in entries if call is not None)
    return (content.rstrip(), complete) if complete and len(complete) == len(entries) else None


def _separated(text: str, mark: str, read: Any) -> Iterator[ToolCall | None]:
    """Reads calls with `read`, which returns a call and the text after it. Marks are between them."""
    while True:
        call, rest = read(text)
        yield call
        rest = rest.strip()
        if call is None or not rest:
            return
        if not rest.startswith(mark):
            yield None
            return
        text = rest.removeprefix(mark)


def _decoded(text: str) -> tuple[Any, str]:
    """(the JSON value at the beginning of a text, the text after it); (None, the text) without one."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = _JSON.raw_decode(text, start)
        return value, text[end:]
    except (ValueError, RecursionError):
        return None, text


def _named(text: str) -> tuple[ToolCall | None, str]:
    value, rest = _decoded(text)
    return _call_of(value), rest


def _block(text: str) -> tuple[ToolCall | None, str]:
    call, rest = _named(text)
    before, closed, rest = rest.partition("</tool_call>")
    return (call if closed and not before.strip() else None), rest


def _call_of(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    return _checked(value.get("name"), value.get("arguments", value.get("parameters")))


def _checked(name: Any, arguments: Any) -> ToolCall | None:
    text = arguments_text(arguments)
    return ToolCall(name, text) if isinstance(name, str) and name and text is not None else None


def arguments_text(arguments: object) -> str | None:
    """The arguments of a call as text; None if they are no JSON object that can be sent to an agent and back: one with
    finite numbers and Unicode text, nested at most `MAX_DEPTH` deep."""
    level: list[Any] = [arguments] if isinstance(arguments, dict) else []
    depth = 0
    while level and depth <= MAX_DEPTH:
        parts = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level, depth = [part for part in parts if isinstance(part, dict | list)], depth + 1
    if not 0 < depth <= MAX_DEPTH:
        return None
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # an infinity, or half of a surrogate pair
        return None
    return json.dumps(arguments)
