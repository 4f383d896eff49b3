"""Transactions in a database that several processes use, retried if a connection drops; the table of the board.

SQLite (a file, one machine) and PostgreSQL (a server, many machines) through SQLAlchemy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from trivium.foundation.atomic import made_directory
from trivium.foundation.board import Values
from trivium.foundation.errors import ConfigError, MissingPackage, RoleFailed

T = TypeVar("T")
Work = Callable[[sa.Connection], T]
_log = logging.getLogger("trivium")

_CONNECT_TIMEOUT_S = 4
_BUSY_S = 5
"""How long SQLite waits for the transaction of another process."""
SLOWEST_POLL_S = 0.05
"""The longest pause between two reads of a table."""
_GRACE_S = 1.0
"""How long to wait, after the statement timeout, for the server to report the timeout."""
_LOCK = 0x747269
"""The key of PostgreSQL's advisory lock that is held while tables are created."""
_CHANNEL = "trivium"
"""Where a server notifies of commits."""
_TOO_SLOW = ("55P03", "57014", "25P03")
"""SQLSTATE codes of PostgreSQL: lock timeout, statement timeout, idle transaction timeout."""
_BEGINS = {
    # Writers lock at the beginning: two transactions that read first and then write would fail.
    "sqlite": {True: "BEGIN", False: "BEGIN IMMEDIATE"},
    # All statements of a transaction that reads see one snapshot, as in SQLite.
    "postgresql": {True: "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", False: "BEGIN"},
}
"""By dialect: how a transaction begins, by whether it only reads."""


class Database:
    """Runs functions as transactions, and retries them after transient errors.

    A function may therefore run more than once, even after its first run was committed: the connection may drop before
    the result arrives. The methods can be called from any thread. Raises RoleFailed naming the database after
    `patience_s`.

    A server aborts a statement that takes longer than half of `patience_s`, waits for locks included, so that there is
    time to retry. It aborts transactions that are idle for as long, because others may wait for their locks.
    """

    def __init__(self, url: str, *, patience_s: float = 10.0) -> None:
        self._patience_s = patience_s
        self._url = _parsed(url)
        self._engine = _open(self._url, patience_s / 2)
        self.notified_late = self._engine.dialect.name != "sqlite"
        """Whether `commits` may still be the value before a commit after it."""
        self._counter: Any = None
        """A connection that commits nothing: SQLite counts the commits of others, a server notifies it of them."""
        self._notified = 0
        """The notifications, and the connections that waited for them."""
        self._counting, self._connecting = threading.Lock(), threading.Lock()
        # The garbage collector warns about open connections.
        weakref.finalize(self, self._engine.dispose)

    def create(self, metadata: sa.MetaData) -> None:
        """Creates the tables that do not exist yet."""

        def work(connection: sa.Connection) -> None:
            if connection.dialect.name == "postgresql":  # two processes that create the same table would fail
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            metadata.create_all(connection)

        self.transact(work)

    def transact(self, work: Work[T]) -> T:
        """The result of `work`, its changes committed. On SQLite only one transaction writes at a time."""
        return self._retried(work, reads=False)

    def read(self, work: Work[T]) -> T:
        """The result of `work`, which only reads, from one snapshot, without locks."""
        result = self._retried(work, reads=True)
        if self._counter is None and self.notified_late and self._connecting.acquire(blocking=False):
            try:
                self._listen()
            except DBAPIError as error:  # the next read tries it again, and raises what lasts
                _log.debug("no notifications of commits: %s", _cause(error))
            finally:
                self._connecting.release()
        return result

    def commits(self) -> object:
        """A value that differs after every commit of any connection. Costs microseconds, where `read` costs hundreds: a
        wait reads the tables only after a change. None if unknown: if the file cannot be read, or before a `read` from
        a server. On a server it differs every second, too, since a notification may be lost with its connection."""
        sqlite = not self.notified_late
        with self._counting:
            try:
                if sqlite and self._counter is None:
                    file = str(self._url.database)
                    self._counter = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
                    weakref.finalize(self, self._counter.close)
                if sqlite:
                    return self._counter.execute("PRAGMA data_version").fetchone()[0]
                if self._counter is None:
                    return None
                self._notified += sum(1 for _ in self._counter.notifies(timeout=0))
                return self._notified, int(time.monotonic())
            except self._engine.dialect.loaded_dbapi.Error:
                if not sqlite:
                    self._counter = None
                return None

    def _listen(self) -> None:
        """Connects to a server that notifies of commits."""
        connection = self._engine.connect()
        try:
            connection.exec_driver_sql(f"LISTEN {_CHANNEL}")
        except DBAPIError:
            connection.close()
            raise
        counter: Any = connection.connection.driver_connection
        connection.detach()  # no transaction uses it
        weakref.finalize(self, counter.close)
        with self._counting:
            self._counter, self._notified = counter, self._notified + 1

    def insert(self, table: sa.Table, *, replace: bool = False) -> sa.Insert:
        """The statement that inserts the row that it is executed with. Keeps an existing row of its primary key, or
        with `replace` replaces it."""
        return _insert(self._engine.dialect.name, table, replace)

    def _retried(self, work: Work[T], *, reads: bool) -> T:
        tries = Retrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_delay(self._patience_s),
            wait=wait_random_exponential(multiplier=0.02, max=1.0),
            reraise=True,
        )
        try:
            try:
                # Outside `tries`, which takes a tenth of the time of a transaction even if nothing fails.
                return self._once(work, reads)
            except DBAPIError as error:
                if not _is_transient(error):
                    raise
            return tries(self._once, work, reads)
        except SQLAlchemyError as error:
            raise RoleFailed("database", f"{self._url.render_as_string()}: {_cause(error)}") from error

    def _once(self, work: Work[T], reads: bool) -> T:
        # A COMMIT that SQLite refuses, since others read, leaves the transaction open: SQLAlchemy takes it for ended,
        # and the pool rolls it back. Both drivers roll back an ended one without a statement.
        with self._engine.connect() as connection, connection.begin():
            connection.exec_driver_sql(_BEGINS[connection.dialect.name][reads])
            result = work(connection)
            if self.notified_late and not reads:
                connection.exec_driver_sql(f"NOTIFY {_CHANNEL}; COMMIT")  # together: one round trip less
            return result


