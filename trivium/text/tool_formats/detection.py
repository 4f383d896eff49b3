"""Finds the format of a chat template: the template renders calls, and each format tries to read them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

from trivium.foundation.errors import DataError
from trivium.foundation.registry import CATALOGUE, resolve
from trivium.text.tool_formats.base import Calls, Schemas, ToolCall, ToolFormat
from trivium.text.tool_formats.json_calls import COHERE, DEEPSEEK, GPT_OSS, HERMES, LLAMA3, MISTRAL, Hermes
from trivium.text.tool_formats.literal_calls import GEMMA, LFM
from trivium.text.tool_formats.tagged_calls import GLM, MINIMAX, MUSE, XML

Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], str]
"""The text that a chat template makes of messages and tools, in the form of OpenAI's clients. It raises Jinja's errors
and `REFUSALS`."""
REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What the expressions of a template raise for a value that does not fit, apart from Jinja's own errors."""

FORMATS: tuple[ToolFormat, ...] = (
    *(HERMES, LLAMA3, MISTRAL, DEEPSEEK, GPT_OSS, COHERE),
    *(XML, GLM, MINIMAX, MUSE, LFM, GEMMA),
)

_SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "description": "a place"}}, "required": []}
_NAMES = ("find_first", "find_second")
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"place": 'Zürich "first"\n<b>', "number": 4711, "more": {"list": [1.5, "Uster"], "whole": True}},
    {"place": "4712"},
)
_SHOWN = ("4711", "4712")
"""A text among the arguments of each."""
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Finds a place.", "parameters": _SCHEMA}}
    for name in _NAMES
]
_QUESTION = "question 4713"
_TAIL = 160
"""Characters that a template may write after the arguments of a call: the end of the call, and of the turn."""


class Notation(NamedTuple):
    """How a chat template writes calls."""

    format: ToolFormat
    written: str
    """What the template writes for a call; empty if it writes none."""


class AnyFormat(Hermes):
    """All formats, for a template that describes tools and writes no call: which one it describes is unknown."""

    def __init__(self, formats: Sequence[ToolFormat] = FORMATS) -> None:
        self._formats = formats
        self.marks = tuple(dict.fromkeys(mark for tool_format in formats for mark in tool_format.marks))
        self.starts = tuple(dict.fromkeys(start for tool_format in formats for start in tool_format.starts))

    def typed(self, schemas: Schemas) -> ToolFormat:
        return AnyFormat([tool_format.typed(schemas) for tool_format in self._formats])

    def read(self, text: str) -> Calls | None:
        return next((calls for tool_format in self._formats if (calls := tool_format.read(text)) is not None), None)

    def begins(self, text: str) -> bool:
        return any(tool_format.begins(text) for tool_format in self._formats)


class UnknownFormat(Hermes):
    """The format of a template whose calls no format reads. Completions without tools are read as in `Hermes`."""

    def __init__(self, written: str) -> None:
        self._written = written

    def check(self) -> None:
        names = ", ".join(CATALOGUE["tool_calls"])
        raise DataError(
            f"calls of tools in a notation that Trivium reads: {names}",
            f"the chat template writes {self._written!r}",
            "set model.tool_calls to the one of these that the model writes, or to a format of your own",
        )


def format_of(render: Render, name: str = "auto", tokens: Collection[str] = ()) -> ToolFormat:
    """The format with this name, which may be an import path; with `auto`, that of the chat template, or of the added
    `tokens` of the tokenizer if the template writes no call.

    A template whose calls no format reads has a format whose `check` raises DataError.
    """
    return detected(render, tokens).format if name == "auto" else resolve("tool_calls", name)


def rendered_by(tokenizer: Any, template: str | None) -> Render:
    """Renders with the template of a tokenizer, or with another."""

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template([*messages], tools=[*tools], chat_template=template, tokenize=False))

    return render


def detected(render: Render, tokens: Collection[str] = ()) -> Notation:
    """Renders calls in all forms that templates take, until a format reads them.

    A template that writes no call gets the format that has all marks of calls among the added `tokens` of the
    tokenizer: the model was trained on them. (DeepSeek V3's template writes a call only for a content of None, which
    transformers 5 takes out of messages.) Without one, it is `hermes`, since the system message describes calls then;
    if the template describes tools itself, every format is read.
    """
    unread = ""
    for number, result, content, as_text in product((2, 1), (False, True), ("", None, []), (False, True)):
        turn = [_call(index, as_text) for index in range(number)]
        results = [{"role": "tool", "tool_call_id": call["id"], "name": _NAMES[0], "content": "done"} for call in turn]
        written = _text(render, [{"role": "assistant", "content": content, "tool_calls": turn}, *results * result])
        calls = [ToolCall(n, json.dumps(a)) for n, a, s in zip(_NAMES, _ARGUMENTS, _SHOWN, strict=True) if s in written]
        if _NAMES[0] not in written or not calls:
            continue
        answer = _text(render, [{"role": "assistant", "content": "answer"}])
        start = next((at for at, (a, b) in enumerate(zip(answer, written, strict=False)) if a != b), 0)
        end = max(written.rfind(argument) for argument in _SHOWN)
        marked = [tool_format for tool_format in FORMATS if tool_format.marks[0] in written]
        for tool_format, text in product((*marked, GPT_OSS, LLAMA3), (written, written[start:])):  # these need no mark
            tail = len(written) - end
            if any(_reads(tool_format, text[: len(text) - cut], calls) for cut in range(max(0, tail - _TAIL), tail)):
                return Notation(tool_format, written[start:])
        unread = unread or written[start : end + _TAIL]
    if unread:
        return Notation(UnknownFormat(unread), unread)
    trained_marks = {
        tool_format: {*tokens}.intersection(tool_format.marks)
        for tool_format in FORMATS
        if tool_format.marks[0] in tokens
    }
    trained = next(
        (tool_format for tool_format, marks in trained_marks.items() if marks == set().union(*trained_marks.values())),
        None,
    )
    if trained is not None:
        return Notation(trained, "")
    return Notation(AnyFormat() if _NAMES[0] in _text(render, [], whole=True) else HERMES, "")


def _call(index: int, as_text: bool) -> dict[str, Any]:
    """A call as OpenAI's clients send it. Mistral's templates want identifiers of nine characters."""
    arguments = json.dumps(_ARGUMENTS[index]) if as_text else _ARGUMENTS[index]
    function = {"name": _NAMES[index], "arguments": arguments}
    return {"type": "function", "id": f"call0000{index}", "function": function}


def _text(render: Render, turn: Sequence[dict[str, Any]], *, whole: bool = False) -> str:
    """What the template writes after a question; empty if it refuses the conversation."""
    from jinja2 import TemplateError

    for question in (_QUESTION, [{"type": "text", "text": _QUESTION}]):
        with suppress(TemplateError, *REFUSALS):
            text = render([{"role": "user", "content": question}, *turn], _TOOLS)
            return text if whole else text.rpartition(_QUESTION)[2]
    return ""


def _reads(tool_format: ToolFormat, text: str, calls: Sequence[ToolCall]) -> bool:
    """Whether the format reads exactly these calls."""
    _, parsed = tool_format.typed(dict.fromkeys(_NAMES, _SCHEMA)).read(text) or ("", ())
    values = [[(call.name, json.loads(call.arguments)) for call in sequence] for sequence in (parsed, calls)]
    return values[0] == values[1]
