"""Drives an environment that is a class of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import Field

from trivium.config import PluginPath, RunConfig
from trivium.foundation.errors import ConfigError, Problem, TriviumError
from trivium.foundation.registry import resolve
from trivium.policy import Policy
from trivium.protocols import Environment
from trivium.workflows.episodes import Episodes, TurnsConfig


class MultiTurn(Episodes):
    """Makes an environment of the user's class for each trajectory."""

    class Config(TurnsConfig):
        """Which environment, for how long."""

        kind: str = "multi_turn"
        environment: PluginPath
        """The class of the environment: `package.module:Class`, or `file.py:Class` relative to the config."""
        environment_args: dict[str, Any] = Field(default_factory=dict)
        """Keyword arguments of the class."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            try:
                environment_of(self)
            except TriviumError as error:
                yield Problem(f"{where}.environment", error.asked, error.found, error.do)

    def __init__(self, config: Config) -> None:
        self._class, self._arguments = environment_of(config), config.environment_args
        super().__init__(config, self._class.__name__, config.max_turns, config.call_deadline_s)

    def make(self, policy: Policy) -> Environment:
        return self._class(**self._arguments)


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
