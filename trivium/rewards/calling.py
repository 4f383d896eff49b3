"""How rewards are called. A reward is a function or an object with

    f(prompt: str, completion: str, **columns) -> float        # or `async def`

`prompt` is the last user message of the task, `completion` the text of the last turn, and the columns of the task
arrive by the names in the signature (all of them where it says `**columns`). `kind: my_rewards.py:mine` in the config
is enough to use one. What does not give a finite number is an error of that trajectory, never a score of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from trivium.config import RewardConfig, build
from trivium.errors import ConfigError, DataError, RewardError
from trivium.threads import in_thread
from trivium.types import Task, Trajectory

_GIVEN = ("prompt", "completion")


@dataclass(frozen=True, slots=True)
class _Component:
    """One reward and what its signature asks for."""

    label: str
    weight: float
    function: Callable[..., Any]
    required: frozenset[str]
    optional: frozenset[str]
    takes_all: bool
    is_async: bool

    def missing(self, columns: Collection[str]) -> list[str]:
        return sorted(self.required - set(columns))

    def call(self, task: Task, completion: str) -> Any:
        if missing := self.missing(task.columns):
            raise _lacking([(self.label, missing)], task.columns)
        wanted = task.columns.keys() - set(_GIVEN) if self.takes_all else self.required | self.optional
        columns = {name: task.columns[name] for name in wanted if name in task.columns}
        return self.function(prompt=_prompt(task), completion=completion, **columns)


class Judge:
    """Calls every reward of a run; stateless, so groups may be judged at the same time."""

    def __init__(self, components: Sequence[_Component]) -> None:
        self._components = tuple(components)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the components, in the config's order."""
        return tuple(component.label for component in self._components)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises DataError, naming every reward whose columns are not among these (those of a first task, say)."""
        lacking = [(c.label, missing) for c in self._components if (missing := c.missing(columns))]
        if lacking:
            raise _lacking(lacking, columns)

    async def score(self, task: Task, trajectories: Sequence[Trajectory]) -> list[dict[str, float] | RewardError]:
        """Per trajectory, in order: each component by label with its weight applied, or why there is no score.

        Plain rewards of all trajectories share one worker thread; asynchronous ones run concurrently. There is no
        deadline in here: cancelling the call stops the thread after the reward it is in.
        """
        plain = [c for c in self._components if not c.is_async]
        others = [c for c in self._components if c.is_async]
        stop = threading.Event()
        try:
            results = await in_thread(lambda: _call(plain, task, trajectories, stop), "trivium-rewards")
        finally:
            stop.set()
        results |= _call(others, task, trajectories)
        waiting = {key: result for key, result in results.items() if inspect.isawaitable(result)}
        results |= dict(zip(waiting, await asyncio.gather(*map(_finished, waiting.values())), strict=True))
        return [self._total(task, results, i) for i in range(len(trajectories))]

    def _total(self, task: Task, results: dict[tuple[str, int], Any], i: int) -> dict[str, float] | RewardError:
        scores: dict[str, float] = {}
        for component in self._components:
            score = _weighted(component, task, results[component.label, i])
            if isinstance(score, RewardError):
                return score
            scores[component.label] = score
        return scores


def make_judge(configs: Sequence[RewardConfig]) -> Judge:
    """Builds the rewards of a config; raises ConfigError for one that cannot be called, MissingPackage for one whose
    package is not installed."""
    components = [_component(config) for config in configs]
    labels = [component.label for component in components]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError("rewards with different names", f"{', '.join(twice)} twice", "give each its own `name`")
    return Judge(components)


def _component(config: RewardConfig) -> _Component:
    function = build("rewards", config)
    if not callable(function):
        raise ConfigError(f"the reward {config.kind}", f"a {type(function).__name__}", "name a function or a class")
    parameters = inspect.signature(function).parameters
    by_name = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not all(name in by_name for name in _GIVEN):
        raise ConfigError(
            f"the reward {config.kind}",
            f"it takes ({', '.join(parameters)})",
            "call its parameters `prompt` and `completion`, then the columns it reads",
        )
    columns = {name: p for name, p in by_name.items() if name not in _GIVEN}
    required = frozenset(name for name, p in columns.items() if p.default is p.empty)
    return _Component(
        config.label, config.weight, function, required, frozenset(columns) - required,
        any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
    )  # fmt: skip


def _call(
    components: Sequence[_Component],
    task: Task,
    trajectories: Sequence[Trajectory],
    stop: threading.Event | None = None,
) -> dict[tuple[str, int], Any]:
    """(label, index) -> what the reward returned (an awaitable, if asynchronous), or the exception it raised."""
    results: dict[tuple[str, int], Any] = {}
    for component in components:
        for i, trajectory in enumerate(trajectories):
            if stop is not None and stop.is_set():
                return results
            try:
                results[component.label, i] = component.call(task, trajectory.completion)
            except Exception as error:
                results[component.label, i] = error  # an exception is an outcome: `_weighted` makes it a RewardError
    return results


async def _finished(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except Exception as error:
        return error


def _weighted(component: _Component, task: Task, result: Any) -> float | RewardError:
    """The component's part of the reward, or a RewardError that says what came instead of a finite number."""
    error: RewardError
    if isinstance(result, Exception):
        error = _error(component, task, f"{type(result).__name__}: {result}")
        error.__cause__ = result
        return error
    if not isinstance(result, Real | np.bool_):
        shown = repr(result)
        shown = shown if len(shown) < 80 else shown[:77] + "..."
        return _error(component, task, f"{shown} of type {type(result).__name__}")
    try:
        score = float(result) * component.weight
    except OverflowError as overflow:
        return _error(component, task, f"{type(result).__name__}: {overflow}")
    return score if math.isfinite(score) else _error(component, task, f"{result} with weight {component.weight}")


def _error(component: _Component, task: Task, found: str) -> RewardError:
    return RewardError(
        f"a finite number from reward {component.label!r} for task {task.task_id!r}",
        found,
        "mend the reward: this trajectory is left out, not scored 0",
    )


def _lacking(lacking: Sequence[tuple[str, list[str]]], columns: Collection[str]) -> DataError:
    return DataError(
        "tasks with the columns that the rewards read",
        "; ".join(f"reward {label!r} lacks {', '.join(missing)}" for label, missing in lacking)
        + f"; there are: {', '.join(sorted(columns)) or 'none'}",
        "name the columns so in the task source, or give the reward's parameter a default",
    )


def _prompt(task: Task) -> str:
    """The text of the last user message; of the last message where no user speaks."""
    spoken = [message.content for message in task.prompt if message.role == "user"]
    return (spoken or [message.content for message in task.prompt])[-1] if task.prompt else ""
