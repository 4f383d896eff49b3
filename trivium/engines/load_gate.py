"""Orders loads and completions: a load waits for earlier completions, and later completions wait for the load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class LoadGate:
    """Blocks of `async with gate.completion()` run concurrently. A block of `async with gate.load()` runs alone, in
    order of arrival."""

    def __init__(self) -> None:
        self._in_progress: set[asyncio.Event] = set()
        """The completions since the last requested load, each as an event that is set at its end."""
        self._loaded: asyncio.Event | None = None
        """Set at the end of the newest load; new completions wait for it."""

    @asynccontextmanager
    async def completion(self) -> AsyncGenerator[None]:
        """Begins after all loads that were requested before it."""
        loaded, in_progress, finished = self._loaded, self._in_progress, asyncio.Event()
        in_progress.add(finished)
        try:
            if loaded is not None:
                await loaded.wait()
            yield
        finally:
            in_progress.discard(finished)
            finished.set()

    @asynccontextmanager
    async def load(self) -> AsyncGenerator[None]:
        """Begins after all completions and loads that were requested before it."""
        before, earlier, loaded = self._in_progress, self._loaded, asyncio.Event()
        self._in_progress, self._loaded = set(), loaded
        try:
            for event in (*before, *([earlier] if earlier is not None else [])):
                await event.wait()
            yield
        finally:
            loaded.set()
