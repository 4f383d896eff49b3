"""Files and SQLite databases of a simulated computer. They are real files of a temporary directory.

A process that is killed loses its descriptors, and with them its locks. A full disk refuses writes, `fsync` takes time,
and a process may be cut off from the database.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import io
import os
import sqlite3
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.computer import Computer, Process
from tests.simulation.computer import Thread as ComputerThread
from tests.simulation.disk import Disk
from trivium.buffers.sql import buffer, database

Replaced = tuple[Any, str, Any]
"""(module, name, the function that replaces it)."""

_RENAME_S = 0.001
"""The longest time to rename or remove a file."""
_SLOWEST_POLL_S = 5.0
"""The longest pause between two reads of a table that does not change."""
_BEGIN_S = 0.001
"""The longest time until a transaction that writes has the lock of the database."""


@dataclass
class Conditions:
    """How fast the computer is, and how far its clock is wrong. A fault may change them."""

    sync_s: float = 0.005
    """The longest time that `fsync` takes."""
    clock_error_s: float = 0.0
    """What `time.time` is ahead."""
    full_until: float = 0.0
    """Until this time the disk is full: files cannot be opened for writing, and not be synced."""
    full_share: float = 1.0
    """The share of these calls that a full disk refuses: others free a part of it."""
    cut_until: dict[str, float] = field(default_factory=dict[str, float])
    """By the name of a process, the time until which it cannot reach the database."""
    silent_until: dict[str, float] = field(default_factory=dict[str, float])
    """By the name of a process, the time until which it receives no answer to a commit."""
    synchronous: int = 2
    """The least `synchronous` of the connections to a database that have committed."""


class _Descriptors:
    """The file descriptors of each process, to close when it is killed."""

    def __init__(self, computer: Computer) -> None:
        self._computer = computer
        self._open: dict[int, tuple[Process, tuple[int, int]]] = {}
        self._known: set[Process] = set()

    def opened(self, descriptor: int) -> None:
        if self._computer.current is None:
            return
        process, about = self._computer.current.process, os.fstat(descriptor)
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


def files(computer: Computer, disk: Disk, conditions: Conditions) -> list[Replaced]:
    """Functions that open, sync, rename and remove files."""
    descriptors = _Descriptors(computer)
    real_open, real_os_open, real_fsync, real_unlink = builtins.open, os.open, os.fsync, os.unlink
    real_mkdir, real_rmdir = os.mkdir, os.rmdir

    def refuse_if_full(path: Any) -> None:
        if computer.current is None or computer.now >= conditions.full_until:
            return
        if computer.random.random() < conditions.full_share:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    @contextmanager
    def changing(longest_s: float) -> Generator[None]:
        """Something that a process does to the disk, which takes time. It may be killed before it, or after it."""
        process = computer.this().process
        process.writes += 1
        computer.sleep(computer.random.random() * longest_s)
        yield
        process.writes += 1

    def is_missing(path: Any) -> bool:
        return computer.current is not None and not isinstance(path, int) and not os.path.lexists(path)

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_new = False
        if {*mode} & {*"wax+"}:
            refuse_if_full(path)
            is_new = is_missing(path)
        file = real_open(path, mode, *args, **kwargs)
        if is_new:
            disk.made(path, computer.now)
        with suppress(OSError, ValueError, AttributeError):
            descriptors.opened(file.fileno())
        return file

    def os_opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        is_new = flags & os.O_CREAT and is_missing(path)
        descriptor = real_os_open(path, flags, *args, **kwargs)
        if is_new:
            disk.made(path, computer.now)
        descriptors.opened(descriptor)
        return descriptor

    def synced(descriptor: Any) -> None:
        if computer.current is None:
            real_fsync(descriptor)
            return
        with changing(conditions.sync_s):
            refuse_if_full(None)
            disk.synced(descriptor if isinstance(descriptor, int) else descriptor.fileno())

    def made(path: Any, *args: Any, **kwargs: Any) -> None:
        real_mkdir(path, *args, **kwargs)
        if computer.current is not None:
            disk.made(path, computer.now)

    def renaming(rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **kwargs: Any) -> None:
            if computer.current is None:
                rename(source, target, **kwargs)
                return
            with changing(_RENAME_S):
                done = disk.renaming(source, target)
                rename(source, target, **kwargs)
                done(computer.now)

        return renamed

    def removing(remove: Callable[..., None], note: Callable[..., None]) -> Callable[..., None]:
        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            if computer.current is None:
                remove(path, dir_fd=dir_fd)
                return
            with changing(_RENAME_S):
                note(path, computer.now, dir_fd)
                remove(path, dir_fd=dir_fd)

        return removed

    return [
        (builtins, "open", opened),
        (io, "open", opened),
        (os, "open", os_opened),
        (os, "fsync", synced),
        (os, "rename", renaming(os.rename)),
        (os, "replace", renaming(os.replace)),
        (os, "mkdir", made),
        (os, "unlink", removing(real_unlink, disk.unlinked)),
        (os, "remove", removing(real_unlink, disk.unlinked)),
        (os, "rmdir", removing(real_rmdir, disk.removed)),
    ]


def databases(computer: Computer, conditions: Conditions) -> list[Replaced]:
    """Connections to SQLite, and the pauses between two reads of a table."""
    real_connect = sqlite3.connect
    waiting = dict[asyncio.Future[None], ComputerThread]()
    seen = weakref.WeakKeyDictionary[asyncio.Task[Any], int]()
    """By task, the number of commits when it read a table last."""

    async def pause(poll: int, left_s: float) -> None:
        """Lasts until a transaction commits: reads in between, most events of a world, would find nothing new."""
        del poll
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        woken = loop.create_future()
        longest_s = _SLOWEST_POLL_S if seen.get(task) == computer.commits else delay_s()
        timer = loop.call_later(min(left_s, longest_s), _set, woken)
        waiting[woken] = computer.this()
        try:
            await woken
        finally:
            timer.cancel()
            del waiting[woken]
        seen[task] = computer.commits

    def delay_s() -> float:
        return computer.random.random() * database.SLOWEST_POLL_S

    def unreachable(until: Mapping[str, float]) -> bool:
        return computer.current is not None and computer.now < until.get(computer.current.process.name, 0.0)

    class Cursor(sqlite3.Cursor):
        def execute(self, *args: Any) -> Any:
            if args[0] == "BEGIN IMMEDIATE" and computer.current is not None:
                computer.sleep(computer.random.random() * _BEGIN_S)  # others may commit before it has the lock
            if unreachable(conditions.cut_until):
                raise _disconnected()
            return super().execute(*args)

    class Connection(sqlite3.Connection):
        _changes = 0

        def execute(self, *args: Any) -> Any:
            if unreachable(conditions.cut_until):
                raise _disconnected()
            return super().execute(*args)

        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

        def commit(self) -> None:
            wrote = self.total_changes > self._changes
            if wrote:
                (synchronous,) = super().execute("PRAGMA synchronous").fetchone()
                conditions.synchronous = min(conditions.synchronous, synchronous)
            super().commit()
            if computer.current is not None:
                computer.current.process.writes += wrote
            self._changes = self.total_changes
            computer.commits += wrote
            for future, thread in [*waiting.items()] if wrote else ():
                if thread.process.alive and not future.done():
                    loop = future.get_loop()
                    loop.call_soon_threadsafe(loop.call_later, delay_s(), _set, future)
            if wrote and unreachable(conditions.silent_until) and computer.random.random() < 0.5:
                raise _disconnected()

    def connected(*args: Any, **kwargs: Any) -> Any:
        if computer.current is None:
            return real_connect(*args, **kwargs)
        connection = real_connect(*args, **{"factory": Connection, **kwargs})
        computer.current.process.on_death.append(connection.close)
        return connection

    return [
        (sqlite3, "connect", connected),
        (sqlite3.dbapi2, "connect", connected),  # pyright: ignore[reportAttributeAccessIssue]
        (database, "pause", pause),
        (buffer, "pause", pause),
    ]


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _disconnected() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("the database cannot be reached")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY  # transient, like a dropped connection to a server
    return error
