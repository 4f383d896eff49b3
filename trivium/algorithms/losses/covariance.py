"""Losses that restrain the tokens with a high covariance of log-probability and advantage, which lower the entropy.

The tokens are chosen over the whole mini-batch, under the weights before the update. Legend: B sequences, L tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.algorithms.losses.clipped import ClipHigh, ClipLow, clipped_surrogate
from trivium.algorithms.losses.selecting import first
from trivium.algorithms.metadata import policy_loss, selection
from trivium.algorithms.stats import masked_sum
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_SOURCE = "Cui et al. 2025, The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617"

Ratio = Annotated[float, Field(gt=0, le=1, description="fraction of the mini-batch's tokens to choose; at least one")]


def covariances(x: PolicyInputs) -> Tensor:
    """(A - mean A) (log_prob - mean log_prob) of each token, (B, L) float64; means over the mask."""
    advantages, log_prob = x.advantages.double(), x.log_prob.double()
    count = x.response_mask.sum().clamp(min=1)
    mean_advantage, mean_log_prob = (masked_sum(values, x.response_mask) / count for values in (advantages, log_prob))
    return (advantages - mean_advantage) * (log_prob - mean_log_prob)


def _number(ratio: float, x: PolicyInputs) -> int:
    return max(int(ratio * int(x.response_mask.sum())), 1)


@selection(
    formula="a random fraction ratio of all tokens, among those with cov_low < cov < cov_high that a clip at 1 - clip_low and 1 + clip_high does not hold already",  # noqa: E501
    source=_SOURCE,
    needs={"log_prob", "advantages", "old_log_prob", "uniform"},
)
def some_high_covariance(
    x: PolicyInputs,
    *,
    ratio: Ratio = 2e-4,
    cov_low: Annotated[float, Field(description="covariance above which a token may be chosen")] = 1.0,
    cov_high: Annotated[float, Field(description="covariance below which a token may be chosen")] = 5.0,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
) -> Tensor:
    """Tokens whose covariance lies between two bounds, (B, L) bool."""
    held = clipped_surrogate(x, clip_low, clip_high)[1]
    covariance = covariances(x)
    candidates = x.response_mask & ~held & (covariance > cov_low) & (covariance < cov_high)
    return first(candidates, _number(ratio, x), x.columns["uniform"])


@policy_loss(
    formula="max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), 0 for the tokens selected: a random fraction ratio of all, among those with cov_low < cov < cov_high; cov = (A - mean A) (log_prob - mean log_prob)",  # noqa: E501
    source=f"Clip-Cov, {_SOURCE}",
    needs={"advantages", "old_log_prob"},
    on_policy="none: the selected tokens have no gradient, the others have the plain one",
    select=some_high_covariance,
    ordered=(("cov_low", "cov_high"),),
)
def clip_cov(x: PolicyInputs, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2) -> PerToken:
    """PPO's clip; a few random tokens of high covariance are left out."""
    loss, held = clipped_surrogate(x, clip_low, clip_high)
    selected = x.columns["selected"] > 0
    metrics = {"train/clip_fraction": held.to(loss.dtype), "train/left_out": selected.to(loss.dtype)}
    return PerToken(torch.where(selected, 0.0, loss), metrics)


@selection(
    formula="the fraction ratio of all tokens with the highest covariance",
    source=_SOURCE,
    needs={"log_prob", "advantages", "uniform"},
)
def highest_covariance(x: PolicyInputs, *, ratio: Ratio = 2e-4) -> Tensor:
    """The tokens of highest covariance, (B, L) bool; a random choice among equals."""
    return first(x.response_mask, _number(ratio, x), -covariances(x), x.columns["uniform"])


@policy_loss(
    formula="-A r, + coef abs(log r) for the tokens selected: the fraction ratio of all with the highest cov = (A - mean A) (log_prob - mean log_prob)",  # noqa: E501
    source=f"KL-Cov, {_SOURCE}",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    anchored=True,
    select=highest_covariance,
)
def kl_cov(
    x: PolicyInputs,
    *,
    coef: Annotated[float, Field(ge=0, description="weight of the penalty on the distance from the old policy")] = 0.1,
) -> PerToken:
    """No clip; a KL penalty keeps the tokens of highest covariance near the old policy."""
    distance = x.log_ratio.abs()
    loss = -x.advantages * x.log_ratio.exp() + coef * x.columns["selected"] * distance
    return PerToken(loss, {"train/log_ratio_abs": distance})
