"""Filters and shapings against slow loops from the papers, and where shaped rewards end up."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import episodes
import numpy as np
import pytest
import torch
from configs import with_algorithm
from episodes import group
from failing import refused
from hypothesis import given
from hypothesis import strategies as st

from trivium.algorithms import GroupAlgorithm, ShapingInputs, build_algorithm, reward_shaping
from trivium.algorithms.metadata import FilterMetadata, ShapingMetadata, resolve_function
from trivium.algorithms.shaping import Moments, Shaping, shaped
from trivium.config import AlgorithmConfig, plugin
from trivium.foundation.errors import DataError
from trivium.foundation.metrics import checked
from trivium.types import Failure, Group, StopReason, Task, Trajectory, Turn

# --------------------------------------------------------------------------- what a config would call


def shape(
    kind: str,
    rewards: Sequence[float],
    lengths: Sequence[int] = (),
    groups: Sequence[int] = (),
    *,
    max_new_tokens: int = 20,
    moments: Moments | None = None,
    **options: object,
) -> list[float]:
    function, _ = resolve_function("shapings", plugin("shapings")({"kind": kind, **options}), ShapingMetadata)
    total = len(rewards)
    x = ShapingInputs(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(lengths or [1] * total),
        torch.zeros(total).bool(),
        torch.tensor(groups or [0] * total),
        max_new_tokens,
        moments,
    )
    return function(x).tolist()


def keeps(kind: str, group: Group, **options: object) -> bool:
    return resolve_function("filters", plugin("filters")({"kind": kind, **options}), FilterMetadata)[0](group)


def turn(prompt: Sequence[int], number: int, stop: StopReason = StopReason.EOS) -> Turn:
    return episodes.turn(prompt, range(3, 3 + number), stop=stop)


def member(
    index: int, reward: float, number: int = 3, stop: StopReason = StopReason.EOS, **components: float
) -> Trajectory:
    return Trajectory(index, (turn([1, 2], number, stop),), {"exact": reward, **components})


def failed(index: int) -> Trajectory:
    return Trajectory(index, failure=Failure("reward", "ValueError", "no number"))


def algorithm(kind: str = "grpo", max_new_tokens: int = 20, **said: object) -> GroupAlgorithm:
    return build_algorithm(plugin("algorithms", AlgorithmConfig)({"kind": kind, **said}), 0, max_new_tokens)


NUMBERS = st.floats(-100, 100, width=32)

# --------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("rewards", "tolerance", "kept"),
    [
        ([0.7] * 8, 0.0, False),
        ([0.0, 0.0, 1.0], 0.0, True),
        ([0.1, 0.2], 0.05, True),
        ([0.1, 0.2], 0.15, False),
        ([0.3], 0.0, True),
        ([-1.0, 1.0], 2.0, False),
        ([1e-300, 0.0], 0.0, True),
    ],
)
def test_zero_variance_asks_whether_any_two_members_differ(rewards: list[float], tolerance: float, kept: bool) -> None:
    members = [member(index, reward) for index, reward in enumerate(rewards)]
    with_failure = group(0, *members, failed(len(members)))
    assert keeps("zero_variance", with_failure, tolerance=tolerance) is kept


@pytest.mark.parametrize(
    ("reference_rewards", "kept"),
    [([0.0, 0.0], False), ([0.0, 1.0], True), ([0.2], True), (0.0, False), (0.5, True), (None, True)],
)
def test_reference_solved_asks_whether_any_reference_sample_was_right(reference_rewards: Any, kept: bool) -> None:
    columns = {} if reference_rewards is None else {"reference_rewards": reference_rewards}
    rolled_out = replace(group(0, member(0, 0.0)), task=Task("t", (), columns))
    assert keeps("reference_solved", rolled_out) is kept


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), st.floats(0, 1))
def test_zero_variance_against_all_pairs(rewards: list[float], tolerance: float) -> None:
    played = group(0, *(member(index, reward) for index, reward in enumerate(rewards)))
    differ = any(abs(a - b) > tolerance for a in rewards for b in rewards)
    assert keeps("zero_variance", played, tolerance=tolerance) is (differ or len(rewards) == 1)


def test_a_filter_may_look_at_one_component() -> None:
    played = group(0, member(0, 1.0, style=0.0), member(1, 1.0, style=0.5))
    assert keeps("zero_variance", played)
    assert not keeps("zero_variance", played, component="exact")
    assert keeps("zero_variance", played, component="style")
    assert keeps("difficulty", played, component="style")
    assert not keeps("difficulty", played, component="exact")
    with refused(DataError, "'accuracy'", "['exact', 'style']"):
        keeps("zero_variance", played, component="accuracy")


@given(st.lists(st.integers(0, 1), min_size=1, max_size=8))
def test_difficulty_by_default_is_the_constraint_of_dapo(right: list[int]) -> None:
    played = group(0, *(member(index, float(one)) for index, one in enumerate(right)))
    assert keeps("difficulty", played) is (0 < sum(right) < len(right))


@pytest.mark.parametrize(
    ("rewards", "kept"), [([0.0, 0.4], False), ([0.2, 0.3], True), ([0.8, 0.7], True), ([0.8, 0.8], False)]
)
def test_difficulty_bounds_do_not_belong_to_what_is_kept(rewards: list[float], kept: bool) -> None:
    played = group(0, *(member(index, reward) for index, reward in enumerate(rewards)))
    assert keeps("difficulty", played, low=0.2, high=0.8) is kept


@pytest.mark.parametrize(("cut", "below", "kept"), [(4, 1.0, False), (3, 1.0, True), (2, 0.5, False), (1, 0.5, True)])
def test_overlong_counts_the_members_that_were_cut(cut: int, below: float, kept: bool) -> None:
    reasons = [StopReason.LENGTH] * cut + [StopReason.EOS] * (4 - cut)
    played = group(0, *(member(index, 0.0, stop=stop) for index, stop in enumerate(reasons)), failed(4))
    assert keeps("overlong", played, below=below) is kept


# --------------------------------------------------------------------------- shapings


@pytest.mark.parametrize(
    ("limit", "buffer", "factor", "lengths", "penalty"),
    [
        (20, 4, 1.0, [1, 15, 16, 17, 18, 19, 20], [0, 0, 0, -0.25, -0.5, -0.75, -1]),
        (32, 8, 0.5, [10, 24, 25, 28, 31, 32], [0, 0, -0.0625, -0.25, -0.4375, -0.5]),
        (24, 24, 1.0, [1, 6, 12, 24], [-1 / 24, -0.25, -0.5, -1]),
        (1024, 256, 1.0, [700, 768, 769, 896, 1024, 1025, 1152, 4000], [0, 0, -1 / 256, -0.5, -1, -1, -1, -1]),
        (20, 4, 0.5, [16, 18, 20, 21, 40], [0, -0.25, -0.5, -0.5, -0.5]),
    ],
)
def test_the_overlong_penalty_of_the_reference_implementations_capped(
    limit: int, buffer: int, factor: float, lengths: list[int], penalty: list[float]
) -> None:
    options = {"factor": factor, "buffer": buffer / limit}
    done = shape("overlong_penalty", [0.0] * len(lengths), lengths, max_new_tokens=limit, **options)
    assert done == pytest.approx(penalty, abs=1e-12)
    said = shape("overlong_penalty", [2.0] * len(lengths), lengths, max_new_tokens=7, limit=limit, **options)
    assert said == pytest.approx([2.0 + lost for lost in penalty], abs=1e-12)


@given(st.integers(1, 300), st.floats(0.01, 1), st.floats(0.1, 3), st.lists(st.integers(0, 400), min_size=1))
def test_overlong_penalty_against_dapo_equation_13(
    longest: int, buffer: float, factor: float, lengths: list[int]
) -> None:
    cache = max(1, round(buffer * longest))

    def penalty(length: int) -> float:
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    done = shape(
        "overlong_penalty", [0.5] * len(lengths), lengths, max_new_tokens=longest, factor=factor, buffer=buffer
    )
    assert done == pytest.approx([0.5 + factor * penalty(length) for length in lengths], abs=1e-9)


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 50)), min_size=1), st.floats(0.01, 2))
def test_length_penalty_is_linear(members: list[tuple[float, int]], coef: float) -> None:
    rewards, lengths = [r for r, _ in members], [n for _, n in members]
    done = shape("length_penalty", rewards, lengths, max_new_tokens=50, coef=coef)
    assert done == pytest.approx([r - coef * n / 50 for r, n in members], abs=1e-9)
    done = shape("length_penalty", rewards, lengths, max_new_tokens=50, coef=coef, limit=10)
    assert done == pytest.approx([r - coef * n / 10 for r, n in members], abs=1e-9)


@pytest.mark.parametrize("kind", ["length_penalty", "overlong_penalty"])
def test_a_length_needs_a_limit(kind: str) -> None:
    with refused(DataError, "`limit`", "max_new_tokens"):
        shape(kind, [0.0], [1], max_new_tokens=0)


def several(index: int, *lengths: int) -> Trajectory:
    """A trajectory with a completion of each of these lengths, in one conversation."""
    turns, prompt = list[Turn](), [1, 2]
    for number in lengths:
        turns.append(turn(prompt, number))
        prompt = [*prompt, *range(3, 3 + number), 2]
    return Trajectory(index, tuple(turns), {"exact": 1.0})


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"kind": "overlong_penalty", "buffer": 0.5}, [0, 0, 1, 0.5]),  # the longest completion against 8
        ({"kind": "overlong_penalty", "buffer": 0.5, "limit": 24}, [0, 0, 0, 1]),  # all of them against 24
        ({"kind": "length_penalty", "coef": 1.0}, [12 / 8, 4 / 8, 10 / 8, 24 / 8]),  # every token costs the same
    ],
)
def test_length_and_limit_are_both_of_a_completion_or_both_of_a_trajectory(
    options: dict[str, Any], lost: list[float]
) -> None:
    which = algorithm("reinforce", max_new_tokens=8, shaping=[options])
    members = [several(0, 4, 4, 4), several(1, 4), several(2, 1, 8, 1), several(3, 6, 6, 6, 6)]
    assert [each.num_tokens for each in members] == [12, 4, 10, 24]
    shaped_rewards, _ = returns(which, [group(0, *members)])
    assert [1 - reward for reward in shaped_rewards] == pytest.approx(lost, abs=1e-6)


def test_the_longest_completion_is_found_in_a_history_that_was_rewritten() -> None:
    """Its turns are in two sequences."""
    rewritten = Trajectory(0, (turn([1, 2], 8), turn([1, 9], 3)), {"exact": 1.0})
    other = Trajectory(1, (turn([1, 2], 3), turn([1, 9], 3)), {"exact": 1.0})
    which = algorithm("reinforce", max_new_tokens=8, shaping=[{"kind": "overlong_penalty"}])
    shaped_rewards, _ = returns(which, [group(0, rewritten, other)])
    assert shaped_rewards == [0.0, 0.0, 1.0, 1.0]


def test_dapo_and_its_plan_say_what_is_compared() -> None:
    config = with_algorithm("dapo", steps=1)
    assert "longest turn" in config.algorithm.describe(config)["lengths"]
    section = {"kind": "dapo", "shaping": [{"kind": "overlong_penalty", "limit": 99}]}
    config = with_algorithm(section, steps=1)
    assert "99" in config.algorithm.describe(config)["lengths"]
    assert "lengths" not in with_algorithm("grpo", steps=1).algorithm.describe(with_algorithm("grpo", steps=1))


MEMBERS = st.lists(st.tuples(NUMBERS, st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=12)


@given(MEMBERS, st.floats(0.1, 2), st.floats(-1, 1))
def test_relative_length_against_kimi(members: list[tuple[float, int, int]], coef: float, threshold: float) -> None:
    rewards, lengths, groups = (list(column) for column in zip(*members, strict=True))
    expected = []
    for reward, length, which in members:
        mine = [n for _, n, g in members if g == which]
        weight = 0.0 if max(mine) == min(mine) else 0.5 - (length - min(mine)) / (max(mine) - min(mine))
        expected.append(reward + coef * (weight if reward >= threshold else min(0.0, weight)))
    done = shape("relative_length", rewards, lengths, groups, coef=coef, threshold=threshold)
    assert done == pytest.approx(expected, abs=1e-9)


@given(st.lists(NUMBERS, min_size=1), st.floats(-5, 0), st.floats(0, 5))
def test_clip_and_scale_shift(rewards: list[float], low: float, high: float) -> None:
    assert shape("clip", rewards, low=low, high=high) == [min(max(r, low), high) for r in rewards]
    done = shape("scale_shift", rewards, scale=low, shift=high)
    assert done == pytest.approx([low * r + high for r in rewards], abs=1e-9)
    assert shape("scale_shift", rewards) == rewards


@given(MEMBERS, st.booleans())
def test_group_normalise_against_its_definition(members: list[tuple[float, int, int]], norm_by_std: bool) -> None:
    rewards, lengths, groups = (list(column) for column in zip(*members, strict=True))
    expected = []
    for reward, _, which in members:
        mine = [r for r, _, g in members if g == which]
        if len(mine) == 1:
            expected.append(reward)
        else:
            std = statistics.stdev(mine) + 1e-6 if norm_by_std else 1.0
            expected.append((reward - statistics.fmean(mine)) / std)
    done = shape("group_normalise", rewards, lengths, groups, norm_by_std=norm_by_std)
    assert done == pytest.approx(expected, rel=1e-6, abs=1e-4)  # a std of 1e-6 makes rounding visible


def test_equal_rewards_of_a_group_are_normalised_to_exactly_nothing() -> None:
    for norm_by_std in (True, False):
        assert shape("group_normalise", [0.7] * 8, norm_by_std=norm_by_std) == [0.0] * 8


@given(st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=5), st.booleans())
def test_moments_are_those_of_everything_seen(batches: list[list[float]], minus_mean: bool) -> None:
    seen, moments = [], Moments()
    for batch in batches:
        seen += batch
        moments.update(batch)
        assert moments.count == len(seen)
        assert moments.mean == pytest.approx(statistics.fmean(seen or [0.0]), abs=1e-9)
        std = statistics.stdev(seen) if len(seen) > 1 else 0.0
        assert moments.std == pytest.approx(std, rel=1e-6, abs=1e-6)
        spread = moments.std if moments.std >= 1e-6 else 1.0
        taken = moments.mean if minus_mean else 0.0
        done = shape("running_normalise", [3.0, -4.0], moments=moments, minus_mean=minus_mean)
        assert done == pytest.approx([(3.0 - taken) / spread, (-4.0 - taken) / spread], rel=1e-12)


def test_role_baseline_is_the_mean_of_the_role_over_all_steps() -> None:
    which, seen = algorithm("reinforce", shaping=["role_baseline"]), {"a": list[float](), "b": list[float]()}
    for slot, games in enumerate([[(1.0, -1.0)], [(0.0, 1.0), (0.5, -0.25)]]):
        turns = tuple(episodes.turn([1], [5], participant=role) for role in seen)
        played = [Trajectory(index, turns, {"a": a, "b": b}) for index, (a, b) in enumerate(games)]
        batch, _ = which.advantages(which.batch([group(slot, *played)]))
        for a, b in games:
            seen["a"].append(a)
            seen["b"].append(b)
        for e, row in zip(batch.experiences, batch.columns["advantages"], strict=True):
            expected = e.reward - statistics.fmean(seen[e.participant])
            assert float(row[-1]) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.randoms())
def test_the_order_within_a_step_makes_no_difference_to_the_moments(numbers: list[float], dice) -> None:
    shuffled = dice.sample(numbers, len(numbers))
    one, other = Moments(), Moments()
    for moments, batch in ((one, numbers), (other, shuffled)):
        moments.update([1.5, 2.5])
        moments.update(batch)
    assert one == other


def test_rewards_without_spread_are_not_blown_up() -> None:
    moments = Moments()
    for _ in range(5):
        moments.update([0.7] * 8)
        assert shape("running_normalise", [0.7] * 8, moments=moments) == [0.7] * 8
    alone = Moments()
    alone.update([5.0])
    assert shape("running_normalise", [5.0], moments=alone, minus_mean=True) == [0.0]
    assert shape("running_normalise", [0.1, 0.3], moments=Moments(2, 0.2, 0.02), min_std=0.5) == [0.1, 0.3]
    with refused(DataError, "running_normalise", "moments"):
        shape("running_normalise", [1.0])


@reward_shaping(formula="R, but one too few", source="here")
def short(x: ShapingInputs) -> torch.Tensor:
    return x.reward[1:]


@reward_shaping(formula="R / 0", source="here")
def infinite(x: ShapingInputs) -> torch.Tensor:
    return x.reward / 0


@pytest.mark.parametrize("function", [short, infinite])
def test_a_shaping_that_gives_no_finite_number_per_trajectory_is_named(function) -> None:
    x = ShapingInputs(torch.ones(3).double(), torch.ones(3).long(), torch.zeros(3).bool(), torch.zeros(3).long(), 9)
    with refused(DataError, function.__name__):
        shaped([Shaping(function, function.metadata)], x)


# --------------------------------------------------------------------------- through the algorithm


def returns(which: GroupAlgorithm, groups: Sequence[Group], **columns: list[np.ndarray]) -> tuple[list[float], dict]:
    """What each row's last trained token is worth, and the metrics."""
    batch, metrics = which.advantages(which.batch(groups).with_columns(**columns))
    last = [np.flatnonzero(e.response_mask)[-1] for e in which.batch(groups).experiences]
    return [float(row[place]) for row, place in zip(batch.columns["returns"], last, strict=True)], checked(metrics)


