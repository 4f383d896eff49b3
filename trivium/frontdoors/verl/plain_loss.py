"""The policy loss of verl's `gpg`, which updates several times per step without a ratio."""

from __future__ import annotations

from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.algorithms.metadata import policy_loss


@policy_loss(
    formula="-A log_prob",
    source="GPG, Chu et al. 2025, arXiv 2504.02546",
    needs={"advantages"},
    on_policy="plain",
    off_policy=True,
)
def plain(x: PolicyInputs) -> PerToken:
    """`reinforce` for several updates in a step. Updates after the first one are biased, as in verl."""
    return PerToken(-x.advantages * x.log_prob)
