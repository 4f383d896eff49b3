"""Objectives: frozen values that turn a micro-batch into its part of the step's loss.

Legend: B sequences, L tokens. Everything is normalised by the counts of the whole optimizer step, so the losses of
micro-batches add up to the same number however the step was cut. What must be decided over the whole mini-batch is
decided in `select`, before it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from trivium.algorithms.aggregation import Counts
from trivium.algorithms.correction import Correction, live_weights
from trivium.algorithms.corrections import corrected, measured
from trivium.algorithms.groups import padded, ragged, token_uniforms
from trivium.algorithms.inputs import PerToken, PolicyInputs, expert_rows, inside, per_token, row_mean
from trivium.algorithms.mismatch import compared, with_sample_sizes
from trivium.algorithms.registered import EntropyLaw, GateLaw, KlLaw, PolicyLossLaw, SelectionLaw
from trivium.algorithms.value_loss import clipped_value_loss
from trivium.errors import DataError
from trivium.models.loss import LossInputs, LossOutputs, Totals
from trivium.protocols import CutAnywhere
from trivium.registry import resolve
from trivium.types import Batch, Metrics

LIVE = frozenset({"log_prob", "entropy"})
"""Columns that a micro-batch's own forward pass gives; over a whole mini-batch they are scores."""
LOOKED_AT = LIVE | {"mean_discriminant"}
"""What selections and gates may look at under the weights before an update."""


@dataclass(frozen=True)
class Term:
    """An addition to the policy loss: entropy bonus or KL penalty."""

    coef: float
    function: Callable[[PolicyInputs], Tensor]
    law: EntropyLaw | KlLaw


@dataclass(frozen=True)
class Gate:
    """A weight on each token's policy loss."""

    function: Callable[[PolicyInputs], Tensor]
    law: GateLaw
    narrow: bool = False
    """Whether tokens of weight zero also leave the counts that the loss is divided by."""

    def of(self, x: PolicyInputs) -> Tensor:
        """(B, L): the weight of each token."""
        return per_token(self.function(x), x.log_prob, _name(self.function))

    @property
    def ahead(self) -> bool:
        """Whether it is decided before the mini-batch is cut."""
        return self.narrow or self.law.scope == "batch"