def test_shapings_apply_in_the_order_of_the_config_and_are_logged() -> None:
    groups = [group(0, member(0, 4.0, 10), member(1, 1.0, 2))]
    steps = [{"kind": "length_penalty", "coef": 2.0}, {"kind": "clip", "high": 2.5}]
    done, metrics = returns(algorithm("reinforce", shaping=steps), groups)
    assert done == pytest.approx([2.5, 0.8])
    assert metrics["reward/shaped_mean"] == pytest.approx(1.65)
    done, metrics = returns(algorithm("reinforce", shaping=steps[::-1]), groups)
    assert done == pytest.approx([1.5, 0.8])
    assert metrics["reward/shaped_mean"] == pytest.approx(1.15)
    done, metrics = returns(algorithm("reinforce"), groups)
    assert done == [4.0, 1.0]
    assert "reward/shaped_mean" not in metrics


def test_a_kl_penalty_comes_off_after_shaping() -> None:
    kl = {"coef": 0.5, "place": "reward", "estimator": "k1"}
    which = algorithm("reinforce", shaping=[{"kind": "clip", "high": 1.0}], kl=kl)
    groups = [group(0, member(0, 9.0, 1))]
    ref = [e.rollout_log_prob - np.float32(0.4) * e.response_mask for e in which.batch(groups).experiences]
    done, metrics = returns(which, groups, ref_log_prob=ref)
    assert done == pytest.approx([1.0 - 0.5 * 0.4])
    assert metrics["train/ref_kl"] == pytest.approx(0.4)
    assert metrics["reward/shaped_mean"] == 1.0


