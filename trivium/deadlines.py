"""Coroutines that are users' own, held to a time: what comes of them, and an end to what does not end by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from trivium.errors import RolloutError

T = TypeVar("T")

_GRACE_S = 1.0
"""How long something that was cancelled may still take to clean up."""

_left_behind: set[asyncio.Task[Any]] = set()
"""What did not heed its cancellation. A reference here keeps it from vanishing half-way."""


class CancellationEscaped(RolloutError):
    """Something ended by a cancellation that nobody outside asked for."""

    def __init__(self) -> None:
        super().__init__(
            "an end by itself", "it let a cancellation of its own escape", "catch the CancelledError where it belongs"
        )


async def within(seconds: float | None, doing: Awaitable[T], ended: Callable[[], object] = lambda: None) -> T:
    """What comes of it; None waits as long as the caller does. `ended` is called when it is over, or its time is up.

    Raises TimeoutError where it took longer, and that is final: what it still does while it is cancelled counts for
    nothing, and if it does not heed the cancellation, nobody waits for it.
    """
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait({task}, timeout=None if seconds is None else max(0.0, seconds))
    finally:
        late = not task.done()
        if late:
            task.cancel()
        ended()
        if late:
            _left_behind.add(task)
            task.add_done_callback(_forget)
            await asyncio.wait({task}, timeout=_GRACE_S)
    if late:
        raise TimeoutError
    if task.cancelled():
        raise CancellationEscaped
    return task.result()


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, or asyncio would report what nobody waits for


async def together(doings: Iterable[Awaitable[T]]) -> list[T]:
    """The results in order. The first error ends the others and is raised once they have ended."""
    tasks = [asyncio.ensure_future(doing) for doing in doings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished)
