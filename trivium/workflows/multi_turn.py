"""Alternates policy and environment until the environment is done or `max_turns` is reached.

reset(task) -> messages -> completion -> step(completion) -> messages, reward, done -> completion -> ...
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from pydantic import Field

from trivium.concurrency import Threads
from trivium.config import PluginPath, RunConfig, WorkflowConfig, free
from trivium.errors import ConfigError, Problem, RolloutError, TriviumError, described, text_of
from trivium.policy import Policy, PromptTooLong, finite_number
from trivium.protocols import ClosedEnvironment, Environment
from trivium.registry import resolve
from trivium.types import Message, Task


class EnvironmentFailure(RolloutError):
    """An environment raised, or returned something that is not a step."""


class MultiTurn:
    """Drives a fresh environment for each trajectory; the reward is the sum over its steps.

    Each turn is credited with the reward of its step and with the state before it: two turns have the same state if
    the environment's latest messages were the same.

    Methods of the environment that are not `async` run in threads of their own, so a slow one holds up neither the
    other rollouts nor the models. A deadline ends the waiting for such a thread, not the thread.
    """

    class Config(WorkflowConfig):
        """Which environment, for how long."""

        kind: str = "multi_turn"
        environment: PluginPath
        """The class of the environment: `package.module:Class`, or `file.py:Class` relative to the config."""
        environment_args: dict[str, Any] = Field(default_factory=dict)
        """Keyword arguments of the class."""
        max_turns: int = Field(default=8, ge=1)
        """Turns after which an episode ends even if the environment is not done."""
        threads: int = free(32, ge=1)
        """How many environments without `async` methods may compute at the same time."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            try:
                environment_of(self)
            except TriviumError as error:
                yield Problem(f"{where}.environment", error.asked, error.found, error.do)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._environment = environment_of(config)
        self._threads = Threads(config.threads, f"the environment {config.environment}")

    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        """Runs one episode. The reward `environment` is the sum over its steps. The metric `env_done` is whether the
        environment ended the episode."""
        name = self._environment.__name__
        made = await self._ask(f"{name}()", task, self._environment, **self.config.environment_args)
        world = cast(Environment, made)
        try:
            return await self._episode(task, policy, world)
        finally:
            if isinstance(world, ClosedEnvironment):
                await self._ask(f"{name}.close", task, world.close)

    async def _episode(self, task: Task, policy: Policy, world: Environment) -> dict[str, float]:
        name = self._environment.__name__
        seen = _messages(await self._ask(f"{name}.reset", task, world.reset, task), f"{name}.reset", task)
        conversation, earned, done = seen, 0.0, False
        for _ in range(self.config.max_turns):
            if not conversation or conversation[-1].role == "assistant":
                raise _failure(f"{name} with a message for the policy to answer", task, "no message to answer")
            try:
                turn = await policy.generate(conversation)
            except PromptTooLong:
                if not policy.turns:
                    raise  # the task itself is too long; later on, a full context ends the episode like `max_turns`
                break
            step = await self._ask(f"{name}.step", task, world.step, turn.text)
            messages, reward, done = _step(step, f"{name}.step", task)
            policy.credit(turn, reward=reward, state=_state(seen))
            conversation, seen = (*conversation, Message("assistant", turn.text), *messages), messages
            earned += reward
            if done:
                break
        policy.metrics["env_done"] = float(done)
        return {"environment": earned}

    async def _ask(
        self, asked: str, task: Task, function: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        """Calls a method of the environment, plain or `async`. Its errors become EnvironmentFailure."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            result = await self._threads.run(partial(function, *args, **kwargs))
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise _failure(asked, task, f"{type(error).__name__}: {text_of(error)}") from error


def environment_of(config: MultiTurn.Config) -> Callable[..., Any]:
    """The class of a config's environment. Raises ConfigError if it does not accept the given arguments."""
    made_by = resolve("environments", config.environment)
    missing = [method for method in ("reset", "step") if not callable(getattr(made_by, method, None))]
    if not isinstance(made_by, type) or missing:
        raise ConfigError(
            f"the environment {config.environment}",
            f"{made_by!r} without {' and '.join(missing)}" if missing else f"{made_by!r} is not a class",
            "name a class with the methods reset(task) and step(completion)",
        )
    try:
        inspect.signature(made_by).bind(**config.environment_args)
    except TypeError as error:
        raise ConfigError(
            f"the environment {config.environment} with environment_args {config.environment_args}",
            str(error),
            f"it takes {inspect.signature(made_by)}",
        ) from error
    return made_by


def _step(step: object, asked: str, task: Task) -> tuple[tuple[Message, ...], float, bool]:
    """Checks the `(messages, reward, done)` of an environment."""
    if not isinstance(step, tuple) or len(step) != 3:
        raise _failure(asked, task, f"{described(step)} instead of (messages, reward, done)")
    messages, reward, done = step
    try:
        if isinstance(reward, bool):
            raise ValueError(described(reward))  # probably `done`, at the wrong position
        earned = finite_number(reward)
    except ValueError as error:
        raise _failure(asked, task, f"as the reward {error}") from None
    if not isinstance(done, bool | np.bool_):
        raise _failure(asked, task, f"done {described(done)} instead of true or false")
    return _messages(messages, asked, task), earned, bool(done)


def _messages(messages: object, asked: str, task: Task) -> tuple[Message, ...]:
    """Checks the messages of an environment."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Message) for message in messages):
        raise _failure(asked, task, f"{described(messages)} instead of a sequence of trivium.types.Message")
    return tuple(messages)


def _state(seen: Sequence[Message]) -> str:
    """The name of a state, which is equal for equal messages."""
    shown = [[m.role, m.content, [item.sha256 for item in m.media]] for m in seen]
    return hashlib.blake2b(json.dumps(shown).encode(), digest_size=8).hexdigest()


def _failure(asked: str, task: Task, found: str) -> EnvironmentFailure:
    return EnvironmentFailure(f"{asked} for task {task.task_id!r}", found, "fix the environment or the task")
