"""Call: the result of a method that Trinity-RFT calls directly in one version and awaits in another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from trivium.types import Metrics

T = TypeVar("T")


class Call(Coroutine[Any, Any, T]):
    """A call that has begun. Awaiting it waits in the event loop, `result` blocks.

    Without a running event loop, the constructor runs the function to its end and raises its errors. Within one, a
    thread runs it, and the loop continues.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._steps: Generator[Any, Any, T] | None = None
        self.is_read = False
        """Whether its result or its error was read."""
        self._future.set_running_or_notify_cancel()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._thread = threading.current_thread()
            self._future.set_result(function())
        else:
            self._thread = threading.Thread(target=self._run, args=(function,), name="trinity-call", daemon=True)
            self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:
            self._future.set_exception(error)  # raised where the call is awaited, or by the next call

    def result(self) -> T:
        """Returns the result, or raises the error. Blocks."""
        self.is_read = True
        return self._future.result()

    def settle(self) -> None:
        """Waits for the end of the call. Raises its error, unless it was raised before. Blocks."""
        if threading.current_thread() is self._thread:
            return  # the function itself calls `settle`, or the constructor has run it in this thread
        wait((self._future,))
        if not self.is_read:
            self.result()

    # ------------------------------------------------------------------ the protocol of a coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        self.is_read = True
        return asyncio.wrap_future(self._future).__await__()

    def send(self, value: Any, /) -> Any:
        return self._started().send(value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None, /) -> Any:
        return self._started().throw(typ if val is None else val)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def _started(self) -> Generator[Any, Any, T]:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps


class Stepped(Call[Metrics]):
    """The call of a train step. Awaiting it returns the metrics, as in Trinity-RFT 0.4; unpacking it waits for (whether
    to continue, metrics), as in 0.2."""

    def __iter__(self) -> Iterator[Any]:
        return iter((True, self.result()))

    def __getitem__(self, place: int) -> Any:
        return (True, self.result())[place]

    def __len__(self) -> int:
        return 2


def done() -> Call[None]:
    """Returns a call that has ended, for methods that block and may be awaited."""
    call: Call[None] = Call.__new__(Call)
    call._future, call._steps, call.is_read = Future(), None, True
    call._thread = threading.current_thread()
    call._future.set_result(None)
    return call
