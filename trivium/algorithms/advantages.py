"""Advantage estimators: what each sampled token was worth.

Legend: B sequences, L tokens, T trajectories. Rows of one trajectory (its history was rewritten) share an entry of
`trajectory`; rows of one task share an entry of `group`. A statistic over a group counts each trajectory once. All
arithmetic is in float64; results come back in the dtype of the rewards, and zero outside the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from trivium.algorithms.registered import advantage
from trivium.algorithms.stats import distinct, group_statistics, masked_whiten

Discount = Annotated[float, Field(ge=0, le=1, description="discount from one trained token to the next")]


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an estimator reads."""

    token_level_rewards: Tensor
    """(B, L), after any KL penalty; zero outside the mask. A row's sum is its trajectory's reward, penalty included."""
    response_mask: Tensor
    """(B, L) bool; holes (tokens of a tool) and empty rows are legal."""
    group: Tensor
    """(B,) int64."""
    trajectory: Tensor
    """(B,) int64; different numbers in different groups."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """(B, L) each: the scores that the estimator said it needs."""


class Advantages(NamedTuple):
    """Per token, (B, L) each, zero outside the mask."""

    advantages: Tensor
    returns: Tensor
    """What a critic should have predicted; for estimators without one, the advantages."""


class _Members(NamedTuple):
    """The trajectories behind the rows."""

    score: Tensor
    """(T,) float64: the mean over a trajectory's rows of the row's summed reward."""
    group: Tensor
    """(T,) int64."""
    of_row: Tensor
    """(B,) int64: the trajectory of each row."""


def _members(x: AdvantageInputs) -> _Members:
    ids, of_row, _ = distinct(x.trajectory)
    per_row = group_statistics(x.token_level_rewards.double().sum(-1), of_row)
    score = per_row.mean.new_zeros(len(ids)).scatter(0, of_row, per_row.mean)
    return _Members(score, x.group.new_zeros(len(ids)).scatter(0, of_row, x.group), of_row)


def _spread(per_member: Tensor, of_row: Tensor, x: AdvantageInputs) -> Advantages:
    """One number per trajectory, written on every trained token of its rows."""
    per_token = torch.where(x.response_mask, per_member[of_row].unsqueeze(-1), 0.0).to(x.token_level_rewards.dtype)
    return Advantages(per_token, per_token)


@advantage(
    formula="(R - mean(R over the group)) / (std(R over the group) + epsilon)",
    source="GRPO, Shao et al. 2024, section 4.1.2; without std, Dr. GRPO, Liu et al. 2025",
    min_group=2,
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
    members = _members(x)
    stats = group_statistics(members.score, members.group)
    alone = stats.count == 1
    value = torch.where(alone, members.score, stats.centred)
    if norm_by_std:
        value = value / (torch.where(alone, 1.0, stats.std) + epsilon)
    return _spread(value, members.of_row, x)


@advantage(
    formula="R - mean(R over the other members of the group)",
    source="RLOO, Kool et al. 2019; Ahmadian et al. 2024",
    min_group=2,
)
def rloo(x: AdvantageInputs) -> Advantages:
    """Reward against the mean of the others; a group of one keeps its reward."""
    members = _members(x)
    stats = group_statistics(members.score, members.group)
    leave_one_out = stats.centred * stats.count / (stats.count - 1).clamp(min=1)
    return _spread(torch.where(stats.count == 1, members.score, leave_one_out), members.of_row, x)


@advantage(
    formula="sum over later trained tokens of gamma^distance * reward",
    source="REINFORCE, Williams 1992",
)
def reinforce(x: AdvantageInputs, *, gamma: Discount = 1.0) -> Advantages:
    """The return from each token on, without a baseline. Tokens outside the mask pass it on undiscounted."""
    rewards = x.token_level_rewards.double()
    result = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in _trained_columns(x.response_mask):
        here = x.response_mask[:, t]
        running = torch.where(here, rewards[:, t] + gamma * running, running)
        result[:, t] = torch.where(here, running, 0.0)
    per_token = result.to(x.token_level_rewards.dtype)
    return Advantages(per_token, per_token)


@advantage(
    formula="sum over later trained tokens of (gamma lam)^distance * (r + gamma V_next - V), whitened over the batch",
    source="GAE, Schulman et al. 2016, eq. 16",
    needs=("values",),
)
def gae(
    x: AdvantageInputs,
    *,
    gamma: Discount = 1.0,
    lam: Annotated[float, Field(ge=0, le=1, description="0 trusts the critic, 1 trusts the rewards")] = 1.0,
    whiten: Annotated[
        bool, Field(description="whether to give the batch's advantages mean 0 and variance 1; needs two tokens")
    ] = True,
) -> Advantages:
    """Generalised advantage estimation with a critic; returns are the unwhitened advantage plus the value.

    Tokens outside the mask are skipped: the next trained token follows directly. Nothing follows the last one, also
    where a length limit cut the reply (no bootstrapping from the critic).
    """
    mask = x.response_mask
    rewards, values = x.token_level_rewards.double(), torch.where(mask, x.columns["values"].double(), 0.0)
    raw = torch.zeros_like(rewards)
    next_value = running = rewards.new_zeros(len(rewards))
    for t in _trained_columns(mask):
        here = mask[:, t]
        error = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(here, error + gamma * lam * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        raw[:, t] = torch.where(here, running, 0.0)
    advantages = torch.where(mask, masked_whiten(raw, mask), 0.0) if whiten and int(mask.sum()) > 1 else raw
    dtype = x.token_level_rewards.dtype
    return Advantages(advantages.to(dtype), torch.where(mask, raw + values, 0.0).to(dtype))


def _trained_columns(mask: Tensor) -> list[int]:
    """The positions at which any row is trained on, last first."""
    return [int(t) for t in torch.nonzero(mask.any(0)).flatten().flip(0)]
