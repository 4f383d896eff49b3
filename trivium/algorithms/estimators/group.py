"""Estimators that compare the trajectories of a group: one number per trajectory.

A group of one has no other member: unless an estimator says otherwise its reward is its advantage.
Legend: T trajectories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, Members, members, per_member, spread
from trivium.algorithms.estimators.finishing import whitened
from trivium.algorithms.metadata import When, advantage
from trivium.algorithms.stats import GroupStatistics, distinct, group_statistics
from trivium.foundation.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

NormByStd = Annotated[bool, Field(description="whether to divide by the standard deviation")]
StdLevel = Annotated[
    Literal["group", "batch"], Field(description="whose standard deviation: the group's, or that of all rewards")
]
Epsilon = Annotated[float, Field(gt=0, description="added to the standard deviation")]


@advantage(
    formula="(R - mean(R over the group)){norm_by_std: / (std(R over the std_level) + epsilon)}",
    source="GRPO, Shao et al. 2024, section 4.1.2; without std, Dr. GRPO, Liu et al. 2025",
    min_group=2,
    centred=True,
    effective={"std_level": When("norm_by_std"), "epsilon": When("norm_by_std")},
)
def grpo(
    x: AdvantageInputs, *, norm_by_std: NormByStd = True, std_level: StdLevel = "group", epsilon: Epsilon = 1e-6
) -> Advantages:
    """Reward relative to the group's mean, in units of an unbiased standard deviation."""
    trajectories = members(x)
    scale = std_level if norm_by_std else None
    return spread(relative(trajectories.score, trajectories.group, scale, epsilon), trajectories.of_row, x)


@advantage(
    formula="(R' - mean(R' over the group)){norm_by_std: / (std(R' over the std_level) + epsilon)}; R' = R (1 - rank_penalty rank / G), rank of G members by mean log-probability, most likely last",  # noqa: E501
    source="rank penalty of Trinity-RFT, after He et al. 2025, section 4 (reward the unlikely)",
    needs={"rollout_log_prob"},
    min_group=2,
    effective={"std_level": When("norm_by_std"), "epsilon": When("norm_by_std")},
)
def grpo_rank_penalty(
    x: AdvantageInputs,
    *,
    rank_penalty: Annotated[
        float,
        Field(ge=0, le=1, description="fraction of its reward that the most likely member loses (times (G - 1) / G)"),
    ] = 0.25,
    norm_by_std: NormByStd = True,
    std_level: StdLevel = "group",
    epsilon: Epsilon = 1e-6,
) -> Advantages:
    """Reduces the reward of a member by the rank of its likelihood in the group, so rare correct completions count
    more. Meant for rewards of at least 0: reducing a negative reward would raise it.
    """
    trajectories = members(x)
    likelihood = _mean_log_prob(x, trajectories)
    below = (trajectories.group[:, None] == trajectories.group) & (likelihood < likelihood[:, None])
    rank = below.sum(-1) / group_statistics(trajectories.score, trajectories.group).count
    score = trajectories.score * (1 - rank_penalty * rank)
    return spread(
        relative(score, trajectories.group, std_level if norm_by_std else None, epsilon), trajectories.of_row, x
    )


@advantage(
    formula="R - mean(R over the other members of the group){alone=zero:; for a group of one: 0}",
    source="RLOO, Kool et al. 2019; Ahmadian et al. 2024",
    min_group=2,
    centred=True,
)
def rloo(
    x: AdvantageInputs,
    *,
    alone: Annotated[Literal["reward", "zero"], Field(description="the advantage of a group of one")] = "reward",
) -> Advantages:
    """Reward against the mean of the others."""
    trajectories = members(x)
    stats = group_statistics(trajectories.score, trajectories.group)
    leave_one_out = stats.centred * stats.count / (stats.count - 1).clamp(min=1)
    lonely = trajectories.score if alone == "reward" else torch.zeros_like(trajectories.score)
    return spread(torch.where(stats.count == 1, lonely, leave_one_out), trajectories.of_row, x)


@advantage(
    formula="R - sum(length R over the group) / sum(length over the group)",
    source="OPO, Hao et al. 2025, section 3",
    min_group=2,
    centred=True,
)
def opo(x: AdvantageInputs) -> Advantages:
    """Reward against the mean of the group weighted by length: the baseline of least variance if the size of a gradient
    grows with the length of its completion. Lengths count trained tokens."""
    trajectories = members(x)
    length = torch.zeros_like(trajectories.score).index_add(0, trajectories.of_row, x.response_mask.sum(-1).double())
    stats = group_statistics(trajectories.score, trajectories.group)
    distance = stats.centred - _of_group(stats.centred, trajectories.group, "amin")
    total = _of_group(length, trajectories.group, "sum")
    baseline = _of_group(length * distance, trajectories.group, "sum") / torch.where(total == 0, 1.0, total)
    return spread(torch.where(stats.count == 1, trajectories.score, distance - baseline), trajectories.of_row, x)


@advantage(
    formula="(T / number of rewards that are not 0) (R - mean(R over the group)) / f_norm, T the number of "
    "trajectories",
    source="GPG, Chu et al. 2025, section 3.3",
    min_group=2,
    centred=True,
)
def gpg(
    x: AdvantageInputs, *, f_norm: Annotated[float, Field(gt=0, description="a divisor of all advantages")] = 1.0
) -> Advantages:
    """Centred rewards, scaled up if few of the batch's rewards differ from 0."""
    trajectories = members(x)
    # The rewards before shaping and penalties, which would make nearly all of them differ from 0.
    reward = (
        sum(x.components.values(), torch.zeros(()))
        if x.components
        else members(x.unpenalised()).score[trajectories.of_row]
    )
    informative = int(torch.count_nonzero(per_member(reward.double().expand(len(trajectories.of_row)), trajectories)))
    scale = len(trajectories.score) / max(informative, 1)
    return spread(
        scale * _centred(trajectories.score, group_statistics(trajectories.score, trajectories.group)) / f_norm,
        trajectories.of_row,
        x,
    )


