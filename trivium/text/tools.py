"""Tools in a conversation: describes them to the policy and reads its calls from completions.

A conversation with tools begins with a message of role `tools`, whose content is the JSON list that OpenAI's clients
send. The renderer gives that list to the chat template, or describes it in the system message if the template does not
support tools. Calls are read in the two notations that most open models are trained on: `<tool_call>` blocks of JSON
(Hermes, Qwen), and a completion that is one JSON object with `name` and `parameters` (Llama).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from trivium.errors import DataError
from trivium.types import Message

TOOLS = "tools"
"""The role of the message that holds the tools."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ToolCall(NamedTuple):
    """A call of a tool by the policy."""

    name: str
    arguments: str
    """A JSON object, as text."""


def split_tools(messages: Sequence[Message]) -> tuple[list[Any], Sequence[Message]]:
    """(tools, the other messages) of a conversation. Raises DataError if the tools are not a JSON list."""
    if not messages or messages[0].role != TOOLS:
        return [], messages
    try:
        tools = json.loads(messages[0].content)
    except ValueError:
        tools = None
    if not isinstance(tools, list):
        raise DataError(
            f"tools in the message of role {TOOLS!r}", f"{messages[0].content!r:.80}", "write a JSON list of tools"
        )
    return tools, messages[1:]


def described(tools: Sequence[object], messages: Sequence[Message]) -> list[Message]:
    """The conversation with the tools described in its system message."""
    text = _DESCRIPTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}", messages[0].media), *messages[1:]]
    return [Message("system", text), *messages]


def read_tool_calls(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """(text before the calls, calls) of a completion. If any part is not a valid call of one of these tools, the whole
    completion is text."""
    content, *blocks = text.split(_OPEN)
    if blocks:
        parts = [block.partition(_CLOSE) for block in blocks]
        calls = [None if not closed or rest.strip() else _call(body, names) for body, closed, rest in parts]
    else:
        content, calls = "", [_call(text, names)]
    complete = tuple(call for call in calls if call is not None)
    return (content.strip(), complete) if len(complete) == len(calls) else (text, ())


def write_tool_calls(content: str, calls: Sequence[ToolCall]) -> str:
    """A completion with these calls, for a history that the policy did not write."""
    blocks = [f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {args}}}\n{_CLOSE}' for name, args in calls]
    return "\n".join([content, *blocks] if content else blocks)


def _call(text: str, names: Collection[str]) -> ToolCall | None:
    """Parses a call from JSON text. Returns None if it is not a call."""
    if not names or (normalized := json_object(text)) is None:
        return None
    call = json.loads(normalized)
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments))


def json_object(text: str) -> str | None:
    """A JSON object as `json.dumps` writes it; None for any other text."""
    try:
        value = json.loads(text)
        return json.dumps(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None
