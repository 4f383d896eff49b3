"""The loops under random durations, failures and deaths: whatever dies when, no group is trained on that is staler than
the bound, none twice, and what was not trained on was counted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from example_counts import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sessions import RENDERER, TASKS, Ledger, Session, memory_buffer
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.slots import SlotState
from trivium.buffers.sql.buffer import SqlBuffer
from trivium.policy import Policy
from trivium.protocols import Buffer
from trivium.schedule import Schedule
from trivium.types import Group, Message, Task

STEPS = 8


class Dawdling:
    """A workflow of random length: some rollouts are stragglers, some fail. It says in which life it was played."""

    def __init__(self, dice: random.Random, failing: float, life: int) -> None:
        self.dice, self.failing, self.life = dice, failing, life

    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        policy.metrics["life"] = float(self.life)
        await asyncio.sleep(self.dice.choice([0, 0, 0.001, 0.002, 0.012]))
        if self.dice.random() < self.failing:
            raise ValueError("the world broke")
        turn = await policy.generate(task.prompt)
        if self.dice.random() < 0.3:
            await asyncio.sleep(self.dice.choice([0.001, 0.006]))
            await policy.generate((*task.prompt, Message("assistant", turn.text), Message("user", "1")))
        return {"length": float(len(turn.tokens))}


def dropping(group: Group) -> Group:
    """An operator that refuses some groups, always the same ones."""
    return group.refused("it is the fifth") if group.slot % 5 == 4 else group


def sql_buffer(schedule: Schedule, directory: Path) -> Buffer:
    config = SqlBuffer.Config(url=f"sqlite:///{directory / 'buffer.db'}")
    return SqlBuffer(
        config, schedule=schedule, rollouts=directory / "rollouts", renderer=RENDERER, deadline_s=60, name="run"
    )


def play(
    schedule: Schedule,
    seed: int,
    *,
    kills: Sequence[tuple[str, int]] = (),
    failing: float = 0.0,
    explorers: int = 1,
    deaths: int = 0,
    drops: bool = False,
    make_buffer: Callable[[Schedule, Path], Buffer] = memory_buffer,
) -> list[Session]:
    """The sessions of a run that is killed at these events, one after the other, and then left alone."""
    dice = random.Random(seed)
    sessions: list[Session] = []
    with TemporaryDirectory() as directory:
        for life, deadly in enumerate([*kills, None]):
            session = Session(
                schedule,
                Path(directory),
                lambda _, life=life: Dawdling(dice, failing, life),
                {"refill": 0},
                deadly=deadly,
                explorers=explorers,
                deaths=[dice.uniform(0.0, 0.02) for _ in range(deaths)],
                operators=(dropping,) if drops else (),
                make_buffer=make_buffer,
                train_s=lambda: dice.choice([0, 0.001, 0.004]),
            )
            sessions.append(asyncio.run(session.live()))
            if not sessions[-1].killed:
                break
    return sessions


def surviving(sessions: Sequence[Session]) -> list[tuple[int, Group]]:
    """(the version it was trained for, group) of the history that the run ended with: what a later session repeats
    never was."""
    history: list[tuple[int, Group]] = []
    for session in sessions:
        history = [(version, group) for version, group in history if version < session.resumed_at]
        history += [(version, group) for version, groups in session.buffer.taken for group in groups]
    return history


def assert_history(schedule: Schedule, sessions: Sequence[Session], *, drops: bool) -> None:
    """The bound holds for each group, none was trained twice, and all that was consumed was trained on or counted."""
    history, last = surviving(sessions), sessions[-1]
    first, end = schedule.first_version, schedule.first_version + STEPS
    assert Counter(version for version, _ in history) == dict.fromkeys(range(first, end), schedule.groups_per_step)
    trained = Counter(group.slot for _, group in history)
    assert max(trained.values()) == 1
    for version, group in history:
        assert 0 <= version - group.oldest_version <= schedule.max_staleness
        assert group.newest_version <= version
        assert len(group.trajectories) == 2
        assert not group.dropped
        assert group.task.task_id == schedule.at(group.slot).task.task_id
        for turn in group.turns():
            assert (np.diff(turn.policy_version) == 0).all()
        if not schedule.ordered:
            # What was played with weights that were lost in a kill is nobody's: it would be staler than it says.
            life = max(int(t.metrics.get("life", 0)) for t in group.trajectories)
            lost = [session.resumed_at for session in sessions[life + 1 :] if version >= session.resumed_at]
            assert all(group.newest_version <= resumed_at for resumed_at in lost)
    counted = last.counted
    consumed = set(range(counted["consumed_below"])) | set(counted["consumed"])
    assert set(trained) <= consumed
    assert len(consumed) == len(trained) + counted["given_up"] + counted["dropped"]
    if drops:
        fifths = sum(slot % 5 == 4 for slot in consumed - set(trained))
        assert counted["dropped"] <= fifths <= counted["dropped"] + counted["given_up"]  # given up before it was played
        assert not any(slot % 5 == 4 for slot in trained)
    if schedule.ordered:
        assert [group.slot for _, group in history] == sorted(trained)
        assert (counted["evicted"], counted["called_off"], counted["given_up"]) == (0, 0, 0)


def assert_every_slot_is_accounted_for(schedule: Schedule, session: Session) -> None:
    """In a run of one life: each slot issued is consumed, or finished, or being played, or to be issued again; and it
    was issued once for each time it was played in vain, or its player died, and once more."""
    buffer, counted, ledger = session.buffer.buffer, session.counted, session.buffer
    assert isinstance(buffer, MemoryBuffer)
    consumed = set(range(counted["consumed_below"])) | set(counted["consumed"])
    finished, leased, free = map(buffer.rows.select, (SlotState.FINISHED, SlotState.LEASED, SlotState.FREE))
    parts = (consumed, *({row.slot for row in rows} for rows in (finished, leased, free)))
    issued = {lease.slot for lease in ledger.leased}
    assert issued == set(range(len(issued))) == set().union(*parts)
    assert sum(map(len, parts)) == len(issued)
    in_vain = counted["evicted"] + counted["called_off"]
    assert ledger.leased.total() + len(free) == len(issued) + in_vain + ledger.released - counted["given_up"]
    assert all(lease.attempt < schedule.max_attempts for lease in ledger.leased)
    assert set(map(int, counted["attempts"])).isdisjoint(consumed)


@settings(max_examples=number_of(30))
@given(
    ahead=st.integers(0, 3),
    interval=st.integers(1, 3),
    groups=st.integers(1, 4),
    over=st.integers(0, 2),
    first=st.sampled_from([0, 5]),
    failing=st.sampled_from([0.0, 0.2]),
    explorers=st.integers(1, 3),
    deaths=st.integers(0, 4),
    drops=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_no_group_is_staler_than_the_bound_or_trained_twice(
    ahead: int,
    interval: int,
    groups: int,
    over: int,
    first: int,
    failing: float,
    explorers: int,
    deaths: int,
    drops: bool,
    seed: int,
) -> None:
    """Explorers may die in mid-play: their slots are played by others."""
    schedule = Schedule(
        TASKS,
        seed=seed,
        first_version=first,
        groups_per_step=groups,
        group_size=2,
        sync_interval=interval,
        max_staleness=interval - 1 + ahead,
        over_rollout=over,
        steps=STEPS,
    )
    sessions = play(schedule, seed, failing=failing, explorers=explorers, deaths=deaths, drops=drops)
    assert_history(schedule, sessions, drops=drops)
    assert_every_slot_is_accounted_for(schedule, sessions[0])


KILLS = st.lists(st.tuples(st.sampled_from(["take", "put"]), st.integers(1, 12)), min_size=1, max_size=3)


@settings(max_examples=number_of(30))
@given(
    staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    over=st.integers(0, 2),
    deterministic=st.booleans(),
    explorers=st.integers(1, 2),
    drops=st.booleans(),
    kills=KILLS,
    seed=st.integers(0, 10_000),
)
def test_nothing_is_lost_or_trained_twice_when_the_run_is_killed_and_resumed(
    staleness: int,
    groups: int,
    over: int,
    deterministic: bool,
    explorers: int,
    drops: bool,
    kills: list[tuple[str, int]],
    seed: int,
) -> None:
    schedule = Schedule(
        TASKS,
        seed=seed,
        groups_per_step=groups,
        group_size=2,
        max_staleness=staleness,
        deterministic=deterministic,
        over_rollout=0 if deterministic else over,
        steps=STEPS,
    )
    drops = drops and not (deterministic and staleness)  # refused by the config
    sessions = play(schedule, seed, kills=kills, explorers=explorers, deaths=1, drops=drops)
    assert_history(schedule, sessions, drops=drops)
    if schedule.ordered:
        assert_versions_follow_the_schedule(schedule, [group for _, group in surviving(sessions)])


def assert_versions_follow_the_schedule(schedule: Schedule, groups: Sequence[Group]) -> None:
    for place, group in enumerate(groups):  # slots that were dropped leave their place to the next
        assert {int(version) for turn in group.turns() for version in turn.policy_version} <= {
            schedule.version_for(place)
        }


@settings(max_examples=number_of(6))
@given(
    staleness=st.integers(0, 2),
    groups=st.integers(1, 3),
    over=st.integers(0, 1),
    drops=st.booleans(),
    kills=KILLS.map(lambda kills: kills[:1]),
    seed=st.integers(0, 10_000),
)
def test_the_same_holds_in_a_database(
    staleness: int, groups: int, over: int, drops: bool, kills: list[tuple[str, int]], seed: int
) -> None:
    schedule = Schedule(
        TASKS, seed=seed, groups_per_step=groups, group_size=2, max_staleness=staleness, over_rollout=over, steps=STEPS
    )
    sessions = play(schedule, seed, kills=kills, explorers=2, deaths=1, drops=drops, make_buffer=sql_buffer)
    assert_history(schedule, sessions, drops=drops)


def said(groups: Sequence[Group]) -> list[tuple[int, int, list[list[int]], list[list[int]]]]:
    """What makes groups the same: slot, attempt, tokens and the versions that sampled them, in order."""
    return [
        (g.slot, g.attempt, [t.tokens.tolist() for t in g.turns()], [t.policy_version.tolist() for t in g.turns()])
        for g in groups
    ]


class Paced:
    """A workflow whose replies are its task's alone, and whose pace is its explorer's."""

    def __init__(self, dice: random.Random, seconds: float) -> None:
        self.dice, self.seconds = dice, seconds

    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        await asyncio.sleep(self.dice.random() * self.seconds)
        return {"length": float(len((await policy.generate(task.prompt)).tokens))}


def paced(schedule: Schedule, directory: Path, *paces: float) -> Ledger:
    dice = random.Random(len(paces))
    session = Session(
        schedule,
        directory,
        lambda number: Paced(dice, paces[number]),
        explorers=len(paces),
        train_s=lambda: dice.choice([0, 0.003]),
    )
    return asyncio.run(session.live()).buffer


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (2, 1), (2, 2)])
def test_two_explorers_of_different_speed_play_what_one_would(staleness: int, interval: int, tmp_path: Path) -> None:
    """Deterministic runs: the groups that are trained on, their order, tokens and versions do not depend on who plays
    them, and how fast."""
    schedule = Schedule(
        TASKS,
        seed=1,
        groups_per_step=3,
        group_size=2,
        max_staleness=staleness,
        sync_interval=interval,
        deterministic=True,
        steps=STEPS,
    )
    alone = paced(schedule, tmp_path / "one", 0.002)
    both = paced(schedule, tmp_path / "two", 0.001, 0.012)
    assert said(both.played) == said(alone.played)
    assert [group.slot for group in alone.played] == list(range(3 * STEPS))
    assert_versions_follow_the_schedule(schedule, alone.played)
    if staleness:  # not because nothing could have differed
        assert {version - group.oldest_version for version, groups in both.taken for group in groups} >= {0, staleness}


def test_zero_staleness_is_the_synchronous_run_group_for_group(tmp_path: Path) -> None:
    """The same groups, whatever the durations were."""
    schedule = Schedule(TASKS, seed=1, groups_per_step=3, group_size=2, steps=5)
    first, second = paced(schedule, tmp_path / "a", 0.001), paced(schedule, tmp_path / "b", 0.006, 0.0, 0.002)
    assert said(first.played) == said(second.played)
    assert [group.version for group in first.played] == [v for v in range(5) for _ in range(3)]
