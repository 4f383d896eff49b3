"""Real processes, a real server: whoever dies at whatever moment, every group is trained on exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from failing import refused
from postgres import Server
from sql_roles import make_end, make_group, make_schedule, train, write
from sqlalchemy.exc import OperationalError

from tests.processes import fork_server
from tests.waiting import until
from trivium.buffers.slot_machine import Slots
from trivium.buffers.slots import SlotState
from trivium.buffers.sql.buffer import SqlBuffer
from trivium.buffers.sql.database import Database, SqlTable
from trivium.buffers.sql.slot_tables import CALLS, SLOTS
from trivium.foundation.errors import RoleFailed, SyncError
from trivium.types import Lease


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'buffer.db'}"
    return request.getfixturevalue("postgres").create_database(uuid.uuid4().hex)


def states(url: str) -> dict[str, int]:
    """How many rows are in each state."""
    query = sa.select(SLOTS.c.state, sa.func.count()).group_by(SLOTS.c.state)
    return Database(url).read(lambda connection: {row[0]: row[1] for row in connection.execute(query)})


def test_processes_that_are_killed_lose_and_repeat_nothing(url: str, tmp_path: Path) -> None:
    number, chance = 240, random.Random(0)
    checkpoint, rollouts, writers = tmp_path / "checkpoint.json", tmp_path / "rollouts", 0
    running: dict[str, Any] = {}
    kills = {"write": 0, "train": 0}

    def keep_running() -> None:
        nonlocal writers
        for place in ("train", "write-0", "write-1"):
            if place in running and running[place].is_alive():
                continue
            if place in running:
                assert running[place].exitcode <= 0, f"{place} failed by itself"
            who: tuple[Any, ...] = (checkpoint,) if place == "train" else (f"explorer-{writers}",)
            writers += place != "train"
            target = train if place == "train" else write
            name = place if place == "train" else who[0]
            running[place] = fork_server().Process(
                target=target, args=(url, number, rollouts, *who), name=name, daemon=True
            )
            running[place].start()

    def trained() -> list[int]:
        return json.loads(checkpoint.read_text())["trained"] if checkpoint.exists() else []

    deadline = time.monotonic() + 200
    while len(trained()) < number:
        assert time.monotonic() < deadline, (states(url), len(trained()))
        keep_running()
        time.sleep(chance.uniform(0.02, 0.12))  # a kill at a random moment
        if sum(kills.values()) < 12 and len(trained()) < number - 30:
            victim = ("train", "write-0", "write-1")[sum(kills.values()) % 3]
            running[victim].kill()
            running[victim].join()
            kills[victim.partition("-")[0]] += 1
            if victim != "train":  # as the trainer's synchronizer does
                asyncio.run(release(url, rollouts, running[victim].name))
    for process in running.values():
        process.kill()
        process.join()
    assert min(kills.values()) >= 3, kills
    assert sorted(trained()) == list(range(number))
    assert states(url)[SlotState.CONSUMED] == number


async def release(url: str, rollouts: Path, owner: str) -> None:
    end = make_end(url, make_schedule(), rollouts)
    # The trainer died before it opened the buffer, or another one took over: its `restore` takes all leases back.
    with suppress(RoleFailed, SyncError):
        await end.counts()  # from now on it belongs to the session of the trainer that is there
        await end.release(owner)


async def test_dropped_connections_and_a_server_that_restarts_change_nothing(postgres: Server, tmp_path: Path) -> None:
    url, number = postgres.create_database(uuid.uuid4().hex), 75
    schedule = make_schedule(groups_per_step=number, max_staleness=1, steps=1)
    trainer = make_end(url, schedule, tmp_path, patience_s=60)
    await trainer.restore(None, 0)
    drops, restarted, played, done = 0, False, list[int](), asyncio.Event()

    async def disturb() -> None:
        nonlocal drops, restarted
        while not done.is_set():
            drops += await asyncio.to_thread(postgres.drop_connections)
            if len(played) > number / 2 and not restarted:
                restarted = True
                await asyncio.to_thread(postgres.stop)
                await asyncio.to_thread(postgres.start)
            before = len(played)
            await until(lambda before=before: len(played) != before or done.is_set(), 120)  # or it would never get on

    async def explore(owner: str) -> None:
        buffer = make_end(url, schedule, tmp_path, patience_s=60)
        await buffer.advance(owner, 0)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                lease = await buffer.lease(owner)
                assert lease is not None
                await buffer.put(owner, make_group(lease))
                played.append(lease.slot)

    async def learn() -> list[int]:
        slots = [group.slot for _ in range(number // 3) for group in await trainer.take(3, 0)]
        await trainer.close()
        done.set()
        return slots

    taken, *_ = await asyncio.gather(learn(), *map(explore, ("a", "b", "c")), disturb())
    assert sorted(taken) == sorted(played) == list(range(number))
    assert drops > 20
    assert restarted
    assert states(url) == {SlotState.CONSUMED: number}


class Doubtful(Database):
    """Commits, and then loses the connection before it can say so: every other time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lost = 0
        self._times = 0

    def _once(self, work: Any, reads: bool) -> Any:
        answer = super()._once(work, reads)
        self._times += 1
        if self._times % 2 and not reads:
            self.lost += 1
            raise OperationalError("COMMIT", {}, RuntimeError("gone"), connection_invalidated=True)
        return answer


