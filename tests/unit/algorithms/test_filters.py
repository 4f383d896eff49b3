"""Which groups a step leaves out, what is said about them, and what a user may ask for."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from configs import algorithm_problems, with_algorithm
from failing import refused

from trivium.algorithms import GroupAlgorithm, build_algorithm
from trivium.algorithms.metadata import EstimatorMetadata
from trivium.explorer import check_failures
from trivium.foundation.errors import ConfigError, DataError, RolloutsFailing
from trivium.foundation.metrics import checked
from trivium.types import Failure, Group, StopReason, Task, Trajectory, Turn

FAILED = Failure("reward", "ValueError", "no number")


def played(slot: int, rewards: Sequence[float | None], number: int = 2, greedy: float | None = None) -> Group:
    """A group with these rewards, None being a member that failed."""
    turn = Turn(np.arange(2), np.arange(number), np.zeros(number), np.zeros(number), StopReason.EOS, "")

    def member(index: int, reward: float | None) -> Trajectory:
        return Trajectory(
            index, (turn,), {} if reward is None else {"exact": reward}, FAILED if reward is None else None
        )

    baseline = None if greedy is None else member(len(rewards), greedy)
    return Group(slot, Task(f"t{slot}", ()), tuple(member(i, r) for i, r in enumerate(rewards)), greedy=baseline)


def algorithm(base: Path | None = None, **said: object) -> GroupAlgorithm:
    return build_algorithm(with_algorithm({"kind": "grpo", **said}, base).algorithm)


GROUPS = [
    played(0, [1.0, 0.0]),
    played(1, [1.0, 1.0], number=8),
    played(2, [0.0, 0.0]),
    played(3, [1.0, None]),
    played(4, [None, None]),
    played(5, [0.25, 0.75]),
]


def test_a_refused_group_is_counted_once_under_the_first_rule_that_refuses_it() -> None:
    which = algorithm(filters=["zero_variance", {"kind": "difficulty", "low": 0.5, "high": 2.0}])
    kept, metrics = which.filter(GROUPS)
    assert kept == []
    found = {key: value for key, value in checked(metrics).items() if key.startswith("rollout/refused")}
    assert found == {
        "rollout/refused": 6,
        "rollout/refused/too_few_alive": 2,
        "rollout/refused/zero_variance": 2,
        "rollout/refused/difficulty": 2,
    }
    assert metrics["rollout/groups"] == 6


def test_a_column_of_the_reference_without_numbers_is_an_error() -> None:
    group = Group(0, Task("t", (), {"reference_rewards": ["1.0", 0.0]}), GROUPS[0].trajectories)
    with refused(DataError, "reference_rewards", "'t'", "'1.0'"):
        algorithm(filters=["reference_solved"]).filter([group])


def test_what_was_played_is_told_apart_from_what_is_trained_on() -> None:
    """A filter that drops the hard tasks must not make the policy look better than it is."""
    plain, filtering = algorithm(), algorithm(filters=["zero_variance"])
    (_, everything), (kept, metrics) = plain.filter(GROUPS), filtering.filter(GROUPS)
    assert [g.slot for g in kept] == [0, 5]
    assert metrics["reward/trained_mean"] == pytest.approx(0.5)
    assert metrics["rollout/trajectories"] == 4
    assert metrics["reward/mean"] == pytest.approx(5 / 9)
    for key in ("reward/mean", "reward/std", "reward/equal_groups", "rollout/response_tokens", "rollout/failed"):
        assert metrics[key] == everything[key]
    assert metrics["reward/equal_groups"] == 0.5


def test_a_step_asks_each_group_by_itself() -> None:
    which = algorithm(filters=["zero_variance"])
    one_by_one = [g.slot for g in GROUPS if which.filter([g])[0]]
    assert one_by_one == [g.slot for g in which.filter(GROUPS)[0]] == [g.slot for g in which.filter(GROUPS)[0]]


def test_a_group_is_judged_against_a_greedy_reply_or_not_at_all() -> None:
    which = algorithm(advantage={"kind": "remax"})
    assert which.greedy_baseline
    assert not algorithm().greedy_baseline
    groups = [played(0, [1.0, 0.0], greedy=1.0), played(1, [1.0, 0.0], greedy=0.0)]
    kept, metrics = which.filter(groups)
    assert (len(kept), metrics["reward/greedy"], metrics["reward/mean"]) == (2, 0.5, 0.5)
    assert [e.greedy_reward for e in which.batch(groups).experiences] == [1.0, 1.0, 0.0, 0.0]
    lost = Group(2, Task("t2", ()), played(2, [1.0, 0.0]).trajectories, greedy=Trajectory(2, failure=FAILED))
    kept, metrics = which.filter([*groups, lost])
    assert [g.slot for g in kept] == [0, 1]
    assert (metrics["rollout/refused/greedy_failed"], metrics["rollout/failed"]) == (1, 1)
    with refused(DataError, "greedy", "'t0'", "run.dir"):
        which.filter([GROUPS[0]])


def test_greedy_failures_are_failures_of_the_step() -> None:
    lost = [Group(0, Task("t", ()), played(0, [1.0]).trajectories, greedy=Trajectory(1, failure=FAILED))]
    check_failures(lost, 0.5, "step 1")
    with refused(RolloutsFailing, "step 1", "1 of 2"):
        check_failures(lost, 0.4, "step 1")


OWN = """
from typing import Annotated

