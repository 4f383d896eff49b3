"""The rollout boundary: what goes wrong in playing is data, what goes wrong in the engine ends the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from failing import check_error, refused

from tests.sessions import Plays
from tests.waiting import until
from trivium.buffers.journal import encode_group
from trivium.buffers.memory import MemoryBuffer
from trivium.config import RewardConfig
from trivium.engines.scripted import ScriptedEngine
from trivium.evaluate import Evaluator
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation import concurrency
from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import RewardError, RolloutError, RolloutsFailing, first_cause
from trivium.foundation.randomness import SampleKey
from trivium.foundation.registry import resolve
from trivium.loops import explore_loop
from trivium.policy import EngineFailure, Policy, PromptTooLong
from trivium.rewards.judge import make_judge
from trivium.schedule import Schedule
from trivium.synchronizer import Synchronizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Capabilities, Group, Lease, Message, Sampling, Task, Trajectory
from trivium.workflows.multi_turn import MultiTurn

RENDERER = ChatRenderer(tiny_tokenizer("0123456789"))
TASK = Task("t", (Message("user", "1"),), {"answer": "12"})


async def one_reply(task: Task, policy: Policy) -> dict[str, float]:
    await policy.generate(task.prompt)
    return {"played": 1.0}


def explorer(function: Any = one_reply, deadline_s: float = 5.0, room: int = 64, **engine: Any) -> Explorer:
    scripted = ScriptedEngine(
        ScriptedEngine.Config(replies=((1, 2),), **engine), eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode
    )
    return Explorer(scripted, RENDERER, Plays(function), make_judge(()), Sampling(8), RolloutLimits(deadline_s, room))


def limited(**limits: Any) -> Explorer:
    """An explorer with these limits."""
    made = explorer()
    return replace(made, limits=replace(made.limits, **limits))


def keys(number: int = 4) -> list[SampleKey]:
    return [SampleKey(0, "test", "train", "t", 0, index) for index in range(number)]


async def play(playing: Explorer, number: int = 4) -> Group:
    return await playing.rollout(TASK, keys(number))


async def test_every_member_is_played_and_rewarded() -> None:
    group = await play(explorer())
    assert [t.index for t in group.trajectories] == [0, 1, 2, 3]
    assert all(t.failure is None and t.reward == 1.0 and t.completion == "12" for t in group.trajectories)


@pytest.mark.parametrize(
    ("raised", "side"),
    [(ValueError("x"), "workflow"), (RolloutError("a", "b", "c"), "workflow"), (TimeoutError(), "workflow")],
)
async def test_a_workflow_that_raises_fails_its_own_trajectory_only(raised: Exception, side: str) -> None:
    calls = iter(range(4))

    async def sometimes(task: Task, policy: Policy) -> dict[str, float]:
        if next(calls) == 2:
            raise raised
        return await one_reply(task, policy)

    group = await play(explorer(sometimes))
    assert len(group.alive) == 3
    (failed,) = [t.failure for t in group.trajectories if t.failure is not None]
    assert (failed.side, failed.kind) == (side, type(raised).__name__)


async def test_an_error_that_is_its_own_cause_fails_its_trajectory_only() -> None:
    async def raises(task: Task, policy: Policy) -> None:
        try:
            raise ValueError("x")
        except ValueError as error:
            raise error from error

    (failure,) = [t.failure for t in (await play(explorer(raises), 1)).trajectories]
    assert failure is not None
    assert failure.cause.startswith("ValueError in raises (")


class Placed(Exception):
    """Has an attribute of a name that errors of Trivium's have."""

    @property
    def place(self) -> str:
        raise RuntimeError("no")


async def test_an_error_whose_attributes_cannot_be_read_fails_its_trajectory_only() -> None:
    async def raises(task: Task, policy: Policy) -> None:
        raise Placed

    (failure,) = [t.failure for t in (await play(explorer(raises), 1)).trajectories]
    assert failure is not None
    assert failure.cause.startswith("Placed in raises (")


