"""Drives an environment: alternates policy and environment until the episode ends.

reset(task) -> messages -> completion -> step(completion) -> messages, reward, done -> completion -> ...

The workflows of this package differ in the environments that they make. This module holds what they share: deadlines,
the number of environments that are open at the same time, the record of rewards, and the end of an environment.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from pydantic import Field

from trivium.config import WorkflowConfig, free
from trivium.foundation.concurrency import Threads, Turns, outcome_of, run_here, wait_for
from trivium.foundation.errors import DataError, RolloutError, described, text_of
from trivium.policy import Policy, PromptTooLong, finite_number
from trivium.protocols import ClosedEnvironment, Environment, FinishedEnvironment
from trivium.types import Message, Task
from trivium.types.recordable import unrecordable, visible

_log = logging.getLogger("trivium")


class EnvironmentFailure(RolloutError):
    """An environment raised, missed a deadline, or returned something that is not a step."""


class EpisodeConfig(WorkflowConfig):
    """Base of the sections of workflows with environments: limits on time and number."""

    connect_deadline_s: float = free(60.0, gt=0)
    """How long the beginning of an episode may take: making the environment, connecting to its server, and its first
    observation. A rollout whose environment takes longer fails."""
    call_deadline_s: float | None = free(None, gt=0)
    """How long the environment may take for each later call, `finish` and `close` included. Unset: until the deadline
    of the rollout; `close` then has `deadline_s` of its own."""
    max_environments: int = free(256, ge=1)
    """Environments that are open at the same time. Further rollouts wait, within their own deadline."""
    threads: int = free(32, ge=1)
    """How many environments without `async` methods may compute at the same time."""


class TurnsConfig(EpisodeConfig):
    """Base of the sections of workflows whose episodes have a number of turns."""

    max_turns: int = Field(default=8, ge=1)
    """Turns after which an episode ends even if the environment is not done."""


class Episodes(ABC):
    """A workflow that makes an environment for each trajectory. The reward is the sum over its steps.

    Each turn is credited with the reward of its step and with the state before it: two turns have the same state if
    the environment's latest messages were the same. If no step has a reward, the workflow gives none.

    Methods of the environment that are not `async` run in threads of their own, so a slow one holds up neither the
    other rollouts nor the models. A deadline ends the waiting for such a thread, not the thread.

    The messages of the last step, which the policy does not read, are the feedback of the rollout.

    An environment that fails or misses a deadline fails its trajectory: it is recorded and counted, never scored as 0.
    The environment is closed on every path. An error of `close` is logged, since the trajectory is complete without it.
    """

    def __init__(
        self,
        config: EpisodeConfig,
        name: str,
        max_turns: int,
        step_s: float | None = None,
    ) -> None:
        """`name` names the environment in errors; `step_s` bounds each step."""
        self.config, self._name, self._max_turns, self._step_s = config, name, max_turns, step_s
        self._end_s = config.call_deadline_s or config.deadline_s
        self._threads = Threads(config.threads, f"the environment {name}")
        self._places = Turns(config.max_environments)

    @abstractmethod
    def make(self, policy: Policy) -> Environment:
        """Makes an environment for one trajectory of a policy. It may block: it runs in a thread."""

    async def run(self, task: Task, policy: Policy) -> dict[str, float] | None:
        """Runs one episode. The reward `environment` is the sum over its steps. The metric `env_done` is whether the
        environment ended the episode."""
        async with self._places:
            environment = await self._made(task, policy)
            try:
                return await self._episode(task, policy, environment)
            finally:
                await self._close(task, environment)

    async def _made(self, task: Task, policy: Policy) -> Environment:
        """Makes an environment. One that is made only after its rollout has ended is closed at once."""
        environments, ended = dict[str, Environment](), threading.Event()

        def make() -> None:
            environments["environment"] = self.make(policy)
            if (
                ended.is_set() and (late := environments.pop("environment", None)) is not None
            ):  # only one of the two threads gets it
                _close_here(late)

        try:
            await self._ask(f"{self._name}()", task, make, self.config.connect_deadline_s)
            return environments["environment"]
        except BaseException:
            # Also for a rollout that is cancelled: its environment may be made later.
            ended.set()
            if (unused := environments.pop("environment", None)) is not None:
                await self._close(task, unused)
            raise

    async def _episode(self, task: Task, policy: Policy, environment: Environment) -> dict[str, float] | None:
        """Alternates policy and environment until the episode ends. Returns the sum of the rewards, None if there was
        none."""
        first = await self._ask(f"{self._name}.reset", task, environment.reset, self.config.connect_deadline_s, task)
        observation = self._messages(first, task)
        conversation, rewards, done = observation, list[float](), False
        for _ in range(self._max_turns):
            if not conversation or conversation[-1].role == "assistant":
                asked = f"{self._name} with a message for the policy to answer"
                raise self._failure(asked, task, "no message to answer")
            try:
                turn = await policy.generate(conversation)
            except PromptTooLong:
                if not policy.turns:
                    raise  # the task itself is too long; later on, a full context ends the episode like `max_turns`
                break
            step = await self._ask(f"{self._name}.step", task, environment.step, self._step_s, turn.text)
            messages, reward, done = self._step(step, task)
            policy.credit(turn, reward=reward or 0.0, state=_state(observation))
            conversation, observation = (*conversation, Message("assistant", turn.text), *messages), messages
            rewards += [] if reward is None else [reward]
            if done:
                break
        policy.metrics["env_done"] = float(done)
        policy.feedback = "\n".join(message.content for message in observation)
        if isinstance(environment, FinishedEnvironment):
            finish = await self._ask(f"{self._name}.finish", task, environment.finish, self._end_s)
            reward, metrics = self._finish(finish, task)
            policy.metrics |= metrics
            rewards += [] if reward is None else [reward]
        return {"environment": float(sum(rewards))} if rewards else None

    async def _close(self, task: Task, environment: Environment) -> None:
        if not isinstance(environment, ClosedEnvironment):
            return
        try:
            await self._ask(f"{self._name}.close", task, environment.close, self._end_s)
        except EnvironmentFailure as error:
            _log.warning("an environment could not be closed: %s", error.found)
            _log.info("the traceback of that failure", exc_info=error)

    async def _ask(
        self, asked: str, task: Task, function: Callable[..., object], seconds: float | None, /, *arguments: object
    ) -> object:
        """Calls a method of the environment, plain or `async`. Its errors become EnvironmentFailure."""
        try:
            if seconds is None:
                return await self._called(function, arguments)
            return await wait_for(seconds, self._called(function, arguments))
        except EnvironmentFailure:
            raise
        except DataError as error:  # a row that does not fit the environment: its own text says what to change
            raise EnvironmentFailure(error.asked, error.found, error.do) from error
        except Exception as error:
            # An environment may raise a TimeoutError of its own, which has a text or a cause.
            late = isinstance(error, TimeoutError) and error.__cause__ is None and not error.args
            found = f"{type(error).__name__}: {text_of(error)}"
            if late and seconds is not None:
                found = f"no answer within {seconds:g} s"
            raise self._failure(asked, task, found) from error

    async def _called(self, function: Callable[..., object], arguments: Sequence[object]) -> object:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        result = await self._threads.run(partial(function, *arguments))
        return await result if inspect.isawaitable(result) else result

    def _step(self, step: object, task: Task) -> tuple[tuple[Message, ...], float | None, bool]:
        """Checks the `(messages, reward, done)` of an environment."""
        asked = f"{self._name}.step"
        if not isinstance(step, tuple) or len(step) != 3:
            raise self._failure(asked, task, f"{described(step)} instead of (messages, reward, done)")
        messages, reward, done = cast("tuple[object, object, object]", step)
        earned = None if reward is None else self._number(reward, asked, "the reward", task)
        if not isinstance(done, bool | np.bool_):
            raise self._failure(asked, task, f"done {described(done)} instead of true or false")
        return self._messages(messages, task), earned, bool(done)

    def _finish(self, finish: object, task: Task) -> tuple[float | None, dict[str, float]]:
        """Checks the `(reward, metrics)` of an environment."""
        asked = f"{self._name}.finish"
        if not isinstance(finish, tuple) or len(finish) != 2 or not isinstance(finish[1], Mapping):
            raise self._failure(asked, task, f"{described(finish)} instead of (reward, metrics)")
        reward, metrics = cast("tuple[object, Mapping[str, object]]", finish)
        numbers = {name: self._number(value, asked, f"the metric {name!r}", task) for name, value in metrics.items()}
        return None if reward is None else self._number(reward, asked, "the reward", task), numbers

    def _number(self, value: object, asked: str, name: str, task: Task) -> float:
        """Checks a number of an environment."""
        try:
            if isinstance(value, bool):
                raise ValueError(described(value))  # probably `done`, at the wrong position
            return finite_number(value)
        except ValueError as error:
            raise self._failure(asked, task, f"as {name} {error}") from None

    def _messages(self, messages: object, task: Task) -> tuple[Message, ...]:
        """Checks the messages of an environment. Halves of surrogate pairs, which have no token, are escaped."""
        if not isinstance(messages, Sequence) or not all(isinstance(message, Message) for message in messages):
            found = f"{described(messages)} instead of a sequence of trivium.types.Message"
            raise self._failure(f"messages of {self._name}", task, found)
        return tuple(_readable(message) for message in cast("Sequence[Message]", messages))

    def _failure(self, asked: str, task: Task, found: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"{asked} for task {task.task_id!r}", found, "fix the environment or the task")


def _close_here(environment: Environment) -> None:
    """Closes an environment in the thread that made it, after its rollout has ended."""
    if not isinstance(environment, ClosedEnvironment):
        return
    closing, error = outcome_of(environment.close)
    if inspect.isawaitable(closing):
        _, error = outcome_of(partial(run_here, _result_of(closing)))
    if error is not None:
        _log.warning("an environment could not be closed: %s: %s", type(error).__name__, text_of(error))
        _log.info("the traceback of that failure", exc_info=error)


async def _result_of(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _readable(message: Message) -> Message:
    is_half = isinstance(message.content, str) and unrecordable(message.content) is not None
    return replace(message, content=visible(message.content)) if is_half else message


def _state(messages: Sequence[Message]) -> str:
    """The name of a state, which is equal for equal messages."""
    entries: list[Any] = [[m.role, m.content, [item.sha256 for item in m.media]] for m in messages]
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=8).hexdigest()
