"""Board: a small shared table of JSON values that roles write to and wait on.

`MemoryBoard` is that of one process. `SharedBoard` is the same over a table elsewhere (a Ray actor, a database row)
that can compare and swap.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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
        """The table once `until` holds, or as it is after `patience_s`; the caller looks which."""
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
    """Where a shared board lives: one row with a revision number and JSON values. Callable from any thread."""

    def load(self) -> tuple[int, Values]:
        """(revision, values); revision 0 and no values where nothing was written yet."""
        ...

    def swap(self, revision: int, values: Values) -> bool:
        """Stores the values as `revision + 1` if the row still has `revision`; whether it did."""
        ...

    async def changed(self, revision: int, patience_s: float) -> None:
        """Returns once the row is newer than `revision`, at the latest after `patience_s`."""
        ...


class SharedBoard:
    """A board over a table that several processes reach."""

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
        end = time.monotonic() + patience_s
        while True:
            revision, values = await asyncio.to_thread(self._table.load)
            left = end - time.monotonic()
            if left <= 0 or until(values):
                return values
            await self._table.changed(revision, left)