class Statement:
    """A statement without rows that runs for every group, compiled once: SQLAlchemy prepares a statement for longer
    than SQLite runs it. A statement with rows gains nothing, because SQLAlchemy keeps what it knows of their columns
    only with its own."""

    def __init__(self, statement: sa.Executable, columns: Sequence[str] | None = None) -> None:
        """`columns` are those that an insert or update sets; None: all, or those that the statement names."""
        self._statement: Any = statement
        self._columns = columns
        self._compiled: dict[str, tuple[str, Mapping[str, Any], Sequence[str] | None]] = {}
        """By dialect: the text, the values of its constants, and its parameters in order if it has no names."""

    def __call__(self, connection: sa.Connection, values: Mapping[str, Any]) -> None:
        """Executes it with these values of the parameters."""
        text, constants, names = self._compiled.get(connection.dialect.name) or self._compile(connection.dialect)
        parameters: Any = {**constants, **values}
        connection.exec_driver_sql(text, parameters if names is None else tuple(parameters[name] for name in names))

    def _compile(self, dialect: sa.Dialect) -> tuple[str, Mapping[str, Any], Sequence[str] | None]:
        compiled = self._statement.compile(dialect=dialect, column_keys=self._columns)
        self._compiled[dialect.name] = compiled.string, compiled.params, compiled.positiontup
        return self._compiled[dialect.name]


@lru_cache
def _insert(dialect: str, table: sa.Table, replace: bool) -> sa.Insert:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    keys = [column.name for column in table.primary_key]
    if replace:
        rest = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
        return insert.on_conflict_do_update(index_elements=keys, set_=rest)
    return insert.on_conflict_do_nothing(index_elements=keys)


