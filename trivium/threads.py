"""Runs plain functions of users beside the event loop, in threads that cannot keep the process alive.

asyncio's own pool is joined at exit: one reward in an endless loop would hang the run after its deadline had fired.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trivium.errors import RolloutError

T = TypeVar("T")

MAX_LEFT_BEHIND = 64
"""Functions that may still compute after their caller has given them up, in the whole process."""

_IDLE_S = 1.0
"""A thread without work for so long ends."""

_PATIENCE_S = 0.02
"""A function that waits gets a thread of its own where none has finished for so long: most take microseconds, and many
threads would only get in each other's way."""


@dataclass(eq=False)
class _Job:
    """A function that waits for a thread, or runs in one."""

    function: Callable[[], Any]
    future: asyncio.Future[Any]
    watch: asyncio.TimerHandle | None = None
    """Looks after it while it waits."""
    running: bool = False
    left: bool = False
    """Its caller has gone while it ran."""


_left_behind = 0
_counting = threading.Lock()


def left_behind() -> int:
    """How many functions still run although their caller has given them up."""
    return _left_behind


def _leave(change: int) -> None:
    global _left_behind
    with _counting:
        _left_behind += change


class Threads:
    """Up to `limit` daemon threads that take one function after the other.

    A function that is given up while it runs cannot be stopped: it is left behind with its thread, another thread takes
    its place, and there may be no more than `MAX_LEFT_BEHIND` of them.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._changed = threading.Condition(threading.Lock())
        self._jobs: deque[_Job] = deque()
        self._threads = self._finished = 0

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result. Cancelling gives up the function, in a thread or on its way to one.

        Raises RolloutError while too many others that were given up still run.
        """
        if left_behind() >= MAX_LEFT_BEHIND:
            raise RolloutError(
                f"a thread for {self._name}",
                f"{left_behind()} calls that were given up at their deadline still run in theirs",
                "give what they wait for a time limit of its own, make it `async`, or (rewards) set `workers`",
            )
        job = _Job(function, asyncio.get_running_loop().create_future())
        with self._changed:
            self._jobs.append(job)
            if not self._threads:
                self._start()
            self._changed.notify()
            self._watch_over(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        finally:
            if job.watch is not None:
                job.watch.cancel()

    def _watch_over(self, job: _Job) -> None:
        job.watch = job.future.get_loop().call_later(_PATIENCE_S, self._look_after, job, self._finished)

    def _look_after(self, job: _Job, finished: int) -> None:
        with self._changed:
            if job.running or job.future.done() or self._threads >= self._limit:
                return
            if self._finished == finished:
                self._start()
            self._watch_over(job)

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _give_up(self, job: _Job) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
            elif job.running:
                job.left = True
                self._threads -= 1
                _leave(+1)
                job.future.get_loop().call_later(_PATIENCE_S, self._replace)  # others may be given up with it

    def _replace(self) -> None:
        with self._changed:
            if self._jobs and self._threads < self._limit:
                self._start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            outcome = _outcome(job.function)
            with self._changed:
                self._finished += 1
                job.running = False
            if job.left:
                _leave(-1)
                return
            _deliver(job.future, *outcome)

    def _next(self) -> _Job | None:
        """The next job; None where there is none for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs, _IDLE_S)
            if not self._jobs:
                self._threads -= 1
                return None
            job = self._jobs.popleft()
            job.running = True
            return job


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except (StopIteration, asyncio.CancelledError) as raised:  # from a future they would mean something else
        return None, RuntimeError(f"{type(raised).__name__} raised by user code")
    except BaseException as raised:  # carried to the caller, who decides
        return None, raised


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    loop = future.get_loop()
    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        if not loop.is_closed():  # a closed loop has nobody left to tell
            raise
