"""Losses that hold the ratio of current and old policy within bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.aggregation import agg_loss
from trivium.algorithms.losses.base import PerToken, PolicyInputs, policy_inputs
from trivium.algorithms.metadata import policy_loss
from trivium.algorithms.stats import masked_mean
from trivium.config import CHANGEABLE
from trivium.foundation.errors import ConfigError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

ClipLow = Annotated[
    float, Field(ge=0, le=1, description="how far the ratio may fall below one", json_schema_extra=CHANGEABLE)
]
ClipHigh = Annotated[
    float, Field(ge=0, description="how far the ratio may rise above one", json_schema_extra=CHANGEABLE)
]
DualClip = Annotated[
    float | None, Field(gt=1, description="bound of the ratio where the advantage is negative; null for none")
]


def clipped_surrogate(x: PolicyInputs, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """(PPO's loss without a dual clip, whether the clip decided it) of each token, (B, L)."""
    ratio = x.log_ratio.exp()
    plain = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def held_below(loss: Tensor, advantages: Tensor, dual_clip: float) -> tuple[Tensor, Tensor]:
    """(the loss, limited to -A dual_clip where A < 0; 1 where the limit applies), (B, L) each."""
    bound = -advantages * dual_clip
    held = (advantages < 0) & (loss > bound)
    return torch.where(held, bound, loss), held.to(loss.dtype)


@policy_loss(
    formula="max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)){dual_clip:, at most -A dual_clip where A < 0}; r = exp(log_prob - old_log_prob)",  # noqa: E501
    source="PPO, Schulman et al. 2017, eq. 7; dual clip, Ye et al. 2020, eq. 5; clip-higher, DAPO, Yu et al. 2025",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
)
def ppo(
    x: PolicyInputs,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip = 3.0,
) -> PerToken:
    """The clipped surrogate of proximal policy optimisation."""
    loss, clipped = clipped_surrogate(x, clip_low, clip_high)
    metrics = {"train/clip_fraction": clipped.to(loss.dtype)}
    if dual_clip is not None:
        loss, metrics["train/clip_fraction_lower"] = held_below(loss, x.advantages, dual_clip)
    return PerToken(loss, metrics)


@policy_loss(
    formula="-A f; f = 4 / tau sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg",
    source="SAPO, Gao et al. 2025, arXiv 2511.20347",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
)
def sapo(
    x: PolicyInputs,
    *,
    tau_pos: Annotated[float, Field(gt=0, description="steepness of the gate where the advantage is positive")] = 1.0,
    tau_neg: Annotated[float, Field(gt=0, description="steepness of the gate elsewhere")] = 1.05,
) -> PerToken:
    """A soft clip: the gradient decays with the distance of the ratio from one, faster for a larger tau."""
    tau = torch.full_like(x.log_prob, tau_neg).masked_fill(x.advantages > 0, tau_pos)
    return PerToken(-x.advantages * 4 / tau * torch.sigmoid(tau * (x.log_ratio.exp() - 1)))


@policy_loss(
    formula="-A min(log_prob, old_log_prob + log(1 + clip_high)) where A > 0, -A max(log_prob, old_log_prob + log(1 - clip_low)) elsewhere{drift_coef:, plus drift_coef (r - 1 - log r)}",  # noqa: E501
    source="CPGD, Liu et al. 2025, arXiv 2505.12504",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    anchored=True,
)
def cpgd(
    x: PolicyInputs,
    *,
    clip_low: Annotated[
        float, Field(ge=0, lt=1, description="how far the ratio may fall below one", json_schema_extra=CHANGEABLE)
    ] = 0.2,
    clip_high: ClipHigh = 0.2,
    drift_coef: Annotated[float, Field(ge=0, description="weight of the KL(old, current); 0 for none")] = 0.0,
) -> PerToken:
    """Clipped policy gradient with policy drift: log-probabilities are clipped, so no ratio multiplies the gradient."""
    highest, lowest = x.old_log_prob + math.log1p(clip_high), x.old_log_prob + math.log1p(-clip_low)
    positive = x.advantages > 0
    held = torch.where(positive, x.log_prob > highest, x.log_prob < lowest)
    log_prob = torch.where(held, torch.where(positive, highest, lowest), x.log_prob)
    loss = -x.advantages * log_prob + drift_coef * (x.log_ratio.expm1() - x.log_ratio)
    return PerToken(loss, {"train/clip_fraction": held.to(loss.dtype)})


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
    above 1. Same mathematics as the registered loss `ppo`. Raises ConfigError for missing ranges.
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
    per_token = ppo(x, clip_low=low, clip_high=high, dual_clip=clip_ratio_c)
    return (
        agg_loss(per_token.loss, x.response_mask, loss_agg_mode),
        masked_mean(per_token.metrics["train/clip_fraction"], x.response_mask),
        masked_mean(-x.log_ratio, x.response_mask),
        masked_mean(per_token.metrics["train/clip_fraction_lower"], x.response_mask),
    )
