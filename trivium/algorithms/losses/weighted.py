"""Losses that weigh the score function, -w A log_prob, with a weight that no gradient flows through."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.algorithms.metadata import policy_loss
from trivium.config import CHANGEABLE
from trivium.models.late import torch


@policy_loss(
    formula="-A log_prob",
    source="REINFORCE, Williams 1992",
    needs={"advantages"},
    on_policy="plain",
)
def reinforce(x: PolicyInputs) -> PerToken:
    """The score function estimator. It has no ratio: it assumes that the current weights sampled the tokens."""
    return PerToken(-x.advantages * x.log_prob)


@policy_loss(
    formula="-A r; r = exp(log_prob - old_log_prob)",
    source="importance sampling, Kahn and Marshall 1953; for policies, Precup et al. 2000",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    off_policy=True,
)
def importance_sampling(x: PolicyInputs) -> PerToken:
    """The score function weighted with the ratio: unbiased for one step off policy, unbounded."""
    ratio = x.log_ratio.exp()
    return PerToken(-x.advantages * ratio, {"train/ratio": ratio})


@policy_loss(
    formula="-A clip(r, 1 - clip_low, 1 + clip_high) log_prob, no gradient through r"
    "{mask_clip_high:; 0 where A > 0 and r > 1 + mask_clip_high}"
    "{mask_clip_low:; 0 where A < 0 and r < 1 - mask_clip_low}"
    "; r = exp(log_prob - old_log_prob)",
    source="CISPO and its unified form with a mask of tokens, MiniMax-M1, Chen et al. 2025, arXiv 2506.13585",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
)
def cispo(
    x: PolicyInputs,
    *,
    clip_low: Annotated[
        float, Field(ge=0, le=1, description="how far the weight may fall below one", json_schema_extra=CHANGEABLE)
    ] = 1.0,
    clip_high: Annotated[
        float, Field(ge=0, description="how far the weight may rise above one", json_schema_extra=CHANGEABLE)
    ] = 4.0,
    mask_clip_low: Annotated[
        float | None,
        Field(gt=0, le=1, description="tokens with A < 0 count down to a ratio of 1 minus this; null for no limit"),
    ] = None,
    mask_clip_high: Annotated[
        float | None, Field(gt=0, description="tokens with A > 0 count up to a ratio of 1 plus this; null for no limit")
    ] = None,
) -> PerToken:
    """Clips the weight of a token, not its gradient: rare tokens that change the course of a completion keep their
    gradient."""
    ratio = x.log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    good, bad = x.advantages > 0, x.advantages < 0
    left_out = torch.zeros_like(good)
    if mask_clip_high is not None:
        left_out |= good & (ratio > 1 + mask_clip_high)
    if mask_clip_low is not None:
        left_out |= bad & (ratio < 1 - mask_clip_low)
    loss = torch.where(left_out, 0.0, -x.advantages * weight * x.log_prob)
    clipped = weight != ratio
    metrics = {
        "train/clip_fraction": clipped,
        "train/clip_fraction_up": clipped & good,
        "train/left_out": left_out,
    }
    return PerToken(loss, {key: value.to(loss.dtype) for key, value in metrics.items()})
