"""Synchronizer: who is where, which versions exist, who waits for whom; a state machine over a Board.

The board holds plain values, so the same machine runs in one process (MemoryBoard), over Ray or over a database.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol

from trivium.errors import SyncError


class RunningStatus(StrEnum):
    """What a role is doing, as the other side sees it."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    """It wants newer weights exchanged."""
    WAITING_SYNC = "waiting_sync"
    """It stands at a collective exchange and cannot go on without the other side."""
    STOPPED = "stopped"


class SyncMethod(StrEnum):
    """How weights travel."""

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(StrEnum):
    """Who decides when weights travel."""

    FIXED = "fixed"
    DYNAMIC_BY_TRAINER = "dynamic_by_trainer"
    DYNAMIC_BY_EXPLORER = "dynamic_by_explorer"


Values = Mapping[str, Any]


class Board(Protocol):
    """A small shared table of JSON values that can be waited on."""

    def read(self) -> Values: ...

    def write(self, change: Callable[[Values], Values]) -> None:
        """Replaces the table by `change(table)`, atomically; wakes every waiter. Callable from any thread."""
        ...

    async def wait(self, until: Callable[[Values], bool], deadline_s: float, who: str, whom: str) -> Values:
        """The table once `until` holds. SyncError naming `who` and `whom` after `deadline_s` without any sign of life:
        every change of the table counts as one."""
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
            self._values = dict(change(dict(self._values)))
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)

    async def wait(self, until: Callable[[Values], bool], deadline_s: float, who: str, whom: str) -> Values:
        since = last = time.monotonic()
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiting.add(entry)
        try:
            while not until(values := self.read()):
                async with asyncio.timeout(deadline_s):
                    await entry[1].wait()
                entry[1].clear()
                last = time.monotonic()
            return values
        except TimeoutError as error:
            raise SyncError(
                f"{who} waits for {whom}",
                f"waiting for {time.monotonic() - since:.0f} s, no sign of life for {time.monotonic() - last:.0f} s; "
                f"the board says {self.read()}",
                "look at the log of the one waited for; raise sync.deadline_s if it is only slow",
            ) from error
        finally:
            with self._lock:
                self._waiting.discard(entry)


class Synchronizer:
    """Statuses and versions. The trainer publishes, explorers adopt; nobody waits without a deadline."""

    def __init__(self, board: Board, *, deadline_s: float) -> None:
        self.board, self.deadline_s = board, deadline_s

    def set_trainer_status(self, status: RunningStatus) -> None:
        self.board.write(lambda values: {**values, "trainer": status.value})

    def trained(self, step: int) -> None:
        """The trainer says that it has taken a step: whoever waits for it sees that it is alive."""
        self.board.write(lambda values: {**values, "step": step})

    def set_explorer_status(self, name: str, status: RunningStatus) -> None:
        self._explorer(name, status=status.value)

    @property
    def trainer_status(self) -> RunningStatus:
        """STOPPED until the trainer has said otherwise."""
        return RunningStatus(self.board.read().get("trainer", RunningStatus.STOPPED))

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """How many explorers are in each status."""
        statuses = [entry["status"] for entry in self.board.read().get("explorers", {}).values()]
        return {status: statuses.count(status.value) for status in RunningStatus}

    def publish(self, version: int) -> None:
        """Says that the channel can deliver `version`. Versions only grow."""

        def change(values: Values) -> Values:
            versions: tuple[int, ...] = tuple(values.get("versions", ()))
            if versions and version < versions[-1]:
                raise SyncError(
                    f"publish version {version}",
                    f"version {versions[-1]} is published already",
                    "publish versions in order",
                )
            return {**values, "versions": versions if versions[-1:] == (version,) else (*versions, version)[-256:]}

        self.board.write(change)

    @property
    def published(self) -> tuple[int, ...]:
        """The versions published so far, oldest first (the last 256)."""
        return tuple(self.board.read().get("versions", ()))

    async def next_version(self, name: str, loaded: int | None, *, newest: bool) -> int:
        """Waits until something newer than `loaded` is published; the newest of it, or the next one."""
        self.set_explorer_status(name, RunningStatus.REQUIRE_SYNC)
        values = await self.board.wait(
            lambda values: any(loaded is None or v > loaded for v in values.get("versions", ())),
            self.deadline_s, f"explorer {name!r} (version {loaded})", "the trainer's next version",
        )  # fmt: skip
        newer = [v for v in values["versions"] if loaded is None or v > loaded]
        return newer[-1] if newest else newer[0]

    def adopted(self, name: str, version: int) -> None:
        """An explorer says that it now plays with `version`."""
        self._explorer(name, status=RunningStatus.RUNNING.value, version=version)

    async def wait_adopted(self, version: int) -> None:
        """Waits until every explorer plays with `version` or newer."""

        def done(values: Values) -> bool:
            explorers = values.get("explorers", {}).values()
            return bool(explorers) and all(entry.get("version", -1) >= version for entry in explorers)

        await self.board.wait(done, self.deadline_s, "the trainer", f"the explorers to adopt version {version}")

    def _explorer(self, name: str, **entry: Any) -> None:
        def change(values: Values) -> Values:
            explorers: dict[str, dict[str, Any]] = dict(values.get("explorers", {}))
            explorers[name] = {**explorers.get(name, {}), **entry}
            return {**values, "explorers": explorers}

        self.board.write(change)
