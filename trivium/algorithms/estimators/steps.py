"""Estimators that distinguish the turns of a trajectory.

Legend: B sequences, L tokens, T trajectories, N turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, Members, members, spread
from trivium.algorithms.estimators.group import Epsilon, NormByStd, StdLevel, relative
from trivium.algorithms.metadata import When, advantage
from trivium.algorithms.stats import distinct, group_statistics
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@advantage(
    formula="(R - mean(R over the group)){norm_by_std: / (std(R over the std_level) + epsilon)}{norm_by_steps: / number of turns}",  # noqa: E501
    source="multi-step GRPO, Trinity-RFT 2025, after Shao et al. 2024, section 4.1.2",
    needs={"turn"},
    min_group=2,
    centred=True,
    effective={"std_level": When("norm_by_std"), "epsilon": When("norm_by_std")},
)
def step_wise_grpo(
    x: AdvantageInputs,
    *,
    norm_by_steps: Annotated[
        bool, Field(description="whether to divide an episode's advantage by its number of turns")
    ] = False,
    norm_by_std: NormByStd = True,
    std_level: StdLevel = "group",
    epsilon: Epsilon = 1e-6,
) -> Advantages:
    """The advantage of the episode for each of its turns. Turns without a trained token do not count."""
    trajectories = members(x)
    value = relative(trajectories.score, trajectories.group, std_level if norm_by_std else None, epsilon)
    if norm_by_steps:
        turns = _turns(x, trajectories)
        number = torch.bincount(turns.trajectory, minlength=len(value))
        value = value / number.clamp(min=1)
    return spread(value, trajectories.of_row, x)


@advantage(
    formula="A_episode + omega A_state: R against the group's mean, and the turn's return (discount gamma) against that of the task's turns in the same state{fnorm=std:; each / (std + epsilon)}",  # noqa: E501
    source="GiGPO, Feng et al. 2025, eqs. 3 to 9",
    needs={"turn", "turn_reward", "turn_state"},
    min_group=2,
    effective={"epsilon": When("fnorm", ("std",))},
)
def gigpo(
    x: AdvantageInputs,
    *,
    omega: Annotated[float, Field(ge=0, description="weight of the comparison with turns in the same state")] = 1.0,
    gamma: Annotated[float, Field(ge=0, le=1, description="discount from one turn to the next")] = 1.0,
    fnorm: Annotated[
        Literal["none", "std"], Field(description="whether both parts are divided by an unbiased standard deviation")
    ] = "none",
    epsilon: Epsilon = 1e-6,
) -> Advantages:
    """Compares an episode with its group, and each turn with the turns of the same task that were sampled in the same
    state. A reward that belongs to no turn (a judge's reward at the end, a KL penalty) counts for the last turn. A turn
    whose state is unknown, or that is the only one in its state, has no second part. A group of one keeps its reward.
    """
    trajectories = members(x)
    scale = "group" if fnorm == "std" else None
    advantages = spread(
        relative(trajectories.score, trajectories.group, scale, epsilon), trajectories.of_row, x
    ).advantages
    turns = _turns(x, trajectories)
    anchor = _anchors(trajectories.group[turns.trajectory], turns.state)
    returns = _returns(turns, trajectories.score, gamma)
    has_peers = group_statistics(returns, anchor).count > 1
    part = torch.where(has_peers & (turns.state >= 0), relative(returns, anchor, scale, epsilon), 0.0)
    advantages[turns.token] += (omega * part[turns.of_token]).to(advantages.dtype)
    return Advantages(advantages, advantages)


class _Turns(NamedTuple):
    """The turns with a trained token, sorted by trajectory, then by time."""

    trajectory: Tensor
    """(N,) int64: positions among the members."""
    number: Tensor
    """(N,) int64."""
    paid: Tensor
    """(N,) float64."""
    state: Tensor
    """(N,) int64."""
    token: Tensor
    """(B, L) bool: the trained tokens that belong to a turn."""
    of_token: Tensor
    """The turn of each of these tokens."""


def _turns(x: AdvantageInputs, trajectories: Members) -> _Turns:
    number = x.columns["turn"]
    token = x.response_mask & (number >= 0)
    # One integer for a trajectory and a turn, so that sorting it sorts by trajectory and then by turn.
    stride = int(number[token].max()) + 1 if token.any() else 1
    keys, of_token, _ = distinct((trajectories.of_row.unsqueeze(-1) * stride + number)[token])
    paid, state = torch.zeros_like(keys, dtype=torch.float64), torch.full_like(keys, -1)
    if "turn_reward" in x.columns:
        paid = paid.index_add(0, of_token, x.columns["turn_reward"].double()[token])
        state = state.scatter(0, of_token, x.columns["turn_state"][token])
    return _Turns(keys // stride, keys % stride, paid, state, token, of_token)


def _anchors(group: Tensor, state: Tensor) -> Tensor:
    """(N,): equal for turns with equal group and state."""
    _, group_number, _ = distinct(group)
    states, state_number, _ = distinct(state)
    return group_number * len(states) + state_number


def _returns(turns: _Turns, score: Tensor, gamma: float) -> Tensor:
    """(N,): the discounted rewards from each turn on; the last turn also gets the rest of the score (T,)."""
    last = torch.ones_like(turns.trajectory, dtype=torch.bool)
    last[:-1] = turns.trajectory[:-1] != turns.trajectory[1:]
    rest = score - torch.zeros_like(score).index_add(0, turns.trajectory, turns.paid)
    paid = turns.paid + torch.where(last, rest[turns.trajectory], 0.0)
    returns, running = torch.zeros_like(paid), torch.zeros_like(score)
    for number in distinct(turns.number)[0].flip(0):
        here = turns.number == number
        positions = turns.trajectory[here]
        # A trajectory has at most one turn of each number, so no entry is written twice.
        running[positions] = paid[here] + gamma * running[positions]
        returns[here] = running[positions]
    return returns
