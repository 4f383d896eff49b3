"""Estimators that compare the trajectories of a group: one number per trajectory."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from trivium.algorithms.advantages.inputs import AdvantageInputs, Advantages, members, spread
from trivium.algorithms.registered import advantage
from trivium.algorithms.stats import group_statistics


@advantage(
    formula="(R - mean(R over the group)){norm_by_std: / (std(R over the group) + epsilon)}",
    source="GRPO, Shao et al. 2024, section 4.1.2; without std, Dr. GRPO, Liu et al. 2025",
    min_group=2,
    centred=True,
)
def grpo(
    x: AdvantageInputs,
    *,
    norm_by_std: Annotated[bool, Field(description="whether to divide by the group's standard deviation")] = True,
    epsilon: Annotated[float, Field(gt=0, description="added to the standard deviation")] = 1e-6,
) -> Advantages:
    """Reward relative to the group's mean, in units of its unbiased standard deviation.

    A group of one has no mean to speak of: its reward counts as it is, against a standard deviation of one.
    """
    who = members(x)
    stats = group_statistics(who.score, who.group)
    alone = stats.count == 1
    value = torch.where(alone, who.score, stats.centred)
    if norm_by_std:
        value = value / (torch.where(alone, 1.0, stats.std) + epsilon)
    return spread(value, who.of_row, x)


@advantage(
    formula="R - mean(R over the other members of the group)",
    source="RLOO, Kool et al. 2019; Ahmadian et al. 2024",
    min_group=2,
    centred=True,
)
def rloo(x: AdvantageInputs) -> Advantages:
    """Reward against the mean of the others; a group of one keeps its reward."""
    who = members(x)
    stats = group_statistics(who.score, who.group)
    leave_one_out = stats.centred * stats.count / (stats.count - 1).clamp(min=1)
    return spread(torch.where(stats.count == 1, who.score, leave_one_out), who.of_row, x)
