"""Dynamic sampling through the real loops: a step gets its full number of groups while refills last, nothing is
trained twice or lost, and a run that dies in the middle of a refill goes on as if it had not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sessions import RENDERER, TASKS, Lengths, Session
from trivium.buffers.files import FileBuffer
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.slots import SlotState
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import DataError, RolloutsFailing
from trivium.rewards.judge import make_judge
from trivium.schedule import Schedule
from trivium.synchronizer import Synchronizer
from trivium.types import Sampling, Task


def session(
    schedule: Schedule,
    directory: Path,
    said: Mapping[str, Any],
    seed: int,
    fail_fraction: float = 0.0,
    deadly: tuple[str, int] | None = None,
    max_failed_fraction: float = 1.0,
) -> Session:
    dice = random.Random(seed)
    return Session(schedule, directory, lambda _: Lengths(dice), said, fail_fraction, deadly, max_failed_fraction)


FILTERS: list[list[object]] = [
    [],
    ["zero_variance"],
    [{"kind": "difficulty", "low": 2.0, "high": 3.5}],
    ["zero_variance", "overlong"],
]


@settings(max_examples=number_of(25))
@given(
    ahead=st.integers(0, 2),
    interval=st.integers(1, 2),
    groups=st.integers(1, 4),
    refill=st.integers(0, 5),
    filters=st.sampled_from(FILTERS),
    failing=st.sampled_from([0.0, 0.3]),
    first=st.sampled_from([0, 6]),
    seed=st.integers(0, 10_000),
)
def test_every_step_gets_its_groups_and_each_group_is_accounted_for(
    ahead: int, interval: int, groups: int, refill: int, filters: list[object], failing: float, first: int, seed: int
) -> None:
    schedule = Schedule(
        TASKS,
        seed=seed,
        first_version=first,
        groups_per_step=groups,
        group_size=2,
        sync_interval=interval,
        max_staleness=interval - 1 + ahead,
        steps=6,
    )
    with TemporaryDirectory() as directory:
        said = {"filters": filters, "refill": refill}
        done = asyncio.run(session(schedule, Path(directory), said, seed, failing).live())
    assert not done.killed
    algorithm, buffer = done.engine.algorithm, done.buffer
    taken = Counter(group.slot for _, played in buffer.taken for group in played)
    assert max(taken.values()) == 1
    trained = {version: names for version, names, _ in done.engine.updates}
    for version in range(first, first + 6):
        rounds = [played for at, played in buffer.taken if at == version]
        played = [group for part in rounds for group in part]
        kept = algorithm.filter(played)[0]
        # Full, or every refill was used; and nothing was replaced that was not refused.
        assert len(kept) == groups or len(rounds) == refill + 1
        assert len(kept) <= groups
        assert [len(part) for part in rounds[1:]] == [
            groups - len(algorithm.filter([g for part in rounds[:n] for g in part])[0]) for n in range(1, len(rounds))
        ]
        assert trained.get(version, ()) == tuple(group.group_id for group in kept)
        row = done.monitor.rows[version + 1]
        assert (row["rollout/groups"], row["rollout/refused"]) == (len(played), len(played) - len(kept))
        by_rule = [n for key, n in row.items() if key.startswith("rollout/refused/")]
        assert sum(by_rule) == row["rollout/refused"]
        assert row["train/version"] == version + 1
        assert all(0 <= version - group.oldest_version <= schedule.max_staleness for group in played)
    replaced = sum(buffer.refused)
    assert sum(taken.values()) == 6 * groups + replaced
    assert done.counted["refused"] == replaced
    assert_every_slot_is_accounted_for(schedule, done, set(taken))
    if schedule.ordered:
        assert sorted(taken) == list(range(6 * groups + replaced))
        assert [g.slot for _, played in buffer.taken for g in played] == sorted(taken)
        assert len(buffer.leased) == len(taken)  # nothing is played that no step asked for


def assert_every_slot_is_accounted_for(schedule: Schedule, done: Session, taken: set[int]) -> None:
    """Each slot issued was taken, waits, is being played, is to be issued again, or was given up: one of these."""
    buffer, counted = done.buffer.buffer, done.counted
    issued = {lease.slot for lease in done.buffer.leased}
    states = (SlotState.FINISHED, SlotState.LEASED, SlotState.FREE)
    waiting, in_flight, again = ({row.slot for row in buffer.rows.select(state)} for state in states)
    consumed = set(range(counted["consumed_below"])) | set(counted["consumed"])
    given_up = consumed - taken
    assert issued == set(range(len(issued))) == consumed | waiting | in_flight | again
    assert sum(map(len, (taken, waiting, in_flight, given_up, again))) == len(issued)
    assert set(map(int, counted["attempts"])) >= again
    assert counted["given_up"] == len(given_up)
    last = schedule.first_version + schedule.steps
    assert len(issued) <= schedule.admitted(last) + len(given_up) + sum(done.buffer.refused)


SYNCHRONOUS = Schedule(TASKS, seed=3, first_version=4, groups_per_step=3, group_size=2, steps=5)
SAID = {"filters": ["zero_variance"], "refill": 4, "shaping": ["running_normalise"]}


def outcome(sessions: Sequence[Session]) -> dict[str, Any]:
    """What must not depend on how often the run was killed."""
    last = sessions[-1]
    updates = {version: rest for session in sessions for version, *rest in session.engine.updates}
    rows = {step: row for session in sessions for step, row in session.monitor.rows.items()}
    return {
        "updates": updates,
        "rows": rows,
        "buffer": last.counted,
        "algorithm": last.engine.algorithm.state(),
        "version": last.engine.version,
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Session:
    done = asyncio.run(session(SYNCHRONOUS, tmp_path_factory.mktemp("whole"), SAID, 1, 0.1).live())
    assert len(done.buffer.refused) >= 3
    assert {version for version, _ in done.buffer.taken} == set(range(4, 9))
    return done


def test_durations_do_not_matter(uninterrupted: Session, tmp_path: Path) -> None:
    again = asyncio.run(session(SYNCHRONOUS, tmp_path, SAID, 2, 0.1).live())
    assert outcome([again]) == outcome([uninterrupted])


@pytest.mark.parametrize("what", ["refuse", "take", "put"])
def test_a_run_killed_anywhere_in_its_refills_trains_on_the_same_groups(
    what: str, uninterrupted: Session, tmp_path: Path
) -> None:
    """Killed again and again, at a later event each time; each session continues from the last checkpoint."""
    calls = {"refuse": len(uninterrupted.buffer.refused), "take": len(uninterrupted.buffer.taken), "put": 20}[what]
    for nth in range(1, calls + 1):
        directory = tmp_path / str(nth)
        sessions = [asyncio.run(session(SYNCHRONOUS, directory, SAID, nth, 0.1, (what, nth)).live())]
        assert sessions[0].killed
        sessions.append(asyncio.run(session(SYNCHRONOUS, directory, SAID, nth + 99, 0.1, (what, 2)).live()))
        while sessions[-1].killed:
            sessions.append(asyncio.run(session(SYNCHRONOUS, directory, SAID, 7, 0.1).live()))
        assert outcome(sessions) == outcome([uninterrupted])
        if nth == calls:
            assert sessions[1].resumed_at > 4


@pytest.mark.parametrize("nth", [1, 3, 5])
def test_an_asynchronous_run_killed_in_a_refill_repeats_and_loses_nothing(nth: int, tmp_path: Path) -> None:
    schedule = Schedule(TASKS, seed=3, groups_per_step=3, group_size=2, max_staleness=1, steps=6)
    first = asyncio.run(session(schedule, tmp_path, SAID, 1, deadly=("refuse", nth)).live())
    assert first.killed
    done = asyncio.run(session(schedule, tmp_path, SAID, 2).live())
    assert not done.killed
    before = [group.slot for at, played in first.buffer.taken if at < done.resumed_at for group in played]
    after = [group.slot for _, played in done.buffer.taken for group in played]
    assert max(Counter([*before, *after]).values()) == 1
    state = done.counted
    assert len(before) + len(after) == 6 * 3 + state["refused"]
    assert {version for version, *_ in done.engine.updates} == set(range(done.resumed_at, 6))


def test_a_step_without_a_group_to_train_on_is_said_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = {"filters": [{"kind": "difficulty", "low": 90.0, "high": 100.0}], "refill": 1}
    schedule = Schedule(TASKS, groups_per_step=2, group_size=2, seed=0, steps=2)
    with caplog.at_level("WARNING", "trivium"):
        done = asyncio.run(session(schedule, tmp_path, nobody, 0).live())
    assert (done.engine.version, done.engine.updates, done.buffer.refused) == (2, [], [2, 2])
    assert [record.getMessage() for record in caplog.records] == [
        f"step {step}: all 4 groups were refused, there is nothing to learn" for step in (1, 2)
    ]


def test_failing_rollouts_end_the_run_and_are_not_played_for_ever(tmp_path: Path) -> None:
    schedule = Schedule(TASKS, groups_per_step=2, group_size=2, seed=0, steps=2)
    failing = session(schedule, tmp_path, {"refill": 1000}, 0, fail_fraction=1.0, max_failed_fraction=0.5)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(failing.live())
    assert caught.group_contains(RolloutsFailing, match="4 of 4 failed")


async def test_files_hold_nothing_to_refill_with(tmp_path: Path) -> None:
    schedule = Schedule(TASKS, seed=0)
    files = FileBuffer(FileBuffer.Config(), schedule=schedule, rollouts=tmp_path, renderer=RENDERER, deadline_s=1)
    with refused(DataError, "algorithm.refill"):
        await files.refuse(1)


# --------------------------------------------------------------------------- the greedy playing


class Judging:
    """A judge that says how many it was shown at once."""

    def check_columns(self, columns: Mapping[str, Any]) -> None: ...

    async def score(self, task: Task, trajectory: Any) -> dict[str, float]:
        return {}

    async def compare(self, task: Task, trajectories: Sequence[Any]) -> list[dict[str, float]]:
        return [{"shown": float(len(trajectories))} for _ in trajectories]


def playing(function: Any, judge: Any = None) -> Explorer:
    scripted = ScriptedEngine(
        ScriptedEngine.Config(replies=((1, 2), (3,))), eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode
    )
    return Explorer(
        scripted,
        RENDERER,
        function,
        judge or make_judge(()),
        Sampling(8, temperature=0.9),
        RolloutLimits(5.0, 64),
        greedy_baseline=True,
    )


async def test_the_greedy_reply_is_played_without_randomness_and_judged_by_itself() -> None:
    schedule = Schedule(TASKS, seed=0, group_size=3)
    assignment = schedule.at(0)
    explorer = playing(Lengths(random.Random(0)), Judging())
    keys = [schedule.key(assignment, index) for index in range(3)]
    group = await explorer.rollout(assignment.task, keys, greedy=schedule.key(assignment, 3))
    assert [t.index for t in group.trajectories] == [0, 1, 2]
    assert [t.rewards["shown"] for t in group.trajectories] == [3.0] * 3
    assert group.greedy is not None
    assert group.greedy.rewards["shown"] == 1.0
    assert sorted(request.sampling.temperature for request in explorer.engine.requests) == [0.0, 0.9, 0.9, 0.9]
    np.testing.assert_array_equal(group.greedy.turns[0].log_prob, 0.0)
    assert len(list(group.turns())) == 4
    assert (await explorer.rollout(assignment.task, keys)).greedy is None


async def test_the_loop_asks_for_a_greedy_reply_where_the_algorithm_does(tmp_path: Path) -> None:
    """Through the journal: what a resumed run reads back has its greedy reply too."""
    from trivium.loops import explore_loop

    schedule = Schedule(TASKS, seed=0, group_size=2, groups_per_step=2)
    explorer = playing(Lengths(random.Random(0)))

    async def buffer() -> MemoryBuffer:
        made = MemoryBuffer(
            MemoryBuffer.Config(), schedule=schedule, rollouts=tmp_path, renderer=RENDERER, deadline_s=60
        )
        await made.restore(None, 0)
        return made

    one = await buffer()
    await one.advance(explorer.name, 0)
    exploring = asyncio.create_task(explore_loop(explorer, one, schedule, Synchronizer(MemoryBoard(), deadline_s=60)))
    groups = await one.take(2, 0)
    await one.close()
    await exploring
    again = await (await buffer()).take(2, 0)
    for played, read in zip(groups, again, strict=True):
        assert played.greedy is not None
        assert read.greedy is not None
        assert read.greedy.reward == played.greedy.reward == len(played.greedy.turns[0].tokens)
        assert read.greedy.index == 2
