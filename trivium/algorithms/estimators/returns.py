"""Estimators that sum the rewards from a token on.

Legend: B sequences, L tokens, T trajectories. Tokens outside the mask are skipped: they neither discount nor break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, Members, members, trained_columns_backwards
from trivium.algorithms.estimators.finishing import whitened
from trivium.algorithms.estimators.group import Epsilon, relative
from trivium.algorithms.metadata import When, advantage
from trivium.algorithms.stats import group_statistics
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Discount = Annotated[float, Field(ge=0, le=1, description="discount from one trained token to the next")]
Whiten = Annotated[
    bool,
    Field(
        description="whether to normalise the batch's advantages to mean 0 and variance 1; needs at least two tokens"
    ),
]
_RETURN = "sum over this and later trained tokens of gamma^distance * reward"


@advantage(formula=_RETURN, source="REINFORCE, Williams 1992")
def reinforce(x: AdvantageInputs, *, gamma: Discount = 1.0) -> Advantages:
    """The return from each token on, without a baseline."""
    returns = _typed(returns_to_go(x.token_level_rewards, x.response_mask, gamma), x)
    return Advantages(returns, returns)


@advantage(
    formula=f"{_RETURN}, whitened over the batch",
    source="REINFORCE++, Hu et al. 2025, eq. 4",
    whitens=True,
)
def reinforce_plus_plus(x: AdvantageInputs, *, gamma: Discount = 1.0) -> Advantages:
    """The return from each token on against all tokens of the batch."""
    returns = returns_to_go(x.token_level_rewards, x.response_mask, gamma)
    return Advantages(_typed(whitened(returns, x.response_mask), x), _typed(returns, x))


@advantage(
    formula="(sum over this and later trained tokens of reward) - R of the greedy completion",
    source="ReMax, Li et al. 2024, algorithm 2",
    needs={"greedy_reward"},
    baseline=True,
)
def remax(x: AdvantageInputs) -> Advantages:
    """The return from each token on against the reward of the task's greedy completion."""
    returns = returns_to_go(x.token_level_rewards, x.response_mask, 1.0)
    advantages = torch.where(x.response_mask, returns - x.columns["greedy_reward"].double(), 0.0)
    return Advantages(_typed(advantages, x), _typed(returns, x))


@advantage(
    formula="sum over this and later trained tokens of gamma^distance * reward, with R - mean(R over the {baseline=mean:group}{baseline=others:other members of the group}) in place of R{whiten:, whitened over the batch}",  # noqa: E501
    source="the group baseline of OpenRLHF, Hu et al. 2024; `others`, Ahmadian et al. 2024",
    min_group=2,
    centred=True,
    whitens=When("whiten"),
)
def reinforce_baseline(
    x: AdvantageInputs,
    *,
    baseline: Annotated[
        Literal["mean", "others"], Field(description="the mean of the whole group, or of the other members")
    ] = "mean",
    gamma: Discount = 1.0,
    whiten: Whiten = False,
) -> Advantages:
    """The return from each token on, its reward centred in the group. A KL penalty stays on the tokens that earned it
    and enters no baseline. A group of one keeps its reward; returns are not whitened."""
    trajectories = members(x.unpenalised())
    stats = group_statistics(trajectories.score, trajectories.group)
    factor = stats.count / (stats.count - 1).clamp(min=1) if baseline == "others" else 1.0
    returns = _from_outcome(
        torch.where(stats.count == 1, trajectories.score, stats.centred * factor), trajectories, x, gamma
    )
    return Advantages(_typed(whitened(returns, x.response_mask) if whiten else returns, x), _typed(returns, x))


@advantage(
    formula="sum over this and later trained tokens of gamma^distance * reward, with (R - mean(R over the group)) / "
    "(std(R over the group) + epsilon) in place of R",
    source="GRPO, Shao et al. 2024, as a reward: the group normalisation of OpenRLHF, Hu et al. 2024",
    min_group=2,
    centred=True,
)
def group_norm(x: AdvantageInputs, *, gamma: Discount = 1.0, epsilon: Epsilon = 1e-9) -> Advantages:
    """As `reinforce_baseline`, in units of the group's unbiased standard deviation."""
    trajectories = members(x.unpenalised())
    returns = _typed(
        _from_outcome(relative(trajectories.score, trajectories.group, "group", epsilon), trajectories, x, gamma), x
    )
    return Advantages(returns, returns)


@advantage(
    formula="sum over this and later trained tokens of (gamma * lam)^distance * (reward + gamma * V_next - V){whiten:, whitened over the batch}",  # noqa: E501
    source="GAE, Schulman et al. 2016, eq. 16",
    needs={"values"},
    whitens=When("whiten"),
)
def gae(
    x: AdvantageInputs,
    *,
    gamma: Discount = 1.0,
    lam: Annotated[float, Field(ge=0, le=1, description="0 trusts the critic, 1 trusts the rewards")] = 1.0,
    whiten: Whiten = True,
) -> Advantages:
    """Generalised advantage estimation with a critic; returns are the unwhitened advantage plus the value.

    The value after the last trained token is 0, in a truncated completion too (no bootstrapping from the critic).
    """
    mask = x.response_mask
    rewards, values = x.token_level_rewards.double(), torch.where(mask, x.columns["values"].double(), 0.0)
    raw = torch.zeros_like(rewards)
    next_value = running = rewards.new_zeros(len(rewards))
    for t in trained_columns_backwards(mask):
        here = mask[:, t]
        error = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(here, error + gamma * lam * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        raw[:, t] = torch.where(here, running, 0.0)
    returns = torch.where(mask, raw + values, 0.0)
    return Advantages(_typed(whitened(raw, mask) if whiten else raw, x), _typed(returns, x))


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """(B, L) float64: the discounted sum of the rewards (B, L) from each token of the mask (B, L) on; 0 elsewhere."""
    rewards = rewards.double()
    result = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in trained_columns_backwards(mask):
        here = mask[:, t]
        running = torch.where(here, rewards[:, t] + gamma * running, running)
        result[:, t] = torch.where(here, running, 0.0)
    return result


def _from_outcome(value: Tensor, trajectories: Members, x: AdvantageInputs, gamma: float) -> Tensor:
    """(B, L): returns of `value` (T,), on the last trained token of each trajectory's rows, and of the KL penalty."""
    mask = x.response_mask
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    penalty = x.token_level_rewards.double() - x.unpenalised().token_level_rewards.double()
    rewards = penalty + torch.where(last, value[trajectories.of_row].unsqueeze(-1), 0.0)
    return returns_to_go(rewards, mask, gamma)


def _typed(values: Tensor, x: AdvantageInputs) -> Tensor:
    return values.to(x.token_level_rewards.dtype)
