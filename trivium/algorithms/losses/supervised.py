"""Losses that imitate expert completions, independent of rewards."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.algorithms.metadata import policy_loss


@policy_loss(
    formula="-log_prob",
    source="maximum likelihood",
    on_policy="none: it imitates every token equally, regardless of its reward",
)
def sft(x: PolicyInputs) -> PerToken:
    """Cross-entropy on the tokens of the mask."""
    return PerToken(-x.log_prob)


@policy_loss(
    formula="-p log_prob, no gradient through p = exp(log_prob)",
    source="DFT, Wu et al. 2025, On the generalization of SFT",
    on_policy="none: it imitates, regardless of a token's reward",
)
def sft_is(x: PolicyInputs) -> PerToken:
    """Cross-entropy weighted with the probability of the token: tokens that the policy finds very unlikely have little
    weight."""
    return PerToken(-x.log_prob * x.log_prob.detach().exp())


@policy_loss(
    formula="-p (1 - p) min(log_prob, log cutoff), no gradient through p = exp(log_prob)",
    source="CHORD, Zhang et al. 2025, On-policy RL meets off-policy experts, eq. 8",
    on_policy="none: it imitates, regardless of a token's reward",
)
def sft_phi(
    x: PolicyInputs,
    *,
    cutoff: Annotated[
        float, Field(gt=0, le=1, description="a token of at least this probability has no gradient")
    ] = 1.0,
) -> PerToken:
    """Cross-entropy weighted with p (1 - p): tokens whose probability is near 0 or 1 have little weight."""
    p = x.log_prob.detach().exp()
    return PerToken(-x.log_prob.clamp(max=math.log(cutoff)) * p * (1 - p))