async def test_a_cancellation_that_escapes_a_workflow_is_its_failure() -> None:
    async def leaks(task: Task, policy: Policy) -> None:
        raise asyncio.CancelledError

    group = await asyncio.wait_for(play(explorer(leaks)), 60)
    assert [t.failure.kind for t in group.trajectories if t.failure] == ["CancellationEscaped"] * 4


async def test_a_cancellation_from_outside_ends_the_playing() -> None:
    plays = explorer(delay_s=60)
    playing = asyncio.create_task(play(plays))
    await until(lambda: cast(ScriptedEngine, plays.engine).requests)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_a_broken_engine_is_nobodys_bad_rollout() -> None:
    with refused(EngineFailure):
        await play(explorer(break_after=2))


class Unreadable(float):
    """A number that cannot be read, or shown."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "number",
    [
        float("nan"),
        "one",
        None,
        1e39,
        1e308,
        pytest.param(2**5000, id="huge"),
        pytest.param(Unreadable(), id="unreadable"),
    ],
)
@pytest.mark.parametrize("where", ["reward", "metric"])
async def test_what_is_no_number_that_can_be_used_fails_the_rollout(number: Any, where: str) -> None:
    async def gives(task: Task, policy: Policy) -> dict[str, Any]:
        await policy.generate(task.prompt)
        if where == "metric":
            policy.metrics["n"] = number
            return {"played": 1.0}
        return {"played": number}

    group = await play(explorer(gives), 1)
    assert group.trajectories[0].failure is not None
    assert group.trajectories[0].failure.side == "reward"


@pytest.mark.parametrize(
    "earned", [{5: 1.0}, {"\ud800": 1.0}, {"": 1.0}, {"a\0b": 1.0}, {"x" * 999: 1.0}, 1.0, [("a", 1)]]
)
async def test_rewards_without_a_name_that_can_be_stored_fail_the_rollout(earned: Any) -> None:
    async def gives(task: Task, policy: Policy) -> Any:
        await policy.generate(task.prompt)
        return earned

    group = await play(explorer(gives), 1)
    (failure,) = [t.failure for t in group.trajectories if t.failure is not None]
    assert (failure.side, failure.kind) == ("reward", "RewardError")
    assert encode_group(group)


MUTE = """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

RAISED = {"mute": Mute(), "surrogate": ValueError("\\ud800"), "long": ValueError("x" * 10**6), "key": KeyError(Mute())}

def judged(prompt, completion, which):
    raise RAISED[which]
