"""The rows of a buffer in a database, inside one transaction."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeVar

import sqlalchemy as sa

from trivium.buffers.journal import read_stored
from trivium.buffers.slot_machine import Predicate
from trivium.buffers.slots import COUNTERS, OPEN, Row, SlotState
from trivium.buffers.sql.database import Statement
from trivium.buffers.sql.slot_tables import BUFFERS, CALLS, EXPLORERS, FAILED, GROUPS, MEDIA, SLOTS
from trivium.foundation.errors import DataError
from trivium.types import Group, Lease

T = TypeVar("T")
_log = logging.getLogger("trivium")

_s, _g = SLOTS.c, GROUPS.c
_COLUMNS = tuple(field.name for field in fields(Row) if field.name != "group")
_WITHOUT_GROUP = ("slot", "attempt", "state", "owner", "version")
"""The columns of a row without a group. All others keep their defaults."""
# Made once: building a statement takes SQLAlchemy longer than running it takes SQLite. Operations that run for every
# group read the columns that they need.
_MINE = _s.buffer == sa.bindparam("this_buffer")
_THIS = (_MINE, _s.slot == sa.bindparam("this_slot"), _s.attempt == sa.bindparam("this_attempt"))
"""One row, by its primary key: the one index that PostgreSQL then considers."""
_SELECT = sa.select(*(_s[name] for name in _COLUMNS))
_SELECT_BRIEF = sa.select(*(_s[name] for name in (*_WITHOUT_GROUP, "arrival")))
_FIND = _SELECT_BRIEF.where(*_THIS)
_LOWEST = _SELECT_BRIEF.where(_MINE, _s.state == sa.bindparam("this_state")).order_by(_s.slot).limit(1)
_FINISHED = _SELECT_BRIEF.where(_MINE, _s.state == SlotState.FINISHED).limit(sa.bindparam("count"))
_FINISHED_SINCE = _FINISHED.where(_s.arrival >= sa.bindparam("begin")).order_by(_s.arrival)
_FINISHED_WITHIN = _FINISHED.where(_s.slot >= sa.bindparam("begin"), _s.slot < sa.bindparam("end")).order_by(_s.slot)
_INSERT, _STORE = sa.insert(SLOTS), Statement(sa.insert(GROUPS))
_INSERT_BRIEF = Statement(_INSERT, ("buffer", *_WITHOUT_GROUP))
_RECORDS = sa.select(_g.slot, _g.attempt, _g.payload).where(
    _g.buffer == sa.bindparam("this_buffer"), _g.slot.in_(sa.bindparam("slots", expanding=True))
)
_LOADED = sa.func.max(EXPLORERS.c.loaded).filter(EXPLORERS.c.owner == sa.bindparam("this_owner"))
_EXPLORER = sa.select(sa.func.count(), _LOADED).where(EXPLORERS.c.buffer == sa.bindparam("this_buffer"))
_NUM_LEASES = sa.select(sa.func.count()).where(
    _MINE, _s.state == SlotState.LEASED, _s.owner == sa.bindparam("this_owner")
)
_MANY = 500
"""Most values in one statement, because servers limit the time of a statement."""
_BULKY = 32
"""Most groups that one statement fetches."""
_RANGE = 10_000
"""Most slots that one statement deletes."""


class SqlRows:
    """The rows of one buffer (`trivium.buffers.slot_machine.Rows`). The caller saves the head."""

    def __init__(self, connection: sa.Connection, head: Mapping[str, Any]) -> None:
        self._connection, self._name = connection, head["name"]
        self.head = dict(head)

    # ------------------------------------------------------------------ explorers

    def explorer(self, owner: str) -> tuple[int | None, int]:
        this = {"this_buffer": self._name, "this_owner": owner}
        number, loaded = self._connection.execute(_EXPLORER, this).one()
        return loaded, number

    def num_leases(self, owner: str) -> int:
        this = {"this_buffer": self._name, "this_owner": owner}
        return self._connection.execute(_NUM_LEASES, this).scalar_one()

    def load(self, owner: str, version: int | None) -> None:
        explorer = self._explorer(owner)
        if version is None:
            self._run(sa.delete(EXPLORERS).where(*explorer))
        elif self._run(sa.update(EXPLORERS).where(*explorer).values(loaded=version)).rowcount == 0:
            self._run(sa.insert(EXPLORERS).values(buffer=self._name, owner=owner, loaded=version))

    def _explorer(self, owner: str) -> tuple[sa.ColumnElement[bool], ...]:
        return (EXPLORERS.c.buffer == self._name, EXPLORERS.c.owner == owner)

    # ------------------------------------------------------------------ reading

    def find(self, slot: int, attempt: int) -> Row | None:
        return next(iter(self._rows(_FIND, this_slot=slot, this_attempt=attempt)), None)

    def lowest(self, state: SlotState) -> Row | None:
        return next(iter(self._rows(_LOWEST, this_state=state)), None)

    def select(self, *states: SlotState, where: Predicate | None = None) -> Sequence[Row]:
        # One state is compared, not looked up in a list of one: PostgreSQL plans that better.
        of_states = _s.state == states[0] if len(states) == 1 else _s.state.in_(states)
        query = _SELECT.where(_MINE, of_states)
        return self._rows(query if where is None else query.where(where(_s)))

    def finished(self, count: int, begin: int, end: int | None) -> Sequence[Row]:
        if end is None:
            return self._rows(_FINISHED_SINCE, count=count, begin=begin)
        return self._rows(_FINISHED_WITHIN, count=count, begin=begin, end=end)

    def taken(self, slots: Sequence[int]) -> list[Row]:
        """The rows of these slots that were taken."""
        by_slot: dict[int, Row] = {}
        for part in _parts(slots):
            rows = self._rows(_SELECT.where(_MINE, _s.slot.in_(part)))
            by_slot |= {row.slot: row for row in rows if row.state == SlotState.CONSUMED}
        lost = [slot for slot in slots if slot not in by_slot]
        if lost:
            raise DataError(
                f"groups that were taken from slots {list(slots)}",
                f"no groups of {lost} were taken",
                "ask for slots whose groups were taken",
            )
        return [by_slot[slot] for slot in slots]

    # ------------------------------------------------------------------ writing

    def insert(self, rows: Sequence[Row]) -> None:
        brief = all(row.arrival is None for row in rows)
        columns = _WITHOUT_GROUP if brief else _COLUMNS
        values = [{"buffer": self._name, **{name: getattr(row, name) for name in columns}} for row in rows]
        if brief:
            for row in values:
                _INSERT_BRIEF(self._connection, row)
            return
        for part in _parts(values):
            self._connection.execute(_INSERT, part)

    def update(self, rows: Sequence[Row], values: Mapping[str, Any]) -> None:
        shared = {"this_buffer": self._name, **{f"new_{name}": value for name, value in values.items()}}
        for row in rows:
            _update_of(tuple(values))(self._connection, {**shared, "this_slot": row.slot, "this_attempt": row.attempt})

    # ------------------------------------------------------------------ groups

    def store(self, row: Row, group: Group, record: bytes) -> None:
        del group
        if row.arrival is not None:  # its rewards were computed again
            self._delete_groups([row])
        stored = {"buffer": self._name, "slot": row.slot, "attempt": row.attempt, "payload": record}
        _STORE(self._connection, stored)

    def discard(self, rows: Sequence[Row], version: int) -> None:
        del version  # there is no group without a row
        self._delete_groups(rows)

    def stored(self, floor: int) -> Sequence[Row]:
        with_group = (_MINE, _s.slot >= floor, _s.arrival.is_not(None))
        return self._rows(_SELECT.where(*with_group).order_by(_s.slot, _s.attempt))

    def groups(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Group]]:
        for part in _parts(rows, _BULKY):
            for row, record in zip(part, self.records(part), strict=True):
                try:
                    yield row, read_stored(record, self._name, Lease(row.slot, row.attempt))
                except DataError as error:
                    _log.warning("slot %d is rolled out again: %s (%s)", row.slot, error.asked, error.found)

    def records(self, rows: Sequence[Row]) -> list[bytes]:
        """The encoded groups of rows; empty for a row without a group."""
        records: dict[tuple[int, int], bytes] = {}
        for part in _parts([row.slot for row in rows], _BULKY):
            selected = self._connection.execute(_RECORDS, {"this_buffer": self._name, "slots": [*part]})
            records |= {(slot, attempt): record for slot, attempt, record in selected}
        return [records.get((row.slot, row.attempt), b"") for row in rows]

    def _delete_groups(self, rows: Iterable[Row]) -> None:
        for row in rows:
            this = (_g.buffer == self._name, _g.slot == row.slot, _g.attempt == row.attempt)
            self._run(sa.delete(GROUPS).where(*this))

    # ------------------------------------------------------------------ a new session

    def replace(self, floor: int, consumed: Collection[int], restored: Sequence[Row]) -> None:
        rows = self._rows(_SELECT.where(_MINE, _s.slot >= floor))
        restored_keys = {(row.slot, row.attempt) for row in restored}
        removed = [row for row in rows if row.slot not in consumed]
        for part in _parts(sorted({row.slot for row in removed})):
            self._run(sa.delete(SLOTS).where(_s.buffer == self._name, _s.slot.in_(part)))
        self._delete_groups(
            row for row in removed if row.arrival is not None and (row.slot, row.attempt) not in restored_keys
        )
        # Slots below `floor` and those of `consumed` are consumed in this checkpoint, but may still have open rows: an
        # earlier session that resumed from an older checkpoint issued them again.
        self._run(sa.update(SLOTS).where(_s.buffer == self._name, _s.state.in_(OPEN)).values(state=SlotState.CONSUMED))

    def mark_failed(self, slot: int) -> None:
        self._forget_failed()
        self._run(sa.insert(FAILED).values(buffer=self._name, from_slot=slot))

    def failed_from(self) -> int | None:
        query = sa.select(FAILED.c.from_slot).where(FAILED.c.buffer == self._name)
        return self._connection.execute(query).scalar_one_or_none()

    def set_aside(self, failed: Sequence[tuple[Group, bool]], floor: int) -> None:
        del failed, floor  # nothing to store: the rows that `restore` inserts have the same information
        self._forget_failed()

    def _forget_failed(self) -> None:
        self._run(sa.delete(FAILED).where(FAILED.c.buffer == self._name))

    def wipe(self) -> None:
        """Deletes everything of an earlier run but the buffer's row."""
        self._forget_failed()
        _delete_rows(self._connection, self.head)
        self.head |= dict.fromkeys((*COUNTERS, "next_slot", "arrivals"), 0)

    def forget_callers(self) -> None:
        """Deletes the explorers and the last calls that were stored for an earlier trainer. Marks its cancelled leases
        as told, since their owners no longer exist."""
        for table in (EXPLORERS, CALLS):
            self._run(sa.delete(table).where(table.c.buffer == self._name))
        untold = (_s.buffer == self._name, _s.state == SlotState.CANCELLED)
        self._run(sa.update(SLOTS).where(*untold).values(state=SlotState.CANCELLED_TOLD))

    def _rows(self, query: sa.Select[Any], **values: Any) -> list[Row]:
        rows: Any = self._connection.execute(query, {"this_buffer": self._name, **values})
        return [Row(slot, attempt, SlotState(state), *rest) for slot, attempt, state, *rest in rows]

    def _run(self, statement: sa.Executable) -> sa.CursorResult:
        return self._connection.execute(statement)  # pyright: ignore[reportReturnType]


