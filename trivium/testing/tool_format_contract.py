"""The contract of a format of calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.testing.promises import require
from trivium.text.tool_formats import CallableTools
from trivium.text.tools import ToolCall, json_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trivium.text.tool_formats import ToolFormat

_UNSENDABLE = ('{"x": 1e999}', '{"x": "\\ud800"}', '{"x": ' + "[" * 200 + "]" * 200 + "}", '{"x": NaN}')
"""Arguments that no response of a server can contain."""
TEXTS = ("", "Let me see.", "{", "[1, 2]", "f(x)", '{"name": 3}', "a {b} c", "```json\n{}\n```", "Zürich 🌍")


def check_tool_format(
    how: ToolFormat, calls: Sequence[ToolCall], *, content: str = "", texts: Sequence[str] = TEXTS
) -> None:
    """A format reads what it writes, and nothing else.

    `calls` are any calls: names of tools, and JSON objects as `json.dumps` writes them. `content` precedes them; it has
    no mark of the format and does not end in white space. `texts` are completions without calls. A test draws them from
    the space that it covers, for example with hypothesis.
    """
    tools = CallableTools(frozenset(call.name for call in calls) or frozenset({"f"}), how)
    written = how.write(calls)
    for before in dict.fromkeys(("", content)):
        text = before + written
        expected = before.rstrip(), tuple(calls)
        require(how.read(text) == expected, f"read(write(calls)) is the identity, not {how.read(text)!r} for {text!r}")
        require(tools.read(text) == expected, "calls of the tools that a completion may call are calls")
        other = CallableTools(frozenset({"another tool"}), how)
        require(other.read(text) == (text, ()), "a call of an unknown tool leaves the whole completion text")
        require(CallableTools(frozenset(), how).read(text) == (text, ()), "without tools, a completion is text")
        for size in range(len(text) + 1):
            certain = tools.certain(text[:size])
            require(
                before.startswith(certain), f"no part of a call is certain to be text, and {certain!r} is, of {text!r}"
            )
    for size in {1, len(written) // 2, len(written) - 1}:
        cut = how.read(written[:size])
        require(cut is None or len(cut[1]) < len(calls), f"a call that is cut is no call: {written[:size]!r}")
    after = how.read(f"{written} and more")
    require(after is None, "calls with text after them are text")
    for text in (how.write([ToolCall(name, arguments)]) for name in tools.names for arguments in _UNSENDABLE):
        sent = [call.arguments for call in tools.read(text)[1]]
        require(
            sent == [json_object(arguments) for arguments in sent], f"a response can contain any call: {text!r:.99}"
        )
    require(not any(map(how.begins, ("", content))), "a completion without a mark begins no call")
    require(how.begins(written), "a completion with calls begins one")
    for text in texts:
        require(tools.read(text) == (text, ()), f"text that is not a call stays text: {text!r}")
        for size in range(len(text) + 1):
            require(text.startswith(tools.certain(text[:size])), "what is certain begins the completion")
    for call in calls:
        require(
            json_object(call.arguments) == call.arguments, "check_tool_format is given arguments as json.dumps writes"
        )
