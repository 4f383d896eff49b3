"""The one home of each: waits with a deadline, heartbeats, users' functions in threads, whether a process is alive."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import math
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from trivium.errors import RolloutError, SyncError, text_of

T = TypeVar("T")

# --------------------------------------------------------------------------- coroutines with a deadline

_GRACE_S = 1.0
"""Seconds that a cancelled task has to clean up."""

_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that ignored their cancellation. A reference here keeps the garbage collector from them."""


class CancellationEscaped(RolloutError):
    """A coroutine ended by a cancellation that its caller did not request."""

    def __init__(self) -> None:
        super().__init__(
            "a call that returns or raises an Exception",
            "it let a cancellation of its own escape",
            "catch the CancelledError where it belongs",
        )


class ExitRaised(RolloutError):
    """User code raised what would end the process, or is no Exception for another reason."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(
            "a call that returns or raises an Exception",
            f"it raised {type(raised).__name__}({text_of(raised)})",
            "raise an Exception: what user code raises fails one rollout, and does not end the process",
        )
        self.__cause__ = raised

    def __reduce__(self) -> tuple[type[ExitRaised], tuple[BaseException | None]]:
        return type(self), (self.__cause__,)  # pickled by its own argument between processes


async def _contained(awaitable: Awaitable[T]) -> T:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as raised:  # a task would raise them in the event loop as well
        raise ExitRaised(raised) from raised


async def wait_for(seconds: float | None, awaitable: Awaitable[T], ended: Callable[[], object] = lambda: None) -> T:
    """The result of `awaitable`; `seconds=None` sets no limit. `ended` is called when it is done, or its time is up.

    Raises TimeoutError where it takes longer, and that is final: what it returns while it is being cancelled is
    ignored, and one that ignores its cancellation is not waited for.
    """
    task = asyncio.get_running_loop().create_task(_contained(awaitable))
    try:
        await _settled(task, seconds)
    finally:
        late = not task.done()
        if late:
            task.cancel()
        ended()
        if late:
            _abandoned.add(task)
            task.add_done_callback(_forget)
            await _settled(task, _GRACE_S)
            if task.done() and isinstance(awaitable, Coroutine):
                awaitable.close()  # it may not have started
    if late:
        raise TimeoutError
    if task.cancelled():
        raise CancellationEscaped
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise ExitRaised(error)
    return task.result()


async def _settled(task: asyncio.Task[Any], seconds: float | None) -> None:
    """Waits until the task is done, so long at most: asyncio.wait for one task, at a third of its price."""
    settled = task.get_loop().create_future()

    def settle(_: object = None) -> None:
        if not settled.done():
            settled.set_result(None)

    timer = None if seconds is None else task.get_loop().call_later(max(0.0, seconds), settle)
    task.add_done_callback(settle)
    try:
        await settled
    finally:
        task.remove_done_callback(settle)
        if timer is not None:
            timer.cancel()


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio would log that it never was


async def gather_or_cancel(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """The results in order. The first error cancels the others and is raised once they have ended."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished)


