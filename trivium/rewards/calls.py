"""How a reward function is called, by the judge and by every other caller.

A plain function runs in a thread, an `async` one on the event loop, one with `workers` in child processes: only there
can a function be stopped that holds the interpreter. A plain function that takes microseconds, whatever it is given,
says so by an attribute `brief = True`: it runs on the event loop, since a thread would take longer to start on it. A
function that handles signals needs a main thread: its first such call, wherever it is caught, ends that attempt, and
the function runs in a fork of this process from then on. An exception is an outcome, which the caller gives its
context.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from trivium.concurrency import Threads, outcome_of, wait_for
from trivium.rewards.forked import Forks
from trivium.rewards.isolated import InProcesses
from trivium.rewards.signals import MainThreadWanted, main_thread_wanted

_log = logging.getLogger("trivium")

RewardFunction = Callable[..., Any]


class RewardCall:
    """A reward function, where it runs and how long a call may take (None: as long as the caller waits).

    `grace_s` is what the caller waits beyond the deadline, for a process that has to start first. `label` is how errors
    and the log call it; `limit` is how many forks may call it at the same time, where it needs a main thread.
    """

    def __init__(
        self,
        function: RewardFunction,
        threads: Threads,
        deadline_s: float | None = None,
        grace_s: float = 0.0,
        *,
        label: str = "a reward",
        limit: int = 1,
    ) -> None:
        self._function, self._threads, self._deadline_s = function, threads, deadline_s
        self._patience_s = None if deadline_s is None else deadline_s + grace_s
        self._label, self._limit = label, limit
        self._forked: InProcesses | None = None
        self.is_async = _is_async(function)
        self.is_brief = not self.is_async and getattr(function, "brief", False) is True

    async def __call__(self, /, **arguments: object) -> object:
        """What the function returned, or the exception that it ended with.

        Cancelling the call gives up its thread, which cannot be stopped, and kills its process.
        """
        if self.is_brief:
            result, error = outcome_of(functools.partial(self._function, **arguments))
            return result if error is None else error
        if self._patience_s is None:
            return await self._outcome(arguments)
        try:
            return await wait_for(self._patience_s, self._outcome(arguments))
        except TimeoutError:
            return TimeoutError(f"no answer within {self._deadline_s:g} s")

    async def _outcome(self, arguments: dict[str, object]) -> object:
        if self._forked is None:
            with main_thread_wanted() as calls:
                outcome = await _outcome_of(self._here(arguments))
            if not calls:
                return outcome
            self._move(calls[0])
        assert self._forked is not None
        return await _outcome_of(self._forked(**arguments))

    async def _here(self, arguments: dict[str, object]) -> object:
        """Raises what the function raises; a cancellation or an exit of its own as an error."""
        if self.is_async:
            return await wait_for(None, self._function(**arguments))
        result = await self._threads.run(functools.partial(self._function, **arguments))
        return await wait_for(None, result) if inspect.isawaitable(result) else result

    def _move(self, call: str) -> None:
        if self._forked is None:  # calls that ran side by side find it moved
            _log.info("%s calls %s: from now on it runs in the main thread of a process of its own", self._label, call)
            self._forked = InProcesses(Forks(self._label, self._function), self._limit)


async def _outcome_of(call: Awaitable[object]) -> object:
    try:
        return await call
    except (Exception, MainThreadWanted) as error:
        return error


def _is_async(function: RewardFunction) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
