"""The parts of a completion that the protocols of agents distinguish: reasoning, text and calls of tools.

Agents send earlier completions back as these parts. The server restores the policy's own text from the id that one of
the parts carries, if the agent has not changed the parts. Otherwise it writes a new text from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from trivium.protocols import Renderer
from trivium.text.tool_formats import REASONING_TAIL, CallableTools, ToolCall, ToolFormat, without_partial
from trivium.types import IntArray

_PREFIX = "chatcmpl-"
"""Begins the id of a completion, as OpenAI's do. The ids of its parts have a prefix of their own in its place."""


class Written(NamedTuple):
    """A completion as its client knows it."""

    text: str
    opened: bool
    """Whether its prompt ends with the beginning of a reasoning block."""


class Recorded(NamedTuple):
    """The completions that a request may refer to."""

    text_of: Callable[[str], Written | None]
    """Returns a completion by its id, or None if the id is unknown."""
    format: ToolFormat
    """How the policy writes calls of tools."""


class Answer(NamedTuple):
    """The parts of a completion."""

    reasoning: str | None
    """The text of its `<think>` block; None without one."""
    content: str
    calls: tuple[ToolCall, ...] = ()


def opens_reasoning(renderer: Renderer, tools: CallableTools, prompt: IntArray) -> bool:
    """Whether a prompt ends with the beginning of a reasoning block, as some chat templates write it."""
    return tools.format.opens(renderer.decode(prompt[-REASONING_TAIL:]))


def answer_of(text: str, tools: CallableTools, *, reasoning: bool = True, opened: bool = False) -> Answer:
    """Splits the text of a completion that may call `tools`. With `reasoning=False`, a `<think>` block is a part of the
    content; reasoning in a channel of its own is left out. Nothing in the reasoning is a call.

    A reasoning block begins the text, or is `opened` by the prompt. A completion that ends in it has no content.
    """
    thought, rest = tools.format.split(text, opened=opened)
    if thought is not None and not _splits(tools.format, reasoning):
        content, calls = tools.read(rest)
        return Answer(None, text.removesuffix(rest) + content, calls)
    if thought is not None:
        thought, rest = thought.strip(), rest.strip()
    return Answer(thought if reasoning else None, *tools.read(rest))


def settled(
    text: str, tools: CallableTools, stop: Sequence[str], *, reasoning: bool = True, opened: bool = False
) -> Answer:
    """The parts that are certain while a completion has only this text: each begins the same part of its `answer_of`,
    however it continues up to a stop string."""
    tool_format = tools.format
    ends = [at for end in stop if (at := text.find(end)) >= 0]
    text = text[: min(ends)] if ends else without_partial(text, stop)
    start = text.lstrip()
    if _splits(tool_format, reasoning) and any(
        mark.startswith(start) for mark in (tool_format.reasoning[0], *tool_format.answers)
    ):
        return Answer(None, "")
    thought, rest = tool_format.split(text, opened=opened, incomplete=True)
    if thought is None:
        return Answer(None, tools.certain(rest))
    if not _splits(tool_format, reasoning):
        return Answer(None, text.removesuffix(rest) + tools.certain(rest))
    visible_thought = thought.strip() if reasoning else None
    if tool_format.reasoning[1] not in text:
        return Answer(without_partial(thought, [tool_format.reasoning[1]]).strip() if reasoning else None, "")
    rest = rest.lstrip()
    undecided = any(mark.startswith(rest) for mark in tool_format.answers)
    return Answer(visible_thought, "" if undecided else tools.certain(rest).rstrip())


def _splits(tool_format: ToolFormat, reasoning: bool) -> bool:
    """Whether the reasoning of a completion is no part of its content."""
    return reasoning or bool(tool_format.answers)


def written(answer: Answer, ids: Collection[str], recorded: Recorded, *, reasoning: bool = True) -> str:
    """The text of a completion from its parts: the policy's own text, if one of the completions `ids` has these parts.

    `reasoning` is the same as when the parts were split.
    """
    tools = CallableTools(frozenset(call.name for call in answer.calls), recorded.format)
    for completion in ids:
        original = recorded.text_of(completion)
        if original is None:
            continue
        if answer_of(original.text, tools, reasoning=reasoning, opened=original.opened) == answer:
            return original.text
    begin, end = tools.format.reasoning
    thought = f"{begin}\n{answer.reasoning}\n{end}\n\n" if answer.reasoning is not None else ""
    calls = [tools.format.write(answer.calls)] if answer.calls else []
    return thought + "\n".join([answer.content, *calls] if answer.content else calls)


def edit_of(original: Written, sent: str, tools: CallableTools) -> str:
    """What an agent changed in a completion before it sent it back, and the usual cause."""
    text = original.text
    before, after = answer_of(text, tools, opened=original.opened), answer_of(sent, tools)
    if (
        before.reasoning is not None
        and after.reasoning is None
        and before.content.split() == after.content.split()
        and before.calls == after.calls
    ):
        return "its reasoning is gone; agents that strip <think> blocks do this"
    if text.split() == sent.split():
        return "its white space is another; agents that strip texts do this"
    if before.calls and before.calls == after.calls:
        return "its calls of tools are written in another way; agents that drop the ids of calls do this"
    return "its text is another; agents that repair, cut or translate completions do this"


def completion_id(part: str) -> str:
    """The id of the completion that a part with this id (`part_id`) belongs to. An id of a completion is unchanged."""
    return _PREFIX + part.removeprefix(_PREFIX).rpartition("_")[2].partition("-")[0]


def part_id(kind: str, completion: str, number: int | None = None) -> str:
    """The id of a part of a completion, for example `call_<completion>-0`."""
    return f"{kind}_{completion.removeprefix(_PREFIX)}" + ("" if number is None else f"-{number}")