class Turns:
    """At most `limit` blocks `async with turns` at the same time, in the order in which they were reached.

    asyncio.Semaphore looks at the waiting tasks one by one for each that leaves: time in the square of their number.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free:  # then no task waits: a block that ends hands its turn over
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it already had its turn
                self._hand_over()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, from an event loop of its own: also where the caller is itself inside one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "trivium-loop") as other:
        return other.submit(asyncio.run, coroutine).result()


# --------------------------------------------------------------------------- waiting for another component


class Waiting(NamedTuple):
    """The text of an expired wait: `who` waits for `whom`, and the state (`seen`)."""

    who: str
    whom: str
    seen: str = ""


class ProgressDeadline:
    """The deadline of a wait. It fires after `seconds` without progress: `observe` starts it anew where the state that
    it is given has changed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.state: object = None
        """The state observed last."""
        self._began = self._progressed = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once the deadline has expired."""
        return max(0.0, self._progressed + self.seconds - time.monotonic())

    def observe(self, state: object) -> None:
        if state != self.state:
            self.state, self._progressed = state, time.monotonic()

    def error(self, waiting: Waiting) -> SyncError:
        now = time.monotonic()
        found = f"waiting for {now - self._began:.0f} s, nothing happened for {now - self._progressed:.0f} s"
        return SyncError(
            f"{waiting.who} waits for {waiting.whom}",
            f"{found}; {waiting.seen}" if waiting.seen else found,
            "look at the log of the one waited for; raise sync.deadline_s if it is only slow",
        )


async def wait_until(
    poll: Callable[[ProgressDeadline], Awaitable[tuple[T | None, object]]],
    waiting: Callable[[], Waiting],
    deadline_s: float,
) -> T:
    """What `poll` answers once that is not None.

    `poll` waits for a change, at most for the `left_s` of the deadline that it is given, and returns (answer, state):
    a state that differs from the last one is progress. Raises SyncError after `deadline_s` without progress; only then
    `waiting` is called, in a thread.
    """
    deadline = ProgressDeadline(deadline_s)
    while True:
        answer, state = await poll(deadline)
        if answer is not None:
            return answer
        deadline.observe(state)
        if not deadline.left_s:
            raise deadline.error(await asyncio.to_thread(waiting))


# --------------------------------------------------------------------------- heartbeats


class Heartbeat:
    """Calls `beat` every `period_s` while the block runs. A thread does, so that a busy event loop is not a death."""

    def __init__(self, beat: Callable[[], object], period_s: float, name: str) -> None:
        self.error: Exception | None = None
        """The error that stopped the thread, for the owner to raise."""
        self._beat, self._period_s = beat, period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(4 * self._period_s)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._beat()
                self._stopped.wait(self._period_s)
        except Exception as error:
            self.error = error


class HeartbeatTracker:
    """How long a peer has been silent. It compares counts of beats by the clock of this process: machines disagree on
    the time."""

    def __init__(self, max_gap_s: float = math.inf) -> None:
        """An observer that has not looked for `max_gap_s` cannot tell; for it the silence starts again."""
        self._max_gap_s = max_gap_s
        self._beats = 0
        self._since = self._looked = time.monotonic()

    def silence_s(self, beats: int) -> float:
        """The seconds for which the peer's count of beats has been `beats`."""
        now = time.monotonic()
        if beats != self._beats or now - self._looked > self._max_gap_s:
            self._beats, self._since = beats, now
        self._looked = now
        return now - self._since


# --------------------------------------------------------------------------- users' functions in threads

MAX_LEFT_BEHIND = 64
"""Abandoned functions that may still run, in the whole process."""
_IDLE_S = 1.0
"""A thread that has no work for so long ends."""
_PATIENCE_S = 0.02
"""A queued function gets a new thread where no other has finished for so long: most take microseconds, and more threads
would only slow them down."""


@dataclass(eq=False, slots=True)
class _Job:
    """A function that is queued or runs."""

    function: Callable[[], Any]
    future: asyncio.Future[Any]
    context: contextvars.Context
    running: bool = False
    abandoned: bool = False
    """Whether its caller was cancelled while it ran."""


_num_abandoned = 0
_count_lock = threading.Lock()


def left_behind() -> int:
    """The number of functions that still run after their caller was cancelled."""
    return _num_abandoned


def _count_abandoned(change: int) -> None:
    global _num_abandoned
    with _count_lock:
        _num_abandoned += change


