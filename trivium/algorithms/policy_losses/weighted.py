"""Losses that weigh the score function, -w A log_prob, with a weight that no gradient flows through."""

from __future__ import annotations

from trivium.algorithms.inputs import PerToken, PolicyInputs
from trivium.algorithms.registered import policy_loss


@policy_loss(
    formula="-A log_prob",
    source="REINFORCE, Williams 1992",
    needs=("advantages",),
    on_policy="plain",
)
def reinforce(x: PolicyInputs) -> PerToken:
    """The score function estimator: no ratio, so it trusts that the current weights sampled the tokens."""
    return PerToken(-x.advantages * x.log_prob)
