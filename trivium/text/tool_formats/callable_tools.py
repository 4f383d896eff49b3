"""The tools of a completion."""

from __future__ import annotations

from dataclasses import dataclass

from trivium.text.tool_formats.base import Calls, ToolFormat, without_partial
from trivium.text.tool_formats.json_calls import HERMES


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that a completion may call, and how it writes that."""

    names: frozenset[str] = frozenset()
    format: ToolFormat = HERMES

    def __post_init__(self) -> None:
        """Raises DataError for tools whose calls cannot be read."""
        if self.names:
            self.format.check()

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
        tool_format = self.format
        if tool_format.answered:
            content = text.rstrip().removesuffix(tool_format.answered)
            open_ended = without_partial(content, [tool_format.answered])
            text = text if open_ended == text.rstrip() else open_ended
        start = text.lstrip()
        if not self.names:
            return text
        begins = (
            beginning.startswith(mark[: len(beginning)]) for beginning in (text, start) for mark in tool_format.starts
        )
        if not start or any(begins):
            return ""
        ends = [at for mark in tool_format.marks if (at := text.find(mark)) >= 0]
        return (text[: min(ends)] if ends else without_partial(text, tool_format.marks)).rstrip()
