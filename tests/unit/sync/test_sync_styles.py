"""Who decides when weights travel: the schedule, the trainer or the explorers; and that nobody is left waiting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from configs import configured, problems_of
from example_counts import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sessions import TASKS, Lengths, Session
from tests.waiting import until
from trivium.buffers.strategies import DefaultStrategy
from trivium.evaluate import Measurements, RemoteEvaluator
from trivium.foundation.board import MemoryBoard, Values
from trivium.foundation.errors import VersionGone
from trivium.foundation.run_role import live_explorers
from trivium.loops import train_loop
from trivium.schedule import Cadence, Schedule
from trivium.types import Capabilities, Group, RunningStatus, Sample, SyncStyle

FIXED, BY_TRAINER, BY_EXPLORER = SyncStyle
STEPS = 9


class Noted(MemoryBoard):
    """A board that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.polls = self.changes = 0
        self.published: list[int] = []

    def write(self, change: Callable[[Values], Values]) -> None:
        super().write(change)
        self.changes += 1
        self.published += [v for v in self.read().get("versions", []) if v not in self.published]

    async def poll(self, until: Callable[[Values], bool], patience_s: float) -> Values:
        self.polls += 1
        return await super().poll(until, patience_s)


def session(schedule: Schedule, directory: Path, style: SyncStyle, seed: int, board: Noted, **options: Any) -> Session:
    dice = random.Random(seed)
    return Session(
        schedule,
        directory,
        lambda _: Lengths(dice),
        style=style,
        make_board=lambda: board,
        train_s=lambda: dice.choice([0, 0.001, 0.003]),
        **options,
    )


