"""The inputs and outputs of a loss: the interface between training and algorithms.

Legend: B sequences of one micro-batch, L tokens of the longest one. Sequences start at column 0 and are padded on the
right; index t of every array belongs to `tokens[t]`; column 0 is never trained; padding is outside the mask and
holds zeros. An objective has `loss(inputs, denominators) -> LossOutputs` in addition to `protocols.Objective`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trivium.models.late import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss for one micro-batch."""

    response_mask: torch.Tensor
    """(B, L) bool: the tokens that are trained on. A row may have none."""
    policy_version: torch.Tensor
    """(B, L) int32: which weights sampled each token."""
    columns: Mapping[str, torch.Tensor]
    """(B, L) each (`teacher_top` and `student_top` (B, L, K, 2)), without gradient: every column of
    `objective.needs`, always `rollout_log_prob`."""
    log_prob: torch.Tensor | None = None
    """(B, L) with gradient: log p(tokens[t] | tokens[:t]) under the current weights; None for a value head.
    Zero outside the mask, apart from the tokens of the column `observed`."""
    entropy: torch.Tensor | None = None
    """(B, L): entropy in nats of the distribution that token t was drawn from; None for a value head.
    Has a gradient only if `"entropy"` is in `objective.needs`. Zero outside the mask."""
    values: torch.Tensor | None = None
    """(B, L) with gradient: value of the state before `tokens[t]` (value head), or score of the sequence up to and
    including it (score head; (B, L, K) for K > 1 outputs); None for a language-model head."""
    candidate_log_prob: torch.Tensor | None = None
    """(B, L, K) with gradient: log-probabilities of the tokens in the column `teacher_top` or `student_top`; None if
    the objective needs neither."""
    step: int = 0
    """The number of train steps of this stage so far."""


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """The denominators of a loss: counts of the whole optimizer step over all micro-batches and ranks, known before the
    first micro-batch."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with at least one trained token."""
    max_response_length: int
    """The limit of one completion, in tokens: a constant of the run, independent of this step's completions."""
    expert_tokens: int = 0
    """The number of `tokens` that no policy of this run sampled."""
    expert_sequences: int = 0
    """The number of `sequences` with at least one such token."""
    counted_tokens: int | None = None
    """The number of `tokens` that the policy loss is divided by, if a selection left fewer (the column `counted`)."""
    counted_sequences: int | None = None
    """The number of sequences with at least one of these tokens."""
    observed_tokens: int = 0
    """Tokens of observations (the column `observed`) in these sequences."""
    observed_sequences: int = 0
    """The number of `sequences` with at least one such token."""
    pairs: int = 0
    """Pairs of consecutive rows (0 and 1, 2 and 3, ...) that both have a trained token."""
    dp_size: int = 1
    """Data-parallel ranks whose gradients are averaged."""

    @property
    def counted(self) -> LossDenominators:
        """The denominators of the policy loss."""
        if self.counted_tokens is None or self.counted_sequences is None:
            return self
        return replace(self, tokens=self.counted_tokens, sequences=self.counted_sequences)

    @property
    def expert(self) -> LossDenominators:
        """The denominators of tokens that no policy of this run sampled."""
        return replace(self, tokens=self.expert_tokens, sequences=self.expert_sequences)

    @property
    def observed(self) -> LossDenominators:
        """The denominators of the tokens of observations."""
        return replace(self, tokens=self.observed_tokens, sequences=self.observed_sequences)

    @property
    def sampled(self) -> LossDenominators:
        """The denominators of tokens that policies of this run sampled."""
        return replace(self, tokens=self.tokens - self.expert_tokens, sequences=self.sequences - self.expert_sequences)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """One micro-batch's part of the step's loss."""

    loss: torch.Tensor
    """Scalar, already divided by the denominators: the micro-batches' losses add up to the step's loss."""
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """Metric key -> sum over this micro-batch's trained tokens; the learner adds them up and divides by
    `denominators.tokens`. No gradient."""
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """Metric key -> largest value in this micro-batch; the learner keeps the largest."""
    tokens: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """Arrays (B, L) with the inputs of the loss for each token, kept if `EngineSettings.keeps_updates` is set."""