"""


@pytest.mark.parametrize("which", ["mute", "surrogate", "long", "key"])
@pytest.mark.parametrize("by", ["workflow", "reward"])
async def test_an_exception_of_any_text_is_a_failure_that_can_be_journaled(
    which: str, by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "trivium")  # pytest-xdist cannot send a traceback that holds a lone surrogate
    (tmp_path / "mine.py").write_text(MUTE)

    async def gives(task: Task, policy: Policy) -> dict[str, float]:
        await policy.generate(task.prompt)
        return {} if by == "reward" else resolve("rewards", f"{tmp_path}/mine.py:judged")("", "", which)

    playing = explorer(gives)
    if by == "reward":
        playing.judge = make_judge([RewardConfig(kind=f"{tmp_path}/mine.py:judged")])
    group = await playing.rollout(replace(TASK, columns={"which": which}), keys(1))
    (failure,) = [t.failure for t in group.trajectories if t.failure is not None]
    assert failure.side == by
    assert 0 < len(failure.message) < 10_000
    assert encode_group(group)


async def test_what_a_turn_is_credited_with_is_checked() -> None:
    async def gives(task: Task, policy: Policy) -> dict[str, float]:
        policy.credit(await policy.generate(task.prompt), state="\ud800", reward=1e39 if next(calls) else 1.0)
        return {"played": 1.0}

    calls = iter(range(2))
    group = await play(explorer(gives), 2)
    assert [t.failure and t.failure.side for t in group.trajectories] == [None, "reward"]
    assert encode_group(group)


async def test_numpy_numbers_are_numbers() -> None:
    async def gives(task: Task, policy: Policy) -> dict[str, Any]:
        await policy.generate(task.prompt)
        return {"played": np.float32(0.5)}

    assert (await play(explorer(gives), 1)).trajectories[0].reward == 0.5


async def test_waiting_for_room_is_not_charged_to_the_deadline() -> None:
    group = await play(explorer(delay_s=0.3, room=1, deadline_s=2.0), 8)
    assert len(group.alive) == 8


async def test_two_judges_of_one_name_are_an_error_not_a_loss(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def played(prompt, completion):\n    return 2.0\n")
    playing = explorer()
    playing.judge = make_judge([RewardConfig(kind=f"{tmp_path}/mine.py:played")])
    group = await play(playing, 1)
    assert group.trajectories[0].failure is not None
    assert "rewards of different names" in group.trajectories[0].failure.message


@pytest.mark.parametrize("must_judge", [True, False])
async def test_what_nobody_rewarded_failed_unless_nobody_has_to(must_judge: bool) -> None:
    async def plays(task: Task, policy: Policy) -> None:
        await policy.generate(task.prompt)

    playing = explorer(plays)
    playing.must_judge = must_judge
    (trajectory,) = (await play(playing, 1)).trajectories
    assert (trajectory.failure is not None) == must_judge
    assert not trajectory.rewards


async def test_forks_have_names_of_their_own() -> None:
    async def forks(task: Task, policy: Policy) -> dict[str, float]:
        for name in ("a", "b"):
            await policy.fork(name).generate(task.prompt)
        with refused(RolloutError, "'a'"):
            policy.fork("a")
        return {"turns": float(len(policy.turns))}

    assert (await play(explorer(forks), 1)).trajectories[0].reward == 2.0


async def test_an_evaluation_that_fails_is_no_accuracy_of_zero() -> None:
    async def fails(task: Task, policy: Policy) -> None:
        raise ValueError("broken")

    evaluator = Evaluator(explorer(fails), [TASK], "test", 0, 1, (1,), Sampling(8), 1.0, max_failed_fraction=0.5)
    with refused(RolloutsFailing, "'test'"):
        await evaluator.run(0)


def test_an_environment_that_never_answers_does_not_keep_the_process() -> None:
    program = textwrap.dedent("""
        import asyncio, threading
        from trivium.workflows.multi_turn import MultiTurn
        from trivium.types import Message, Task
        import sys, types
        module = types.ModuleType("worlds")
        class World:
            def reset(self, task): threading.Event().wait()
            def step(self, completion): return [], 0.0, True
        module.World = World
        sys.modules["worlds"] = module
        workflow = MultiTurn(MultiTurn.Config(environment="worlds:World"))
        async def main():
            try:
                async with asyncio.timeout(0.2):
                    await workflow.run(Task("t", (Message("user", "1"),)), None)
            except TimeoutError:
                print("deadline")
        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("deadline", 0), done.stderr


# --------------------------------------------------------------------------- retries


async def test_a_workflow_that_fails_is_played_again_from_its_first_turn() -> None:
    tried: dict[int, int] = {}

    async def fails_twice(task: Task, policy: Policy) -> dict[str, float]:
        index = policy._key.index
        tried[index] = tried.get(index, 0) + 1
        turn = await policy.generate(task.prompt)
        if index == 1 and tried[index] <= 2:
            policy.metrics["left"] = 1.0
            raise ValueError("the world broke")
        await policy.generate((*task.prompt, Message("assistant", turn.text), Message("user", "1")))
        return {"played": 1.0}

    playing = explorer(fails_twice)
    playing.limits = replace(playing.limits, max_retries=3)
    group = await play(playing, 3)
    assert [t.failure for t in group.trajectories] == [None] * 3
    assert [len(t.turns) for t in group.trajectories] == [2, 2, 2]
    kept = [{name: value for name, value in t.metrics.items() if "perf/" not in name} for t in group.trajectories]
    assert kept == [{"retries": 0.0}, {"retries": 2.0}, {"retries": 0.0}]
    asked: Any = playing.engine
    paths = [(r.key.index, r.key.path) for r in asked.requests]
    assert paths.count((1, (0,))) == 3, "the same key, whatever attempt it is"


