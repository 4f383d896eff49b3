"""The buffer of several processes: slots and groups in a database."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from pydantic import AfterValidator

from trivium.board import SharedBoard
from trivium.buffers.database import Database, SqlTable, located, pause
from trivium.buffers.journal import read_stored, stored_record
from trivium.buffers.slots import COUNTERS, waiting_drain, waiting_explorer, waiting_trainer
from trivium.buffers.sql_media import MEDIA_TABLES, MediaRows
from trivium.buffers.sql_slots import Slots, forget
from trivium.buffers.sql_tables import BUFFERS, CALLS, RUNS, TABLES, SlotState
from trivium.concurrency import ProgressDeadline, Waiting, wait_until
from trivium.config import BufferConfig, RunConfig, config_path, free
from trivium.errors import ConfigError, DataError, Problem, RoleFailed, SyncError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import TRAINER, Capabilities, Group, Lease

T = TypeVar("T")


class SqlBuffer:
    """Slots and groups as rows of a database: any number of processes lease and put, the trainer takes.

    It behaves as `MemoryBuffer` does. A group counts once its transaction is committed; a call whose connection drops
    is repeated and takes effect once. The trainer's `restore` opens the buffer: explorers that come earlier wait for
    it, and those of an earlier trainer are told that another one has taken over.
    """

    capabilities = Capabilities(shared=True)

    class Config(BufferConfig):
        kind: str = "sql"
        url: Annotated[str, AfterValidator(lambda url: located(url, config_path))] = "sqlite:///trivium.db"
        """Where the database is: `sqlite:///file.db` (relative to the config file; all processes on one machine) or
        `postgresql://user@host/name`. Never with a password, which would lie in the run directory: that belongs in
        `~/.pgpass` or `PGPASSWORD`. Several runs share a database, each under its `run.name`."""
        patience_s: float = free(10.0, gt=0)
        """How long a transaction is retried, where the connection drops, or the server restarts or does not answer,
        before the run ends. A statement may take half of it."""
        overwrite: bool = free(False)
        """Whether a new run may take its name from another one in the same database, whose groups are deleted and
        which ends if it still runs."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            url = sa.make_url(self.url)
            if url.password is not None or "password" in url.query:
                yield Problem(
                    f"{where}.url",
                    "a database URL without a password",
                    "a password in the URL, which would lie in the run directory",
                    "write postgresql://user@host/name, and the password into PGPASSWORD or ~/.pgpass of each machine",
                )

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
        del renderer  # nothing is tokenised here
        self.schedule, self._deadline_s = schedule, deadline_s
        self._rollouts, self._name, self._overwrite = rollouts, name, config.overwrite
        self._database = Database(config.url, patience_s=config.patience_s)
        self._database.create(TABLES)
        self._database.create(MEDIA_TABLES)
        self._media = MediaRows(self._database, name)
        self._session: str | None = None
        """The id of the trainer's `restore` that this buffer belongs to; None until it is known."""
        self._restored = 0
        """Groups with a lower number of arrival are of an earlier session."""
        self._idle: list[str] = []
        """Caller names that no call is using; the database keeps one result per name."""

    @staticmethod
    def open_board(config: Config, *, name: str) -> SharedBoard:
        """The board of the run `name`, in the same database."""
        return SharedBoard(SqlTable(Database(config.url, patience_s=config.patience_s), name))

    @staticmethod
    def claim(config: Config, *, name: str, run_dir: Path) -> None:
        """Registers `name` in the database for the run in `run_dir`, before a trainer uses it.

        Raises ConfigError where it is another run's, unless `overwrite` allows to delete that one.
        """
        database = Database(config.url, patience_s=config.patience_s)
        database.create(TABLES)
        database.create(MEDIA_TABLES)
        place = f"{socket.gethostname()}:{run_dir.resolve()}"
        mine = {"name": name, "run": _run_id(run_dir / "rollouts"), "place": place}

        def work(connection: sa.Connection) -> None:
            connection.execute(database.insert(RUNS, mine))
            registered = connection.execute(sa.select(RUNS).where(RUNS.c.name == name).with_for_update()).one()
            if registered.run != mine["run"]:
                if not config.overwrite:
                    raise _name_taken(name, f"another run has this name in this database: {registered.place}")
                forget(connection, name)
            connection.execute(sa.update(RUNS).where(RUNS.c.name == name).values(mine))

        database.transact(work)

    # ------------------------------------------------------------------ explorers

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """The lowest free slot, if the version of `owner` admits it."""

        def undo(slots: Slots, answer: list[Any]) -> None:
            slots.return_lease(Lease(*answer[:2]))

        if not wait:
            answer = await self._change(lambda slots: slots.lease(owner), undo=undo)
            return None if answer is None else await self._lease(answer)
        answer = await self._when(
            lambda slots: slots.admits(owner),
            lambda slots: slots.lease(owner),
            lambda slots: waiting_explorer(owner, slots.loaded(owner), slots.free_slot()),
            undo=undo,
        )
        return await self._lease(answer)

    async def put(self, owner: str, group: Group) -> None:
        if "\0" in group.task.task_id + group.task.taskset:
            raise DataError(
                "a task id without NUL characters", repr(group.task.task_id), "have the task source leave them out"
            )
        payload = await asyncio.to_thread(stored_record, group, self._name, self._media)
        await self._change(lambda slots: slots.put(owner, group, payload), joins=True)

    async def release(self, owner: str) -> int:
        # Until the buffer is open, its leases are of an earlier trainer's explorers: `restore` frees all of them.
        return await self._change(lambda slots: slots.release(owner)) or 0

    async def cancelled_leases(self, owner: str) -> Sequence[Lease]:
        # For as long as the stage lasts: most stages cancel nothing.
        pairs = await self._when(
            lambda slots: slots.has_cancelled(owner), lambda slots: slots.cancelled_leases(owner) or None, None
        )
        return [Lease(*pair) for pair in pairs]

    async def advance(self, owner: str, version: int) -> None:
        """An explorer adopted `version`: more slots may be admitted."""
        # A version that can be adopted was published by a trainer that had restored before.
        await self._when(
            lambda _: True,
            lambda slots: slots.advance(owner, version),
            lambda _: Waiting(f"explorer {owner!r}", "the trainer to open the buffer"),
            joins=True,
        )

    async def drain(self, version: int) -> None:
        """Waits until no slot is left that `version` would roll out."""
        await self._when(
            lambda slots: slots.drained(version),
            lambda slots: slots.drained(version) or None,
            lambda slots: waiting_drain(version, slots.count(SlotState.LEASED)),
        )

    # ------------------------------------------------------------------ the trainer

    async def take(self, count: int, version: int) -> list[Group]:
        def waiting(slots: Slots) -> Waiting:
            return waiting_trainer(version, count, slots.count(SlotState.FINISHED), slots.count(SlotState.LEASED))

        taken = await self._when(
            lambda slots: slots.due(count, version),
            lambda slots: slots.take(count, version),
            waiting,
            undo=lambda slots, pairs: slots.return_taken([Lease(*pair) for pair in pairs]),
            joins=True,
        )
        return await self._groups(lambda _: [Lease(*pair) for pair in taken])

    async def refuse(self, count: int) -> None:
        await self._change(lambda slots: slots.refuse(count), joins=True)

    async def retry_on_resume(self, slots: Sequence[int]) -> None:
        if slots:
            await self._change(lambda rows: rows.fail(slots), joins=True)

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        return await self._groups(lambda rows: rows.taken(slots))

    async def counts(self) -> Mapping[str, int]:
        head = await self._look(lambda slots: slots.head)
        return {name: head[name] for name in COUNTERS if name != "refused"}

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint: the consumed slots, and the attempts of the others."""
        return await self._look(lambda slots: slots.state())

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the groups stored since; None starts the stage.

        Only the trainer calls it. Rows that another run left under the same name are gone afterwards, if `overwrite`
        allows it; otherwise ConfigError.
        """
        run, session, arrivals = await asyncio.to_thread(_run_id, self._rollouts), uuid.uuid4().hex, 0
        place = {
            **dict.fromkeys((column.name for column in BUFFERS.columns), 0),
            "name": self._name,
            "run": run,
            "session": "",
            "closed": False,
        }

        def work(connection: sa.Connection) -> None:
            nonlocal arrivals
            connection.execute(self._database.insert(BUFFERS, place))
            head = self._head(connection, lock=True)
            assert head is not None
            if head["session"] == session:
                return  # done before the connection dropped; explorers may have come since
            slots = Slots(connection, self.schedule, head)
            if slots.head["run"] != run:
                if not self._overwrite:
                    raise _name_taken(self._name, "another run has groups under this name in this database")
                slots.wipe()
            slots.forget_callers()
            slots.restore(state, version)
            arrivals = slots.head["arrivals"]
            slots.head |= {"run": run, "session": session, "closed": False}
            self._save(connection, slots)

        await asyncio.to_thread(self._database.transact, work)
        self._media.forget()
        self._restored = arrivals
        self._session = session  # not before it is committed: explorers of this process look at the same moment

    async def discard(self, version: int) -> int:
        return await self._change(lambda slots: slots.discard(version, self._restored), joins=True)

    async def close(self) -> None:
        def close(slots: Slots) -> None:
            slots.head["closed"] = slots.changed = True

        await self._change(close, joins=True)

    # ------------------------------------------------------------------ transactions

    async def _change(
        self, work: Callable[[Slots], T], *, undo: Callable[[Slots, Any], None] | None = None, joins: bool = False
    ) -> Any:
        """The answer of `work`, as JSON, done once however often the connection drops; None where the buffer is not yet
        open. `undo` takes back an answer whose caller was cancelled."""
        running = asyncio.ensure_future(asyncio.to_thread(self._once, work, joins))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            answer = await running
            if undo is not None and answer is not None:
                await asyncio.to_thread(self._once, lambda slots: undo(slots, answer), joins)
            raise

    async def _when(
        self,
        look: Callable[[Slots], bool],
        work: Callable[[Slots], T | None],
        waiting: Callable[[Slots], Waiting] | None,
        *,
        undo: Callable[[Slots, Any], None] | None = None,
        joins: bool = False,
    ) -> Any:
        """The answer of `work` once it is not None. It is called again when the buffer has changed and `look`, which
        only reads, holds. Any change of the buffer is progress; without `waiting` there is no deadline.
        """
        answer = await self._change(work, undo=undo, joins=joins)
        if answer is not None:
            return answer
        polls = count()

        async def poll(deadline: ProgressDeadline) -> tuple[Any, object]:
            if number := next(polls):
                await pause(number - 1, min(deadline.left_s, self._deadline_s))
            change, due = await asyncio.to_thread(self._glance, look, deadline.state, joins)
            return (await self._change(work, undo=undo, joins=joins) if due else None), change

        def describe() -> Waiting:
            def read(connection: sa.Connection) -> Waiting:
                slots = self._slots(connection)
                if slots is None or waiting is None:
                    return Waiting("an explorer", "the trainer to open the buffer")
                return waiting(slots)

            return self._database.read(read)

        return await wait_until(poll, describe, math.inf if waiting is None else self._deadline_s)

    def _glance(self, look: Callable[[Slots], bool], seen: object, joins: bool) -> tuple[int, bool]:
        """(the buffer's number of changes, whether that differs from `seen` and `look` holds)."""

        def read(connection: sa.Connection) -> tuple[int, bool]:
            slots = self._slots(connection, joins=joins)
            if slots is None:
                return -1, False
            change = slots.head["change"]
            return change, change != seen and look(slots)

        return self._database.read(read)

    async def _look(self, look: Callable[[Slots], T]) -> T:
        """The result of `look` in an open buffer."""

        def read(connection: sa.Connection) -> T:
            slots = self._slots(connection, joins=True)
            if slots is None:
                raise SyncError(f"look into the buffer {self._name!r}", "no trainer has opened it", "restore it first")
            return look(slots)

        return await asyncio.to_thread(self._database.read, read)

    async def _lease(self, answer: Sequence[Any]) -> Lease:
        """The Lease for a result of `Slots.lease`."""
        slot, attempt, recorded = answer
        lease = Lease(slot, attempt)
        if recorded is None:
            return lease
        group = await asyncio.to_thread(read_stored, b64decode(recorded), self._name, lease, self._media)
        return replace(lease, recorded=group)

    async def _groups(self, find: Callable[[Slots], Sequence[Lease]]) -> list[Group]:
        payloads = await self._look(lambda slots: slots.payloads(find(slots)))

        def decode() -> list[Group]:
            return [read_stored(payload, self._name, lease, self._media) for lease, payload in payloads.items()]

        return await asyncio.to_thread(decode)

    def _once(self, work: Callable[[Slots], T], joins: bool) -> object:
        token, tried = uuid.uuid4().hex, False
        caller = self._idle.pop() if self._idle else uuid.uuid4().hex

        def transaction(connection: sa.Connection) -> object:
            nonlocal tried
            slots = self._slots(connection, lock=True, joins=joins)
            if slots is None:
                return None
            # Not before the lock is held: the commit whose answer was lost may still be under way.
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
        """The buffer's rows; None where it is not open yet. `joins`: the call can only come after the trainer's
        `restore`, so the session in the database is its own."""
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
        """The buffer's own row; with `lock`, locked until the transaction ends."""
        query = sa.select(BUFFERS).where(BUFFERS.c.name == self._name)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        return None if row is None else row._asdict()

    def _save(self, connection: sa.Connection, slots: Slots) -> None:
        head = {**slots.head, "change": slots.head["change"] + 1}
        connection.execute(sa.update(BUFFERS).where(BUFFERS.c.name == self._name).values(head))


def _answered(connection: sa.Connection, caller: str, token: str) -> str | None:
    """The result of a call that was committed before its connection dropped."""
    mine = (CALLS.c.caller == caller, CALLS.c.token == token)
    return connection.execute(sa.select(CALLS.c.answer).where(*mine)).scalar_one_or_none()


def _name_taken(name: str, cause: str) -> ConfigError:
    return ConfigError(
        f"a run with the name {name!r}",
        cause,
        "set run.name or buffer.url; or, if that run is over for good, buffer.overwrite=true, which deletes its groups",
    )


def _pair(lease: Lease) -> list[int]:
    """A lease as JSON."""
    return [lease.slot, lease.attempt]


def _run_id(rollouts: Path) -> str:
    """The id of this run, from a file of the run directory: distinguishes runs of the same name."""
    path = rollouts / "buffer.id"
    if not path.is_file():
        rollouts.mkdir(parents=True, exist_ok=True)
        staging = path.with_suffix(".new")
        staging.write_text(uuid.uuid4().hex, encoding="utf-8")
        os.replace(staging, path)
    return path.read_text(encoding="utf-8")