def test_a_trajectory_of_several_rows_has_one_length_and_one_reward() -> None:
    rewritten = Trajectory(0, (turn([1, 2], 4), turn([9], 6)), {"exact": 1.0})
    which = algorithm("reinforce", shaping=[{"kind": "length_penalty", "coef": 1.0}])
    done, metrics = returns(which, [group(0, rewritten, member(1, 0.0, 5))])
    assert done == pytest.approx([1.0 - 10 / 20, 1.0 - 10 / 20, -5 / 20])
    assert metrics["reward/shaped_mean"] == pytest.approx((0.5 - 0.25) / 2)


def test_members_of_different_groups_are_not_compared() -> None:
    which = algorithm("reinforce", shaping=[{"kind": "relative_length", "coef": 1.0}])
    groups = [group(0, member(0, 1.0, 2), member(1, 1.0, 4)), group(1, member(0, 1.0, 9), member(1, 1.0, 9))]
    assert returns(which, groups)[0] == pytest.approx([1.5, 0.5, 1.0, 1.0])


def test_running_moments_count_each_reward_once_and_survive_a_resume_to_the_bit() -> None:
    said = {"shaping": [{"kind": "scale_shift", "scale": 0.1}, {"kind": "running_normalise", "minus_mean": True}]}

    def step(which: GroupAlgorithm, *rewards: float) -> list[float]:
        return returns(which, [group(0, *(member(index, reward) for index, reward in enumerate(rewards)))])[0]

    one = algorithm("reinforce", **said)
    step(one, 0.1, 0.7, 0.4)
    step(one, 1 / 3, -2.0)
    seen = [0.1 * reward for reward in (0.1, 0.7, 0.4, 1 / 3, -2.0)]
    (state,) = one.state()["moments"]
    assert (state["count"], state["mean"]) == (5, pytest.approx(statistics.fmean(seen)))
    assert math.sqrt(state["squares"] / 4) == pytest.approx(statistics.stdev(seen))
    other = algorithm("reinforce", **said)
    other.restore(json.loads(json.dumps(one.state())))
    assert step(one, 0.9, 0.2) == step(other, 0.9, 0.2)
    assert one.state() == other.state()
    assert returns(algorithm("reinforce", **said), [group(0, member(0, 5.0))])[0] == [0.0]  # the first one ever
    assert algorithm("reinforce").state() == {}


