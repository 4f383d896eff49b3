"""Who is where, who waits for whom, who died: two or three roles over one board, in one process and in a database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
from failing import refused

from tests.waiting import until
from trivium.buffers.sql.database import Database, SqlTable
from trivium.foundation.board import Board, MemoryBoard, SharedBoard, Values
from trivium.foundation.errors import ConfigError, RoleFailed, SyncError
from trivium.foundation.run_role import _without_beats, dead_explorers, live_explorers
from trivium.synchronizer import Synchronizer
from trivium.types import DAY, TRAINER, RunningStatus, SyncStyle

Make = Callable[..., Synchronizer]
"""Makes the synchronizer of one more role over the same board."""
HEARTBEAT_S = 0.4


@pytest.fixture(params=["memory", "database"])
def role(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    board = MemoryBoard()

    def make(deadline_s: float = 30.0, **options: Any) -> Synchronizer:
        database = request.param == "database"
        mine = SharedBoard(SqlTable(Database(f"sqlite:///{tmp_path / 'b.db'}"), "run")) if database else board
        return Synchronizer(Watched(mine), deadline_s=deadline_s, **options)

    return make


class Watched:
    """A board that keeps what each task that waits for a change has looked at last."""

    seen: ClassVar[WeakKeyDictionary[Any, Values]] = WeakKeyDictionary()

    def __init__(self, board: Board) -> None:
        self.board = board

    def read(self) -> Values:
        return self.board.read()

    def write(self, change: Callable[[Values], Values]) -> None:
        self.board.write(change)

    async def poll(self, until: Callable[[Values], bool], patience_s: float) -> Values:
        task = asyncio.current_task()

        def look(values: Values) -> bool:
            self.seen[task] = values
            return until(values)

        return await self.board.poll(look, patience_s)


async def trio(role: Make, **options: Any) -> tuple[Synchronizer, Synchronizer, Synchronizer]:
    """A trainer that has begun, and explorers "a" and "b" beside it."""
    trainer, a, b = (role(**options) for _ in range(3))
    trainer.open()
    for name, explorer in (("a", a), ("b", b)):
        explorer._incarnation = trainer._incarnation
        await explorer.join(name)
    return trainer, a, b


async def still_wait(sync: Synchronizer, *tasks: asyncio.Future[Any]) -> None:
    """Waits until the tasks have looked at what the board holds now; none may be done."""

    def looked() -> bool:
        values = _without_beats(sync.board.read())
        return all(task.done() or _without_beats(Watched.seen.get(task, {})) == values for task in tasks)

    await until(looked)
    for _ in range(3):  # what a look ends is done some turns of the event loop later
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def pending(sync: Synchronizer, awaitable: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """The task, once it waits."""
    waiting = asyncio.create_task(awaitable)
    await still_wait(sync, waiting)
    return waiting


def beats_of(trainer: Synchronizer) -> int:
    return trainer.board.read().get("beats", {}).get(TRAINER, 0)


async def soon(awaitable: Awaitable[Any], seconds: float = 60.0) -> Any:
    return await asyncio.wait_for(asyncio.ensure_future(awaitable), seconds)


@asynccontextmanager
async def going(*coroutines: Any) -> AsyncGenerator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --------------------------------------------------------------------------- statuses and versions


async def test_statuses_are_counted(role: Make) -> None:
    sync = role()
    assert sync.trainer_status is RunningStatus.STOPPED
    trainer, a, b = await trio(role)
    assert sync.trainer_status is RunningStatus.RUNNING
    assert trainer.get_explorer_status_counts()[RunningStatus.REQUIRE_SYNC] == 2
    a.adopted("a", 0)
    b.adopted("b", 0)
    b.request_weights("b")
    counts = {RunningStatus.RUNNING: 1, RunningStatus.REQUIRE_SYNC: 1}
    assert trainer.get_explorer_status_counts() == {**dict.fromkeys(RunningStatus, 0), **counts}
    b.request_weights("b", False)
    assert trainer.get_explorer_status_counts()[RunningStatus.RUNNING] == 2


async def test_next_version_waits_for_publish_from_another_thread(role: Make) -> None:
    trainer, a, _ = await trio(role)
    waiting = await pending(a, a.next_version("a", None, newest=True))
    await asyncio.to_thread(trainer.publish, 0)
    assert await soon(waiting) == 0


@pytest.mark.parametrize(("newest", "expected"), [(True, 4), (False, 3)])
async def test_an_explorer_follows_every_version_or_jumps_to_the_newest(
    role: Make, newest: bool, expected: int
) -> None:
    trainer, a, _ = await trio(role)
    for version in (1, 3, 4):
        trainer.publish(version)
    assert await a.next_version("a", 1, newest=newest) == expected


async def test_versions_only_grow_and_repeat_harmlessly(role: Make) -> None:
    sync = role()
    sync.publish(2)
    sync.publish(2)
    assert sync.published == (2,)
    with refused(SyncError, "version 1", "version 2"):
        sync.publish(1)


async def test_who_comes_late_begins_with_a_version_that_can_still_be_had(role: Make) -> None:
    trainer, a, _ = await trio(role)
    for version in range(6):
        trainer.publish(version, held=range(max(0, version - 1), version + 1))
    assert a.published == (4, 5)
    assert await a.next_version("a", None, newest=False) == 4


async def test_a_wait_that_is_not_answered_names_both_sides(role: Make) -> None:
    with refused(SyncError, "explorer 'a'", "version None", "next version"):
        await role(0.05).next_version("a", None, newest=True)
    with refused(SyncError, "trainer", "version 1", "evaluation"):
        await role(0.05).request_evaluation(1)


async def test_the_deadline_counts_from_the_last_sign_of_life_and_a_heart_is_none(role: Make) -> None:
    trainer, a, b = await trio(role, deadline_s=2.0)
    waiting = asyncio.ensure_future(a.next_version("a", None, newest=True))
    for step in range(50):  # 2.5 s, which is longer than the deadline
        await asyncio.sleep(0.05)
        trainer.report_step(step)
    trainer.publish(1)
    assert await waiting == 1
    b.heartbeat_s = 0.05
    with b.heartbeat("b"), refused(SyncError, "explorer 'a'", "2 s"):
        await a.next_version("a", 1, newest=True)


async def test_with_dynamic_by_trainer_an_explorer_answers_the_trainer(role: Make) -> None:
    trainer, a, _ = await trio(role, style=SyncStyle.DYNAMIC_BY_TRAINER)
    a.adopted("a", 0)
    waiting = await pending(a, a.next_version("a", 0, newest=True))
    assert live_explorers(trainer.board.read())["a"]["status"] == RunningStatus.RUNNING
    trainer.set_trainer_status(RunningStatus.REQUIRE_SYNC)
    values = await trainer.board.poll(lambda v: live_explorers(v)["a"]["status"] == RunningStatus.REQUIRE_SYNC, 60.0)
    assert live_explorers(values)["a"]["status"] == RunningStatus.REQUIRE_SYNC
    trainer.publish(3)
    assert await soon(waiting) == 3


# --------------------------------------------------------------------------- life and death


async def test_the_death_of_an_explorer_is_borne_and_its_slots_come_back_once(role: Make) -> None:
    trainer, a, b = await trio(role)
    reaped = list[str]()

    async def reap(name: str) -> None:
        reaped.append(name)

    async with going(trainer.monitor(TRAINER, reap), b.monitor("b")) as monitoring:
        a.mark_dead("a", "out of memory")
        a.mark_dead("a", "something later")
        values = await trainer.board.poll(lambda v: v["explorers"]["a"].get("reaped", False), 60.0)
        assert dead_explorers(values) == {"a": "out of memory"}
        await still_wait(trainer, *monitoring)
        assert reaped == ["a"]
        with refused(RoleFailed, "a failed", "memory"):
            await soon(a.monitor("a"))
        a.adopted("a", 7)  # the dead stay dead
        assert set(live_explorers(trainer.board.read())) == {"b"}
        b.mark_dead("b", "a broken engine")
        for task in monitoring:
            with refused(RoleFailed, "b failed", "broken engine"):
                await soon(task)


async def test_an_explorer_that_was_asked_to_stop_ends_no_run(role: Make) -> None:
    trainer, a, b = await trio(role)
    for name, sync in (("a", a), ("b", b)):
        stands = asyncio.Event()

        async def works(stands: asyncio.Event = stands, name: str = name, sync: Synchronizer = sync) -> None:
            with sync.report_failure(name):
                stands.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(works())
        await soon(stands.wait())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert dead_explorers(trainer.check_alive()) == {"a": "it was stopped", "b": "it was stopped"}
    assert live_explorers(trainer.board.read()) == {}


async def test_an_obituary_names_the_first_cause(role: Make) -> None:
    trainer, a, _ = await trio(role)
    with pytest.raises(ExceptionGroup), a.report_failure("a"):
        raise ExceptionGroup("many", [ExceptionGroup("few", [ValueError("the very first")]), KeyError("later")])
    assert dead_explorers(trainer.check_alive()) == {"a": "ValueError: the very first"}
    with pytest.raises(ZeroDivisionError), trainer.report_failure(TRAINER):
        raise ZeroDivisionError("the loss")
    with refused(RoleFailed, "trainer failed", "ZeroDivisionError"):
        a.check_alive()


async def test_a_heart_that_stops_is_a_death_and_a_busy_loop_is_none(role: Make) -> None:
    trainer, a, b = await trio(role, heartbeat_s=HEARTBEAT_S)
    reaped = list[str]()

    async def reap(name: str) -> None:
        reaped.append(name)

    with trainer.heartbeat(TRAINER), a.heartbeat("a"):
        async with going(trainer.monitor(TRAINER, reap), a.monitor("a")) as monitoring:
            with b.heartbeat("b"):
                threading.Event().wait(2 * HEARTBEAT_S)  # nobody's coroutines get on
                await asyncio.sleep(2 * HEARTBEAT_S)  # longer than a silent one has
                assert dead_explorers(a.check_alive()) == {}
            await trainer.board.poll(lambda v: bool(v["explorers"]["b"].get("reaped")), 60.0)
            assert dead_explorers(a.check_alive()) == {"b": f"no heartbeat for {HEARTBEAT_S} s"}
            assert (reaped, [task.done() for task in monitoring]) == (["b"], [False, False])


async def test_a_trainer_whose_heart_stops_ends_every_explorer(role: Make) -> None:
    trainer, a, b = await trio(role, heartbeat_s=HEARTBEAT_S)
    with a.heartbeat("a"), b.heartbeat("b"):
        async with going(a.monitor("a"), b.monitor("b"), a.next_version("a", None, newest=True)) as waiting:
            with trainer.heartbeat(TRAINER):
                await asyncio.sleep(2 * HEARTBEAT_S)  # longer than a silent one has
                assert not any(task.done() for task in waiting)
            for task in waiting:
                with refused(RoleFailed, "trainer failed", "no heartbeat", "0.4 s"):
                    await soon(task, 60.0)


async def test_a_role_that_is_done_may_stop_beating(role: Make) -> None:
    trainer, a, b = await trio(role, heartbeat_s=HEARTBEAT_S)
    with b.heartbeat("b"):
        with trainer.heartbeat(TRAINER), a.heartbeat("a"):
            trainer.finish()
            await soon(a.wait_finished("a"))
        async with going(b.monitor("b")) as (monitoring,):
            await asyncio.sleep(3 * HEARTBEAT_S)  # longer than a silent one has
            assert not monitoring.done()
        assert dead_explorers(b.check_alive()) == {}


async def test_who_did_not_look_for_a_while_accuses_nobody(role: Make) -> None:
    """The database was away, or this machine slept: the others could not be seen to beat."""
    trainer, a, _ = await trio(role, heartbeat_s=HEARTBEAT_S)
    board, looks, looked_at = trainer.board, list[float](), asyncio.Event()

    class Away:
        def __getattr__(self, name: str) -> Any:
            return getattr(board, name)

        async def poll(self, until: Callable[[Values], bool], patience_s: float) -> Values:
            looks.append(patience_s)
            if len(looks) in (2, 4):
                await asyncio.sleep(2 * HEARTBEAT_S)  # longer than a silent one has
                return board.read()
            if len(looks) == 5:
                await looked_at.wait()  # from now on it hears nothing, and may say so
            return await board.poll(until, 0.01)

    a.board = Away()
    async with going(a.monitor("a")) as (monitoring,):  # the others have no heartbeat
        await until(lambda: len(looks) >= 5)
        assert dead_explorers(a.check_alive()) == {}
        looked_at.set()
        with refused(RoleFailed, "trainer failed", "no heartbeat"):
            await soon(monitoring, 60.0)


async def test_a_heart_that_cannot_reach_the_board_is_heard(role: Make) -> None:
    _, a, _ = await trio(role, heartbeat_s=HEARTBEAT_S)
    board = a.board

    class ReadOnly:
        def __getattr__(self, name: str) -> Any:
            return getattr(board, name)

        def write(self, change: Callable[[Values], Values]) -> None:
            raise OSError("the disk is full")

    a.board = ReadOnly()
    with (
        a.heartbeat("a"),
        refused(RoleFailed, "a failed", "heartbeat stopped", "OSError"),
    ):
        await soon(a.monitor("a"))


async def test_a_name_is_free_once_its_dead_are_reaped(role: Make) -> None:
    trainer, a, b = await trio(role, heartbeat_s=HEARTBEAT_S)
    again = role(heartbeat_s=HEARTBEAT_S)
    again._incarnation = trainer._incarnation
    with refused(SyncError, "explorer 'a'", "run.explorer"):
        await again.join("a")
    seen = trainer.board.read().get("beats", {}).get("a", 0)
    released = asyncio.Event()

    async def reap(name: str) -> None:
        await released.wait()

    async with going(trainer.monitor(TRAINER, reap)):
        with trainer.heartbeat(TRAINER), b.heartbeat("b"):
            a.mark_dead("a", "killed")
            joining = await pending(again, again.join("a"))
            released.set()
            await soon(joining)
            assert live_explorers(again.board.read())["a"]["version"] is None
            # "b" saw the first "a" fall silent, and is late to say so.
            b.mark_dead("a", "no heartbeat", beats=seen)
            assert dead_explorers(b.check_alive()) == {}


# --------------------------------------------------------------------------- trainers come and go


async def test_a_trainer_that_was_started_again_ends_whoever_waited_for_the_first(role: Make) -> None:
    first, a, b = await trio(role)
    a.adopted("a", 0)
    waits = (
        a.next_version("a", 0, newest=True),
        a.next_evaluation("a", 0),
        a.wait_finished("a"),
        a.monitor("a"),
        b.next_version("b", None, newest=False),
        first.request_evaluation(1),
        first.monitor(TRAINER),
    )
    async with going(*waits) as waiting:
        await still_wait(first, *waiting)
        second = role()
        second.open()
        for task in waiting:
            with refused(RoleFailed, "trainer failed", "another one", "run.name"):
                await soon(task)
        before = second.board.read()
        a.adopted("a", 5)
        a.mark_dead("a", "too late")
        first.publish(9)
        first.finish()
        first.mark_dead(TRAINER, "too late")
        assert second.board.read() == before


async def test_a_trainer_that_was_started_again_ends_an_exchange_under_way(role: Make) -> None:
    first, a, _ = await trio(role, collective=True)
    gathering = await pending(first, first.ready_to_nccl_sync(TRAINER, 1, "here:1"))
    standing = await pending(a, a.ready_to_nccl_sync("a", 1))
    role().open()
    for waiting in (gathering, standing):
        with refused(RoleFailed, "another one", "run.name"):
            await soon(waiting)


async def test_a_stage_that_ends_is_no_failure_for_who_hears_of_it_late(role: Make) -> None:
    trainer, a, _ = await trio(role)
    async with going(a.monitor("a"), a.next_version("a", 0, newest=True), a.wait_finished("a")) as (
        monitoring,
        following,
        ended,
    ):
        await still_wait(trainer, monitoring, following, ended)
        trainer.finish()
        trainer.open(stage=1)
        await soon(ended)
        await still_wait(trainer, monitoring, following)
    assert live_explorers(trainer.board.read()) == {}  # the next stage begins without those of the last


async def test_explorers_meet_a_trainer_that_is_alive(role: Make) -> None:
    late = role(0.5, heartbeat_s=HEARTBEAT_S)
    with refused(SyncError, "explorer 'a'", "run.mode=train"):
        await late.wait_for_trainer("a")
    dead_trainer = role(heartbeat_s=HEARTBEAT_S)
    dead_trainer.open()
    with dead_trainer.heartbeat(TRAINER):
        await until(lambda: beats_of(dead_trainer))
    with refused(SyncError, "explorer 'a'", "run.mode=train"):
        await late.wait_for_trainer("a")  # what it left says RUNNING for ever
    a, trainer = role(heartbeat_s=HEARTBEAT_S), role(heartbeat_s=HEARTBEAT_S)
    meeting = await pending(a, a.wait_for_trainer("a"))
    trainer.open(stage=2, last=False)
    with trainer.heartbeat(TRAINER):
        assert await soon(meeting) == 2
        await a.join("a")
        trainer.finish()
        following = await pending(a, a.wait_for_trainer("a"))
        beats = beats_of(trainer)
        await until(lambda: beats_of(trainer) > beats + 2)
        await still_wait(a, following)  # a trainer that lives, but in the stage that is over
        trainer.open(stage=3)
        assert await soon(following) == 3
        trainer.mark_dead(TRAINER, "gone wrong")
        with refused(SyncError, "explorer 'b'", "run.mode=train"):
            await late.wait_for_trainer("b")


async def test_explorers_of_a_run_that_has_ended_are_told_so(role: Make) -> None:
    trainer, a, late = (role(heartbeat_s=HEARTBEAT_S, settings={"tasks": "these"}) for _ in range(3))
    trainer.open(stage=0, last=False)
    with trainer.heartbeat(TRAINER):
        assert await soon(a.wait_for_trainer("a")) is not None
        trainer.finish()
        trainer.open(stage=1, last=True)  # a short one: nobody was there to see it
        trainer.finish()
        assert not await soon(a.join("a"))  # its engine took so long to load that its stage is over
        assert await soon(a.wait_for_trainer("a")) is None
    assert await soon(late.wait_for_trainer("b")) is None
    trainer.open(stage=1, last=True)  # it dies after its last checkpoint
    restarted = role(heartbeat_s=HEARTBEAT_S, settings={"tasks": "these"})
    restarted.finish_run(stage=1)
    assert await soon(a.wait_for_trainer("a")) is None
    longer = role(0.5, heartbeat_s=HEARTBEAT_S, settings={"tasks": "these", "schedule.steps": "more"})
    with refused(SyncError, "explorer 'c'", "run.mode=train"):  # that trainer is yet to come
        await longer.wait_for_trainer("c")


async def test_an_explorer_that_starts_on_another_day_takes_the_day_of_the_trainer(role: Make) -> None:
    trainer, explorer = (
        role(heartbeat_s=HEARTBEAT_S, settings=settings)
        for settings in ({"tasks": "these", DAY: "2026-02-27"}, {"tasks": "these", DAY: "2026-02-28"})
    )
    trainer.open()
    with trainer.heartbeat(TRAINER):
        assert await soon(explorer.wait_for_trainer("a")) is not None
    assert explorer.settings[DAY] == "2026-02-27"


async def test_an_explorer_with_another_config_is_refused(role: Make) -> None:
    trainer, other = (
        role(heartbeat_s=HEARTBEAT_S, settings=settings)
        for settings in (
            {"tasks.train": "these", "sync": "same"},
            {"tasks.train": "others", "sync": "same", "evaluation": "any"},
        )
    )
    trainer.open()
    with (
        trainer.heartbeat(TRAINER),
        refused(ConfigError, "evaluation, tasks.train"),
    ):
        await soon(other.wait_for_trainer("a"))


# --------------------------------------------------------------------------- the collective exchange


async def test_an_exchange_is_between_those_who_lack_the_version(role: Make) -> None:
    trainer, a, b = await trio(role, collective=True)
    b.adopted("b", 1)
    gathering = await pending(trainer, trainer.ready_to_nccl_sync(TRAINER, 1, "here:1"))
    assert await a.next_version("a", None, newest=True) == 1
    standing = asyncio.ensure_future(a.ready_to_nccl_sync("a", 1))
    one, other = await soon(gathering), await soon(standing)
    assert one == other
    assert (one.number, one.version, one.members, one.address) == (1, 1, ("a",), "here:1")
    assert trainer.trainer_status is RunningStatus.RUNNING
    a.adopted("a", 1)
    assert await soon(trainer.ready_to_nccl_sync(TRAINER, 1, "here:1")) is None  # nobody lacks it
    gathering = await pending(trainer, trainer.ready_to_nccl_sync(TRAINER, 2, "here:2"))
    both = [asyncio.ensure_future(sync.ready_to_nccl_sync(name, 2)) for name, sync in (("b", b), ("a", a))]
    agreed = await soon(gathering)
    assert (agreed.number, agreed.members) == (3, ("a", "b"))
    assert await soon(asyncio.gather(*both)) == [agreed, agreed]


async def test_an_exchange_goes_on_without_those_who_die_or_stop_while_it_gathers(role: Make) -> None:
    trainer, a, b = await trio(role, collective=True)
    c = role(collective=True)
    c._incarnation = trainer._incarnation
    await c.join("c")
    gathering = await pending(trainer, trainer.ready_to_nccl_sync(TRAINER, 1, "here:1"))
    standing = await pending(a, a.ready_to_nccl_sync("a", 1))
    going_down = await pending(b, b.ready_to_nccl_sync("b", 1))
    b.mark_dead("b", "killed while it stood")
    c.set_explorer_status("c", RunningStatus.STOPPED)
    agreed = await soon(gathering)
    assert agreed.members == ("a",)
    assert await soon(standing) == agreed
    assert await soon(going_down) is None


async def test_an_exchange_waits_for_who_joins_while_it_gathers(role: Make) -> None:
    trainer, a, _ = await trio(role, collective=True)
    b, c = role(collective=True), role(collective=True)
    b._incarnation = c._incarnation = trainer._incarnation
    gathering = await pending(trainer, trainer.ready_to_nccl_sync(TRAINER, 1, "here:1"))
    await c.join("c")
    standing = [await pending(sync, sync.ready_to_nccl_sync(name, 1)) for name, sync in (("a", a), ("b", b))]
    await still_wait(trainer, gathering)
    assert (await soon(c.ready_to_nccl_sync("c", 1))).members == ("a", "b", "c")
    assert await soon(asyncio.gather(*standing)) == [await soon(gathering)] * 2


async def test_who_comes_with_another_version_in_mind_is_not_let_in(role: Make) -> None:
    trainer, a, b = await trio(role, collective=True)
    assert await soon(a.ready_to_nccl_sync("a", 1)) is None  # nothing was ever offered
    gathering = await pending(trainer, trainer.ready_to_nccl_sync(TRAINER, 2, "here:2"))
    assert await soon(a.ready_to_nccl_sync("a", 1)) is None
    both = asyncio.gather(a.ready_to_nccl_sync("a", 2), b.ready_to_nccl_sync("b", 2))
    assert (await soon(gathering)).members == ("a", "b")
    await both
    assert await soon(a.ready_to_nccl_sync("a", 2)) is None  # it is agreed upon already


async def test_who_waits_in_vain_for_an_exchange_says_for_whom(role: Make) -> None:
    trainer, a, _ = await trio(role, deadline_s=0.3, collective=True)
    with refused(SyncError, "trainer", "version 1", "exchange"):
        await trainer.ready_to_nccl_sync(TRAINER, 1, "here:1")
    with refused(SyncError, "explorer 'a'", "version 1", "exchange"):
        await a.ready_to_nccl_sync("a", 1)
    trainer.deadline_s = 60.0  # from here on, it is a death that ends the wait
    a.mark_dead("a", "killed")
    gathering = await pending(trainer, trainer.ready_to_nccl_sync(TRAINER, 2, "here:1"))
    a.mark_dead("b", "killed too")
    with refused(RoleFailed, "b failed", "killed too"):
        await soon(gathering)


# --------------------------------------------------------------------------- evaluation


async def test_one_explorer_that_has_the_version_plays_an_evaluation(role: Make) -> None:
    trainer, a, b = await trio(role)
    a.adopted("a", 3)
    b.adopted("b", 2)
    asking = await pending(trainer, trainer.request_evaluation(3))
    other = await pending(b, b.next_evaluation("b", 0))
    assert await soon(a.next_evaluation("a", 0)) == (1, 3)
    b.adopted("b", 3)
    await still_wait(b, other, asking)  # it is claimed
    a.answer_evaluation(1, {"eval/test/accuracy": 0.5})
    assert await soon(asking) == {"eval/test/accuracy": 0.5}
    following = await pending(a, a.next_evaluation("a", 1))
    asking = asyncio.ensure_future(trainer.request_evaluation(3))
    (done,), (left,) = await asyncio.wait({following, other}, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
    assert done.result() == (2, 3)
    a.answer_evaluation(1, {"stale": 1.0})
    await still_wait(trainer, asking)
    a.answer_evaluation(2, {"right": 1.0})
    assert await soon(asking) == {"right": 1.0}
    left.cancel()


async def test_two_that_want_the_same_evaluation_get_it_once(role: Make) -> None:
    trainer, a, b = await trio(role)
    for number in range(1, 6):
        a.adopted("a", number)
        b.adopted("b", number)
        asking = asyncio.ensure_future(trainer.request_evaluation(number))
        racing = {asyncio.ensure_future(s.next_evaluation(n, number - 1)) for n, s in (("a", a), ("b", b))}
        done, left = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
        await still_wait(trainer, *left)
        assert [task.result() for task in done] == [(number, number)]
        for task in left:
            task.cancel()
        a.answer_evaluation(number, {"n": float(number)})
        assert await soon(asking) == {"n": float(number)}


async def test_an_evaluation_whose_player_dies_is_played_by_another(role: Make) -> None:
    trainer, a, b = await trio(role)
    a.adopted("a", 0)
    b.adopted("b", 0)
    asking = await pending(trainer, trainer.request_evaluation(0))
    await soon(a.next_evaluation("a", 0))
    other = await pending(b, b.next_evaluation("b", 0))
    a.mark_dead("a", "killed")
    assert await soon(other) == (1, 0)
    b.answer_evaluation(1, {"n": 1.0})
    assert await soon(asking) == {"n": 1.0}