@lru_cache
def _update_of(names: tuple[str, ...]) -> Statement:
    """Sets these columns of one row to the parameters `new_...`."""
    return Statement(sa.update(SLOTS).where(*_THIS).values({name: sa.bindparam(f"new_{name}") for name in names}))


def forget(connection: sa.Connection, run: str) -> None:
    """Deletes the buffers of a run. If roles of the run still exist, their next call raises RoleFailed."""
    stages = BUFFERS.c.name.startswith(f"{run}/stage-", autoescape=True)
    for head in connection.execute(sa.select(BUFFERS).where(stages).with_for_update()).all():
        _delete_rows(connection, head._asdict())
        for table in (EXPLORERS, CALLS, FAILED):
            connection.execute(sa.delete(table).where(table.c.buffer == head.name))
    connection.execute(sa.delete(BUFFERS).where(stages))


def _delete_rows(connection: sa.Connection, head: Mapping[str, Any]) -> None:
    """Deletes media, slots and groups of a buffer, in ranges of slots to keep each statement short."""
    connection.execute(sa.delete(MEDIA).where(MEDIA.c.buffer == head["name"]))
    for table in (SLOTS, GROUPS):
        for begin in range(0, head["next_slot"], _RANGE):
            part = (table.c.slot >= begin, table.c.slot < begin + _RANGE)
            connection.execute(sa.delete(table).where(table.c.buffer == head["name"], *part))


def _parts(values: Sequence[T], size: int = _MANY) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
