"""Losses whose trust region is not a clip of the ratio: a bound on probabilities, divergences or log-ratios.

Legend: B sequences, L tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.algorithms.losses.selecting import first
from trivium.algorithms.metadata import policy_loss, selection
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_DPPO = "DPPO, Qi et al. 2026, arXiv 2602.04879"

MaxRatio = Annotated[float, Field(ge=1, description="bound of the ratio that weighs a token")]


def probabilities(log_prob: Tensor) -> Tensor:
    """exp(log_prob) without gradient, at most 1 even if rounding made the log-probability positive."""
    return log_prob.detach().clamp(max=0).exp()


@policy_loss(
    formula="-A min(r, max_ratio) log_prob, no gradient through r; 0 where A > 0 and p - p_old > tv_high, or A <= 0 and p_old - p > tv_low",  # noqa: E501
    source=f"{_DPPO} (binary total variation)",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    off_policy=True,
)
def dppo_tv(
    x: PolicyInputs,
    *,
    tv_low: Annotated[float, Field(ge=0, le=1, description="how far a token's probability may fall")] = 0.15,
    tv_high: Annotated[float, Field(ge=0, le=1, description="how far a token's probability may rise")] = 0.15,
    max_ratio: MaxRatio = 20.0,
) -> PerToken:
    """A token loses its gradient once its probability has moved too far in the direction in which its advantage pushes
    it."""
    rise = probabilities(x.log_prob) - probabilities(x.old_log_prob)
    return _truncated_score(x, torch.where(x.advantages > 0, rise > tv_high, -rise > tv_low), max_ratio)


@policy_loss(
    formula="-A min(r, max_ratio) log_prob, no gradient through r; 0 where A > 0, p >= p_old and KL > kl_high, or A <= 0, p <= p_old and KL > kl_low; KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))",  # noqa: E501
    source=f"{_DPPO} (binary KL)",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    off_policy=True,
)
def dppo_kl(
    x: PolicyInputs,
    *,
    kl_low: Annotated[float, Field(ge=0, description="bound of the KL where the probability falls, in nats")] = 0.05,
    kl_high: Annotated[float, Field(ge=0, description="bound of the KL where the probability rises, in nats")] = 0.05,
    max_ratio: MaxRatio = 20.0,
) -> PerToken:
    """As `dppo_tv`, with the KL between "this token" and "any other" under the old and the current policy."""
    current, old = probabilities(x.log_prob), probabilities(x.old_log_prob)
    tiny = 1e-8  # with a probability of one, the other tokens have none
    kl = -old * x.log_ratio.detach() + (1 - old) * ((1 - old + tiny) / (1 - current + tiny)).log()
    outside = torch.where(x.advantages > 0, (current >= old) & (kl > kl_high), (current <= old) & (kl > kl_low))
    return _truncated_score(x, outside, max_ratio)


def _truncated_score(x: PolicyInputs, outside: Tensor, max_ratio: float) -> PerToken:
    """The score function weighted with the truncated ratio; 0 for the tokens that left the trust region."""
    ratio = x.log_ratio.detach().exp()
    loss = torch.where(outside, 0.0, -x.advantages * ratio.clamp(max=max_ratio) * x.log_prob)
    metrics = {"train/left_out": outside, "train/clip_fraction": (ratio > max_ratio) & ~outside}
    return PerToken(loss, {key: value.to(loss.dtype) for key, value in metrics.items()})


@policy_loss(
    formula="-A r + drift_coef (log r)^2; no A r where A > 0 and p - p_old > threshold, or A <= 0 and p_old - p > threshold",  # noqa: E501
    source="the default loss of prime-rl, Prime Intellect 2025-2026",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    anchored=True,
    off_policy=True,
)
def prime(
    x: PolicyInputs,
    *,
    threshold: Annotated[float, Field(ge=0, le=1, description="how far a token's probability may move")] = 0.2,
    drift_coef: Annotated[
        float, Field(ge=0, description="weight of the term that pulls towards the old policy")
    ] = 1e-3,
) -> PerToken:
    """Importance sampling with a mask on probabilities; masked tokens keep only the drift term. Meant for
    `old_log_prob: rollout`, where one ratio covers both the stale weights and the engine's arithmetic.
    """
    rise = probabilities(x.log_prob) - probabilities(x.old_log_prob)
    outside = torch.where(x.advantages > 0, rise > threshold, -rise > threshold)
    policy = torch.where(outside, 0.0, -x.advantages * x.log_ratio.exp())
    return PerToken(policy + drift_coef * x.log_ratio.square(), {"train/left_out": outside.to(policy.dtype)})


@policy_loss(
    formula="-A log_prob + beta / 2 (log_prob - old_log_prob)^2",
    source="DRO, Richemond et al. 2024, arXiv 2405.19107, with the advantage in place of reward minus value",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    anchored=True,
    off_policy=True,
)
def dro(
    x: PolicyInputs,
    *,
    beta: Annotated[float, Field(ge=0, description="weight of the term that pulls towards the old policy")] = 0.1,
) -> PerToken:
    """A quadratic in the log-ratio instead of a clip: its gradient is zero where log r = A / beta."""
    return PerToken(-x.advantages * x.log_prob + beta / 2 * (x.log_prob - x.old_log_prob).square())


@selection(
    formula="among tokens with A log r > 0, those with the largest (log r)^2, as few as bring the mean over all other tokens of the mini-batch to at most m2",  # noqa: E501
    source="M2PO, Zheng et al. 2025, arXiv 2510.01161",
    needs={"log_prob", "advantages", "old_log_prob", "uniform"},
)
def heaviest(
    x: PolicyInputs,
    *,
    m2: Annotated[float, Field(gt=0, description="largest mean of the squared log-ratio, in nats squared")] = 0.04,
) -> Tensor:
    """The tokens that carry the second moment of the log-ratio beyond its bound, (B, L) bool.

    Only those that the update would push further away can be left out, and none whose own square is within the bound:
    leaving it out could not bring the mean there. Where no choice of them is enough, all of them are.
    """
    moment = torch.where(x.response_mask, x.log_ratio.double().square(), 0.0)
    candidates = x.response_mask & (x.advantages * x.log_ratio > 0) & (moment > m2)
    removed = torch.cat([moment.new_zeros(1), moment[candidates].sort(descending=True).values.cumsum(0)])
    num_remaining = int(x.response_mask.sum()) - torch.arange(len(removed), device=removed.device)
    enough = ((moment.sum() - removed) / num_remaining.clamp(min=1) <= m2).nonzero()
    count = int(enough[0]) if len(enough) else len(removed) - 1
    return first(candidates, count, -moment, x.columns["uniform"])


@policy_loss(
    formula="-A r, 0 for the tokens selected: those with A log r > 0 and the largest (log r)^2, as few as bring the mean over all other tokens of the mini-batch to at most m2",  # noqa: E501
    source="M2PO, Zheng et al. 2025, Prosperity before Collapse, arXiv 2510.01161",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
    select=heaviest,
    off_policy=True,
)
def m2po(x: PolicyInputs) -> PerToken:
    """Importance sampling without the few tokens that are far off policy: for very stale data."""
    selected = x.columns["selected"] > 0
    loss = torch.where(selected, 0.0, -x.advantages * x.log_ratio.exp())
    return PerToken(loss, {"train/left_out": selected.to(loss.dtype)})
