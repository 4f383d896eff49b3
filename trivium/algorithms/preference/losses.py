"""Losses over preferences: two completions to one prompt, of which the first was preferred.

Legend: P pairs. The log-probability of a completion is the sum over its trained tokens. c and d are
log(current / reference) of the preferred (chosen) and the other (rejected) completion, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.metadata import pair_loss, score_loss
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Beta = Annotated[float, Field(gt=0, description="how strongly the policy is kept near the reference")]


@dataclass(frozen=True, slots=True)
class PairInputs:
    """The inputs of a loss over preferences; every tensor (P,)."""

    policy_chosen: Tensor
    """With gradient: log-probability of the preferred completion under the current weights."""
    policy_rejected: Tensor
    """With gradient: log-probability of the other completion under the current weights."""
    reference_chosen: Tensor
    """Log-probability of the preferred completion under the reference."""
    reference_rejected: Tensor
    has_chosen: Tensor
    """Bool: whether the preferred completion has any trained token. Without one its log-probabilities are 0."""
    has_rejected: Tensor
    """Bool: whether the other completion has any trained token."""
    kl: Tensor | None = None
    """A scalar, the `reference_point` of other completions: those of mismatched pairs if the loss needs them (KTO)."""

    @property
    def chosen_log_ratio(self) -> Tensor:
        return self.policy_chosen - self.reference_chosen

    @property
    def rejected_log_ratio(self) -> Tensor:
        return self.policy_rejected - self.reference_rejected


@dataclass(frozen=True, slots=True)
class PerPair:
    """A loss for each pair."""

    loss: Tensor
    """(P,), to be minimised: the loss of the pair, or the sum over its completions if the mean is over completions."""
    chosen_rewards: Tensor
    """(P,) without gradient: the reward that the policy implies for the preferred completion."""
    rejected_rewards: Tensor


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """The inputs of a reward model's loss; every tensor (P,) with gradient."""

    chosen: Tensor
    """Score of the preferred completion."""
    rejected: Tensor


def pair_inputs(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    kl: Tensor | None = None,
) -> PairInputs:
    """Inputs for a direct call, (P,) each: every pair has both of its completions."""
    there = torch.ones_like(policy_chosen, dtype=torch.bool)
    return PairInputs(
        policy_chosen,
        policy_rejected,
        reference_chosen,
        reference_rejected,
        there,
        there,
        kl,
    )


@pair_loss(
    formula="-{label_smoothing:(1 - label_smoothing) }log sigmoid(beta (c - d)){label_smoothing: - label_smoothing log sigmoid(-beta (c - d))}",  # noqa: E501
    source="DPO, Rafailov et al. 2023, eq. 7; label smoothing, Mitchell 2023",
)
def dpo(
    x: PairInputs,
    *,
    beta: Beta = 0.1,
    label_smoothing: Annotated[
        float, Field(ge=0, lt=0.5, description="probability that a preference is taken to be inverted")
    ] = 0.0,
) -> PerPair:
    """Direct preference optimisation: the likelihood of the preferences under the rewards that the policy implies."""
    z = beta * (x.chosen_log_ratio - x.rejected_log_ratio)
    loss = -(1 - label_smoothing) * torch.nn.functional.logsigmoid(
        z
    ) - label_smoothing * torch.nn.functional.logsigmoid(-z)
    return _per_pair(loss, x, beta)


@pair_loss(formula="(c - d - 1 / (2 beta))^2", source="IPO, Azar et al. 2024, eq. 17 (their tau is beta)")
def ipo(x: PairInputs, *, beta: Beta = 0.1) -> PerPair:
    """Identity preference optimisation: the loss is least at a gap of 1 / (2 beta) nats, and a larger gap costs
    again."""
    return _per_pair((x.chosen_log_ratio - x.rejected_log_ratio - 1 / (2 * beta)) ** 2, x, beta)


@pair_loss(
    formula="desirable_weight (1 - sigmoid(beta (c - z0))) + undesirable_weight (1 - sigmoid(beta (z0 - d))); z0 = max(0, mean of all c and d), without gradient",  # noqa: E501
    source="KTO, Ethayarajh et al. 2024, section 4.1",
    scope="batch",
    mean="completion",
)
def kto(
    x: PairInputs,
    *,
    beta: Beta = 0.1,
    desirable_weight: Annotated[float, Field(ge=0, description="weight of preferred completions")] = 1.0,
    undesirable_weight: Annotated[float, Field(ge=0, description="weight of the others")] = 1.0,
) -> PerPair:
    """KTO with a cheaper reference point: z0 from the completions of the mini-batch, each with its own prompt. Its mean
    is KL(current, reference) only if the policy itself sampled them; for completions of a file it is off by the
    distance that training has moved the policy on them. `kto_mismatched` has the paper's estimate. `x.kl` replaces the
    estimate.
    """
    both = torch.cat([x.chosen_log_ratio[x.has_chosen], x.rejected_log_ratio[x.has_rejected]])
    z0 = reference_point(both) if x.kl is None else x.kl
    gain = desirable_weight * torch.sigmoid(-beta * (x.chosen_log_ratio - z0))
    loss = undesirable_weight * torch.sigmoid(-beta * (z0 - x.rejected_log_ratio))
    return _per_pair(torch.where(x.has_chosen, gain, 0.0) + torch.where(x.has_rejected, loss, 0.0), x, beta)


