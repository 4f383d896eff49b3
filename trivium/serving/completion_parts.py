"""The parts of a completion that the protocols of agents distinguish: reasoning, text and calls of tools.

Agents send earlier completions back as these parts. The server restores the policy's own text from the id that one of
the parts carries, if the agent has not changed the parts. Otherwise it writes a new text from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from trivium.text.tools import ToolCall, read_tool_calls, write_tool_calls

TextOf = Callable[[str], str | None]
"""Returns the text of a completion by its id, or None if the id is unknown."""

_PREFIX = "chatcmpl-"
_OPEN = "<think>"
REASONING_END = "</think>"


class Answer(NamedTuple):
    """The parts of a completion."""

    reasoning: str | None
    """The text of its `<think>` block; None without one."""
    content: str
    calls: tuple[ToolCall, ...]


def answer_of(text: str, names: Collection[str], *, reasoning: bool = True) -> Answer:
    """Splits the text of a completion that may call the tools `names`. With `reasoning=False`, a `<think>` block is a
    part of the content.

    A `<think>` block must begin the text. A chat template may have opened it in the prompt, so the opening tag is
    optional.
    """
    thought: str | None = None
    before, closed, after = text.partition(REASONING_END)
    if reasoning and closed and (_OPEN not in before or before.strip().startswith(_OPEN)):
        thought, text = before.strip().removeprefix(_OPEN).strip(), after.strip()
    return Answer(thought, *(read_tool_calls(text, names) if names else (text, ())))


def written(answer: Answer, ids: Collection[str], text_of: TextOf, *, reasoning: bool = True) -> str:
    """The text of a completion from its parts: the policy's own text, if one of the completions `ids` has these parts.

    `reasoning` is the same as when the parts were split.
    """
    names = {call.name for call in answer.calls}
    for completion in ids:
        text = text_of(completion)
        if text is not None and answer_of(text, names, reasoning=reasoning) == answer:
            return text
    thought = f"{_OPEN}\n{answer.reasoning}\n{REASONING_END}\n\n" if answer.reasoning is not None else ""
    return thought + (write_tool_calls(answer.content, answer.calls) if answer.calls else answer.content)


def edit_of(text: str, sent: str, names: Collection[str]) -> str:
    """What an agent changed in a completion before it sent it back, and the usual cause."""
    had, has = answer_of(text, names), answer_of(sent, names)
    if (
        had.reasoning is not None
        and has.reasoning is None
        and had.content.split() == has.content.split()
        and had.calls == has.calls
    ):
        return "its reasoning is gone; agents that strip <think> blocks do this"
    if text.split() == sent.split():
        return "its white space is another; agents that strip texts do this"
    if had.calls and had.calls == has.calls:
        return "its calls of tools are written in another way; agents that drop the ids of calls do this"
    return "its text is another; agents that repair, cut or translate completions do this"


def completion_id(part: str) -> str:
    """The id of the completion that a part with this id (`part_id`) belongs to. An id of a completion is unchanged."""
    return _PREFIX + part.removeprefix(_PREFIX).rpartition("_")[2].partition("-")[0]


def part_id(kind: str, completion: str, number: int | None = None) -> str:
    """The id of a part of a completion, for example `call_<completion>-0`."""
    return f"{kind}_{completion.removeprefix(_PREFIX)}" + ("" if number is None else f"-{number}")
