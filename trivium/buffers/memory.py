"""The buffer of one process: the rows of its slots in memory, every finished group in the journal."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from trivium.buffers.journal import Journal
from trivium.buffers.slot_buffer import SlotBuffer, Undo, Waits, Work
from trivium.buffers.slot_machine import HEAD, Predicate, Slots
from trivium.buffers.slots import OPEN, Row, SlotsState, SlotState, about, may_be_judged_again
from trivium.config import BufferConfig
from trivium.foundation.concurrency import ProgressDeadline, Waiting, wait_until
from trivium.foundation.errors import DataError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import Group, Lease


class MemoryBuffer(SlotBuffer):
    """Keeps slots and groups in memory. Each group is journaled first."""

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
        self.rows = MemoryRows(schedule, self._journal)
        self._slots = Slots(self.rows, schedule)
        self._arrived_before = 0
        """Groups with a lower arrival number were restored from earlier sessions."""
        self._changes, self._changed_at = 0, 0.0
        self._waiting: dict[asyncio.Future[None], Work] = {}
        """What each waiter waits for, called in the context of the waiter, whose activity it reports progress to."""

    async def undo(self, method: str, answer: Lease, *args: object) -> None:
        """Takes back the answer of a call from another process that was cancelled: the slot of a `lease`."""
        del args
        if method == "lease":
            await self._change(lambda slots: slots.return_lease(answer))

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        steps = sorted({self.schedule.step_of(slot) for slot in slots})
        groups = {group.slot: group for step in steps for group in self._journal.read_step(step)}
        lost = [slot for slot in slots if slot not in groups]
        if lost:
            raise DataError(
                f"groups that were taken from slots {list(slots)}",
                f"{self._journal.directory} no longer holds the groups of {lost}",
                "restore its files, or start another run.dir",
            )
        return [groups[slot] for slot in slots]

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the rollouts journaled after it; None starts the stage."""

        def restore(slots: Slots) -> int:
            if not self.schedule.ordered:
                # `slots.restore` ignores groups that newer versions sampled. They must also leave the journal: at the
                # next resume, from a later version, they would no longer look newer.
                after_step = self.schedule.step_of(SlotsState.of(state).consumed_below) - 1
                self._journal.strike(after_step, lambda group: group.newest_version > version)
            slots.restore(state, version)
            return slots.head["arrivals"]

        self._arrived_before = await self._change(restore)

    async def discard(self, version: int) -> int:
        return await self._change(lambda slots: slots.discard(version, self._arrived_before))

    # ------------------------------------------------------------------ transactions

    async def _change(self, work: Work, *, undo: Undo | None = None, joins: bool = False) -> Any:
        # Nothing is awaited, so a cancelled caller has changed nothing. There is one session.
        del undo, joins
        return self._done(work)

    async def _when(self, work: Work, waits: Waits | None, *, undo: Undo | None = None, joins: bool = False) -> Any:
        del undo, joins

        async def poll(deadline: ProgressDeadline) -> tuple[Any, object]:
            answer = self._done(work)
            if answer is not None:
                return answer, None
            woken = asyncio.get_running_loop().create_future()
            self._waiting[woken] = partial(copy_context().run, work)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if waits is None else deadline.left_s):
                        await woken
            finally:
                del self._waiting[woken]
            deadline.observe(self._changes, self._changed_at)  # any change is progress
            return None, deadline.state

        def describe() -> Waiting:
            assert waits is not None
            return waits(self._slots)

        return await wait_until(poll, describe, math.inf if waits is None else self._deadline_s)

    async def _look(self, look: Work) -> Any:
        return look(self._slots)

    async def _groups(self, rows: Sequence[Row]) -> list[Group]:
        return [row.group for row in rows if row.group is not None]

    def _done(self, work: Work) -> Any:
        """Runs `work` and returns its answer. If it changed the buffer, wakes the waiters that can continue. The
        exception is a `lease`, whose answer is a Row: no waiter waits for one."""
        self._slots.changed = False
        answer = work(self._slots)
        if self._slots.changed and not isinstance(answer, Row):
            self._changes, self._changed_at = self._changes + 1, time.monotonic()
            for woken, waiting in self._waiting.items():
                if not woken.done() and self._can_continue(waiting):
                    woken.set_result(None)
        return answer

    def _can_continue(self, work: Work) -> bool:
        """Whether `work` would return, raise or change anything. Asking costs a tenth of waking a task in vain, and a
        buffer has two waiters for each explorer."""
        slots = Slots(self.rows, self.schedule, dry=True)
        slots.head = dict(slots.head)
        try:
            return work(slots) is not None or slots.changed
        except Exception:
            return True  # the waiter runs `work` again, and raises it


