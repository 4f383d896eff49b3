"""The state machine of slots: what each operation of a buffer changes in its rows.

`Slots` decides, by the rules of `trivium.buffers.slots`. A store loads and saves the rows (`Rows`), runs an operation
inside a transaction, and wakes those who wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from trivium.buffers.slots import (
    COUNTERS,
    OPEN,
    Row,
    SlotsState,
    SlotState,
    about,
    admitted,
    kept_on_resume,
    log_retries,
    retried,
)
from trivium.foundation.concurrency import Waiting
from trivium.foundation.errors import DataError
from trivium.foundation.phases import progress
from trivium.schedule import Schedule
from trivium.types import Group, Lease

Predicate = Callable[[Any], Any]
"""Whether to select a row: comparisons of columns, joined by `&`. A database evaluates it on the columns of its table,
memory on each `Row`."""
HEAD = ("trains", "next_slot", "arrivals", "begin", "oldest", *COUNTERS)
"""The numbers of a buffer beside its rows. `trains`: the version that the next `take` is for. `next_slot`: the lowest
slot that was never issued. `arrivals`: the number of groups that arrived. `begin`: no FINISHED row has a lower slot, or
in an unordered run a lower arrival. `oldest`: no FINISHED row has an older group."""


class Rows(Protocol):
    """The rows of one buffer in a store. Only `update` changes a row after it was inserted."""

    head: dict[str, Any]
    """`HEAD`, and `closed`."""

    def explorer(self, owner: str) -> tuple[int | None, int]:
        """(the version that an explorer has loaded, the number of explorers that have loaded one)."""
        ...

    def load(self, owner: str, version: int | None) -> None:
        """Notes the version that an explorer has loaded; None forgets the explorer."""
        ...

    def num_leases(self, owner: str) -> int:
        """The number of slots that an explorer has leased."""
        ...

    def find(self, slot: int, attempt: int) -> Row | None: ...

    def lowest(self, state: SlotState) -> Row | None:
        """The row of this state, FREE or LEASED, with the lowest slot."""
        ...

    def select(self, *states: SlotState, where: Predicate | None = None) -> Sequence[Row]: ...

    def finished(self, count: int, begin: int, end: int | None) -> Sequence[Row]:
        """The first `count` FINISHED rows by slot from `begin` to before `end`; by arrival from `begin` on if `end` is
        None."""
        ...

    def insert(self, rows: Sequence[Row]) -> None: ...

    def update(self, rows: Sequence[Row], values: Mapping[str, Any]) -> None: ...

    def store(self, row: Row, group: Group, record: bytes) -> None:
        """Stores the group of a row in place of an earlier one."""
        ...

    def discard(self, rows: Sequence[Row], version: int) -> None:
        """Deletes the groups of these rows, and groups without a row of versions newer than `version`."""
        ...

    def stored(self, floor: int) -> Sequence[Row]:
        """The rows with a group from the slot `floor` on, in order of slot and attempt."""
        ...

    def groups(self, rows: Sequence[Row]) -> Iterable[tuple[Row, Group]]:
        """The rows whose groups are undamaged, with these. Media may have no bytes."""
        ...

    def replace(self, floor: int, consumed: Collection[int], restored: Sequence[Row]) -> None:
        """Removes all rows but those of `restored`; slots below `floor` and those of `consumed` stay consumed."""
        ...

    def mark_failed(self, slot: int) -> None:
        """Notes the first slot of the failures that end the run."""
        ...

    def failed_from(self) -> int | None:
        """The slot of `mark_failed`; None after `set_aside`."""
        ...

    def set_aside(self, failed: Sequence[tuple[Group, bool]], floor: int) -> None:
        """Keeps groups for nothing but their rewards, which are computed again for those with True."""
        ...


class Slots:
    """The operations of a buffer on its rows. The caller runs each inside one transaction."""

    def __init__(self, rows: Rows, schedule: Schedule, *, dry: bool = False) -> None:
        """`dry`: an operation finds out whether it would change or return anything, and writes nothing."""
        self.rows, self._schedule, self._dry = rows, schedule, dry
        self.head = rows.head
        self.changed = False
        """Whether an operation changed anything."""

    def close(self) -> None:
        self.head["closed"] = self.changed = True

    # ------------------------------------------------------------------ explorers

    def advance(self, owner: str, version: int) -> bool:
        """An explorer has loaded `version`. Returns True."""
        self._load(owner, version)
        return True

    def lease(self, owner: str) -> Row | None:
        """Leases the lowest free slot, if the version of `owner` admits it and `owner` has less than its share. Raises
        StopAsyncIteration once the buffer is closed."""
        self._check_open()
        (version, explorers), row = self.rows.explorer(owner), self._free_slot()
        if version is None or not self._is_admitted(row, version) or self._has_its_share(owner, version, explorers):
            return None
        if row.slot < self.head["next_slot"]:
            self._update([row], state=SlotState.LEASED, owner=owner, version=version)
        else:
            row.state, row.owner, row.version = SlotState.LEASED, owner, version
            self._insert([row])
            self.head["next_slot"] += 1
        return row

    def put(self, owner: str, group: Group, record: bytes = b"") -> None:
        """Stores a finished group; `record` is the group encoded, where the store needs it."""
        row = self.rows.find(group.slot, group.attempt)
        if row is not None and row.state in _CANCELLED and row.owner in (owner, None):
            return  # finished before its owner was told, or stopped
        if row is None or row.owner != owner or row.state != SlotState.LEASED:
            state = "" if row is None else f" (it is {row.state}, last leased by {row.owner!r})"
            raise DataError(
                f"put slot {group.slot}, attempt {group.attempt}",
                f"{owner!r} holds no lease of it{state}",
                "lease a slot before its rollouts, and put their group once",
            )
        self.rows.store(row, group, record)
        head, columns = self.head, about(group)
        state = SlotState.DROPPED if group.dropped else SlotState.FINISHED
        self._update([row], state=state, arrival=head["arrivals"], **columns)
        head["arrivals"] += 1
        head["oldest"] = min(head["oldest"], columns["oldest"])
        head["dropped"] += columns["dropped"]  # another slot is admitted in its place

    def release(self, owner: str) -> int:
        """Frees the leases of `owner`; returns their number."""
        leased = self.rows.select(SlotState.LEASED, where=lambda row: row.owner == owner)
        self._update(leased, state=SlotState.FREE, owner=None)
        # It will not ask for its cancelled leases, and an explorer of its name must adopt a version first.
        self._update(self._cancelled(owner), state=SlotState.CANCELLED_TOLD)
        self._load(owner, None)
        return len(leased)

    def return_lease(self, lease: Lease | Row) -> None:
        """Frees a lease whose caller was cancelled."""
        row = self.rows.find(lease.slot, lease.attempt)
        if row is not None and row.state == SlotState.LEASED:
            self._update([row], state=SlotState.FREE, owner=None)

    def cancelled_leases(self, owner: str) -> Sequence[Row] | None:
        """Returns the cancelled leases of `owner`, once; None without any."""
        rows = self._cancelled(owner)
        self._update(rows, state=SlotState.CANCELLED_TOLD)
        return sorted(rows, key=lambda row: row.slot) or None

    def drained(self, version: int) -> bool:
        """Whether no explorer rolls out anything more with `version`. Raises StopAsyncIteration like `lease`."""
        self._check_open()
        # No explorer rolls out groups that could only be too stale, even if dropped groups admit more slots.
        too_old = version < self._oldest(self.head["trains"])
        return too_old or self._lowest_unfinished() >= self._admitted(version)

    def explorer_waits(self, owner: str) -> Waiting:
        (version, _), row = self.rows.explorer(owner), self._free_slot()
        whom = f"the trainer to take groups (next slot {row.slot})"
        if version is not None and self._is_admitted(row, version):
            whom = f"its own rollouts, which are its part of the slots, or other explorers (next slot {row.slot})"
        return Waiting(f"explorer {owner!r} (version {version})", whom)

    def drain_waits(self, version: int) -> Waiting:
        leased = len(self.rows.select(SlotState.LEASED))
        return Waiting("the next version", f"the slots of version {version} ({leased} in progress)")

    # ------------------------------------------------------------------ the trainer

    def take(self, count: int, version: int) -> Sequence[Row] | None:
        """Consumes the next `count` groups for `version`; None if there are too few. Evicts first. Raises
        StopAsyncIteration like `lease`."""
        self._check_open()
        self._train(version)
        self._evict(version)
        ready = self._ready(count)
        if len(ready) < count:
            return None
        if ready:
            self.head["begin"] = 1 + self._place(ready[-1])
        self._update(ready, state=SlotState.CONSUMED, consumed_at=version)
        self._train(version + 1)
        if not self._schedule.ordered:
            self._cancel_stale()
        return ready

    def return_taken(self, rows: Sequence[Row]) -> None:
        """Takes back a `take` whose caller was cancelled."""
        self._update(rows, state=SlotState.FINISHED, consumed_at=None)
        self.head["begin"] = min((self.head["begin"], *map(self._place, rows)))

    def refuse(self, count: int) -> None:
        self.head["refused"] += count
        self._train(self.head["trains"] - 1)  # the next groups are for the same step

    def fail(self, slots: Sequence[int]) -> None:
        """Failures of these slots' groups end the run."""
        self.rows.mark_failed(min(self.state()["consumed_below"], *slots))
        self.changed = True

    def trainer_waits(self, count: int, version: int) -> Waiting:
        finished, leased = (len(self.rows.select(state)) for state in (SlotState.FINISHED, SlotState.LEASED))
        whom = f"{count} groups from the explorers ({finished} finished, {leased} in progress)"
        return Waiting(f"the trainer (version {version})", whom)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the consumed slots, and the attempts of the others."""
        attempts = {row.slot: row.attempt for row in self.rows.select(*OPEN)}
        below = min(attempts, default=self.head["next_slot"])
        consumed = frozenset(range(below, self.head["next_slot"])) - attempts.keys()
        return SlotsState(below, consumed, attempts, {name: self.head[name] for name in COUNTERS}).to_json()

    def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Undoes everything since a checkpoint of `version`, or since the start of the stage, but finished groups."""
        restored = SlotsState.of(state)
        floor, consumed, attempts = restored.consumed_below, restored.consumed, restored.attempts
        finished, judged = self._kept(restored, version)
        self.rows.replace(floor, consumed, [*finished, *judged])
        used = {row.slot for row in (*finished, *judged)} | consumed
        next_slot = max((floor, *(slot + 1 for slot in (*used, *attempts))))
        first, schedule = self.head["arrivals"], self._schedule
        finished.sort(key=lambda row: (schedule.step_of(row.slot), row.arrival or 0))
        for row in finished:
            row.state, row.consumed_at = SlotState.DROPPED if row.dropped else SlotState.FINISHED, None
        for row in judged:
            row.state, row.owner = SlotState.FREE, None
        for arrival, row in enumerate([*finished, *judged], first):
            row.arrival = arrival
        free = [Row(slot, attempts.get(slot, 0)) for slot in range(floor, next_slot) if slot not in used]
        self._insert([*finished, *judged, *free])
        arrivals = first + len(finished) + len(judged)
        self.head |= restored.counts | {"trains": version, "next_slot": next_slot, "arrivals": arrivals}
        self.head["dropped"] += sum(row.dropped for row in finished)
        self.head["begin"] = floor if schedule.ordered else first
        self.head["oldest"] = min((row.oldest for row in finished), default=version)

    def discard(self, version: int, before: int) -> int:
        """Removes the groups that arrived `before` this number, were sampled with `version` or a newer one and are not
        trained on; returns their number."""
        arrived = [row for row in self.rows.select(*OPEN) if row.arrival is not None and row.arrival < before]
        lost = [row for row in arrived if row.newest >= version]
        if not lost:
            return 0
        # Rewards of leased ones are being computed again; the explorer may still read the group.
        judged = [row for row in lost if row.state == SlotState.LEASED]
        others = [row for row in lost if row.state != SlotState.LEASED]
        self.rows.discard(others, version)
        self._update(others, state=SlotState.FREE, arrival=None)
        self._retry(judged, SlotState.CANCELLED)
        return len(lost)

    def _kept(self, restored: SlotsState, version: int) -> tuple[list[Row], list[Row]]:
        """(rows whose groups a run resumed at `version` keeps, rows whose rewards are to be computed again)."""
        keeps = partial(kept_on_resume, self._schedule, restored, version)
        last = {row.slot: row for row in self.rows.stored(restored.consumed_below) if keeps(row)}
        finished, judged, failed = dict[int, Row](), dict[int, Row](), list[Group]()
        from_slot = self.rows.failed_from()
        for row, group in self.rows.groups([*last.values()]):
            if row.state in (SlotState.FREE, SlotState.LEASED):
                judged[row.slot] = row
            elif row.state not in _CANCELLED:
                finished[row.slot] = row
                if from_slot is not None and row.slot >= from_slot:
                    failed.append(group)
        if from_slot is not None:
            retries = retried(self._schedule, failed)
            log_retries(retries)
            self.rows.set_aside(retries, restored.consumed_below)
            for group, only_rewards in retries:
                row = finished.pop(group.slot)
                if only_rewards:
                    judged[group.slot] = row
        return [*finished.values()], [*judged.values()]

    # ------------------------------------------------------------------ rows

    def _admitted(self, version: int) -> int:
        return admitted(self._schedule, self.head, version)

    def _is_admitted(self, row: Row, version: int) -> bool:
        """Whether `version` admits a slot. Nothing is issued for a version whose groups could only be too stale."""
        return self._oldest(self.head["trains"]) <= version and row.slot < self._admitted(version)

    def _has_its_share(self, owner: str, version: int, explorers: int) -> bool:
        """Whether an explorer has leased its equal part of the slots that may be in progress (`Schedule.equal_parts`).
        Only explorers that have loaded a version count."""
        if not self._schedule.equal_parts or explorers < 2:
            return False
        trained = (self.head["trains"] - self._schedule.first_version) * self._schedule.fresh_per_step
        part = math.ceil((self._schedule.admitted(version) - trained) / explorers)
        return self.rows.num_leases(owner) >= max(1, part)

    def _oldest(self, trains: int) -> int:
        """The oldest version of groups that the step from version `trains` may train on."""
        return trains - self._schedule.max_staleness

    def _free_slot(self) -> Row:
        """The row of the lowest free slot; a new one where no issued slot is free."""
        return self.rows.lowest(SlotState.FREE) or Row(self.head["next_slot"])

    def _lowest_unfinished(self) -> int:
        """The lowest slot that is leased or free."""
        leased = self.rows.lowest(SlotState.LEASED)
        free = self._free_slot().slot
        return free if leased is None else min(free, leased.slot)

    def _ready(self, count: int) -> Sequence[Row]:
        """The next groups to consume that have arrived; at most `count`."""
        end = self._lowest_unfinished() if self._schedule.ordered else None
        ready = self.rows.finished(count, self.head["begin"], end)
        progress(max(0, self._schedule.groups_per_step - count + len(ready)))
        return ready

    def _place(self, row: Row) -> int:
        """The place of a FINISHED row in the order in which groups are taken."""
        if self._schedule.ordered:
            return row.slot
        assert row.arrival is not None
        return row.arrival

    def _evict(self, version: int) -> None:
        """Evicts groups that are too stale: admission alone does not bound a straggler."""
        previous, oldest = self.head["oldest"], self._oldest(version)
        if oldest > previous and not self._schedule.ordered:
            # No FINISHED row is older than `previous`, which lets the index of a database skip rows that are deleted.
            stale = self.rows.select(
                SlotState.FINISHED, where=lambda row: (row.oldest >= previous) & (row.oldest < oldest)
            )
            self.head["evicted"] += len(stale)
            self.head["oldest"] = oldest
            self._retry(stale, SlotState.EVICTED)

    def _cancel_stale(self) -> None:
        """Cancels leases whose groups would be too stale."""
        oldest = self._oldest(self.head["trains"])
        late = self.rows.select(SlotState.LEASED, where=lambda row: row.version < oldest)
        self.head["called_off"] += len(late)
        self._retry(late, SlotState.CANCELLED)

    def _retry(self, failed: Sequence[Row], state: SlotState) -> None:
        """Ends failed attempts; issues their slots again, or gives them up."""
        following = [Row(row.slot, row.attempt + 1) for row in failed if row.attempt + 1 < self._schedule.max_attempts]
        self.head["given_up"] += len(failed) - len(following)
        self._update(failed, state=state)
        self._insert(following)

    def _cancelled(self, owner: str) -> Sequence[Row]:
        return self.rows.select(SlotState.CANCELLED, where=lambda row: row.owner == owner)

    def _train(self, version: int) -> None:
        """Notes that the next `take` is for `version`."""
        self.changed |= self.head["trains"] != version
        self.head["trains"] = version

    def _check_open(self) -> None:
        if self.head["closed"]:
            raise StopAsyncIteration

    def _load(self, owner: str, version: int | None) -> None:
        self.changed = True
        if not self._dry:
            self.rows.load(owner, version)

    def _insert(self, rows: Sequence[Row]) -> None:
        self.changed |= bool(rows)
        if rows and not self._dry:
            self.rows.insert(rows)

    def _update(self, rows: Sequence[Row], **values: Any) -> None:
        self.changed |= bool(rows)
        if rows and not self._dry:
            self.rows.update(rows, values)


_CANCELLED = (SlotState.CANCELLED, SlotState.CANCELLED_TOLD)
