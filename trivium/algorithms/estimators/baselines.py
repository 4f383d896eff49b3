"""Estimators of the off-policy family: group baselines other than the plain mean, and groups thinned at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, Members, members, spread
from trivium.algorithms.estimators.group import Epsilon, NormByStd, population_std
from trivium.algorithms.metadata import When, advantage
from trivium.algorithms.stats import distinct, group_statistics
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@advantage(
    formula="R - {baseline=mean:mean(R over the group)}{baseline=logavgexp:tau log(mean(exp(R / tau) over the group))}",
    source="OPMD, Trinity-RFT 2025, appendix A; with the mean, Kimi k1.5, 2025, eq. 3",
    min_group=2,
    centred=True,
    effective={"tau": When("baseline", ("logavgexp",))},
)
def opmd(
    x: AdvantageInputs,
    *,
    baseline: Annotated[
        Literal["mean", "logavgexp"], Field(description="`logavgexp` is the value of the tempered problem")
    ] = "mean",
    tau: Annotated[
        float, Field(gt=0, description="temperature of `logavgexp`: 0 is the maximum, infinity the mean")
    ] = 1.0,
) -> Advantages:
    """Reward against the group's mean, or its soft maximum. A group of one keeps its reward."""
    trajectories = members(x)
    stats = group_statistics(trajectories.score, trajectories.group)
    value = stats.centred if baseline == "mean" else trajectories.score - _log_mean_exp(trajectories, tau)
    return spread(torch.where(stats.count == 1, trajectories.score, value), trajectories.of_row, x)


@advantage(
    formula="R - (mean(R over the group) + baseline_shift)",
    source="AsymRE, Arnal et al. 2025, section 3",
    min_group=2,
)
def asymre(
    x: AdvantageInputs,
    *,
    baseline_shift: Annotated[
        float,
        Field(description="a value below 0 gives good completions more weight than bad ones, as off-policy data need"),
    ] = -0.1,
) -> Advantages:
    """Reward against a shifted mean of the group. A group of one keeps its reward, unshifted."""
    trajectories = members(x)
    stats = group_statistics(trajectories.score, trajectories.group)
    return spread(
        torch.where(stats.count == 1, trajectories.score, stats.centred - baseline_shift), trajectories.of_row, x
    )


@advantage(
    formula="1 where R >= threshold{best: and R is the best of the group}, else 0",
    source="RAFT, Dong et al. 2023: rejection sampling, here without a second data set",
)
def accept(
    x: AdvantageInputs,
    *,
    threshold: Annotated[float, Field(description="the smallest reward of a completion that is imitated")] = 1.0,
    best: Annotated[bool, Field(description="whether to imitate only the best of a group, ties included")] = False,
) -> Advantages:
    """Good completions get 1, others 0: with the loss `reinforce` the policy imitates its good completions."""
    trajectories = members(x)
    accepted = trajectories.score >= threshold
    if best:
        ids, group, _ = distinct(trajectories.group)
        highest = trajectories.score.new_full((len(ids),), -torch.inf).scatter_reduce(
            0, group, trajectories.score, "amax"
        )
        accepted &= trajectories.score == highest[group]
    return spread(accepted.to(trajectories.score.dtype), trajectories.of_row, x)


@advantage(
    formula="(R - mean(R over kept members)){norm_by_std: / (population std(R over kept members) + epsilon)}{drop=balance:; at most as many members below the group's mean are kept as others}",  # noqa: E501
    source="REC and RED-drop, Yao et al. 2025 (arXiv 2509.24203), section 3",
    needs={"uniform"},
    min_group=2,
    centred=True,
    effective={"epsilon": When("norm_by_std")},
)
def rec(
    x: AdvantageInputs,
    *,
    norm_by_std: NormByStd = False,
    drop: Annotated[
        Literal["none", "balance"], Field(description="`balance` drops random surplus members below the mean")
    ] = "none",
    epsilon: Epsilon = 1e-6,
) -> Advantages:
    """Reward against the mean of the group's kept members; a dropped one gets 0. A group of one keeps its reward."""
    trajectories = members(x)
    compared = (
        _balanced(trajectories, _draw(x, trajectories))
        if drop == "balance"
        else torch.ones_like(trajectories.score, dtype=torch.bool)
    )
    stats = group_statistics(trajectories.score[compared], trajectories.group[compared])
    value = torch.where(stats.count == 1, trajectories.score[compared], stats.centred)
    if norm_by_std:
        value = value / (population_std(stats) + epsilon)
    return spread(torch.zeros_like(trajectories.score).masked_scatter(compared, value), trajectories.of_row, x)


def _log_mean_exp(trajectories: Members, tau: float) -> Tensor:
    """(T,): tau log(mean(exp(R / tau))) of each member's group, from distances to the group's highest score."""
    _, inverse, count = distinct(trajectories.group)
    highest = trajectories.score.new_full((len(count),), -torch.inf).scatter_reduce(
        0, inverse, trajectories.score, "amax"
    )
    lifted = ((trajectories.score - highest[inverse]) / tau).exp()
    mean = torch.zeros_like(highest).index_add(0, inverse, lifted) / count
    return (highest + tau * mean.log())[inverse]


def _draw(x: AdvantageInputs, trajectories: Members) -> Tensor:
    """(T,): a number in [0, 1) for each trajectory, independent of the rest of the batch and of its order."""
    # By a sum, since the rows of a batch without tokens have no first number.
    per_row = x.columns["uniform"].double()[:, :1].sum(-1)
    return per_row.new_full((len(trajectories.score),), torch.inf).scatter_reduce(
        0, trajectories.of_row, per_row, "amin"
    )


def _balanced(trajectories: Members, draw: Tensor) -> Tensor:
    """(T,) bool: all members at or above the group's mean, and at most as many below it, by lowest draw."""
    below = group_statistics(trajectories.score, trajectories.group).centred < 0
    mates = trajectories.group[:, None] == trajectories.group
    others = (mates & ~below).sum(-1)
    place = (mates & below & (draw < draw[:, None])).sum(-1)
    return ~below | (place < others)
