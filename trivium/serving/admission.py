"""Slots of the buffer for the groups that agents open: a group waits here until the buffer admits it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from trivium.explorer import Explorer
from trivium.loops import next_lease
from trivium.protocols import Buffer
from trivium.schedule import Schedule
from trivium.serving.sessions import OpenGroup, Slot
from trivium.synchronizer import Synchronizer
from trivium.types import Lease


class Admission:
    """Leases one slot for each open group, in the order in which they were opened."""

    def __init__(self, explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> None:
        self._explorer, self._buffer = explorer, buffer
        self._schedule, self._synchronizer = schedule, synchronizer
        self._waiting: deque[OpenGroup] = deque()
        self._spare: deque[Slot] = deque()
        """Slots of groups that were removed before their first completion."""
        self._wanted = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Groups without a slot."""
        return len(self._waiting)

    def open_group(self, task_id: str, now: float) -> OpenGroup:
        """A new group of the task, which waits for a slot."""
        group = OpenGroup(task_id, asyncio.get_running_loop().create_future(), now)
        self._waiting.append(group)
        self._assign()
        self._wanted.set()
        return group

    def remove(self, group: OpenGroup) -> None:
        """Takes back a group without completions; a slot that it has goes to the next one."""
        if group in self._waiting:
            self._waiting.remove(group)
        else:
            self._spare.append(group.slot.result())
            self._assign()

    def discard(self, leases: Collection[Lease]) -> None:
        """Forgets spare slots whose leases were cancelled."""
        self._spare = deque(spare for spare in self._spare if spare.lease not in leases)

    def close(self) -> None:
        """Ends every wait for a slot."""
        while self._waiting:
            self._waiting.popleft().slot.cancel()

    async def run(self) -> None:
        """Leases a slot whenever a group needs one, until the buffer is closed."""
        while True:
            while not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
            try:
                lease = await next_lease(self._explorer, self._buffer, self._schedule, self._synchronizer)
            except StopAsyncIteration:
                return
            self._spare.append(Slot(lease, self._explorer.version))
            self._assign()

    def _assign(self) -> None:
        while self._spare and self._waiting:
            self._waiting.popleft().slot.set_result(self._spare.popleft())
