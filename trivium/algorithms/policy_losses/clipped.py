"""Losses that hold the ratio of current and old policy within bounds."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from trivium.algorithms.aggregation import agg_loss
from trivium.algorithms.inputs import PerToken, PolicyInputs, policy_inputs
from trivium.algorithms.registered import policy_loss
from trivium.algorithms.stats import masked_mean
from trivium.errors import ConfigError


@policy_loss(
    formula="max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)){dual_clip:, at most -A dual_clip where A < 0}; r = exp(log_prob - old_log_prob)",  # noqa: E501
    source="PPO, Schulman et al. 2017, eq. 7; dual clip, Ye et al. 2020, eq. 5; clip-higher, DAPO, Yu et al. 2025",
    needs=("advantages", "old_log_prob"),
    on_policy="plain",
)
def ppo(
    x: PolicyInputs,
    *,
    clip_low: Annotated[float, Field(ge=0, le=1, description="how far the ratio may fall below one")] = 0.2,
    clip_high: Annotated[float, Field(ge=0, description="how far the ratio may rise above one")] = 0.2,
    dual_clip: Annotated[
        float | None, Field(gt=1, description="bound of the ratio where the advantage is negative; null for none")
    ] = 3.0,
) -> PerToken:
    """The clipped surrogate of proximal policy optimisation."""
    ratio = x.log_ratio.exp()
    plain = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"train/clip_fraction": (clipped > plain).to(loss.dtype)}
    if dual_clip is not None:
        bound = -x.advantages * dual_clip
        held = (x.advantages < 0) & (loss > bound)
        metrics["train/clip_fraction_lower"] = held.to(loss.dtype)
        loss = torch.where(held, bound, loss)
    return PerToken(loss, metrics)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, clipped fraction, KL(old, current) estimate in nats, fraction held by the dual clip), all scalars.

    Inputs (B, L). `cliprange_low` and `cliprange_high` default to `cliprange`; `clip_ratio_c` is the dual clip's bound,
    above 1. Same mathematics as the registered loss `ppo`. Raises ConfigError for ranges that say nothing.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None or clip_ratio_c <= 1:
        raise ConfigError(
            "the clipped policy loss",
            f"clip ranges {low} below and {high} above, clip_ratio_c {clip_ratio_c}",
            "give cliprange, or both of cliprange_low and cliprange_high, and a clip_ratio_c above 1",
        )
    x = policy_inputs(log_prob, response_mask, advantages=advantages, old_log_prob=old_log_prob)
    done = ppo(x, clip_low=low, clip_high=high, dual_clip=clip_ratio_c)
    return (
        agg_loss(done.loss, x.response_mask, loss_agg_mode),
        masked_mean(done.metrics["train/clip_fraction"], x.response_mask),
        masked_mean(-x.log_ratio, x.response_mask),
        masked_mean(done.metrics["train/clip_fraction_lower"], x.response_mask),
    )
