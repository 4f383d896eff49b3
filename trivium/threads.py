"""Runs plain functions of users beside the event loop, in threads that cannot keep the process alive.

asyncio's own pool is joined at exit: one reward in an endless loop would hang the run after its deadline had fired.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], name: str = "trivium-user-code") -> T:
    """The function's result, computed in a daemon thread of its own. Cancelling abandons the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # carried to the caller, who decides
            error = raised
            if isinstance(raised, StopIteration):
                error = RuntimeError(f"StopIteration raised by {name}")
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:
                if not loop.is_closed():
                    raise

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future