def test_nothing_to_shape_is_nothing_seen() -> None:
    which = algorithm("reinforce", shaping=["running_normalise"])
    batch, metrics = which.advantages(which.batch([]))
    assert (len(batch), metrics, which.state()["moments"][0]["count"]) == (0, {}, 0)


def test_equal_rewards_stay_worth_nothing_after_shaping() -> None:
    shaping = ["running_normalise", {"kind": "scale_shift", "scale": 3.0, "shift": 0.1}, "clip"]
    which = algorithm("grpo", shaping=shaping)
    batch = which.batch([group(0, *(member(index, 0.7) for index in range(8)))])
    for _ in range(3):
        assert all((row == 0).all() for row in which.advantages(batch)[0].columns["advantages"])


def test_masked_truncated_members_are_judged_with_their_group_and_not_trained_on() -> None:
    cut = Trajectory(1, (turn([1, 2], 3), turn([9], 2, StopReason.LENGTH)), {"exact": 0.0})
    went_on = Trajectory(2, (turn([1, 2], 3, StopReason.LENGTH), turn([9], 2)), {"exact": 0.0})
    groups = [group(0, member(0, 1.0), cut, went_on)]
    plain, masking = (algorithm("grpo", mask_truncated=on, advantage={"norm_by_std": False}) for on in (False, True))
    before, _ = plain.advantages(plain.batch(groups))
    after, _ = masking.advantages(masking.batch(groups))
    for a, b in zip(before.columns["advantages"], after.columns["advantages"], strict=True):
        np.testing.assert_array_equal(a, b)
    assert [e.num_response_tokens for e in before.experiences] == [3, 3, 2, 3, 2]
    assert [e.num_response_tokens for e in after.experiences] == [3, 0, 0, 3, 2]


