"""A simulated computer: processes whose threads take turns in virtual time, in an order that follows from a seed.

A simulated thread is a greenlet. It runs real code until it blocks (it sleeps, waits for a lock, an event or its event
loop, or writes to the disk). The computer then resumes the thread that is due next and sets the clock to that moment.
Nothing runs at the same time, so a seed determines the whole history. A process can be killed at every moment at which
one of its threads would be resumed: none of its code runs afterwards, and its files are closed, as the kernel does it.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import random
import sys
from asyncio import events
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import greenlet

from trivium.foundation.errors import TriviumError

EPOCH = 1_700_000_000.0
"""`time.time()` when a simulation begins."""


_unfinished: set[Thread] = set()
"""All threads that have not ended. Those of killed processes stay: collecting them would run their `finally` blocks."""


@dataclass(eq=False)
class Process:
    """A simulated process."""

    name: str
    alive: bool = True
    code: int | None = None
    """The exit code; None while it runs and if it was killed."""
    error: BaseException | None = None
    """The error that ended it."""
    thread_errors: list[BaseException] = field(default_factory=list[BaseException])
    """Errors that ended threads other than the main one. The process continues after them, as in Python."""
    on_death: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """What the kernel does when it dies: closes its files and connections."""
    writes: int = 0
    """How often it has begun or ended to change a directory, a file that it syncs, or a database."""
    stopped_until: float = 0.0
    """The process is suspended until this time."""


class Thread(greenlet.greenlet):
    """A simulated thread."""

    def __init__(self, computer: Computer, process: Process, function: Callable[[], Any], name: str) -> None:
        super().__init__(function, computer.root)
        self.computer, self.process, self.name = computer, process, name
        self.ident = next(computer.idents)
        self.ticket = 0
        """Identifies the current wait: an entry of the queue with another ticket is out of date."""
        self.parked = self.woken = False
        """Whether it waits for `unpark`; whether it was unparked before it did."""
        self.loop: Any = None
        """The event loop that runs in this thread."""
        self.hooks: Any = (None, None)
        """What it calls for asynchronous generators: `sys.get_asyncgen_hooks()`."""


class Computer:
    """Resumes threads in the order of virtual time."""

    def __init__(self, seed: int, *, jitter_s: float = 0.0005) -> None:
        self.random = random.Random(seed)
        self.jitter_s = jitter_s
        """The largest random delay that a resumed thread has."""
        self.now = 0.0
        self.idents = itertools.count(1)
        self.root = greenlet.getcurrent()
        self.events = 0
        """Threads resumed so far: the moments of a history."""
        self.watchers: list[Callable[[], object]] = []
        """Called before each resumption; may kill processes."""
        self._running: Thread | None = None
        self.ident = _thread.get_ident()
        """Identifies the thread of the real process that runs the simulated threads."""
        self.deaths = 0
        """Processes that have ended."""
        self.commits = 0
        """Transactions that have changed a database."""
        self._queue: list[tuple[float, float, int, Thread, int]] = []
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ what threads do

    def spawn(self, process: Process, function: Callable[[], Any], name: str, delay_s: float = 0.0) -> Thread:
        """Starts a thread of a process."""
        thread = Thread(self, process, function, name)
        _unfinished.add(thread)
        self._schedule(thread, delay_s)
        return thread

    def sleep(self, seconds: float) -> None:
        """Blocks the current thread."""
        thread = self.this()
        self._schedule(thread, max(0.0, seconds))
        self._switch(thread)

    def park(self, timeout_s: float | None) -> None:
        """Blocks the current thread until `unpark`, or until the timeout. Returns soon if it was unparked before."""
        thread = self.this()
        thread.parked = True
        thread.ticket += 1
        if thread.woken or timeout_s is not None:
            self._schedule(thread, 0.0 if thread.woken or timeout_s is None else max(0.0, timeout_s))
        thread.woken = False
        self._switch(thread)
        thread.parked = False

    def unpark(self, thread: Thread) -> None:
        """Makes a parked thread ready to run."""
        if thread.parked:
            self._schedule(thread, 0.0)
        else:
            thread.woken = True

    def exit(self, code: int) -> None:
        """Ends the process of the current thread at once, as `os._exit` does. Does not return."""
        thread = self.this()
        self._end(thread.process, code, None)
        self._switch(thread)

    @property
    def current(self) -> Thread | None:
        """The simulated thread that calls this; None outside of the simulation, and in other threads of the real
        process."""
        return self._running if self._running is not None and _thread.get_ident() == self.ident else None

    def this(self) -> Thread:
        current = self.current
        assert current is not None, "not a simulated thread"
        return current

    # ------------------------------------------------------------------ the history

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Resumes threads until `until()` is true. Raises TriviumError if no thread is due (a deadlock), or after
        `limit_s` of virtual time."""
        while not until():
            entry = self._next()
            if entry is None:
                raise TriviumError(
                    "a simulation that ends", "every thread waits, and nothing wakes one", "find the wait"
                )
            at, thread = entry
            if at > limit_s:
                found = f"it still runs after {limit_s:.0f} virtual seconds"
                raise TriviumError("a simulation that ends", found, "find the wait without a deadline")
            self.now = max(self.now, at)
            self.events += 1
            for watch in self.watchers:
                watch()
            if thread.process.alive:
                self._resume(thread)

    def kill(self, process: Process) -> None:
        """Ends a process at once: none of its code runs any more."""
        self.deaths += process.alive
        process.alive = False
        for close in process.on_death:
            close()
        process.on_death.clear()

    # ------------------------------------------------------------------ the inside

    def _schedule(self, thread: Thread, delay_s: float) -> None:
        thread.ticket += 1
        at = self.now + delay_s + self.random.random() * self.jitter_s
        heapq.heappush(self._queue, (at, self.random.random(), next(self._numbers), thread, thread.ticket))

    def _next(self) -> tuple[float, Thread] | None:
        while self._queue:
            at, order, number, thread, ticket = heapq.heappop(self._queue)
            if thread.ticket != ticket or thread.dead:
                continue
            if not thread.process.alive:
                continue
            if thread.process.stopped_until > at:
                heapq.heappush(self._queue, (thread.process.stopped_until, order, number, thread, ticket))
                continue
            return at, thread
        return None

    def _resume(self, thread: Thread) -> None:
        self._running = thread
        events._set_running_loop(thread.loop)
        sys.set_asyncgen_hooks(*thread.hooks)
        try:
            thread.switch()
        except BaseException as error:
            if thread.name == "main":
                self._end(thread.process, 1, error)
            else:
                thread.process.thread_errors.append(error)
        else:
            if thread.dead and thread.name == "main":
                self._end(thread.process, 0, None)
        finally:
            self._running = None
            events._set_running_loop(None)
            if thread.dead:
                _unfinished.discard(thread)

    def _end(self, process: Process, code: int, error: BaseException | None) -> None:
        process.code, process.error = code, error
        self.kill(process)

    def _switch(self, thread: Thread) -> None:
        # The interpreter keeps both for each thread of the operating system, and simulated threads share one.
        thread.loop, thread.hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
        self.root.switch()