@pytest.mark.parametrize(
    ("raised", "attempts"),
    [
        (ValueError("x"), 3),
        (RolloutError("a", "b", "c"), 3),
        (asyncio.CancelledError(), 3),
        (TimeoutError(), 3),
        (PromptTooLong("a", "b", "c"), 1),
        (RewardError("a", "b", "c"), 1),
    ],
)
async def test_only_what_the_workflow_failed_is_played_again(raised: BaseException, attempts: int) -> None:
    calls: list[int] = []

    async def fails(task: Task, policy: Policy) -> None:
        calls.append(1)
        raise raised

    playing = explorer(fails)
    playing.limits = replace(playing.limits, max_retries=2)
    (trajectory,) = (await play(playing, 1)).trajectories
    assert trajectory.failure is not None
    assert (len(calls), trajectory.metrics["retries"]) == (attempts, attempts - 1)


async def test_retries_share_one_deadline_and_a_deadline_is_final() -> None:
    calls: list[int] = []

    async def slow(task: Task, policy: Policy) -> None:
        calls.append(1)
        await asyncio.sleep(0.05)  # a hundred of these take 5 s
        raise ValueError("broken")

    playing = explorer(slow, deadline_s=1.0)
    playing.limits = replace(playing.limits, max_retries=100)
    (trajectory,) = (await play(playing, 1)).trajectories
    assert trajectory.failure is not None
    assert trajectory.failure.side == "deadline"
    assert len(calls) <= 20


# --------------------------------------------------------------------------- deadlines and cancelling


async def test_what_does_not_heed_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.02)
    release = asyncio.Event()
    late: list[BaseException] = []

    async def stubborn(task: Task, policy: Policy) -> dict[str, float]:
        await policy.generate(task.prompt)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        try:
            await policy.generate(task.prompt)
        except RolloutError as error:
            late.append(error)
        return {"played": 1.0}

    group = await asyncio.wait_for(play(explorer(stubborn, deadline_s=1.0)), 60)  # longer than four completions take
    assert {t.failure.side for t in group.trajectories if t.failure} == {"deadline"}
    assert [len(t.turns) for t in group.trajectories] == [1] * 4
    release.set()
    await until(lambda: not concurrency._abandoned)
    assert len(late) == 4
    assert "the rollout has ended" in str(late[0])
    assert [len(t.turns) for t in group.trajectories] == [1] * 4


async def test_what_is_answered_after_the_deadline_counts_for_nothing() -> None:
    async def takes_what_it_has(task: Task, policy: Policy) -> dict[str, float]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return {"played": 1.0}
        return {}

    (trajectory,) = (await play(explorer(takes_what_it_has, deadline_s=0.03), 1)).trajectories
    assert trajectory.failure is not None
    assert trajectory.failure.side == "deadline"
    assert not trajectory.rewards


async def test_replies_that_nobody_awaits_end_with_the_playing() -> None:
    async def careless(task: Task, policy: Policy) -> dict[str, float]:
        tasks.append(asyncio.ensure_future(policy.fork("aside").generate(task.prompt)))
        await asyncio.sleep(0)
        return {"played": 1.0}

    tasks: list[asyncio.Task[Any]] = []
    group = await play(explorer(careless, delay_s=120), 1)
    await asyncio.wait(tasks, timeout=60)
    assert tasks[0].cancelled()
    assert group.trajectories[0].turns == ()


async def test_the_first_broken_engine_ends_the_siblings() -> None:
    ended: list[int] = []

    async def waits(task: Task, policy: Policy) -> None:
        if policy._key.index == 3:
            await policy.generate(task.prompt)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(policy._key.index)

    with refused(EngineFailure):
        await asyncio.wait_for(play(explorer(waits, break_after=0)), 60)
    assert sorted(ended) == [0, 1, 2]