@dataclass(frozen=True)
class PolicyObjective:
    """A policy loss, with an entropy bonus and a KL penalty where there are such terms.

    Minimises `aggregate(weights * gates * policy_loss) + aggregate(kl.coef * kl - entropy.coef * entropy)`. Weights and
    gates act on the policy loss alone.
    """

    policy_loss: Callable[[PolicyInputs], PerToken]
    law: PolicyLossLaw
    aggregate: str = "token-mean"
    entropy: Term | None = None
    kl: Term | None = None
    gates: tuple[Gate, ...] = ()
    select_tokens: Callable[[PolicyInputs], Tensor] | None = None
    """`law.select` with its options."""
    weighted: bool = False
    """Whether the column `rollout_is_weights`, made before the step, multiplies the policy loss."""
    correction: Correction | None = None
    """An off-policy correction against the current policy, made at every update."""
    seed: int = 0
    """The run's seed: of random selections."""

    role: str = "policy"
    head: str = "lm"
    unit: str = "sequence"

    @property
    def on_policy(self) -> str:
        return self.law.on_policy

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the loss, its terms and gates, those that `select` adds included."""
        wanted = set(self.law.needs)
        for term in (self.entropy, self.kl):
            wanted |= term.law.needs if term is not None else set()
        for law in (*(gate.law for gate in self.gates), *self._selections):
            wanted |= law.needs - LOOKED_AT - {"uniform"}
        made = self._corrects_ahead and self.correction is not None and self.correction.weights != "none"
        further = {
            "rollout_is_weights": self.weighted or made,
            "gate": any(gate.ahead for gate in self.gates),
            "open": any(gate.narrow for gate in self.gates),
            "selected": self.select_tokens is not None,
        }
        return frozenset(wanted) | {name for name, is_there in further.items() if is_there}

    @property
    def looks_at(self) -> frozenset[str]:
        laws = [*(gate.law for gate in self.gates if gate.ahead), *self._selections]
        wanted = frozenset[str]().union(*(law.needs for law in laws)) & LOOKED_AT
        return wanted | {"log_prob"} if self._corrects_ahead else wanted

    @property
    def _corrects_ahead(self) -> bool:
        """Whether the correction must see the whole mini-batch."""
        return self.correction is not None and not self.correction.live

    @property
    def _selections(self) -> tuple[SelectionLaw, ...]:
        return (vars(self.law.select)["law"],) if self.law.select is not None else ()

    def select(self, batch: Batch, *address: int) -> Batch:
        """The mini-batch with the columns `selected`, `gate`, `open` (0 where a narrow gate shuts) and
        `rollout_is_weights`.

        Tokens that are rejected leave the mask; how far apart engine and trainer were is measured before they do, where
        the current log-probabilities are there.
        """
        if "log_prob" in self.looks_at:
            current = padded(batch.columns["log_prob"])
            batch = replace(batch, metrics=measured(batch, current))
            if self.correction is not None and self._corrects_ahead:
                batch, kept = corrected(batch, current, self.correction)
                batch = batch.masked(kept)
        ahead = [gate for gate in self.gates if gate.ahead]
        if not ahead and self.select_tokens is None:
            return batch
        x = self._whole(batch, address)
        if self.select_tokens is not None:
            chosen = per_token(self.select_tokens(x), x.log_prob, _name(self.select_tokens))
            batch = batch.with_columns(selected=ragged(chosen.to(x.log_prob.dtype), batch))
        if ahead:
            weights = reduce(torch.mul, (gate.of(x) for gate in ahead)).to(x.log_prob.dtype)
            batch = batch.with_columns(gate=ragged(weights, batch))
            passed = [gate.of(x) != 0 for gate in ahead if gate.narrow]
            if passed:
                opened = reduce(torch.logical_and, passed) & x.response_mask
                batch = batch.with_columns(open=ragged(opened.to(x.log_prob.dtype), batch))
        return batch

    def _whole(self, batch: Batch, address: tuple[int, ...]) -> PolicyInputs:
        """The whole mini-batch as one padded grid."""
        mask = padded([e.response_mask for e in batch.experiences]).bool()
        columns = {name: inside(padded(arrays), mask) for name, arrays in batch.columns.items()}
        columns["rollout_log_prob"] = padded([e.rollout_log_prob for e in batch.experiences])
        columns["uniform"] = token_uniforms(batch, self.seed, "selection", *address)
        log_prob = columns.get("log_prob", torch.zeros(mask.shape))
        version = padded([e.policy_version for e in batch.experiences])
        return PolicyInputs(log_prob, mask, columns, expert_rows(version, mask), columns.get("entropy"))

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        x = _policy_inputs(inputs)
        done = cast(object, self.policy_loss(x))
        if not isinstance(done, PerToken):
            raise DataError(
                f"PerToken(loss, metrics) from {_name(self.policy_loss)}", f"a {type(done).__name__}", "wrap it"
            )
        per_token(done.loss, x.log_prob, _name(self.policy_loss))
        weights, metrics = self._weights(x, totals)
        metrics |= done.metrics
        loss = self._policy_mean(done.loss if weights is None else done.loss * weights, x, totals)
        if self.entropy is not None:
            loss = loss - self.entropy.coef * self._entropy_mean(self.entropy, x, totals)
        if self.kl is not None:
            metrics["train/ref_kl"] = self.kl.function(x)
            loss = loss + self.kl.coef * aggregated(metrics["train/ref_kl"], x.response_mask, self.aggregate, totals)
        if "advantages" in self.law.needs:
            metrics |= {"train/advantage_mean": x.advantages, "train/advantage_abs": x.advantages.abs()}
        if "old_log_prob" in self.law.needs:
            metrics["train/kl"] = inside(-x.log_ratio, ~x.expert)
        if totals.sampled.tokens == 0:  # an expert's tokens alone: no engine to compare with
            return LossOutputs(loss, _sums(metrics, x.response_mask))
        sums, maxima = _mismatch(x, totals)
        return LossOutputs(loss, _sums(metrics, x.response_mask) | sums, maxima)

    def derived(self, means: Metrics) -> Metrics:
        """The means with the effective sample sizes that follow from them."""
        return with_sample_sizes(means)

    def _weights(self, x: PolicyInputs, totals: Totals) -> tuple[Tensor | None, dict[str, Tensor]]:
        """(what multiplies the policy loss of each token, if anything does; what is logged of it)."""
        metrics: dict[str, Tensor] = {}
        corrections = [x.columns["rollout_is_weights"]] if "rollout_is_weights" in x.columns else []
        if self.correction is not None and self.correction.live:
            live, metrics = _live_weights(x, self.correction, totals)
            corrections.append(live)
        if self.law.per_sequence:  # there is no weighing one token by itself
            corrections = [row_mean(weights.log(), x.response_mask).exp().expand_as(weights) for weights in corrections]
        gates = [gate.of(x.detached()) for gate in self.gates if not gate.ahead]
        gates += [x.columns["gate"]] if "gate" in x.columns else []
        if gates:
            metrics["train/gate_closed"] = (reduce(torch.mul, gates) == 0).to(x.log_prob.dtype)
        factors = [*gates, *corrections]
        return (reduce(torch.mul, factors) if factors else None), metrics

    def _policy_mean(self, losses: Tensor, x: PolicyInputs, totals: Totals) -> Tensor:
        """The mean of the policy loss; a split one gives an expert's tokens and the policy's own a mean each."""
        if self.law.split:
            expert = aggregated(losses, x.expert, self.aggregate, totals.expert)
            return expert + aggregated(losses, x.response_mask & ~x.expert, self.aggregate, totals.sampled)
        counted = x.response_mask & (x.columns["open"] != 0) if "open" in x.columns else x.response_mask
        return aggregated(losses, counted, self.aggregate, totals.open)

    def _entropy_mean(self, term: Term, x: PolicyInputs, totals: Totals) -> Tensor:
        """The mean of an entropy term over the tokens that it is about."""
        if not (isinstance(term.law, EntropyLaw) and term.law.sampled):
            return aggregated(term.function(x), x.response_mask, self.aggregate, totals)
        return aggregated(term.function(x), x.response_mask & ~x.expert, self.aggregate, totals.sampled)


@dataclass(frozen=True)
class ValueObjective(CutAnywhere):
    """The critic's clipped squared error against the returns."""

    clip: float | None = 0.5
    aggregate: str = "token-mean"

    role: str = "critic"
    head: str = "value"
    unit: str = "sequence"
    needs: frozenset[str] = frozenset({"values", "returns"})
    on_policy: str = "none: it fits values, not the policy"

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        mask = inputs.response_mask.bool()
        values = inside(_given(inputs.values, "values"), mask)
        old, returns = inside(inputs.columns["values"], mask), inside(inputs.columns["returns"], mask)
        losses, clipped = clipped_value_loss(values, old, returns, self.clip)
        loss = aggregated(losses, mask, self.aggregate, totals)
        return LossOutputs(loss, _sums({"train/value_clip_fraction": clipped.to(values.dtype)}, mask))