def _parsed(url: str) -> sa.URL:
    """The URL with the driver to use; raises ConfigError for an unsupported database."""
    try:
        parsed = sa.make_url(url)
    except SQLAlchemyError as error:
        raise ConfigError(
            f"the database {url!r}", str(error), "write sqlite:///file.db or postgresql://host/db"
        ) from error
    drivers = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    name = parsed.drivername.partition("+")[0]
    if name not in drivers:
        raise ConfigError(f"the database {url!r}", f"{name} is not supported", f"use one of {sorted(set(drivers))}")
    if name == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigError(
            f"the database {url!r}", "it is in memory, so no other process can open it", "sqlite:///file.db"
        )
    return parsed.set(drivername=drivers[name])


def located(url: str, place: Callable[[str], Path]) -> str:
    """The URL with its file replaced by `place(file)`. Raises ValueError for an unsupported URL."""
    try:
        parsed = _parsed(url)
    except ConfigError as error:
        raise ValueError(f"{error.found}; {error.do}") from error
    if parsed.get_backend_name() == "sqlite":
        parsed = parsed.set(database=str(place(parsed.database or "")))
    return parsed.render_as_string(hide_password=False)


def _open(url: sa.URL, limit_s: float) -> sa.Engine:
    if url.get_backend_name() == "sqlite":
        made_directory(Path(url.database or "").parent, "buffer.url")
        engine = sa.create_engine(url, connect_args={"timeout": _BUSY_S})
        event.listen(engine, "connect", _prepare_sqlite)
        return engine
    limits = ("statement_timeout", "idle_in_transaction_session_timeout")  # a statement includes its waits for locks
    options = [f"-c {name}={max(1, round(limit_s * 1000))}" for name in limits]
    # The driver prepares statements, which the server then parses once: that saves a quarter of its time. It plans them
    # each time: a plan for a small table must not be reused for a large one.
    options.append("-c plan_cache_mode=force_custom_plan")
    settings = {
        "options": " ".join([*options, str(url.query.get("options", ""))]),
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "application_name": "trivium",
        "autocommit": True,  # the driver must not begin transactions
        # Detects an unresponsive machine within seconds.
        "keepalives_idle": 3,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 8000,
    }
    try:
        engine = sa.create_engine(url, connect_args=settings)
    except ImportError as error:
        raise MissingPackage("psycopg", "postgres", f"reach {url.render_as_string()}") from error
    connect = _patient(engine.dialect.loaded_dbapi, limit_s + _GRACE_S).connect
    event.listen(engine, "do_connect", lambda dialect, record, args, settings: connect(*args, **settings))
    return engine


