"""Rollouts in environments behind OpenEnv servers: a client of their WebSocket sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from trivium.config import RunConfig, free
from trivium.config.checks import is_loopback
from trivium.foundation.concurrency import Threads
from trivium.foundation.errors import MissingPackage, Problem, text_of
from trivium.policy import Policy
from trivium.processes.isolated import require
from trivium.protocols import Environment
from trivium.types import Message, Task
from trivium.workflows.adapters import AdapterConfig, Translation, connected, mapping_of, seed_of
from trivium.workflows.episodes import EnvironmentFailure, Episodes

T = TypeVar("T")
_MAX_BYTES = 100 << 20
"""The largest message of a server: an observation may hold a screenshot."""
_INVALID, _FULL = "VALIDATION_ERROR", "CAPACITY_REACHED"
"""Codes of OpenEnv's errors: the action does not fit the environment's schema; the server has no free session."""


class OpenEnv(Episodes):
    """Opens a session of an OpenEnv server for each trajectory; the reward is the sum over its steps.

    The first message is the task's prompt with the first observation. The row's column `reset` (a mapping) is passed to
    the environment's `reset`, with a `seed` (the column, or a number that follows from the task's id).
    """

    class Config(AdapterConfig):
        """Which server, and how its environment reads and writes text."""

        kind: str = "openenv"
        url: str
        """The server: `http://host:port` or `ws://host:port`."""
        action_field: str = "message"
        """The field of the environment's action that takes the completion, if `act` is not set."""
        max_environments: int = free(32, ge=1)
        """Sessions that are open at the same time. Further rollouts wait, within their own deadline."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            if urlsplit(self.url).scheme not in ("http", "https", "ws", "wss"):
                yield Problem(f"{where}.url", "the address of a server", repr(self.url), "write http://host:port")
            try:
                _require()
            except MissingPackage as error:
                yield Problem(f"{where}.kind", error.asked, error.found, error.do)

    def __init__(self, config: Config) -> None:
        _require()
        super().__init__(config, f"OpenEnv at {config.url}", config.max_turns, config.call_deadline_s)
        self._url, self._connect_s = socket_url(config.url), config.connect_deadline_s
        field = config.action_field
        self._translation = Translation(config, lambda completion: {field: completion})

    def make(self, policy: Policy) -> Environment:
        return _Session(self._url, self._translation, self._connect_s, self._threads)


def _require() -> None:
    require("websockets", "websockets", "envs", "roll out with workflow.kind: openenv")


def socket_url(url: str) -> str:
    """The address of the sessions of a server."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/ws") else f"{path}/ws", parts.query, ""))


class _NotReady(Exception):
    """The server is starting."""


class _Full(Exception):
    """The server has no free session."""


class _InvalidAction(ValueError):
    """The action does not fit the environment's schema."""


class _Session:
    """An environment of a server, which ends with its connection.

    The functions of the user and JSON run in `threads`: they may take long, and the event loop serves all rollouts.
    """

    def __init__(self, url: str, translation: Translation, connect_s: float, threads: Threads) -> None:
        self._url, self._translation, self._connect_s, self._threads = url, translation, connect_s, threads
        self._socket: Any = None

    async def reset(self, task: Task) -> Sequence[Message]:
        from websockets.exceptions import ConnectionClosed, InvalidMessage

        data = {"seed": seed_of(task), **(mapping_of(task, "reset") or {})}

        async def begin() -> Mapping[str, Any]:
            await self._open()
            return await self._exchange("reset", data)

        what = f"the environment server {self._url}"
        refused = (OSError, ConnectionClosed, InvalidMessage, _NotReady, _Full)
        observed = await connected(what, begin, refused, self._connect_s)
        return await self._run(self._translation.first, task, observed.get("observation"))

    async def step(self, completion: str) -> tuple[Sequence[Message], float | None, bool]:
        try:
            action = await self._run(self._translation.action, completion)
        except ValueError as error:
            return self._translation.invalid(error)
        try:
            observed = await self._exchange("step", action)
        except _InvalidAction as error:
            return self._translation.invalid(error)
        reward = observed.get("reward")
        earned = float(reward) if isinstance(reward, bool) else reward  # OpenEnv's rewards may be true or false
        messages = await self._run(self._translation.messages, observed.get("observation"))
        return messages, earned, bool(observed.get("done"))

    async def close(self) -> None:
        from websockets.exceptions import ConnectionClosed

        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            await socket.send(json.dumps({"type": "close"}))
        except ConnectionClosed:
            return  # the session has ended with the connection
        await socket.close()

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await self._threads.run(partial(function, *arguments))

    async def _open(self) -> None:
        """Connects anew. Raises _NotReady while a gateway starts the server."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus

        await self.close()
        # A proxy of the environment variables is for other machines.
        proxy = None if is_loopback(urlsplit(self._url).hostname or "") else True
        # A server may compute a step without answering pings. Deadlines detect one that is lost.
        try:
            self._socket = await connect(
                self._url, open_timeout=self._connect_s, ping_timeout=None, max_size=_MAX_BYTES, proxy=proxy
            )
        except InvalidStatus as error:
            if error.response.status_code < 500:
                raise
            raise _NotReady(text_of(error)) from error  # a gateway answers like this while its server starts

    async def _exchange(self, kind: str, data: Any) -> Mapping[str, Any]:
        """Sends a message and returns the data of the response. Raises EnvironmentFailure for an error."""
        from websockets.exceptions import ConnectionClosed

        text = await self._run(json.dumps, {"type": kind, "data": data})
        with suppress(ConnectionClosed):  # a full server answers and closes the connection before it reads
            await self._socket.send(text)
        response = await self._run(json.loads, await self._socket.recv())
        payload = response.get("data") or {}
        if response.get("type") != "error":
            return payload
        code, message = payload.get("code"), f"{payload.get('code')}: {payload.get('message')}"
        if code == _FULL:
            raise _Full(message)
        if code == _INVALID and kind == "step":
            raise _InvalidAction(f"{payload.get('message')} {payload.get('errors') or ''}".strip())
        raise EnvironmentFailure(f"a {kind} of {self._url}", message, "look at the log of the environment's server")