from pydantic import Field

from trivium.algorithms import ShapingInputs, group_filter, reward_shaping


@group_filter(formula="keep if fewer than most living members", source="here")
def small(group, *, most: Annotated[int, Field(ge=1)] = 2) -> bool:
    return len(group.alive) < most


@reward_shaping(formula="gain R", source="here")
def louder(x: ShapingInputs, *, gain: Annotated[float, Field(gt=0)] = 2.0):
    return gain * x.reward
"""


def test_a_user_adds_filters_and_shapings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    said = {"filters": [{"kind": "own.py:small", "most": 3}], "shaping": ["own.py:louder"], "kind": "reinforce"}
    which = algorithm(tmp_path, **said)
    kept, metrics = which.filter([played(0, [1.0, 2.0]), played(1, [1.0] * 3)])
    assert ([g.slot for g in kept], metrics["rollout/refused/small"]) == ([0], 1)
    assert which.advantages(which.batch(kept))[1]["reward/shaped_mean"] == 3.0
    for key in ("filters", "shaping"):
        with refused(ConfigError, "ShapingMetadata" if key == "shaping" else "FilterMetadata"):
            algorithm(tmp_path, **{key: ["trivium.algorithms.estimators.group:grpo"]})
        with refused(ConfigError, "hig", "high"):
            algorithm(tmp_path, **{key: [{"kind": "clip" if key == "shaping" else "difficulty", "hig": 1}]})


def test_what_would_have_no_effect_is_refused() -> None:
    problems = algorithm_problems({"kind": "reinforce", "filters": ["overlong", "zero_variance"]}, group_size=1)
    assert list(problems) == ["algorithm.filters[1]"]
    assert "no group of 1" in problems["algorithm.filters[1]"]
    assert with_algorithm({"kind": "grpo", "filters": ["zero_variance"]}, group_size=2)
    assert "algorithm.filters" in algorithm_problems({"kind": "sft", "filters": ["zero_variance"]})
    problems = algorithm_problems({"kind": "grpo", "advantage": "remax", "shaping": ["clip"]})
    assert "a greedy completion, before shaping" in problems["algorithm.shaping"]
    problems = algorithm_problems({"kind": "grpo", "advantage": "gdpo", "shaping": ["clip"]})
    assert "reads no total reward" in problems["algorithm.shaping"]


@pytest.mark.parametrize("schedule", [{"max_staleness": 1, "deterministic": True}, {"deterministic": True}, {}])
def test_refill_wants_a_run_whose_versions_do_not_hang_on_it(schedule: dict[str, object]) -> None:
    if schedule.get("max_staleness"):
        assert list(algorithm_problems({"kind": "grpo", "refill": 1}, **schedule)) == ["algorithm.refill"]
        assert with_algorithm({"kind": "grpo"}, **schedule)
    else:
        assert build_algorithm(with_algorithm({"kind": "grpo", "refill": 3}, **schedule).algorithm).refill == 3


def test_an_algorithm_with_moments_crosses_a_process_boundary() -> None:
    which = algorithm(filters=["zero_variance"], shaping=["running_normalise", "clip"], mask_truncated=True)
    groups = [played(0, [1.0, 0.0])]
    which.advantages(which.batch(groups))
    other = pickle.loads(pickle.dumps(which))
    assert other.state() == which.state()
    assert other.state()["moments"][0]["count"] == 2
    assert isinstance(other.estimator.metadata, EstimatorMetadata)


def test_a_group_whose_members_hardly_differ_is_refused_by_its_standard_deviation() -> None:
    which = algorithm(filters=[{"kind": "low_std", "threshold": 0.4}])
    kept, _ = which.filter([played(0, [1.0, 0.0, None]), played(1, [0.25, 0.75])])
    assert [group.slot for group in kept] == [0]  # 0.707 and 0.354
    edge = algorithm(filters=["low_std"])
    assert [group.slot for group in edge.filter([played(0, [1.0, 1.0]), played(1, [1.0, 0.999])])[0]] == [1]


def test_resampling_has_an_exponent_only_for_the_power() -> None:
    said = {"kind": "grpo", "resample": {"weights": "best", "power": 3.0}}
    assert list(algorithm_problems(said)) == ["algorithm.resample.power"]
    assert with_algorithm({"kind": "grpo", "resample": {"power": 3.0}})
