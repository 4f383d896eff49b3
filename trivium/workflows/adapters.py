"""What environments of other libraries share: observations become messages, and completions become actions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import Field

from trivium.config import PluginPath, RunConfig, free
from trivium.foundation.errors import ConfigError, DataError, Problem, TriviumError, described, text_of
from trivium.foundation.registry import resolve
from trivium.types import Message, Task
from trivium.workflows.episodes import EnvironmentFailure, TurnsConfig

T = TypeVar("T")
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
"""The first and the longest pause between two attempts to connect."""


class AdapterConfig(TurnsConfig):
    """Base of the sections of workflows with environments of other libraries."""

    observe: PluginPath | None = None
    """A function from an observation to text, a Message or a list of Messages. Unset: text as it is, else JSON."""
    act: PluginPath | None = None
    """A function from a completion to an action. If it raises ValueError, the policy reads the text of the error, and
    the environment makes no step."""
    invalid_reward: float = Field(default=0.0, allow_inf_nan=False)
    """The reward of a completion that is no action."""
    call_deadline_s: float | None = free(60.0, gt=0)
    """How long a step may take. A rollout with a slower one fails."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        for key in ("observe", "act"):
            try:
                user_function(getattr(self, key))
            except TriviumError as error:
                yield Problem(f"{where}.{key}", error.asked, error.found, error.do)


class Translation:
    """The messages of observations and the actions of completions of one workflow."""

    def __init__(self, config: AdapterConfig, act: Callable[[str], Any] | None = None) -> None:
        """`act` reads actions if the config names no function."""
        self._observe = user_function(config.observe) or observed_text
        self._act = user_function(config.act) or act
        self._invalid_reward = config.invalid_reward

    def messages(self, observation: object) -> tuple[Message, ...]:
        """The messages of an observation. Empty text is no message."""
        content = self._observe(observation)
        if isinstance(content, str):
            return (Message("user", content),) if content else ()
        return (content,) if isinstance(content, Message) else tuple(cast("Sequence[Message]", content))

    def first(self, task: Task, observation: object) -> tuple[Message, ...]:
        """The task's messages followed by the first observation."""
        return continued(task.prompt, self.messages(observation))

    def action(self, completion: str, act: Callable[[str], Any] | None = None) -> Any:
        """The action of a completion. Raises ValueError if it is no action."""
        function = self._act or act
        assert function is not None
        return function(completion)

    def invalid(self, error: ValueError) -> tuple[tuple[Message, ...], float, bool]:
        """The step of a completion that is no action."""
        return (Message("user", f"error: {text_of(error)}"),), self._invalid_reward, False


def continued(prompt: Sequence[Message], further: Sequence[Message]) -> tuple[Message, ...]:
    """The prompt followed by further messages. Two texts of one role become one message."""
    if not further or not prompt:
        return (*prompt, *further)
    last, new = prompt[-1], further[0]
    if last.role != new.role or last.media or new.media:
        return (*prompt, *further)
    return (*prompt[:-1], Message(last.role, f"{last.content}\n\n{new.content}"), *further[1:])


def user_function(path: str | None) -> Callable[[Any], Any] | None:
    """The function that a config names. Raises ConfigError for anything else."""
    if path is None:
        return None
    function = resolve("functions", path)
    if not callable(function):
        raise ConfigError(f"the function {path}", f"{function!r:.80}", "name a function of one argument")
    return function


def observed_text(observation: object) -> str:
    """Text as it is, also if it is the only value of a mapping; any other observation as JSON."""
    if isinstance(observation, Mapping):
        texts = [value for value in cast("Mapping[str, object]", observation).values() if value is not None]
        if len(texts) == 1 and isinstance(texts[0], str):
            return texts[0]
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    """Arrays and numbers of numpy as Python's own, other values as text."""
    tolist = getattr(value, "tolist", None)
    return str(value) if tolist is None else tolist()


def seed_of(task: Task) -> int:
    """The column `seed`, or a number that follows from the id of the task. Raises DataError for another value."""
    value = task.columns.get("seed")
    if value is None:
        return int.from_bytes(hashlib.blake2b(task.task_id.encode(), digest_size=4).digest(), "big")
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        return int(value)
    raise DataError(f"the column 'seed' of task {task.task_id!r}", described(value), "give a whole number")


def mapping_of(task: Task, column: str) -> Mapping[str, Any] | None:
    """The mapping in a column, None without one. Raises DataError for another value."""
    value = task.columns.get(column)
    if value is None or isinstance(value, Mapping):
        return cast("Mapping[str, Any] | None", value)
    raise DataError(f"the column {column!r} of task {task.task_id!r}", described(value), "give a mapping")


async def connected(
    what: str,
    connect: Callable[[], Awaitable[T]],
    refused: tuple[type[Exception], ...],
    seconds: float,
) -> T:
    """The result of `connect`, which is called again while it raises one of `refused`: its server may be starting, or
    has too many sessions.

    Raises EnvironmentFailure with the last error after `seconds`.
    """
    until, pause = time.monotonic() + seconds, _PAUSE_S
    while True:
        try:
            return await connect()
        except refused as error:
            if time.monotonic() + pause >= until:
                found = f"{type(error).__name__}: {text_of(error)}"
                do = "start the server, correct its address, or raise workflow.connect_deadline_s"
                raise EnvironmentFailure(f"a connection to {what} within {seconds:g} s", found, do) from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
