"""Estimators that add up what follows a token."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from trivium.algorithms.advantages.inputs import AdvantageInputs, Advantages, trained_columns
from trivium.algorithms.registered import advantage
from trivium.algorithms.stats import masked_whiten

Discount = Annotated[float, Field(ge=0, le=1, description="discount from one trained token to the next")]


@advantage(
    formula="sum over later trained tokens of gamma^distance * reward",
    source="REINFORCE, Williams 1992",
)
def reinforce(x: AdvantageInputs, *, gamma: Discount = 1.0) -> Advantages:
    """The return from each token on, without a baseline. Tokens outside the mask pass it on undiscounted."""
    rewards = x.token_level_rewards.double()
    result = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in trained_columns(x.response_mask):
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
    for t in trained_columns(mask):
        here = mask[:, t]
        error = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(here, error + gamma * lam * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        raw[:, t] = torch.where(here, running, 0.0)
    advantages = torch.where(mask, masked_whiten(raw, mask), 0.0) if whiten and int(mask.sum()) > 1 else raw
    dtype = x.token_level_rewards.dtype
    return Advantages(advantages.to(dtype), torch.where(mask, raw + values, 0.0).to(dtype))
