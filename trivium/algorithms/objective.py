"""The policy objective: a frozen value that turns a micro-batch into its part of the step's loss.

Legend: B sequences, L tokens. Everything is normalised by the counts of the whole optimizer step, so the losses of
micro-batches add up to the same number however the step was cut. `select` makes the decisions that need the whole
mini-batch before it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from trivium.algorithms.aggregation import Counts
from trivium.algorithms.batches import numbered, padded, ragged, token_uniforms
from trivium.algorithms.correction import Correction
from trivium.algorithms.importance_weights import corrected, live_weights, measured
from trivium.algorithms.losses.base import (
    PerToken,
    PolicyInputs,
    check_per_token,
    expert_rows,
    row_mean,
    zero_outside,
)
from trivium.algorithms.metadata import EntropyMetadata, KlMetadata, PolicyLossMetadata, TokenWeightMetadata
from trivium.algorithms.mismatch import compared, with_sample_sizes
from trivium.foundation.errors import DataError
from trivium.foundation.registry import resolve
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.models.late import torch
from trivium.types import CANDIDATES, Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor

FORWARD_COLUMNS = frozenset({"log_prob", "entropy"})
"""Columns that a micro-batch's forward pass computes. For a whole mini-batch they are scores of the engine."""
SCORED_AHEAD = FORWARD_COLUMNS | {"mean_discriminant"}
"""Columns that selections and token weights may read, computed with the weights before an update."""

TEACHER_COLUMNS = frozenset({"teacher_log_prob", "teacher_top", "student_top"})
"""The columns that a teacher computes."""
OBSERVATION = "mean over sequences of -(sum of log_prob over the tokens between turns) / their number"
OBSERVATION_SOURCE = "ECHO, Shrivastava et al. 2026 (arXiv 2605.24517), eq. 3"

TermMetadataT = TypeVar("TermMetadataT", EntropyMetadata, KlMetadata, PolicyLossMetadata)


@dataclass(frozen=True)
class Term(Generic[TermMetadataT]):
    """An addition to the policy loss: entropy bonus, KL penalty or distillation."""

    coef: float
    function: Callable[[PolicyInputs], Any]
    metadata: TermMetadataT


@dataclass(frozen=True)
class TokenWeight:
    """A factor of each token's policy loss."""

    function: Callable[[PolicyInputs], Tensor]
    metadata: TokenWeightMetadata
    narrow: bool = False
    """Whether tokens of weight zero also leave the counts that the loss is divided by."""

    def weights(self, x: PolicyInputs) -> Tensor:
        """(B, L): the weight of each token."""
        return check_per_token(self.function(x), x.log_prob, _name(self.function))

    @property
    def ahead(self) -> bool:
        """Whether it is computed before the mini-batch is cut."""
        return self.narrow or self.metadata.scope == "batch"


