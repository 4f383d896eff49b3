"""The slots of a buffer as rows: what each operation of `SqlBuffer` does inside one transaction.

The rules are those of `buffers.slots`, the rows those of `buffers.sql_tables`.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from trivium.buffers.journal import read_stored
from trivium.buffers.slots import (
    COUNTERS,
    SlotsState,
    StoredGroup,
    bound,
    drained,
    kept_on_resume,
    log_retries,
    next_attempt,
    not_leased,
    oldest_version,
    retried,
)
from trivium.buffers.sql_media import delete_media
from trivium.buffers.sql_tables import BUFFERS, CALLS, EXPLORERS, FAILED, GROUPS, SLOTS, SlotState
from trivium.errors import DataError
from trivium.phases import progress
from trivium.schedule import Schedule
from trivium.types import Group, Lease

T = TypeVar("T")
_log = logging.getLogger("trivium")

_UNKNOWN = {"begin": 0, "oldest": -(2**31)}
_s = SLOTS.c
_MANY = 500
"""Most values in one statement, because servers limit the time of a statement."""
_BULKY = 32
"""Most groups that one statement fetches."""
_RANGE = 10_000
"""Most slots that one statement deletes."""


_OPEN = (SlotState.FREE, SlotState.LEASED, SlotState.FINISHED)
_WITH_GROUP = (SlotState.FINISHED, SlotState.CONSUMED, SlotState.EVICTED, SlotState.DROPPED)


class Slots:
    """The rows of one buffer, inside one transaction."""

    def __init__(self, connection: sa.Connection, schedule: Schedule, head: Mapping[str, Any]) -> None:
        self._connection, self._schedule = connection, schedule
        self.head = dict(head)
        """The buffer's row of BUFFERS, to be saved by the caller."""
        self.changed = False
        self._mine = _s.buffer == head["name"]

    # ------------------------------------------------------------------ explorers

    def advance(self, owner: str, version: int) -> bool:
        """An explorer has loaded `version`; True, for it needs nothing else."""
        mine = (EXPLORERS.c.buffer == self.head["name"], EXPLORERS.c.owner == owner)
        if self._run(sa.update(EXPLORERS).where(*mine).values(loaded=version)).rowcount == 0:
            self._run(sa.insert(EXPLORERS).values(buffer=self.head["name"], owner=owner, loaded=version))
        return True

    def loaded(self, owner: str) -> int | None:
        """The version that an explorer has loaded."""
        query = sa.select(EXPLORERS.c.loaded).where(EXPLORERS.c.buffer == self.head["name"], EXPLORERS.c.owner == owner)
        return self._connection.execute(query).scalar_one_or_none()

    def admits(self, owner: str) -> bool:
        """Whether there is a slot for this explorer. Raises StopAsyncIteration where the buffer is closed."""
        self._check_open()
        return self.free_slot() < bound(self._schedule, self.head, self.head["trains"], self.loaded(owner))

    def lease(self, owner: str) -> tuple[int, int, str | None] | None:
        """(slot, attempt, stored group in base 64 whose rewards are to be computed again) of the lowest free slot, if
        the version of `owner` admits it. Raises StopAsyncIteration like `admits`."""
        self._check_open()
        version, free = self.loaded(owner), self._first(SlotState.FREE)
        slot, attempt = (self.head["next_slot"], 0) if free is None else (free.slot, free.attempt)
        if slot >= bound(self._schedule, self.head, self.head["trains"], version):
            return None
        row = {"state": SlotState.LEASED, "owner": owner, "version": version}
        if free is None:
            self._run(sa.insert(SLOTS).values(**self._key(slot, 0), **row))
            self.head["next_slot"] += 1
        else:
            self._run(sa.update(SLOTS).where(*self._this(slot, attempt)).values(row))
        recorded = {} if free is None or free.arrival is None else self.payloads([Lease(slot, attempt)])
        return slot, attempt, next((b64encode(payload).decode() for payload in recorded.values()), None)

    def put(self, owner: str, group: Group, payload: bytes) -> None:
        this = self._this(group.slot, group.attempt)
        row = self._connection.execute(sa.select(_s.state, _s.owner, _s.arrival).where(*this)).one_or_none()
        if row is not None and row.owner == owner and row.state in (SlotState.CANCELLED, SlotState.CANCELLED_TOLD):
            return  # finished before its owner was told, or stopped
        if row is None or row.owner != owner or row.state != SlotState.LEASED:
            state = "" if row is None else f" (it is {row.state}, last leased by {row.owner!r})"
            raise not_leased(owner, group, state)
        if row.arrival is not None:  # its rewards were computed again
            self._delete_groups([Lease(group.slot, group.attempt)])
        self._run(sa.insert(GROUPS).values(**self._key(group.slot, group.attempt), payload=payload))
        finished = {
            "state": SlotState.DROPPED if group.dropped else SlotState.FINISHED,
            "arrival": self.head["arrivals"],
            "oldest": group.oldest_version,
            "newest": group.newest_version,
            "taskset": group.task.taskset,
            "task": group.task.task_id,
            "dropped": bool(group.dropped),
        }
        self._run(sa.update(SLOTS).where(*this).values(finished))
        self.head["arrivals"] += 1
        self.head["oldest"] = min(self.head["oldest"], group.oldest_version)
        self.head["dropped"] += bool(group.dropped)

    def release(self, owner: str) -> int:
        """Frees the leases of `owner`; returns their number."""
        leased = (self._mine, _s.state == SlotState.LEASED, _s.owner == owner)
        count = self._run(sa.update(SLOTS).where(*leased).values(state=SlotState.FREE, owner=None)).rowcount
        # It will not ask for its cancelled leases, and an explorer of its name must adopt a version first.
        self._run(sa.update(SLOTS).where(*self._cancelled(owner)).values(state=SlotState.CANCELLED_TOLD))
        self._run(sa.delete(EXPLORERS).where(EXPLORERS.c.buffer == self.head["name"], EXPLORERS.c.owner == owner))
        return count

    def return_lease(self, lease: Lease) -> None:
        """Frees a lease whose caller was cancelled."""
        this = (*self._this(lease.slot, lease.attempt), _s.state == SlotState.LEASED)
        self._run(sa.update(SLOTS).where(*this).values(state=SlotState.FREE, owner=None))

    def has_cancelled(self, owner: str) -> bool:
        """Whether `owner` has cancelled leases that it has not fetched."""
        return self._connection.execute(sa.select(_s.slot).where(*self._cancelled(owner)).limit(1)).first() is not None

    def cancelled_leases(self, owner: str) -> list[Lease]:
        """Returns the cancelled leases of `owner`, once."""
        query = sa.select(_s.slot, _s.attempt).where(*self._cancelled(owner)).order_by(_s.slot)
        rows = self._connection.execute(query).all()
        if rows:
            self._run(sa.update(SLOTS).where(*self._cancelled(owner)).values(state=SlotState.CANCELLED_TOLD))
        return [Lease(row.slot, row.attempt) for row in rows]

    # ------------------------------------------------------------------ the trainer

    def due(self, count: int, version: int) -> bool:
        """Whether `take` has anything to do. Raises StopAsyncIteration where the buffer is closed."""
        self._check_open()
        ready = len(self._ready(count))
        progress(ready)
        return ready == count or self._older(version) is not None

    def take(self, count: int, version: int) -> list[Lease] | None:
        """Consumes the next `count` attempts for `version`; None where there are too few. Evicts first. Raises
        StopAsyncIteration like `due`."""
        self._check_open()
        self._train(version)
        self._evict(version)
        ready = self._ready(count)
        if len(ready) < count:
            return None
        self._mark(ready, state=SlotState.CONSUMED, consumed_at=version)
        self.head["begin"] = 1 + (ready[-1].slot if self._schedule.ordered else ready[-1].arrival)
        self._train(version + 1)
        if not self._schedule.ordered:
            self._cancel_stale()
        return [Lease(row.slot, row.attempt) for row in ready]

    def return_taken(self, taken: Sequence[Lease]) -> None:
        """Takes back a `take` whose caller was cancelled."""
        self._mark(taken, state=SlotState.FINISHED, consumed_at=None)
        self.head |= _UNKNOWN

    def refuse(self, count: int) -> None:
        self.head["refused"] += count
        self._train(self.head["trains"] - 1)  # the next groups are for the same step

    def drained(self, version: int) -> bool:
        """Whether nothing more is rolled out with `version`. Raises StopAsyncIteration like `due`."""
        self._check_open()
        leased = self._first(SlotState.LEASED)
        lowest = min(self.free_slot(), self.head["next_slot"] if leased is None else leased.slot)
        return drained(self._schedule, self.head, self.head["trains"], version, lowest)

    def free_slot(self) -> int:
        """The lowest slot that could be leased."""
        free = self._first(SlotState.FREE)
        return self.head["next_slot"] if free is None else free.slot

    def count(self, state: SlotState) -> int:
        """How many attempts are in this state."""
        query = sa.select(sa.func.count()).select_from(SLOTS).where(self._mine, _s.state == state)
        return self._connection.execute(query).scalar_one()

    def _ready(self, count: int) -> Sequence[sa.Row]:
        """The next attempts to consume that have arrived; at most `count`."""
        finished, begin = (self._mine, _s.state == SlotState.FINISHED), self.head["begin"]
        query = sa.select(_s.slot, _s.attempt, _s.arrival).where(*finished).limit(count)
        if self._schedule.ordered:
            leased = self._first(SlotState.LEASED)
            missing = min(self.free_slot(), self.head["next_slot"] if leased is None else leased.slot)
            query = query.where(_s.slot >= begin, _s.slot < missing).order_by(_s.slot)
        else:
            query = query.where(_s.arrival >= begin).order_by(_s.arrival)
        return self._connection.execute(query).all()

    def _older(self, version: int) -> int | None:
        """The version that no group may be older than to train `version` on; None where none is."""
        oldest = oldest_version(self._schedule, version)
        return oldest if oldest > self.head["oldest"] and not self._schedule.ordered else None

    def _evict(self, version: int) -> None:
        """Evicts groups that are too stale: admission alone does not bound a straggler."""
        oldest = self._older(version)
        if oldest is None:
            return
        stale = (self._mine, _s.state == SlotState.FINISHED, _s.oldest >= self.head["oldest"], _s.oldest < oldest)
        for row in self._connection.execute(sa.select(_s.slot, _s.attempt).where(*stale).order_by(_s.oldest)).all():
            self._retry(row.slot, row.attempt, SlotState.EVICTED)
            self.head["evicted"] += 1
        self.head["oldest"] = oldest

    def _train(self, version: int) -> None:
        """Notes that the next `take` is for `version`."""
        self.changed |= self.head["trains"] != version
        self.head["trains"] = version

    def _cancel_stale(self) -> None:
        """Cancels leases whose groups would be too stale."""
        oldest = oldest_version(self._schedule, self.head["trains"])
        late = (self._mine, _s.state == SlotState.LEASED, _s.version < oldest)
        for row in self._connection.execute(sa.select(_s.slot, _s.attempt).where(*late)).all():
            self._retry(row.slot, row.attempt, SlotState.CANCELLED)
            self.head["called_off"] += 1

    def _retry(self, slot: int, attempt: int, state: SlotState) -> None:
        """Ends a failed attempt; issues the slot again, or gives it up."""
        self._run(sa.update(SLOTS).where(*self._this(slot, attempt)).values(state=state))
        following = next_attempt(self._schedule, attempt)
        if following is None:
            self.head["given_up"] += 1
        else:
            self._run(sa.insert(SLOTS).values(**self._key(slot, following), state=SlotState.FREE))

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the consumed slots, and the attempts of the others."""
        opened = sa.select(_s.slot, _s.attempt).where(self._mine, _s.state.in_(_OPEN))
        attempts = {row.slot: row.attempt for row in self._connection.execute(opened)}
        below = min(attempts, default=self.head["next_slot"])
        consumed = frozenset(range(below, self.head["next_slot"])) - attempts.keys()
        return SlotsState(below, consumed, attempts, {name: self.head[name] for name in COUNTERS}).to_json()

    def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Undoes everything since a checkpoint of `version`, or since the start of the stage, but finished groups."""
        restored = SlotsState.of(state)
        floor, done, attempts = restored.consumed_below, restored.consumed, restored.attempts
        self.head |= restored.counts | {"trains": version} | _UNKNOWN
        behind = (self._mine, _s.slot < floor, _s.state.in_(_OPEN))  # of a run that restored an older checkpoint
        self._run(sa.update(SLOTS).where(*behind).values(state=SlotState.CONSUMED))

        query = sa.select(SLOTS).where(self._mine, _s.slot >= floor).order_by(_s.slot, _s.attempt)
        rows = self._connection.execute(query).all()
        keeps = partial(kept_on_resume, self._schedule, restored, version)
        stored = self._undamaged(row for row in rows if row.arrival is not None and keeps(_stored_group(row)))
        kept = {slot: row for slot, row in stored.items() if row.state in _WITH_GROUP}
        judged = {slot: row for slot, row in stored.items() if row.state in _OPEN and slot not in kept}
        judged |= self._retry_failed(kept)
        self._delete([row for row in rows if row.slot not in done], kept | judged)
        self._consume_open([row for row in rows if row.slot in done])
        self.head["next_slot"] = max((floor, *(slot + 1 for slot in (*done, *kept, *judged, *attempts))))
        self._insert_finished(sorted(kept.values(), key=lambda row: (self._schedule.step_of(row.slot), row.arrival)))
        self._insert({**row._asdict(), "state": SlotState.FREE, "owner": None} for row in judged.values())
        others = {*done, *kept, *judged}
        free = (slot for slot in range(floor, self.head["next_slot"]) if slot not in others)
        self._insert({**self._key(slot, attempts.get(slot, 0)), "state": SlotState.FREE} for slot in free)

    def discard(self, version: int, before: int) -> int:
        """Removes the groups that arrived `before` this number, were sampled with `version` or a newer one and are not
        trained on; returns their number."""
        lost = (self._mine, _s.arrival < before, _s.newest >= version, _s.state.in_(_OPEN))
        rows = self._connection.execute(sa.select(_s.slot, _s.attempt, _s.state).where(*lost)).all()
        self._delete_groups(rows)
        self._mark(rows, arrival=None)
        self._mark([row for row in rows if row.state == SlotState.FINISHED], state=SlotState.FREE)
        for row in rows:
            if row.state == SlotState.LEASED:  # its rewards are being computed again
                self._retry(row.slot, row.attempt, SlotState.CANCELLED)
        self.head |= _UNKNOWN
        return len(rows)

    def _undamaged(self, rows: Iterable[sa.Row]) -> dict[int, sa.Row]:
        """The last of these rows of each slot whose group is as it was written; the others are rolled out again."""
        kept = {row.slot: row for row in rows}
        for part in _parts([Lease(row.slot, row.attempt) for row in kept.values()], _BULKY):
            for lease, payload in self.payloads(part).items():
                try:
                    read_stored(payload, self.head["name"], lease)
                except DataError as error:
                    _log.warning("slot %d is rolled out again: %s (%s)", lease.slot, error.asked, error.found)
                    del kept[lease.slot]
        return kept

    def fail(self, slots: Sequence[int]) -> None:
        """Failures of these slots' groups end the run."""
        below = self.state()["consumed_below"]
        mine = FAILED.c.buffer == self.head["name"]
        self._run(sa.delete(FAILED).where(mine))
        self._run(sa.insert(FAILED).values(buffer=self.head["name"], from_slot=min(below, *slots)))

    def _retry_failed(self, kept: dict[int, sa.Row]) -> dict[int, sa.Row]:
        """Removes from `kept` what does not count after failures ended the run; returns the rows whose rewards are to
        be computed again."""
        mine = FAILED.c.buffer == self.head["name"]
        from_slot = self._connection.execute(sa.select(FAILED.c.from_slot).where(mine)).scalar_one_or_none()
        if from_slot is None:
            return {}
        self._run(sa.delete(FAILED).where(mine))
        stored = self.payloads([Lease(slot, row.attempt) for slot, row in kept.items() if slot >= from_slot])
        groups = [read_stored(payload, self.head["name"], lease) for lease, payload in stored.items()]
        failed = retried(self._schedule, groups, from_slot)
        log_retries(failed)
        rows = {group.slot: kept.pop(group.slot) for group, _ in failed}
        return {group.slot: rows[group.slot] for group, judged in failed if judged}

    def _delete(self, rows: Sequence[sa.Row], kept: Mapping[int, sa.Row]) -> None:
        """Deletes rows, and the groups of all that are not `kept`."""
        for part in _parts(sorted({row.slot for row in rows})):
            self._run(sa.delete(SLOTS).where(self._mine, _s.slot.in_(part)))
        self._delete_groups([row for row in rows if row.arrival is not None and kept.get(row.slot) is not row])

    def _delete_groups(self, attempts: Sequence[Lease] | Sequence[sa.Row]) -> None:
        g = GROUPS.c
        for row in attempts:
            mine = g.buffer == self.head["name"]
            self._run(sa.delete(GROUPS).where(mine, g.slot == row.slot, g.attempt == row.attempt))

    def _consume_open(self, rows: Sequence[sa.Row]) -> None:
        for part in _parts(sorted({row.slot for row in rows if row.state in _OPEN})):
            left_open = (self._mine, _s.slot.in_(part), _s.state.in_(_OPEN))
            self._run(sa.update(SLOTS).where(*left_open).values(state=SlotState.CONSUMED))

    def _insert_finished(self, rows: Sequence[sa.Row]) -> None:
        """Inserts the rows of finished groups, in their order of arrival."""
        first = self.head["arrivals"]
        self._insert(
            {
                **row._asdict(),
                "state": SlotState.DROPPED if row.dropped else SlotState.FINISHED,
                "arrival": first + place,
                "consumed_at": None,
            }
            for place, row in enumerate(rows)
        )
        self.head["arrivals"] += len(rows)
        self.head["dropped"] += sum(row.dropped for row in rows)

    def wipe(self) -> None:
        """Deletes everything of an earlier run but the buffer's row."""
        self._run(sa.delete(FAILED).where(FAILED.c.buffer == self.head["name"]))
        _delete_rows(self._connection, self.head)
        self.head |= dict.fromkeys((*COUNTERS, "next_slot", "arrivals"), 0)

    def forget_callers(self) -> None:
        """Deletes what is stored of the explorers and callers of an earlier trainer."""
        for table in (EXPLORERS, CALLS):
            self._run(sa.delete(table).where(table.c.buffer == self.head["name"]))
        untold = (self._mine, _s.state == SlotState.CANCELLED)
        self._run(sa.update(SLOTS).where(*untold).values(state=SlotState.CANCELLED_TOLD))

    # ------------------------------------------------------------------ rows

    def payloads(self, attempts: Sequence[Lease]) -> dict[Lease, bytes]:
        """The stored groups of these attempts, in their order; empty where there is none."""
        g, payloads = GROUPS.c, dict[Lease, bytes]()
        for part in _parts([attempt.slot for attempt in attempts], _BULKY):
            query = sa.select(g.slot, g.attempt, g.payload).where(g.buffer == self.head["name"], g.slot.in_(part))
            payloads |= {Lease(row.slot, row.attempt): row.payload for row in self._connection.execute(query)}
        return {attempt: payloads.get(attempt, b"") for attempt in attempts}

    def taken(self, slots: Sequence[int]) -> list[Lease]:
        """The attempts at these slots that were taken."""
        attempts: dict[int, int] = {}
        for part in _parts(slots):
            rows = self._connection.execute(
                sa.select(_s.slot, _s.attempt, _s.state).where(self._mine, _s.slot.in_(part))
            )
            attempts |= {row.slot: row.attempt for row in rows if row.state == SlotState.CONSUMED}
        lost = [slot for slot in slots if slot not in attempts]
        if lost:
            raise DataError(
                f"groups that were taken from slots {list(slots)}", f"none was from {lost}", "ask for others"
            )
        return [Lease(slot, attempts[slot]) for slot in slots]

    def _first(self, state: SlotState) -> sa.Row | None:
        """The row of this state with the lowest slot."""
        row = (_s.slot, _s.attempt, _s.arrival)
        query = sa.select(*row).where(self._mine, _s.state == state).order_by(_s.slot).limit(1)
        return self._connection.execute(query).first()

    def _cancelled(self, owner: str) -> tuple[sa.ColumnElement[bool], ...]:
        return (self._mine, _s.state == SlotState.CANCELLED, _s.owner == owner)

    def _check_open(self) -> None:
        if self.head["closed"]:
            raise StopAsyncIteration

    def _this(self, slot: int, attempt: int) -> tuple[sa.ColumnElement[bool], ...]:
        return (self._mine, _s.slot == slot, _s.attempt == attempt)

    def _key(self, slot: int, attempt: int) -> dict[str, Any]:
        return {"buffer": self.head["name"], "slot": slot, "attempt": attempt}

    def _run(self, statement: sa.Executable) -> sa.CursorResult:
        self.changed = True
        return self._connection.execute(statement)  # pyright: ignore[reportReturnType]

    def _mark(self, attempts: Sequence[Lease] | Sequence[sa.Row], **values: object) -> None:
        """Sets columns of these rows, each selected by its primary key alone."""
        these = (self._mine, _s.slot == sa.bindparam("this_slot"), _s.attempt == sa.bindparam("this_attempt"))
        keys = [{"this_slot": attempt.slot, "this_attempt": attempt.attempt} for attempt in attempts]
        self.changed = True
        for part in _parts(keys):
            self._connection.execute(sa.update(SLOTS).where(*these).values(values), part)

    def _insert(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for part in _parts([dict(row) for row in rows]):
            self._connection.execute(sa.insert(SLOTS), part)


def forget(connection: sa.Connection, run: str) -> None:
    """Deletes the buffers of a run; its roles are told by their next call."""
    stages = BUFFERS.c.name.startswith(f"{run}/stage-", autoescape=True)
    for head in connection.execute(sa.select(BUFFERS).where(stages).with_for_update()).all():
        _delete_rows(connection, head._asdict())
        for table in (EXPLORERS, CALLS, FAILED):
            connection.execute(sa.delete(table).where(table.c.buffer == head.name))
    connection.execute(sa.delete(BUFFERS).where(stages))


def _stored_group(row: sa.Row) -> StoredGroup:
    return StoredGroup(row.slot, row.attempt, row.newest, row.dropped, row.taskset, row.task)


def _delete_rows(connection: sa.Connection, head: Mapping[str, Any]) -> None:
    delete_media(connection, head["name"])
    for table in (SLOTS, GROUPS):
        for begin in range(0, head["next_slot"], _RANGE):
            part = (table.c.slot >= begin, table.c.slot < begin + _RANGE)
            connection.execute(sa.delete(table).where(table.c.buffer == head["name"], *part))


def _parts(values: Sequence[T], size: int = _MANY) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
