"""Orders loads and completions: a load waits for earlier completions, and later completions wait for the load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager


class LoadGate:
    """Blocks of `async with gate.completion()` run concurrently. A block of `async with gate.load()` runs alone, in
    order of arrival. A block that is cancelled while it waits has no effect on the others."""

    def __init__(self) -> None:
        # Each block that has not ended, as an event that is set at its end.
        self._completions: set[asyncio.Event] = set()
        self._loads: set[asyncio.Event] = set()

    def completion(self) -> AbstractAsyncContextManager[None]:
        """Begins after all loads that were requested before it."""
        return self._after((*self._loads,), self._completions)

    def load(self) -> AbstractAsyncContextManager[None]:
        """Begins after all completions and loads that were requested before it."""
        return self._after((*self._loads, *self._completions), self._loads)

    @asynccontextmanager
    async def _after(self, earlier: tuple[asyncio.Event, ...], same_kind: set[asyncio.Event]) -> AsyncGenerator[None]:
        ended = asyncio.Event()
        same_kind.add(ended)
        try:
            for event in earlier:
                await event.wait()
            yield
        finally:
            same_kind.discard(ended)
            ended.set()
