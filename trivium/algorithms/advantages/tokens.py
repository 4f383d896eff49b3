"""Optimal baselines: one for each position of a reply, from how uncertain the policy had been up to there.

Legend: B sequences, L tokens. Rows of one trajectory weigh as much as one row.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from trivium.algorithms.advantages.inputs import AdvantageInputs, Advantages, members
from trivium.algorithms.advantages.returns import returns_to_go
from trivium.algorithms.registered import advantage
from trivium.algorithms.stats import distinct

ZeroTail = Annotated[
    bool, Field(description="whether a group's longest reply has baseline 0 where it is the only one left")
]
_FORMULA = (
    "G - sum(W G over the group's replies at that {}) / sum(W), G = rewards from the token on, "
    "W = sum over tokens so far of 1 - 2 p + sum(p_v^2 over the vocabulary); handle_zero_tail: handle_zero_tail"
)
_NEEDS = ("old_log_prob", "sum_pi_squared")


@advantage(
    formula=_FORMULA.format("position"),
    source="the optimal token baseline of verl, after the minimum-variance baseline of Greensmith et al. 2004",
    needs=_NEEDS,
    min_group=2,
    centred=True,
)
def optimal_token_baseline(x: AdvantageInputs, *, handle_zero_tail: ZeroTail = False) -> Advantages:
    """Return against a baseline of least variance for each position, counted from the first trained token.

    W estimates the squared size of the gradient up to a token; the weights of an off-policy correction, where there
    are any, enter squared. A group of one has no baseline.
    """
    mask = x.response_mask
    before = (mask.cumsum(-1) == 0).sum(-1, keepdim=True)
    return _against_baseline(x, torch.arange(mask.shape[1]) - before, handle_zero_tail)


@advantage(
    formula=_FORMULA.format("number of trained tokens"),
    source="the optimal token baseline of verl for replies with tool calls",
    needs=_NEEDS,
    min_group=2,
)
def tir_optimal_token_baseline(x: AdvantageInputs, *, handle_zero_tail: ZeroTail = True) -> Advantages:
    """As `optimal_token_baseline`, with positions that count trained tokens only: answers of tools take no room."""
    return _against_baseline(x, x.response_mask.cumsum(-1) - 1, handle_zero_tail)


def _against_baseline(x: AdvantageInputs, place: Tensor, handle_zero_tail: bool) -> Advantages:
    """Returns minus the baseline of their place (B, L), which counts from 0 within the mask."""
    mask, who = x.response_mask, members(x)
    returns = returns_to_go(x.token_level_rewards, mask, 1.0)
    ids, group, _ = distinct(x.group)
    rows = torch.zeros_like(who.score).index_add(0, who.of_row, torch.ones_like(x.group, dtype=torch.float64))
    weight = _gradient_size(x) / rows[who.of_row].unsqueeze(-1)

    cells = (group.unsqueeze(-1) * mask.shape[1] + place)[mask]  # one for each group and place
    lowest = returns.new_full((len(ids),), torch.inf).scatter_reduce(
        0, group.unsqueeze(-1).expand_as(mask)[mask], returns[mask], "amin"
    )[group].unsqueeze(-1)
    weighed, total = (
        returns.new_zeros(len(ids) * mask.shape[1]).index_add(0, cells, values[mask])
        for values in (weight * (returns - lowest), weight)
    )
    baseline = torch.zeros_like(returns)
    baseline[mask] = (weighed / (total + 1e-8))[cells]
    baseline = baseline + lowest

    longest, tail, several = _lengths(place, mask, who.of_row, x.group)
    if handle_zero_tail:
        baseline = torch.where(longest.unsqueeze(-1) & (place >= tail.unsqueeze(-1)), 0.0, baseline)
    baseline = torch.where(several.unsqueeze(-1), baseline, 0.0)
    dtype = x.token_level_rewards.dtype
    advantages = torch.where(mask, returns - baseline, 0.0)
    return Advantages(advantages.to(dtype), returns.to(dtype))


def _gradient_size(x: AdvantageInputs) -> Tensor:
    """(B, L): the expected squared size of the gradient of all tokens up to each one, at the output layer."""
    likely, squares = (torch.where(x.response_mask, x.columns[name].double(), 0.0) for name in _NEEDS)
    size = 1 - 2 * likely.exp() + squares
    if "rollout_is_weights" in x.columns:
        size = size * x.columns["rollout_is_weights"].double().square()
    return torch.where(x.response_mask, size, 0.0).cumsum(-1)


def _lengths(place: Tensor, mask: Tensor, of_row: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row, (B,): is its trajectory its group's longest and alone in that; the length of the second longest;
    are there several trajectories in its group. A trajectory is as long as its longest row."""
    per_row = torch.where(mask, place + 1, 0).amax(-1) if mask.shape[1] else mask.new_zeros(len(mask), dtype=torch.int64)
    number = int(of_row.max()) + 1 if len(of_row) else 0
    length = per_row.new_zeros(number).scatter_reduce(0, of_row, per_row, "amax")
    home = group.new_zeros(number).scatter(0, of_row, group)
    mates = home[:, None] == home
    others = mates & ~torch.eye(number, dtype=torch.bool)
    second = torch.where(others, length, 0).amax(-1) if number else length
    return (length > second)[of_row], second[of_row], others.any(-1)[of_row]
