"""A buffer over expert data, which yields the rows of a taskset as groups."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trivium.buffers.read_only import ReadOnlyBuffer
from trivium.buffers.row_cuts import cut_turns
from trivium.config import BufferConfig, RunConfig
from trivium.foundation.errors import ConfigError, DataError, Problem
from trivium.protocols import Renderer
from trivium.schedule import Assignment, Schedule
from trivium.text.messages import with_parts
from trivium.text.tools import TOOLS
from trivium.types import EXPERT_VERSION, IMAGE, Group, Media, Message, StopReason, Task, Trajectory, Turn

_COLUMNS = {1: ("completion",), 2: ("chosen", "rejected")}
"""Group size -> the options that name the columns of its completions."""


class FileBuffer(ReadOnlyBuffer):
    """Yields the completions of the rows in schedule order. No explorer fills it.

    With `schedule.group_size` 1 a row has an expert's completion. With 2 it has a pair: the preferred completion is the
    group's member 0 (reward 1), the other one its member 1 (reward 0).
    """

    class Config(BufferConfig):
        kind: str = "files"
        completion: str = "completion"
        """The column of the expert's completion (`schedule.group_size` 1)."""
        chosen: str = "chosen"
        """The column of the preferred completion of a pair (`schedule.group_size` 2): text, or a conversation that
        continues the prompt, or repeats it, and ends with the completion."""
        rejected: str = "rejected"
        """The column of the rejected completion."""
        turns: Literal["last", "all"] = "last"
        """The turns of the assistant in a conversation that are learned from: the completion alone, or `all` of them,
        those in the prompt included (`schedule.group_size` 1)."""
        tools: str = "tools"
        """The column of the tools that the chat template describes to the policy: a list as OpenAI's clients send it,
        or its JSON text. Rows without it have none."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            size = run.schedule.group_size
            for name, tasks in run.tasks.items():
                columns: Sequence[str] = getattr(tasks, "conversations", ())
                if columns and not (size == 2 and getattr(run.algorithm, "scores_sequences", False)):
                    yield Problem(
                        f"tasks.{name}.conversations",
                        f"conversations of their own in {', '.join(columns)}",
                        f"the algorithm {run.algorithm.kind!r} learns from completions of one prompt"
                        if size == 2
                        else f"schedule.group_size is {size}: a row holds one completion",
                        "use algorithm.kind reward_model with groups of 2, or leave the key out",
                    )
            if self.turns == "all" and size != 1:
                found = f"schedule.group_size is {size}: the sides of a pair differ in their completions"
                yield Problem(f"{where}.turns", "losses over all turns", found, "leave the key out")
            columns_read = _COLUMNS.get(size, ())
            for name in ("completion", "chosen", "rejected"):
                if (
                    columns_read
                    and name not in columns_read
                    and getattr(self, name) != type(self).model_fields[name].default
                ):
                    yield Problem(
                        f"{where}.{name}",
                        f"the column of {name}",
                        f"schedule.group_size is {size}, so a row is read as {' and '.join(columns_read)}",
                        "leave the key out, or change schedule.group_size",
                    )

    def __init__(
        self,
        config: Config,
        *,
        schedule: Schedule,
        rollouts: Path,
        renderer: Renderer,
        deadline_s: float,
        name: str = "",
    ) -> None:
        del rollouts, deadline_s, name  # nothing is generated, and nothing is waited for
        if schedule.group_size not in _COLUMNS:
            raise ConfigError(
                f"groups of {schedule.group_size} from files",
                "a row has one expert completion, or a pair",
                "set schedule.group_size to 1 or 2",
            )
        self.config, self.schedule, self._renderer = config, schedule, renderer

    async def take(self, count: int, version: int) -> list[Group]:
        first = (version - self.schedule.first_version) * self.schedule.fresh_per_step
        return [self.group_of(self.schedule.at(slot)) for slot in range(first, first + count)]

    def group_of(self, assignment: Assignment) -> Group:
        """The group of an assigned row."""
        sides = [self._turns(assignment.task, option) for option in _COLUMNS[self.schedule.group_size]]
        if (cuts := getattr(self.schedule.tasks, "cuts", None)) is not None:
            turns = [turn for side in sides for turn in side]
            remaining = iter(cut_turns(turns, *cuts) or turns)
            sides = [tuple(islice(remaining, len(side))) for side in sides]
        rewards = [{}] if len(sides) == 1 else [{"preferred": 1.0}, {"preferred": 0.0}]
        members = tuple(Trajectory(i, turns, rewards[i]) for i, turns in enumerate(sides))
        return Group(assignment.slot, assignment.task, members, assignment.epoch)

    def _turns(self, task: Task, option: str) -> tuple[Turn, ...]:
        column = getattr(self.config, option)
        if (conversation := conversation_of(task.columns.get(column))) is not None:
            return self._rendered(*conversation)
        completion = _completion(task, task.columns.get(column))
        if completion is None:
            raise DataError(
                f"the {option} completion of task {task.task_id!r}",
                f"column {column!r} is {task.columns.get(column)!r:.80}; the columns are {sorted(task.columns)}",
                f"name the column of the completion with buffer.{option}: text, or messages that continue the prompt "
                "and end with the assistant's",
            )
        return self._rendered([*_tools(task, self.config.tools), *task.prompt], completion)

    def _rendered(self, messages: Sequence[Message], completion: Message) -> tuple[Turn, ...]:
        if self.config.turns == "all":
            rendered = self._renderer.supervised([*messages, completion])
        else:
            rendered = [self._renderer.expert(messages, completion)]
        return tuple(
            Turn(
                prompt.tokens,
                tokens,
                np.zeros(len(tokens), np.float32),
                np.full(len(tokens), EXPERT_VERSION, np.int32),
                StopReason.EOS,
                completion.content if number == len(rendered) else self._renderer.decode(tokens),
                prompt.media,
            )
            for number, (prompt, tokens) in enumerate(rendered, 1)
            if len(tokens)
        )

    async def state(self) -> dict[str, Any]:
        """Empty: the number of a step determines its rows."""
        return {}

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None: ...

    async def refuse(self, count: int) -> None:
        raise DataError(
            f"{count} refused group(s) replaced", "this buffer is filled from files", "set algorithm.refill to 0"
        )

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        return [self.group_of(self.schedule.at(slot)) for slot in slots]


def is_conversation(value: Any) -> bool:
    """Whether a column of a task holds a separate conversation (`tasks.*.conversations`)."""
    return isinstance(value, dict) and value.keys() == {"conversation"}


def conversation_of(value: Any) -> tuple[list[Message], Message] | None:
    """(messages, completion to score) of a column of `conversations`. Returns None for another column.

    The completion is the last message if that is text from the assistant, and empty otherwise.
    """
    if not is_conversation(value):
        return None
    messages = [
        Message.of(entry, tuple(Media(mime, b64decode(data)) for mime, data in entry["images"]))
        for entry in value["conversation"]
    ]
    if messages[-1].role == "assistant" and not messages[-1].media and len(messages) > 1:
        return messages[:-1], messages[-1]
    return messages, Message("assistant", "")


def _completion(task: Task, value: object) -> Message | None:
    """The completion in a column: text, or the last message of a conversation that continues the prompt or repeats its
    end; None for anything else."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return Message("assistant", value) if isinstance(value, str) else None
    before = [(entry.get("role"), _text(entry.get("content") or "", IMAGE)) for entry in value[:-1]]
    prompt = [(message.role, message.content) for message in task.prompt]
    if not value or value[-1].get("role") != "assistant" or before != prompt[len(prompt) - len(before) :]:
        return None
    last, where = value[-1], f"the completion of task {task.task_id!r}"
    content = _text("" if last.get("content") is None and last.get("tool_calls") else last.get("content"))
    return None if content is None else with_parts(Message("assistant", content), last, where)


def _text(content: object, image: str | None = None) -> str | None:
    """The text of a message's content (text, or a list of parts). `image` replaces each part that is not text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts: list[str] = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else image
        if not isinstance(part, dict) or not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def _tools(task: Task, column: str) -> list[Message]:
    """The message with the tools in a column of a task; empty without the column, or if the prompt brings its own."""
    value = task.columns.get(column)
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    described = isinstance(tools, list) and bool(tools) and all(isinstance(tool, dict) for tool in tools)
    return [Message(TOOLS, json.dumps(tools))] if described and task.prompt[0].role != TOOLS else []