class MemoryRows:
    """The rows of a buffer in memory (`trivium.buffers.slot_machine.Rows`): open rows, and cancelled leases until their
    owner has been told. Groups of other rows are only in the journal.

    Frequent operations use the indices: they scan neither all finished rows nor all slots that were ever taken.
    """

    def __init__(self, schedule: Schedule, journal: Journal) -> None:
        self.head: dict[str, Any] = {**dict.fromkeys(HEAD, 0), "trains": schedule.first_version, "closed": False}
        self._schedule, self._journal = schedule, journal
        self._loaded: dict[str, int] = {}
        """The version that each explorer has loaded."""
        self._clear()

    def _clear(self) -> None:
        self._open: dict[int, Row] = {}
        """By slot."""
        self._freed: list[int] = []
        """A heap of the slots of FREE rows. Slots that were leased since are removed when `lowest` meets them."""
        states = (*OPEN, SlotState.CANCELLED)
        self._in_state: dict[SlotState, OrderedDict[tuple[int, int], Row]] = {state: OrderedDict() for state in states}
        """By slot and attempt, in the order in which they came into the state: FINISHED rows in order of arrival."""
        self._num_leases = Counter[str | None]()
        """By explorer."""

    def explorer(self, owner: str) -> tuple[int | None, int]:
        return self._loaded.get(owner), len(self._loaded)

    def load(self, owner: str, version: int | None) -> None:
        if version is None:
            self._loaded.pop(owner, None)
        else:
            self._loaded[owner] = version

    def num_leases(self, owner: str) -> int:
        return self._num_leases[owner]

    def find(self, slot: int, attempt: int) -> Row | None:
        row = self._open.get(slot)
        if row is not None and row.attempt == attempt:
            return row
        # An attempt that ended has no row. It is reported as cancelled and told, so that a late `put` is ignored.
        ended = slot < self.head["next_slot"] and (row is None or attempt < row.attempt)
        return Row(slot, attempt, SlotState.CANCELLED_TOLD) if ended else None

    def lowest(self, state: SlotState) -> Row | None:
        if state == SlotState.LEASED:
            return min(self._in_state[state].values(), key=lambda row: row.slot, default=None)
        while self._freed:  # FREE
            row = self._open.get(self._freed[0])
            if row is not None and row.state == SlotState.FREE:
                return row
            heapq.heappop(self._freed)
        return None

    def select(self, *states: SlotState, where: Predicate | None = None) -> Sequence[Row]:
        rows = (row for state in states for row in self._in_state[state].values())
        return [row for row in rows if where is None or where(row)]

    def finished(self, count: int, begin: int, end: int | None) -> Sequence[Row]:
        if end is None:  # taken rows are gone, so all FINISHED rows arrived at `begin` or later
            return [*islice(self._in_state[SlotState.FINISHED].values(), count)]
        # `end` is the lowest slot that is leased or free, so each open row below it is FINISHED.
        return [*islice((self._open[slot] for slot in range(begin, end) if slot in self._open), count)]

    def insert(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.state in OPEN:
                self._open[row.slot] = row
            elif self._open.get(row.slot) is row:
                del self._open[row.slot]
            if row.state == SlotState.FREE:
                heapq.heappush(self._freed, row.slot)
            if row.state in self._in_state:
                self._in_state[row.state][row.slot, row.attempt] = row
            if row.state == SlotState.LEASED:
                self._num_leases[row.owner] += 1

    def update(self, rows: Sequence[Row], values: Mapping[str, Any]) -> None:
        columns = values.items()
        for row in rows:
            if row.state in self._in_state:
                del self._in_state[row.state][row.slot, row.attempt]
            if row.state == SlotState.LEASED:
                self._num_leases[row.owner] -= 1
            for name, value in columns:
                setattr(row, name, value)
        self.insert(rows)

    def store(self, row: Row, group: Group, record: bytes) -> None:
        del record
        self._journal.append(self._schedule.step_of(row.slot), group)
        row.group = group

    def discard(self, rows: Sequence[Row], version: int) -> None:
        slots = {row.slot for row in rows}
        self._journal.strike(
            self._step_before(min(self._open)), lambda group: group.slot in slots or group.newest_version > version
        )
        for row in rows:
            row.group = None

    def stored(self, floor: int) -> Sequence[Row]:
        aside = {group.slot: group for group in self._journal.read_aside()}.values()
        judged = [_row(group, SlotState.FREE, 0) for group in aside if may_be_judged_again(self._schedule, group)]
        journaled = enumerate(self._journal.read(self._step_before(floor)))
        finished = [_row(group, SlotState.FINISHED, place) for place, group in journaled]
        return sorted([*judged, *finished], key=lambda row: (row.slot, row.attempt))

    def groups(self, rows: Sequence[Row]) -> Iterable[tuple[Row, Group]]:
        return [(row, row.group) for row in rows if row.group is not None]

    def replace(self, floor: int, consumed: Collection[int], restored: Sequence[Row]) -> None:
        del floor, consumed, restored  # the caller inserts the restored rows again
        self._clear()

    def mark_failed(self, slot: int) -> None:
        self._journal.mark_failed(slot)

    def failed_from(self) -> int | None:
        return self._journal.failed_from

    def set_aside(self, failed: Sequence[tuple[Group, bool]], floor: int) -> None:
        final = "rolled out again after failures ended the run"
        groups = [group if judged else group.refused(group.dropped or final) for group, judged in failed]
        self._journal.set_aside(self._step_before(floor), groups)

    def _step_before(self, slot: int) -> int:
        return self._schedule.step_of(slot) - 1


def _row(group: Group, state: SlotState, arrival: int) -> Row:
    return Row(group.slot, group.attempt, state, arrival=arrival, group=group, **about(group))
