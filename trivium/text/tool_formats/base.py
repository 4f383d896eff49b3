"""What a format of calls of tools is, and what the formats share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trivium.types import ToolCall

MAX_DEPTH = 48
"""How deep arguments may be nested. Agents send them back inside a request, whose depth is limited as well."""
REASONING_TAIL = 16
"""Tokens at the end of a prompt that may open a reasoning block."""
Calls = tuple[str, tuple[ToolCall, ...]]
"""(the text before the calls, the calls)."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its arguments."""
Step = tuple[ToolCall | None, str]
"""(a call, or None for a text that does not begin with one, the text after it)."""


class ToolFormat:
    """One notation. `read` and `write` see a completion without its reasoning."""

    marks: tuple[str, ...] = ()
    """Texts that begin or separate calls, first the one that begins them. Special tokens among them are kept in the
    text of a completion."""
    starts: tuple[str, ...] = ()
    """Beginnings of completions that may be calls without a mark before them. White space may precede them."""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    """What begins and ends the reasoning of a completion."""
    answers: tuple[str, ...] = ()
    """What may precede the content of a completion, and is no part of it. If there are any, reasoning is never content.
    """
    answered: str = ""
    """What may end the content of a completion, and is no part of it; empty without such a mark."""

    def read(self, text: str) -> Calls | None:
        """The calls of a completion; None if it has none, or anything else after the first one."""
        raise NotImplementedError

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The end of a completion with these calls, for a history that the policy did not write."""
        raise NotImplementedError

    def typed(self, schemas: Schemas) -> ToolFormat:
        """The format for tools with these schemas. A notation whose values have no types reads them by the schemas."""
        del schemas
        return self

    def check(self) -> None:
        """Raises DataError if calls cannot be read."""

    def begins(self, text: str) -> bool:
        """Whether a completion begins a call somewhere, though `read` may not read it."""
        return self.marks[:1] != () and self.marks[0] in text

    def fault(self, text: str) -> str:
        """What is wrong with a completion that begins a call, if `read` does not read it."""
        del text
        return "it is cut, it is in another notation than calls, or text follows it"

    def opens(self, prompt_end: str) -> bool:
        """Whether the end of a prompt begins a reasoning block, as some chat templates write it."""
        return prompt_end.rstrip().endswith(self.reasoning[0].rstrip())

    def split(self, text: str, *, opened: bool = False, incomplete: bool = False) -> tuple[str | None, str]:
        """(the text of the reasoning block, the content and the calls after it) of a completion. The first is None
        without a block.

        A reasoning block begins the text, or is `opened` by the prompt. If it has no end, nothing is after it. The mark
        `answered` at the end of the text is left out, unless it is `incomplete`: then the mark may be content.
        """
        start, (begin, end) = text.lstrip(), self.reasoning
        thought, rest = None, text
        if opened or start.startswith(begin):
            thought, _, rest = start.removeprefix(begin).partition(end)
        start = rest.lstrip()
        mark = next((mark for mark in self.answers if start.startswith(mark)), None)
        rest = rest if mark is None else start.removeprefix(mark)
        if self.answered and not incomplete and rest.rstrip().endswith(self.answered):
            rest = rest.rstrip().removesuffix(self.answered)
        return thought, rest

    def instructions(self) -> str:
        """What a system message says about calls, if the chat template does not describe tools."""
        example = ToolCall("function_name", '{"parameter_name": "value"}')
        return f"For each function call, write:\n{self.write([example])}"


def without_partial(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may become one of these marks."""
    longest = max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: len(text) - longest]


def arguments_text(arguments: object) -> str | None:
    """The arguments of a call as text; None if they are no JSON object that can be sent to an agent and back: one with
    finite numbers and Unicode text, nested at most `MAX_DEPTH` deep."""
    level: list[Any] = [arguments] if isinstance(arguments, dict) else []
    depth = 0
    while level and depth <= MAX_DEPTH:
        parts = (
            part for container in level for part in (container.values() if isinstance(container, dict) else container)
        )
        level, depth = [part for part in parts if isinstance(part, dict | list)], depth + 1
    if not 0 < depth <= MAX_DEPTH:
        return None
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # an infinity, or half of a surrogate pair
        return None
    return json.dumps(arguments)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


JSON = json.JSONDecoder(parse_constant=_refuse)


NOTHING = object()
"""In place of a value that is not there. `null` is a value."""


def decoded(text: str) -> tuple[Any, str]:
    """(the JSON value at the beginning of a text, the text after it); (`NOTHING`, the text) without one."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = JSON.raw_decode(text, start)
        return value, text[end:]
    except (ValueError, RecursionError):
        return NOTHING, text


def call_with(name: object, arguments: object) -> ToolCall | None:
    """A call with a name and a value as arguments; None if one of them cannot be that of a call."""
    text = arguments_text(arguments)
    return ToolCall(name, text) if isinstance(name, str) and name and text is not None else None


def all_calls(content: str, calls: Iterable[ToolCall | None]) -> Calls | None:
    """The calls, if there are some and each is one."""
    entries = list(calls)
    complete = tuple(call for call in entries if call is not None)
    return (content.rstrip(), complete) if complete and len(complete) == len(entries) else None


def separated(text: str, mark: str, read_call: Callable[[str], Step]) -> Iterator[ToolCall | None]:
    """Reads calls with `read`. Marks are between them."""
    while True:
        call, rest = read_call(text)
        yield call
        rest = rest.strip()
        if call is None or not rest:
            return
        if not rest.startswith(mark):
            yield None
            return
        text = rest.removeprefix(mark)