@dataclass(frozen=True)
class PolicyObjective:
    """A policy loss with an optional teacher, entropy bonus, KL penalty and cross-entropy of observations.

    Minimises `aggregate(weights * policy_loss) - entropy.coef * aggregate(entropy) + kl.coef * aggregate(kl)
    + observation_coef * observations`, where `weights` are the token weights times the importance weights of an
    off-policy correction. With `distill`, the first term has the share `1 - distill.coef`, and the aggregated
    distillation the rest.
    """

    policy_loss: Callable[[PolicyInputs], PerToken]
    metadata: PolicyLossMetadata
    aggregate: str = "token-mean"
    entropy: Term[EntropyMetadata] | None = None
    kl: Term[KlMetadata] | None = None
    token_weights: tuple[TokenWeight, ...] = ()
    select_tokens: Callable[[PolicyInputs], Tensor] | None = None
    """`metadata.select` with its options."""
    weighted: bool = False
    """Whether the column `rollout_is_weights`, computed before the step, multiplies the policy loss."""
    correction: Correction | None = None
    """An off-policy correction against the current policy, computed at every update."""
    distill: Term[PolicyLossMetadata] | None = None
    """A loss that follows a teacher; its coefficient is its share, and the policy loss has the rest."""
    taught: bool = False
    """Whether the column `taught` says which tokens a teacher with privileged context teaches."""
    observation_coef: float = 0.0
    """Weight of the cross-entropy of observations (`OBSERVATION`); 0: observations are context only."""
    seed: int = 0
    """The run's seed, for random selections."""

    role: str = "policy"
    head: str = "lm"
    unit: str = "sequence"

    def loss(self, inputs: LossInputs, denominators: LossDenominators) -> LossOutputs:
        """This micro-batch's part of the step's effective policy loss, and its metrics."""
        x = _policy_inputs(inputs)

        # The policy loss of each token (B, L).
        losses, loss_metrics = self._token_losses(x, self.policy_loss, self.metadata)

        # Token weights: those of a single sequence, and the column that `select` computed over the mini-batch.
        weights = [weight.weights(x.detached()) for weight in self.token_weights if not weight.ahead]
        weights += [x.columns["token_weight"]] if "token_weight" in x.columns else []
        closed = {"train/gate_closed": _equals(_product(weights), 0)} if weights else {}

        # Off-policy correction: importance weights computed before the update, or those of the current policy.
        importance = [x.columns["rollout_is_weights"]] if "rollout_is_weights" in x.columns else []
        correction_metrics: dict[str, Tensor] = {}
        if self.correction is not None and self.correction.live:
            current, correction_metrics = _current_weights(x, self.correction, denominators)
            importance.append(current)
        if self.metadata.weighs:
            importance = []
        if self.metadata.per_sequence:  # single tokens cannot be weighted: all get the geometric mean of their row
            importance = [row_mean(factor.log(), x.response_mask).exp().expand_as(factor) for factor in importance]
        if weights or importance:
            losses = losses * _product([*weights, *importance])

        # Masking and aggregation: over the counted tokens, or separately over expert tokens and sampled tokens.
        if self.metadata.split:
            loss = aggregated(losses, x.expert, self.aggregate, denominators.expert)
            loss = loss + aggregated(losses, x.sampled, self.aggregate, denominators.sampled)
        else:
            mask = x.response_mask & (x.columns["counted"] != 0) if "counted" in x.columns else x.response_mask
            loss = aggregated(losses, mask, self.aggregate, denominators.counted)

        # Distillation, entropy bonus and KL penalty.
        terms = {"policy_gradient": loss}
        if (distill := self.distill) is not None:
            followed, followed_metrics = self._token_losses(x, distill.function, distill.metadata)
            loss_metrics = {**loss_metrics, **followed_metrics}
            terms["distillation"] = aggregated(followed, x.response_mask, self.aggregate, denominators)
            loss = (1 - distill.coef) * loss + distill.coef * terms["distillation"]
        if (entropy := self.entropy) is not None:
            mask, counts = (x.sampled, denominators.sampled) if entropy.metadata.sampled else (x.response_mask, None)
            terms["entropy"] = aggregated(entropy.function(x), mask, self.aggregate, counts or denominators)
            loss = loss - entropy.coef * terms["entropy"]
        reference_kl: dict[str, Tensor] = {}
        if self.kl is not None:
            reference_kl["train/ref_kl"] = self.kl.function(x)
            terms["kl"] = aggregated(reference_kl["train/ref_kl"], x.response_mask, self.aggregate, denominators)
            loss = loss + self.kl.coef * terms["kl"]

        observed: dict[str, Tensor] = {}
        if self.observation_coef:
            observation_mask = inputs.columns["observed"] != 0
            surprise = -zero_outside(required(inputs.log_prob, "log_prob"), observation_mask)
            terms["observation"] = aggregated(surprise, observation_mask, "seq-mean-token-mean", denominators.observed)
            loss = loss + self.observation_coef * terms["observation"]
            scale = denominators.tokens / max(denominators.observed_tokens, 1)  # the learner divides by trained tokens
            observed["train/observation_loss"] = surprise.detach().sum() * scale

        sums = metric_sums(
            correction_metrics | closed | dict(loss_metrics) | reference_kl | self._logged(x), x.response_mask
        )
        if len(terms) > 1:  # the learner divides sums by the token count; these are means already
            sums |= {f"train/loss_term/{name}": term.detach() * denominators.tokens for name, term in terms.items()}
        mismatch_sums, maxima = _mismatch(x, denominators)
        return LossOutputs(loss, sums | observed | mismatch_sums, maxima, _seen(x, loss_metrics))

    def _token_losses(
        self, x: PolicyInputs, function: Callable[[PolicyInputs], Any], metadata: PolicyLossMetadata
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(a policy loss of each token, its metrics), (B, L) each; raises DataError for anything else."""
        result = cast(object, function(_with_own_candidates(x, metadata)))
        name = _name(function)
        if not isinstance(result, PerToken):
            raise DataError(f"PerToken(loss, metrics) from {name}", f"a {type(result).__name__}", "wrap it")
        losses = check_per_token(result.loss, x.log_prob, name)
        if self.taught and metadata.needs & TEACHER_COLUMNS:
            losses = losses * x.columns["taught"]
        return losses, result.metrics

    def _logged(self, x: PolicyInputs) -> dict[str, Tensor]:
        """Metrics of the columns that the loss reads."""
        metrics: dict[str, Tensor] = {}
        if "advantages" in self.metadata.needs:
            metrics |= {"train/advantage_mean": x.advantages, "train/advantage_abs": x.advantages.abs()}
        if "old_log_prob" in self.metadata.needs:
            metrics["train/kl"] = zero_outside(-x.log_ratio, ~x.expert)
        return metrics

    @property
    def on_policy(self) -> str:
        return self.metadata.on_policy

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the loss, its terms and token weights, those that `select` adds included."""
        columns = set(self.metadata.needs)
        for term in (self.entropy, self.kl, self.distill):
            columns |= term.metadata.needs if term is not None else set()
        for metadata in (*(weight.metadata for weight in self.token_weights), self.metadata.selection):
            columns |= metadata.needs - SCORED_AHEAD - {"uniform", "group"} if metadata is not None else set()
        weighs_ahead = self.correction is not None and self.correction.weights != "none" and not self.correction.live
        added = {
            "rollout_is_weights": self.weighted or weighs_ahead,
            "token_weight": any(weight.ahead for weight in self.token_weights),
            "counted": any(weight.narrow for weight in self.token_weights),
            "selected": self.select_tokens is not None,
            "observed": self.observation_coef > 0,
            "taught": self.taught and bool(columns & TEACHER_COLUMNS),
        }
        return frozenset(columns) | {name for name, is_added in added.items() if is_added}

    @property
    def looks_at(self) -> frozenset[str]:
        ahead = [weight.metadata.needs for weight in self.token_weights if weight.ahead]
        ahead += [self.metadata.selection.needs] if self.metadata.selection is not None else []
        scores = frozenset[str]().union(*ahead) & SCORED_AHEAD
        return scores | {"log_prob"} if self._corrects_ahead else scores

    @property
    def _corrects_ahead(self) -> bool:
        """Whether the correction must see the whole mini-batch."""
        return self.correction is not None and not self.correction.live

    def select(self, batch: Batch, *address: int) -> Batch:
        """The mini-batch with the columns `selected`, `token_weight`, `counted` (0 where a narrow token weight is 0),
        `observed` and `rollout_is_weights`.

        Removes the tokens that the correction rejects from the mask. Measures the mismatch of engine and trainer before
        that, if the current log-probabilities are known.
        """
        if "log_prob" in self.looks_at:
            current = padded(batch.columns["log_prob"])
            batch = replace(batch, metrics=measured(batch, current))
            if self.correction is not None and self._corrects_ahead:
                batch, masks = corrected(batch, current, self.correction)
                batch = batch.masked(masks)
        if self.observation_coef:
            batch = batch.with_columns(observed=[e.observed for e in batch.experiences])
        ahead = [weight for weight in self.token_weights if weight.ahead]
        if not ahead and self.select_tokens is None:
            return batch
        x = self._mini_batch_inputs(batch, address)
        added: dict[str, Tensor] = {}
        if self.select_tokens is not None:
            added["selected"] = check_per_token(self.select_tokens(x), x.log_prob, _name(self.select_tokens))
        if ahead:
            added["token_weight"] = _product([weight.weights(x) for weight in ahead])
        if narrow := [weight.weights(x) != 0 for weight in ahead if weight.narrow]:
            added["counted"] = reduce(torch.logical_and, narrow) & x.response_mask
        dtype = x.log_prob.dtype
        return batch.with_columns(**{name: ragged(values.to(dtype), batch) for name, values in added.items()})

    def _mini_batch_inputs(self, batch: Batch, address: tuple[int, ...]) -> PolicyInputs:
        """The whole mini-batch, padded to (B, L)."""
        mask = padded([e.response_mask for e in batch.experiences]).bool()
        columns = {name: zero_outside(padded(arrays), mask) for name, arrays in batch.columns.items()}
        columns["rollout_log_prob"] = padded([e.rollout_log_prob for e in batch.experiences])
        columns["uniform"] = token_uniforms(batch, self.seed, "selection", *address)
        groups = torch.from_numpy(numbered([e.group_id for e in batch.experiences]))  # pyright: ignore[reportUnknownMemberType]
        columns["group"] = groups[:, None].expand(mask.shape)
        log_prob = columns.get("log_prob", torch.zeros(mask.shape))
        version = padded([e.policy_version for e in batch.experiences])
        return PolicyInputs(log_prob, mask, columns, expert_rows(version, mask), columns.get("entropy"))

    def derived(self, means: Metrics) -> Metrics:
        """The means with the effective sample sizes that follow from them."""
        return with_sample_sizes(means)


def _with_own_candidates(x: PolicyInputs, metadata: PolicyLossMetadata) -> PolicyInputs:
    """The inputs with the candidates that the function needs, if the policy loss and the distillation need others."""
    if x.candidate_log_prob is None or not all(name in x.columns for name in CANDIDATES):
        return x
    # The candidates of teacher_top come first, then those of student_top.
    num_teacher = x.columns[CANDIDATES[0]].shape[-2]
    reads_teacher, reads_student = (name in metadata.needs for name in CANDIDATES)
    start, stop = 0 if reads_teacher else num_teacher, None if reads_student else num_teacher
    candidates = x.candidate_log_prob[..., start:stop]
    return replace(x, candidate_log_prob=candidates if reads_teacher or reads_student else None)


def aggregated(losses: Tensor, mask: Tensor, mode: str, denominators: LossDenominators) -> Tensor:
    """The aggregation `mode`, a name of the registry kind `aggregations`, with the counts of the whole step."""
    # A step may have no token of a kind: its loss is 0, not 0 / 0.
    counts = Counts(
        max(denominators.tokens, 1), max(denominators.sequences, 1), max(denominators.max_response_length, 1)
    )
    value = resolve("aggregations", mode)(losses, mask, counts)
    if value.dim() != 0:
        raise DataError(
            f"one number from the aggregation {mode!r}", f"a tensor {tuple(value.shape)}", "sum or average it"
        )
    # Data-parallel ranks average their gradients, which this undoes: the counts are those of all ranks.
    return value * denominators.dp_size


def required(values: Tensor | None, name: str) -> Tensor:
    """The field `name` of the loss inputs; raises DataError if the model head did not compute it."""
    if values is None:
        raise DataError(f"the loss inputs' {name}", "None", "run the objective with the model head that it declares")
    return values


def _name(function: Callable[..., Any]) -> str:
    """The name of a function, with or without bound options."""
    return repr(getattr(getattr(function, "func", function), "__name__", str(function)))


def _product(factors: list[Tensor]) -> Tensor:
    return reduce(torch.mul, factors)


def _equals(values: Tensor, number: float) -> Tensor:
    return (values == number).to(values.dtype)


def _policy_inputs(inputs: LossInputs) -> PolicyInputs:
    """The inputs of the policy loss. Zeroes values outside the mask: they cannot affect the loss or its gradient."""
    mask = inputs.response_mask.bool()
    columns = {name: zero_outside(column, mask) for name, column in inputs.columns.items()}
    entropy, candidates = (
        None if values is None else zero_outside(values, mask) for values in (inputs.entropy, inputs.candidate_log_prob)
    )
    return PolicyInputs(
        zero_outside(required(inputs.log_prob, "log_prob"), mask),
        mask,
        columns,
        expert_rows(inputs.policy_version, mask),
        entropy,
        inputs.step,
        candidates,
    )


def _current_weights(
    x: PolicyInputs, correction: Correction, denominators: LossDenominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """(importance weights of the current policy, 1 for expert tokens; metrics of sampled tokens), (B, L) each."""
    weights, metrics = live_weights(x.log_prob, x.columns["rollout_log_prob"], x.sampled, correction)
    scale = denominators.tokens / max(denominators.sampled.tokens, 1)
    return torch.where(x.sampled, weights, 1.0), {key: values * scale for key, values in metrics.items()}


def _mismatch(x: PolicyInputs, denominators: LossDenominators) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(sums, maxima) of the mismatch of engine and trainer, meaningful only before the first update.

    Means are over tokens that an engine sampled, so the sums are scaled for a learner that divides by all trained
    tokens. Both are empty if the step has only expert tokens.
    """
    sampled = denominators.sampled
    if sampled.tokens == 0:
        return {}, {}
    terms = compared(x.log_prob.detach(), x.columns["rollout_log_prob"], x.sampled)
    per_token, per_sequence = (denominators.tokens / max(count, 1) for count in (sampled.tokens, sampled.sequences))
    sums = {key: values.sum() * per_token for key, values in terms.tokens.items()}
    sums |= {key: values.sum() * per_sequence for key, values in terms.sequences.items()}
    return sums, terms.maxima


def _seen(x: PolicyInputs, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns `types.AT_UPDATE` of this micro-batch, (B, L) each, without gradient."""
    named = {"update_log_prob": x.log_prob, "update_entropy": x.entropy, "clipped": metrics.get("train/clip_fraction")}
    return {name: values.detach() for name, values in named.items() if values is not None}


def metric_sums(metrics: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens, without gradient."""
    return {key: zero_outside(values.detach(), mask).sum() for key, values in metrics.items()}
