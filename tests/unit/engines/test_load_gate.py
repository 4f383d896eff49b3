"""The order of loads and completions, also if one of them is cancelled while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from trivium.engines.load_gate import LoadGate


class _Blocks:
    """Blocks of a gate by name, each of which begins at a request and ends when it is released."""

    def __init__(self) -> None:
        self.gate, self.running = LoadGate(), set[str]()
        self._released: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def request(self, name: str) -> None:
        """Requests a load if the name begins with `load`, else a completion."""
        self._released[name] = asyncio.Event()
        block = self.gate.load() if name.startswith("load") else self.gate.completion()
        self.tasks[name] = asyncio.ensure_future(self._run(name, block))
        await _settle()

    async def release(self, name: str) -> None:
        self._released[name].set()
        await _settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await _settle()

    async def _run(self, name: str, block: AbstractAsyncContextManager[None]) -> None:
        async with block:
            self.running.add(name)
            try:
                await self._released[name].wait()
            finally:
                self.running.discard(name)


async def _settle() -> None:
    """Lets everything happen that can: nothing here waits for more than other tasks, a few turns of the loop each."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def _blocks() -> AsyncGenerator[_Blocks]:
    blocks = _Blocks()
    yield blocks
    for name in list(blocks.tasks):
        await blocks.cancel(name)


async def test_a_load_waits_for_earlier_completions_and_later_ones_for_it() -> None:
    async with _blocks() as blocks:
        for name in ("a", "load 1", "b", "load 2"):
            await blocks.request(name)
        assert blocks.running == {"a"}
        await blocks.release("a")
        assert blocks.running == {"load 1"}
        await blocks.release("load 1")
        assert blocks.running == {"b"}
        await blocks.release("b")
        assert blocks.running == {"load 2"}


async def test_a_load_waits_for_the_completions_before_a_cancelled_load() -> None:
    async with _blocks() as blocks:
        for name in ("a", "load 1"):
            await blocks.request(name)
        await blocks.cancel("load 1")
        await blocks.request("load 2")
        assert blocks.running == {"a"}
        await blocks.release("a")
        assert blocks.running == {"load 2"}


async def test_a_completion_waits_for_the_load_before_a_cancelled_load() -> None:
    async with _blocks() as blocks:
        for name in ("load 1", "load 2", "a"):
            await blocks.request(name)
        await blocks.cancel("load 2")
        assert blocks.running == {"load 1"}
        await blocks.release("load 1")
        assert blocks.running == {"a"}
