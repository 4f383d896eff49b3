"""Rewards as the labels of a classification within each group. Legend: B sequences, L tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs, row_mean
from trivium.algorithms.metadata import policy_loss, selection
from trivium.algorithms.stats import distinct
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_SOURCE = "REAL, Zhai et al. 2026 (arXiv 2602.05630)"
_LOSS = (
    "log(1 + sum over A > 0 of exp(-s / tau)) + log(1 + sum over A <= 0 of exp(s / tau)), s the mean of log r of a "
    "sequence"
)


@selection(
    formula=f"the derivative by s of the group's {_LOSS}; times sequences / groups",
    source=_SOURCE,
    needs={"log_prob", "old_log_prob", "advantages", "group"},
)
def label_slopes(
    x: PolicyInputs,
    *,
    tau: Annotated[float, Field(gt=0, description="temperature of the classification")] = 0.5,
) -> Tensor:
    """The slope of each sequence on its tokens, (B, L)."""
    score = row_mean(x.log_ratio, x.response_mask).squeeze(-1).double()
    counts = x.response_mask.any(-1)
    positive = row_mean(x.advantages, x.response_mask).squeeze(-1) > 0
    # The column repeats the row's number on every token.
    _, group, members = distinct(x.columns["group"].amax(-1))
    slopes = torch.zeros_like(score)
    for sign, side in ((-1.0, positive & counts), (1.0, ~positive & counts)):
        # 1 is the exponential of the anchor's score, 0.
        weight = torch.where(side, (sign * score / tau).exp(), 0.0)
        total = weight.new_ones(len(members)).index_add(0, group, weight)
        slopes = slopes + sign / tau * weight / total[group]
    number = len(group[counts].unique()) if bool(counts.any()) else 1  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    scale = int(counts.sum()) / number
    return (slopes * scale).unsqueeze(-1).expand_as(x.log_prob).to(x.log_prob.dtype)


@policy_loss(
    formula=f"slope log_prob, slope of {_LOSS}; the mean over groups with the aggregation seq-mean-token-mean",
    source=_SOURCE,
    needs={"old_log_prob", "advantages"},
    select=label_slopes,
    on_policy="none: a completion's weight depends on how many of its group have its label",
    anchored=True,
)
def real(x: PolicyInputs) -> PerToken:
    """The gradient of the classification, with the slopes from before the update: bounded, and largest for positive
    completions that the policy has moved away from. The advantage is the label: use an estimator that gives rewards
    (`reinforce`)."""
    slope = x.columns["selected"]
    return PerToken(slope * x.log_prob, {"train/score_weight": slope.abs()})
