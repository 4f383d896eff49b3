"""The parts of a message beside its content, as OpenAI's Chat Completions writes them: calls of tools and reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivium.foundation.errors import DataError
from trivium.types import Message, ToolCall

_REASONING = ("reasoning_content", "reasoning", "thinking")
MORE_KEYS = {"assistant": ("tool_calls", *_REASONING), "tool": ("tool_call_id", "call", "name")}
"""Role -> the keys of its messages besides role and content."""


def with_parts(message: Message, entry: Mapping[str, Any], where: str) -> Message:
    """The message with the calls, the reasoning and the name in an entry of a conversation. Raises DataError."""
    if entry.keys() <= {"role", "content"}:
        return message
    reasoning = next((entry[key] for key in _REASONING if entry.get(key) is not None), None)
    name, call = entry.get("name", ""), entry.get("call")
    if not isinstance(reasoning, str | None) or not isinstance(name, str) or not isinstance(call, int | None):
        raise DataError(f"a message at {where}", f"{entry!r:.80}", "give reasoning and the name of a tool as text")
    calls = tuple(_call(call, f"{where}, tool_calls[{n}]") for n, call in enumerate(entry.get("tool_calls") or ()))
    return replace(message, tool_calls=calls, reasoning=reasoning, name=name, call=call)


def with_calls(messages: Sequence[Message], entries: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages of these entries, of which each result of a tool has the number of the call with its id."""
    numbered: list[Message] = []
    ids: list[Any] = []
    for message, entry in zip(messages, entries, strict=True):
        if message.role == "assistant":
            ids = [call.get("id") for call in entry.get("tool_calls") or ()]
        answered_id = entry.get("tool_call_id")
        numbered.append(
            replace(message, call=ids.index(answered_id)) if answered_id is not None and answered_id in ids else message
        )
    return tuple(numbered)


def _call(call: object, where: str) -> ToolCall:
    """A call as OpenAI's clients send it, or its function alone. The arguments are a mapping, or one as JSON text."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, 0)
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        value, text = None, ""
    if not isinstance(name, str) or not name or not isinstance(value, Mapping):
        do = "give {function: {name, arguments}}, the arguments a mapping of JSON values"
        raise DataError(f"a call of a tool at {where}", f"{call!r:.80}", do)
    return ToolCall(name, text)
