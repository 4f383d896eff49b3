"""Tools in a conversation, and how they are described to the policy.

A conversation with tools begins with a message of role `tools`, whose content is the JSON list that OpenAI's clients
send. The renderer gives that list to the chat template, or describes it in the system message if the template does not
support tools. `trivium.text.tool_formats` reads the calls in completions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trivium.foundation.errors import DataError
from trivium.text.tool_formats import FORMATS, CallableTools, Schemas, ToolCall, ToolFormat, arguments_text
from trivium.types import Message

TOOLS = "tools"
"""The role of the message that holds the tools."""
_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{instructions}"""


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


def described(
    tools: Sequence[object], messages: Sequence[Message], instructions: str, default_system: str
) -> list[Message]:
    """The conversation with the tools, and how to call them, described in its system message, after its own text or
    that of the template (`default_system`)."""
    text = _DESCRIPTION.format(tools="\n".join(json.dumps(tool) for tool in tools), instructions=instructions)
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}", messages[0].media), *messages[1:]]
    return [Message("system", f"{default_system}\n\n{text}" if default_system else text), *messages]


def schemas_of(tools: Sequence[Any]) -> Schemas:
    """The schemas of the arguments of tools that are described as OpenAI's clients send them."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {
        function["name"]: function.get("parameters") or {}
        for function in functions
        if isinstance(function.get("name"), str)
    }


def read_tool_calls(
    text: str, tools: Collection[str] | Schemas, tool_format: ToolFormat | None = None, prompt_end: str = ""
) -> tuple[str, tuple[ToolCall, ...]]:
    """(text before the calls, calls) of a completion in this format; None: in that of any family that Trivium knows.

    `tools` are the names of the tools, or a mapping from them to the JSON schemas of their arguments: some families
    write no types, and a value is read by its schema then. Nothing in a reasoning block is a call. The block begins the
    completion, or is opened by the prompt, of which `prompt_end` is the text of the last `REASONING_TAIL` tokens. If
    any part after it is not a valid call of one of these tools, the whole completion is text.
    """
    for candidate in _typed(tools, tool_format):
        _, rest = candidate.split(text, opened=candidate.opens(prompt_end))
        content, calls = CallableTools(frozenset(tools), candidate).read(rest)
        if calls:
            return text.removesuffix(rest) + content, calls
    return text, ()


def attempted_calls(
    text: str, tools: Schemas, tool_format: ToolFormat | None = None, prompt_end: str = ""
) -> tuple[tuple[ToolCall, ...], str]:
    """(the calls of a completion, of tools of any name; what is wrong with its calls if they cannot be read). Both are
    empty for a completion that begins no call."""
    _, calls = read_tool_calls(text, tools, tool_format, prompt_end)
    if calls or not tools:
        return calls, ""
    formats = _typed(tools, tool_format)
    rests = [(candidate, candidate.split(text, opened=candidate.opens(prompt_end))[1]) for candidate in formats]
    started = [(candidate, rest) for candidate, rest in rests if candidate.begins(rest)]
    parsed = next((calls[1] for candidate, rest in started if (calls := candidate.read(rest)) is not None), ())
    return parsed, started[0][0].fault(started[0][1]) if started and not parsed else ""


def _typed(tools: Collection[str] | Schemas, tool_format: ToolFormat | None) -> list[ToolFormat]:
    formats = FORMATS if tool_format is None else (tool_format,)
    return [candidate.typed(tools) for candidate in formats] if isinstance(tools, Mapping) else [*formats]


def json_object(text: str) -> str | None:
    """The arguments of a call as `json.dumps` writes them; None for a text that is not such arguments."""
    try:
        return arguments_text(json.loads(text))
    except (ValueError, RecursionError):
        return None
