"""The buffer of one process: issues slots, journals what comes back, hands it to the trainer in the agreed order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.buffers.journal import Journal
from trivium.config import BufferConfig
from trivium.errors import DataError, RunDirError, SyncError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import Group, Lease


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
        self, config: Config, *, schedule: Schedule, rollouts: Path, renderer: Renderer, deadline_s: float,
        name: str = "",
    ) -> None:  # fmt: skip
        del config, renderer, name  # only file buffers tokenise; only shared ones have a name
        self.schedule, self._deadline_s = schedule, deadline_s
        self._journal = Journal(rollouts)
        self._loaded: dict[str, int] = {}
        """The version each explorer has loaded."""
        self._leases: dict[int, tuple[str, int]] = {}
        """Slot -> who plays it, and the version it was leased for."""
        self._off: dict[str, list[int]] = {}
        """Slots that were called off and whose player does not know yet."""
        self._groups: dict[int, Group] = {}
        """Finished and not taken, in order of arrival."""
        self._consumed: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._given_up = 0
        self._refused = 0
        """Groups that were taken and are to be replaced."""
        self._evicted = self._called_off = self._dropped = 0
        self._cursor = 0
        """Every slot below it is leased, finished or consumed."""
        self._floor = 0
        """Every slot below it is consumed."""
        self._changed = asyncio.Condition()
        self._closed = False

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """The lowest slot that nobody plays and the version of `owner` admits."""
        async with self._changed:
            if wait or self._closed:
                await self._wait(
                    lambda: self._free_slot() < self._bound(self._loaded.get(owner)),
                    lambda: f"explorer {owner!r} (version {self._loaded.get(owner)})",
                    lambda: f"the trainer to take groups (next slot {self._free_slot()})",
                )
            slot = self._free_slot()
            if slot >= self._bound(self._loaded.get(owner)):
                return None
            self._leases[slot] = (owner, self._loaded[owner])
            return Lease(slot, self._attempts.get(slot, 0))

    async def put(self, owner: str, group: Group) -> None:
        async with self._changed:
            if group.slot in self._off.get(owner, ()):
                self._off[owner].remove(group.slot)  # finished just before its player heard of it
                return
        if self._leases.get(group.slot, ("",))[0] != owner:
            raise DataError(
                f"put slot {group.slot}",
                f"{owner!r} holds no lease of it (it is {self._leases.get(group.slot)!r}'s)",
                "lease a slot before playing it, and put it once",
            )
        self._journal.append(self.schedule.step_of(group.slot), group)
        async with self._changed:
            del self._leases[group.slot]
            self._keep(group)
            self._changed.notify_all()

    def _keep(self, group: Group) -> None:
        if group.dropped:
            self._dropped += 1
            self._give_up(group.slot)
        else:
            self._groups[group.slot] = group

    async def release(self, owner: str) -> int:
        async with self._changed:
            slots = [slot for slot, (holder, _) in self._leases.items() if holder == owner]
            for slot in slots:
                del self._leases[slot]
                self._cursor = min(self._cursor, slot)
            self._changed.notify_all()
            return len(slots)

    async def called_off(self, owner: str) -> Sequence[int]:
        async with self._changed:
            while not self._off.get(owner):
                await self._changed.wait()  # for as long as the stage lasts: most stages call nothing off
            return self._off.pop(owner)

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
            self._call_off(version + 1)
            self._changed.notify_all()
            return groups

    def _call_off(self, version: int) -> None:
        """Takes back leases whose groups could not be trained on any more, `version` being the next."""
        late = [
            (slot, owner) for slot, (owner, leased) in self._leases.items()
            if not self.schedule.ordered and version - leased > self.schedule.max_staleness
        ]  # fmt: skip
        for slot, owner in late:
            del self._leases[slot]
            self._off.setdefault(owner, []).append(slot)
            self._called_off += 1
            self._again(slot)

    async def refuse(self, count: int) -> None:
        async with self._changed:
            self._refused += count
            self._changed.notify_all()

    async def drained(self, version: int) -> None:
        """Waits until every slot that `version` admits has been played."""
        async with self._changed:
            await self._wait(
                lambda: min((*self._leases, self._free_slot())) >= self._bound(version),
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

    async def past(self, slots: Sequence[int]) -> list[Group]:
        found = {group.slot: group for group in self._journal.read(after_step=-1) if group.slot in set(slots)}
        return [found[slot] for slot in slots]

    async def counts(self) -> Mapping[str, int]:
        return {
            "evicted": self._evicted, "called_off": self._called_off, "given_up": self._given_up - self._dropped,
            "dropped": self._dropped,
        }  # fmt: skip

    async def state(self) -> dict[str, Any]:
        """What a checkpoint must know: which slots training has consumed."""
        floor = self._lowest_unconsumed()
        return {
            "consumed_below": floor,
            "consumed": sorted(slot for slot in self._consumed if slot > floor),
            "attempts": {str(slot): attempt for slot, attempt in sorted(self._attempts.items())},
            "given_up": self._given_up,
            "refused": self._refused,
            "evicted": self._evicted,
            "called_off": self._called_off,
            "dropped": self._dropped,
        }

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the rollouts journaled after it; None starts the stage."""
        if state is not None:
            self._consumed = set(range(state["consumed_below"])) | set(state["consumed"])
            self._attempts = {int(slot): attempt for slot, attempt in state["attempts"].items()}
            self._given_up, self._refused = state["given_up"], state["refused"]
            self._evicted, self._called_off = state["evicted"], state["called_off"]
            self._dropped = state["dropped"]
        async with self._changed:
            self._reload(version)
            self._changed.notify_all()

    def _reload(self, version: int) -> None:
        # In slot order everything meant for the steps up to the checkpoint is consumed (refused groups only made steps
        # reach further); otherwise a straggler of any step may be waiting.
        done = version if self.schedule.ordered else self.schedule.first_version
        for group in self._journal.read(after_step=done):
            stale = group.attempt < self._attempts.get(group.slot, 0)
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
            self._keep(group)

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
        slots: list[int] = []
        slot = self._lowest_unconsumed()
        while len(slots) < count and (slot in self._groups or slot in self._consumed):
            if slot in self._groups:
                slots.append(slot)
            slot += 1
        return slots

    def _evict(self, version: int) -> None:
        """Gives up what is staler than the bound: admission alone does not hold a straggler to it."""
        stale = [
            slot for slot, group in self._groups.items()
            if version - group.oldest_version > self.schedule.max_staleness
        ]  # fmt: skip
        for slot in stale:
            del self._groups[slot]
            self._evicted += 1
            self._again(slot)
        if stale:
            self._changed.notify_all()

    def _again(self, slot: int) -> None:
        """A slot that was played in vain is issued again, or given up after `max_attempts`."""
        self._attempts[slot] = self._attempts.get(slot, 0) + 1
        if self._attempts[slot] < self.schedule.max_attempts:
            self._cursor = min(self._cursor, slot)
        else:
            self._give_up(slot)

    def _give_up(self, slot: int) -> None:
        """Nothing will come of this slot: another one is admitted in its place."""
        self._consumed.add(slot)
        self._given_up += 1

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
