"""Waits with a deadline, heartbeats, blocking functions in threads, and liveness of processes."""

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

from trivium.foundation.errors import RolloutError, SyncError, text_of

T = TypeVar("T")

interrupted = threading.Event()
"""Set from Ctrl-C until the run has ended."""

# --------------------------------------------------------------------------- coroutines with a deadline

_GRACE_S = 1.0
"""Seconds that a cancelled task has to clean up."""

_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that ignore their cancellation. The event loop itself holds only weak references to tasks."""


class CancellationEscaped(RolloutError):
    """A coroutine was cancelled without a request of its caller."""

    def __init__(self) -> None:
        super().__init__(
            "a call that returns or raises an Exception",
            "it raised CancelledError without being cancelled",
            "catch the CancelledError in the function that cancels",
        )

    def __reduce__(self) -> tuple[type[CancellationEscaped], tuple[()]]:
        return type(self), ()


class ExitRaised(RolloutError):
    """User code raised a BaseException that is not an Exception, for example one that would end the process."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(
            "a call that returns or raises an Exception",
            f"it raised {type(raised).__name__}({text_of(raised)})",
            "raise an Exception: it fails one rollout and does not end the process",
        )
        self.__cause__ = raised

    def __reduce__(self) -> tuple[type[ExitRaised], tuple[BaseException | None]]:
        return type(self), (self.__cause__,)  # the argument with which another process unpickles it


async def _contained(awaitable: Awaitable[T]) -> T:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as raised:  # a task would also raise these in the event loop
        raise ExitRaised(raised) from raised


async def wait_for(seconds: float | None, awaitable: Awaitable[T], ended: Callable[[], object] = lambda: None) -> T:
    """Returns the result of `awaitable`; `seconds=None` sets no limit. Calls `ended` when it is done or times out.

    Raises TimeoutError at the limit. The result is then ignored, and an awaitable that ignores its cancellation is
    abandoned.
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
    """Waits until the task is done, for at most `seconds`. Like asyncio.wait for one task, in a third of its time."""
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
        task.exception()  # else asyncio logs that it was never retrieved


async def gather_or_cancel(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Gathers the results in order. The first error cancels the others and is raised after they have ended."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished)


class Turns:
    """Runs at most `limit` blocks `async with turns` at the same time, first come, first served.

    The end of a block takes the same time however many wait. 16,384 blocks at a limit of 4,096, the default of
    `workflow.max_concurrent`, take 50 ms of CPU time if those that run end together. `asyncio.Semaphore` takes 440 ms:
    each end searches the waiters that others have woken. It also belongs to the first event loop that waits for it.
    `anyio.CapacityLimiter` takes 290 ms: it returns to the event loop at the begin of each block.
    """

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._num_free:  # no task waits, since the end of a block passes its turn on
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has already got its turn
                self._pass_on()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives a turn to the next task that still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a cancelled task has left its future here
                turn.set_result(None)
                return
        self._num_free += 1


def run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine in a new event loop and returns its result, even if the caller runs in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "trivium-loop") as other:
        return other.submit(asyncio.run, coroutine).result()


# --------------------------------------------------------------------------- waiting for another component


class Waiting(NamedTuple):
    """Describes a wait for its error: `who` waits for `whom`, whose `last_state` is a text."""

    who: str
    whom: str
    last_state: str = ""


class ProgressDeadline:
    """The deadline of a wait, which expires after `seconds` without progress. `observe` restarts it if the state has
    changed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.state: object = None
        """The last state."""
        self._began = self._progressed = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once the deadline has expired."""
        return max(0.0, self._progressed + self.seconds - time.monotonic())

    def observe(self, state: object, changed_at: float | None = None) -> None:
        """`changed_at` is the time of the change, by `time.monotonic`; None for now."""
        if state != self.state:
            changed_at = time.monotonic() if changed_at is None else changed_at
            self.state, self._progressed = state, max(self._progressed, changed_at)

    def error(self, waiting: Waiting) -> SyncError:
        now = time.monotonic()
        found = f"waiting for {now - self._began:.0f} s, without progress for {now - self._progressed:.0f} s"
        return SyncError(
            f"{waiting.who} waits for {waiting.whom}",
            f"{found}; {waiting.last_state}" if waiting.last_state else found,
            "look at the log of the other side; raise sync.deadline_s if it is only slow",
        )


async def wait_until(
    poll: Callable[[ProgressDeadline], Awaitable[tuple[T | None, object]]],
    waiting: Callable[[], Waiting],
    deadline_s: float,
) -> T:
    """Calls `poll` until its answer is not None, and returns the answer.

    `poll` waits for a change, for at most the deadline's `left_s`, and returns (answer, state). A state that differs
    from the previous one is progress. Raises SyncError after `deadline_s` without progress; only then calls `waiting`,
    in a thread.
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
    """Calls `beat` every `period_s` while the block runs, in a thread, so that it continues while the event loop is
    busy."""

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
        # Not for ever: a beat may hang.
        self._thread.join(4 * self._period_s)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._beat()
                self._stopped.wait(self._period_s)
        except Exception as error:
            self.error = error