@pair_loss(
    formula="desirable_weight (1 - sigmoid(beta (c - z0))) + undesirable_weight (1 - sigmoid(beta (z0 - d))); z0 = max(0, mean of log(current / reference) of each prompt with the completion of another one), without gradient",  # noqa: E501
    source="KTO, Ethayarajh et al. 2024, section 4.1",
    scope="batch",
    mean="completion",
    mismatched=True,
)
def kto_mismatched(
    x: PairInputs,
    *,
    beta: Beta = 0.1,
    desirable_weight: Annotated[float, Field(ge=0, description="weight of preferred completions")] = 1.0,
    undesirable_weight: Annotated[float, Field(ge=0, description="weight of the others")] = 1.0,
) -> PerPair:
    """Kahneman-Tversky optimisation: each completion is a gain or a loss against the reference point z0.

    z0 stands for KL(current, reference). It is estimated from mismatched pairs, each prompt of the mini-batch with the
    completion of the next other prompt of the step.
    """
    return kto(x, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)


@pair_loss(
    formula="1 - sigmoid(beta (c - max(0, mean of d))) + 1 - sigmoid(beta (max(0, mean of c) - d))",
    source="Ethayarajh et al. 2023, the technical report before KTO",
    scope="batch",
    mean="completion",
)
def kto_pair(x: PairInputs, *, beta: Beta = 0.1) -> PerPair:
    """The first form of KTO: each side's reference point is the other side's mean, and has a gradient."""
    c, d = x.chosen_log_ratio, x.rejected_log_ratio
    mean_c, mean_d = _mean(c, x.has_chosen).clamp(min=0), _mean(d, x.has_rejected).clamp(min=0)
    chosen, rejected = torch.sigmoid(-beta * (c - mean_d)), torch.sigmoid(-beta * (mean_c - d))
    return _per_pair(torch.where(x.has_chosen, chosen, 0.0) + torch.where(x.has_rejected, rejected, 0.0), x, beta)


def reference_point(log_ratios: Tensor) -> Tensor:
    """KTO's z0 from log(current / reference) of some completions, (N,): max(0, their mean), a scalar without gradient.

    Source: Ethayarajh et al. 2024, section 4.1. 0 for no completions.
    """
    return (log_ratios.detach().sum() / max(len(log_ratios), 1)).clamp(min=0)


@score_loss(
    formula="-log sigmoid(s_chosen - s_rejected{margin: - margin})",
    source="Bradley and Terry 1952; Ouyang et al. 2022, eq. 1; margin, Llama 2, Touvron et al. 2023, eq. 2",
)
def sigmoid(
    x: ScoreInputs, *, margin: Annotated[float, Field(ge=0, description="the required difference of the scores")] = 0.0
) -> Tensor:
    """The likelihood of the preferences under the scores."""
    return -torch.nn.functional.logsigmoid(x.chosen - x.rejected - margin)


@score_loss(formula="log(1 + exp(s_rejected - s_chosen))", source="Christiano et al. 2017, section 2.2.3")
def logexp(x: ScoreInputs) -> Tensor:
    """The same likelihood, written as a logistic loss."""
    return torch.nn.functional.softplus(x.rejected - x.chosen)


@score_loss(
    formula="-log of the preferred completion's share in softmax(scale [s_chosen, s_rejected]){learned:, scale "
    "learned}",
    source="HPS v2, Wu et al. 2023; the learned scale is that of CLIP, Radford et al. 2021, section 2.5",
    learned_scale=True,
)
def hps(
    x: ScoreInputs,
    *,
    scale: Annotated[float, Field(gt=0, le=100, description="factor of the scores, or its initial value")] = 1.0,
    learned: Annotated[
        bool, Field(description="whether the model learns the factor, which its scores then include")
    ] = False,
) -> Tensor:
    """Cross-entropy of choosing the preferred completion."""
    factor = 1.0 if learned else scale
    return -torch.log_softmax(factor * torch.stack([x.chosen, x.rejected]), 0)[0]


def _per_pair(loss: Tensor, x: PairInputs, beta: float) -> PerPair:
    """The loss with the implied rewards, beta times the log-ratios (Rafailov et al. 2023, eq. 5, up to a constant)."""
    return PerPair(loss, beta * x.chosen_log_ratio.detach(), beta * x.rejected_log_ratio.detach())


def _mean(values: Tensor, there: Tensor) -> Tensor:
    """The mean over the completions that exist (`there`); 0 if none does."""
    return torch.where(there, values, 0.0).sum() / there.sum().clamp(min=1)
