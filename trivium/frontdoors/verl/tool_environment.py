"""Rollouts with verl's tools and interactions, as an environment of the workflow `multi_turn`."""

from __future__ import annotations

import inspect
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from trivium.foundation.concurrency import Threads
from trivium.foundation.errors import ConfigError, DataError, text_of
from trivium.frontdoors.keywords import accepts
from trivium.frontdoors.verl.objects.tool_classes import load_functions, load_interactions, load_tools
from trivium.processes.user_calls import UserCall
from trivium.text.tools import TOOLS, ToolCall, read_tool_calls
from trivium.types import Message, Task

_log = logging.getLogger("trivium")
_threads = Threads(32, "a tool")


class ToolEnvironment:
    """Executes the tool calls of each completion, or lets an interaction answer a completion without calls.

    The rollout ends with a completion that neither calls a tool nor is answered, and at the limits of turns. A tool's
    error is its response. Each tool has one instance in a rollout, created by its first call.

    The rewards of tools and interactions are part of the trajectory's reward only with `tool_rewards`.
    """

    def __init__(
        self,
        tools: str | None = None,
        functions: str | None = None,
        interactions: str | None = None,
        *,
        max_assistant_turns: int | None = None,
        max_user_turns: int | None = None,
        max_parallel_calls: int = 1,
        max_tool_response_length: int = 256,
        tool_response_truncate_side: Literal["left", "middle", "right"] = "middle",
        tool_rewards: bool = False,
    ) -> None:
        self._tools = (load_tools(tools) if tools else {}) | (load_functions(functions) if functions else {})
        self._interactions = load_interactions(interactions) if interactions else {}
        self._max_assistant_turns, self._max_user_turns = max_assistant_turns, max_user_turns
        self._max_calls, self._longest = max_parallel_calls, max_tool_response_length
        self._side, self._tool_rewards = tool_response_truncate_side, tool_rewards
        self._assistant_turns = self._user_turns = 0
        self._instances: dict[str, str] = {}
        self._interaction: Any = None
        self._id = str(uuid.uuid4())
        self._messages: list[Message] = []
        self._kwargs: Mapping[str, Mapping[str, Any]] = {}
        self._interaction_kwargs: dict[str, Any] = {}

    async def reset(self, task: Task) -> Sequence[Message]:
        """Returns the task's messages, after the descriptions of the tools."""
        extra = task.columns.get("extra_info")
        extra = extra if isinstance(extra, Mapping) else {}
        self._kwargs = extra.get("tools_kwargs") or {}
        self._messages = list(task.prompt)
        if self._interactions:
            self._interaction_kwargs = dict(extra.get("interaction_kwargs") or {})
            self._interaction = self._chosen(self._interaction_kwargs.pop("name", None), task)
            await _called(self._interaction.start_interaction, self._id, **self._interaction_kwargs)
        if not self._tools:
            return self._messages
        return [Message(TOOLS, json.dumps([_described(tool) for tool in self._tools.values()])), *self._messages]

    async def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Returns (responses of the tools or answer of the interaction, reward, whether the rollout has ended)."""
        self._assistant_turns += 1
        self._messages.append(Message("assistant", completion))
        over = self._reached(self._assistant_turns, self._max_assistant_turns)
        over = over or self._reached(self._user_turns, self._max_user_turns)
        _, calls = read_tool_calls(completion, self._tools.keys())
        if over or not (calls or self._interaction is not None):
            return (), await self._final_reward(), True
        self._user_turns += 1
        if not calls:
            return await self._answer()
        results = [await self._execute(call) for call in calls[: self._max_calls]]
        messages = [Message("tool", self._cut(text)) for text, _ in results]
        self._messages += messages
        return messages, sum(reward for _, reward in results) if self._tool_rewards else 0.0, False

    async def close(self) -> None:
        """Releases the tools, and ends the interaction."""
        for name, instance in self._instances.items():
            await _called(self._tools[name].release, instance, **self._kwargs_of(name, "release_kwargs"))
        if self._interaction is not None:
            await _called(self._interaction.finalize_interaction, self._id)

    # ------------------------------------------------------------------ tools

    async def _execute(self, call: ToolCall) -> tuple[str, float]:
        """Returns (response, reward) of a call. A tool's exception is its response, as in verl. Raises ConfigError for
        a response with images or videos."""
        outcome: Any = await UserCall(self._run, _threads, label=f"the tool {call.name}")(call=call)
        if isinstance(outcome, BaseException):
            _log.warning("the tool %s raised %s: %s", call.name, type(outcome).__name__, text_of(outcome))
            return f"Error when executing tool: {text_of(outcome)}", 0.0
        response, reward = outcome
        return _text(response, call.name), reward

    async def _run(self, *, call: ToolCall) -> tuple[Any, float]:
        """Executes a call. Returns (the tool's response, reward)."""
        tool, parameters = self._tools[call.name], json.loads(call.arguments)
        if call.name not in self._instances:
            arguments = self._kwargs_of(call.name, "create_kwargs")
            if accepts(tool.create, "create_kwargs"):
                arguments = {**arguments, "create_kwargs": arguments}
            created = await _called(tool.create, str(uuid.uuid4()), **arguments)
            self._instances[call.name] = created[0] if isinstance(created, tuple) else created
        arguments = self._kwargs_of(call.name, "execute_kwargs")
        result = await _called(tool.execute, self._instances[call.name], parameters, **arguments)
        response, reward = result[:2] if isinstance(result, tuple) else (result, 0.0)
        return response, float(reward or 0.0)

    async def _final_reward(self) -> float:
        """Returns the sum of the tools' rewards at the end of the rollout."""
        if not self._tool_rewards:
            return 0.0
        rewards = [
            await _called(self._tools[name].calc_reward, instance, **self._kwargs_of(name, "calc_reward_kwargs"))
            for name, instance in self._instances.items()
        ]
        return float(sum(rewards))

    def _kwargs_of(self, tool: str, method: str) -> dict[str, Any]:
        """Returns the arguments that the row has for a method of a tool."""
        return dict((self._kwargs.get(tool) or {}).get(method) or {})

    def _cut(self, text: str) -> str:
        """Returns a response of at most the largest length, in characters, and a mark where it is cut."""
        if len(text) <= self._longest:
            return text
        # verl's names of the sides are those of the part that stays.
        half = self._longest // 2
        return {
            "left": f"{text[: self._longest]}...(truncated)",
            "right": f"(truncated)...{text[len(text) - self._longest :]}",
            "middle": f"{text[:half]}...(truncated)...{text[len(text) - half :]}",
        }[self._side]

    # ------------------------------------------------------------------ interactions

    def _chosen(self, name: str | None, task: Task) -> Any:
        """Returns the interaction of a task: by the name in its row, or the only one."""
        if name is None and len(self._interactions) == 1:
            return next(iter(self._interactions.values()))
        if name not in self._interactions:
            raise DataError(
                f"the interaction of task {task.task_id!r}",
                f"extra_info.interaction_kwargs.name is {name!r}",
                f"use one of {', '.join(self._interactions)}",
            )
        return self._interactions[name]

    async def _answer(self) -> tuple[Sequence[Message], float, bool]:
        history = [{"role": message.role, "content": message.content} for message in self._messages]
        answered = await _called(self._interaction.generate_response, self._id, history, **self._interaction_kwargs)
        ends, answer, score, _ = answered
        reward = float(score or 0.0) if self._tool_rewards else 0.0
        if ends:
            return (), reward + await self._final_reward(), True
        messages = [Message("user", str(answer))]
        self._messages += messages
        return messages, reward, False

    @staticmethod
    def _reached(turns: int, limit: int | None) -> bool:
        return limit is not None and turns >= limit


async def _called(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a plain or `async` method."""
    result = method(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _described(tool: Any) -> dict[str, Any]:
    """Returns the description of a tool for the policy."""
    schema = getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
    return schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else dict(schema)


def _text(response: Any, tool: str) -> str:
    """Returns the text of a tool's response. Raises ConfigError for images and videos."""
    if isinstance(response, str):
        return response
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise ConfigError(f"the response of the tool {tool}", "it has images or videos", "return text")
    return str(getattr(response, "text", None) or "")