class Threads:
    """A pool of up to `limit` daemon threads, which run a function in its caller's context (contextvars).

    A function whose caller is cancelled while it runs cannot be stopped: it is abandoned with its thread, another
    thread takes its place, and there may be no more than `MAX_LEFT_BEHIND` of them.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._forget_threads()

    def _forget_threads(self) -> None:
        """Starts without threads: a forked process has none of its parent's."""
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._jobs: deque[_Job] = deque()
        self._threads = self._finished = 0
        self._growing: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._results: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = {}
        """Results that event loops were woken for and have not read yet."""

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result. Cancelling removes it from the queue, or abandons it.

        Raises RolloutError while too many abandoned functions still run.
        """
        if left_behind() >= MAX_LEFT_BEHIND:
            raise RolloutError(
                f"a thread for {self._name}",
                f"{left_behind()} calls that were given up at their deadline still run in theirs",
                "give what they wait for a time limit of its own, make it `async`, or (rewards) set `workers`",
            )
        if self._pid != os.getpid():
            self._forget_threads()
        loop = asyncio.get_running_loop()
        job = _Job(function, loop.create_future(), contextvars.copy_context())
        with self._changed:
            self._jobs.append(job)
            if not self._threads:
                self._start()
            self._changed.notify()
            self._schedule_growth(loop)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def _schedule_growth(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._growing:
            self._growing.add(loop)
            loop.call_later(_PATIENCE_S, self._grow, loop, self._finished)

    def _grow(self, loop: asyncio.AbstractEventLoop, finished: int) -> None:
        """Starts a thread where the queue has not moved since `finished`; the loop looks again while there is one."""
        with self._changed:
            self._growing.discard(loop)
            if not self._jobs:
                return
            if self._threads < self._limit and (not self._threads or self._finished == finished):
                self._start()
            self._schedule_growth(loop)

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _abandon(self, job: _Job) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
            elif job.running:
                job.abandoned = True
                self._threads -= 1
                _count_abandoned(+1)
                self._schedule_growth(job.future.get_loop())  # not at once: others may be cancelled with it

    def _work(self) -> None:
        while (job := self._next()) is not None:
            outcome = job.context.run(outcome_of, job.function)
            with self._changed:
                self._finished += 1
                job.running = False
                if job.abandoned:
                    _count_abandoned(-1)
                    return
                self._report(job.future, *outcome)

    def _report(self, future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
        """Wakes the loop of the future for this result and those that come before it has read them."""
        loop = future.get_loop()
        self._results.setdefault(loop, []).append((future, result, error))
        if len(self._results[loop]) > 1:
            return
        try:
            loop.call_soon_threadsafe(self._deliver, loop)
        except RuntimeError:
            del self._results[loop]
            if not loop.is_closed():  # in a closed loop nothing waits for the results
                raise

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            results = self._results.pop(loop)
        for future, result, error in results:
            if not future.done() and error is not None:
                future.set_exception(error)
            elif not future.done():
                future.set_result(result)

    def _next(self) -> _Job | None:
        """The next job; None after a while without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs, _IDLE_S)
            if not self._jobs:
                self._threads -= 1
                return None
            job = self._jobs.popleft()
            job.running = True
            return job


def outcome_of(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(result of user code, its exception as an error that ends neither a task nor the process)."""
    try:
        return function(), None
    except (StopIteration, asyncio.CancelledError) as raised:  # a future would give them another meaning
        return None, RuntimeError(f"{type(raised).__name__} raised by user code")
    except BaseException as raised:  # raised again in the caller
        return None, raised if isinstance(raised, Exception) else ExitRaised(raised)


# --------------------------------------------------------------------------- processes

_LOOK_S = 0.25
"""How often a process looks whether the one that it works for runs."""
_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Whether a process runs. True for one of another machine: only a heartbeat can tell there."""

    host: str
    pid: int
    started: str
    """When the process started, in clock ticks: a later one may reuse its pid. Empty where the system has no /proc."""

    @classmethod
    def of(cls, pid: int) -> ProcessLife:
        """The life of a process of this machine."""
        return cls(socket.gethostname(), pid, (_proc_stat(pid) or ("", "", 0))[1])

    def __call__(self) -> bool:
        if self.host != socket.gethostname():
            return True
        if self.started:
            state, started, _ = _proc_stat(self.pid) or ("gone", "", 0)
            return started == self.started and state not in ("Z", "X")  # dead, though its parent has not reaped it
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def activity(self) -> tuple[bool, float]:
        """(whether the process is stopped, its CPU seconds so far); of another machine, or where the system has no
        /proc, a time that always advances."""
        if not self.started or self.host != socket.gethostname():
            return False, time.monotonic()
        state, _, ticks = _proc_stat(self.pid) or ("", "", 0)
        return state == "T", ticks / os.sysconf("SC_CLK_TCK")


def _proc_stat(pid: int) -> tuple[str, str, int] | None:
    """(state, start time, clock ticks of CPU time) of a process where the system has /proc; the name in front of them
    may contain anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], fields[19], int(fields[11]) + int(fields[12])


def end_with(owner: ProcessLife, first: Callable[[], object] | None = None) -> None:
    """Ends this process within a second of `owner`, also in the middle of a call; `first` is called before.

    Without `first`, Linux kills a child of the owner's main thread at once, also one that is stopped or holds the
    interpreter. A child of another thread would be killed with that thread.
    """

    def watch() -> None:
        while owner():
            time.sleep(_LOOK_S)
        if first is not None:
            first()
        os._exit(1)

    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children")
    if first is None and children.is_file() and str(os.getpid()) in children.read_text().split():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=watch, name="trivium-owner", daemon=True).start()


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