# --------------------------------------------------------------------------- resampling


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"weights": "power", "power": 2.0}, [0.25, 0.0, 4.0, 1.0]),
        ({"weights": "power", "power": 1.0}, [0.5, 0.0, 2.0, 1.0]),
        ({"weights": "extremes"}, [0.0, 0.0, 1.0, 1.0]),
        ({"weights": "best"}, [0.1, 0.1, 0.4, 0.1]),
    ],
)
def test_trajectories_are_drawn_by_their_rewards(options: dict[str, object], weights: list[float]) -> None:
    """PF-PPO: in a step of many groups, a trajectory is trained on in proportion to its weight, with the advantage that
    it had before the draw. The draw is a function of the seed and the groups."""
    which, plain = algorithm("reinforce", resample=options), algorithm("reinforce")
    rewards, number = [0.5, 0.0, 2.0, -1.0], 1000
    groups = [group(g, *(member(index, reward) for index, reward in enumerate(rewards))) for g in range(number)]
    batch, _ = which.advantages(which.batch(groups))
    drawn = np.bincount([e.index for e in batch.experiences], minlength=4)
    np.testing.assert_allclose(drawn, 4 * number * np.array(weights) / sum(weights), atol=5 * math.sqrt(number))
    for e, advantages in zip(batch.experiences, batch.columns["advantages"], strict=True):
        assert advantages[-1] == rewards[e.index]
    few = groups[:50]
    once, again = ([(e.group_id, e.index) for e in which.advantages(which.batch(few))[0].experiences] for _ in range(2))
    assert once == again
    assert len(plain.advantages(plain.batch(few))[0]) == len(once) == 4 * len(few)
    assert len(batch) == 4 * number


def test_a_drawn_trajectory_brings_all_of_its_sequences() -> None:
    rewrote = Trajectory(0, (turn([1, 2], 3), turn([9], 2)), {"exact": 1.0})
    which = algorithm("reinforce", resample={})
    batch, _ = which.advantages(which.batch([group(0, rewrote, member(1, 0.0))]))
    assert [(e.index, e.num_response_tokens) for e in batch.experiences] == [(0, 3), (0, 3), (0, 2), (0, 2)]
