"""Losses with one ratio for a whole sequence: the geometric mean of the ratios of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs, row_mean
from trivium.algorithms.losses.clipped import DualClip, held_below
from trivium.algorithms.metadata import policy_loss
from trivium.config import CHANGEABLE
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_CLIPPED = "max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)){dual_clip:, at most -A dual_clip where A < 0}"

ClipLow = Annotated[
    float,
    Field(ge=0, le=1, description="how far the sequence's ratio may fall below one", json_schema_extra=CHANGEABLE),
]
ClipHigh = Annotated[
    float, Field(ge=0, description="how far the sequence's ratio may rise above one", json_schema_extra=CHANGEABLE)
]


@policy_loss(
    formula=f"{_CLIPPED}; s = exp(mean over the sequence of log r), its gradient at each token that of s log_prob",
    source="GSPO-token, Zheng et al. 2025, arXiv 2507.18071",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
)
def gspo(
    x: PolicyInputs, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4, dual_clip: DualClip = None
) -> PerToken:
    """PPO's clip on the ratio of sequences; meant for `aggregate: seq-mean-token-mean`. With `seq-mean-token-sum` it is
    LUSPO (Liu et al. 2026, arXiv 2602.05261).

    Each token's part of the gradient of the sequence's ratio has the advantage of the token; if all tokens of a
    sequence have the same advantage, the gradient is that of `gspo_sequence`.
    """
    mean = row_mean(x.log_ratio, x.response_mask)
    # The sequence's ratio in value, with the gradient of the token.
    return _clipped(x, mean.detach() + (x.log_prob - x.log_prob.detach()), clip_low, clip_high, dual_clip)


@policy_loss(
    formula=f"{_CLIPPED}; s = exp(mean over the sequence of log r)",
    source="GSPO, Zheng et al. 2025, arXiv 2507.18071",
    needs={"advantages", "old_log_prob"},
    on_policy="none: every token gets the mean advantage of its sequence (plain where all of them are equal)",
    per_sequence=True,
)
def gspo_sequence(
    x: PolicyInputs, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4, dual_clip: DualClip = None
) -> PerToken:
    """As `gspo`, with the gradient of the sequence's ratio itself; meant for `aggregate: seq-mean-token-mean`."""
    mean = row_mean(x.log_ratio, x.response_mask)
    return _clipped(x, mean.expand_as(x.log_prob), clip_low, clip_high, dual_clip)


def _clipped(
    x: PolicyInputs, log_ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PerToken:
    """PPO's loss with this log-ratio, (B, L)."""
    ratio = log_ratio.exp()
    plain = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"train/clip_fraction": (clipped > plain).to(loss.dtype)}
    if dual_clip is not None:
        loss, metrics["train/clip_fraction_lower"] = held_below(loss, x.advantages, dual_clip)
    return PerToken(loss, metrics)


@policy_loss(
    formula="-mean over the sequence of A * exp(mean over the sequence of c); c = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0",  # noqa: E501
    source="GMPO, Zhao et al. 2025, arXiv 2507.20673",
    needs={"advantages", "old_log_prob"},
    on_policy="none: every token gets the mean advantage of its sequence (plain where all of them are equal)",
    per_sequence=True,
)
def gmpo(
    x: PolicyInputs,
    *,
    clip_low: Annotated[float, Field(ge=0, description="how far a token's log-ratio may fall below zero")] = 0.4,
    clip_high: Annotated[float, Field(ge=0, description="how far a token's log-ratio may rise above zero")] = 0.4,
) -> PerToken:
    """The geometric mean of clipped token ratios; meant for `aggregate: seq-mean-token-mean`. Every token of a sequence
    has the loss of the sequence. A ratio is clipped only in the direction in which the advantage pushes it.
    """
    clamped = x.log_ratio.clamp(-clip_low, clip_high)
    sign = x.advantages.sign()
    held = sign * torch.minimum(sign * x.log_ratio, sign * clamped)
    ratio = row_mean(held, x.response_mask).exp()
    loss = (-row_mean(x.advantages, x.response_mask) * ratio).expand_as(x.log_prob)
    outside = clamped != x.log_ratio
    metrics = {
        "train/clip_fraction": held != x.log_ratio,
        "train/clip_fraction_up": outside & (x.advantages > 0),
        "train/clip_fraction_down": outside & (x.advantages < 0),
    }
    return PerToken(loss, {key: value.to(loss.dtype) for key, value in metrics.items()})
