"""The listening socket, its connections and what arrives on them: how many, how long, how much, and what is logged.

A run keeps files open for its journal and its checkpoints, so connections must never use up the process's descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from trivium.errors import TriviumError
from trivium.serving.bodies import RequestError

_log = logging.getLogger("trivium")
_CLOSE_S = 5.0
"""Longest wait for responses in progress when the server is closed, in seconds."""
_IDLE_S = 15.0
"""Longest time without a complete request header, on a new connection and between requests, in seconds."""
_SWEEP_S = 1.0
"""Seconds between two looks at idle connections."""
_BACKLOG = 64
"""Connections that the system accepts ahead of the server: at most so many open at once beyond the cap."""
_RESERVED = 256
"""Descriptors that are kept for the run's files, pipes and processes."""
_FEWEST = 8
"""A server with fewer connections is refused."""
_BODY_S = 30.0
"""Longest time that a body may take to arrive, in seconds."""
_BODIES = 8
"""All bodies that are arriving take up at most as much memory as so many of the largest size."""
_LOG_LINES, _LOG_S = 5, 60.0
"""Lines of one kind that the server may log in so many seconds."""
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 20\r\n\r\nToo many connections"
)


class ListenError(TriviumError):
    """The server cannot listen on its address."""


class Connection(H11Protocol):
    """One of at most `cap` connections: one more replaces the longest idle one, or is refused."""

    def __init__(self, *, cap: int, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._cap = cap
        self.idle_since = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if sum(not each.transport.is_closing() for each in self.connections) <= self._cap:
            return
        oldest = min(idle_connections(self.connections), key=lambda connection: connection.idle_since)
        if oldest is self:
            transport.write(_REFUSAL)
            transport.close()
        else:
            oldest.transport.abort()

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """Whether no request is in progress; the header of one may be half sent."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()


def idle_connections(connections: Iterable[object]) -> list[Connection]:
    """Those that wait for a request."""
    return [each for each in connections if isinstance(each, Connection) and each.idle]


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the run."""
        yield

    async def close_idle(self) -> None:
        """Closes connections that wait for a request for too long, until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for connection in idle_connections(self.server_state.connections):
                if time.monotonic() - connection.idle_since > _IDLE_S:
                    connection.transport.abort()


class BodyReader:
    """Reads bodies of at most `max_bytes`, and keeps the memory of all that are arriving within bounds."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arriving = 0
        """Bytes of bodies that have not arrived completely."""

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises RequestError: 413 too large, 408 too slow, 503 too many at once."""
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    body += part
                    self._arriving += len(part)
                    self._check(len(body))
        except TimeoutError as error:
            found = f"it has not arrived within {_BODY_S:.0f} s"
            raise RequestError(408, "the body of a request", found, "send it at once") from error
        except ClientDisconnect as error:
            raise RequestError(400, "the body of a request", "the client has disconnected", "ask again") from error
        finally:
            self._arriving -= len(body)
        return bytes(body)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise RequestError(
                413,
                f"a body of at most {self._max_bytes:,} bytes",
                f"at least {size:,} bytes",
                "send less, or raise serve.max_body_bytes",
                code="body_too_large",
            )
        if self._arriving > _BODIES * self._max_bytes:
            raise RequestError(
                503,
                "memory for the body of a request",
                f"{self._arriving:,} bytes of other bodies are arriving",
                "ask again, with fewer requests at once",
                code="too_many_bodies",
                retry_after_s=1,
            )


class RepeatedLines(logging.Filter):
    """Lets through a few lines of each kind a minute, and says how many others there were."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}
        """By message without its arguments: (begin of its minute, lines in it)."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg).partition("\n")[0], time.monotonic()
        began, count = self._seen.get(kind, (now, 0))
        if now - began > _LOG_S:
            if count > _LOG_LINES:
                record.msg = f"{record.msg} ({count - _LOG_LINES} more such lines in the last minutes)"
            began, count = now, 0
        self._seen[kind] = (began, count + 1)
        return count < _LOG_LINES


@contextmanager
def _limited_logs() -> Iterator[None]:
    """Limits repeated lines of the HTTP server and of the event loop while the block runs."""
    limit, loggers = RepeatedLines(), [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)


def connection_cap(wanted: int) -> int:
    """How many connections the descriptors of this process allow, beside what the run needs; at most `wanted`. Raises
    ListenError where that is next to none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    table = Path("/proc/self/fd")
    in_use = len(os.listdir(table)) if table.is_dir() else _RESERVED
    allowed = limit - in_use - _RESERVED - _BACKLOG
    if allowed < min(wanted, _FEWEST):
        raise ListenError(
            f"{wanted} connections of agents",
            f"the process may open {limit} files, {in_use} are open, and the run needs {_RESERVED}",
            "raise the limit (ulimit -n 4096)",
        )
    if allowed < wanted:
        _log.warning("%d connections at most, not %d: the process may open %d files", allowed, wanted, limit)
    return min(wanted, allowed)


@asynccontextmanager
async def serve_app(app: ASGIApp, host: str, port: int, max_connections: int = 512) -> AsyncGenerator[str]:
    """Serves the app while the block runs; gives its URL. Raises ListenError; a server that fails cancels the block."""
    cap = connection_cap(max_connections)
    listener = _listen(host, port)
    options: dict[str, Any] = {"lifespan": "off", "access_log": False, "log_config": None, "ws": "none"}
    options |= {"log_level": "warning", "timeout_graceful_shutdown": int(_CLOSE_S), "timeout_keep_alive": int(_IDLE_S)}
    options |= {"backlog": _BACKLOG, "http": partial(Connection, cap=cap)}
    server = _Server(uvicorn.Config(app, **options))
    shown_host = f"[{host}]" if ":" in host else host
    with _limited_logs():
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve([listener]), name="http")
            closing = tasks.create_task(server.close_idle(), name="idle connections")
            try:
                while not (server.started or serving.done()):
                    await asyncio.sleep(0.01)
                yield f"http://{shown_host}:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await _finished(serving)  # responses in progress are sent first, for a few seconds
                closing.cancel()
                listener.close()


async def _finished(task: asyncio.Task[None]) -> None:
    """Waits for the task even if the wait is cancelled meanwhile: a run that ends may be cancelled twice."""
    waiting = asyncio.ensure_future(asyncio.wait({task}))
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await waiting
        raise


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ListenError(
            f"listen on {host}:{port}", str(error), "choose another serve.host or serve.port (0 takes a free one)"
        ) from error