async def test_plain_environments_that_hang_hold_up_nobody_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text(
        "import threading\n"
        "gate = threading.Event()\n"
        "class World:\n"
        "    def reset(self, task):\n"
        "        from trivium.types import Message\n"
        "        return [Message('user', '1')]\n"
        "    def step(self, completion):\n"
        "        gate.wait()\n"
        "        return [], 1.0, True\n"
    )
    where = f"{tmp_path}/worlds.py"
    workflow = MultiTurn(MultiTurn.Config(environment=f"{where}:World", threads=2))
    playing = explorer(deadline_s=1.0)  # longer than `reset` and a completion take
    playing.workflow = workflow
    before = concurrency.left_behind()  # by other tests of this process
    group = await asyncio.wait_for(play(playing), 60)
    failures = [t.failure for t in group.trajectories if t.failure]
    assert [failure.side for failure in failures] == ["deadline"] * 4
    # Two threads, and whatever began in the room that a call makes when it is given up before the others.
    assert 2 <= concurrency.left_behind() - before <= 4
    assert "call(s) of plain functions still run" in failures[-1].message
    resolve("environments", f"{where}:gate").set()
    await until(lambda: concurrency.left_behind() <= before)
    playing.limits = replace(playing.limits, deadline_s=60.0)
    assert len((await play(playing)).alive) == 4


# --------------------------------------------------------------------------- rewards beside generation


