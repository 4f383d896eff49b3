"""Requests and loads of one engine, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class LoadOrder:
    """A load waits for the requests that came before it; requests that come later wait for the load. Of one loop."""

    def __init__(self) -> None:
        self._earlier: set[asyncio.Event] = set()
        """The ends of the requests since the newest load was asked for."""
        self._newest: asyncio.Event | None = None
        """The end of that load; None: it is over."""

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[None]:
        """What runs inside is in flight, once the loads before it are over."""
        load, end = self._newest, asyncio.Event()
        requests = self._earlier
        requests.add(end)
        try:
            if load is not None:
                await load.wait()
            yield
        finally:
            requests.discard(end)
            end.set()

    @asynccontextmanager
    async def load(self) -> AsyncGenerator[None]:
        """Inside, nothing is in flight."""
        before, previous, end = self._earlier, self._newest, asyncio.Event()
        self._earlier, self._newest = set(), end
        try:
            for event in ([previous] if previous is not None else []) + list(before):
                await event.wait()
            yield
        finally:
            end.set()
            if self._newest is end:
                self._newest = None
