"""Orders loads among completions: completions before a load finish first, later ones wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class LoadGate:
    """Blocks `async with gate.completion()` run together; one `async with gate.load()` runs alone, in its turn."""

    def __init__(self) -> None:
        self._in_progress: set[asyncio.Event] = set()
        """The completions since a load was last asked for, each with what is set at its end."""
        self._loaded: asyncio.Event | None = None
        """The load that completions beginning now must wait for."""

    @asynccontextmanager
    async def completion(self) -> AsyncGenerator[None]:
        """Begins after every load that was asked for before it."""
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
        """Begins once every completion and load that was asked for before it is over."""
        before, earlier, loaded = self._in_progress, self._loaded, asyncio.Event()
        self._in_progress, self._loaded = set(), loaded
        try:
            for event in (*before, *([earlier] if earlier is not None else [])):
                await event.wait()
            yield
        finally:
            loaded.set()
