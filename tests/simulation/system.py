"""The operating system of a simulated computer: clock, threads, locks, event loops and random numbers of the standard
library, for code that runs in simulated threads.

`installed` replaces functions of the standard library for its block, so the product runs unchanged. Blocking calls
switch to another thread of the computer.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import queue
import random
import selectors
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import greenlet

from tests.simulation.computer import EPOCH, Computer
from tests.simulation.computer import Thread as ComputerThread
from tests.simulation.disk import Disk
from tests.simulation.filesystem import Conditions, Replaced, databases, files


class Lock:
    """`threading.Lock` of simulated threads."""

    def __init__(self, computer: Computer) -> None:
        self._computer, self._locked = computer, False
        self._waiting: list[ComputerThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        end = None if timeout is None or timeout < 0 else self._computer.now + timeout
        while self._locked:
            left = None if end is None else end - self._computer.now
            if not blocking or (left is not None and left <= 0):
                return False
            thread = self._computer.this()
            self._waiting.append(thread)
            try:
                self._computer.park(left)
            finally:
                if thread in self._waiting:
                    self._waiting.remove(thread)
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        alive = [thread for thread in self._waiting if thread.process.alive]
        if alive:
            self._computer.unpark(self._computer.random.choice(alive))

    def locked(self) -> bool:
        return self._locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._locked = False


class RLock:
    """`threading.RLock` of simulated threads."""

    def __init__(self, computer: Computer) -> None:
        self._computer, self._lock = computer, Lock(computer)
        self._owner: ComputerThread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_owned():
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = self._computer.current
        self._count += 1
        return True

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # `threading.Condition` calls these.

    def _is_owned(self) -> bool:
        return self._count > 0 and self._owner is self._computer.current

    def _release_save(self) -> int:
        count, self._count = self._count, 0
        self._lock.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = self._computer.current, count


class Thread:
    """`threading.Thread` of simulated threads."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name or "thread", bool(daemon)
        self._call = target, args, dict(kwargs or {})
        self._started = False
        self._done = threading.Event()
        self.ident: int | None = None

    def start(self) -> None:
        computer = _computer()
        self._started = True
        thread = computer.spawn(computer.this().process, self._run, self.name)
        self.ident = thread.ident
        _threads[thread] = self

    def run(self) -> None:
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def _run(self) -> None:
        try:
            self.run()
        finally:
            self._done.set()

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)

    def is_alive(self) -> bool:
        return self._started and not self._done.is_set()


class Selector(selectors.DefaultSelector):
    """Waits in virtual time. Event loops of simulated threads wait for their timers and for other threads only."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            _computer().park(timeout)
        else:  # callbacks are ready: another thread may run before them, or the process die
            _computer().sleep(0)
        return []


class _Numbered:
    """A hash that follows from the order of creation, not from the address: sets of tasks have the same order in every
    run of a seed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task[Any]):
    pass


class _Future(_Numbered, asyncio.Future[Any]):
    pass


_numbers = itertools.count()


class Loop(asyncio.SelectorEventLoop):
    """An event loop of a simulated thread."""

    def __init__(self) -> None:
        super().__init__(Selector())
        self.set_task_factory(lambda loop, coroutine, **how: _Task(coroutine, loop=loop, **how))
        self._parked: ComputerThread | None = None

    def run_forever(self) -> None:
        self._parked = _computer().this()
        super().run_forever()

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _write_to_self(self) -> None:
        if self._parked is not None:
            _computer().unpark(self._parked)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # pyright: ignore
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = func(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        computer = _computer()
        computer.spawn(computer.this().process, work, "executor")
        return asyncio.wrap_future(future, loop=self)


_computers: list[Computer] = []
_threads: weakref.WeakKeyDictionary[ComputerThread, Thread] = weakref.WeakKeyDictionary()


def _computer() -> Computer:
    return _computers[-1]


@contextmanager
def installed(
    computer: Computer, disk: Disk, conditions: Conditions, further: Sequence[Replaced] = ()
) -> Generator[None]:
    """Replaces functions of the standard library by those of the simulated computer, and `further` ones."""
    replaced = [
        *further,
        *_clock(computer, conditions),
        *_threading(computer),
        *_process(computer),
        *_event_loops(),
        *files(computer, disk, conditions),
        *databases(computer, conditions),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    _computers.append(computer)
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        _computers.pop()


def _clock(computer: Computer, conditions: Conditions) -> list[Replaced]:
    real_sleep = time.sleep

    def now() -> float:
        return computer.now

    def sleep(seconds: float) -> None:
        (real_sleep if computer.current is None else computer.sleep)(seconds)

    return [
        (time, "monotonic", now),
        (time, "perf_counter", now),
        (time, "time", lambda: EPOCH + computer.now + conditions.clock_error_s),
        (time, "sleep", sleep),
        (threading, "_time", now),
        (queue, "time", now),
    ]


def _threading(computer: Computer) -> list[Replaced]:
    real_lock, real_rlock, real_thread = threading.Lock, threading.RLock, threading.Thread
    real_ident, real_current = threading.get_ident, threading.current_thread

    def make_lock() -> Any:
        return real_lock() if computer.current is None else Lock(computer)

    def make_rlock() -> Any:
        return real_rlock() if computer.current is None else RLock(computer)

    def make_thread(*args: Any, **kwargs: Any) -> Any:
        return (real_thread if computer.current is None else Thread)(*args, **kwargs)

    def ident() -> int:
        current = computer.current
        return real_ident() if current is None else current.ident

    def current_thread() -> Any:
        if computer.current is None and real_ident() != computer.ident:
            return real_current()
        return _threads.get(greenlet.getcurrent()) or _outside  # pyright: ignore

    return [
        (threading, "Lock", make_lock),
        (threading, "_allocate_lock", make_lock),
        (threading, "RLock", make_rlock),
        (threading, "Thread", make_thread),
        (threading, "get_ident", ident),
        (threading, "current_thread", current_thread),
        (queue, "SimpleQueue", queue._PySimpleQueue),  # pyright: ignore
    ]


def _process(computer: Computer) -> list[Replaced]:
    numbers, real_exit = random.Random(computer.random.random()), os._exit

    def exit_process(code: int) -> None:
        if computer.current is None:
            real_exit(code)
        computer.exit(code)

    return [
        (os, "urandom", numbers.randbytes),
        (os, "_exit", exit_process),
        (sys, "_current_frames", lambda: defaultdict(sys._getframe)),
        (faulthandler, "dump_traceback_later", lambda *_, **__: None),
        (faulthandler, "cancel_dump_traceback_later", lambda: None),
    ]


def _event_loops() -> list[Replaced]:
    return [
        (asyncio, "new_event_loop", Loop),
        (asyncio.events, "new_event_loop", Loop),
    ]


class _Outside:
    """The main thread of a simulated process, as `threading.current_thread` returns it."""

    name, daemon, ident = "main", False, 0

    def is_alive(self) -> bool:
        return True


_outside = _Outside()
