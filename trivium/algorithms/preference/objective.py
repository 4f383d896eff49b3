"""Objectives over pairs of rows: chosen, rejected, chosen, rejected, ...

Legend: B rows, L tokens, P = B / 2 pairs. Everything is normalised by the counts of the whole optimizer step,
so a mini-batch can be cut between any two pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trivium.algorithms.batches import column, padded, ragged
from trivium.algorithms.losses.base import zero_outside
from trivium.algorithms.metadata import PairLossMetadata, ScoreLossMetadata
from trivium.algorithms.objective import required
from trivium.algorithms.preference.losses import PairInputs, PerPair, ScoreInputs, reference_point
from trivium.foundation.errors import DataError
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.models.late import torch
from trivium.protocols import CutAnywhere
from trivium.types import Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor

_AHEAD = frozenset({"pair_loss", "pair_gradient"})
"""Columns that `select` adds for a loss that must see the whole mini-batch: each token's share of the loss, and the
derivative of the loss by its log-probability."""
_SUMS, _NUMBERS = ("chosen_sum", "rejected_sum"), ("chosen_number", "rejected_number")
"""The sums that a micro-batch of single completions reports, for `derived`."""


@dataclass(frozen=True)
class PreferenceObjective:
    """A loss over preferences, averaged over pairs (or completions) of the whole optimizer step.

    `select` evaluates a loss that must see every pair at once, with the weights before the update. A micro-batch then
    contributes the derivatives from `select` times its log-probabilities, which has the same gradient. A comparison
    counts only if both completions have a trained token.
    """

    pair_loss: Callable[[PairInputs], PerPair]
    metadata: PairLossMetadata

    role: str = "policy"
    head: str = "lm"
    unit: str = "pair"
    on_policy: str = "none: it raises one completion against another, from where the reference stands"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self.metadata.needs) | (_AHEAD if self.metadata.scope == "batch" else frozenset[str]())

    @property
    def looks_at(self) -> frozenset[str]:
        return frozenset({"log_prob"}) if self.metadata.scope == "batch" else frozenset()

    def select(self, batch: Batch, *address: int) -> Batch:
        """Adds the loss and its gradient, spread over the tokens, if the loss must see the whole mini-batch.

        Removes mismatched pairs (`batch_of_pairs`), which are only needed for the reference point.
        """
        del address
        if self.metadata.scope == "pair":
            return batch
        kl = None
        mismatched = [row for row, e in enumerate(batch.experiences) if e.index < 0]
        if mismatched:
            kl = _reference_point(batch.select(mismatched))
            batch = batch.select([row for row, e in enumerate(batch.experiences) if e.index >= 0])
            batch = replace(batch, metrics={"train/reference_point": float(kl)})
        mask = padded([e.response_mask for e in batch.experiences]).bool()
        log_prob = column(batch, "log_prob").double().requires_grad_(True)
        x = replace(_pairs(log_prob, column(batch, "ref_log_prob").double(), mask), kl=kl)
        loss = self._counted(x)
        (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
        share = loss.detach() / mask.sum(-1).view(-1, 2).sum(-1).clamp(min=1)
        spread = torch.where(mask, share.repeat_interleave(2).unsqueeze(-1), 0.0)
        return batch.with_columns(pair_loss=ragged(spread, batch), pair_gradient=ragged(gradient, batch))

    def loss(self, inputs: LossInputs, denominators: LossDenominators) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        mask = inputs.response_mask.bool()
        log_prob = required(inputs.log_prob, "log_prob")
        x = _pairs(log_prob, inputs.columns["ref_log_prob"], mask)
        if self.metadata.scope == "batch":
            # 0 in value, with the gradient of the log-probabilities: `value` already holds the loss.
            step = zero_outside(log_prob, mask) - zero_outside(log_prob, mask).detach()
            value, gradient = (zero_outside(inputs.columns[name], mask) for name in ("pair_loss", "pair_gradient"))
            loss = (value + gradient * step).sum()
        else:
            loss = self._counted(x).sum()
        count = denominators.pairs if self.metadata.mean == "pair" else denominators.sequences
        per_pair = self.pair_loss(x)
        if self.metadata.mean == "completion" and denominators.sequences and not denominators.pairs:
            sums = _completion_sums(per_pair, x)
        else:
            sums = _preference_metrics(
                per_pair.chosen_rewards, per_pair.rejected_rewards, x.has_chosen & x.has_rejected, denominators
            )
        return LossOutputs(loss / max(count, 1) * denominators.dp_size, sums)

    def derived(self, means: Metrics) -> Metrics:
        """For batches of single completions: the mean reward of each kind from its sum and its number."""
        other_means = {key: value for key, value in means.items() if key not in (*_SUMS, *_NUMBERS)}
        sides = zip(("train/preference_chosen", "train/preference_rejected"), _SUMS, _NUMBERS, strict=True)
        return other_means | {name: means[total] / means[number] for name, total, number in sides if means.get(number)}

    def _counted(self, x: PairInputs) -> Tensor:
        """(P,): the loss of each pair; 0 for a comparison with a missing completion."""
        loss = self.pair_loss(x).loss
        return loss if self.metadata.mean == "completion" else torch.where(x.has_chosen & x.has_rejected, loss, 0.0)


@dataclass(frozen=True)
class ScoreObjective(CutAnywhere):
    """A reward model's loss over pairs; a completion's score is the model's number at its last trained token.

    A pair adds nothing if one of its completions has no trained token.
    """

    score_loss: Callable[[ScoreInputs], Tensor]
    metadata: ScoreLossMetadata
    scale: float | None = None
    """The initial value of a learned factor of all scores, a parameter of the model's head; None for no factor."""

    role: str = "reward"
    head: str = "score"
    unit: str = "pair"
    needs: frozenset[str] = frozenset()
    on_policy: str = "none: it fits scores, not the policy"

    def loss(self, inputs: LossInputs, denominators: LossDenominators) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        mask = inputs.response_mask.bool()
        chosen, rejected = _by_pair(_last_scores(inputs, mask))
        has_chosen, has_rejected = _by_pair(mask.any(-1))
        whole = has_chosen & has_rejected
        loss = torch.where(whole, self.score_loss(ScoreInputs(chosen, rejected)), 0.0).sum()
        sums = _preference_metrics(chosen.detach(), rejected.detach(), whole, denominators)
        return LossOutputs(loss / max(denominators.pairs, 1) * denominators.dp_size, sums)


