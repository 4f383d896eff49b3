"""The buffer of one process: issues slots, journals what comes back, hands it to the trainer in the agreed order."""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.buffers.journal import Journal
from trivium.config import BufferConfig
from trivium.errors import DataError, RunDirError, SyncError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import SERVED, Group, Lease


@dataclass(frozen=True, slots=True)
class _Held:
    """A lease that somebody holds."""

    lease: Lease
    owner: str
    version: int
    """What the owner had loaded when it leased: nothing of the group is older."""


class MemoryBuffer:
    """Slots and groups in memory, every group in the journal first.

    A slot is issued only if it lies below the schedule's admission bound for the version the explorer has loaded (plus
    the slots that were given up, or whose groups the trainer refused and wants replaced, so that it never starves).
    `take` evicts what became too stale meanwhile: the slot is issued again, at most `max_attempts` times.

    No operation looks at all finished groups, nor at all that were ever taken.
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
        self._leases: dict[int, _Held] = {}
        self._off: dict[str, list[Lease]] = {}
        """Leases that were called off and whose player does not know yet."""
        self._groups: OrderedDict[int, Group] = OrderedDict()
        """Finished and not taken, in order of arrival."""
        self._ages: list[tuple[int, int, int]] = []
        """A heap of (oldest version, slot, attempt) of finished groups; some were taken since."""
        self._num_ready = self._reach = 0
        """In slot order: how many groups lie ready below the first slot that has not come back, and that slot."""
        self._floor = 0
        """Every slot below it is consumed: taken or given up."""
        self._consumed: set[int] = set()
        """The other consumed slots."""
        self._next = 0
        """Every slot from here on was never issued."""
        self._freed: list[int] = []
        """A heap of the slots below it that are to be issued again."""
        self._attempts: dict[int, int] = {}
        """Of slots that were played in vain and are not consumed: how often."""
        self._trains = schedule.first_version
        """The version that the groups taken next are for."""
        self._refused = 0
        """Groups that were taken and are to be replaced."""
        self._evicted = self._called_off = self._given_up = self._dropped = 0
        self._changed = asyncio.Condition()
        self._closed = False

    # ------------------------------------------------------------------ the explorers' side

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """The lowest slot that nobody plays and the version of `owner` admits."""
        async with self._changed:
            if wait or self._closed:
                await self._wait(
                    lambda: self._free_slot < self._bound(owner),
                    lambda: f"explorer {owner!r} (version {self._loaded.get(owner)})",
                    lambda: f"the trainer to take groups (next slot {self._free_slot})",
                )
            if self._free_slot >= self._bound(owner):
                return None
            lease = self._issue()
            self._leases[lease.slot] = _Held(lease, owner, self._loaded[owner])
            return lease

    async def put(self, owner: str, group: Group) -> None:
        async with self._changed:
            slot, held = group.slot, self._leases.get(group.slot)
            if held is None or (held.owner, held.lease.attempt) != (owner, group.attempt):
                if self._is_consumed(slot) or group.attempt < self._attempts.get(slot, 0):
                    return  # called off, and finished before its player heard of it
                raise DataError(
                    f"put slot {slot} (attempt {group.attempt})",
                    f"{owner!r} holds no lease of it (what is held is {held})",
                    "lease a slot before playing it, and put it once",
                )  # fmt: skip
            self._journal.append(self.schedule.step_of(slot), group)
            del self._leases[slot]
            self._keep(group)
            self._changed.notify_all()

    async def release(self, owner: str) -> int:
        async with self._changed:
            slots = [slot for slot, held in self._leases.items() if held.owner == owner]
            for slot in slots:
                del self._leases[slot]
                heapq.heappush(self._freed, slot)
            self._off.pop(owner, None)
            self._loaded.pop(owner, None)  # it gets nothing until it has adopted a version again
            self._changed.notify_all()
            return len(slots)

    async def undo(self, method: str, answer: Any, *args: Any) -> None:
        """Takes back an answer that came when nobody waited for it any more: the slot of a `lease`."""
        del args
        async with self._changed:
            held = self._leases.get(answer.slot) if method == "lease" else None
            if held is not None and held.lease == answer:
                del self._leases[answer.slot]
                heapq.heappush(self._freed, answer.slot)
                self._changed.notify_all()

    async def called_off(self, owner: str) -> Sequence[Lease]:
        async with self._changed:
            while not self._off.get(owner):
                await self._changed.wait()  # for as long as the stage lasts: most stages call nothing off
            return self._off.pop(owner)

    async def drained(self, version: int) -> None:
        """Waits until every slot that `version` admits has been played."""
        async with self._changed:
            await self._wait(
                lambda: min((*self._leases, self._free_slot)) >= self._admitted(version),
                lambda: "the next version",
                lambda: f"the slots of version {version} ({len(self._leases)} being played)",
            )  # fmt: skip

    async def advance(self, owner: str, version: int) -> None:
        """An explorer adopted `version`: more slots may be admitted."""
        async with self._changed:
            self._loaded[owner] = version
            self._changed.notify_all()

    # ------------------------------------------------------------------ the trainer's side

    async def take(self, count: int, version: int) -> list[Group]:
        def ready() -> bool:
            if not self.schedule.ordered:
                self._evict(version)
            return self._ready() >= count

        async with self._changed:
            self._trains = version
            await self._wait(
                ready,
                lambda: f"the trainer (version {version})",
                lambda: f"{count} groups from the explorers ({len(self._groups)} finished, {len(self._leases)} being "
                "played)",
            )  # fmt: skip
            groups = self._taken(count)
            self._trains = version + 1
            if not self.schedule.ordered:
                self._call_off()
            self._changed.notify_all()
            return groups

    async def refuse(self, count: int) -> None:
        async with self._changed:
            self._refused += count
            self._trains -= 1  # the step is not over: the next groups are for it as well
            self._changed.notify_all()

    async def past(self, slots: Sequence[int]) -> list[Group]:
        steps = sorted({self.schedule.step_of(slot) for slot in slots})
        found = {group.slot: group for step in steps for group in self._journal.read_step(step)}
        return [found[slot] for slot in slots]

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ counts, checkpoints

    async def counts(self) -> Mapping[str, int]:
        return {
            "evicted": self._evicted, "called_off": self._called_off, "given_up": self._given_up,
            "dropped": self._dropped,
        }  # fmt: skip

    async def state(self) -> dict[str, Any]:
        """What a checkpoint must know: which slots training has consumed, how often others were played in vain."""
        return {
            "consumed_below": self._floor, "consumed": sorted(self._consumed),
            "attempts": {str(slot): attempt for slot, attempt in sorted(self._attempts.items())},
            "refused": self._refused, **await self.counts(),
        }  # fmt: skip

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the rollouts journaled after it; None starts the stage."""
        async with self._changed:
            if state is not None:
                self._floor, self._consumed = state["consumed_below"], set(state["consumed"])
                self._attempts = {int(slot): attempt for slot, attempt in state["attempts"].items()}
                self._refused, self._evicted, self._called_off, self._given_up, self._dropped = (
                    state[name] for name in ("refused", "evicted", "called_off", "given_up", "dropped")
                )
            self._trains, self._reach = version, self._floor
            for group in self._journaled(version):
                self._keep(group)
            issued = {*self._consumed, *self._groups, *self._attempts}
            self._next = max(issued, default=self._floor - 1) + 1
            self._freed = [slot for slot in range(self._floor, self._next) if not self._is_done(slot)]
            self._changed.notify_all()

    def _journaled(self, version: int) -> list[Group]:
        """The groups in the journal that a run at `version` has not consumed, one for each slot."""
        after_step = self.schedule.step_of(self._floor) - 1
        if not self.schedule.ordered:
            # The future of the dead run will not come again: its rollouts are nobody's policy, now and after the next
            # resume.
            self._journal.strike(after_step, lambda group: group.newest_version > version)
        found: dict[int, Group] = {}
        for group in self._journal.read(after_step):
            slot = group.slot
            if self._is_consumed(slot) or group.attempt < self._attempts.get(slot, 0):
                continue
            if group.dropped and group.newest_version > version:
                continue  # it would admit another slot to versions that have no right to it: it is dropped again, later
            expected = self.schedule.at(slot).task.task_id
            if group.task.task_id != expected and group.task.taskset != SERVED:
                raise RunDirError(
                    f"continue slot {slot}",
                    f"its journaled rollouts are of task {group.task.task_id!r}, the schedule says {expected!r}",
                    "the taskset changed: start another run.dir, or put the tasks back",
                )
            if group.attempt:
                self._attempts[slot] = group.attempt
            found.pop(slot, None)  # played in vain since the checkpoint: the last attempt counts, in its place
            found[slot] = group
        return list(found.values())

    # ------------------------------------------------------------------ slots

    def _bound(self, owner: str) -> int:
        """The slots below it may be issued to `owner`; none if what it would play could only be too stale."""
        version = self._loaded.get(owner)
        if version is None or self._trains - version > self.schedule.max_staleness:
            return 0
        return self._admitted(version)

    def _admitted(self, version: int) -> int:
        return self.schedule.admitted(version) + self._given_up + self._dropped + self._refused

    @property
    def _free_slot(self) -> int:
        return self._freed[0] if self._freed else self._next

    def _issue(self) -> Lease:
        if self._freed:
            slot = heapq.heappop(self._freed)
        else:
            slot, self._next = self._next, self._next + 1
        return Lease(slot, self._attempts.get(slot, 0))

    def _is_consumed(self, slot: int) -> bool:
        return slot < self._floor or slot in self._consumed

    def _is_done(self, slot: int) -> bool:
        return slot in self._groups or self._is_consumed(slot)

    def _consume(self, slot: int) -> None:
        self._attempts.pop(slot, None)
        self._consumed.add(slot)
        while self._floor in self._consumed:
            self._consumed.remove(self._floor)
            self._floor += 1

    # ------------------------------------------------------------------ finished groups

    def _keep(self, group: Group) -> None:
        if group.dropped:  # nothing will come of this slot: another one is admitted in its place
            self._dropped += 1
            self._consume(group.slot)
            return
        self._groups[group.slot] = group
        if not self.schedule.ordered:
            heapq.heappush(self._ages, (group.oldest_version, group.slot, group.attempt))

    def _ready(self) -> int:
        """How many groups training may take now."""
        if not self.schedule.ordered:
            return len(self._groups)
        while self._is_done(self._reach):
            self._num_ready += self._reach in self._groups
            self._reach += 1
        return self._num_ready

    def _taken(self, count: int) -> list[Group]:
        """The next `count` groups: in slot order, or in order of arrival."""
        groups: list[Group] = []
        while len(groups) < count:
            slot = self._floor if self.schedule.ordered else next(iter(self._groups))
            groups.append(self._groups.pop(slot))
            self._consume(slot)
        self._num_ready -= count
        return groups

    def _evict(self, version: int) -> None:
        """Gives up what is staler than the bound: admission alone does not hold a straggler to it."""
        while self._ages and version - self._ages[0][0] > self.schedule.max_staleness:
            _, slot, attempt = heapq.heappop(self._ages)
            if slot in self._groups and self._groups[slot].attempt == attempt:
                del self._groups[slot]
                self._evicted += 1
                self._again(slot)
                self._changed.notify_all()

    def _call_off(self) -> None:
        """Takes back leases whose groups could not be trained on any more."""
        oldest = self._trains - self.schedule.max_staleness
        for held in [held for held in self._leases.values() if held.version < oldest]:
            del self._leases[held.lease.slot]
            self._off.setdefault(held.owner, []).append(held.lease)
            self._called_off += 1
            self._again(held.lease.slot)

    def _again(self, slot: int) -> None:
        """A slot that was played in vain is issued again, or given up after `max_attempts`."""
        self._attempts[slot] = self._attempts.get(slot, 0) + 1
        if self._attempts[slot] < self.schedule.max_attempts:
            heapq.heappush(self._freed, slot)
        else:
            self._given_up += 1
            self._consume(slot)

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
