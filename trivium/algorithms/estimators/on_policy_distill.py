"""Estimators that read a teacher's log-probabilities instead of rewards: one number per token."""

from __future__ import annotations

from math import log, log1p
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages
from trivium.algorithms.metadata import advantage
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

KlCoef = Annotated[float, Field(gt=0, description="a factor of all advantages")]
_NEEDS = ("old_log_prob", "teacher_log_prob")


@advantage(
    formula="kl_coef d{prefix_gamma: (1 + prefix_gamma (1 - sum of |d| before the token / sum of |d| over the row))}; d = teacher_log_prob - old_log_prob",  # noqa: E501
    source="on-policy distillation, Agarwal et al. 2024; Lu and Thinking Machines Lab 2025; prefix weights, IW-OPD, "
    "Xie et al. 2026 (arXiv 2606.22600), algorithm 1",
    needs=frozenset(_NEEDS),
    judged=False,
)
def on_policy_distill(
    x: AdvantageInputs,
    *,
    kl_coef: KlCoef = 1.0,
    prefix_gamma: Annotated[
        float, Field(ge=0, description="how much more tokens count before policy and teacher have parted; 0: all alike")
    ] = 0.0,
) -> Advantages:
    """The teacher's log-probability minus the policy's; the mean is minus KL(policy, teacher)."""
    gap = x.columns["teacher_log_prob"].double() - x.columns["old_log_prob"].double()
    if not prefix_gamma:
        return _per_token(kl_coef * gap, x)
    apart = torch.where(x.response_mask, gap, 0.0).abs()
    total = apart.sum(-1, keepdim=True)
    share = (apart.cumsum(-1) - apart) / torch.where(total == 0, 1.0, total)
    return _per_token(kl_coef * gap * (1 + prefix_gamma * (1 - share)), x)


@advantage(
    formula="-kl_coef (lambda_coef (t - log M) + (1 - lambda_coef) (s - log M)), M = (1 - lambda_coef) exp(s) + lambda_coef exp(t), s = old_log_prob / temperature, t = teacher_log_prob / temperature",  # noqa: E501
    source="generalised Jensen-Shannon divergence, Agarwal et al. 2024, eq. 1, at the sampled token",
    needs=frozenset(_NEEDS),
    judged=False,
)
def jsd(
    x: AdvantageInputs,
    *,
    lambda_coef: Annotated[
        float, Field(ge=0, le=1, description="the teacher's share: 0 is the reverse KL, 1 the forward KL")
    ] = 0.5,
    kl_coef: KlCoef = 1.0,
    temperature: Annotated[
        float, Field(gt=0, description="divides the log-probabilities, which are not normalised again")
    ] = 1.0,
) -> Advantages:
    """Minus the divergence's integrand at the sampled token: a log-ratio, which can have either sign.

    With `lambda_coef` 0 it is kl_coef (t - s), with 1 kl_coef (s - t).
    """
    s, t = (x.columns[name].double() / temperature for name in _NEEDS)
    return _per_token(-kl_coef * _divergence(s, t, lambda_coef), x)


def _divergence(s: Tensor, t: Tensor, share: float) -> Tensor:
    if share in (0.0, 1.0):  # the mixture equals s or t, and the formula gives 0
        return s - t if share == 0.0 else t - s
    mixture = torch.logaddexp(s + log1p(-share), t + log(share))
    return share * (t - mixture) + (1 - share) * (s - mixture)


def _per_token(values: Tensor, x: AdvantageInputs) -> Advantages:
    advantages = torch.where(x.response_mask, values, 0.0).to(x.token_level_rewards.dtype)
    return Advantages(advantages, advantages)
