"""The buffer over rows of slots: the calls of explorers and trainer, for every store of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trivium.buffers.slot_machine import Slots
from trivium.buffers.slots import COUNTERS, Row
from trivium.foundation.concurrency import Waiting
from trivium.types import Group, Lease

Work = Callable[[Slots], Any]
"""An operation. A store may call it more than once; one of its calls takes effect."""
Waits = Callable[[Slots], Waiting]
Undo = Callable[[Slots, Any], None]
"""Takes back the answer of an operation whose caller was cancelled."""


class SlotBuffer(ABC):
    """Issues slots and hands finished groups to the trainer (`trivium.protocols.Buffer`).

    Every call is an operation of `Slots`, which a store runs inside one transaction. A call that `joins` can only come
    after the trainer's `restore`: it belongs to the trainer that opened the buffer last.
    """

    @abstractmethod
    async def _change(self, work: Work, *, undo: Undo | None = None, joins: bool = False) -> Any:
        """The answer of `work`. `undo` takes it back if the caller is cancelled before it gets it."""

    @abstractmethod
    async def _when(self, work: Work, waits: Waits | None, *, undo: Undo | None = None, joins: bool = False) -> Any:
        """The answer of `work` once it is not None. Any change of the buffer is progress.

        Raises SyncError with the description of `waits` after the deadline; without `waits` there is no deadline.
        """

    @abstractmethod
    async def _look(self, look: Work) -> Any:
        """The result of `look`, which only reads."""

    @abstractmethod
    async def _groups(self, rows: Sequence[Row]) -> list[Group]:
        """The groups of rows that an operation returned."""

    # ------------------------------------------------------------------ explorers

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        lease = partial(Slots.lease, owner=owner)
        if wait:
            row = await self._when(lease, lambda slots: slots.explorer_waits(owner), undo=Slots.return_lease)
        else:
            row = await self._change(lease, undo=Slots.return_lease)
        if row is None or row.arrival is None:
            return row and Lease(row.slot, row.attempt)
        (recorded,) = await self._groups([row])
        return Lease(row.slot, row.attempt, recorded)

    async def put(self, owner: str, group: Group) -> None:
        await self._change(lambda slots: slots.put(owner, group), joins=True)

    async def release(self, owner: str) -> int:
        # Until the buffer is open, its leases are of an earlier trainer's explorers: `restore` frees all of them.
        return await self._change(lambda slots: slots.release(owner)) or 0

    async def cancelled_leases(self, owner: str) -> Sequence[Lease]:
        # Without a deadline: most stages cancel nothing.
        rows = await self._when(lambda slots: slots.cancelled_leases(owner), None)
        return [Lease(row.slot, row.attempt) for row in rows]

    async def advance(self, owner: str, version: int) -> None:
        # The version was published by a trainer that had restored before.
        await self._when(
            lambda slots: slots.advance(owner, version),
            lambda _: Waiting(f"explorer {owner!r}", "the trainer to open the buffer"),
            joins=True,
        )

    async def drain(self, version: int) -> None:
        await self._when(lambda slots: slots.drained(version) or None, lambda slots: slots.drain_waits(version))

    # ------------------------------------------------------------------ the trainer

    async def take(self, count: int, version: int) -> list[Group]:
        rows = await self._when(
            lambda slots: slots.take(count, version),
            lambda slots: slots.trainer_waits(count, version),
            undo=Slots.return_taken,
            joins=True,
        )
        return await self._groups(rows)

    async def refuse(self, count: int) -> None:
        await self._change(lambda slots: slots.refuse(count), joins=True)

    async def retry_on_resume(self, slots: Sequence[int]) -> None:
        if slots:
            await self._change(lambda machine: machine.fail(slots), joins=True)

    async def counts(self) -> Mapping[str, int]:
        head = await self._look(lambda slots: slots.head)
        return {name: head[name] for name in COUNTERS}

    async def state(self) -> dict[str, Any]:
        return await self._look(lambda slots: slots.state())

    async def close(self) -> None:
        await self._change(lambda slots: slots.close(), joins=True)