@advantage(
    formula="best of the group: (R - second best R){norm_by_std: / (std(R over the group) + epsilon)}; others: 0",
    source="pass@k as one update per group, Tang et al. 2025",
    min_group=2,
    centred=True,
    effective={"epsilon": When("norm_by_std")},
)
def grpo_passk(x: AdvantageInputs, *, norm_by_std: NormByStd = True, epsilon: Epsilon = 1e-6) -> Advantages:
    """Only the best member learns, by its lead over the second best; a tie at the top, or a group of one, gives 0."""
    trajectories = members(x)
    stats = group_statistics(trajectories.score, trajectories.group)
    best = trajectories.score == _of_group(trajectories.score, trajectories.group, "amax")
    second = _of_group(torch.where(best, -torch.inf, trajectories.score), trajectories.group, "amax")
    winner = best & (_of_group(best.double(), trajectories.group, "sum") == 1) & (stats.count > 1)
    lead = torch.where(winner, trajectories.score - second, 0.0)
    return spread(lead / (stats.std + epsilon) if norm_by_std else lead, trajectories.of_row, x)


@advantage(
    formula="(R - mean(R over the group)) / mean(R over the group), 0 where that mean is 0",
    source="MaxRL, Tajwar et al. 2026 (arXiv 2602.02710)",
    min_group=2,
    centred=True,
    nonnegative=True,
)
def max_rl(x: AdvantageInputs) -> Advantages:
    """Reward relative to the group's success rate: with rewards 0 and 1, the first G - 1 terms of the gradient of
    log(success rate) in powers of the failure rate, for a group of G: rare successes weigh more.

    Raises DataError for a negative reward, which has no success rate.
    """
    trajectories = members(x)
    if bool((trajectories.score < 0).any()):
        raise DataError(
            "rewards that are success rates, for max_rl",
            f"a reward of {float(trajectories.score.min()):g}",
            "give rewards of at least 0 and no KL penalty in them, or use another estimator",
        )
    stats = group_statistics(trajectories.score, trajectories.group)
    return spread(stats.centred / torch.where(stats.mean == 0, 1.0, stats.mean), trajectories.of_row, x)


@advantage(
    formula="(R - mean(R over the group)){norm_by_std: / (population std(R over the group) + epsilon)}",
    source="CPGD, Liu et al. 2025, eq. 5",
    min_group=2,
    centred=True,
    effective={"epsilon": When("norm_by_std")},
)
def cpgd(x: AdvantageInputs, *, norm_by_std: NormByStd = True, epsilon: Epsilon = 1e-6) -> Advantages:
    """As GRPO, in units of the population standard deviation."""
    trajectories = members(x)
    stats = group_statistics(trajectories.score, trajectories.group)
    value = _centred(trajectories.score, stats)
    return spread(value / (population_std(stats) + epsilon) if norm_by_std else value, trajectories.of_row, x)


@advantage(
    formula="R - mean(R over the group), whitened over the batch's tokens",
    source="REINFORCE++-baseline, Hu et al. 2025, section 3",
    min_group=2,
    centred=True,
    whitens=True,
)
def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Advantages:
    """Centred in the group, scaled by the spread of all tokens of the batch."""
    trajectories = members(x)
    centred = spread(
        _centred(trajectories.score, group_statistics(trajectories.score, trajectories.group)), trajectories.of_row, x
    ).advantages
    white = whitened(centred, x.response_mask)
    return Advantages(white, white)


def relative(score: Tensor, group: Tensor, scale: Literal["group", "batch"] | None, epsilon: float) -> Tensor:
    """(T,): scores minus the mean of their group, over the unbiased standard deviation of the group or of all scores.

    A group of one keeps its score. The standard deviation of a single score is taken as 1.
    """
    stats = group_statistics(score, group)
    value = _centred(score, stats)
    if scale is None:
        return value
    if scale == "batch":
        stats = group_statistics(score, torch.zeros_like(group))
    return value / (torch.where(stats.count == 1, 1.0, stats.std) + epsilon)


def population_std(stats: GroupStatistics) -> Tensor:
    """(T,): the standard deviation that divides by the group's size; 1 for a group of one."""
    return torch.where(stats.count == 1, 1.0, stats.std * ((stats.count - 1) / stats.count).sqrt())


def _centred(score: Tensor, stats: GroupStatistics) -> Tensor:
    return torch.where(stats.count == 1, score, stats.centred)


def _of_group(values: Tensor, group: Tensor, reduce: Literal["sum", "amin", "amax"]) -> Tensor:
    """(T,): one number for each group, for each of its members."""
    _, inverse, members = distinct(group)
    return values.new_zeros(len(members)).scatter_reduce(0, inverse, values, reduce, include_self=False)[inverse]


def _mean_log_prob(x: AdvantageInputs, trajectories: Members) -> Tensor:
    """(T,): the mean log-probability of each trajectory's trained tokens when they were sampled."""
    sampled = torch.where(x.response_mask, x.columns["rollout_log_prob"].double(), 0.0).sum(-1)
    total, tokens = (
        torch.zeros_like(trajectories.score).index_add(0, trajectories.of_row, per_row.double())
        for per_row in (sampled, x.response_mask.sum(-1))
    )
    return total / tokens.clamp(min=1)
