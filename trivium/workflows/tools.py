"""Tools in a conversation: an environment that executes the calls of each completion, over any set of tools.

A set of tools (`Toolbox`) is a list of functions, or a server. The environment ends with a completion that calls no
tool. It gives no rewards unless its toolbox does: reward functions score the last completion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from trivium.foundation.concurrency import gather_or_cancel
from trivium.foundation.errors import DataError, text_of
from trivium.foundation.registry import suggest
from trivium.policy import Policy
from trivium.text.tool_formats import REASONING_TAIL
from trivium.text.tools import TOOLS, ToolCall, attempted_calls
from trivium.types import Message, Task
from trivium.workflows.episodes import EpisodeConfig

COLUMN = "tools"
"""The column of a row that chooses among the tools, by their names."""


class Tool(NamedTuple):
    """The description of a tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""

    @property
    def described(self) -> dict[str, Any]:
        """The description as OpenAI's clients send it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolError(Exception):
    """An error whose text is the result of the call for the policy. All other errors fail the rollout."""


class ToolConfig(EpisodeConfig):
    """Base of the sections of workflows with tools."""

    max_calls: int = Field(default=8, ge=1)
    """Calls of tools in a trajectory, with those that cannot be read. Further ones get an error, and the completion
    after that is the last."""
    max_result_chars: int = Field(default=8000, ge=1)
    """Length of a result for the policy. A longer one is cut, with a mark."""


class Toolbox(Protocol):
    """The tools of one trajectory."""

    async def open(self, task: Task) -> Sequence[Tool]:
        """Connects, if necessary, and describes the tools."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call as text. Raises ToolError for an error that the policy should see."""
        ...

    async def reward(self) -> float | None:
        """The reward of the trajectory, after its last completion; None if the toolbox gives none."""
        ...

    async def close(self) -> None:
        """Ends the connection."""
        ...


class ToolEnvironment:
    """Offers the tools of a toolbox, executes the calls of each completion concurrently, and answers with the results.

    A call that cannot be read, or of an unknown tool, gets an error as its result.

    `max_calls` bounds the calls of a trajectory: further calls get an error, and the completion after that is the last.
    `max_result` bounds the text of a result, in characters.
    """

    def __init__(self, toolbox: Toolbox, max_calls: int, max_result: int, policy: Policy) -> None:
        """`policy` writes the completions. If it has no format, calls of any family that Trivium knows count."""
        self._toolbox, self._max_calls, self._max_result = toolbox, max_calls, max_result
        self._policy = policy
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._num_calls = self._num_errors = 0

    async def reset(self, task: Task) -> Sequence[Message]:
        """The task's messages, after the descriptions of its tools. Raises DataError if the policy writes calls in a
        notation that Trivium does not read."""
        if task.prompt[0].role == TOOLS:
            raise DataError(
                f"the tools of task {task.task_id!r} from the workflow",
                "its prompt brings tools of its own",
                f"choose among the workflow's tools by a column {COLUMN!r} with their names",
            )
        tools = chosen(await self._toolbox.open(task), task)
        self._schemas = {tool.name: tool.parameters for tool in tools}
        if not tools:
            return task.prompt
        if self._policy.tool_format is not None:
            self._policy.tool_format.check()
        return [Message(TOOLS, json.dumps([tool.described for tool in tools])), *task.prompt]

    async def step(self, completion: str) -> tuple[Sequence[Message], float | None, bool]:
        """The results of the calls, in order. A completion that begins no call ends the trajectory."""
        prompt_end = self._policy.prompt_end(REASONING_TAIL)
        calls, fault = attempted_calls(completion, self._schemas, self._policy.tool_format, prompt_end)
        remaining_calls = self._max_calls - self._num_calls
        if not (calls or fault) or remaining_calls <= 0:
            return (), None, True
        self._num_calls += len(calls) or 1
        if fault:
            self._num_errors += 1
            text = f"error: the call cannot be read: {fault}. {self._known}"
            return [Message("tool", self._cut(text))], None, False
        results = await gather_or_cancel(
            self._result(call, number < remaining_calls) for number, call in enumerate(calls)
        )
        named = zip(calls, results, strict=True)
        return [Message("tool", result, name=call.name) for call, result in named], None, False

    async def finish(self) -> tuple[float | None, Mapping[str, float]]:
        """The reward of the toolbox, and the numbers of calls and of errors."""
        metrics = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return await self._toolbox.reward(), metrics

    async def close(self) -> None:
        await self._toolbox.close()

    @property
    def _known(self) -> str:
        return f"The tools are: {', '.join(self._schemas)}"

    async def _result(self, call: ToolCall, allowed: bool) -> str:
        """The result of a call, or the text of its error."""
        try:
            if call.name not in self._schemas:
                raise ToolError(f"no tool {call.name!r}. {self._known}")
            if not allowed:
                raise ToolError(f"the limit of {self._max_calls} calls is reached")
            text = await self._toolbox.call(call.name, json.loads(call.arguments))
        except ToolError as error:
            self._num_errors += 1
            text = f"error: {text_of(error)}"
        return self._cut(text)

    def _cut(self, text: str) -> str:
        left_out = len(text) - self._max_result
        return text if left_out <= 0 else f"{text[: self._max_result]}... ({left_out} more characters)"


def chosen(tools: Sequence[Tool], task: Task) -> Sequence[Tool]:
    """The tools of a task, in the order of the toolbox. Raises DataError for an unknown name in its column."""
    names = task.columns.get(COLUMN)
    if names is None:
        return tools
    tool_names = [tool.name for tool in tools]
    asked = f"the column {COLUMN!r} of task {task.task_id!r}"
    if not isinstance(names, list):
        raise DataError(asked, f"{names!r:.80}", f"give a list of names: {', '.join(tool_names)}")
    if unknown := [name for name in names if name not in tool_names]:
        raise DataError(asked, f"no tool {unknown[0]!r}", suggest(str(unknown[0]), tool_names))
    return [tool for tool in tools if tool.name in names]
