"""Rollouts with plain functions as tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from trivium.concurrency import Threads
from trivium.config import PluginPath, RunConfig, free
from trivium.errors import ConfigError, Problem, TriviumError
from trivium.policy import Policy
from trivium.protocols import Environment
from trivium.types import Capabilities, Task
from trivium.workflows.episodes import EpisodeConfig, Episodes
from trivium.workflows.functions import FunctionTool, described_function, function_of
from trivium.workflows.tools import Tool, ToolEnvironment


class ToolConfig(EpisodeConfig):
    """Base of the sections of workflows with tools."""

    max_calls: int = Field(default=8, ge=1)
    """Calls of tools in a trajectory. Further ones get an error, and the completion after that is the last."""
    max_result_chars: int = Field(default=8000, ge=1)
    """Length of a result for the policy. A longer one is cut, with a mark."""


class ToolFunctions(Episodes):
    """The policy answers the task with the help of tools, which are plain or `async` functions.

    The signature and the docstring of a function describe it to the policy, through the chat template. The row's column
    `tools` chooses among the functions by name. An error of a function is its result.
    """

    capabilities = Capabilities(gives_rewards=False)

    class Config(ToolConfig):
        """Which functions, and how they run."""

        kind: str = "tools"
        tools: tuple[PluginPath, ...] = Field(min_length=1)
        """Functions: `package.module:function`, or `file.py:function` relative to the config."""
        workers: int = free(0, ge=0)
        """Processes for each function; 0 runs it in threads of the explorer. A process whose function hangs or holds
        the interpreter is killed at its deadline."""
        call_deadline_s: float | None = free(30.0, gt=0)
        """How long a call may take. A later result is an error for the policy."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            names = set[str]()
            for number, path in enumerate(self.tools):
                place = f"{where}.tools[{number}]"
                try:
                    name = described_function(function_of(path)).name
                except TriviumError as error:
                    yield Problem(place, error.asked, error.found, error.do)
                    continue
                if name in names:
                    yield Problem(place, "tools with different names", f"a second {name}", "rename a function")
                names.add(name)

    def __init__(self, config: Config) -> None:
        super().__init__(config, "the tools", config.max_calls + 1)
        self._config = config
        deadline_s = config.call_deadline_s or config.deadline_s
        threads = Threads(config.threads, "a tool")
        functions = [FunctionTool(path, threads, deadline_s, config.workers) for path in config.tools]
        self._functions = {function.tool.name: function for function in functions}
        if len(self._functions) < len(functions):
            names = ", ".join(function.tool.name for function in functions)
            raise ConfigError("tools with different names", names, "rename a function")

    def make(self, policy: Policy) -> Environment:
        functions, config = _Functions(self._functions), self._config
        return ToolEnvironment(functions, config.max_calls, config.max_result_chars, policy)


class _Functions:
    """The functions of a config as the toolbox of a trajectory."""

    def __init__(self, functions: Mapping[str, FunctionTool]) -> None:
        self._functions = functions

    async def open(self, task: Task) -> Sequence[Tool]:
        return [function.tool for function in self._functions.values()]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return await self._functions[name](arguments)

    async def reward(self) -> None:
        return None

    async def close(self) -> None: ...
