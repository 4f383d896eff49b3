"""The operating system of a simulated computer: clock, threads, locks, event loops, files and random numbers of the
standard library, for code that runs in simulated threads.

`installed` replaces functions of the standard library for its block, so the product runs unchanged. Blocking calls
switch to another thread of the computer. Files are real files of a temporary directory; a killed process loses its
descriptors, and with them its locks.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import faulthandler
import io
import itertools
import os
import queue
import random
import selectors
import sqlite3
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import greenlet

from trivium.simulation.computer import EPOCH, Computer, Process
from trivium.simulation.computer import Thread as ComputerThread
from trivium.simulation.disk import Disk


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


class Descriptors:
    """The file descriptors of each process, to close when it is killed."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Process, tuple[int, int]]] = {}
        self._known: set[Process] = set()

    def opened(self, descriptor: int) -> None:
        thread = greenlet.getcurrent()
        if not isinstance(thread, ComputerThread):
            return
        process, about = thread.process, os.fstat(descriptor)
        self._open[descriptor] = process, (about.st_dev, about.st_ino)
        if process not in self._known:
            self._known.add(process)
            process.on_death.append(lambda: self._close(process))

    def _close(self, process: Process) -> None:
        for descriptor, (owner, identity) in list(self._open.items()):
            if owner is not process:
                continue
            del self._open[descriptor]
            with suppress(OSError):
                about = os.fstat(descriptor)
                if (about.st_dev, about.st_ino) == identity:
                    # The number stays in use, so that a Python object that closes it later closes no other file.
                    null = os.open(os.devnull, os.O_RDWR)
                    os.dup2(null, descriptor)
                    os.close(null)


@dataclass
class Conditions:
    """How fast the computer is, and how far its clock is wrong. A fault may change them."""

    sync_s: float = 0.005
    """The longest time that `fsync` takes."""
    clock_error_s: float = 0.0
    """What `time.time` is ahead."""
    full_until: float = 0.0
    """Until this time the disk is full: files cannot be opened for writing, and not be synced."""
    cut_until: dict[str, float] = field(default_factory=dict[str, float])
    """By the name of a process, the time until which it cannot reach the database."""


@contextmanager
def installed(computer: Computer, disk: Disk, conditions: Conditions) -> Generator[None]:
    """Replaces functions of the standard library by those of the simulated computer."""
    numbers, descriptors = random.Random(computer.random.random()), Descriptors()
    real_open, real_os_open, real_connect = builtins.open, os.open, sqlite3.connect

    def simulated() -> bool:
        return isinstance(greenlet.getcurrent(), ComputerThread)

    def refuse_if_full(path: Any) -> None:
        if simulated() and computer.now < conditions.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if {*mode} & {*"wax+"}:
            refuse_if_full(path)
        file = real_open(path, mode, *args, **kwargs)
        with suppress(OSError, ValueError, AttributeError):
            descriptors.opened(file.fileno())
        return file

    def os_opened(*args: Any, **kwargs: Any) -> int:
        descriptor = real_os_open(*args, **kwargs)
        descriptors.opened(descriptor)
        return descriptor

    def is_cut() -> bool:
        return simulated() and computer.now < conditions.cut_until.get(computer.this().process.name, 0.0)

    class Cursor(sqlite3.Cursor):
        def execute(self, *args: Any) -> Any:
            if is_cut():
                error = sqlite3.OperationalError("the database cannot be reached")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error
            return super().execute(*args)

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

    def connected(*args: Any, **kwargs: Any) -> Any:
        if not simulated():
            return real_connect(*args, **kwargs)
        connection = real_connect(*args, **{"factory": Connection, **kwargs})
        computer.this().process.on_death.append(connection.close)
        return connection

    def blocking(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if simulated():
                computer.sleep(computer.random.random() * seconds)
            return function(*args, **kwargs)

        return call

    def unlinked(path: Any, *args: Any, **kwargs: Any) -> None:
        if simulated():
            computer.sleep(computer.random.random() * 0.001)
            disk.unlinked(path, **kwargs)
        real_unlink(path, *args, **kwargs)

    def synced(descriptor: Any) -> None:
        if simulated():
            computer.sleep(computer.random.random() * conditions.sync_s)
            refuse_if_full(None)
            disk.synced(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        else:
            real_fsync(descriptor)

    def exit_process(code: int) -> None:
        if simulated():
            computer.exit(code)
        real_exit(code)

    def make_lock() -> Any:
        return Lock(computer) if simulated() else real_lock()

    def make_rlock(*_: Any) -> Any:
        return threading._PyRLock() if simulated() else real_rlock()  # pyright: ignore

    real_exit, real_lock, real_rlock, real_thread = os._exit, threading.Lock, threading.RLock, threading.Thread
    real_ident, real_fsync, real_unlink = threading.get_ident, os.fsync, os.unlink

    def make_thread(*args: Any, **kwargs: Any) -> Any:
        return (Thread if simulated() else real_thread)(*args, **kwargs)

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", lambda: computer.now),
        (time, "perf_counter", lambda: computer.now),
        (time, "time", lambda: EPOCH + computer.now + conditions.clock_error_s),
        (time, "sleep", lambda seconds: computer.sleep(seconds)),
        (threading, "_time", lambda: computer.now),
        (queue, "time", lambda: computer.now),
        (threading, "Lock", make_lock),
        (threading, "_allocate_lock", make_lock),
        (threading, "RLock", make_rlock),
        (threading, "Thread", make_thread),
        (threading, "get_ident", lambda: computer.this().ident if simulated() else real_ident()),
        (threading, "current_thread", lambda: _threads.get(greenlet.getcurrent()) or _outside),  # pyright: ignore
        (queue, "SimpleQueue", queue._PySimpleQueue),  # pyright: ignore
        (asyncio, "new_event_loop", Loop),
        (asyncio.events, "new_event_loop", Loop),
        (sys, "_current_frames", lambda: defaultdict(sys._getframe)),
        (faulthandler, "dump_traceback_later", lambda *_, **__: None),
        (faulthandler, "cancel_dump_traceback_later", lambda: None),
        (os, "urandom", numbers.randbytes),
        (os, "_exit", exit_process),
        (builtins, "open", opened),
        (io, "open", opened),
        (os, "open", os_opened),
        (os, "fsync", synced),
        (os, "rename", blocking(os.rename, 0.001)),
        (os, "replace", blocking(os.replace, 0.001)),
        (os, "unlink", unlinked),
        (sqlite3, "connect", connected),
        (sqlite3.dbapi2, "connect", connected),  # pyright: ignore[reportAttributeAccessIssue]
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


class _Outside:
    """The main thread of a simulated process, as `threading.current_thread` returns it."""

    name, daemon, ident = "main", False, 0

    def is_alive(self) -> bool:
        return True


_outside = _Outside()