def _patient(psycopg: Any, limit_s: float) -> Any:
    """psycopg's class of connections, of which every wait for the server ends after `limit_s`. No other timeout ends
    the wait for a server that is suspended: its machine still acknowledges what it receives."""

    class Connection(psycopg.Connection):
        def wait(self, gen: Generator[Any, Any, T], *args: Any, **settings: Any) -> T:
            return super().wait(self._limited(gen), *args, **settings)

        def _limited(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
            """`gen`, which psycopg resumes when the server answers, and ten times a second until then."""
            end = time.monotonic() + limit_s
            try:
                events = next(gen)
                while True:
                    ready = yield events
                    if not ready and time.monotonic() > end:
                        self.close()
                        raise psycopg.OperationalError(f"the server did not answer within {limit_s:g} s")
                    events = gen.send(ready)
            except StopIteration as stop:
                return stop.value

    return Connection


def _prepare_sqlite(connection: sqlite3.Connection, record: object) -> None:
    del record
    connection.isolation_level = None  # the driver must not begin transactions
    # Readers do not block the writer. A commit survives the death of this process, like a record of the journal.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _is_transient(error: BaseException) -> bool:
    """Whether a retry may help: the connection dropped, the server restarts, or another transaction was faster."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    cause = error.orig
    busy = getattr(cause, "sqlite_errorcode", 0) & 0xFF in (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED
    state = getattr(cause, "sqlstate", "")
    if isinstance(error, OperationalError) and state is None:
        return True  # psycopg could not connect
    # Connection, serialization and resource errors, and a server that shuts down or starts.
    passing = (state or "")[:2] in ("08", "40", "53") or (state or "")[:4] == "57P0"
    return busy or passing or state in _TOO_SLOW


def _cause(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    slow = " (it may take half of buffer.patience_s)" if getattr(cause, "sqlstate", None) in _TOO_SLOW else ""
    return " ".join(str(cause).split()) + slow


async def pause(poll: int, left_s: float) -> None:
    """Sleeps between two reads of a table, longer with each poll."""
    await asyncio.sleep(max(0.0, min(0.002 * 1.5 ** min(poll, 20), SLOWEST_POLL_S, left_s)))


# --------------------------------------------------------------------------- the board

_BOARDS = sa.MetaData()
_boards = sa.Table(
    "trivium_boards",
    _BOARDS,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("board", sa.Text, nullable=False),
    sa.Column("writers", sa.Text, nullable=False),
)
_TOKEN = 16
"""Characters of a writer's token."""


class SqlTable:
    """The table of a board: one row per board name."""

    def __init__(self, database: Database, name: str) -> None:
        self._database, self._name = database, name
        self._query = sa.select(_boards.c.revision, _boards.c.board).where(_boards.c.name == name)
        self._row: tuple[int, Values] = (0, {})
        self._commits: object = None
        """The database's number of commits before the row was read. All waits of this process share the row."""
        self._loading = threading.Lock()
        database.create(_BOARDS)

    def load(self) -> tuple[int, Values]:
        """(revision, values); revision 0 and no values if nothing has been written yet."""
        with self._loading:
            if not self._is_current(waiting=False):
                commits = self._database.commits()  # before the row is read, which may change in between
                row = self._database.read(lambda connection: connection.execute(self._query).one_or_none())
                self._row = (0, {}) if row is None else (row.revision, json.loads(row.board))
                self._commits = commits
            return self._row

    def _is_current(self, *, waiting: bool) -> bool:
        """Whether nothing was committed since the row was read. A notification comes after its commit: only a wait that
        has read the row before may rely on it."""
        if self._database.notified_late and not waiting:
            return False
        return self._commits is not None and self._commits == self._database.commits()

    def swap(self, revision: int, values: Values) -> bool:
        """Stores the values as `revision + 1` if the row still has `revision`. Returns whether it stored them."""
        board, token = json.dumps(values), uuid.uuid4().hex[:_TOKEN]
        mine = _boards.c.name == self._name
        # Tokens of the last writers: a writer whose commit is uncertain finds its own, even after later writes.
        writers = sa.func.substr(token + _boards.c.writers, 1, 64 * _TOKEN)
        change = sa.update(_boards).where(mine, _boards.c.revision == revision)
        written = sa.select(sa.func.count()).where(mine, _boards.c.writers.contains(token))

        first = {"name": self._name, "revision": 1, "board": board, "writers": token}
        newer = change.values(revision=revision + 1, board=board, writers=writers)

        def work(connection: sa.Connection) -> bool:
            result = (
                connection.execute(newer) if revision else connection.execute(self._database.insert(_boards), first)
            )
            return result.rowcount == 1 or connection.execute(written).scalar_one() > 0

        return self._database.transact(work)

    async def changed(self, revision: int, patience_s: float) -> tuple[int, Values]:
        """Waits until the row is newer than `revision`, for at most `patience_s`. Returns (revision, values)."""
        end = time.monotonic() + patience_s
        for poll in itertools.count():
            row = self._row if self._is_current(waiting=poll > 0) else await asyncio.to_thread(self.load)
            left_s = end - time.monotonic()
            if row[0] > revision or left_s <= 0:
                return row
            await pause(poll, left_s)
        raise AssertionError("unreachable")
