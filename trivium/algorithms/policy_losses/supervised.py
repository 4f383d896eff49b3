"""Losses that imitate: what an expert wrote, whatever it earned."""

from __future__ import annotations

from trivium.algorithms.inputs import PerToken, PolicyInputs
from trivium.algorithms.registered import policy_loss


@policy_loss(
    formula="-log_prob",
    source="maximum likelihood",
    on_policy="none: it imitates every token alike, whatever it earned",
)
def sft(x: PolicyInputs) -> PerToken:
    """Cross-entropy on the tokens of the mask."""
    return PerToken(-x.log_prob)
