"""`algorithm.filter_groups` of verl: groups are compared by a number that the reward manager gave each rollout."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivium.algorithms.filters import zero_variance
from trivium.algorithms.metadata import group_filter
from trivium.foundation.errors import DataError
from trivium.types import Group

OF_REWARD = ("reward", "score", "seq_reward", "seq_final_reward")
"""Metrics that are the reward itself."""


@group_filter(
    formula="keep if max(M) - min(M) > 0, M the metric of the living members",
    source="dynamic sampling: DAPO, Yu et al. 2025, section 3.2",
    min_group=2,
)
def varied(
    group: Group,
    *,
    metric: Annotated[str, Field(description="a name in the extra information of rewards, or 'reward'")] = "reward",
) -> bool:
    """`zero_variance` of a metric. `acc` stands for the reward if no member has a metric of this name.

    Raises DataError if a member lacks the metric.
    """
    members = [member.metrics for member in group.alive]
    if metric in OF_REWARD or (metric == "acc" and not any(metric in metrics for metrics in members)):
        return zero_variance(group)
    missing = next((metrics for metrics in members if metric not in metrics), None)
    if missing is not None:
        raise DataError(
            f"a number {metric!r} for each rollout (algorithm.filter_groups.metric)",
            f"a rollout of task {group.task.task_id!r} has {', '.join(sorted(missing)) or 'none'}",
            "return it from the scorer in addition to `score`, or set metric: reward",
        )
    values = [metrics[metric] for metrics in members]
    return len(values) == 1 or max(values) > min(values)