async def test_a_call_whose_answer_was_lost_is_done_once(url: str, tmp_path: Path) -> None:
    buffer = make_end(url, make_schedule(max_staleness=1), tmp_path)
    buffer._database = doubtful = Doubtful(url)
    await buffer.restore(None, 0)
    await buffer.advance("e", 0)
    await buffer.advance("f", 0)
    held = [await buffer.lease("e"), await buffer.lease("f"), await buffer.lease("e")]
    assert [lease and lease.slot for lease in held] == [0, 1, 2]
    assert await buffer.release("f") == 1
    await buffer.put("e", make_group(held[0]))
    await buffer.put("e", make_group(held[2]).refused("unwanted"))
    assert [group.slot for group in await buffer.take(1, 0)] == [0]
    await buffer.refuse(2)
    state = await buffer.state()
    assert state == {
        "consumed_below": 1,
        "consumed": [2],
        "attempts": {},
        "refused": 2,
        "evicted": 0,
        "called_off": 0,
        "given_up": 0,
        "dropped": 1,
    }
    await buffer.advance("e", 0)
    assert await buffer.lease("e") is not None
    await buffer.advance("f", 1)
    for _ in range(2):
        lease = await buffer.lease("f")
        assert lease is not None
        await buffer.put("f", make_group(lease, 1))
    await buffer.take(2, 1)
    assert [lease.slot for lease in await buffer.cancelled_leases("e")] == [1]
    assert (await buffer.counts())["called_off"] == 1
    assert doubtful.lost >= 15
    calls = sa.select(sa.func.count()).select_from(CALLS)
    assert doubtful.read(lambda connection: connection.execute(calls).scalar_one()) <= 2

    board, other = SqlTable(doubtful, "board"), SqlTable(Database(url), "board")
    assert board.swap(0, {"n": 1})
    assert board.load() == (1, {"n": 1})
    assert board.swap(1, {"n": 2})
    assert not board.swap(1, {"n": 3})
    assert other.swap(2, {"n": 4})
    assert other.load() == (3, {"n": 4})


async def test_a_server_that_is_gone_is_named_in_time(postgres: Server, tmp_path: Path) -> None:
    url = postgres.create_database(uuid.uuid4().hex)
    buffer = make_end(url, make_schedule(), tmp_path, patience_s=3)
    await buffer.restore(None, 0)
    await buffer.advance("e", 0)
    board = SqlBuffer.open_board(SqlBuffer.Config(url=url, patience_s=3), name="run")
    board.write(lambda values: {"on": True})
    waiting = asyncio.ensure_future(buffer.take(2, 0))
    await asyncio.sleep(0.1)  # it waits; the rest holds at any moment
    postgres.stop()
    started = time.monotonic()
    try:
        writing = asyncio.to_thread(board.write, lambda values: {})
        ends = await asyncio.gather(waiting, buffer.lease("e"), writing, return_exceptions=True)
        # The patience, and one last attempt to connect.
        assert time.monotonic() - started < 60
        assert SqlBuffer.Config().patience_s + 5 < 20
    finally:
        postgres.start()
    for end in ends:
        assert isinstance(end, RoleFailed)
        assert end.role == "database"
        assert f"127.0.0.1:{postgres.port}" in end.found
        assert end.asked
        assert end.do


class Cut:
    """A way to the server on which a COMMIT can be late: its sender is cut off at once, and it arrives afterwards."""

    def __init__(self, port: int) -> None:
        self._server, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.armed, self.cuts = False, 0
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = self._listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", self._server))
                for way in ((here, there, True), (there, here, False)):
                    threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, forth: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                if forth and self.armed and b"COMMIT" in data:
                    self.armed, self.cuts = False, self.cuts + 1
                    source.shutdown(socket.SHUT_RDWR)
                    time.sleep(0.3)  # its sender tries again meanwhile
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


