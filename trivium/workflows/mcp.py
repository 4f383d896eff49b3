"""Rollouts with the tools of an MCP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from trivium.config import ConfigPath, RunConfig, free
from trivium.foundation.concurrency import wait_for
from trivium.foundation.errors import MissingPackage, Problem
from trivium.foundation.registry import suggest
from trivium.policy import Policy
from trivium.processes.isolated import require
from trivium.protocols import Environment
from trivium.types import Message, Task
from trivium.workflows.adapters import connected, continued
from trivium.workflows.episodes import EnvironmentFailure, Episodes
from trivium.workflows.tools import Tool, ToolConfig, ToolEnvironment, ToolError

_INVALID_PARAMS = -32602
"""The only code of an MCP error that answers the policy's call: the arguments are invalid, or the tool is unknown. All
others concern the connection or the server."""
_MAX_PAGES = 100


class Mcp(Episodes):
    """The policy answers the task with the help of the tools of an MCP server, in a session of its own.

    A stdio server is a process that each trajectory starts and ends; a server behind a URL (streamable HTTP) opens
    a session with its own session id for each trajectory. The row's column `tools` chooses among the tools by name. An
    error of a tool is its result. A lost connection or session, an error of the server itself, or a missed deadline
    fails the trajectory.
    """

    class Config(ToolConfig):
        """Which server, and which of its tools begin and end a trajectory."""

        kind: str = "mcp"
        command: tuple[str, ...] = ()
        """The program of a stdio server and its arguments: `[python, server.py]`."""
        cwd: ConfigPath = "."
        """The folder in which a stdio server runs."""
        env: dict[str, str] = Field(default_factory=dict)
        """Environment variables of a stdio server, besides a safe part of this process's."""
        url: str = ""
        """The address of a server that runs elsewhere: `http://host:port/mcp`."""
        start_tool: str = ""
        """A tool that begins a trajectory. It gets the row's columns that its schema names, and its result, if it is
        not empty, is shown after the prompt. The policy does not see the tool."""
        reward_tool: str = ""
        """A tool without arguments whose result is the reward of the trajectory: a number. The policy does not see
        it."""
        call_deadline_s: float | None = free(60.0, gt=0)
        """How long a call may take. A rollout with a slower one fails."""
        max_environments: int = free(32, ge=1)
        """Sessions that are open at the same time. Further rollouts wait, within their own deadline."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            if bool(self.command) == bool(self.url):
                found = "both" if self.url else "neither"
                yield Problem(where, "`command` or `url` of an MCP server", found, "set one of them")
            if not self.reward_tool and not run.rewards:
                do = "name a reward, for example rewards: [exact], or set reward_tool"
                yield Problem("rewards", "rewards of rollouts", "none, and workflow.reward_tool is not set", do)
            try:
                _require()
            except MissingPackage as error:
                yield Problem(f"{where}.kind", error.asked, error.found, error.do)

    def __init__(self, config: Config) -> None:
        _require()
        super().__init__(config, f"the MCP server {config.url or ' '.join(config.command)}", config.max_calls + 1)
        self._config = config

    def make(self, policy: Policy) -> Environment:
        return _McpEnvironment(_Session(self._config), self._config, policy)


def _require() -> None:
    require("mcp", "mcp", "envs", "roll out with workflow.kind: mcp")


class _McpEnvironment(ToolEnvironment):
    """The tools of a server, whose first observation is the result of the start tool."""

    def __init__(self, session: _Session, config: Mcp.Config, policy: Policy) -> None:
        super().__init__(session, config.max_calls, config.max_result_chars, policy)
        self._session = session

    async def reset(self, task: Task) -> Sequence[Message]:
        messages = await super().reset(task)
        opening = self._session.opening
        return continued(messages, (Message("user", opening),)) if opening else messages


class _Session:
    """A session of a server, as the toolbox of a trajectory.

    A task of its own holds the connection, since the `mcp` package requires that one task opens and closes it.
    """

    def __init__(self, config: Mcp.Config) -> None:
        self._config = config
        self.opening = ""
        """The result of the start tool."""
        self._client: Any = None
        self._holder: asyncio.Task[None] | None = None
        self._opened, self._closing = asyncio.Event(), asyncio.Event()

    async def open(self, task: Task) -> Sequence[Tool]:
        config = self._config
        if config.url:
            from httpx2 import TransportError

            what = f"the MCP server {config.url}"
            await connected(what, self._connect, (OSError, TransportError), config.connect_deadline_s)
        else:
            await self._connect()
        tools = {tool.name: tool for tool in await self._listed()}
        for name in filter(None, (config.start_tool, config.reward_tool)):
            if name not in tools:
                raise EnvironmentFailure(f"the tool {name!r} of the MCP server", "no such tool", suggest(name, tools))
        if config.start_tool:
            named = tools[config.start_tool].parameters.get("properties", {})
            arguments = {key: value for key, value in task.columns.items() if key in named}
            self.opening = await self._called(config.start_tool, arguments)
        return [tool for name, tool in tools.items() if name not in (config.start_tool, config.reward_tool)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return await self._called(name, arguments)

    async def reward(self) -> float | None:
        """The number that the reward tool returns. Raises EnvironmentFailure for anything else."""
        if not self._config.reward_tool:
            return None
        asked, text = f"a number from {self._config.reward_tool}", ""
        try:
            text = await self._called(self._config.reward_tool, {})
            return float(text)
        except (ValueError, ToolError) as error:
            raise EnvironmentFailure(asked, text[:80] or str(error), "return a number from that tool") from error

    async def close(self) -> None:
        """Ends the session, and the process of a stdio server."""
        self._closing.set()
        holder, self._holder = self._holder, None
        if holder is not None:
            if not self._opened.is_set():
                holder.cancel()
            await asyncio.wait([holder])
            error = None if holder.cancelled() else holder.exception()
            if error is not None and self._opened.is_set():  # an error before that was raised by `open`
                raise error

    async def _connect(self) -> None:
        """Starts the task that holds the connection, and waits until it is open. Raises its error."""
        self._holder = asyncio.ensure_future(self._hold())
        opened = asyncio.ensure_future(self._opened.wait())
        try:
            await asyncio.wait([self._holder, opened], return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if not self._opened.is_set():
            try:
                self._holder.result()
            except ExceptionGroup as error:
                raise _innermost(error) from error

    async def _hold(self) -> None:
        """Opens the connection, and holds it until `close`."""
        from mcp import Client, StdioServerParameters

        server: Any = self._config.url
        if self._config.command:
            program, *arguments = self._config.command
            folder, env = Path(self._config.cwd), self._config.env
            server = StdioServerParameters(command=program, args=arguments, env=env, cwd=folder)
        # The newest protocol has no sessions, so a server at a URL could not separate the states of rollouts.
        async with Client(server, cache=None, mode="legacy" if self._config.url else "auto") as self._client:
            self._opened.set()
            await self._closing.wait()

    async def _listed(self) -> list[Tool]:
        """The tools of the server, from all pages of its list."""
        tools: list[Tool] = []
        cursor: str | None = None
        # Bounded, since a faulty server may name a next page for ever.
        for _ in range(_MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += [Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a result. Raises ToolError for an error of the tool, EnvironmentFailure for a lost server."""
        from mcp.shared.exceptions import MCPError

        asked = f"a result of the tool {name!r} of the MCP server"
        seconds = self._config.call_deadline_s or self._config.deadline_s
        try:
            result = await wait_for(seconds, self._client.call_tool(name, dict(arguments)))
        except TimeoutError as error:
            found = f"no answer within {seconds:g} s"
            raise EnvironmentFailure(asked, found, "raise workflow.call_deadline_s") from error
        except MCPError as error:
            if error.code == _INVALID_PARAMS:
                raise ToolError(str(error)) from error
            raise EnvironmentFailure(asked, str(error), "look at the log of the server") from error
        text = "\n".join(_text_of(block) for block in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text)
        return text


def _innermost(error: Exception) -> Exception:
    """The first error in groups of groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _text_of(block: Any) -> str:
    """The text of a part of a result; other kinds are named."""
    return block.text if block.type == "text" else f"[{block.type}]"