class HeartbeatTracker:
    """Measures how long a peer has been silent, from its count of beats and the clock of this process, since clocks of
    machines differ."""

    def __init__(self, max_gap_s: float = math.inf) -> None:
        """The measurement restarts if the observer itself has not looked for `max_gap_s`."""
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
"""Maximum number of abandoned functions that still run in the process."""
_IDLE_S = 1.0
"""Seconds after which a thread without work ends."""
_PATIENCE_S = 0.02
"""Seconds after which a queued function gets a new thread, if no other function has finished meanwhile. Most take
microseconds, and more threads would only slow them down."""


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
    """The number of functions that still run after their callers were cancelled."""
    return _num_abandoned


def _count_abandoned(change: int) -> None:
    global _num_abandoned
    with _count_lock:
        _num_abandoned += change


class Threads:
    """A pool of up to `limit` daemon threads that run functions in the context (contextvars) of their callers.

    A running function cannot be stopped. If its caller is cancelled, the function and its thread are abandoned, and
    another thread takes their place. At most `MAX_LEFT_BEHIND` abandoned functions may run at a time.
    concurrent.futures supports neither, and Python waits for the threads of its pools at exit.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._forget_threads()

    def _forget_threads(self) -> None:
        """Resets the pool to no threads, since a forked process does not have those of its parent."""
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._jobs: deque[_Job] = deque()
        self._threads = self._finished = 0
        self._growing: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._results: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = {}
        """Results that woken event loops have not read yet."""

    async def run(self, function: Callable[[], T]) -> T:
        """Runs the function and returns its result. If the caller is cancelled, removes the function from the queue or
        abandons it.

        Raises RolloutError while too many abandoned functions run.
        """
        if left_behind() >= MAX_LEFT_BEHIND:
            raise RolloutError(
                f"a thread for {self._name}",
                f"{left_behind()} calls still run in threads after their deadline",
                "give these calls a time limit, make them `async`, or (rewards) set `workers`",
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
        """Starts a thread if no function has finished since `finished`. Looks again later if functions are queued."""
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
                self._schedule_growth(job.future.get_loop())  # later, since others may be cancelled with this one

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
        """Wakes the loop of the future, once for all results that arrive before the loop reads them."""
        loop = future.get_loop()
        self._results.setdefault(loop, []).append((future, result, error))
        if len(self._results[loop]) > 1:
            return
        try:
            loop.call_soon_threadsafe(self._deliver, loop)
        except RuntimeError:
            del self._results[loop]
            if not loop.is_closed():  # a closed loop has no waiting tasks
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
        """The next job, or None after `_IDLE_S` without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs, _IDLE_S)
            if not self._jobs:
                self._threads -= 1
                return None
            job = self._jobs.popleft()
            job.running = True
            return job


def outcome_of(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Runs user code and returns (result, exception). Replaces exceptions that would end a task or the process."""
    try:
        return function(), None
    except (StopIteration, asyncio.CancelledError) as raised:  # these have a special meaning in a future
        return None, RuntimeError(f"{type(raised).__name__} raised by user code")
    except BaseException as raised:  # raised again in the caller
        return None, raised if isinstance(raised, Exception) else ExitRaised(raised)


# --------------------------------------------------------------------------- processes

_LOOK_S = 0.25
"""Seconds between two checks whether the owner of this process runs."""
_PR_SET_PDEATHSIG = 1
"""An option of prctl(2)."""


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Checks whether a process runs. Always true for a process of another machine, which only heartbeats can check."""

    host: str
    pid: int
    started: str
    """When the process started, in clock ticks: a later process may have the same pid. Empty without /proc."""

    @classmethod
    def of(cls, pid: int) -> ProcessLife:
        """Describes a process of this machine."""
        return cls(socket.gethostname(), pid, (_proc_stat(pid) or ("", "", 0))[1])

    def __call__(self) -> bool:
        if self.host != socket.gethostname():
            return True
        if self.started:
            state, started, _ = _proc_stat(self.pid) or ("gone", "", 0)
            return started == self.started and state not in ("Z", "X")  # dead, but not reaped by its parent
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        # It is the process of another user.
        except PermissionError:
            return True
        return True

    def activity(self) -> tuple[bool, float]:
        """(whether the process is stopped, its CPU seconds so far). For another machine or without /proc: (False, a
        time that always advances)."""
        if not self.started or self.host != socket.gethostname():
            return False, time.monotonic()
        state, _, ticks = _proc_stat(self.pid) or ("", "", 0)
        return state == "T", ticks / os.sysconf("SC_CLK_TCK")


def _proc_stat(pid: int) -> tuple[str, str, int] | None:
    """(state, start time, clock ticks of CPU time) of a process; None if it has ended or the system has no /proc."""
    try:
        # The name of the program, in parentheses, may contain any character: the last one ends it.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Fields 3, 22, 14 and 15 of proc(5).
    return fields[0], fields[19], int(fields[11]) + int(fields[12])


def end_with(owner: ProcessLife, first: Callable[[], object] | None = None) -> Callable[[], None]:
    """Ends this process within a second after `owner` ends, even during a call. Calls `first` before. Returns a
    function that stops the watch, for a process that ends by itself.

    Without `first`, Linux kills a child of the owner's main thread at once, even if it is stopped or C code holds its
    interpreter. A child of another thread does not get this, since it would end with that thread.
    """

    stopped = threading.Event()

    def watch() -> None:
        while owner():
            if stopped.wait(_LOOK_S):
                return
        if first is not None:
            first()
        os._exit(1)

    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children")
    if first is None and children.is_file() and str(os.getpid()) in children.read_text().split():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=watch, name="trivium-owner", daemon=True).start()
    return stopped.set


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
