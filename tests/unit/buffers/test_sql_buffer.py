"""The buffer and the board in a database: whose rows they are, who waits for whom, what an operation costs."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from configs import configured
from failing import refused
from postgres import Server
from sql_roles import TASKS, count_on_board, make_end, make_group, make_schedule
from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError

from tests.processes import fork_server
from tests.waiting import until
from trivium.buffers.sql import database
from trivium.buffers.sql.buffer import SqlBuffer
from trivium.buffers.sql.database import Database
from trivium.buffers.sql.slot_tables import CALLS, GROUPS, SLOTS
from trivium.config import plugin
from trivium.foundation.errors import ConfigError, DataError, MissingPackage, RoleFailed, SyncError
from trivium.runtime.launch import run
from trivium.types import Group, Lease, Media


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'buffer.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def each_url(request: pytest.FixtureRequest, url: str) -> str:
    """An empty database of each kind."""
    return url if request.param == "sqlite" else request.getfixturevalue("postgres").create_database(uuid.uuid4().hex)


async def opened(url: str, path: Path, state: Any = None, version: int = 0, **change: Any) -> SqlBuffer:
    buffer = make_end(url, make_schedule(**change), path)
    await buffer.restore(state, version)
    return buffer


async def leased(buffer: SqlBuffer, owner: str = "e") -> Lease:
    lease = await buffer.lease(owner)
    assert lease is not None
    return lease


async def played(buffer: SqlBuffer, number: int, owner: str = "e") -> None:
    await buffer.advance(owner, 0)
    for _ in range(number):
        await buffer.put(owner, make_group(await leased(buffer, owner)))


# --------------------------------------------------------------------------- damaged rows

PICTURE = Media("image/png", b"the bytes of a picture")


def changed(url: str, *statements: sa.Executable) -> None:
    """Somebody else works on the database."""
    database = Database(url)

    def work(connection: sa.Connection) -> None:
        for statement in statements:
            connection.execute(statement)

    database.transact(work)


def payload_of(url: str, slot: int) -> bytes:
    query = sa.select(GROUPS.c.payload).where(GROUPS.c.slot == slot)
    return Database(url).read(lambda connection: connection.execute(query).scalar_one())


DAMAGES: dict[str, Callable[[str], sa.Executable]] = {
    "bytes differ": lambda url: (
        sa.update(GROUPS).where(GROUPS.c.slot == 1).values(payload=payload_of(url, 1)[:-1] + b"\x00")
    ),
    "slot 0, attempt 0": lambda url: sa.update(GROUPS).where(GROUPS.c.slot == 1).values(payload=payload_of(url, 0)),
    "no group": lambda url: sa.delete(GROUPS).where(GROUPS.c.slot == 1),
}


@pytest.mark.parametrize("problem", DAMAGES)
async def test_a_damaged_row_is_refused_and_rolled_out_again_by_the_same_command(
    url: str, tmp_path: Path, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await opened(url, tmp_path)
    await played(buffer, 2)
    changed(url, DAMAGES[problem](url))
    with refused(DataError, "slot 1", "attempt 0", "run/stage-0", problem):
        await buffer.take(2, 0)
    again = await opened(url, tmp_path)
    assert "slot 1 is rolled out again" in caplog.text
    await played(again, 1)
    assert [group.slot for group in await again.take(2, 0)] == [0, 1]


async def test_media_are_one_row_each_and_reach_another_process(url: str, tmp_path: Path) -> None:
    def pictured(lease: Lease) -> Group:
        group = make_group(lease)
        turns = tuple(replace(turn, media=(PICTURE.at(0, 1),)) for turn in group.trajectories[0].turns)
        return replace(group, trajectories=(replace(group.trajectories[0], turns=turns), *group.trajectories[1:]))

    trainer, explorer = await opened(url, tmp_path), make_end(url, make_schedule(), tmp_path)
    await explorer.advance("e", 0)
    for _ in range(2):
        await explorer.put("e", pictured(await leased(explorer)))
    rows = Database(url).read(lambda connection: connection.execute(sa.text("select data from trivium_media")).all())
    assert [row.data for row in rows] == [PICTURE.data]
    assert PICTURE.data not in payload_of(url, 0)
    groups = await trainer.take(2, 0)
    assert {m.data for group in groups for turn in group.trajectories[0].turns for m in turn.media} == {PICTURE.data}
    changed(url, sa.text("delete from trivium_media"))
    with refused(DataError, PICTURE.sha256[:12], "no such"):
        await make_end(url, make_schedule(), tmp_path).taken_groups([0])


async def test_a_group_of_another_buffer_is_refused(url: str, tmp_path: Path) -> None:
    one, other = await opened(url, tmp_path), make_end(url, make_schedule(), tmp_path, name="run/stage-1")
    await other.restore(None, 0)
    await played(one, 2)
    await played(other, 2)
    theirs = sa.select(GROUPS.c.payload).where(GROUPS.c.slot == 1, GROUPS.c.buffer == "run/stage-1")
    payload = Database(url).read(lambda connection: connection.execute(theirs).scalar_one())
    mine = (GROUPS.c.slot == 1, GROUPS.c.buffer == "run/stage-0")
    changed(url, sa.update(GROUPS).where(*mine).values(payload=payload))
    with refused(DataError, "slot 1", "run/stage-0", "bytes differ"):
        await one.take(2, 0)
    assert len(await other.take(2, 0)) == 2


async def test_a_dropped_table_is_named_and_made_again(url: str, tmp_path: Path) -> None:
    buffer = await opened(url, tmp_path)
    await played(buffer, 2)
    changed(url, sa.DDL("DROP TABLE trivium_groups"))
    with refused(RoleFailed, "database", "buffer.db", "trivium_groups"):
        await buffer.take(2, 0)
    again = await opened(url, tmp_path)
    await played(again, 2)
    assert len(await again.take(2, 0)) == 2


async def test_a_task_id_that_not_every_database_stores_is_refused(url: str, tmp_path: Path) -> None:
    buffer = await opened(url, tmp_path)
    await buffer.advance("e", 0)
    group = make_group(await leased(buffer))
    with refused(DataError, "NUL", repr("a\0b")):
        await buffer.put("e", replace(group, task=replace(group.task, task_id="a\0b")))


def test_a_database_in_a_directory_that_cannot_be_made_is_a_problem_of_the_config() -> None:
    with refused(ConfigError, "'/proc/none'", "buffer.url"):
        Database("sqlite:////proc/none/buffer.db")


# --------------------------------------------------------------------------- whose rows they are


async def test_explorers_that_come_before_the_trainer_wait_for_it(url: str, tmp_path: Path) -> None:
    early = make_end(url, make_schedule(), tmp_path)
    assert await early.lease("e", wait=False) is None
    waiting = [asyncio.ensure_future(early.advance("e", 0)), asyncio.ensure_future(early.lease("e"))]
    hearing = asyncio.ensure_future(early.cancelled_leases("e"))
    await asyncio.sleep(0.1)  # in which they would end
    assert not any(task.done() for task in waiting)
    await opened(url, tmp_path)
    assert (await asyncio.gather(*waiting))[1] == Lease(0)
    hearing.cancel()


async def test_a_look_that_began_before_the_trainer_opened_the_buffer_finds_no_other_trainer(
    url: str, tmp_path: Path
) -> None:
    """In one process both sides share the object: the row may be read before `restore`, and judged after it."""
    await opened(url, tmp_path)
    shared, has_read, go_on = make_end(url, make_schedule(), tmp_path), threading.Event(), threading.Event()
    read_head = shared._head

    def slowly(connection: sa.Connection, *, lock: bool) -> Any:
        head = read_head(connection, lock=lock)
        if not lock and not go_on.is_set():
            has_read.set()
            assert go_on.wait(120)
        return head

    shared._head = slowly  # type: ignore[method-assign]
    hearing = asyncio.ensure_future(shared.cancelled_leases("e"))
    assert await asyncio.to_thread(has_read.wait, 60)
    await shared.restore(None, 0)
    go_on.set()
    await asyncio.sleep(0.1)  # in which it would end
    assert not hearing.done()
    hearing.cancel()


async def test_what_a_dead_trainer_closed_or_admitted_is_not_for_explorers_of_the_next_one(
    url: str, tmp_path: Path
) -> None:
    first = await opened(url, tmp_path)
    await first.advance("e", 0)
    early = make_end(url, make_schedule(), tmp_path)
    assert await early.lease("e", wait=False) is None  # it has adopted nothing, though one of its name had
    await first.close()
    assert await early.lease("e", wait=False) is None
    await opened(url, tmp_path)
    await early.advance("e", 0)
    assert await early.lease("e", wait=False) == Lease(0)


async def test_whoever_worked_for_the_trainer_before_is_told_that_another_has_taken_over(
    url: str, tmp_path: Path
) -> None:
    first = await opened(url, tmp_path)
    explorer = make_end(url, make_schedule(), tmp_path)
    await explorer.advance("e", 0)
    lease = await leased(explorer)
    waiting = asyncio.ensure_future(first.take(2, 0))
    await asyncio.sleep(0)
    await opened(url, tmp_path)
    for work in (explorer.put("e", make_group(lease)), explorer.lease("e"), waiting, first.state()):
        with refused(RoleFailed, "trainer", "another one", "run.name"):
            await work


async def test_another_run_under_the_same_name_finds_an_empty_buffer_if_it_may_overwrite(
    url: str, tmp_path: Path
) -> None:
    await played(await opened(url, tmp_path / "one"), 2)
    with refused(ConfigError, "run/stage-0", "run.name", "buffer.url", "buffer.overwrite"):
        await opened(url, tmp_path / "two")
    again = await opened(url, tmp_path / "one")
    assert [group.slot for group in await again.take(2, 0)] == [0, 1]
    other = make_end(url, make_schedule(), tmp_path / "two", overwrite=True)
    await other.restore(None, 0)
    await other.advance("e", 0)
    assert await leased(other) == Lease(0)
    assert await other.state() == {
        "consumed_below": 0,
        "consumed": [],
        "attempts": {},
        "refused": 0,
        "evicted": 0,
        "called_off": 0,
        "given_up": 0,
        "dropped": 0,
    }
    tables = sa.select(sa.func.count()).select_from(SLOTS)
    assert Database(url).read(lambda connection: connection.execute(tables).scalar_one()) == 1


async def test_a_name_is_one_runs_until_another_may_overwrite_it(url: str, tmp_path: Path) -> None:
    config, may = SqlBuffer.Config(url=url), SqlBuffer.Config(url=url, overwrite=True)
    one, two = tmp_path / "one", tmp_path / "two"
    for _ in range(2):  # the run's first life and its second
        SqlBuffer.claim(config, name="run", run_dir=one)
    SqlBuffer.claim(config, name="run_2", run_dir=two)
    ends = [make_end(url, make_schedule(), one, name=f"run/stage-{number}") for number in range(2)]
    stranger = make_end(url, make_schedule(), two, name="run_2/stage-0")
    for buffer in (*ends, stranger):
        await buffer.restore(None, 0)
        await played(buffer, 2)
    with refused(ConfigError, f"{socket.gethostname()}:{one}", "run.name", "buffer.url", "buffer.overwrite=true"):
        SqlBuffer.claim(config, name="run", run_dir=two)
    assert [group.slot for group in await ends[0].take(2, 0)] == [0, 1]

    SqlBuffer.claim(may, name="run", run_dir=two)
    SqlBuffer.claim(config, name="run", run_dir=two)
    with refused(ConfigError, f"{socket.gethostname()}:{two}"):
        SqlBuffer.claim(config, name="run", run_dir=one)
    for buffer in ends:
        with refused(RoleFailed, "trainer", "another one", "run.name"):
            await buffer.state()
    await make_end(url, make_schedule(), two, name="run/stage-1").restore(None, 0)  # nothing is left to overwrite
    assert [group.slot for group in await stranger.take(2, 0)] == [0, 1]


def test_a_run_whose_name_is_taken_ends_before_it_says_anything_on_the_board(url: str, tmp_path: Path) -> None:
    other = SqlBuffer.Config(url=url)
    SqlBuffer.claim(other, name="same", run_dir=tmp_path / "other")
    board = SqlBuffer.open_board(other, name="same")
    board.write(lambda values: {"incarnation": "other"})
    run_section = {"name": "same", "dir": str(tmp_path / "run"), "mode": "train"}
    config = configured(run=run_section, buffer={"kind": "sql", "url": url}, sync={"method": "checkpoint"})
    with refused(ConfigError, tmp_path / "other", "run.name"):
        run(config)
    assert board.read() == {"incarnation": "other"}


async def test_buffers_of_other_names_in_the_same_database_are_left_alone(url: str, tmp_path: Path) -> None:
    one = make_end(url, make_schedule(), tmp_path / "one", name="one/stage-0")
    two = make_end(url, make_schedule(), tmp_path / "two", name="two/stage-0")
    for buffer in (one, two):
        await buffer.restore(None, 0)
        await played(buffer, 2)
    await one.take(2, 0)
    await one.restore(None, 0)
    await one.close()
    assert [group.slot for group in await two.take(2, 0)] == [0, 1]


# --------------------------------------------------------------------------- who waits for whom


async def test_waits_have_deadlines_that_name_both_sides(url: str, tmp_path: Path) -> None:
    buffer = make_end(url, make_schedule(), tmp_path, deadline_s=0.1)
    with refused(SyncError, "explorer", "trainer", "to open"):
        await buffer.advance("e", 0)
    await buffer.restore(None, 0)
    with refused(SyncError, "explorer 'e'", "version None", "take groups"):
        await buffer.lease("e")
    await played(buffer, 1)
    await leased(buffer)
    with refused(SyncError, "trainer", "version 0", "2 groups", "1 finished", "1 in progress"):
        await buffer.take(2, 0)
    with refused(SyncError, "explorer 'e'", "version 0", "slot 2"):
        await buffer.lease("e")
    with refused(SyncError, "version 0", "1 in progress"):
        await buffer.drain(0)


async def test_a_wait_lasts_as_long_as_something_happens(url: str, tmp_path: Path) -> None:
    buffer = make_end(url, make_schedule(), tmp_path, deadline_s=4.0)
    await buffer.restore(None, 0)
    taking = asyncio.ensure_future(buffer.take(2, 0))
    for number in range(6):
        await asyncio.sleep(0.8)  # together longer than the deadline
        await buffer.advance(f"other-{number}", 0)
    await played(buffer, 2)
    assert len(await taking) == 2


async def test_calls_that_arrive_together_share_transactions(url: str, tmp_path: Path) -> None:
    buffer = await opened(url, tmp_path, groups_per_step=40)
    await buffer.advance("e", 0)
    leases = await asyncio.gather(*(leased(buffer) for _ in range(40)))
    puts = [buffer.put("e", make_group(lease)) for lease in leases]
    with counted(buffer) as statements:
        ended = await all_at_once(buffer, puts[:20])
    assert sum(statement.startswith("BEGIN") for statement, _ in statements) == 1
    wrong = buffer.put("another", make_group(leases[0]))
    *others, error = await all_at_once(buffer, [*puts[20:], wrong])  # the error undoes none of the others
    assert isinstance(error, DataError)
    assert [*ended, *others] == [None] * 40
    assert len({lease.slot for lease in leases}) == 40
    assert len(await buffer.take(40, 0)) == 40


async def all_at_once(buffer: SqlBuffer, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results or errors of calls that all arrive before the first of them writes, each in a thread."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(len(calls)))
    with buffer._writing:
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: len(buffer._waiting) >= len(calls))
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_a_commit_that_a_reader_delays_is_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a write-ahead log, which some file systems do not allow, COMMIT waits for readers. Its failure leaves the
    transaction open."""

    def without_log(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA busy_timeout = 100")

    monkeypatch.setattr(database, "_prepare_sqlite", without_log)
    end = Database(url, patience_s=30.0)
    table = sa.Table("numbers", sa.MetaData(), sa.Column("number", sa.Integer, primary_key=True))
    end.create(table.metadata)
    reader = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM numbers").fetchall()
    attempts = 0

    def write(connection: sa.Connection) -> None:
        nonlocal attempts
        attempts += 1
        connection.execute(sa.insert(table).values(number=1))
        if attempts == 3:  # two have failed
            reader.execute("COMMIT")

    end.transact(write)
    assert attempts >= 3
    assert end.read(lambda connection: connection.execute(sa.select(table)).scalars().all()) == [1]
    reader.close()


async def together(buffer: SqlBuffer, *works: Callable[[Any], Any]) -> list[Any]:
    """The results or errors of calls that share one transaction, each made in a context with its number."""

    async def call(number: int, work: Callable[[Any], Any]) -> Any:
        NUMBER.set(number)
        return await buffer._change(work, joins=True)

    with buffer._writing:
        calls = [asyncio.create_task(call(number, work)) for number, work in enumerate(works)]
        await until(lambda: len(buffer._waiting) >= len(works))
    async with asyncio.timeout(60):
        return await asyncio.gather(*calls, return_exceptions=True)


NUMBER: ContextVar[int] = ContextVar("number")


class Ended(BaseException):
    """An exception that is not an Exception."""


async def test_a_call_runs_in_the_context_of_its_caller(url: str, tmp_path: Path) -> None:
    buffer = await opened(url, tmp_path)
    assert await together(buffer, *[lambda _: NUMBER.get()] * 3) == [0, 1, 2]


async def test_every_call_of_a_batch_gets_a_result_after_any_exception(url: str, tmp_path: Path) -> None:
    def end(_: Any) -> None:
        raise Ended

    buffer = await opened(url, tmp_path)
    assert [type(result) for result in await together(buffer, lambda _: 1, end, lambda _: 2)] == [Ended] * 3
    assert await together(buffer, lambda _: 1) == [1]


async def test_a_lost_database_ends_all_calls_of_a_batch_at_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        monkeypatch.setattr(buffer._database, "_once", lose)
        raise ValueError

    def lose(*_: object) -> None:
        lost.append(None)
        raise InvalidRequestError("gone")

    buffer = await opened(url, tmp_path)
    lost: list[None] = []
    results = await together(buffer, lambda _: 1, fail, lambda _: 2)
    assert [type(result) for result in results] == [RoleFailed] * 3
    assert len(lost) == 1


async def test_a_wait_reads_the_tables_only_after_a_commit(each_url: str, tmp_path: Path) -> None:
    buffer, other = await opened(each_url, tmp_path), make_end(each_url, make_schedule(), tmp_path)
    config = SqlBuffer.Config(url=each_url)
    mine, theirs = (SqlBuffer.open_board(config, name="run") for _ in range(2))
    table: Any = mine._table
    taking = asyncio.ensure_future(buffer.take(2, 0))
    polling = asyncio.ensure_future(mine.poll(lambda values: "here" in values, 30.0))

    async def reads() -> list[int]:
        """Of the buffer and of the board in half a second."""
        with counted(buffer) as of_buffer, counted(table) as of_board:
            await asyncio.sleep(0.5)
        return [sum(text.startswith("BEGIN") for text, _ in statements) for statements in (of_buffer, of_board)]

    at_most = 0 if each_url.startswith("sqlite") else 1  # once a second, in case a notification was lost
    first = [0, 0]
    for _ in range(40):  # a busy machine begins late
        newest = await reads()
        first = [sum(pair) for pair in zip(first, newest, strict=True)]
        if min(first) > 0 and max(newest) <= at_most:  # both have read the tables once
            break
    assert min(first) > 0
    assert max(await reads()) <= at_most
    theirs.write(lambda values: {**values, "here": True})
    assert "here" in await asyncio.wait_for(polling, 60)
    await played(other, 2)
    assert len(await asyncio.wait_for(taking, 60)) == 2


async def test_a_wait_on_a_server_outlives_its_connections(postgres: Server, tmp_path: Path) -> None:
    url = postgres.create_database(uuid.uuid4().hex)
    buffer, other = await opened(url, tmp_path), make_end(url, make_schedule(), tmp_path)
    taking = asyncio.ensure_future(buffer.take(2, 0))

    async def dropped() -> bool:
        listens = buffer._database.commits() is not None
        return listens and await asyncio.to_thread(postgres.drop_connections) > 0

    for _ in range(2):  # it listens, again
        await until(dropped)
    await played(other, 2)
    assert len(await asyncio.wait_for(taking, 60)) == 2


async def test_waiting_never_holds_up_the_event_loop(url: str, tmp_path: Path) -> None:
    buffer = await opened(url, tmp_path)
    await buffer.advance("e", 0)
    blocker = Database(url)

    def hold(connection: sa.Connection) -> None:
        del connection
        entered.set()
        release.wait(120)

    entered, release = threading.Event(), threading.Event()
    holding = asyncio.create_task(asyncio.to_thread(blocker.transact, hold))
    await asyncio.to_thread(entered.wait, 60)
    waits = [asyncio.create_task(buffer.lease("e")) for _ in range(2)]
    loop = asyncio.get_running_loop()
    late = 0.0
    for _ in range(20):
        started = loop.time()
        await asyncio.sleep(0.01)
        late = max(late, loop.time() - started)
    assert not any(wait.done() for wait in waits)  # they cannot get on while another process writes
    release.set()
    await holding
    assert {lease.slot for lease in await asyncio.gather(*waits) if lease} == {0, 1}
    assert late < 4.0


# --------------------------------------------------------------------------- what it costs


@contextmanager
def counted(buffer: SqlBuffer) -> Generator[list[tuple[str, Any]]]:
    """The statements that are executed in the block."""
    statements: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        statements.append((statement, parameters))

    engine = buffer._database._engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


def searches(statements: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Those that look for rows, with the parameters of one execution."""
    kinds = ("SELECT trivium", "SELECT count", "UPDATE", "DELETE")
    return [(s, p[0] if isinstance(p, list) else p) for s, p in statements if s.startswith(kinds)]


@pytest.mark.parametrize("ordered", [True, False])
async def test_no_operation_costs_more_where_there_are_more_rows(url: str, tmp_path: Path, ordered: bool) -> None:
    change = {"groups_per_step": 5000, "max_staleness": 1, "deterministic": ordered}
    buffer = await opened(url, tmp_path, **change)
    await played(buffer, 1)
    await buffer.take(1, 0)
    numbers: list[int] = []
    for rows in (0, 300):
        await played(buffer, rows)
        await buffer.advance("e", 0)
        with counted(buffer) as statements:
            for _ in range(3):
                await buffer.put("e", make_group(await leased(buffer)))
            await buffer.take(3, 0)
            await buffer.refuse(1)
            await buffer.counts()
        numbers.append(len(statements))
    assert numbers[0] == numbers[1]
    assert numbers[0] < 75
    for statement, parameters in searches(statements):
        plan = buffer._database.read(
            lambda connection, s=statement, p=parameters: connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {s}", p).all()
        )
        for *_, detail in plan:
            assert "SCAN" not in detail, (statement, plan)
            assert "TEMP B-TREE" not in detail, (statement, plan)


@pytest.mark.parametrize("ordered", [True, False])
async def test_no_operation_reads_rows_in_vain_on_a_server_that_knows_nothing_of_the_table(
    postgres: Server, tmp_path: Path, ordered: bool
) -> None:
    url = postgres.create_database(uuid.uuid4().hex)
    buffer = await opened(url, tmp_path, groups_per_step=5000, max_staleness=1, deterministic=ordered)
    await played(buffer, 60)
    await buffer.take(20, 0)
    with counted(buffer) as statements:
        await buffer.put("e", make_group(await leased(buffer)))
        await buffer.take(3, 0)
        await buffer.take(3, 1)  # now what is older would be evicted, if there were any
        await buffer.taken_groups([20, 21, 22])
        await buffer.counts()

    def read_in_vain(connection: sa.Connection, statement: str, parameters: Any) -> int:
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # which is right for a table of a few pages
        rows = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, TIMING OFF) {statement}", parameters).scalars().all()
        return sum(int(row.rpartition(":")[2]) for row in rows if "Rows Removed" in row)

    # Of a list of slots the planner rightly thinks that a small table is as soon read as searched.
    found = [(statement, parameters) for statement, parameters in searches(statements) if " IN (" not in statement]
    assert len(found) > 15
    for statement, parameters in found:
        in_vain = buffer._database.transact(lambda c, s=statement, p=parameters: read_in_vain(c, s, p))
        assert in_vain < 5, statement


async def test_a_transaction_whose_last_statement_fails_changes_nothing(each_url: str, tmp_path: Path) -> None:
    buffer = await opened(each_url, tmp_path)
    await buffer.advance("e", 0)
    taken = {"buffer": "run/stage-0", "slot": 0, "attempt": 0, "state": "called_off"}
    changed(each_url, sa.insert(SLOTS).values(taken), sa.delete(CALLS))
    with refused(RoleFailed, "database", "trivium_slots" if each_url.startswith("sqlite") else "trivium_slots_pkey"):
        await buffer.lease("e")
    calls = sa.select(sa.func.count()).select_from(CALLS)
    assert Database(each_url).read(lambda connection: connection.execute(calls).scalar_one()) == 0
    changed(each_url, sa.delete(SLOTS))
    assert await leased(buffer) == Lease(0)


# --------------------------------------------------------------------------- the board


def test_a_board_in_a_database_loses_no_write_of_any_process(url: str) -> None:
    processes = [fork_server().Process(target=count_on_board, args=(url, 40)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    board = SqlBuffer.open_board(SqlBuffer.Config(url=url), name="run")
    assert board.read() == {"count": 120}
    assert SqlBuffer.open_board(SqlBuffer.Config(url=url), name="other").read() == {}


async def test_a_board_shows_what_was_written_before(each_url: str) -> None:
    """Also before the server has notified anyone of it."""
    one, other = (SqlBuffer.open_board(SqlBuffer.Config(url=each_url), name="run") for _ in range(2))
    for number in range(60):
        one.write(lambda values, n=number: {**values, "n": n})
        assert one.read() == {"n": number}
        assert await other.poll(lambda _: True, 30.0) == {"n": number}
        assert other.read() == {"n": number}


# --------------------------------------------------------------------------- the config


def test_a_file_is_relative_to_the_config_and_a_server_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section: Any = plugin("buffers")({"kind": "sql", "url": "sqlite:///shared/run.db"})
    assert Database(section.url).read(lambda connection: connection.execute(sa.select(1)).scalar_one()) == 1
    assert (tmp_path / "shared" / "run.db").is_file()
    assert SqlBuffer.Config().url == f"sqlite+pysqlite:///{tmp_path / 'trivium.db'}"
    assert SqlBuffer.Config(url="postgres://me:secret@host/db").url == "postgresql+psycopg://me:secret@host/db"


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite://", "sqlite:///:memory:", "no url at all"])
def test_a_database_that_no_other_process_reaches_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite"):
        SqlBuffer.Config(url=url)
    with refused(ConfigError, repr(url)):
        Database(url)


@pytest.mark.parametrize("url", ["postgresql://me:secret@host/db", "postgresql://me@host/db?password=secret"])
def test_a_password_in_the_url_is_refused_without_being_repeated(url: str) -> None:
    with refused(ConfigError, "PGPASSWORD", "~/.pgpass") as caught:
        configured(buffer={"kind": "sql", "url": url}, run={"mode": "train"}, sync={"method": "checkpoint"})
    assert [problem.where for problem in caught.value.problems] == ["buffer.url"]
    assert "secret" not in str(caught.value)


def test_a_missing_driver_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with refused(MissingPackage, "pip install 'trivium[postgres]'"):
        Database("postgresql://me:secret@host/db")


def test_an_error_of_the_database_itself_names_it_without_the_password(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with refused(RoleFailed, "database", tmp_path / "taken"):
        Database(f"sqlite:///{tmp_path / 'taken'}").create(sa.MetaData())
    with refused(RoleFailed, "database", "me:***@127.0.0.1:1/db") as caught:
        Database("postgresql://me:secret@127.0.0.1:1/db", patience_s=0.2).create(sa.MetaData())
    assert "secret" not in str(caught.value)


async def test_groups_that_were_never_taken_are_not_past(url: str, tmp_path: Path) -> None:
    buffer = await opened(url, tmp_path)
    await played(buffer, 2)
    with refused(DataError, "[1]"):
        await buffer.taken_groups([1])
    await buffer.take(2, 0)
    assert [group.task.task_id for group in await buffer.taken_groups([1])] == [TASKS[1].task_id]
