"""The buffer of one process: issues slots, journals finished groups, hands them to the trainer in order."""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.buffers.journal import Journal
from trivium.buffers.slots import (
    COUNTERS,
    SlotsState,
    StoredGroup,
    bound,
    drained,
    kept_on_resume,
    log_retries,
    may_be_judged_again,
    next_attempt,
    not_leased,
    oldest_version,
    retried,
    waiting_drain,
    waiting_explorer,
    waiting_trainer,
)
from trivium.concurrency import ProgressDeadline, Waiting, wait_until
from trivium.config import BufferConfig
from trivium.errors import DataError
from trivium.phases import progress
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import Group, Lease


@dataclass(frozen=True, slots=True)
class _ActiveLease:
    """The lease of a slot by an explorer."""

    lease: Lease
    owner: str
    version: int
    """The version that the owner had loaded: no token of the group is older."""


class MemoryBuffer:
    """Slots and groups in memory, every group in the journal first.

    The rules are those of `buffers.slots`. No operation looks at all finished groups, nor at all that were ever taken.
    """

    class Config(BufferConfig):
        kind: str = "memory"

    def __init__(
        self,
        config: Config,
        *,
        schedule: Schedule,
        rollouts: Path,
        renderer: Renderer,
        deadline_s: float,
        name: str = "",
    ) -> None:
        del config, renderer, name  # only file buffers tokenise; only shared ones have a name
        self.schedule, self._deadline_s = schedule, deadline_s
        self._journal = Journal(rollouts)
        self._loaded: dict[str, int] = {}
        """The version that each explorer has loaded."""
        self._leases: dict[int, _ActiveLease] = {}
        self._cancelled: dict[str, list[Lease]] = {}
        """Cancelled leases that their owners have not fetched yet."""
        self._groups: OrderedDict[int, Group] = OrderedDict()
        """Finished groups that were not taken, in order of arrival."""
        self._ages: list[tuple[int, int, int]] = []
        """A heap of (oldest version, slot, attempt) of finished groups; some have been taken since."""
        self._num_ready = self._first_unfinished = 0
        """In slot order: the first slot that is not finished, and how many groups below it can be taken."""
        self._floor = 0
        """Every slot below it is consumed."""
        self._consumed: set[int] = set()
        """The consumed slots above it."""
        self._next = 0
        """The lowest slot that was never issued."""
        self._freed: list[int] = []
        """A heap of the slots that are to be issued again."""
        self._attempts: dict[int, int] = {}
        """The attempt number of slots that are not at their first."""
        self._recorded: dict[int, Group] = {}
        """Groups of an earlier session whose rewards are to be computed again, by slot."""
        self._restored: set[int] = set()
        """The slots of finished groups of an earlier session; some have been taken since."""
        self._trains = schedule.first_version
        """The version that the next `take` is for."""
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._changed = asyncio.Condition()
        self._closed = False

    # ------------------------------------------------------------------ the explorers' side

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """The lowest free slot, if the version of `owner` admits it."""
        async with self._changed:
            if wait or self._closed:
                await self._wait(
                    lambda: self._free_slot < self._bound(owner),
                    lambda: waiting_explorer(owner, self._loaded.get(owner), self._free_slot),
                )
            if self._free_slot >= self._bound(owner):
                return None
            lease = self._issue()
            self._leases[lease.slot] = _ActiveLease(lease, owner, self._loaded[owner])
            return lease

    async def put(self, owner: str, group: Group) -> None:
        async with self._changed:
            slot, active = group.slot, self._leases.get(group.slot)
            if active is None or (active.owner, active.lease.attempt) != (owner, group.attempt):
                if self._is_consumed(slot) or group.attempt < self._attempts.get(slot, 0):
                    return  # cancelled, and finished before its owner was told
                raise not_leased(owner, group, "" if active is None else f" (it is leased: {active})")
            self._journal.append(self.schedule.step_of(slot), group)
            del self._leases[slot]
            self._recorded.pop(slot, None)
            self._keep(group)
            self._changed.notify_all()

    async def release(self, owner: str) -> int:
        async with self._changed:
            slots = [slot for slot, active in self._leases.items() if active.owner == owner]
            for slot in slots:
                del self._leases[slot]
                heapq.heappush(self._freed, slot)
            self._cancelled.pop(owner, None)
            self._loaded.pop(owner, None)  # it gets no slot until it has adopted a version again
            self._changed.notify_all()
            return len(slots)

    async def undo(self, method: str, answer: Lease, *args: object) -> None:
        """Takes back the answer of a call whose caller was cancelled: the slot of a `lease`."""
        del args
        async with self._changed:
            active = self._leases.get(answer.slot) if method == "lease" else None
            if active is not None and active.lease == answer:
                del self._leases[answer.slot]
                heapq.heappush(self._freed, answer.slot)
                self._changed.notify_all()

    async def cancelled_leases(self, owner: str) -> Sequence[Lease]:
        async with self._changed:
            while not self._cancelled.get(owner):
                await self._changed.wait()  # for as long as the stage lasts: most stages cancel nothing
            return self._cancelled.pop(owner)

    async def drain(self, version: int) -> None:
        """Waits until no slot is left that `version` would roll out."""
        async with self._changed:
            await self._wait(
                lambda: drained(
                    self.schedule, self._counts, self._trains, version, min((*self._leases, self._free_slot))
                ),
                lambda: waiting_drain(version, len(self._leases)),
            )

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
            progress(min(count, self._ready()))
            return self._ready() >= count

        async with self._changed:
            self._trains = version
            await self._wait(ready, lambda: waiting_trainer(version, count, len(self._groups), len(self._leases)))
            groups = self._consume_next(count)
            self._trains = version + 1
            if not self.schedule.ordered:
                self._cancel_stale()
            self._changed.notify_all()
            return groups

    async def refuse(self, count: int) -> None:
        async with self._changed:
            self._counts["refused"] += count
            self._trains -= 1  # the next groups are for the same step
            self._changed.notify_all()

    async def retry_on_resume(self, slots: Sequence[int]) -> None:
        async with self._changed:
            if slots:
                self._journal.mark_failed(min(self._floor, *slots))

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        steps = sorted({self.schedule.step_of(slot) for slot in slots})
        groups = {group.slot: group for step in steps for group in self._journal.read_step(step)}
        lost = [slot for slot in slots if slot not in groups]
        if lost:
            raise DataError(
                f"groups that were taken from slots {list(slots)}",
                f"{self._journal.directory} no longer holds those of {lost}",
                "restore its files, or start another run.dir",
            )
        return [groups[slot] for slot in slots]

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ counts, checkpoints

    async def counts(self) -> Mapping[str, int]:
        return {name: count for name, count in self._counts.items() if name != "refused"}

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint: the consumed slots, and the attempts of the others."""
        return SlotsState(self._floor, frozenset(self._consumed), self._attempts, self._counts).to_json()

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the rollouts journaled after it; None starts the stage."""
        async with self._changed:
            restored = SlotsState.of(state)
            self._floor, self._consumed = restored.consumed_below, set(restored.consumed)
            self._attempts, self._counts = dict(restored.attempts), dict(restored.counts)
            self._trains, self._first_unfinished = version, self._floor
            journaled = self._journaled(restored, version)
            self._recorded = self._set_aside(restored, version, {group.slot for group in journaled})
            for group in (*self._recorded.values(), *journaled):
                if group.attempt:
                    self._attempts[group.slot] = group.attempt
            for group in journaled:
                self._keep(group)
            self._restored = {*self._groups}
            issued = {*self._consumed, *self._groups, *self._attempts, *self._recorded}
            self._next = max(issued, default=self._floor - 1) + 1
            self._freed = [slot for slot in range(self._floor, self._next) if not self._is_done(slot)]
            self._changed.notify_all()

    async def discard(self, version: int) -> int:
        async with self._changed:
            finished = {slot: self._groups[slot] for slot in self._restored & self._groups.keys()}
            lost = {slot for slot, group in (finished | self._recorded).items() if group.newest_version >= version}
            if lost:
                self._journal.strike(
                    self.schedule.step_of(self._floor) - 1,
                    lambda group: group.slot in lost or group.newest_version > version,
                )
            for slot in lost:
                if self._groups.pop(slot, None) is not None:
                    heapq.heappush(self._freed, slot)
                elif (active := self._leases.pop(slot, None)) is not None:  # its rewards are being computed again
                    self._cancelled.setdefault(active.owner, []).append(active.lease)
                    self._retry(slot)
                self._recorded.pop(slot, None)
            self._restored -= lost
            self._first_unfinished = min((self._first_unfinished, *lost))
            self._num_ready = sum(slot < self._first_unfinished for slot in self._groups)
            self._changed.notify_all()
            return len(lost)

    def _journaled(self, state: SlotsState, version: int) -> list[Group]:
        """The groups in the journal that a run resumed at `version` keeps, one for each slot."""
        after_step = self.schedule.step_of(self._floor) - 1
        if not self.schedule.ordered:  # struck from the journal, or the next resume would keep them
            self._journal.strike(after_step, lambda group: group.newest_version > version)
        kept = self._kept(self._journal.read(after_step), state, version)
        if (from_slot := self._journal.failed_from) is not None:
            failed = retried(self.schedule, list(kept.values()), from_slot)
            log_retries(failed)
            final = "rolled out again after failures ended the run"
            self._journal.set_aside(
                after_step, [group if judged else group.refused(group.dropped or final) for group, judged in failed]
            )
            for group, _ in failed:
                del kept[group.slot]
        return list(kept.values())

    def _kept(self, groups: Iterable[Group], state: SlotsState, version: int) -> dict[int, Group]:
        """Those of the groups that a run resumed at `version` keeps, by slot."""
        kept: dict[int, Group] = {}
        for group in groups:
            if kept_on_resume(self.schedule, state, version, StoredGroup.of(group)):
                kept.pop(group.slot, None)  # evicted since the checkpoint: the last attempt counts, in its place
                kept[group.slot] = group
        return kept

    def _set_aside(self, state: SlotsState, version: int, finished: Container[int]) -> dict[int, Group]:
        """The groups set aside whose rewards are still to be computed again, by slot."""
        aside = self._kept(self._journal.read_aside(), state, version)
        return {
            slot: group
            for slot, group in aside.items()
            if slot not in finished and may_be_judged_again(self.schedule, group)
        }

    # ------------------------------------------------------------------ slots

    def _bound(self, owner: str) -> int:
        """The slots below it may be issued to `owner`."""
        return bound(self.schedule, self._counts, self._trains, self._loaded.get(owner))

    @property
    def _free_slot(self) -> int:
        return self._freed[0] if self._freed else self._next

    def _issue(self) -> Lease:
        if self._freed:
            slot = heapq.heappop(self._freed)
        else:
            slot, self._next = self._next, self._next + 1
        return Lease(slot, self._attempts.get(slot, 0), self._recorded.get(slot))

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
        if group.dropped:  # another slot is admitted in its place
            self._counts["dropped"] += 1
            self._consume(group.slot)
            return
        self._groups[group.slot] = group
        if not self.schedule.ordered:
            heapq.heappush(self._ages, (group.oldest_version, group.slot, group.attempt))

    def _ready(self) -> int:
        """How many groups can be taken now."""
        if not self.schedule.ordered:
            return len(self._groups)
        while self._is_done(self._first_unfinished):
            self._num_ready += self._first_unfinished in self._groups
            self._first_unfinished += 1
        return self._num_ready

    def _consume_next(self, count: int) -> list[Group]:
        """The next `count` groups: in slot order, or in order of arrival."""
        groups: list[Group] = []
        while len(groups) < count:
            slot = self._floor if self.schedule.ordered else next(iter(self._groups))
            groups.append(self._groups.pop(slot))
            self._consume(slot)
        self._num_ready -= count
        return groups

    def _evict(self, version: int) -> None:
        """Removes groups that are too stale: admission alone does not bound a straggler."""
        while self._ages and self._ages[0][0] < oldest_version(self.schedule, version):
            _, slot, attempt = heapq.heappop(self._ages)
            if slot in self._groups and self._groups[slot].attempt == attempt:
                del self._groups[slot]
                self._counts["evicted"] += 1
                self._retry(slot)
                self._changed.notify_all()

    def _cancel_stale(self) -> None:
        """Cancels leases whose groups would be too stale."""
        oldest = oldest_version(self.schedule, self._trains)
        for active in [active for active in self._leases.values() if active.version < oldest]:
            del self._leases[active.lease.slot]
            self._cancelled.setdefault(active.owner, []).append(active.lease)
            self._counts["called_off"] += 1
            self._retry(active.lease.slot)

    def _retry(self, slot: int) -> None:
        """Issues a slot again after a failed attempt, or gives it up."""
        self._recorded.pop(slot, None)
        self._restored.discard(slot)
        attempt = next_attempt(self.schedule, self._attempts.get(slot, 0))
        if attempt is None:
            self._counts["given_up"] += 1
            self._consume(slot)
        else:
            self._attempts[slot] = attempt
            heapq.heappush(self._freed, slot)

    async def _wait(self, until: Callable[[], bool], waiting: Callable[[], Waiting]) -> None:
        """Waits under the condition. Any change of the buffer is progress.

        Raises SyncError after the deadline, StopAsyncIteration once the buffer is closed.
        """

        async def poll(deadline: ProgressDeadline) -> tuple[bool | None, object]:
            if self._closed:
                raise StopAsyncIteration
            if until():
                return True, None
            try:
                async with asyncio.timeout(deadline.left_s):
                    await self._changed.wait()
            except TimeoutError:
                return None, deadline.state
            return None, object()  # whatever has changed is progress

        await wait_until(poll, waiting, self._deadline_s)
