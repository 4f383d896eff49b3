"""Slots of the buffer for the groups that agents open: each is leased, and filled with the group or given back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trivium.explorer import Explorer
from trivium.loops import next_lease
from trivium.protocols import Buffer
from trivium.schedule import Schedule
from trivium.synchronizer import Synchronizer
from trivium.types import Group, Lease, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Slot:
    """A lease and the version that was loaded when it was granted."""

    lease: Lease
    version: int


class Slots:
    """Requests for slots, in the order in which groups were opened, and the slots that no group needs any more."""

    def __init__(self, explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> None:
        self._explorer, self._buffer = explorer, buffer
        self._schedule, self._synchronizer = schedule, synchronizer
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._spare: deque[Slot] = deque()
        self._requested = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def request(self) -> asyncio.Future[Slot]:
        """Returns a slot that is set once the buffer admits a further group, and cancelled if the queue is closed."""
        slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        self._assign()
        self._requested.set()
        return slot

    def give_back(self, slot: asyncio.Future[Slot]) -> None:
        """Withdraws a request, or gives its slot to the next one."""
        if slot in self._waiting:
            self._waiting.remove(slot)
        else:
            self._spare.append(slot.result())
            self._assign()

    async def lease(self) -> None:
        """Leases a slot whenever one is requested, until the buffer is closed."""
        while True:
            while not self._waiting:
                self._requested.clear()
                await self._requested.wait()
            try:
                lease = await next_lease(self._explorer, self._buffer, self._schedule, self._synchronizer)
            except StopAsyncIteration:
                return
            self._spare.append(Slot(lease, self._explorer.version))
            self._assign()

    def _assign(self) -> None:
        while self._spare and self._waiting:
            self._waiting.popleft().set_result(self._spare.popleft())

    async def cancelled(self) -> set[Lease]:
        """Waits until the buffer cancels leases, and returns them: what fills their slots is too stale to train on."""
        leases = set(await self._buffer.cancelled_leases(self._explorer.name))
        self._spare = deque(slot for slot in self._spare if slot.lease not in leases)
        return leases

    async def fill(self, slot: Slot, task: Task, rollouts: Sequence[Trajectory]) -> bool:
        """Computes the rewards of a group and puts it. Returns whether it may be trained on."""
        lease, explorer = slot.lease, self._explorer
        trajectories = await explorer.judge_rollouts(task, rollouts)
        # No slot is issued twice at once, so the slot tells this group from others of its task.
        group = Group(lease.slot, task, tuple(trajectories), lease.slot, lease.attempt, slot.version)
        succeeded, needed = len(group.alive), explorer.limits.min_members
        if not rollouts or (needed > 1 and succeeded < needed):
            group = group.refused(f"{succeeded} trajectories, and workflow.min_members is {needed}")
        group = explorer.refined(group)
        await self._buffer.put(explorer.name, group)
        return not group.dropped

    def close(self) -> None:
        """Ends every wait for a slot."""
        while self._waiting:
            self._waiting.popleft().cancel()
