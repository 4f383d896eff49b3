"""Filters: rules that keep or refuse one group at a time, by its rewards before shaping.

Legend: R total reward of a successful member of the group, or one component of it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, stdev
from typing import Annotated, NamedTuple, cast

from pydantic import Field

from trivium.algorithms.metadata import FilterMetadata, group_filter
from trivium.foundation.errors import DataError
from trivium.types import REFERENCE_REWARDS, Group, StopReason, reference_rewards

Component = Annotated[str, Field(description="the component of the reward that is compared; empty for the total")]


class Filter(NamedTuple):
    """A rule from a config."""

    name: str
    """The metric `rollout/refused/<name>` counts the groups that it refuses."""
    keeps: Callable[[Group], bool]
    metadata: FilterMetadata

    def passes(self, group: Group) -> bool:
        """Whether the rule keeps the group. Raises DataError if the rule does not return a bool."""
        answer = cast(object, self.keeps(group))
        if isinstance(answer, bool):
            return answer
        raise DataError(
            f"yes or no from the filter {self.name!r}", f"{answer!r} for task {group.task.task_id!r}", "return a bool"
        )


@group_filter(
    formula="keep if max(R) - min(R) > tolerance{component:, R of component}",
    source="dynamic sampling: DAPO, Yu et al. 2025, section 3.2",
    min_group=2,
)
def zero_variance(
    group: Group,
    *,
    tolerance: Annotated[float, Field(ge=0, description="rewards that differ by at most this count as equal")] = 0.0,
    component: Component = "",
) -> bool:
    """Refuses groups whose members all have the same reward: they have no relative advantage. A group with one member,
    because the others failed, is kept.
    """
    rewards = group.member_rewards(component)
    return len(rewards) == 1 or max(rewards) - min(rewards) > tolerance


@group_filter(
    formula="keep if std(R) > threshold{component:, R of component}",
    source="the threshold on a group's standard deviation in Trinity-RFT, 2025",
    min_group=2,
)
def low_std(
    group: Group,
    *,
    threshold: Annotated[float, Field(ge=0, description="largest unbiased standard deviation that is refused")] = 0.0,
    component: Component = "",
) -> bool:
    """Refuses groups whose members have nearly equal rewards, whose differences a normalising estimator would magnify.
    A group with one member is refused too."""
    rewards = group.member_rewards(component)
    return len(rewards) > 1 and stdev(rewards) > threshold


@group_filter(
    formula="keep if low < mean(R) < high{component:, R of component}",
    source="online prompt filtering: PRIME, Cui et al. 2025; with 0 and 1, DAPO, Yu et al. 2025, eq. 11",
    ordered=(("low", "high"),),
)
def difficulty(
    group: Group,
    *,
    low: Annotated[float, Field(description="a group with at most this mean reward is too hard")] = 0.0,
    high: Annotated[float, Field(description="a group with at least this mean reward is too easy")] = 1.0,
    component: Component = "",
) -> bool:
    """Keeps tasks that the policy solves sometimes, for rewards between `low` and `high`."""
    return low < fmean(group.member_rewards(component)) < high


@group_filter(
    formula="keep if max(the task's column reference_rewards) > 0",
    source="an option of A*-PO's code, Brantley et al. 2025 (arXiv 2505.20686), off by default; TRL has it on",
    judged=False,
)
def reference_solved(group: Group) -> bool:
    """Refuses groups of tasks that no sample of the reference policy solved. Tasks without the column are kept. Raises
    DataError for a column that does not hold numbers."""
    return group.task.columns.get(REFERENCE_REWARDS) is None or max(reference_rewards(group), default=0.0) > 0


@group_filter(
    formula="keep if the fraction of members that a length limit cut < below",
    source="overlong filtering: DAPO, Yu et al. 2025, section 3.4, for whole groups",
    judged=False,
)
def overlong(
    group: Group,
    *,
    below: Annotated[
        float, Field(gt=0, le=1, description="a group with at least this fraction of truncated members is refused")
    ] = 1.0,
) -> bool:
    """Refuses groups of which many members reached the length limit: their rewards measure the limit, not the
    completions."""
    return fmean(member.stop_reason == StopReason.LENGTH for member in group.alive) < below
