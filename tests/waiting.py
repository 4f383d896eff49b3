"""Waits for a state that nothing announces, each with a deadline. Where the product or a test's double has an event,
a test waits for the event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.processes import Forked

_LOOK_S = 0.005
"""Seconds between two looks."""


def eventually(
    happened: Callable[[], object],
    seconds: float = 60.0,
    why: Callable[[], object] = lambda: "",
    *processes: Forked,
) -> None:
    """Waits until it has happened; AssertionError after `seconds`, or when a process has ended without it."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, _late(seconds, why)
        assert all(process.poll() is None for process in processes) or happened(), why()
        time.sleep(_LOOK_S)


async def until(happened: Callable[[], object], seconds: float = 60.0, why: Callable[[], object] = lambda: "") -> None:
    """Waits until it has happened, while the event loop goes on; AssertionError after `seconds`. `happened` may be a
    coroutine function."""
    end = time.monotonic() + seconds
    while not (await now if isinstance(now := happened(), Awaitable) else now):
        assert time.monotonic() < end, _late(seconds, why)
        await asyncio.sleep(_LOOK_S)


def _late(seconds: float, why: Callable[[], object]) -> str:
    return f"it has not happened after {seconds:.0f} s\n{why()}"
