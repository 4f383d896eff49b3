"""Optimal baselines: one for each position of a completion, from the policy's uncertainty up to that position.

Legend: B sequences, L tokens. Rows of one trajectory weigh as much as one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, members
from trivium.algorithms.estimators.returns import returns_to_go
from trivium.algorithms.metadata import advantage
from trivium.algorithms.stats import distinct
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

ZeroTail = Annotated[
    bool, Field(description="whether the baseline is 0 at positions that only the group's longest completion reaches")
]
_FORMULA = (
    "G - sum(W G over the group's completions at that {}) / sum(W), G = rewards from the token on, "
    "W = sum over tokens so far of 1 - 2 p + sum(p_v^2 over the vocabulary), p = exp(log_prob) as the step begins{}"
)
_TAIL = "{handle_zero_tail:; only G at positions that only the group's longest completion reaches}"
_NEEDS = ("log_prob", "sum_pi_squared")


@advantage(
    formula=_FORMULA.format("position", _TAIL),
    source="the optimal token baseline of verl, after the minimum-variance baseline of Greensmith et al. 2004",
    needs=frozenset(_NEEDS),
    min_group=2,
    centred=True,  # at the default: with `handle_zero_tail` the tail keeps its return
)
def optimal_token_baseline(x: AdvantageInputs, *, handle_zero_tail: ZeroTail = False) -> Advantages:
    """Return against a baseline of least variance for each position, counted from the first trained token.

    W estimates the squared size of the gradient up to a token; the weights of an off-policy correction, if any, enter
    squared. A group of one has no baseline.
    """
    mask = x.response_mask
    before = (mask.cumsum(-1) == 0).sum(-1, keepdim=True)
    return _against_baseline(x, torch.arange(mask.shape[1]) - before, handle_zero_tail)


@advantage(
    formula=_FORMULA.format("number of trained tokens", _TAIL),
    source="the optimal token baseline of verl for completions with tool calls",
    needs=frozenset(_NEEDS),
    min_group=2,  # not `centred` at its default, by `handle_zero_tail`
)
def tir_optimal_token_baseline(x: AdvantageInputs, *, handle_zero_tail: ZeroTail = True) -> Advantages:
    """As `optimal_token_baseline`, with positions that count trained tokens only: tokens of tools take no position."""
    return _against_baseline(x, x.response_mask.cumsum(-1) - 1, handle_zero_tail)


def _against_baseline(x: AdvantageInputs, place: Tensor, handle_zero_tail: bool) -> Advantages:
    """Returns minus the baseline of their place (B, L), which counts from 0 within the mask."""
    mask, of_row = x.response_mask, members(x).of_row
    returns = returns_to_go(x.token_level_rewards, mask, 1.0)
    several, tail = _peers(place, mask, of_row, x.group)
    without = ~several | (place >= tail) if handle_zero_tail else ~several
    baseline = torch.where(without, 0.0, _baseline(returns, _weight(x, of_row), place, mask, x.group))
    advantages = torch.where(mask, returns - baseline, 0.0)
    dtype = x.token_level_rewards.dtype
    return Advantages(advantages.to(dtype), returns.to(dtype))


def _baseline(returns: Tensor, weight: Tensor, place: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """(B, L): the weighted mean of the returns at the same place in the same group; 0 outside the mask.

    It is computed from distances to the group's lowest return, so that equal returns leave no rounding error.
    """
    ids, number, _ = distinct(group)
    home = number.unsqueeze(-1).expand_as(mask)
    lowest = returns.new_full((len(ids),), torch.inf).scatter_reduce(0, home[mask], returns[mask], "amin")
    distance = returns[mask] - lowest[home[mask]]
    cell = (home * mask.shape[1] + place)[mask]  # one for each group and place
    empty = returns.new_zeros(len(ids) * mask.shape[1])
    total = empty.index_add(0, cell, weight[mask])
    mean = empty.index_add(0, cell, weight[mask] * distance) / (total + 1e-8)
    return torch.zeros_like(returns).masked_scatter(mask, lowest[home[mask]] + mean[cell])


def _weight(x: AdvantageInputs, of_row: Tensor) -> Tensor:
    """(B, L): W of each token, shared out among the rows of a trajectory."""
    _, _, rows = distinct(of_row)
    return _gradient_size(x) / rows[of_row].unsqueeze(-1)


def _gradient_size(x: AdvantageInputs) -> Tensor:
    """(B, L): the expected squared size of the gradient of all tokens up to each one, at the output layer."""
    likely, squares = (torch.where(x.response_mask, x.columns[name].double(), 0.0) for name in _NEEDS)
    size = (1 - 2 * likely.exp() + squares).clamp(min=0)  # below 0 only by rounding: both are from the same weights
    if "rollout_is_weights" in x.columns:
        size = size * x.columns["rollout_is_weights"].double().square()
    return torch.where(x.response_mask, size, 0.0).cumsum(-1)


def _peers(place: Tensor, mask: Tensor, of_row: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1) each: whether other trajectories are in a row's group, and the length of the longest of them.

    A trajectory is as long as its longest row.
    """
    # The padding is for batches without a column, of which `amax` refuses to take a maximum.
    longest = torch.nn.functional.pad(torch.where(mask, place + 1, 0), (1, 0)).amax(-1)
    ids, _, _ = distinct(of_row)
    length = longest.new_zeros(len(ids)).scatter_reduce(0, of_row, longest, "amax")
    home = group.new_zeros(len(ids)).scatter(0, of_row, group)
    others = (home[:, None] == home) & ~torch.eye(len(ids), dtype=torch.bool)
    second = torch.nn.functional.pad(torch.where(others, length, 0), (1, 0)).amax(-1)
    return others.any(-1)[of_row].unsqueeze(-1), second[of_row].unsqueeze(-1)
