"""HTTP services for tests of remote rewards: real sockets, and whatever may go wrong behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Behaviour = Callable[["Received", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Service:
    """A server whose n-th request meets the n-th behaviour; the last one is that of all later requests."""

    behaviours: list[Behaviour]
    requests: list[Received] = field(default_factory=list)
    url: str = ""
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has left while its response was due."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:]) if k}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            received = Received(head[0].split()[1], headers, json.loads(body) if body else None)
            self.requests.append(received)
            behave = self.behaviours[min(len(self.requests), len(self.behaviours)) - 1]
            await behave(received, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.broken.set()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def service(*behaviours: Behaviour, path: str = "/get_reward", port: int = 0) -> AsyncGenerator[Service]:
    here = Service(list(behaviours))
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.CancelledError):
            await here.handle(reader, writer)
        tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    here.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
    try:
        yield here
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks))
        await server.wait_closed()


def raw(status: int, body: bytes, **headers: str) -> Behaviour:
    """A response with these bytes."""

    async def behave(received: Received, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    return behave


def json_of(value: Any, status: int = 200, **headers: str) -> Behaviour:
    """A response with this JSON value (NaN and infinity included, as Python writes them)."""
    return raw(status, json.dumps(value).encode(), **headers)


def computed(function: Callable[[Any], Any]) -> Behaviour:
    """A response with what a function makes of the request's body."""

    async def behave(received: Received, writer: asyncio.StreamWriter) -> None:
        await json_of(function(received.body))(received, writer)

    return behave


async def hung(received: Received, writer: asyncio.StreamWriter) -> None:
    """No response: waits until the client leaves."""
    with suppress(OSError):
        await writer.wait_closed()


async def drip(received: Received, writer: asyncio.StreamWriter) -> None:
    """A response that arrives byte by byte, without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.transport.is_closing():
        writer.write(b"1\r\n[\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)  # slower than the network
    raise ConnectionResetError


async def endless(received: Received, writer: asyncio.StreamWriter) -> None:
    """A response that arrives fast, without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.transport.is_closing():
        writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
        await writer.drain()
    raise ConnectionResetError


async def cut(received: Received, writer: asyncio.StreamWriter) -> None:
    """A response that ends in its middle."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"rewards": [')
    await writer.drain()


def lengths(body: dict[str, Any]) -> dict[str, Any]:
    """Rewards by the length of each query, in the form of LightRFT and OpenRLHF."""
    queries: Sequence[str] = body.get("queries") or body["query"]
    return {"rewards": [float(len(query)) for query in queries]}
