"""REINFORCE with selectable parts of GRPO: clipping, token weights, regularisation towards the old policy.

Legend: B sequences, L tokens; r the ratio of current and old policy. No gradient flows through a weight or a decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trivium.algorithms.losses.base import LOG_RATIO_BOUND, PerToken, PolicyInputs, row_mean
from trivium.algorithms.losses.clipped import ClipHigh, ClipLow
from trivium.algorithms.metadata import When, policy_loss
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_PAPER = "Yao et al. 2025, Group-relative REINFORCE is secretly an off-policy algorithm"
_RATIO = "r = exp(log_prob - old_log_prob)"
_TWO_SIDE = "{clip=two_side: where 1 - clip_low <= r <= 1 + clip_high}"
_ONE_SIDE = "{clip=one_side: unless A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low}"
_CLIPS = When("clip", ("one_side", "two_side", "ring"))
_RING = (
    "{clip=ring: where 1 - clip_low <= r <= 1 + clip_high, or A > 0 and r <= 1 - ring_low, "
    "or A < 0 and r >= 1 + ring_high}"
)


@policy_loss(
    formula=f"-A {{weight=importance:r }}log_prob{_TWO_SIDE}{_ONE_SIDE}{_RING}; {_RATIO}"
    "{level=sequence:, its geometric mean over the row}",
    source=f"REC, {_PAPER}",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    off_policy=True,
    effective={
        "clip_low": _CLIPS,
        "clip_high": _CLIPS,
        "ring_low": When("clip", ("ring",)),
        "ring_high": When("clip", ("ring",)),
    },
)
def rec(
    x: PolicyInputs,
    *,
    clip: Annotated[
        Literal["one_side", "two_side", "ring", "none"], Field(description="at which ratios a token counts")
    ] = "one_side",
    weight: Annotated[
        Literal["importance", "none"], Field(description="whether the ratio weighs the score function")
    ] = "importance",
    level: Annotated[
        Literal["token", "sequence"], Field(description="whose ratio: a token's, or its geometric mean over the row")
    ] = "token",
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    ring_low: Annotated[
        float, Field(ge=0, le=1, description="tokens with A > 0 count again at a ratio of at most 1 minus this")
    ] = 0.6,
    ring_high: Annotated[
        float, Field(ge=0, description="tokens with A < 0 count again at a ratio of at least 1 plus this")
    ] = 2.0,
) -> PerToken:
    """REINFORCE with clipping. The defaults give the gradient of PPO's clipped surrogate; without clip and weight it is
    REINFORCE.
    """
    log_ratio = x.log_ratio.detach() if level == "token" else row_mean(x.log_ratio.detach(), x.response_mask)
    ratio = log_ratio.exp().expand_as(x.log_prob)
    counts = _counts(ratio, x.advantages, clip, (clip_low, clip_high), (ring_low, ring_high))
    score = -x.advantages * x.log_prob * (ratio if weight == "importance" else 1.0)
    return PerToken(torch.where(counts, score, 0.0), {"train/clip_fraction": (~counts).to(score.dtype)})


@policy_loss(
    formula=f"-A log_prob{_TWO_SIDE}{_ONE_SIDE}{{regularizer=forward_kl: - strength log_prob}}"
    f"{{regularizer=k2: + strength (log_prob - old_log_prob)^2}}; {_RATIO}",
    source=f"regularised REC, {_PAPER}: with k2 the objective of Kimi k1.5, with forward_kl that of AsymRE",
    needs={"advantages", "old_log_prob"},
    on_policy="none: the regularizer pulls as well",
    anchored=True,
    off_policy=True,
    effective={"clip_low": _CLIPS, "clip_high": _CLIPS},
)
def rec_regularized(
    x: PolicyInputs,
    *,
    regularizer: Annotated[
        Literal["forward_kl", "k2"],
        Field(description="keeps the policy near the one that sampled: by its likelihood, or by the squared log-ratio"),
    ] = "forward_kl",
    strength: Annotated[float, Field(gt=0, description="weight of the regularizer")] = 0.1,
    clip: Annotated[
        Literal["none", "one_side", "two_side"], Field(description="at which ratios a token counts")
    ] = "none",
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
) -> PerToken:
    """REINFORCE on completions of older policies, with a regularizer on every token that keeps the policy near them."""
    per_token = rec(x, clip=clip, weight="none", clip_low=clip_low, clip_high=clip_high)
    pull = -x.log_prob if regularizer == "forward_kl" else x.log_ratio.square()
    return PerToken(per_token.loss + strength * pull, per_token.metrics)


@policy_loss(
    formula="-A exp(A / temperature) log_prob",
    source=f"RED-Weight, {_PAPER}",
    needs={"advantages"},
    on_policy="none: exp(A / temperature) shifts the weight from bad completions to good ones",
    off_policy=True,
)
def red_weight(
    x: PolicyInputs,
    *,
    temperature: Annotated[
        float, Field(gt=0, description="an advantage of this size multiplies a token's weight by e")
    ] = 1.0,
) -> PerToken:
    """REINFORCE with more weight on good completions than on bad ones."""
    weight = (x.advantages / temperature).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return PerToken(-x.advantages * weight * x.log_prob, {"train/score_weight": weight})


def _counts(
    ratio: Tensor, advantages: Tensor, clip: str, band: tuple[float, float], ring: tuple[float, float]
) -> Tensor:
    """(B, L) bool: the tokens whose score counts."""
    above_low, below_high = ratio >= 1 - band[0], ratio <= 1 + band[1]
    good, bad = advantages >= 0, advantages <= 0
    if clip == "two_side":
        return above_low & below_high
    if clip == "one_side":
        return (good & below_high) | (bad & above_low)
    if clip == "ring":
        return (above_low & below_high) | (good & (ratio <= 1 - ring[0])) | (bad & (ratio >= 1 + ring[1]))
    return torch.ones_like(above_low)
