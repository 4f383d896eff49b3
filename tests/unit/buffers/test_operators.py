"""The experience pipeline: each operator by itself, and all of them between a real explorer and a real buffer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import configs
import episodes
import numpy as np
import pytest
from failing import check_error, refused

from tests.sessions import TASKS, Lengths, Session
from trivium.buffers.journal import Journal
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.pipeline import Pipeline
from trivium.config import RunConfig
from trivium.foundation.errors import ConfigError, DataError, RolloutsFailing, first_cause
from trivium.schedule import Schedule
from trivium.types import Failure, Group, Task, Trajectory, Turn


def turn(*tokens: int, prompt: Sequence[int] = (1, 2)) -> Turn:
    return episodes.turn(prompt, tokens, text=str(tokens))


def member(index: int, reward: float | dict[str, float], tokens: Sequence[int] = (), **metrics: float) -> Trajectory:
    rewards = reward if isinstance(reward, dict) else {"exact": reward}
    return Trajectory(index, (turn(*(tokens or (10 + index,))),), rewards, metrics=metrics)


def failed(index: int) -> Trajectory:
    return Trajectory(index, (turn(9),), failure=Failure("workflow", "ValueError", "the world broke"))


def group(*members: Trajectory, greedy: Trajectory | None = None) -> Group:
    return Group(4, Task("seven", ()), members, epoch=1, attempt=1, version=3, greedy=greedy)


def rewarded(*rewards: float) -> Group:
    return group(*(member(index, reward) for index, reward in enumerate(rewards)))


def pipeline(*sections: object, **said: Any) -> Pipeline:
    return Pipeline(MemoryBuffer.Config.model_validate({"operators": sections, **said}))


def after(section: object, given: Group) -> Group:
    return pipeline(section)(given)


def indices(given: Group) -> list[int]:
    return [trajectory.index for trajectory in given.trajectories]


# --------------------------------------------------------------------------- one by one


def test_no_operator_returns_the_group_itself() -> None:
    given = rewarded(1.0)
    assert pipeline()(given) is given


@pytest.mark.parametrize(
    ("options", "rewards", "left"),
    [
        ({}, (0.0, -1.0, 1.0), [0, 2]),
        ({"threshold": 0.5}, (0.0, 0.5, 1.0), [1, 2]),
        ({"threshold": 2.0}, (0.0, 0.5, 1.0), None),
        ({"of": "groups", "threshold": 0.5}, (0.0, 1.0), [0, 1]),
        ({"of": "groups", "threshold": 0.51}, (0.0, 1.0), None),
    ],
)
def test_reward_filter(options: dict[str, Any], rewards: tuple[float, ...], left: list[int] | None) -> None:
    done = after({"kind": "reward_filter", **options}, rewarded(*rewards))
    assert bool(done.dropped) == (left is None)
    if left is not None:
        assert indices(done) == left
        assert (done.slot, done.epoch, done.attempt, done.version) == (4, 1, 1, 3)
    else:
        assert done.dropped.startswith("reward_filter: ")


def test_reward_filter_looks_at_one_component_and_leaves_failures_on_record() -> None:
    given = group(member(0, {"a": 1.0, "b": 0.0}), failed(1), member(2, {"a": 0.0, "b": 9.0}), greedy=member(3, 0.0))
    done = after({"kind": "reward_filter", "component": "a", "threshold": 0.5}, given)
    assert indices(done) == [0, 1]
    assert done.greedy is given.greedy
    with refused(DataError, "'c'", "'seven'", "['a', 'b']"):
        after({"kind": "reward_filter", "component": "c"}, given)


@pytest.mark.parametrize("kind", ["reward_filter", "reward_std_filter", "dedup", "metrics"])
def test_a_group_of_failures_alone_passes_by(kind: str) -> None:
    """The trainer must see it, or a run whose every rollout fails would go on for ever."""
    given = group(failed(0), failed(1))
    done = after(kind, given)
    assert not done.dropped
    assert indices(done) == [0, 1]
    assert [t.failure for t in done.trajectories] == [t.failure for t in given.trajectories]


@pytest.mark.parametrize(
    ("threshold", "rewards", "dropped"),
    [
        (0.0, (1.0, 1.0, 1.0), True),
        (0.0, (0.1 + 0.2, 0.3), True),  # one float32, two float64
        (0.0, (0.7,) * 7, True),
        (0.0, (1e8, 1e8 + 16), False),
        (0.0, (0.0, 1.0), False),
        (0.5, (0.0, 1.0), True),  # population standard deviation exactly 0.5
        (0.49, (0.0, 1.0), False),
        (0.0, (1.0,), False),
    ],
)
def test_reward_std_filter(threshold: float, rewards: tuple[float, ...], dropped: bool) -> None:
    done = after({"kind": "reward_std_filter", "threshold": threshold}, rewarded(*rewards))
    assert bool(done.dropped) == dropped


def test_a_member_whose_companions_failed_is_no_evidence_of_equal_rewards() -> None:
    assert not after("reward_std_filter", group(member(0, 1.0), failed(1), failed(2))).dropped


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"op": "add"}, {"a": 1.0, "b": 2.0, "steps": 4.0}),
        ({"op": "add", "weight": -0.5, "name": "brevity"}, {"a": 1.0, "b": 2.0, "brevity": -2.0}),
        ({"op": "sub", "weight": 0.25}, {"a": 1.0, "b": 2.0, "steps": -1.0}),
        ({"op": "mul", "weight": 0.5}, {"a": 2.0, "b": 4.0}),
        ({"op": "div"}, {"a": 0.25, "b": 0.5}),
    ],
)
def test_reward_shaping(options: dict[str, Any], expected: dict[str, float]) -> None:
    given = group(
        member(0, {"a": 1.0, "b": 2.0}, steps=4.0), failed(1), greedy=member(2, {"a": 1.0, "b": 2.0}, steps=4)
    )
    done = after({"kind": "reward_shaping", "metric": "steps", **options}, given)
    assert done.trajectories[0].rewards == expected
    assert done.trajectories[1] is given.trajectories[1]
    assert done.greedy is not None
    assert done.greedy.rewards == expected
    assert given.trajectories[0].rewards == {"a": 1.0, "b": 2.0}  # the group that was given is as it was


def test_what_reward_shaping_does_about_missing_numbers_and_impossible_ones() -> None:
    section = {"kind": "reward_shaping", "metric": "steps"}
    given = group(member(0, 1.0, steps=0.0), member(1, 1.0))
    with refused(DataError, "'steps'", "'seven'"):
        after(section, given)
    done = after({**section, "missing": "skip", "op": "div"}, given)
    assert done.trajectories[1] is given.trajectories[1]
    assert done.trajectories[0].failure == Failure(
        "operator", "RewardError", "the reward, div 1 * steps (0), cannot be used: division by zero"
    )
    huge = group(member(0, 1e8, steps=1e30))
    assert after({**section, "op": "mul"}, huge).trajectories[0].failure is not None
    with refused(DataError, "'exact'", "name"):
        after({**section, "name": "exact"}, group(member(0, 1.0, steps=1.0)))


def test_dedup_keeps_the_first_of_those_that_say_the_same_token_for_token() -> None:
    again = Trajectory(4, (turn(5, prompt=(1,)), turn(6)), {"exact": 1.0})
    given = group(
        member(0, 1.0, (5, 6)),
        member(1, 0.0, (5,)),
        member(2, 0.5, (5, 6)),
        failed(3),
        again,
        replace(again, index=5),
        Trajectory(6, (turn(9),), {"exact": 0.0}),
        Trajectory(7, (turn(9, prompt=(3,)),), {"exact": 0.0}),
    )
    assert indices(after("dedup", given)) == [0, 1, 3, 4, 6, 7]  # a failed member is nobody's first
    done = after({"kind": "dedup", "others": "fail"}, given)
    assert indices(done) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [t.index for t in done.alive] == [0, 1, 4, 6, 7]
    assert done.trajectories[2].failure == Failure("operator", "Duplicate", "its tokens equal those of member 0")
    assert done.trajectories[5].failure == Failure("operator", "Duplicate", "its tokens equal those of member 4")


def test_metrics_are_the_group_s_numbers_on_each_living_member() -> None:
    given = group(
        member(0, 1.0, (5,), turns=2.0), member(1, 0.0, (5,)), failed(2), member(3, 1.0, (6,)), member(4, 0.0, (7,))
    )
    done = after("metrics", given)
    expected = {"pass_rate": 0.5, "any_right": 1.0, "reward_std": 0.5, "distinct": 0.75}
    assert [dict(t.metrics) for t in done.trajectories] == [
        {"turns": 2.0, **expected},
        expected,
        {},
        expected,
        expected,
    ]
    strict = after({"kind": "metrics", "numbers": ["pass_rate", "any_right"], "threshold": 1.5}, given)
    assert strict.trajectories[1].metrics == {"pass_rate": 0.0, "any_right": 0.0}
    with refused(DataError, "distinct", "'seven'"):
        after("metrics", group(member(0, 1.0, distinct=1.0)))


# --------------------------------------------------------------------------- users' own, and what is checked of them

MINE = '''
from dataclasses import replace

from trivium.config import Plugin
from trivium.types import Capabilities


def odd(group):
    """Drops what has an even slot."""
    return group if group.slot % 2 else group.refused("its slot is even")


def gentle(group):
    return group


gentle.capabilities = Capabilities(drops=False)


def broken(group):
    return group.trajectories[7]


class Bonus:
    """Adds to every reward."""

    capabilities = Capabilities(drops=False)

    class Config(Plugin):
        kind: str = "bonus"
        amount: float = 1.0

    def __init__(self, config):
        self.amount = config.amount

    def __call__(self, group):
        members = (replace(t, rewards={**t.rewards, "bonus": self.amount}) for t in group.trajectories)
        return replace(group, trajectories=tuple(members))


NUMBER = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_user_s_function_and_class_are_operators_like_any_other(mine: str) -> None:
    both = pipeline(f"{mine}:odd", {"kind": f"{mine}:Bonus", "amount": 0.5})
    assert both(rewarded(1.0)).dropped == "odd: its slot is even"
    kept = both(replace(rewarded(1.0), slot=5))
    assert kept.trajectories[0].rewards == {"exact": 1.0, "bonus": 0.5}
    with refused(ConfigError, "amout", "amount"):
        configured([{"kind": f"{mine}:Bonus", "amout": 0.5}])
    with refused(ConfigError, f"{mine}:NUMBER"):
        pipeline(f"{mine}:NUMBER")


def test_an_operator_that_raises_ends_the_run_and_is_named(mine: str) -> None:
    with refused(DataError) as caught:
        after(f"{mine}:broken", rewarded(1.0))
    assert caught.value.asked == "the operator 'broken' on a group of task 'seven'"
    assert caught.value.found == "it raised IndexError: tuple index out of range"
    assert "group.refused" in caught.value.do
    assert isinstance(caught.value.__cause__, IndexError)


def _altered(given: Group) -> Group:
    changed = replace(given.trajectories[0], turns=(turn(1, 2, 3),))
    return replace(given, trajectories=(changed, *given.trajectories[1:]))


def _with(**change: Any) -> Callable[[Group], object]:
    return lambda given: replace(given, trajectories=(replace(given.trajectories[0], **change),))


@pytest.mark.parametrize(
    ("operator", "found"),
    [
        (lambda given: None, "a NoneType"),
        (lambda given: given.trajectories, "a tuple"),
        (lambda given: replace(given, slot=9), "slot 9"),
        (lambda given: replace(given, task=Task("other", ())), "task 'other'"),
        (lambda given: replace(given, version=0), "attempt or"),
        (_altered, "were rewritten"),
        (lambda given: replace(given, trajectories=(replace(given.trajectories[0], index=8),)), "not given"),
        (_with(rewards={"exact": float("nan")}), "'exact' of member 0"),
        (_with(rewards={"exact": np.float32(1.0)}), "'exact'"),
        (_with(metrics={"n": "three"}), "'n' of member 0"),
    ],
)
def test_an_answer_that_is_no_version_of_the_group_is_named(
    operator: Callable[[Group], object], found: str, monkeypatch: pytest.MonkeyPatch, mine: str
) -> None:
    through = pipeline(f"{mine}:gentle")
    monkeypatch.setattr(through, "_operators", [("gentle", operator)])
    with refused(DataError, "'gentle'", found):
        through(rewarded(1.0, 0.0))


def test_a_pipeline_that_lets_nothing_through_ends_the_run() -> None:
    through = pipeline({"kind": "reward_filter", "threshold": 2.0}, max_dropped_in_a_row=3)
    poor, rich = rewarded(1.0), rewarded(3.0)
    for given in (poor, poor, rich, poor, poor):
        assert bool(through(given).dropped) == (given is poor)
    with refused(RolloutsFailing, "'seven'", "last 3"):
        through(poor)


# --------------------------------------------------------------------------- what a config may say


def configured(operators: object, **said: Any) -> RunConfig:
    return configs.configured(buffer={"operators": operators, **said.pop("buffer", {})}, **said)


def test_operators_that_drop_are_refused_where_it_is_settled_which_version_plays_a_slot(mine: str) -> None:
    settled = {"schedule": {"deterministic": True, "max_staleness": 1}}
    shaping = {"kind": "reward_shaping", "metric": "steps"}
    configured([shaping, "dedup", "metrics", f"{mine}:gentle", f"{mine}:Bonus"], **settled)
    configured(["reward_filter", f"{mine}:odd"], schedule={"max_staleness": 1})
    configured(["reward_filter", f"{mine}:odd"], schedule={"deterministic": True})
    with refused(ConfigError) as caught:
        configured(["metrics", "reward_filter", "reward_std_filter", f"{mine}:odd"], **settled)
    assert [problem.where for problem in caught.value.problems] == [f"buffer.operators[{n}]" for n in (1, 2, 3)]
    assert all("may drop groups" in problem.asked for problem in caught.value.problems)


def test_operators_without_explorers_are_refused() -> None:
    rows = {"algorithm": "sft", "schedule": {"group_size": 1}}
    with refused(ConfigError, "'metrics'", "buffer.kind 'files'"):
        configured(["metrics"], buffer={"kind": "files"}, **rows)


# --------------------------------------------------------------------------- between an explorer and a buffer


def session(schedule: Schedule, directory: Path, deadly: tuple[str, int] | None = None, **said: Any) -> Session:
    through = pipeline({"kind": "reward_std_filter", "threshold": 0.6}, "dedup", "metrics", **said)
    return Session(
        schedule, directory, lambda number: Lengths(random.Random(number)), operators=(through,), deadly=deadly
    )


def journaled(directory: Path) -> dict[int, Group]:
    return {group.slot: group for group in Journal(directory / "rollouts").read(after_step=-1)}


@pytest.mark.parametrize("ahead", [0, 2])
def test_dropped_groups_are_counted_replaced_and_never_delivered(ahead: int, tmp_path: Path) -> None:
    schedule = Schedule(TASKS, seed=5, groups_per_step=3, group_size=3, steps=6, max_staleness=ahead)
    done = asyncio.run(session(schedule, tmp_path).live())
    taken = done.buffer.played
    assert len(taken) == 18
    stored = journaled(tmp_path)
    dropped = [slot for slot, group in stored.items() if group.dropped]
    assert 3 < len(dropped) == done.counted["dropped"]
    assert all(stored[slot].dropped.startswith("reward_std_filter: the standard deviation 0") for slot in dropped)
    assert not {group.slot for group in taken} & set(dropped)
    assert all(
        len({t.turns[0].tokens.tobytes() for t in group.trajectories}) == len(group.trajectories) >= 2
        for group in taken
    )
    rows = done.monitor.rows
    logged = sum(row["rollout/dropped"] for row in rows.values())
    assert logged <= len(dropped)  # groups that were dropped after the last step are in no row
    if not ahead:
        assert logged == len(dropped)
        assert sorted([*dropped, *(group.slot for group in taken)]) == list(range(18 + len(dropped)))
    for step, row in rows.items():
        mine = [group for version, groups in done.buffer.taken if version == step - 1 for group in groups]
        rates = [t.metrics["distinct"] for group in mine for t in group.alive]
        assert row["workflow/distinct"] == pytest.approx(sum(rates) / len(rates)) == 1.0  # dedup came before
        assert row["rollout/groups"] == 3
        assert all(step - 1 - group.oldest_version <= ahead for group in mine)


def test_a_killed_run_repeats_what_was_dropped(tmp_path: Path) -> None:
    schedule = Schedule(TASKS, seed=5, groups_per_step=3, group_size=3, steps=6)
    whole = asyncio.run(session(schedule, tmp_path / "whole").live())
    puts = len(journaled(tmp_path / "whole"))
    tombstones = [slot for slot, group in journaled(tmp_path / "whole").items() if group.dropped]
    for nth in range(2, puts, 3):
        directory = tmp_path / str(nth)
        lives = [asyncio.run(session(schedule, directory, ("put", nth)).live())]
        assert lives[0].killed
        lives.append(asyncio.run(session(schedule, directory, ("put", 4)).live()))
        while lives[-1].killed:
            lives.append(asyncio.run(session(schedule, directory).live()))
        assert lives[-1].counted == whole.counted
        assert {slot for slot, group in journaled(directory).items() if group.dropped} == set(tombstones)
        updates = {update[0]: update for life in lives for update in life.engine.updates}
        assert [updates[version] for version in sorted(updates)] == whole.engine.updates
        rows = {step: row for life in lives for step, row in life.monitor.rows.items()}
        assert rows == whole.monitor.rows
        again = Counter(group.slot for group in lives[-1].buffer.played)
        assert not set(again) & set(tombstones)


def test_a_run_that_drops_everything_ends(tmp_path: Path) -> None:
    schedule = Schedule(TASKS[:1], seed=5, groups_per_step=3, group_size=1, steps=6)
    through = pipeline({"kind": "reward_filter", "threshold": 99}, max_dropped_in_a_row=20)
    done = Session(schedule, tmp_path, lambda number: Lengths(random.Random(number)), operators=(through,))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(done.live())
    check_error(first_cause(caught.value), RolloutsFailing, "last 20")
