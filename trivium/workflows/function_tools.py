"""Rollouts with plain functions as tools: the workflow `kind: tools`, and the calls of its functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from trivium.config import PluginPath, RunConfig, free
from trivium.foundation.concurrency import Threads, usable_cores
from trivium.foundation.errors import ConfigError, Problem, RewardError, RolloutError, TriviumError, text_of
from trivium.policy import Policy
from trivium.processes.isolated import isolated_function
from trivium.processes.user_calls import UserCall
from trivium.protocols import Environment
from trivium.types import Capabilities, Task
from trivium.workflows.episodes import Episodes
from trivium.workflows.function_schemas import arguments_of, described_function, function_of
from trivium.workflows.tools import Tool, ToolConfig, ToolEnvironment, ToolError


class FunctionTools(Episodes):
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


class FunctionTool:
    """A plain or `async` function as a tool. Its signature and its docstring describe it.

    With `workers` the function runs in processes of its own, otherwise in `threads`. The arguments of a call are
    checked against the annotations, and the function receives JSON values.
    """

    def __init__(self, path: str, threads: Threads, deadline_s: float, workers: int = 0) -> None:
        function = function_of(path)
        self.tool = described_function(function)
        self._arguments = arguments_of(function)
        label = f"the tool {self.tool.name}"
        called: Callable[..., Any] = function
        if workers:
            called = isolated_function("tools", path, label, workers, deadline_s)  # its processes keep the deadline
        self._call = UserCall(called, threads, None if workers else deadline_s, label=label, limit=usable_cores())

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The result as text. Raises ToolError for invalid arguments, and for an error or a missed deadline of the
        function; RolloutError if no thread is free."""
        try:
            checked = self._arguments.model_validate(arguments).model_dump(mode="json", include=set(arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
            raise ToolError(f"invalid arguments: {'; '.join(problems)}") from error
        result = await self._call(**checked)
        if isinstance(result, RewardError):
            raise ToolError(result.found) from result  # the error of a function in another process
        # The class itself means that no thread was free. Errors of the function may be of its subclasses.
        if type(result) is RolloutError:
            raise result
        if isinstance(result, BaseException):
            raise ToolError(f"{type(result).__name__}: {text_of(result)}") from result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


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
