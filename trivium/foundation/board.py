"""Board: a small shared table of JSON values that roles write to and wait on.

`MemoryBoard` is for one process. `SharedBoard` uses an external table (a Ray actor, a database row) with
compare-and-swap.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from trivium.foundation.errors import SyncError

Values = Mapping[str, Any]


class Board(Protocol):
    """A small table of JSON values, shared by the roles of a run."""

    def read(self) -> Values: ...

    def write(self, change: Callable[[Values], Values]) -> None:
        """Replaces the table by `change(table)`, atomically; wakes every waiter. Callable from any thread.

        `change` may be called more than once and must only compute.
        """
        ...

    async def poll(self, until: Callable[[Values], bool], patience_s: float) -> Values:
        """Waits until `until` holds, for at most `patience_s`, and returns the table. The caller checks whether `until`
        holds."""
        ...


class MemoryBoard:
    """The board of one process."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def read(self) -> Values:
        with self._lock:
            return dict(self._values)

    def write(self, change: Callable[[Values], Values]) -> None:
        with self._lock:
            changed = dict(change(dict(self._values)))
            if changed == self._values:
                return
            self._values = changed
            # From the thread of any role: an event of asyncio may be set in the thread of its loop alone.
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)

    async def poll(self, until: Callable[[Values], bool], patience_s: float) -> Values:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        end = loop.time() + patience_s
        timer = loop.call_at(end, changed.set)
        with self._lock:
            self._waiting.add((loop, changed))
        try:
            while not until(values := self.read()) and loop.time() < end:
                await changed.wait()
                changed.clear()
            return values
        finally:
            timer.cancel()
            with self._lock:
                self._waiting.discard((loop, changed))


class Table(Protocol):
    """The storage of a shared board: one row with a revision number and JSON values. Callable from any thread."""

    def load(self) -> tuple[int, Values]:
        """Returns (revision, values); (0, {}) before the first write."""
        ...

    def swap(self, revision: int, values: Values) -> bool:
        """Stores the values as `revision + 1` if the row still has `revision`; returns whether it did."""
        ...

    async def changed(self, revision: int, patience_s: float) -> tuple[int, Values]:
        """Waits until the row is newer than `revision`, for at most `patience_s`. Returns (revision, values)."""
        ...


class SharedBoard:
    """A board over a table that several processes share."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def read(self) -> Values:
        return self._table.load()[1]

    def write(self, change: Callable[[Values], Values]) -> None:
        while True:
            revision, values = self._table.load()
            changed = dict(change(dict(values)))
            if changed == values or self._table.swap(revision, changed):
                return

    async def poll(self, until: Callable[[Values], bool], patience_s: float) -> Values:
        end, revision = time.monotonic() + patience_s, -1
        while True:
            revision, values = await self._table.changed(revision, max(0.0, end - time.monotonic()))
            if until(values) or time.monotonic() >= end:
                return values


_LOOK_S = 0.002
"""Seconds between two attempts to lock a file."""
_LOCKED_S = 60.0
"""How long another process may lock a file, which it does only to read and write it."""


@contextmanager
def locked(path: Path, patience_s: float = _LOCKED_S) -> Generator[None]:
    """Excludes other processes and threads from the same block for the same path. Raises SyncError if one of them holds
    it for `patience_s`."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise SyncError(
                        f"lock {path}",
                        f"another process has held it for {patience_s:.0f} s",
                        "check whether a process that uses this directory is stopped; end it or continue it",
                    ) from error
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(lock)