def aggregated(losses: Tensor, mask: Tensor, mode: str, totals: Totals) -> Tensor:
    """The aggregation `mode`, a name of the room `aggregations`, with the counts of the whole step."""
    counts = Counts(max(totals.tokens, 1), max(totals.sequences, 1), max(totals.max_response_length, 1))
    value = resolve("aggregations", mode)(losses, mask, counts)
    if value.dim() != 0:
        raise DataError(
            f"one number from the aggregation {mode!r}", f"a tensor {tuple(value.shape)}", "sum or average it"
        )
    return value * totals.dp_size


def _name(function: Callable[..., Any]) -> str:
    """What a function is called, whether its options are bound or not."""
    return repr(getattr(getattr(function, "func", function), "__name__", str(function)))


def _policy_inputs(inputs: LossInputs) -> PolicyInputs:
    """Zeroes what stands outside the mask, so that nothing there can reach the loss or its gradient."""
    mask = inputs.response_mask.bool()
    columns = {name: inside(column, mask) for name, column in inputs.columns.items()}
    entropy, candidates = (
        None if values is None else inside(values, mask) for values in (inputs.entropy, inputs.candidate_log_prob)
    )
    return PolicyInputs(
        inside(_given(inputs.log_prob, "log_prob"), mask), mask, columns, expert_rows(inputs.policy_version, mask),
        entropy, inputs.step, candidates,
    )  # fmt: skip


def _given(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise DataError(f"the loss inputs' {name}", "None", "run the objective with the model head that it declares")
    return values


def _mismatch(x: PolicyInputs, totals: Totals) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(sums, maxima) of how far apart engine and trainer are: meaningful before the first update only.

    Tokens that no engine sampled have nothing to be compared with, so the means are over the others: the sums are
    scaled for a learner that divides by all trained tokens.
    """
    said = compared(x.log_prob.detach(), x.columns["rollout_log_prob"], x.response_mask & ~x.expert)
    own = totals.sampled
    per_token, per_sequence = (totals.tokens / max(count, 1) for count in (own.tokens, own.sequences))
    sums = {key: values.sum() * per_token for key, values in said.tokens.items()}
    sums |= {key: values.sum() * per_sequence for key, values in said.sequences.items()}
    return sums, said.maxima


def _live_weights(x: PolicyInputs, correction: Correction, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """(importance weights, 1 for an expert's tokens; what is logged of the others), (B, L) each."""
    sampled = x.response_mask & ~x.expert
    weights, said = live_weights(x.log_prob, x.columns["rollout_log_prob"], sampled, correction)
    scale = totals.tokens / max(totals.sampled.tokens, 1)
    return torch.where(sampled, weights, 1.0), {key: values * scale for key, values in said.items()}


def _sums(metrics: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens, without gradient."""
    return {key: inside(values.detach(), mask).sum() for key, values in metrics.items()}
