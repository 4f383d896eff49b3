"""A*-PO: the policy's log-ratio is regressed on the optimal advantage. Legend: B sequences, L tokens, N samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, members, per_member, spread
from trivium.algorithms.losses.base import PerToken, PolicyInputs, row_mean, zero_outside
from trivium.algorithms.metadata import advantage, policy_loss
from trivium.foundation.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_SOURCE = "A*-PO, Brantley et al. 2025 (arXiv 2505.20686)"


@advantage(
    formula="R - V, V = beta log(mean(exp(q / beta) over the rewards q in the task's column reference_rewards))",
    source=_SOURCE,
    unshaped=True,
)
def a_star_po(
    x: AdvantageInputs,
    *,
    beta: Annotated[
        float, Field(gt=0, description="temperature of the value: 0 is the best reference sample, infinity the mean")
    ] = 0.5,
) -> Advantages:
    """The optimal advantage: reward minus the optimal value of the task, estimated once from the rewards of samples of
    the reference policy. `trivium eval CONFIG --step 0 --tasks FILE` writes the column; one number is the value itself.
    """
    trajectories = members(x)
    return spread(trajectories.score - per_member(_optimal_values(x, beta), trajectories), trajectories.of_row, x)


def _optimal_values(x: AdvantageInputs, beta: float) -> Tensor:
    """(B,): the optimal value of each row's task. Raises DataError for a task without rewards of its reference."""
    rewards = x.reference_rewards
    if rewards is None:
        rewards = torch.full((len(x.group), 1), torch.nan, dtype=torch.float64)
    recorded = ~rewards.isnan()
    if not bool(recorded.any(-1).all()):
        raise DataError(
            "the optimal value of each task",
            "a task has no column reference_rewards with the rewards of the reference policy's samples",
            "write the tasks with `trivium eval CONFIG --step 0 --tasks FILE`, and train on that file",
        )
    scaled = (rewards / beta).masked_fill(~recorded, -torch.inf)
    return beta * (torch.logsumexp(scaled, -1) - recorded.sum(-1).double().log())


@policy_loss(
    formula="(beta sum over the sequence of (log_prob - ref_log_prob) - A)^2",
    source=_SOURCE,
    needs={"advantages", "ref_log_prob"},
    on_policy="none: least squares pull the log-ratio against the reference towards A / beta, and stop there",
    anchored=True,
    off_policy=True,
    per_sequence=True,
)
def a_star_po_loss(
    x: PolicyInputs,
    *,
    beta: Annotated[
        float, Field(gt=0, description="weight of the KL in the problem whose solution is regressed")
    ] = 1e-3,
) -> PerToken:
    """The squared error of the log-ratio of a whole sequence; meant for `aggregate: seq-mean-token-mean`. The fit needs
    no ratio against the policy that sampled."""
    ratio = zero_outside(x.log_prob - x.columns["ref_log_prob"], x.response_mask).sum(-1, keepdim=True)
    loss = (beta * ratio - row_mean(x.advantages, x.response_mask)).square()
    return PerToken(loss.expand_as(x.log_prob))
