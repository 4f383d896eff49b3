"""The buffer of one process: issues slots, journals what comes back, hands it to the trainer in the agreed order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trivium.buffers.journal import Journal
from trivium.config import BufferConfig
from trivium.errors import DataError, RunDirError, SyncError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import Group


class MemoryBuffer:
    """Slots and groups in memory, every group in the journal first.

    A slot is issued only if it lies below the schedule's admission bound for the version the explorer has loaded (plus
    the slots that were given up, or whose groups the trainer refused and wants replaced, so that it never starves).
    `take` evicts what became too stale meanwhile: the slot is issued again, at most `max_attempts` times.
    """

    explored = True
    """An explorer fills this buffer."""

    class Config(BufferConfig):
        kind: str = "memory"

    def __init__(
        self, config: Config, *, schedule: Schedule, rollouts: Path, renderer: Renderer, deadline_s: float
    ) -> None:
        del config, renderer  # nothing to say about memory; only file buffers tokenise
        self.schedule, self._deadline_s = schedule, deadline_s
        self._journal = Journal(rollouts)
        self._loaded: dict[str, int] = {}
        """The version each explorer has loaded."""
        self._leases: dict[int, str] = {}
        self._groups: dict[int, Group] = {}
        """Finished and not taken, in order of arrival."""
        self._consumed: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._given_up = 0
        self._refused = 0
        """Groups that were taken and are to be replaced."""
        self._evicted = 0
        self._cursor = 0
        """Every slot below it is leased, finished or consumed."""
        self._floor = 0
        """Every slot below it is consumed."""
        self._changed = asyncio.Condition()
        self._closed = False

    async def lease(self, owner: str) -> int:
        """The lowest slot that nobody plays and the version of `owner` admits."""
        async with self._changed:
            await self._wait(
                lambda: self._free_slot() < self._bound(self._loaded.get(owner)),
                lambda: f"explorer {owner!r} (version {self._loaded.get(owner)})",
                lambda: f"the trainer to take groups (next slot {self._free_slot()})",
            )
            slot = self._free_slot()
            self._leases[slot] = owner
            return slot

    def attempt(self, slot: int) -> int:
        """How often a slot had been given up before."""
        return self._attempts.get(slot, 0)

    async def put(self, owner: str, group: Group) -> None:
        if self._leases.get(group.slot) != owner:
            raise DataError(
                f"put slot {group.slot}",
                f"{owner!r} holds no lease of it (it is {self._leases.get(group.slot)!r}'s)",
                "lease a slot before playing it, and put it once",
            )
        self._journal.append(self.schedule.step_of(group.slot), group)
        async with self._changed:
            del self._leases[group.slot]
            self._groups[group.slot] = group
            self._changed.notify_all()

    async def take(self, count: int, version: int) -> list[Group]:
        async with self._changed:
            await self._wait(
                lambda: len(self._ready(count, version)) == count,
                lambda: f"the trainer (version {version})",
                lambda: (
                    f"{count} groups from the explorers ({len(self._groups)} finished, {len(self._leases)} being "
                    "played)"
                ),
            )
            slots = self._ready(count, version)
            groups = [self._groups.pop(slot) for slot in slots]
            self._consumed.update(slots)
            self._changed.notify_all()
            return groups

    async def refuse(self, count: int) -> None:
        async with self._changed:
            self._refused += count
            self._changed.notify_all()

    async def drained(self, version: int) -> None:
        """Waits until every slot that `version` admits has been played."""
        async with self._changed:
            await self._wait(
                lambda: not self._leases and self._free_slot() >= self._bound(version),
                lambda: "the next version",
                lambda: f"the slots of version {version} ({len(self._leases)} being played)",
            )  # fmt: skip

    async def advance(self, owner: str, version: int) -> None:
        """An explorer adopted `version`: more slots may be admitted."""
        async with self._changed:
            self._loaded[owner] = version
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def evicted(self) -> int:
        """Groups given up as too stale, so far."""
        return self._evicted

    def state(self) -> dict[str, Any]:
        """What a checkpoint must know: which slots training has consumed."""
        floor = self._lowest_unconsumed()
        return {
            "consumed_below": floor,
            "consumed": sorted(slot for slot in self._consumed if slot > floor),
            "attempts": {str(slot): attempt for slot, attempt in sorted(self._attempts.items())},
            "given_up": self._given_up,
            "refused": self._refused,
            "evicted": self._evicted,
        }

    def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the rollouts journaled after it; None starts the stage."""
        if state is None:
            self._reload(version)
            return
        self._consumed = set(range(state["consumed_below"])) | set(state["consumed"])
        self._attempts = {int(slot): attempt for slot, attempt in state["attempts"].items()}
        self._given_up, self._refused, self._evicted = state["given_up"], state["refused"], state["evicted"]
        self._reload(version)

    def _reload(self, version: int) -> None:
        # In slot order everything meant for the steps up to the checkpoint is consumed (refused groups only made steps
        # reach further); otherwise a straggler of any step may be waiting.
        done = version if self.schedule.ordered else self.schedule.first_version
        for group in self._journal.read(after_step=done):
            stale = group.attempt < self.attempt(group.slot)
            # In an unordered run the future of the dead run will not come again; its rollouts are nobody's policy.
            from_lost_future = not self.schedule.ordered and group.newest_version > version
            if group.slot in self._consumed or stale or from_lost_future:
                continue
            expected = self.schedule.at(group.slot).task.task_id
            if group.task.task_id != expected:
                raise RunDirError(
                    f"continue slot {group.slot}",
                    f"its journaled rollouts are of task {group.task.task_id!r}, the schedule says {expected!r}",
                    "the taskset changed: start another run.dir, or put the tasks back",
                )
            self._groups[group.slot] = group

    def _bound(self, version: int | None) -> int:
        return 0 if version is None else self.schedule.admitted(version) + self._given_up + self._refused

    def _free_slot(self) -> int:
        while self._cursor in self._leases or self._cursor in self._groups or self._cursor in self._consumed:
            self._cursor += 1
        return self._cursor

    def _lowest_unconsumed(self) -> int:
        while self._floor in self._consumed:
            self._floor += 1
        return self._floor

    def _ready(self, count: int, version: int) -> list[int]:
        """The slots that training consumes next, as far as they have arrived and are fresh enough."""
        if not self.schedule.ordered:
            self._evict(version)
            return list(self._groups)[:count]
        first = self._lowest_unconsumed()
        return [slot for slot in range(first, first + count) if slot in self._groups]

    def _evict(self, version: int) -> None:
        """Gives up what is staler than the bound: admission alone does not hold a straggler to it."""
        stale = [
            slot for slot, group in self._groups.items()
            if version - group.oldest_version > self.schedule.max_staleness
        ]  # fmt: skip
        for slot in stale:
            del self._groups[slot]
            self._evicted += 1
            self._attempts[slot] = self.attempt(slot) + 1
            if self._attempts[slot] < self.schedule.max_attempts:
                self._cursor = min(self._cursor, slot)
            else:
                self._consumed.add(slot)
                self._given_up += 1
        if stale:
            self._changed.notify_all()

    async def _wait(self, until: Callable[[], bool], who: Callable[[], str], whom: Callable[[], str]) -> None:
        """Waits under the condition. After `deadline_s` without any change of the buffer: who waited for whom."""
        try:
            while not (self._closed or until()):
                async with asyncio.timeout(self._deadline_s):
                    await self._changed.wait()
        except TimeoutError as error:
            raise SyncError(
                f"{who()} waits for {whom()}",
                f"nothing happened for {self._deadline_s:.0f} s",
                "look at the log of the one waited for; raise sync.deadline_s if it is only slow",
            ) from error
        if self._closed:
            raise StopAsyncIteration