async def test_a_commit_that_comes_after_its_sender_tries_again_is_found(postgres: Server, tmp_path: Path) -> None:
    url, cut = postgres.create_database(uuid.uuid4().hex), Cut(postgres.port)
    far = make_end(url.replace(f":{postgres.port}/", f":{cut.port}/"), make_schedule(max_staleness=1), tmp_path)
    try:
        cut.armed = True
        await far.restore(None, 0)
        await far.advance("e", 0)
        for slot in range(2):
            cut.armed = True
            lease = await far.lease("e")
            assert lease is not None
            assert lease.slot == slot
            cut.armed = True
            await far.put("e", make_group(lease))
        cut.armed = True
        assert len(await far.take(2, 0)) == 2
        cut.armed = True
        await far.refuse(5)
        assert (await far.state())["refused"] == 5
        assert states(url) == {SlotState.CONSUMED: 2}
    finally:
        cut.close()
    assert cut.cuts == 7


async def test_a_restore_whose_answer_was_lost_leaves_those_alone_who_came_since(url: str, tmp_path: Path) -> None:
    explorer = make_end(url, make_schedule(), tmp_path)

    class Slow(Doubtful):
        def _once(self, work: Any, reads: bool) -> Any:
            try:
                return super()._once(work, reads)
            finally:
                asyncio.run_coroutine_threadsafe(come(), loop).result(120)

    leases, loop = list[Lease](), asyncio.get_running_loop()

    async def come() -> None:
        if not leases:
            await explorer.advance("e", 0)
            lease = await explorer.lease("e")
            assert lease is not None
            leases.append(lease)

    trainer = make_end(url, make_schedule(), tmp_path)
    trainer._database = doubtful = Slow(url)
    await trainer.restore(None, 0)
    assert doubtful.lost == 1
    await explorer.put("e", make_group(leases[0]))


async def test_a_checkpoint_is_of_one_moment(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is dropped while the trainer looks is either in all of it or in none."""
    trainer, explorer = (make_end(url, make_schedule(), tmp_path) for _ in range(2))
    await trainer.restore(None, 0)
    await explorer.advance("e", 0)
    leases = [await explorer.lease("e") for _ in range(2)]
    before, loop, look = await trainer.state(), asyncio.get_running_loop(), Slots.state

    def slow(slots: Slots) -> dict[str, Any]:
        group = make_group(leases[1] or Lease(1)).refused("unwanted")
        asyncio.run_coroutine_threadsafe(explorer.put("e", group), loop).result(120)
        return look(slots)

    monkeypatch.setattr(Slots, "state", slow)
    assert await trainer.state() == before
    monkeypatch.undo()
    after = await trainer.state()
    assert (after["dropped"], after["consumed"]) == (1, [1])


async def test_a_peer_that_stands_still_in_mid_transaction_holds_nobody_up(postgres: Server, tmp_path: Path) -> None:
    url = postgres.create_database(uuid.uuid4().hex)
    buffer = make_end(url, make_schedule(), tmp_path, patience_s=4)
    await buffer.restore(None, 0)
    await buffer.advance("e", 0)
    frozen, entered, thaw = Database(url, patience_s=2), threading.Event(), threading.Event()

    def stand_still(connection: sa.Connection) -> None:
        connection.exec_driver_sql("SELECT * FROM trivium_buffers FOR UPDATE")
        entered.set()
        thaw.wait(100)

    standing = asyncio.ensure_future(asyncio.to_thread(frozen.transact, stand_still))
    await asyncio.to_thread(entered.wait, 60)
    lease = await buffer.lease("e")
    assert lease is not None
    assert not standing.done()
    thaw.set()
    await standing  # it is told that its transaction was ended, and does it again

    with psycopg.connect(url) as stranger:  # who may stand still as long as it likes
        stranger.execute("SELECT * FROM trivium_buffers FOR UPDATE")
        started = time.monotonic()
        with refused(RoleFailed, "database", "timeout", "buffer.patience_s"):
            await buffer.put("e", make_group(lease))
        assert time.monotonic() - started < 60
    await buffer.put("e", make_group(lease))


async def test_a_server_that_does_not_answer_is_named_in_time(postgres: Server, tmp_path: Path) -> None:
    url = postgres.create_database(uuid.uuid4().hex)
    buffer = make_end(url, make_schedule(), tmp_path, patience_s=2)
    await buffer.restore(None, 0)
    await buffer.advance("e", 0)
    processes = postgres.processes()
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    started = time.monotonic()
    try:
        async with asyncio.timeout(100):
            ends = await asyncio.gather(buffer.lease("e"), buffer.counts(), return_exceptions=True)
        # The patience, and one last attempt to connect.
        assert time.monotonic() - started < 60
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
    assert all(isinstance(end, RoleFailed) and end.role == "database" for end in ends), ends
    assert await buffer.lease("e") is not None
