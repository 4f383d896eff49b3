"""How rewards are called. A reward is a function or an object with

    f(prompt: str, completion: str, **columns) -> float                     # or `async def`
    f(prompt: str, completions: list[str], **columns) -> list[float]        # compares the members of a group

`prompt` is the last user message of the task, `completion` the text of the last turn, and the columns of the task
arrive by the names in the signature (all of them where it says `**columns`). `kind: my_rewards.py:mine` in the config
is enough to use one. What does not give a finite number is an error of that trajectory, never a score of 0.

A reward of the first kind begins as soon as its trajectory is finished. One of the second kind waits for the whole
group, and sees those of its members that nothing has failed so far, in order.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from trivium.config import RewardConfig, build
from trivium.deadlines import CancellationEscaped, within
from trivium.errors import ConfigError, DataError, RewardError
from trivium.registry import resolve
from trivium.rewards.workers import Workers
from trivium.threads import Threads
from trivium.types import Task, Trajectory

_THREADS = 32
"""Trajectories whose plain rewards may compute at the same time."""

Scores = dict[str, float] | RewardError
"""Each component by label with its weight applied, or why there is no score."""


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
    compares: bool
    """Whether it judges the members of a group against each other."""

    def missing(self, columns: Collection[str]) -> list[str]:
        return sorted(self.required - set(columns))

    def call(self, task: Task, **completion: Any) -> Any:
        if missing := self.missing(task.columns):
            raise _lacking([(self.label, missing)], task.columns)
        wanted = task.columns.keys() - {"prompt", *completion} if self.takes_all else self.required | self.optional
        columns = {name: task.columns[name] for name in wanted if name in task.columns}
        return self.function(prompt=_prompt(task), **completion, **columns)


class Judge:
    """Calls every reward of a run. Any number of trajectories and groups may be judged at the same time.

    There is no deadline in here: cancelling a call stops its thread after the reward it is in, and kills a reward that
    runs in a process of its own.
    """

    def __init__(self, components: Sequence[_Component]) -> None:
        self._components = tuple(components)
        self._own = [component for component in components if not component.compares]
        self._comparing = [component for component in components if component.compares]
        self._threads = Threads(_THREADS, "a reward")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the components, in the config's order."""
        return tuple(component.label for component in self._components)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises DataError, naming every reward whose columns are not among these (those of a first task, say)."""
        lacking = [(c.label, missing) for c in self._components if (missing := c.missing(columns))]
        if lacking:
            raise _lacking(lacking, columns)

    async def score(self, task: Task, trajectory: Trajectory) -> Scores:
        """What the rewards that look at one trajectory give it."""
        results = await self._called(self._own, task, completion=trajectory.completion)
        scores: dict[str, float] = {}
        for component, result in zip(self._own, results, strict=True):
            score = _weighted(component, task, result)
            if isinstance(score, RewardError):
                return score
            scores[component.label] = score
        return scores

    async def compare(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Scores]:
        """Per trajectory, in order: what the rewards that look at all of them give it."""
        completions = [trajectory.completion for trajectory in trajectories]
        results = await self._called(self._comparing, task, completions=completions)
        scores: list[Scores] = [{} for _ in trajectories]
        for component, result in zip(self._comparing, results, strict=True):
            given = _one_each(component, task, result, len(trajectories))
            for i, known in enumerate(scores):
                score = given if isinstance(given, RewardError) else _weighted(component, task, given[i])
                if isinstance(known, RewardError):
                    continue
                if isinstance(score, RewardError):
                    scores[i] = score
                else:
                    known[component.label] = score
        return scores

    async def _called(self, components: Sequence[_Component], task: Task, **completion: Any) -> list[Any]:
        """What each reward returned, or the exception it raised. Plain ones share a thread; others run concurrently."""
        plain = [component for component in components if not component.is_async]
        results: dict[str, Any] = {}
        if plain:
            stop = threading.Event()
            try:
                results = await self._threads.run(lambda: _call(plain, task, completion, stop))
            finally:
                stop.set()
        results |= _call([component for component in components if component.is_async], task, completion)
        waiting = {label: result for label, result in results.items() if inspect.isawaitable(result)}
        results |= dict(zip(waiting, await asyncio.gather(*map(_finished, waiting.values())), strict=True))
        return [results[component.label] for component in components]


def make_judge(configs: Sequence[RewardConfig], deadline_s: float = 3600.0) -> Judge:
    """Builds the rewards of a config; raises ConfigError for one that cannot be called, MissingPackage for one whose
    package is not installed. Nothing in a worker process lives through a call of more than `deadline_s`."""
    components = [_component(config, deadline_s) for config in configs]
    labels = [component.label for component in components]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError("rewards with different names", f"{', '.join(twice)} twice", "give each its own `name`")
    return Judge(components)


def _component(config: RewardConfig, deadline_s: float) -> _Component:
    function, parameters = _callable(config, deadline_s)
    by_name = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    judged = {"completion", "completions"} & by_name.keys()
    if "prompt" not in by_name or len(judged) != 1:
        raise ConfigError(
            f"the reward {config.kind}",
            f"it takes ({', '.join(parameters)})",
            "call its parameters `prompt` and `completion` (or `completions`, of a group), then the columns it reads",
        )
    columns = {name: p for name, p in by_name.items() if name not in ("prompt", *judged)}
    required = frozenset(name for name, p in columns.items() if p.default is p.empty)
    return _Component(
        config.label, config.weight, function, required, frozenset(columns) - required,
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters.values()), is_async=_is_async(function),
        compares="completions" in judged,
    )  # fmt: skip


def _callable(config: RewardConfig, deadline_s: float) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    """What to call, and the parameters of what it stands for; a reward with workers is built by them alone."""
    target = resolve("rewards", config.kind)
    described = target if isinstance(target, type) and config.workers else build("rewards", config)
    if described is target and isinstance(target, type):
        method = inspect.getattr_static(target, "__call__", None)
        parameters = dict([*inspect.signature(method).parameters.items()][1:]) if inspect.isfunction(method) else None
    else:
        parameters = inspect.signature(described).parameters if callable(described) else None
    if parameters is None:
        raise ConfigError(f"the reward {config.kind}", f"a {type(target).__name__}", "name a function or a class")
    return Workers(config, deadline_s) if config.workers else described, parameters


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _call(
    components: Sequence[_Component], task: Task, completion: Mapping[str, Any], stop: threading.Event | None = None
) -> dict[str, Any]:
    """By label: what each reward returned (an awaitable, if asynchronous), or the exception it raised."""
    results: dict[str, Any] = {}
    for component in components:
        if stop is not None and stop.is_set():
            break
        try:
            results[component.label] = component.call(task, **completion)
        except asyncio.CancelledError:
            results[component.label] = CancellationEscaped()
        except Exception as error:
            results[component.label] = error  # an exception is an outcome: `_weighted` makes it a RewardError
    return results


async def _finished(result: Awaitable[Any]) -> Any:
    try:
        return await within(None, result)
    except Exception as error:
        return error


def _one_each(component: _Component, task: Task, result: Any, count: int) -> Sequence[Any] | RewardError:
    """What a reward gave each member of a group, or a RewardError for all of them."""
    if isinstance(result, Exception):
        return _raised(component, task, result)
    if isinstance(result, np.ndarray):
        result = result.tolist()
    if isinstance(result, Sequence) and not isinstance(result, str | bytes) and len(result) == count:
        return result
    shown = f"{len(result)} of them" if isinstance(result, Sequence) else _shown(result)
    return _error(component, task, f"{shown} for {count} completions", "one number per completion")


def _weighted(component: _Component, task: Task, result: Any) -> float | RewardError:
    """The component's part of the reward, or a RewardError that says what came instead of a finite number."""
    if isinstance(result, Exception):
        return _raised(component, task, result)
    if not isinstance(result, Real | np.bool_):
        return _error(component, task, _shown(result))
    try:
        score = float(result) * component.weight
    except OverflowError as overflow:
        return _error(component, task, f"{type(result).__name__}: {overflow}")
    return score if math.isfinite(score) else _error(component, task, f"{result} with weight {component.weight}")


def _raised(component: _Component, task: Task, cause: Exception) -> RewardError:
    error = _error(component, task, f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _shown(result: Any) -> str:
    shown = repr(result)
    return f"{shown if len(shown) < 80 else shown[:77] + '...'} of type {type(result).__name__}"


def _error(component: _Component, task: Task, found: str, wanted: str = "a finite number") -> RewardError:
    return RewardError(
        f"{wanted} from reward {component.label!r} for task {task.task_id!r}",
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
