"""Rollouts in environments of Gymnasium."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import Field

from trivium.config import RunConfig
from trivium.foundation.errors import ConfigError, MissingPackage, Problem, text_of
from trivium.policy import Policy
from trivium.processes.isolated import require
from trivium.protocols import Environment
from trivium.types import Message, Task
from trivium.workflows.adapters import AdapterConfig, Translation, mapping_of, seed_of
from trivium.workflows.episodes import Episodes

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")

_HIGHLIGHTED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m")
"""A part of a rendering that a terminal would colour: brackets mark it for the policy."""


class Gymnasium(Episodes):
    """Makes an environment of Gymnasium for each trajectory; the reward is the sum over its steps.

    The first message is the task's prompt with the first observation. The row's column `seed` seeds the environment
    (without it, a number that follows from the task's id), and the column `options` is passed to `reset`. An
    environment with `render_mode: ansi` shows its rendering instead of its observations, unless `observe` is set.
    """

    class Config(AdapterConfig):
        """Which environment, and how it reads and writes text."""

        kind: str = "gymnasium"
        id: str
        """The id of the environment (`FrozenLake-v1`); `module:Name-v0` imports the module that registers it."""
        environment_args: dict[str, Any] = Field(default_factory=dict)
        """Keyword arguments of `gymnasium.make`."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            try:
                _require()
            except MissingPackage as error:
                yield Problem(f"{where}.kind", error.asked, error.found, error.do)
            else:
                yield from _unknown(self.id, f"{where}.id")

    def __init__(self, config: Config) -> None:
        _require()
        super().__init__(config, f"Gymnasium's {config.id}", config.max_turns, config.call_deadline_s)
        self._id, self._arguments, self._translation = config.id, config.environment_args, Translation(config)
        self._renders = config.observe is None

    def make(self, policy: Policy) -> Environment:
        import gymnasium

        env: Any = gymnasium.make(self._id, **self._arguments)
        return _GymEnvironment(env, self._translation, self._renders and env.render_mode == "ansi")


def _require() -> None:
    require("gymnasium", "gymnasium", "envs", "roll out with workflow.kind: gymnasium")


def _unknown(name: str, where: str) -> Iterator[Problem]:
    """A problem if no environment has this id. Only `gymnasium.make` resolves an id with a module or no version."""
    import gymnasium

    if ":" in name or not re.search(r"-v\d+$", name):
        return
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        do = "correct the id; write module:Name-v0 if a module registers the environment"
        yield Problem(where, "an environment of Gymnasium", text_of(error), do)


class _GymEnvironment:
    """An environment of Gymnasium. Its methods are plain: they run in threads."""

    def __init__(self, env: Any, translation: Translation, renders: bool) -> None:
        self._env, self._translation, self._renders = env, translation, renders
        self._act = action_of(env.action_space)

    def reset(self, task: Task) -> Sequence[Message]:
        observation, _ = self._env.reset(seed=seed_of(task), options=mapping_of(task, "options"))
        return self._translation.first(task, self._shown(observation))

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        try:
            action = self._translation.action(completion, self._act)
        except ValueError as error:
            return self._translation.invalid(error)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return self._translation.messages(self._shown(observation)), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: object) -> object:
        return _HIGHLIGHTED.sub(r"[\1]", self._env.render()) if self._renders else observation


def _numbers_of(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text)]


def action_of(space: Any) -> Callable[[str], Any]:
    """A function that reads an action of the space from a completion, and raises ValueError for any other text."""
    import numpy as np
    from gymnasium import spaces

    def discrete(text: str) -> int:
        numbers, first = _numbers_of(text), int(space.start)
        if not numbers or not numbers[-1].is_integer() or not first <= numbers[-1] < first + int(space.n):
            raise ValueError(f"write a number from {first} to {first + int(space.n) - 1}")
        return int(numbers[-1])

    def several(text: str) -> Any:
        """As many numbers as the space has, in its shape and its bounds."""
        count = int(np.prod(space.shape))
        numbers = _numbers_of(text)
        if len(numbers) != count:
            raise ValueError(f"write {count} numbers")
        if np.issubdtype(space.dtype, np.integer):
            if not all(number.is_integer() for number in numbers):
                raise ValueError(f"write {count} whole numbers")
            numbers = [int(number) for number in numbers]
        out_of_bounds = ValueError(f"write {count} numbers in the bounds of {space}")
        try:
            # A number too large for the type becomes infinite, which is refused below.
            with np.errstate(over="ignore"):
                action = np.asarray(numbers, space.dtype).reshape(space.shape)
        except OverflowError:
            raise out_of_bounds from None
        if not np.isfinite(action).all() or not space.contains(action):
            raise out_of_bounds
        return action

    def text_itself(text: str) -> str:
        if not space.contains(text):
            raise ValueError(f"write {space.min_length} to {space.max_length} characters of {space.characters!r}")
        return text

    kinds = {spaces.Discrete: discrete, spaces.Text: text_itself}
    kinds |= dict.fromkeys((spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary), several)

    def undefined(text: str) -> Any:
        raise ConfigError(f"actions of {space}", "no form as text", "set workflow.act: a function of yours")

    return next((reader for kind, reader in kinds.items() if isinstance(space, kind)), undefined)
