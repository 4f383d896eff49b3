"""The buffer of several processes: slots and groups in a database."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import AfterValidator

from trivium.buffers.journal import read_stored, stored_record
from trivium.buffers.slot_buffer import SlotBuffer, Undo, Waits, Work
from trivium.buffers.slot_machine import Rows, Slots
from trivium.buffers.slots import Row
from trivium.buffers.sql.database import Database, SqlTable, Statement, located, pause
from trivium.buffers.sql.media_rows import MediaRows
from trivium.buffers.sql.slot_rows import SqlRows, forget
from trivium.buffers.sql.slot_tables import BUFFERS, CALLS, RUNS, TABLES
from trivium.config import BufferConfig, RunConfig, config_path, free
from trivium.foundation.atomic import atomic_write, fsync, writing
from trivium.foundation.board import SharedBoard
from trivium.foundation.concurrency import ProgressDeadline, Waiting, wait_until
from trivium.foundation.errors import ConfigError, DataError, Problem, RoleFailed, SyncError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import TRAINER, Capabilities, Group, Lease

# Made once: building a statement takes SQLAlchemy longer than running it takes SQLite.
_THIS = BUFFERS.c.name == sa.bindparam("this_name")
_HEAD = sa.select(BUFFERS).where(_THIS)
_HEADS = {False: _HEAD, True: _HEAD.with_for_update()}
"""By whether the row is locked."""
_HEAD_COLUMNS = tuple(column.name for column in BUFFERS.columns)


_MANY_CALLS = 64
"""Most calls in one transaction."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that changes the buffer."""

    work: Work
    joins: bool
    caller: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The context of the caller, for `work`: the thread of another call may run it."""
    tried: bool = False
    """Whether a transaction has run it, and may have been committed."""
    answer: str = "null"
    committed: Future[None] = field(default_factory=Future[None])


class SqlBuffer(SlotBuffer):
    """Keeps slots and groups as rows of a database. Any number of processes lease slots and store groups; the trainer
    takes them.

    A group counts once its transaction is committed. A call whose connection drops is repeated and takes effect once.
    The trainer's `restore` opens the buffer: explorers that start earlier wait for it, and calls for an earlier trainer
    raise RoleFailed.
    """

    capabilities = Capabilities(shared=True)

    class Config(BufferConfig):
        kind: str = "sql"
        url: Annotated[str, AfterValidator(lambda url: located(url, config_path))] = "sqlite:///trivium.db"
        """Where the database is: `sqlite:///file.db` (relative to the config file; all processes on one machine) or
        `postgresql://user@host/name`. The URL must not contain a password, which would be stored in the run directory:
        use `~/.pgpass` or `PGPASSWORD`. Several runs share a database, each under its `run.name`."""
        patience_s: float = free(10.0, gt=0)
        """How long a transaction is retried if the connection drops, or the server restarts or does not answer; then
        the run ends. A statement may take half of this time."""
        overwrite: bool = free(False)
        """Lets a new run take the name of another run in the same database. The groups of the other run are deleted,
        and it ends if it is still running."""

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
        self._save_call = Statement(self._database.insert(CALLS, replace=True))
        self._media = MediaRows(self._database, name)
        self._session: str | None = None
        """The id of the trainer's `restore` that this buffer belongs to; None until it is known."""
        self._arrived_before = 0
        """The number of arrival from which groups are of this session."""
        self._waiting: deque[_Call] = deque()
        """The calls that no transaction has taken yet."""
        self._writing = threading.Lock()
        """Held while calls of this buffer are committed. `restore` and `MediaRows.keep` write without it."""
        self._idle: list[str] = []
        """Caller names that no call is using; the database keeps one result per name."""

    @staticmethod
    def open_board(config: Config, *, name: str) -> SharedBoard:
        """The board of the run `name`, in the same database."""
        return SharedBoard(SqlTable(Database(config.url, patience_s=config.patience_s), name))

    @staticmethod
    def claim(config: Config, *, name: str, run_dir: Path) -> None:
        """Registers `name` in the database for the run in `run_dir`, before a trainer uses it.

        Raises ConfigError if it is the name of another run, unless `overwrite` allows to delete that one.
        """
        database = Database(config.url, patience_s=config.patience_s)
        database.create(TABLES)
        place = f"{socket.gethostname()}:{run_dir.resolve()}"
        mine = {"name": name, "run": _run_id(run_dir / "rollouts"), "place": place}

        def work(connection: sa.Connection) -> None:
            connection.execute(database.insert(RUNS), mine)
            registered = connection.execute(sa.select(RUNS).where(RUNS.c.name == name).with_for_update()).one()
            if registered.run != mine["run"]:
                if not config.overwrite:
                    raise _name_taken(name, f"another run has this name in this database: {registered.place}")
                forget(connection, name)
            connection.execute(sa.update(RUNS).where(RUNS.c.name == name).values(mine))

        database.transact(work)

    async def put(self, owner: str, group: Group) -> None:
        if "\0" in group.task.task_id + group.task.taskset:
            raise DataError(
                "a task id without NUL characters", repr(group.task.task_id), "have the task source leave them out"
            )
        put = partial(Slots.put, owner=owner, group=group)

        def encode() -> Work:
            return partial(put, record=stored_record(group, self._name, self._media))

        await self._change(put, joins=True, prepare=encode)

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        return await self._groups(await self._look(lambda machine: _rows(machine).taken(slots)))

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version` with the groups stored since; None starts the stage.

        Only the trainer calls it. Deletes the rows that another run left under the same name if `overwrite` allows it;
        otherwise raises ConfigError.
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
            connection.execute(self._database.insert(BUFFERS), place)
            head = self._head(connection, lock=True)
            assert head is not None
            if head["session"] == session:
                return  # done before the connection dropped; explorers may have come since
            rows = SqlRows(connection, head)
            if head["run"] != run:
                if not self._overwrite:
                    raise _name_taken(self._name, "another run has groups under this name in this database")
                rows.wipe()
            rows.forget_callers()
            Slots(rows, self.schedule).restore(state, version)
            arrivals = rows.head["arrivals"]
            rows.head |= {"run": run, "session": session, "closed": False}
            self._save(connection, head, rows)

        await asyncio.to_thread(self._database.transact, work)
        self._media.forget()
        self._arrived_before = arrivals
        self._session = session  # not before it is committed: explorers of this process look at the same moment

    async def discard(self, version: int) -> int:
        return await self._change(lambda slots: slots.discard(version, self._arrived_before), joins=True)

    # ------------------------------------------------------------------ transactions

    async def _change(
        self,
        work: Work,
        *,
        undo: Undo | None = None,
        joins: bool = False,
        prepare: Callable[[], Work] | None = None,
    ) -> Any:
        """The answer of `work`, which takes effect once even if the connection drops; None if the buffer is not open
        yet. `prepare` completes `work`, before the transaction in the same thread."""

        def run() -> Any:
            return self._once(work if prepare is None else prepare(), joins)

        running = asyncio.ensure_future(asyncio.to_thread(run))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            answer = await running
            if undo is not None and answer is not None:
                await asyncio.to_thread(self._once, lambda slots: undo(slots, answer), joins)
            raise

    async def _when(self, work: Work, waits: Waits | None, *, undo: Undo | None = None, joins: bool = False) -> Any:
        answer = await self._change(work, undo=undo, joins=joins)
        if answer is not None:
            return answer
        polls, last_read = count(), None

        async def poll(deadline: ProgressDeadline) -> tuple[Any, object]:
            nonlocal last_read
            if number := next(polls):
                await pause(number - 1, min(deadline.left_s, self._deadline_s))
            commits, session = self._database.commits(), self._session
            if commits is not None and (commits, session) == last_read:
                return None, deadline.state
            last_read = (commits, session)  # before the tables are read, which may change in between
            change, due = await asyncio.to_thread(self._glance, work, deadline.state, joins)
            return (await self._change(work, undo=undo, joins=joins) if due else None), change

        def describe() -> Waiting:
            def read(connection: sa.Connection) -> Waiting:
                slots = self._slots(connection)
                if slots is None or waits is None:
                    return Waiting("an explorer", "the trainer to open the buffer")
                return waits(slots)

            return self._database.read(read)

        return await wait_until(poll, describe, math.inf if waits is None else self._deadline_s)

    def _glance(self, work: Work, last_change: object, joins: bool) -> tuple[int, bool]:
        """(the buffer's number of changes, whether that differs from `last_change` and `work` would have an effect).

        It takes no lock: every explorer that waits looks after every change."""

        def read(connection: sa.Connection) -> tuple[int, bool]:
            slots = self._slots(connection, joins=joins, dry=True)
            if slots is None:
                return -1, False
            change = slots.head["change"]
            return change, change != last_change and (work(slots) is not None or slots.changed)

        return self._database.read(read)

    async def _look(self, look: Work) -> Any:
        """The result of `look` in an open buffer."""

        def read(connection: sa.Connection) -> Any:
            slots = self._slots(connection, joins=True)
            if slots is None:
                raise SyncError(f"read the buffer {self._name!r}", "no trainer has opened it", "restore it first")
            return look(slots)

        return await asyncio.to_thread(self._database.read, read)

    async def _groups(self, rows: Sequence[Row]) -> list[Group]:
        records = await self._look(lambda slots: _rows(slots).records(rows))

        def decode() -> list[Group]:
            return [
                read_stored(record, self._name, Lease(row.slot, row.attempt), self._media)
                for row, record in zip(rows, records, strict=True)
            ]

        return await asyncio.to_thread(decode)

    def _once(self, work: Work, joins: bool) -> Any:
        """The answer of `work`, committed. Calls that arrive while another transaction of this process is in progress
        share the next one."""
        call = _Call(work, joins, self._idle.pop() if self._idle else uuid.uuid4().hex)
        self._waiting.append(call)
        with self._writing:
            while self._waiting and not call.committed.done():
                self._commit([self._waiting.popleft() for _ in range(min(len(self._waiting), _MANY_CALLS))])
        self._idle.append(call.caller)
        call.committed.result(0)  # the thread that dequeues a call sets its result before it releases the lock
        return _ANSWERED.decode(call.answer)

    def _commit(self, calls: Sequence[_Call]) -> None:
        """Gives each call its result. A RoleFailed, or an exception that ends the process, ends all calls that have
        none yet."""
        try:
            self._transact(calls)
        except BaseException as error:
            for call in calls:
                if not call.committed.done():
                    call.committed.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _transact(self, calls: Sequence[_Call]) -> None:
        """Runs calls in one transaction. After an error of one, which undoes the others, each runs in its own."""
        try:
            self._database.transact(lambda connection: self._run(connection, calls))
        except RoleFailed:
            raise
        except Exception as error:
            if len(calls) == 1:
                calls[0].committed.set_exception(error)
                return
        else:
            for call in calls:
                call.committed.set_result(None)
            return
        for call in calls:
            self._transact([call])

    def _run(self, connection: sa.Connection, calls: Sequence[_Call]) -> None:
        mine, rows = self._session, None
        head = self._head(connection, lock=True)
        changed = False
        for call in calls:
            call.answer = "null"
            if not self._is_open(head, mine, joins=call.joins):
                continue
            # Not before the lock is held: the commit whose answer was lost may still be under way.
            if call.tried and (answered := _answered(connection, call.caller, call.token)) is not None:
                call.answer = answered
                continue
            call.tried = True
            assert head is not None
            rows = rows or SqlRows(connection, head)
            slots = Slots(rows, self.schedule)
            call.answer = _ANSWERS.encode(call.context.run(call.work, slots))
            if slots.changed:
                values = {"caller": call.caller, "buffer": self._name, "token": call.token, "answer": call.answer}
                self._save_call(connection, values)
                changed = True
        if head is not None and rows is not None and changed:
            self._save(connection, head, rows)

    def _slots(self, connection: sa.Connection, *, joins: bool = False, dry: bool = False) -> Slots | None:
        """The buffer's rows, to read; None before the buffer is open."""
        mine = self._session  # before the row is read: `restore` may commit, and set it, in between
        head = self._head(connection, lock=False)
        if not self._is_open(head, mine, joins=joins):
            return None
        assert head is not None
        return Slots(SqlRows(connection, head), self.schedule, dry=dry)

    def _is_open(self, head: Mapping[str, Any] | None, mine: str | None, *, joins: bool) -> bool:
        """Whether the trainer of the session `mine` has opened the buffer. `joins`: the call can only come after its
        `restore`, so the session in the database is its own."""
        if mine is None and joins and head is not None:
            mine = self._session = head["session"]
        if mine is None:
            return False
        if head is None or head["session"] != mine:
            raise RoleFailed(TRAINER, "another one was started over the same buffer and run.name")
        return True

    def _head(self, connection: sa.Connection, *, lock: bool) -> Mapping[str, Any] | None:
        """The buffer's own row; with `lock`, locked until the transaction ends."""
        row = connection.execute(_HEADS[lock], {"this_name": self._name}).one_or_none()
        return None if row is None else dict(zip(_HEAD_COLUMNS, row, strict=True))

    def _save(self, connection: sa.Connection, head: Mapping[str, Any], rows: Rows) -> None:
        """Stores what differs from `head`, the row as it was read."""
        rows.head["change"] += 1
        changed = {name: value for name, value in rows.head.items() if value != head[name]}
        _save_of(tuple(changed))(connection, {**changed, "this_name": self._name})


@lru_cache
def _save_of(names: tuple[str, ...]) -> Statement:
    """Sets these columns of a buffer's own row."""
    return Statement(sa.update(BUFFERS).where(_THIS), names)


def _answered(connection: sa.Connection, caller: str, token: str) -> str | None:
    """The result of a call that was committed before its connection dropped."""
    mine = (CALLS.c.caller == caller, CALLS.c.token == token)
    return connection.execute(sa.select(CALLS.c.answer).where(*mine)).scalar_one_or_none()


def _name_taken(name: str, cause: str) -> ConfigError:
    return ConfigError(
        f"a run with the name {name!r}",
        cause,
        "set run.name or buffer.url; or, if that run is no longer needed, buffer.overwrite=true, which deletes its "
        "groups",
    )


def _row_columns(row: Row) -> dict[str, int | None]:
    """The columns of a row that an answer needs, as JSON."""
    return {"slot": row.slot, "attempt": row.attempt, "arrival": row.arrival}


_ANSWERS = json.JSONEncoder(default=_row_columns)
_ANSWERED = json.JSONDecoder(object_hook=lambda columns: Row(**columns))
"""An answer as JSON, and its rows again."""


def _rows(slots: Slots) -> SqlRows:
    assert isinstance(slots.rows, SqlRows)
    return slots.rows


def _run_id(rollouts: Path) -> str:
    """The id of this run, from a file of the run directory: distinguishes runs of the same name."""
    path = rollouts / "buffer.id"
    if not path.is_file():
        rollouts.mkdir(parents=True, exist_ok=True)
        atomic_write(path, uuid.uuid4().hex)
    with writing(path):
        for folder in (rollouts, rollouts.parent):  # before the database has the id: a loss of power must not remove it
            fsync(folder)
    return path.read_text(encoding="utf-8")
