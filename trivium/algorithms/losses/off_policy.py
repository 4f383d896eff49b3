"""Losses for samples of older weights: the score function, -w A log_prob, tapered or cut as the policy moves.

Legend: B sequences, L tokens; r the ratio of current and old policy, of a token or of a whole row. No gradient flows
through a weight, and none through a decision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trivium.algorithms.losses.base import LOG_RATIO_BOUND, PerToken, PolicyInputs
from trivium.algorithms.metadata import policy_loss
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss(
    formula="-A log_prob / (1 + tau)",
    source="OPMD: mirror descent as in Kimi k1.5, 2025, section 2.3.2, simplified by Trinity-RFT, Pan et al. 2025",
    needs={"advantages"},
    on_policy="factor: 1 / (1 + tau)",
    off_policy=True,
)
def opmd(
    x: PolicyInputs,
    *,
    tau: Annotated[float, Field(ge=0, description="temperature: a larger value makes updates smaller")] = 1.0,
) -> PerToken:
    """Mirror descent without a ratio: completions of older policies count like new ones, with smaller steps."""
    return PerToken(-x.advantages * x.log_prob / (1 + tau))


@policy_loss(
    formula="-A log_prob where A > threshold, else -A min(r, 1) log_prob; r = exp(log_prob - old_log_prob)"
    "{level=sequence:, multiplied over the row}",
    source="TOPR, Le Roux et al. 2025 (arXiv 2503.14286), canonical form; per token as in Trinity-RFT 0.6",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    off_policy=True,
)
def topr(
    x: PolicyInputs,
    *,
    level: Annotated[
        Literal["sequence", "token"],
        Field(description="whose ratio: the whole completion's, as in the paper, or a token's"),
    ] = "sequence",
    threshold: Annotated[float, Field(description="a completion with at most this advantage counts as bad")] = 0.0,
) -> PerToken:
    """Tapered off-policy REINFORCE: good completions have full weight; bad ones have less weight as the policy makes
    them less likely."""
    log_ratio = x.log_ratio if level == "token" else row_log_ratio(x)
    tapered = log_ratio.detach().clamp(max=0).exp()
    weight = torch.where(x.advantages > threshold, 1.0, tapered)
    return PerToken(-x.advantages * weight * x.log_prob, {"train/score_weight": weight})


@policy_loss(
    formula="-A w^k exp(lambda (1 - w)) log_prob, w = product of the row's ratios; k, lambda = k_pos, lambda_pos "
    "where A >= 0, else k_neg, lambda_neg",
    source="VESPO, 2026 (arXiv 2602.10693)",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    off_policy=True,
)
def vespo(
    x: PolicyInputs,
    *,
    k_pos: Annotated[
        float, Field(ge=0, description="how fast completions count less as they become unlikely, A >= 0")
    ] = 2.0,
    lambda_pos: Annotated[float, Field(ge=0, description="how fast, as they become more likely, A >= 0")] = 3.0,
    k_neg: Annotated[float, Field(ge=0, description="as k_pos, where A < 0")] = 3.0,
    lambda_neg: Annotated[float, Field(ge=0, description="as lambda_pos, where A < 0")] = 2.0,
) -> PerToken:
    """A soft trust region on whole completions, without clipping and without a mean over their length."""
    log_weight = row_log_ratio(x).detach()
    good = x.advantages >= 0
    k, slope = (torch.where(good, *pair) for pair in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    weight = (k * log_weight + slope * (1 - log_weight.exp())).clamp(max=LOG_RATIO_BOUND).exp()
    return PerToken(-x.advantages * weight * x.log_prob, {"train/score_weight": weight})


@policy_loss(
    formula="-A (log_prob - old_log_prob) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0",
    source="sPPO, Vaswani et al. 2022 (arXiv 2108.05828), section 4",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    off_policy=True,
)
def sppo(
    x: PolicyInputs,
    *,
    epsilon: Annotated[float, Field(gt=0, description="how far the ratio may leave one, as a factor")] = 0.3,
) -> PerToken:
    """The logarithm of the ratio instead of the ratio, clipped on both sides whatever the advantage."""
    inside = x.log_ratio.detach().abs() <= math.log1p(epsilon)
    return PerToken(
        torch.where(inside, -x.advantages * x.log_ratio, 0.0), {"train/clip_fraction": (~inside).to(x.log_prob.dtype)}
    )


def row_log_ratio(x: PolicyInputs) -> Tensor:
    """(B, 1): log(current / old) of the whole completion, the sum over its trained tokens, clamped to +-20 nats."""
    total = torch.where(x.response_mask, x.log_ratio, 0.0).sum(-1, keepdim=True)
    # Each ratio is bounded, their product over a long completion is not.
    return total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
