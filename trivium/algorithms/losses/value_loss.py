"""The critic's loss and its objective. Legend: B sequences, L tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trivium.algorithms.aggregation import agg_loss
from trivium.algorithms.losses.base import zero_outside
from trivium.algorithms.objective import PolicyObjective, aggregated, metric_sums, required
from trivium.algorithms.stats import masked_mean
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.models.late import torch
from trivium.protocols import CutAnywhere
from trivium.types import Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor

FORMULA = "{clip:max(}(v - G)^2{clip:, (min(max(v, V - clip), V + clip) - G)^2)} / 2"
"""For one token: v is the current value, V the value before the step, G the return."""
SOURCE = "Schulman et al. 2017; the clipping is that of OpenAI's baselines"


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """(half squared error, whether clipping decided it) for each token, (B, L).

    Takes the larger error of the value and of the value clamped to within `clip` of the old one (Schulman et al. 2017;
    the clipping is that of OpenAI's baselines). `clip` None disables clipping.
    """
    if clip is None:
        return (values - returns) ** 2 / 2, torch.zeros_like(values, dtype=torch.bool)
    held = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    error, held_error = (values - returns) ** 2, (held - returns) ** 2
    return torch.maximum(error, held_error) / 2, held_error > error


@dataclass(frozen=True)
class ValueObjective(CutAnywhere):
    """The critic's clipped squared error against the returns."""

    clip: float | None = 0.5
    aggregate: str = "token-mean"
    epochs: int | None = None
    """Passes over a step's data; None: those of the policy."""
    mini_batches: int | None = None
    """Optimizer steps of a pass; None: those of the policy."""

    role: str = "critic"
    head: str = "value"
    unit: str = "sequence"
    needs: frozenset[str] = frozenset({"values", "returns"})
    on_policy: str = "none: it fits values, not the policy"

    def loss(self, inputs: LossInputs, denominators: LossDenominators) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        mask = inputs.response_mask.bool()
        values = zero_outside(required(inputs.values, "values"), mask)
        old, returns = zero_outside(inputs.columns["values"], mask), zero_outside(inputs.columns["returns"], mask)
        losses, clipped = clipped_value_loss(values, old, returns, self.clip)
        loss = aggregated(losses, mask, self.aggregate, denominators)
        metrics = {"train/value_clip_fraction": clipped.to(values.dtype), "train/value_predicted": values}
        return LossOutputs(loss, metric_sums(metrics, mask))


@dataclass(frozen=True)
class SharedObjective:
    """The policy's objective plus `coef` times the critic's, where both heads are on one backbone: one forward pass and
    one optimizer step. A token that the policy's correction rejects trains neither."""

    policy: PolicyObjective
    value: ValueObjective
    coef: float

    role: str = "policy"
    head: str = "lm+value"

    @property
    def unit(self) -> str:
        return self.policy.unit

    @property
    def needs(self) -> frozenset[str]:
        return self.policy.needs | self.value.needs

    @property
    def looks_at(self) -> frozenset[str]:
        return self.policy.looks_at

    @property
    def on_policy(self) -> str:
        return self.policy.on_policy

    def select(self, batch: Batch, *address: int) -> Batch:
        return self.policy.select(batch, *address)

    def derived(self, means: Metrics) -> Metrics:
        return self.policy.derived(means)

    def loss(self, inputs: LossInputs, denominators: LossDenominators) -> LossOutputs:
        """This micro-batch's part of the step's loss, and the metrics of both objectives with each loss alone."""
        policy, value = (objective.loss(inputs, denominators) for objective in (self.policy, self.value))
        losses = {"train/loss/policy": policy.loss, "train/loss/value": value.loss}
        alone = {key: loss.detach() * denominators.tokens for key, loss in losses.items()}  # sums are divided by tokens
        return LossOutputs(
            policy.loss + self.coef * value.loss,
            {**policy.sums, **value.sums, **alone},
            {**policy.maxima},
            policy.tokens,
        )


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float | None,
    loss_agg_mode: str = "token-mean",
    *,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, fraction of tokens whose value was clipped), both scalars.

    `vpreds` are the current values, `values` those before the step; all inputs are (B, L). `cliprange_value` None
    disables clipping. Modes and counts as in `agg_loss`.
    """
    loss, clipped = clipped_value_loss(vpreds, values, returns, cliprange_value)
    total = agg_loss(
        loss,
        response_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )
    return total, masked_mean(clipped.to(vpreds.dtype), response_mask)
