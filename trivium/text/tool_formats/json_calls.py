"""Formats whose calls are JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trivium.text.tool_formats.base import (
    JSON,
    NOTHING,
    Calls,
    Step,
    ToolCall,
    ToolFormat,
    all_calls,
    call_with,
    decoded,
    separated,
)

_BARE = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"\s*:')
"""How a call without a mark begins. Other JSON objects are answers."""


class JsonFormat(ToolFormat):
    """Base of the formats whose arguments are JSON."""

    def fault(self, text: str) -> str:
        at = text.find("{", max(text.find(self.marks[0]), 0))
        try:
            JSON.raw_decode(text, at) if at >= 0 else None
        except ValueError as error:
            broken = text[getattr(error, "pos", at) :][:40]
            return f"its JSON is broken: {getattr(error, 'msg', error)} at {repr(broken) if broken else 'the end'}"
        except RecursionError:
            return "its JSON is nested too deep"
        return "it is cut, it is no JSON with a name and an object of arguments, or text follows it"


class Json(JsonFormat):
    """`{"name": ..., "parameters": {...}}` alone, several separated by `;`, as Llama 3 writes them, with or without
    `<|python_tag|>` before them."""

    marks = ("<|python_tag|>",)
    starts = ("{",)

    def begins(self, text: str) -> bool:
        return super().begins(text) or _BARE.match(text) is not None

    def read(self, text: str) -> Calls | None:
        content, tag, body = text.partition(self.marks[0])
        content, body = (content, body) if tag else ("", text)
        return all_calls(content, separated(body, ";", _named))

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = [f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls]
        return self.marks[0] + "; ".join(objects)


class Hermes(Json):
    """`<tool_call>` blocks of JSON, as Hermes and Qwen write them. Also reads a completion that is nothing but JSON
    objects without blocks, as `Json` does."""

    marks = ("<tool_call>", "</tool_call>")

    def read(self, text: str) -> Calls | None:
        content, mark, body = text.partition(self.marks[0])
        if mark:
            return all_calls(content, separated(body, self.marks[0], _block))
        return None if Json.marks[0] in text else LLAMA3.read(text)

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = (f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls)
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)

    def instructions(self) -> str:
        return """For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class Mistral(JsonFormat):
    """`[TOOL_CALLS]` before a JSON list of calls; newer models write `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, text: str) -> Calls | None:
        content, mark, body = text.partition(self.marks[0])
        if not mark:
            return None
        if body.lstrip().startswith("["):
            return all_calls(content, _listed(body))
        return all_calls(content, separated(body, self.marks[0], self._call))

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
        return f"[TOOL_CALLS][{', '.join(objects)}]"

    @staticmethod
    def _call(text: str) -> Step:
        name, mark, body = text.partition("[ARGS]")
        arguments, rest = decoded(body)
        return _called(name.partition("[CALL_ID]")[0].strip() if mark else None, arguments), rest


class Cohere(JsonFormat):
    """A JSON list between `<|START_ACTION|>` and `<|END_ACTION|>`, as Command R7B and A write it."""

    _END, answered = "<|END_ACTION|>", "<|END_RESPONSE|>"
    reasoning = ("<|START_THINKING|>", "<|END_THINKING|>")
    answers = ("<|START_RESPONSE|>",)
    marks = ("<|START_ACTION|>", _END, *reasoning, *answers, answered)

    def read(self, text: str) -> Calls | None:
        content, mark, body = text.partition(self.marks[0])
        body, end, rest = body.rpartition(self._END)
        return all_calls(content, _listed(body)) if mark and end and not rest.strip() else None

    def write(self, calls: Sequence[ToolCall]) -> str:
        objects = ",\n".join(
            f'    {{"tool_call_id": "{number}", "tool_name": {json.dumps(name)}, "parameters": {arguments}}}'
            for number, (name, arguments) in enumerate(calls)
        )
        return f"{self.marks[0]}[\n{objects}\n]{self._END}"


class DeepSeek(JsonFormat):
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
        return all_calls(content, separated(body, self._CALL, self._call))

    def write(self, calls: Sequence[ToolCall]) -> str:
        blocks = "".join(f"{self._CALL}{name}{self._SEP}{arguments}{self._OVER}" for name, arguments in calls)
        return self._BEGIN + blocks + self._END

    def _call(self, text: str) -> Step:
        name, mark, body = text.partition(self._SEP)
        fence = ""
        if name.strip() == "function" and "\n```json\n" in body:
            name, fence, body = body.partition("\n```json\n")
        arguments, rest = decoded(body)
        before, over, rest = rest.partition(self._OVER)
        complete = mark and over and before.strip() == ("```" if fence else "")
        return _called(name.strip() if complete else None, arguments), rest


class GptOss(JsonFormat):
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
    _ADDRESS = re.compile(r"(?:\A|<\|start\|>assistant|<\|channel\|>\w+) to=")

    def begins(self, text: str) -> bool:
        return self._ADDRESS.search(text) is not None

    def read(self, text: str) -> Calls | None:
        head = self._HEAD.search(text)
        if head is None:
            return None
        calls: list[ToolCall | None] = []
        content, rest = text[: head.start()], text[head.start() :]
        while rest.strip():
            head = self._HEAD.match(rest)
            arguments, rest = decoded(rest[head.end() :]) if head is not None else (None, "")
            calls.append(_called(head and (head["a"] or head["b"]), arguments))
            rest = re.sub(r"^\s*<\|(?:call|end)\|>", "", rest)
        return all_calls(content, calls)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "<|end|>".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
            for name, arguments in calls
        )


def _named(text: str) -> Step:
    value, rest = decoded(text)
    return _call_of(value), rest


def _listed(text: str) -> list[ToolCall | None]:
    """The calls in a JSON list that is the whole text."""
    entries, rest = decoded(text)
    return [_call_of(entry) for entry in entries] if isinstance(entries, list) and not rest.strip() else [None]


def _block(text: str) -> Step:
    call, rest = _named(text)
    before, closed, rest = rest.partition("</tool_call>")
    return (call if closed and not before.strip() else None), rest


def _call_of(value: Any) -> ToolCall | None:
    """The call in a JSON object. It may have no arguments."""
    if not isinstance(value, dict):
        return None
    return _called(value.get("name", value.get("tool_name")), value.get("arguments", value.get("parameters")))


def _called(name: object, arguments: Any) -> ToolCall | None:
    """A call whose arguments are an object, null, or one of them as JSON text."""
    if isinstance(arguments, str):
        arguments, rest = decoded(arguments) if arguments.strip() else (None, "")
        arguments = NOTHING if rest.strip() else arguments
    return call_with(name, {} if arguments is None else arguments)


HERMES, LLAMA3, MISTRAL, DEEPSEEK, GPT_OSS, COHERE = Hermes(), Json(), Mistral(), DeepSeek(), GptOss(), Cohere()