@settings(max_examples=number_of(25))
@given(
    style=st.sampled_from(SyncStyle),
    ahead=st.integers(0, 3),
    interval=st.integers(1, 3),
    groups=st.integers(1, 3),
    over=st.integers(0, 1),
    explorers=st.integers(1, 3),
    deaths=st.integers(0, 2),
    collective=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_no_style_leaves_anybody_waiting_or_asking_all_the_time(
    style: SyncStyle,
    ahead: int,
    interval: int,
    groups: int,
    over: int,
    explorers: int,
    deaths: int,
    collective: bool,
    seed: int,
) -> None:
    """Explorers may die meanwhile, in an exchange too, and others come in their place."""
    schedule = Schedule(
        TASKS,
        seed=seed,
        groups_per_step=groups,
        group_size=2,
        sync_interval=interval,
        over_rollout=over,
        max_staleness=interval - 1 + ahead,
        steps=STEPS,
    )
    board = Noted()
    with TemporaryDirectory() as directory:
        options = {"explorers": explorers, "deaths": [0.01] * deaths, "collective": collective}
        done = asyncio.run(session(schedule, Path(directory), style, seed, board, **options).live())
    assert done.engine.version == STEPS
    assert max(v - g.oldest_version for v, played in done.buffer.taken for g in played) <= schedule.max_staleness
    assert board.published == sorted(set(board.published))
    if style is FIXED:  # whoever comes late to collective exchanges needs one of its own
        assert set(board.published) >= set(range(0, STEPS + 1, interval))
        assert len(board.published) <= STEPS // interval + 1 + (collective * (explorers + deaths))
    # Everybody looks when something has changed, and not otherwise.
    roles = 5 * (explorers + deaths) + 3
    assert board.polls <= roles * (board.changes + 2)
    assert board.changes <= 12 * (STEPS + 1) * (explorers + deaths + 1)


@pytest.mark.parametrize("style", SyncStyle)
async def test_an_explorer_that_asks_while_the_trainer_waits_gets_weights(style: SyncStyle, tmp_path: Path) -> None:
    """Where the style lets it: with `fixed` it gets what the schedule publishes."""
    schedule = Schedule(TASKS, seed=0, groups_per_step=1, group_size=1, max_staleness=4, sync_interval=3, steps=6)
    board = Noted()
    life = session(schedule, tmp_path, style, 0, board)
    async with hand_fed(life) as (feed, sync):
        await feed(0)
        waiting = asyncio.ensure_future(sync.next_version("hand", 0, newest=True))
        async with asyncio.timeout(60):  # the trainer waits for groups, and does not look all the time
            polls = -1
            while polls != board.polls:
                polls = board.polls
                await asyncio.sleep(0.1)
        assert (board.published, waiting.done()) == ([0], False)
        sync.request_weights("hand", True)
        if style is FIXED:
            await asyncio.sleep(0.05)  # in which it would end
            assert not waiting.done()
            await feed(0)
            await feed(0)
        version = await asyncio.wait_for(waiting, 60)
        assert version == (3 if style is FIXED else 1)
        assert life.trainer.train_step_num == version
        sync.adopted("hand", version)
        assert board.published == [0, version]


async def test_a_trainer_whose_interval_is_over_asks_and_is_answered(tmp_path: Path) -> None:
    """No explorer lacks anything to play: it is the trainer who wants newer weights to be used."""
    schedule = Schedule(TASKS, seed=0, groups_per_step=1, group_size=1, max_staleness=9, sync_interval=2, steps=6)
    board = Noted()
    life = session(schedule, tmp_path, BY_TRAINER, 0, board)
    async with hand_fed(life) as (feed, sync):
        loaded = 0
        for step in range(1, 6):
            waiting = asyncio.ensure_future(sync.next_version("hand", loaded, newest=True))
            await feed(loaded)
            if step % 2 == 0:
                loaded = await asyncio.wait_for(waiting, 60)
                sync.adopted("hand", loaded)
                assert loaded == step
                assert sync.trainer_status is RunningStatus.RUNNING
            else:
                await asyncio.sleep(0.05)  # in which it would end
                assert not waiting.done(), step
            waiting.cancel()
        assert board.published == [0, 2, 4]


@pytest.mark.parametrize("style", [BY_TRAINER, BY_EXPLORER])
async def test_a_trainer_that_has_groups_to_learn_from_keeps_to_its_interval(
    style: SyncStyle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked: explorers at their bound ask all the time."""
    monkeypatch.setattr("trivium.publisher._GRACE_S", 600.0)  # on a busy machine, it would wait for the hand
    schedule = Schedule(TASKS, seed=0, groups_per_step=1, group_size=1, max_staleness=9, sync_interval=3, steps=8)
    board = Noted()
    life = session(schedule, tmp_path, style, 0, board)
    async with hand_fed(life) as (feed, sync):
        for _ in range(7):
            sync.request_weights("hand", True, idle=True)
            await feed(0)
        assert board.published == [0, 3, 6]


@pytest.mark.parametrize("style", [BY_TRAINER, BY_EXPLORER])
async def test_an_explorer_that_asks_for_more_than_a_slot_is_served_after_the_step(
    style: SyncStyle, tmp_path: Path
) -> None:
    """As Trinity-RFT's trainer does: whatever the interval is. What was offered is not offered again."""
    schedule = Schedule(TASKS, seed=0, groups_per_step=1, group_size=1, max_staleness=9, sync_interval=5, steps=8)
    board = Noted()
    life = session(schedule, tmp_path, style, 0, board)
    async with hand_fed(life) as (feed, sync):
        sync.request_weights("hand", True)
        await asyncio.sleep(0.05)  # in which it would be published
        assert (board.published, life.trainer.need_sync()) == ([0], False)
        await feed(0)
        await until(lambda: board.published == [0, 1])
        sync.request_weights("hand", False)
        await feed(0)
        assert not life.trainer.need_sync()
        sync.request_weights("hand", True)  # now the trainer waits for groups
        await until(lambda: board.published == [0, 1, 2])


@pytest.mark.parametrize("style", SyncStyle)
async def test_versions_that_anybody_can_fetch_are_offered_without_explorers(style: SyncStyle, tmp_path: Path) -> None:
    """With `fixed`, at the multiples of its interval; a channel whose versions nobody could fetch gets none."""

    class Stored(DefaultStrategy):
        async def sample(self, count: int, version: int) -> Sample:
            return Sample([Group(version, TASKS[0], ())] * count)

    for keeps in (True, False):
        schedule = Schedule(TASKS, seed=0, groups_per_step=1, group_size=1, sync_interval=3, steps=7, max_staleness=2)
        board = Noted()
        life = session(schedule, tmp_path / str(keeps), style, 0, board)
        trainer = life.prepare()
        life.buffer.capabilities = Capabilities(explored=False)
        trainer.groups.strategy = Stored(DefaultStrategy.Config(), buffer=life.buffer)
        trainer.publisher.keeps_versions = keeps
        life.synchronizer.open()
        await train_loop(trainer)
        assert board.published == ([] if not keeps else [0, 3, 6] if style is FIXED else [0])


async def test_explorers_ask_after_an_interval_of_groups_and_when_they_have_nothing_to_play(tmp_path: Path) -> None:
    board = Noted()
    schedule = Schedule(TASKS, seed=0, groups_per_step=2, group_size=1, max_staleness=9, sync_interval=2, steps=20)
    asked: list[tuple[int, bool]] = []

    def note(done: Session) -> None:
        original = done.synchronizer.request_weights

        def request(name: str, requested: bool = True, *, idle: bool = False) -> None:
            version = live_explorers(board.read())[name]["version"]
            if requested and version is not None:
                asked.append((len(done.buffer.leased), len(done.buffer.leased) < schedule.admitted(version)))
            original(name, requested, idle=idle)

        done.synchronizer.request_weights = request

    life = session(schedule, tmp_path, BY_EXPLORER, 0, board)
    life.began = note
    await life.live()
    # Two steps' worth of two groups: then it asks, though it could go on. At last nothing is left to play.
    assert asked[0] == (4, True)
    assert asked[-1][1] is False
    assert len(board.published) >= 3


async def test_who_comes_while_the_trainer_waits_for_an_evaluation_gets_weights_and_plays_it(tmp_path: Path) -> None:
    """With a collective channel nothing lies anywhere to be fetched: the trainer must offer again."""
    schedule = Schedule(TASKS, seed=0, steps=1)
    life = session(schedule, tmp_path, FIXED, 0, Noted(), collective=True)
    trainer = life.prepare()
    sync = life.synchronizer
    trainer.measurements = Measurements(RemoteEvaluator(sync, "test"), cadence=Cadence(ends=True))
    sync.open()
    training = asyncio.ensure_future(train_loop(trainer))

    async def comes(name: str) -> tuple[int, int]:
        await sync.join(name)
        while True:
            version = await sync.next_version(name, None, newest=True)
            try:
                await asyncio.to_thread(lambda version=version: list(life.end(name).collect(version)))
                break
            except VersionGone:  # the exchange had begun without it: explorers ask again
                await asyncio.sleep(0.01)  # the trainer has the table meanwhile
        sync.adopted(name, version)
        return await sync.next_evaluation(name, 0)

    async with asyncio.timeout(60):
        assert await comes("one") == (1, 0)
        sync.mark_dead("one", "killed while it evaluated", replaced=True)
        assert await comes("two") == (1, 0)
        sync.answer_evaluation(1, {"eval/test/accuracy": 0.25})
        await until(lambda: trainer.record.values.get("accuracy_before") is not None)
    assert trainer.record.values["accuracy_before"] == 0.25
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)


class hand_fed:
    """A trainer, and an explorer "hand" that plays when it is told to: a group of a version for the next step."""

    def __init__(self, life: Session) -> None:
        self.life = life

    async def __aenter__(self) -> tuple[Callable[[int], Any], Any]:
        life = self.life
        trainer = life.prepare()
        sync = life.synchronizer
        sync.open()
        self.training = asyncio.ensure_future(train_loop(trainer))
        await sync.join("hand")
        assert await sync.next_version("hand", None, newest=True) == 0
        sync.adopted("hand", 0)
        explorer = life._explorer(0)

        async def feed(version: int) -> None:
            before = trainer.train_step_num
            await life.buffer.advance("hand", version)
            lease = await life.buffer.lease("hand")
            assert lease is not None
            group: Group = await explorer.rollout_slot(life.schedule, lease)
            await life.buffer.put("hand", group)
            await until(lambda: trainer.train_step_num != before)

        return feed, sync

    async def __aexit__(self, *_: object) -> None:
        self.training.cancel()
        await asyncio.gather(self.training, return_exceptions=True)


@pytest.mark.parametrize("style", [BY_TRAINER, BY_EXPLORER])
def test_a_deterministic_run_keeps_to_the_schedule(style: SyncStyle) -> None:
    assert list(problems_of(configured, schedule={"deterministic": True}, sync={"style": style})) == ["sync.style"]
