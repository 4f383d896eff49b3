"""Objectives: frozen values that turn a micro-batch into its part of the step's loss.

Legend: B sequences, L tokens. Everything is normalised by the counts of the whole optimizer step, so the losses of
micro-batches add up to the same number however the step was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.algorithms.aggregation import agg_loss
from trivium.algorithms.kl import kl_penalty
from trivium.algorithms.policy_losses import PerToken, PolicyInputs, bounded_log_ratio
from trivium.algorithms.registered import PolicyLossLaw
from trivium.algorithms.value_loss import clipped_value_loss
from trivium.errors import DataError
from trivium.models.loss import LossInputs, LossOutputs, Totals
from trivium.types import EXPERT_VERSION


@dataclass(frozen=True)
class PolicyObjective:
    """A policy loss on what the policy sampled, with an entropy bonus and a KL penalty where their coefficients say so.

    Minimises `aggregate(weight * policy_loss - entropy_coef * entropy + kl_coef * kl)`.
    """

    policy_loss: Callable[[PolicyInputs], PerToken]
    law: PolicyLossLaw
    aggregate: str = "token-mean"
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "low_var_kl"
    weighted: bool = False
    """Whether the column `rollout_is_weights` multiplies the policy loss (off-policy correction)."""

    role: str = "policy"
    head: str = "lm"

    @property
    def unit(self) -> str:
        return self.law.unit

    @property
    def on_policy(self) -> str:
        return self.law.on_policy

    @property
    def needs(self) -> frozenset[str]:
        further = {"entropy": self.entropy_coef, "ref_log_prob": self.kl_coef, "rollout_is_weights": self.weighted}
        return self.law.needs | {name for name, wanted in further.items() if wanted}

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        x = _policy_inputs(inputs)
        done = self.policy_loss(x)
        per_token, metrics = done.loss, dict(done.metrics)
        if self.weighted:
            per_token = per_token * x.columns["rollout_is_weights"]
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * _given(inputs.entropy, "entropy")
        if self.kl_coef:
            metrics["train/ref_kl"] = kl_penalty(x.log_prob, x.columns["ref_log_prob"], self.kl_estimator)
            per_token = per_token + self.kl_coef * metrics["train/ref_kl"]
        if "advantages" in self.law.needs:
            metrics |= {"train/advantage_mean": x.advantages, "train/advantage_abs": x.advantages.abs()}
        if "old_log_prob" in self.law.needs:
            metrics["train/kl"] = -bounded_log_ratio(x.log_prob, x.old_log_prob)
        mismatch, largest = _mismatch(x, inputs.policy_version)
        return LossOutputs(
            aggregated(per_token, x.response_mask, self.aggregate, totals),
            _sums(metrics | {"mismatch/kl": mismatch}, x.response_mask),
            {"mismatch/log_prob_max": largest},
        )


@dataclass(frozen=True)
class SftObjective:
    """A policy loss on what an expert wrote: needs no advantages, no older log-probabilities, no engine."""

    policy_loss: Callable[[PolicyInputs], PerToken]
    law: PolicyLossLaw
    aggregate: str = "token-mean"

    role: str = "policy"
    head: str = "lm"

    @property
    def unit(self) -> str:
        return self.law.unit

    @property
    def on_policy(self) -> str:
        return self.law.on_policy

    @property
    def needs(self) -> frozenset[str]:
        return self.law.needs

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        x = _policy_inputs(inputs)
        done = self.policy_loss(x)
        loss = aggregated(done.loss, x.response_mask, self.aggregate, totals)
        return LossOutputs(loss, _sums(done.metrics, x.response_mask))


@dataclass(frozen=True)
class ValueObjective:
    """The critic's clipped squared error against the returns."""

    clip: float = 0.5
    aggregate: str = "token-mean"

    role: str = "critic"
    head: str = "value"
    unit: str = "sequence"
    needs: frozenset[str] = frozenset({"values", "returns"})
    on_policy: str = "none: it fits values, not the policy"

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        mask = inputs.response_mask.bool()
        values = _inside(_given(inputs.values, "values"), mask)
        old, returns = _inside(inputs.columns["values"], mask), _inside(inputs.columns["returns"], mask)
        per_token, clipped = clipped_value_loss(values, old, returns, self.clip)
        loss = aggregated(per_token, mask, self.aggregate, totals)
        return LossOutputs(loss, _sums({"train/value_clip_fraction": clipped.to(values.dtype)}, mask))


def aggregated(per_token: Tensor, mask: Tensor, mode: str, totals: Totals) -> Tensor:
    """`agg_loss` with the counts of the whole step."""
    return agg_loss(
        per_token,
        mask,
        mode,
        dp_size=totals.dp_size,
        batch_num_tokens=max(totals.tokens, 1),
        global_batch_size=max(totals.sequences, 1),
        loss_scale_factor=max(totals.max_response_length, 1),
    )


def _policy_inputs(inputs: LossInputs) -> PolicyInputs:
    """Zeroes what stands outside the mask, so that nothing there can reach the loss or its gradient."""
    mask = inputs.response_mask.bool()
    columns = {name: _inside(column, mask) for name, column in inputs.columns.items()}
    return PolicyInputs(_inside(_given(inputs.log_prob, "log_prob"), mask), mask, columns)


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))


def _given(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise DataError(f"the loss inputs' {name}", "None", "run the objective with the model head that it declares")
    return values


def _mismatch(x: PolicyInputs, policy_version: Tensor) -> tuple[Tensor, Tensor]:
    """(k3 estimate of KL(engine, trainer) per token, largest difference): meaningful before the first update only.

    Tokens that no engine sampled have nothing to be compared with.
    """
    sampled = x.response_mask & (policy_version != EXPERT_VERSION)
    engine, trainer = x.columns["rollout_log_prob"], x.log_prob.detach()
    difference = _inside((engine - trainer).abs(), sampled).flatten()
    largest = torch.cat([difference, difference.new_zeros(1)]).amax()  # a rank without a row reports 0
    return _inside(kl_penalty(engine, trainer, "k3"), sampled), largest


def _sums(metrics: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens, without gradient."""
    return {key: agg_loss(values.detach(), mask, "token-sum") for key, values in metrics.items()}
