"""The slots of a buffer as rows: what each operation of `SqlBuffer` does inside one transaction.

A row is one attempt at a slot:

FREE -> LEASED -> FINISHED -> CONSUMED             the usual life; a lease that is released is FREE again
                           -> EVICTED              waited until it was too stale
               -> DROPPED                          refused by the experience pipeline
               -> OFF -> CALLED_OFF                could only become too stale; its player has heard of it

The next attempt begins as a FREE row of its own. A slot without rows has never been issued; where no row of a slot is
FREE, LEASED or FINISHED, training is done with it. The groups themselves lie in a table that is only added to: it is
the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import sqlalchemy as sa

from trivium.errors import DataError, RunDirError
from trivium.schedule import Schedule
from trivium.types import SERVED, Group, Lease

T = TypeVar("T")

TABLES = sa.MetaData()
RUNS = sa.Table(
    "trivium_runs", TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("place", sa.Text, nullable=False, comment="machine and run directory, for people"),
)  # fmt: skip
"""Whose a name is."""
BUFFERS = sa.Table(
    "trivium_buffers", TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("session", sa.Text, nullable=False),
    sa.Column("change", sa.BigInteger, nullable=False),
    sa.Column("closed", sa.Boolean, nullable=False),
    # PostgreSQL finds what is gone in its indexes for a while; a search that knows where to begin does not meet it.
    sa.Column("begin", sa.BigInteger, nullable=False, comment="no FINISHED row has a lower slot, or a lower arrival"),
    sa.Column("oldest", sa.BigInteger, nullable=False, comment="no FINISHED row is older"),
    *(sa.Column(name, sa.BigInteger, nullable=False)
      for name in ("trains", "next_slot", "arrivals", "given_up", "refused", "evicted", "called_off", "dropped")),
)  # fmt: skip
"""One row per buffer. Every transaction that changes anything holds it."""
SLOTS = sa.Table(
    "trivium_slots", TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("slot", sa.BigInteger, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("owner", sa.Text),
    sa.Column("version", sa.BigInteger, comment="the one it was leased for"),
    sa.Column("arrival", sa.BigInteger, comment="null where no group was put"),
    sa.Column("oldest", sa.BigInteger),
    sa.Column("newest", sa.BigInteger),
    sa.Column("taskset", sa.Text),
    sa.Column("task", sa.Text),
    sa.Column("dropped", sa.Boolean),
    sa.Column("consumed_at", sa.BigInteger, comment="the version that was trained on it"),
    # No operation looks at more rows than it returns, however many there are. The state comes first: a search by slot
    # alone must have no choice but the primary key, for PostgreSQL knows nothing of a new table and takes any index
    # that begins with the buffer to be as good.
    sa.Index("trivium_slots_by_slot", "state", "buffer", "slot"),
    sa.Index("trivium_slots_by_arrival", "state", "buffer", "arrival"),
    sa.Index("trivium_slots_by_age", "state", "buffer", "oldest"),
)  # fmt: skip
GROUPS = sa.Table(
    "trivium_groups", TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("slot", sa.BigInteger, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)  # fmt: skip
EXPLORERS = sa.Table(
    "trivium_explorers", TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("loaded", sa.BigInteger, nullable=False),
)  # fmt: skip
CALLS = sa.Table(
    "trivium_calls", TABLES,
    sa.Column("caller", sa.Text, primary_key=True),
    sa.Column("buffer", sa.Text, nullable=False, index=True),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("answer", sa.Text, nullable=False),
)  # fmt: skip
"""The last call of everybody who calls, and its answer: for who lost the connection before it came."""

_UNKNOWN = {"begin": 0, "oldest": -(2**31)}
COUNTERS = ("given_up", "refused", "evicted", "called_off", "dropped")
_s = SLOTS.c
_MANY = 500
"""How many values one statement names at most: on a server, a statement may only take so long."""
_BULKY = 32
"""How many groups one statement fetches at most."""
_RANGE = 10_000
"""How many slots one statement deletes at most."""


class SlotState(StrEnum):
    """What became of an attempt at a slot."""

    FREE = "free"
    LEASED = "leased"
    FINISHED = "finished"
    CONSUMED = "consumed"
    EVICTED = "evicted"
    DROPPED = "dropped"
    OFF = "off"
    CALLED_OFF = "called_off"


_OPEN = (SlotState.FREE, SlotState.LEASED, SlotState.FINISHED)


class Slots:
    """The rows of one buffer, inside one transaction."""

    def __init__(self, connection: sa.Connection, schedule: Schedule, head: Mapping[str, Any]) -> None:
        self._connection, self._schedule = connection, schedule
        self.head = dict(head)
        """The buffer's row of BUFFERS, to be saved by whoever began the transaction."""
        self.changed = False
        self._mine = _s.buffer == head["name"]

    # ------------------------------------------------------------------ explorers

    def advance(self, owner: str, version: int) -> None:
        mine = (EXPLORERS.c.buffer == self.head["name"], EXPLORERS.c.owner == owner)
        if self._run(sa.update(EXPLORERS).where(*mine).values(loaded=version)).rowcount == 0:
            self._run(sa.insert(EXPLORERS).values(buffer=self.head["name"], owner=owner, loaded=version))

    def loaded(self, owner: str) -> int | None:
        """The version that an explorer has loaded."""
        query = sa.select(EXPLORERS.c.loaded).where(EXPLORERS.c.buffer == self.head["name"], EXPLORERS.c.owner == owner)
        return self._connection.execute(query).scalar_one_or_none()

    def admits(self, owner: str) -> bool:
        """Whether there is a slot for this explorer."""
        return self.free_slot() < self._bound(self.loaded(owner))

    def lease(self, owner: str) -> Lease | None:
        """The lowest free slot, if the version of `owner` admits it."""
        version, free = self.loaded(owner), self._first(SlotState.FREE)
        slot, attempt = (self.head["next_slot"], 0) if free is None else (free.slot, free.attempt)
        if slot >= self._bound(version):
            return None
        row = {"state": SlotState.LEASED, "owner": owner, "version": version}
        if free is None:
            self._run(sa.insert(SLOTS).values(**self._key(slot, 0), **row))
            self.head["next_slot"] += 1
        else:
            self._run(sa.update(SLOTS).where(self._mine, _s.slot == slot, _s.attempt == attempt).values(row))
        return Lease(slot, attempt)

    def put(self, owner: str, group: Group, payload: bytes) -> None:
        this = (self._mine, _s.slot == group.slot, _s.attempt == group.attempt)
        row = self._connection.execute(sa.select(_s.state, _s.owner).where(*this)).one_or_none()
        if row is not None and row.owner == owner and row.state in (SlotState.OFF, SlotState.CALLED_OFF):
            return  # finished before its player heard of it, or could stop
        if row is None or row.owner != owner or row.state != SlotState.LEASED:
            raise DataError(
                f"put slot {group.slot}, attempt {group.attempt}",
                f"{owner!r} holds no lease of it"
                + ("" if row is None else f" (it is {row.state}, last leased by {row.owner!r})"),
                "lease a slot before playing it, and put it once",
            )
        self._run(sa.insert(GROUPS).values(**self._key(group.slot, group.attempt), payload=payload))
        finished = {
            "state": SlotState.DROPPED if group.dropped else SlotState.FINISHED, "arrival": self.head["arrivals"],
            "oldest": group.oldest_version, "newest": group.newest_version, "taskset": group.task.taskset,
            "task": group.task.task_id, "dropped": bool(group.dropped),
        }  # fmt: skip
        self._run(sa.update(SLOTS).where(*this).values(finished))
        self.head["arrivals"] += 1
        self.head["oldest"] = min(self.head["oldest"], group.oldest_version)
        self.head["dropped"] += bool(group.dropped)

    def release(self, owner: str) -> int:
        """Leases of `owner` are free again; how many there were."""
        leased = (self._mine, _s.state == SlotState.LEASED, _s.owner == owner)
        count = self._run(sa.update(SLOTS).where(*leased).values(state=SlotState.FREE, owner=None)).rowcount
        # Nobody is left to hear what was called off, and who comes in its name must adopt a version first.
        self._run(sa.update(SLOTS).where(*self._off(owner)).values(state=SlotState.CALLED_OFF))
        self._run(sa.delete(EXPLORERS).where(EXPLORERS.c.buffer == self.head["name"], EXPLORERS.c.owner == owner))
        return count

    def return_lease(self, lease: Lease) -> None:
        """Nobody will play it: who asked for it has gone."""
        this = (self._mine, _s.slot == lease.slot, _s.attempt == lease.attempt, _s.state == SlotState.LEASED)
        self._run(sa.update(SLOTS).where(*this).values(state=SlotState.FREE, owner=None))

    def calls_off(self, owner: str) -> bool:
        """Whether leases of `owner` were called off that it does not know of."""
        return self._connection.execute(sa.select(_s.slot).where(*self._off(owner)).limit(1)).first() is not None

    def called_off(self, owner: str) -> list[Lease]:
        """Those leases; from now on it knows."""
        rows = self._connection.execute(sa.select(_s.slot, _s.attempt).where(*self._off(owner)).order_by(_s.slot)).all()
        if rows:
            self._run(sa.update(SLOTS).where(*self._off(owner)).values(state=SlotState.CALLED_OFF))
        return [Lease(row.slot, row.attempt) for row in rows]

    # ------------------------------------------------------------------ the trainer

    def due(self, count: int, version: int) -> bool:
        """Whether `take` has anything to do."""
        return self._older(version) is not None or len(self._ready(count)) == count

    def take(self, count: int, version: int) -> list[Lease] | None:
        """The attempts to train `version` on, consumed; None where there are too few. Evicts first."""
        self._train(version)
        self._evict(version)
        ready = self._ready(count)
        if len(ready) < count:
            return None
        self._mark(ready, state=SlotState.CONSUMED, consumed_at=version)
        self.head["begin"] = 1 + (ready[-1].slot if self._schedule.ordered else ready[-1].arrival)
        self._train(version + 1)
        if not self._schedule.ordered:
            self._call_off()
        return [Lease(row.slot, row.attempt) for row in ready]

    def return_taken(self, taken: Sequence[Lease]) -> None:
        """Nobody trains on them: who asked for them has gone."""
        self._mark(taken, state=SlotState.FINISHED, consumed_at=None)
        self.head |= _UNKNOWN

    def refuse(self, count: int) -> None:
        self.head["refused"] += count
        self._train(self.head["trains"] - 1)  # the step is not over: the next groups are for it as well

    def drained(self, version: int) -> bool:
        """Whether every slot that `version` admits has been played."""
        leased = self._first(SlotState.LEASED)
        lowest = min(self.free_slot(), self.head["next_slot"] if leased is None else leased.slot)
        return lowest >= self._admitted(version)

    def free_slot(self) -> int:
        """The lowest slot that could be leased."""
        free = self._first(SlotState.FREE)
        return self.head["next_slot"] if free is None else free.slot

    def number(self, state: SlotState) -> int:
        """How many attempts are in this state."""
        count = sa.select(sa.func.count()).select_from(SLOTS).where(self._mine, _s.state == state)
        return self._connection.execute(count).scalar_one()

    def _ready(self, count: int) -> Sequence[sa.Row]:
        """What training consumes next, as far as it has arrived; at most `count`."""
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
        oldest = version - self._schedule.max_staleness
        return oldest if oldest > self.head["oldest"] and not self._schedule.ordered else None

    def _evict(self, version: int) -> None:
        """Gives up what is staler than the bound: admission alone does not hold a straggler to it."""
        oldest = self._older(version)
        if oldest is None:
            return
        stale = (self._mine, _s.state == SlotState.FINISHED, _s.oldest >= self.head["oldest"], _s.oldest < oldest)
        for row in self._connection.execute(sa.select(_s.slot, _s.attempt).where(*stale).order_by(_s.oldest)).all():
            self._end(row.slot, row.attempt, SlotState.EVICTED)
            self.head["evicted"] += 1
        self.head["oldest"] = oldest

    def _train(self, version: int) -> None:
        """The groups taken next are for `version`."""
        self.changed |= self.head["trains"] != version
        self.head["trains"] = version

    def _call_off(self) -> None:
        """Takes back leases whose groups could not be trained on any more."""
        oldest = self.head["trains"] - self._schedule.max_staleness
        late = (self._mine, _s.state == SlotState.LEASED, _s.version < oldest)
        for row in self._connection.execute(sa.select(_s.slot, _s.attempt).where(*late)).all():
            self._end(row.slot, row.attempt, SlotState.OFF)
            self.head["called_off"] += 1

    def _end(self, slot: int, attempt: int, state: SlotState) -> None:
        """A slot that was played in vain is issued again, or given up after `max_attempts`."""
        this = (self._mine, _s.slot == slot, _s.attempt == attempt)
        self._run(sa.update(SLOTS).where(*this).values(state=state))
        if attempt + 1 < self._schedule.max_attempts:
            self._run(sa.insert(SLOTS).values(**self._key(slot, attempt + 1), state=SlotState.FREE))
        else:
            self.head["given_up"] += 1

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint must know: which slots training is done with."""
        opened = sa.select(_s.slot, _s.attempt).where(self._mine, _s.state.in_(_OPEN))
        attempts = {row.slot: row.attempt for row in self._connection.execute(opened)}
        floor = min(attempts, default=self.head["next_slot"])
        return {
            "consumed_below": floor,
            "consumed": [slot for slot in range(floor, self.head["next_slot"]) if slot not in attempts],
            "attempts": {str(slot): attempt for slot, attempt in sorted(attempts.items()) if attempt},
            **{name: self.head[name] for name in COUNTERS},
        }

    def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Undoes everything since a checkpoint of `version`, or since the start of the stage, but what was finished."""
        said = state or {"consumed_below": 0, "consumed": [], "attempts": {}, **dict.fromkeys(COUNTERS, 0)}
        floor, done = said["consumed_below"], set(said["consumed"])
        attempts = {int(slot): attempt for slot, attempt in said["attempts"].items()}
        attempts = {slot: attempt for slot, attempt in attempts.items() if slot >= floor and slot not in done}
        self.head |= {name: said[name] for name in COUNTERS} | {"trains": version} | _UNKNOWN
        behind = (self._mine, _s.slot < floor, _s.state.in_(_OPEN))  # of a life that had restored an older checkpoint
        self._run(sa.update(SLOTS).where(*behind).values(state=SlotState.CONSUMED))

        kept: dict[int, sa.Row] = {}
        query = sa.select(SLOTS).where(self._mine, _s.slot >= floor).order_by(_s.slot, _s.attempt)
        rows = self._connection.execute(query).all()
        for row in rows:
            if row.slot not in done and row.attempt >= attempts.get(row.slot, 0) and self._survives(row, version):
                kept[row.slot] = row
        self._take_down([row for row in rows if row.slot not in done], kept)
        self._end_open([row for row in rows if row.slot in done])
        self.head["next_slot"] = max((floor, *(slot + 1 for slot in (*done, *kept, *attempts))))
        self._put_back(sorted(kept.values(), key=lambda row: (self._schedule.step_of(row.slot), row.arrival)))
        free = (slot for slot in range(floor, self.head["next_slot"]) if slot not in done and slot not in kept)
        self._insert({**self._key(slot, attempts.get(slot, 0)), "state": SlotState.FREE} for slot in free)

    def _survives(self, row: sa.Row, version: int) -> bool:
        """Whether a row has a group that a run which goes on from `version` could have."""
        # In an unordered run the future of the dead run will not come again; its rollouts are nobody's policy. In slot
        # order it will; but a group that was dropped then would already admit another slot to versions without a right
        # to it.
        lost = (row.dropped or not self._schedule.ordered) and (row.newest or 0) > version
        if row.arrival is None or lost:
            return False
        expected = self._schedule.at(row.slot).task.task_id
        if row.task != expected and row.taskset != SERVED:
            raise RunDirError(
                f"continue slot {row.slot}",
                f"its stored rollouts are of task {row.task!r}, the schedule says {expected!r}",
                "the taskset changed: start another run.dir, or put the tasks back",
            )
        return True

    def _take_down(self, rows: Sequence[sa.Row], kept: Mapping[int, sa.Row]) -> None:
        """Removes rows, and the groups of all but those that are kept."""
        for part in _parts(sorted({row.slot for row in rows})):
            self._run(sa.delete(SLOTS).where(self._mine, _s.slot.in_(part)))
        g = GROUPS.c
        lost = [row for row in rows if row.arrival is not None and kept.get(row.slot) is not row]
        for row in lost:
            mine = g.buffer == self.head["name"]
            self._run(sa.delete(GROUPS).where(mine, g.slot == row.slot, g.attempt == row.attempt))

    def _end_open(self, rows: Sequence[sa.Row]) -> None:
        for part in _parts(sorted({row.slot for row in rows if row.state in _OPEN})):
            left_open = (self._mine, _s.slot.in_(part), _s.state.in_(_OPEN))
            self._run(sa.update(SLOTS).where(*left_open).values(state=SlotState.CONSUMED))

    def _put_back(self, rows: Sequence[sa.Row]) -> None:
        """Finished groups, in the order in which they are to arrive."""
        first = self.head["arrivals"]
        self._insert(
            {**row._asdict(), "state": SlotState.DROPPED if row.dropped else SlotState.FINISHED,
             "arrival": first + place, "consumed_at": None}
            for place, row in enumerate(rows)
        )  # fmt: skip
        self.head["arrivals"] += len(rows)
        self.head["dropped"] += sum(row.dropped for row in rows)

    def wipe(self) -> None:
        """Nothing of an earlier run is left but its place."""
        _delete_rows(self._connection, self.head)
        self.head |= dict.fromkeys((*COUNTERS, "next_slot", "arrivals"), 0)

    def forget_callers(self) -> None:
        """Whoever was here before does not come back."""
        for table in (EXPLORERS, CALLS):
            self._run(sa.delete(table).where(table.c.buffer == self.head["name"]))
        unheard = (self._mine, _s.state == SlotState.OFF)
        self._run(sa.update(SLOTS).where(*unheard).values(state=SlotState.CALLED_OFF))

    # ------------------------------------------------------------------ rows

    def payloads(self, attempts: Sequence[Lease]) -> list[bytes]:
        """The stored groups of these attempts, in their order."""
        g, found = GROUPS.c, dict[Lease, bytes]()
        for part in _parts([attempt.slot for attempt in attempts], _BULKY):
            query = sa.select(g.slot, g.attempt, g.payload).where(g.buffer == self.head["name"], g.slot.in_(part))
            found |= {Lease(row.slot, row.attempt): row.payload for row in self._connection.execute(query)}
        return [found[attempt] for attempt in attempts]

    def taken(self, slots: Sequence[int]) -> list[Lease]:
        """The attempts at these slots that were taken."""
        found: dict[int, int] = {}
        for part in _parts(slots):
            rows = self._connection.execute(
                sa.select(_s.slot, _s.attempt, _s.state).where(self._mine, _s.slot.in_(part))
            )
            found |= {row.slot: row.attempt for row in rows if row.state == SlotState.CONSUMED}
        lost = [slot for slot in slots if slot not in found]
        if lost:
            raise DataError(
                f"groups that were taken from slots {list(slots)}", f"none was from {lost}", "ask for others"
            )
        return [Lease(slot, found[slot]) for slot in slots]

    def _bound(self, version: int | None) -> int:
        """The slots below it may be issued to who has loaded `version`; none if what it would play could only be too
        stale."""
        if version is None or self.head["trains"] - version > self._schedule.max_staleness:
            return 0
        return self._admitted(version)

    def _admitted(self, version: int) -> int:
        return self._schedule.admitted(version) + sum(self.head[name] for name in ("given_up", "dropped", "refused"))

    def _first(self, state: SlotState) -> sa.Row | None:
        """The row of this state with the lowest slot."""
        query = sa.select(_s.slot, _s.attempt).where(self._mine, _s.state == state).order_by(_s.slot).limit(1)
        return self._connection.execute(query).first()

    def _off(self, owner: str) -> tuple[sa.ColumnElement[bool], ...]:
        return (self._mine, _s.state == SlotState.OFF, _s.owner == owner)

    def _key(self, slot: int, attempt: int) -> dict[str, Any]:
        return {"buffer": self.head["name"], "slot": slot, "attempt": attempt}

    def _run(self, statement: sa.Executable) -> sa.CursorResult:
        self.changed = True
        return self._connection.execute(statement)  # pyright: ignore[reportReturnType]

    def _mark(self, attempts: Sequence[Lease] | Sequence[sa.Row], **values: Any) -> None:
        """Sets columns of these rows, each found by its primary key alone."""
        these = (self._mine, _s.slot == sa.bindparam("this_slot"), _s.attempt == sa.bindparam("this_attempt"))
        keys = [{"this_slot": attempt.slot, "this_attempt": attempt.attempt} for attempt in attempts]
        self.changed = True
        for part in _parts(keys):
            self._connection.execute(sa.update(SLOTS).where(*these).values(values), part)

    def _insert(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for part in _parts([dict(row) for row in rows]):
            self._connection.execute(sa.insert(SLOTS), part)


def forget(connection: sa.Connection, run: str) -> None:
    """Nothing is left of the buffers of a run, whose roles are told so when they look next."""
    stages = BUFFERS.c.name.startswith(f"{run}/stage-", autoescape=True)
    for head in connection.execute(sa.select(BUFFERS).where(stages).with_for_update()).all():
        _delete_rows(connection, head._asdict())
        for table in (EXPLORERS, CALLS):
            connection.execute(sa.delete(table).where(table.c.buffer == head.name))
    connection.execute(sa.delete(BUFFERS).where(stages))


def _delete_rows(connection: sa.Connection, head: Mapping[str, Any]) -> None:
    for table in (SLOTS, GROUPS):
        for begin in range(0, head["next_slot"], _RANGE):
            part = (table.c.slot >= begin, table.c.slot < begin + _RANGE)
            connection.execute(sa.delete(table).where(table.c.buffer == head["name"], *part))


def _parts(values: Sequence[T], size: int = _MANY) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
