"""The listening socket, its connections and the log lines about them: how many, and how long they may be idle.

A run keeps files open for its journal and its checkpoints, so connections must never use up the process's descriptors.
uvicorn limits neither the number of open connections nor the time until the first header is complete; `Connection` adds
these two limits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from trivium.foundation.errors import TriviumError

_log = logging.getLogger("trivium")
_CLOSE_S = 5
"""Longest wait for responses in progress when the server is closed, in seconds."""
_IDLE_S: float = 15
"""Longest time without a complete request header, on a new connection and between requests, in seconds."""
_BACKLOG = 64
"""Connections that the system accepts ahead of the server: the most that may be open beyond the cap."""
_RESERVED = 256
"""Descriptors that are kept for the run's files, pipes and processes."""
_FEWEST = 8
"""A server with fewer connections is refused."""
_LOG_LINES, _LOG_S = 5, 60.0
"""The server logs at most this many lines of one kind in this many seconds."""
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 20\r\n\r\nToo many connections"
)


class ListenError(TriviumError):
    """The server cannot listen on its address."""


class Connection(H11Protocol):
    """One of at most `cap` connections. A further connection replaces the one that has been idle longest, or is refused
    if all are in use.

    A connection is idle as long as uvicorn's timeout for idle connections runs: from its beginning, and after each
    response, until the header of a request is complete.
    """

    def __init__(self, *, cap: int, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._cap = cap

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        others = [other for other in others if not other.transport.is_closing()]
        if len(others) < self._cap:
            return
        # A connection in use has no running timeout. The first timeout to end is that of the longest idle connection.
        timers = [(other.timeout_keep_alive_task, other) for other in others]
        idle_until = {timer.when(): other for timer, other in timers if timer is not None}
        if idle_until:
            idle_until[min(idle_until)].transport.abort()
        else:
            transport.write(_REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Does what the inherited method does, but does not end the timeout: see `handle_events`."""
        self.conn.receive_data(data)
        self.handle_events()

    def handle_events(self) -> None:
        """Ends the timeout when the header of a request is complete. The inherited `data_received` ends it at the first
        byte, so a header could take forever."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the run."""
        yield


class RepeatedLines(logging.Filter):
    """Passes a few lines of each kind a minute. The next line after that contains the number of the others."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, tuple[float, int]] = {}
        """(begin of its minute, lines in it) of each message without its arguments."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg).partition("\n")[0], time.monotonic()
        began, count = self._counts.get(kind, (now, 0))
        if now - began > _LOG_S:
            if count > _LOG_LINES:
                record.msg = f"{record.msg} ({count - _LOG_LINES} more such lines in the last minutes)"
            began, count = now, 0
        self._counts[kind] = (began, count + 1)
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


def connection_cap(max_connections: int) -> int:
    """How many connections the descriptors of this process allow, beside those that the run needs; at most
    `max_connections`. Raises ListenError if that is next to none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    table = Path("/proc/self/fd")
    in_use = len(os.listdir(table)) if table.is_dir() else _RESERVED
    allowed = limit - in_use - _RESERVED - _BACKLOG
    if allowed < min(max_connections, _FEWEST):
        raise ListenError(
            f"{max_connections} connections of agents",
            f"the process may open {limit} files, {in_use} are open, and the run reserves {_RESERVED}",
            "raise the limit (ulimit -n 4096)",
        )
    if allowed < max_connections:
        _log.warning("%d connections at most, not %d: the process may open %d files", allowed, max_connections, limit)
    return min(max_connections, allowed)


@asynccontextmanager
async def serve_app(app: ASGIApp, host: str, port: int, max_connections: int = 512) -> AsyncGenerator[str]:
    """Serves the app at the URL that it yields, while the block runs. Raises ListenError. A server that fails cancels
    the block."""
    cap = connection_cap(max_connections)
    listener = _listen(host, port)
    options: dict[str, Any] = {"lifespan": "off", "access_log": False, "log_config": None, "ws": "none"}
    options |= {"log_level": "warning", "timeout_graceful_shutdown": _CLOSE_S, "timeout_keep_alive": _IDLE_S}
    options |= {"backlog": _BACKLOG, "http": partial(Connection, cap=cap)}
    server = _Server(uvicorn.Config(app, **options))
    shown_host = f"[{host}]" if ":" in host else host
    with _limited_logs():
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve([listener]), name="http")
            try:
                while not (server.started or serving.done()):  # uvicorn announces its start by this attribute only
                    await asyncio.sleep(0.01)
                yield f"http://{shown_host}:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await _finished(serving)  # which first sends the responses in progress, for a few seconds
                listener.close()


async def _finished(task: asyncio.Task[None]) -> None:
    """Waits for the task even if the wait is cancelled: a run that ends may be cancelled twice."""
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
