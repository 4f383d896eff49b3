"""How a reward function is called, by the judge and by every other caller.

A plain function runs in a thread, an `async` one on the event loop, one with `workers` in child processes: only there
can a function be stopped that holds the interpreter. An exception is an outcome, which the caller gives its context.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from trivium.concurrency import CancellationEscaped, ExitRaised, Threads, wait_for

RewardFunction = Callable[..., Any]


class RewardCall:
    """A reward function, where it runs and how long a call may take (None: as long as the caller waits).

    `grace_s` is what the caller waits beyond the deadline, for a process that has to start first.
    """

    def __init__(
        self, function: RewardFunction, threads: Threads, deadline_s: float | None = None, grace_s: float = 0.0
    ) -> None:
        self._function, self._threads, self._deadline_s = function, threads, deadline_s
        self._patience_s = None if deadline_s is None else deadline_s + grace_s
        self.is_async = _is_async(function)

    async def __call__(self, /, **arguments: object) -> object:
        """What the function returned, or the exception that it ended with.

        Cancelling the call gives up its thread, which cannot be stopped, and kills its process.
        """
        try:
            return await wait_for(self._patience_s, self._outcome(arguments))
        except TimeoutError:
            return TimeoutError(f"no answer within {self._deadline_s:g} s")
        except (CancellationEscaped, ExitRaised) as error:
            return error

    async def _outcome(self, arguments: dict[str, object]) -> object:
        try:
            if self.is_async:
                return await self._function(**arguments)
            result = await self._threads.run(lambda: self._function(**arguments))
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            return error


def _is_async(function: RewardFunction) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