class Timed:
    """A judge that notes what had been played when it was asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.played = seconds, list[int]()
        self.asked: dict[int, tuple[int, ...]] = {}
        self.compared: list[list[int]] = []
        self.over = defaultdict[int, asyncio.Event](asyncio.Event)
        """Of each member: it is being judged, or has failed."""

    async def score(self, task: Task, trajectory: Trajectory) -> dict[str, float]:
        self.asked[trajectory.index] = tuple(self.played)
        self.over[trajectory.index].set()
        await asyncio.sleep(self.seconds)
        return {"own": float(trajectory.index)}

    async def compare(self, task: Task, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        self.compared.append([t.index for t in trajectories])
        return [{"rank": float(i)} for i in range(len(trajectories))]


def timed(order: Sequence[int], failing: Sequence[int] = (), **engine: Any) -> tuple[Explorer, Timed]:
    """An explorer whose members finish in this order."""
    judge = Timed()

    async def plays(task: Task, policy: Policy) -> dict[str, float]:
        index = policy._key.index
        place = order.index(index)
        if place:
            await judge.over[order[place - 1]].wait()
        await policy.generate(task.prompt)
        judge.played.append(index)
        if index in failing:
            judge.over[index].set()
            raise ValueError("broken")
        return {"played": 1.0}

    playing = explorer(plays, **engine)
    playing.judge = judge
    return playing, judge


async def test_each_is_judged_when_it_is_finished_and_the_group_when_all_are() -> None:
    playing, judge = timed([2, 0, 3, 1], failing=[3])
    group = await play(playing)
    assert judge.asked == {2: (2,), 0: (2, 0), 1: (2, 0, 3, 1)}, "while the siblings still play"
    assert judge.compared == [[0, 1, 2]], "the living, in their own order"
    assert [dict(t.rewards) for t in group.alive] == [
        {"played": 1.0, "own": float(index), "rank": float(index)} for index in range(3)
    ]


async def test_the_order_of_completion_changes_nothing() -> None:
    first, second = [await play(timed(order)[0]) for order in ([0, 1, 2, 3], [3, 1, 2, 0])]
    assert [(t.index, list(t.rewards.items())) for t in first.trajectories] == [
        (t.index, list(t.rewards.items())) for t in second.trajectories
    ]


async def test_judging_takes_its_time_from_the_rollouts_own_deadline() -> None:
    playing, judge = timed([0, 1])
    playing.limits, judge.seconds = replace(playing.limits, deadline_s=0.2), 120.0
    group = await asyncio.wait_for(play(playing, 2), 60)
    failures = [t.failure for t in group.trajectories if t.failure]
    assert [(failure.side, failure.kind) for failure in failures] == [("deadline", "DeadlineExceeded")] * 2
    assert judge.compared == []


async def test_a_judge_is_not_charged_for_the_room(tmp_path: Path) -> None:
    playing, judge = timed([0, 1, 2, 3], room=1)
    judge.seconds = 0.05
    async with asyncio.timeout(60):
        assert len((await play(playing)).alive) == 4


# --------------------------------------------------------------------------- groups too thin to train on


def filled(playing: Explorer, failing: Callable[[int, int], bool]) -> Callable[[int], Coroutine[Any, Any, Group]]:
    """Fills a slot whose members fail where `failing(slot, index)` says so."""

    async def plays(task: Task, policy: Policy) -> dict[str, float]:
        await policy.generate(task.prompt)
        if failing(int(task.task_id), policy._key.index):
            raise ValueError("the world broke")
        return {"played": 1.0}

    playing.workflow = Plays(plays)
    tasks = [Task(str(i), (Message("user", "1"),)) for i in range(100)]
    schedule = Schedule(tasks, seed=0, group_size=4, shuffle=False)
    return lambda slot: playing.rollout_slot(schedule, Lease(slot))


async def test_a_group_with_too_few_living_members_is_dropped() -> None:
    playing = limited(min_members=3, max_failed_fraction=0.9)
    fill = filled(playing, lambda slot, index: index < slot)
    groups = [await fill(slot) for slot in range(5)]
    assert [bool(group.dropped) for group in groups] == [False, False, True, True, True]
    assert groups[2].dropped == "2 of 4 members succeeded, workflow.min_members is 3"
    playing.limits = replace(playing.limits, min_members=1)
    assert (await fill(4)).dropped == "", "the trainer counts it and leaves it out"


async def test_groups_that_are_dropped_one_after_the_other_end_the_run() -> None:
    playing = limited(min_members=2, max_failed_fraction=0.5, failure_window=8)
    fill = filled(playing, lambda slot, index: True)
    for slot in range(7):
        await fill(slot)
    with refused(RolloutsFailing, "8 groups", "32 times", "ValueError"):
        await fill(7)


async def test_a_group_is_lost_whole_even_if_only_one_member_failed() -> None:
    playing = limited(min_members=4, max_failed_fraction=0.5, failure_window=4)
    fill = filled(playing, lambda slot, index: index == 0 and slot % 4 != 0)
    for slot in range(3):
        await fill(slot)
    with refused(RolloutsFailing, "3 of 16", "9"):
        await fill(3)


async def test_quick_failures_do_not_stand_for_slow_successes() -> None:
    playing = limited(min_members=2, max_failed_fraction=0.5, failure_window=4)
    release = asyncio.Event()

    async def plays(task: Task, policy: Policy) -> dict[str, float]:
        if int(task.task_id) % 3 == 0:
            raise ValueError("at once")
        await release.wait()
        return {"played": 1.0}

    fill = filled(playing, lambda slot, index: False)
    playing.workflow = Plays(plays)
    begun = [asyncio.ensure_future(fill(slot)) for slot in range(18)]
    await until(lambda: sum(task.done() for task in begun) >= 6)
    assert sum(task.done() for task in begun) == 6
    begun[1].cancel()
    release.set()
    done = await asyncio.gather(*begun, return_exceptions=True)
    assert [bool(group.dropped) for group in done if isinstance(group, Group)].count(True) == 6
    assert not playing._groups, "nothing is kept of what has been judged or given up"


# --------------------------------------------------------------------------- rewards computed again


class Ranks:
    """Judges by a number that may be missing, and by the order of all members."""

    def __init__(self, **own: float) -> None:
        self.own = own

    async def score(self, task: Task, trajectory: Trajectory) -> Mapping[str, float] | RewardError:
        value = self.own.get(f"m{trajectory.index}")
        return RewardError("a number", "the service is down", "wait") if value is None else {"own": value}

    async def compare(self, task: Task, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        return [{"rank": float(len(trajectories))} for _ in trajectories]


class Silent(Plays):
    capabilities = Capabilities(gives_rewards=False)


async def reply(task: Task, policy: Policy) -> None:
    await policy.generate(task.prompt)


@pytest.mark.parametrize("gives_rewards", [False, True])
async def test_a_group_whose_rewards_failed_is_judged_again_where_the_judge_alone_gives_them(
    gives_rewards: bool,
) -> None:
    playing = replace(explorer(), greedy_baseline=True, judge=Ranks(m0=1.0))
    playing.workflow = (Plays if gives_rewards else Silent)(reply)
    engine: Any = playing.engine
    schedule = Schedule([TASK], seed=0, group_size=3)
    failed = await playing.rollout_slot(schedule, Lease(0, 1))
    assert [t.failure.side if t.failure else "" for t in failed.rollouts] == ["", "reward", "reward", "reward"]
    requests = len(engine.requests)
    playing.judge = Ranks(m0=1.0, m1=2.0, m3=4.0)
    again = await playing.rollout_slot(schedule, Lease(0, 1, failed))
    assert (again.slot, again.attempt, again.version, again.group_id) == (0, 1, failed.version, failed.group_id)
    assert [dict(t.rewards) for t in again.rollouts if t.failure is None] == [
        {"own": 1.0, "rank": 2.0},
        {"own": 2.0, "rank": 2.0},
        {"own": 4.0, "rank": 1.0},
    ], "compared with all that succeed now; the greedy one by itself"
    assert again.trajectories[2].failure == failed.trajectories[2].failure
    assert len(engine.requests) == requests + (4 if gives_rewards else 0)
    assert (next(again.turns()) is next(failed.turns())) is not gives_rewards


@pytest.mark.parametrize(("prompt", "rolled_out"), [("1", 0), ("2", 3)])
async def test_a_group_is_judged_again_by_the_task_as_it_is_now(prompt: str, rolled_out: int) -> None:
    playing = replace(explorer(), judge=Ranks())
    playing.workflow = Silent(reply)
    engine: Any = playing.engine
    failed = await playing.rollout_slot(Schedule([TASK], seed=0, group_size=3), Lease(0))
    corrected = replace(TASK, prompt=(Message("user", prompt),), columns={"answer": "corrected"})
    requests = len(engine.requests)
    again = await playing.rollout_slot(Schedule([corrected], seed=0, group_size=3), Lease(0, 0, failed))
    assert again.task == corrected
    assert len(engine.requests) == requests + rolled_out


async def test_what_an_explorer_dropped_until_it_ended_the_run_is_retried(tmp_path: Path) -> None:
    playing = limited(min_members=2, max_failed_fraction=0.5, failure_window=3)
    filled(playing, lambda slot, index: True)
    tasks = [Task(str(i), (Message("user", "1"),)) for i in range(100)]
    schedule = Schedule(tasks, seed=0, group_size=4, shuffle=False)

    async def opened() -> MemoryBuffer:
        made = MemoryBuffer(
            MemoryBuffer.Config(), schedule=schedule, rollouts=tmp_path, renderer=RENDERER, deadline_s=60
        )
        await made.restore(None, 0)
        await made.advance(playing.name, 0)
        return made

    with pytest.raises(ExceptionGroup) as caught:
        await explore_loop(playing, await opened(), schedule, Synchronizer(MemoryBoard(), deadline_s=60))
    check_error(first_cause(caught.value), RolloutsFailing, "3 groups", "workflow.max_failed_fraction")
    again = await opened()
    assert await again.counts() == dict.fromkeys(("evicted", "called_off", "given_up", "dropped", "refused"), 0)
    assert await again.lease(playing.name) == Lease(0)


class Far:
    """Weights in another process."""

    version = 3
    tensors = ()

    def __iter__(self) -> Any:
        raise AssertionError("the engine's processes read them")


class FarChannel:
    def collect(self, version: int) -> Far:
        assert version == 3
        return Far()


class Near:
    def collect(self, version: int) -> Any:
        return iter([("weight", version)])


class Given(ScriptedEngine):
    """Keeps what it was asked to load."""

    async def load(self, version: int, weights: Any, *, in_flight: str = "finish") -> None:
        self.given = weights


async def test_a_handle_goes_to_the_engine_unread() -> None:
    one = explorer()
    engine = one.engine = Given(
        ScriptedEngine.Config(replies=((1,),)), eos_token_ids=frozenset(), decode=RENDERER.decode
    )
    await one.adopt(3, FarChannel())  # pyright: ignore[reportArgumentType]
    assert isinstance(engine.given, Far)
    await one.adopt(4, Near())  # pyright: ignore[reportArgumentType]
    assert engine.given == [("weight", 4)]