def _reference_point(batch: Batch) -> Tensor:
    """KTO's z0 from sequences with the columns `log_prob` and `ref_log_prob`. Skips rows without trained tokens."""
    mask = padded([e.response_mask for e in batch.experiences]).bool()
    log_ratio = column(batch, "log_prob").double() - column(batch, "ref_log_prob").double()
    return reference_point(zero_outside(log_ratio, mask).sum(-1)[mask.any(-1)])


def _last_scores(inputs: LossInputs, mask: Tensor) -> Tensor:
    """(B,): the model's output at the last trained token of each row."""
    scores = zero_outside(required(inputs.values, "values"), mask)
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)
    return scores[torch.arange(len(scores), device=scores.device), last]


def _pairs(log_prob: Tensor, reference: Tensor, mask: Tensor) -> PairInputs:
    """Sums of the log-probabilities (B, L) over each row's trained tokens, by pair."""
    policy, frozen = (_by_pair(zero_outside(values, mask).sum(-1)) for values in (log_prob, reference))
    return PairInputs(*policy, *frozen, *_by_pair(mask.any(-1)))


def _by_pair(values: Tensor) -> tuple[Tensor, Tensor]:
    """Splits values by row, (B,), into (chosen (P,), rejected (P,))."""
    if len(values) % 2:
        raise DataError(
            "rows in pairs of chosen and rejected", f"{len(values)} rows", "let the algorithm build the batch of pairs"
        )
    return values[0::2], values[1::2]


def _completion_sums(per_pair: PerPair, x: PairInputs) -> dict[str, Tensor]:
    """Sum and number of the rewards of desirable and of undesirable completions."""
    chosen, rejected = (per_pair.chosen_rewards, x.has_chosen), (per_pair.rejected_rewards, x.has_rejected)
    sums = [torch.where(there, rewards, 0.0).sum() for rewards, there in (chosen, rejected)]
    numbers = [there.to(rewards.dtype).sum() for rewards, there in (chosen, rejected)]
    return dict(zip((*_SUMS, *_NUMBERS), (*sums, *numbers), strict=True))


def _preference_metrics(
    chosen: Tensor, rejected: Tensor, whole: Tensor, denominators: LossDenominators
) -> dict[str, Tensor]:
    """Means over pairs, as the sums that the learner will divide by the number of trained tokens."""
    numbers = {
        "train/preference_accuracy": (chosen > rejected).to(chosen.dtype),
        "train/preference_margin": chosen - rejected,
        "train/preference_chosen": chosen,
        "train/preference_rejected": rejected,
    }
    weight = denominators.tokens / max(denominators.pairs, 1)
    return {key: torch.where(whole, values, 0.0).sum() * weight for key, values in numbers.items()}
