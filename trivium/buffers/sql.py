"""The buffer of several processes: slots and groups in a database that all of them reach."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from pydantic import AfterValidator

from trivium.board import SharedBoard
from trivium.buffers.database import Database, SqlTable, located, pause
from trivium.buffers.journal import decode_group, encode_group
from trivium.buffers.sql_slots import BUFFERS, CALLS, COUNTERS, RUNS, TABLES, Slots, SlotState, forget
from trivium.config import BufferConfig, RunConfig, config_path, free
from trivium.errors import ConfigError, Problem, RoleFailed, SyncError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.synchronizer import TRAINER
from trivium.types import Group, Lease

T = TypeVar("T")


class SqlBuffer:
    """Slots and groups as rows of a database: any number of processes lease and put, the trainer takes.

    It answers as `MemoryBuffer` does. A group counts once its transaction is committed; a call whose connection drops
    is made again and done once. The trainer's `restore` opens the buffer: explorers that come earlier wait for it, and
    whoever was there before is told that another trainer has taken over.
    """

    explored = True
    """Explorers fill this buffer."""

    class Config(BufferConfig):
        kind: str = "sql"
        url: Annotated[str, AfterValidator(lambda url: located(url, config_path))] = "sqlite:///trivium.db"
        """Where the database is: `sqlite:///file.db` (relative to the config file; all processes on one machine) or
        `postgresql://user@host/name`. Never with a password, which would lie in the run directory: that belongs in
        `~/.pgpass` or `PGPASSWORD`. Several runs share a database, each under its `run.name`."""
        patience_s: float = free(10.0, gt=0)
        """How long a transaction is tried again, where the connection drops, or the server restarts or does not
        answer, before the run ends. A statement may take half of it."""
        overwrite: bool = free(False)
        """Whether a new run may take its name from another one in the same database, whose groups are deleted and
        which ends if it still runs."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            url = sa.make_url(self.url)
            if url.password is not None or "password" in url.query:
                yield Problem(
                    f"{where}.url", "a database of which no password is written down",
                    "a password in the URL, which would lie in the run directory",
                    "write postgresql://user@host/name, and the password into PGPASSWORD or ~/.pgpass of each machine",
                )  # fmt: skip

    def __init__(
        self, config: Config, *, schedule: Schedule, rollouts: Path, renderer: Renderer, deadline_s: float,
        name: str = "",
    ) -> None:  # fmt: skip
        del renderer  # nothing is tokenised here
        self.schedule, self._deadline_s = schedule, deadline_s
        self._rollouts, self._name, self._overwrite = rollouts, name, config.overwrite
        self._database = Database(config.url, patience_s=config.patience_s)
        self._database.create(TABLES)
        self._session: str | None = None
        """Which trainer's life this buffer belongs to; None until that is known."""
        self._idle: list[str] = []
        """Names that no call of this object is using now; each holds one answer in the database."""

    @staticmethod
    def open_board(config: Config, *, name: str) -> SharedBoard:
        """The board of the run `name`, in the same database."""
        return SharedBoard(SqlTable(Database(config.url, patience_s=config.patience_s), name))

    @staticmethod
    def claim(config: Config, *, name: str, run_dir: Path) -> None:
        """The run in `run_dir` makes `name` its own in the database: a trainer's first word there.

        Raises ConfigError where it is another run's, unless `overwrite` says that that one is to be forgotten.
        """
        database = Database(config.url, patience_s=config.patience_s)
        database.create(TABLES)
        place = f"{socket.gethostname()}:{run_dir.resolve()}"
        mine = {"name": name, "run": _run_id(run_dir / "rollouts"), "place": place}

        def work(connection: sa.Connection) -> None:
            connection.execute(database.insert(RUNS, mine))
            held = connection.execute(sa.select(RUNS).where(RUNS.c.name == name).with_for_update()).one()
            if held.run != mine["run"]:
                if not config.overwrite:
                    raise _taken(name, f"another run has this name in this database: {held.place}")
                forget(connection, name)
            connection.execute(sa.update(RUNS).where(RUNS.c.name == name).values(mine))

        database.transact(work)

    # ------------------------------------------------------------------ explorers

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """The lowest slot that nobody plays and the version of `owner` admits."""

        def lease(slots: Slots) -> Lease | None:
            _refuse_closed(slots)
            return slots.lease(owner)

        def admits(slots: Slots) -> bool:
            _refuse_closed(slots)
            return slots.admits(owner)

        def undo(slots: Slots, found: list[int]) -> None:
            slots.return_lease(Lease(*found))

        def says(slots: Slots) -> tuple[str, str]:
            who = f"explorer {owner!r} (version {slots.loaded(owner)})"
            return who, f"the trainer to take groups (next slot {slots.free_slot()})"

        found = await (self._when(admits, lease, says, undo=undo) if wait else self._change(lease, undo=undo))
        return None if found is None else Lease(*found)

    async def put(self, owner: str, group: Group) -> None:
        payload = await asyncio.to_thread(encode_group, group)
        await self._change(lambda slots: slots.put(owner, group, payload), joins=True)

    async def release(self, owner: str) -> int:
        # Before the buffer is open for us, what we find is an earlier life's: `restore` frees all of it.
        return await self._change(lambda slots: slots.release(owner)) or 0

    async def called_off(self, owner: str) -> Sequence[Lease]:
        # For as long as the stage lasts: most stages call nothing off.
        found = await self._when(
            lambda slots: slots.calls_off(owner), lambda slots: slots.called_off(owner) or None, None
        )
        return [Lease(*pair) for pair in found]

    async def advance(self, owner: str, version: int) -> None:
        """An explorer adopted `version`: more slots may be admitted."""

        def advance(slots: Slots) -> bool:
            slots.advance(owner, version)
            return True

        def nobody(slots: Slots) -> tuple[str, str]:
            return f"explorer {owner!r}", "the trainer to open the buffer"

        # A version that can be adopted was published by a trainer that had restored before.
        await self._when(lambda slots: True, advance, nobody, joins=True)

    async def drained(self, version: int) -> None:
        """Waits until every slot that `version` admits has been played."""

        def drained(slots: Slots) -> bool:
            _refuse_closed(slots)
            return slots.drained(version)

        def says(slots: Slots) -> tuple[str, str]:
            return "the next version", f"the slots of version {version} ({slots.number(SlotState.LEASED)} being played)"

        await self._when(drained, lambda slots: drained(slots) or None, says)

    # ------------------------------------------------------------------ the trainer

    async def take(self, count: int, version: int) -> list[Group]:
        def take(slots: Slots) -> list[Lease] | None:
            _refuse_closed(slots)
            return slots.take(count, version)

        def due(slots: Slots) -> bool:
            _refuse_closed(slots)
            return slots.due(count, version)

        def says(slots: Slots) -> tuple[str, str]:
            finished, played = slots.number(SlotState.FINISHED), slots.number(SlotState.LEASED)
            whom = f"{count} groups from the explorers ({finished} finished, {played} being played)"
            return f"the trainer (version {version})", whom

        def undo(slots: Slots, taken: list[list[int]]) -> None:
            slots.return_taken([Lease(*pair) for pair in taken])

        taken = await self._when(due, take, says, undo=undo, joins=True)
        return await self._groups(lambda slots: [Lease(*pair) for pair in taken])

    async def refuse(self, count: int) -> None:
        await self._change(lambda slots: slots.refuse(count), joins=True)

    async def past(self, slots: Sequence[int]) -> list[Group]:
        return await self._groups(lambda rows: rows.taken(slots))

    async def counts(self) -> Mapping[str, int]:
        head = await self._look(lambda slots: slots.head)
        return {name: head[name] for name in COUNTERS if name != "refused"}

    async def state(self) -> dict[str, Any]:
        """What a checkpoint must know: which slots training is done with."""
        return await self._look(lambda slots: slots.state())

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the groups stored since; None starts the stage.

        Only the trainer calls it. Rows that another run left under the same name are gone afterwards, if `overwrite`
        allows it; otherwise ConfigError.
        """
        run, session = await asyncio.to_thread(_run_id, self._rollouts), uuid.uuid4().hex
        place = {
            **dict.fromkeys((column.name for column in BUFFERS.columns), 0),
            "name": self._name, "run": run, "session": "", "closed": False,
        }  # fmt: skip

        def work(connection: sa.Connection) -> None:
            connection.execute(self._database.insert(BUFFERS, place))
            head = self._head(connection, lock=True)
            assert head is not None
            if head["session"] == session:
                return  # done before the connection dropped; explorers may have come since
            slots = Slots(connection, self.schedule, head)
            if slots.head["run"] != run:
                if not self._overwrite:
                    raise _taken(self._name, "another run has groups under this name in this database")
                slots.wipe()
            slots.forget_callers()
            slots.restore(state, version)
            slots.head |= {"run": run, "session": session, "closed": False}
            self._save(connection, slots)

        await asyncio.to_thread(self._database.transact, work)
        self._session = session  # not before it is committed: explorers of this process look at the same moment

    async def close(self) -> None:
        def close(slots: Slots) -> None:
            slots.head["closed"] = slots.changed = True

        await self._change(close, joins=True)

    # ------------------------------------------------------------------ transactions

    async def _change(
        self, work: Callable[[Slots], T], *, undo: Callable[[Slots, Any], None] | None = None, joins: bool = False
    ) -> Any:
        """What `work` answers, as JSON, done once however often the connection drops; None where the buffer is not
        open yet. `undo` takes an answer back that comes when its caller has been cancelled."""
        running = asyncio.ensure_future(asyncio.to_thread(self._once, work, joins))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            answer = await running
            if undo is not None and answer is not None:
                await asyncio.to_thread(self._once, lambda slots: undo(slots, answer), joins)
            raise

    async def _when(
        self, look: Callable[[Slots], bool], work: Callable[[Slots], T | None],
        says: Callable[[Slots], tuple[str, str]] | None, *,
        undo: Callable[[Slots, Any], None] | None = None, joins: bool = False,
    ) -> Any:  # fmt: skip
        """What `work` answers once it is not None. It is asked again when the buffer changes and `look`, which only
        reads, says so. After `deadline_s` without any change: who (`says`) waited for whom; without `says`, for ever.
        """
        answer = await self._change(work, undo=undo, joins=joins)
        since, seen, poll = time.monotonic(), -1, 0
        while answer is None:
            change, due = await asyncio.to_thread(self._glance, look, seen, joins)
            if change != seen:
                since, seen = time.monotonic(), change
            left = since + self._deadline_s - time.monotonic()
            if due:
                answer = await self._change(work, undo=undo, joins=joins)
            elif says is None or left > 0:
                await pause(poll, self._deadline_s if says is None else left)
                poll += 1
            else:
                raise await asyncio.to_thread(self._waited_in_vain, says)
        return answer

    def _glance(self, look: Callable[[Slots], bool], seen: int, joins: bool) -> tuple[int, bool]:
        """(the buffer's change, whether it is new and `look` says so)."""

        def read(connection: sa.Connection) -> tuple[int, bool]:
            slots = self._slots(connection, joins=joins)
            if slots is None:
                return -1, False
            change = slots.head["change"]
            return change, change != seen and look(slots)

        return self._database.read(read)

    def _waited_in_vain(self, says: Callable[[Slots], tuple[str, str]]) -> SyncError:
        def read(connection: sa.Connection) -> tuple[str, str]:
            slots = self._slots(connection)
            return ("an explorer", "the trainer to open the buffer") if slots is None else says(slots)

        who, whom = self._database.read(read)
        return SyncError(
            f"{who} waits for {whom}",
            f"nothing happened for {self._deadline_s:.0f} s",
            "look at the log of the one waited for; raise sync.deadline_s if it is only slow",
        )

    async def _look(self, look: Callable[[Slots], T]) -> T:
        """What `look` finds in an open buffer."""

        def read(connection: sa.Connection) -> T:
            slots = self._slots(connection, joins=True)
            if slots is None:
                raise SyncError(f"look into the buffer {self._name!r}", "no trainer has opened it", "restore it first")
            return look(slots)

        return await asyncio.to_thread(self._database.read, read)

    async def _groups(self, find: Callable[[Slots], Sequence[Lease]]) -> list[Group]:
        payloads = await self._look(lambda slots: slots.payloads(find(slots)))
        return await asyncio.to_thread(lambda: [decode_group(payload) for payload in payloads])

    def _once(self, work: Callable[[Slots], T], joins: bool) -> Any:
        token, tried = uuid.uuid4().hex, False
        caller = self._idle.pop() if self._idle else uuid.uuid4().hex

        def transaction(connection: sa.Connection) -> Any:
            nonlocal tried
            slots = self._slots(connection, lock=True, joins=joins)
            if slots is None:
                return None
            # Not before we hold the lock: the commit whose answer was lost may still be on its way.
            if tried and (answered := _answered(connection, caller, token)) is not None:
                return json.loads(answered)
            tried = True
            answer = json.dumps(work(slots), default=_pair)
            if slots.changed:
                call = {"caller": caller, "buffer": self._name, "token": token, "answer": answer}
                connection.execute(self._database.insert(CALLS, call, replace=True))
                self._save(connection, slots)
            return json.loads(answer)

        try:
            return self._database.transact(transaction)
        finally:
            self._idle.append(caller)

    def _slots(self, connection: sa.Connection, *, lock: bool = False, joins: bool = False) -> Slots | None:
        """The buffer's rows; None where it is not open for us yet. `joins`: whoever asks comes after the trainer's
        `restore` by what it asks, so the session it finds is its own."""
        mine = self._session  # before the row is read: `restore` may commit, and set it, in between
        head = self._head(connection, lock=lock)
        if mine is None and joins and head is not None:
            mine = self._session = head["session"]
        if mine is None:
            return None
        if head is None or head["session"] != mine:
            raise RoleFailed(TRAINER, "another one was started over the same buffer and run.name")
        return Slots(connection, self.schedule, head)

    def _head(self, connection: sa.Connection, *, lock: bool) -> Mapping[str, Any] | None:
        """The buffer's own row, locked until the transaction ends where that is asked for."""
        query = sa.select(BUFFERS).where(BUFFERS.c.name == self._name)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        return None if row is None else row._asdict()

    def _save(self, connection: sa.Connection, slots: Slots) -> None:
        head = {**slots.head, "change": slots.head["change"] + 1}
        connection.execute(sa.update(BUFFERS).where(BUFFERS.c.name == self._name).values(head))


def _answered(connection: sa.Connection, caller: str, token: str) -> str | None:
    """The answer of a call that was committed before its connection dropped."""
    mine = (CALLS.c.caller == caller, CALLS.c.token == token)
    return connection.execute(sa.select(CALLS.c.answer).where(*mine)).scalar_one_or_none()


def _taken(name: str, found: str) -> ConfigError:
    return ConfigError(
        f"a run with the name {name!r}", found,
        "set run.name or buffer.url; or, if that run is over for good, buffer.overwrite=true, which deletes its groups",
    )  # fmt: skip


def _refuse_closed(slots: Slots) -> None:
    if slots.head["closed"]:
        raise StopAsyncIteration


def _pair(lease: Any) -> list[int]:
    """A lease as JSON."""
    return [lease.slot, lease.attempt]


def _run_id(rollouts: Path) -> str:
    """What tells this run's rows from those of another run with its name: a file in the run directory."""
    path = rollouts / "buffer.id"
    if not path.is_file():
        rollouts.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(uuid.uuid4().hex, encoding="utf-8")
        os.replace(aside, path)
    return path.read_text(encoding="utf-8")
