"""Calls a function of the user: a reward, a tool, a method of an environment.

A plain function runs in a thread, an `async` one on the event loop, and one with `workers` in child processes: only a
process can be stopped while it holds the interpreter. A plain function with the attribute `brief = True` takes
microseconds for any input. It runs on the event loop, because passing it to a thread would take longer.

A function that handles signals needs a main thread. Its first such call fails in the thread, even if the function
catches the error. This call is repeated in a fork of this process, where all later calls run, too.

An exception of the function is returned, not raised: the caller adds its context.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from trivium.foundation.concurrency import Threads, outcome_of, wait_for
from trivium.foundation.errors import RolloutError
from trivium.processes.isolated import InProcesses, forked
from trivium.processes.isolated.signals import MainThreadWanted, main_thread_wanted

_log = logging.getLogger("trivium")

RewardFunction = Callable[..., Any]


class UserCall:
    """A function of the user, where it runs and how long a call may take (None: as long as the caller waits).

    `grace_s` is how long the caller waits beyond the deadline, for a process that has to start first. `label` names the
    function in errors and in the log; `limit` is the number of forks that may call it at the same time, if it needs a
    main thread.
    """

    def __init__(
        self,
        function: RewardFunction,
        threads: Threads,
        deadline_s: float | None = None,
        grace_s: float = 0.0,
        *,
        label: str = "a function",
        limit: int = 1,
    ) -> None:
        self._function, self._threads, self._deadline_s = function, threads, deadline_s
        self._patience_s = None if deadline_s is None else deadline_s + grace_s
        self._label, self._limit = label, limit
        self._forked: InProcesses | None = None
        self.is_async = _is_async(function)
        self.is_brief = not self.is_async and getattr(function, "brief", False) is True

    async def __call__(self, /, **arguments: object) -> object:
        """The function's result, or the exception it ended with: TimeoutError after the deadline, RolloutError if no
        thread was free until then.

        Cancelling the call abandons its thread, which cannot be stopped, or kills its process.
        """
        if self.is_brief:
            result, error = outcome_of(functools.partial(self._function, **arguments))
            return result if error is None else error
        if self._patience_s is None:
            return await self._outcome(arguments, threading.Event())
        started = threading.Event()
        try:
            return await wait_for(self._patience_s, self._outcome(arguments, started))
        except TimeoutError:
            if started.is_set():
                return TimeoutError(f"no answer within {self._deadline_s:g} s")
            found = f"none was free within {self._patience_s:g} s"
            do = "give its calls a shorter deadline, make it `async`, or raise `threads`"
            return RolloutError(f"a thread for {self._label}", found, do)

    async def _outcome(self, arguments: dict[str, object], started: threading.Event) -> object:
        """The result or exception of a call in this process, or in a fork once the function has needed one. Sets
        `started` when the call begins."""
        if self._forked is None:
            with main_thread_wanted() as calls:
                outcome = await _outcome_of(self._here(arguments, started))
            if not calls:
                return outcome
            self._forked = self._forked or self._fork(calls[0])  # a concurrent call may have done it
        started.set()
        return await _outcome_of(self._forked(**arguments))

    async def _here(self, arguments: dict[str, object], started: threading.Event) -> object:
        """The function's result. Raises its exception. Its own CancelledError or SystemExit becomes an error."""
        if self.is_async:
            started.set()
            return await wait_for(None, self._function(**arguments))

        def called() -> object:
            started.set()
            return self._function(**arguments)

        result = await self._threads.run(called)
        return await wait_for(None, result) if inspect.isawaitable(result) else result

    def _fork(self, call: str) -> InProcesses:
        _log.info("%s calls %s: from now on it runs in the main thread of a separate process", self._label, call)
        return forked(self._function, self._label, self._limit)


async def _outcome_of(call: Awaitable[object]) -> object:
    try:
        return await call
    except (Exception, MainThreadWanted) as error:
        return error


def _is_async(function: RewardFunction) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
