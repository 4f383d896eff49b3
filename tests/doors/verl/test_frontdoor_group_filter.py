"""`filter_groups` of verl's config: which groups a step leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.failing import refused
from tests.unit.algorithms.test_filters import played
from trivium.algorithms import build_algorithm
from trivium.config import AlgorithmConfig, plugin
from trivium.foundation.errors import DataError
from trivium.frontdoors.verl.group_filter import varied
from trivium.types import Group


def group(slot: int, *members: tuple[float | None, dict[str, float]]) -> Group:
    """A group of members with these rewards and metrics; one without a reward failed."""
    bare = played(slot, [reward for reward, _ in members])
    with_metrics = zip(bare.trajectories, members, strict=True)
    return replace(bare, trajectories=tuple(replace(member, metrics=metrics) for member, (_, metrics) in with_metrics))


def test_a_step_leaves_out_groups_whose_metric_is_the_same_in_all_members() -> None:
    filters = [{"kind": "trivium.frontdoors.verl.group_filter:varied", "metric": "acc"}]
    algorithm: Any = build_algorithm(plugin("algorithms", AlgorithmConfig)({"kind": "grpo", "filters": filters}), 0, 8)
    groups = [
        group(0, (0.5, {"acc": 1}), (0.2, {"acc": 1})),
        group(1, (0.5, {"acc": 1}), (0.5, {"acc": 0})),
        group(2, (0.5, {"acc": 1}), (None, {}), (0.1, {"acc": 1})),
        group(3, (1.0, {}), (0.0, {})),
        group(4, (1.0, {}), (1.0, {})),
    ]
    kept, metrics = algorithm.filter(groups)
    assert [group.slot for group in kept] == [1, 3]
    assert metrics["rollout/refused/varied"] == 3


def test_rewards_and_names_that_nothing_has() -> None:
    equal = group(0, (1.0, {"acc": 0}), (1.0, {"acc": 1}))
    assert not any(varied(equal, metric=name) for name in ("reward", "score", "seq_reward", "seq_final_reward"))
    assert varied(equal, metric="acc")
    assert varied(group(0, (1.0, {"acc": 1}), (None, {})), metric="acc")  # one alone is no evidence
    with refused(DataError, "'nope'", "acc"):
        varied(equal, metric="nope")
    with refused(DataError, "'acc'"):
        varied(group(0, (1.0, {"acc": 1}), (1.0, {})), metric="acc")
