"""Objectives over pairs of rows: chosen, rejected, chosen, rejected, ...

Legend: B rows, L tokens, P = B / 2 pairs. Everything is normalised by the counts of the whole optimizer step, so
it does not matter where between its pairs a mini-batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.algorithms.groups import column, padded, ragged
from trivium.algorithms.inputs import inside
from trivium.algorithms.preference import PairInputs, PerPair, ScoreInputs
from trivium.algorithms.registered import PairLossLaw, ScoreLossLaw
from trivium.errors import DataError
from trivium.models.loss import LossInputs, LossOutputs, Totals
from trivium.protocols import CutAnywhere
from trivium.types import Batch, Metrics

_AHEAD = frozenset({"pair_loss", "pair_gradient"})
"""Columns that `select` adds for a loss that must see the whole mini-batch: each token's share of the loss, and the
derivative of the loss by its log-probability."""


@dataclass(frozen=True)
class PreferenceObjective:
    """A loss over preferences, averaged over pairs (or replies) of the whole optimizer step.

    A loss that must see every pair at once is evaluated in `select`, at the weights that the update starts from; a
    micro-batch then contributes the derivatives found there times its own log-probabilities: the same gradient.
    A comparison counts where both replies have a trained token.
    """

    pair_loss: Callable[[PairInputs], PerPair]
    law: PairLossLaw

    role: str = "policy"
    head: str = "lm"
    unit: str = "pair"
    on_policy: str = "none: it raises one reply against another, from where the reference stands"

    @property
    def needs(self) -> frozenset[str]:
        return self.law.needs | (_AHEAD if self.law.scope == "batch" else frozenset[str]())

    @property
    def looks_at(self) -> frozenset[str]:
        return frozenset({"log_prob"}) if self.law.scope == "batch" else frozenset()

    def select(self, batch: Batch, *address: int) -> Batch:
        """The mini-batch with the loss and its gradient spread over the tokens, where the loss must see all of it."""
        del address
        if self.law.scope == "pair":
            return batch
        mask = padded([e.response_mask for e in batch.experiences]).bool()
        log_prob = column(batch, "log_prob").double().requires_grad_(True)
        x = _pairs(log_prob, column(batch, "ref_log_prob").double(), mask)
        loss = self._counted(x)
        (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
        share = loss.detach() / mask.sum(-1).view(-1, 2).sum(-1).clamp(min=1)
        spread = torch.where(mask, share.repeat_interleave(2).unsqueeze(-1), 0.0)
        return batch.with_columns(pair_loss=ragged(spread, batch), pair_gradient=ragged(gradient, batch))

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        mask = inputs.response_mask.bool()
        log_prob = _given(inputs.log_prob, "log_prob")
        x = _pairs(log_prob, inputs.columns["ref_log_prob"], mask)
        if self.law.scope == "batch":
            step = inside(log_prob, mask) - inside(log_prob, mask).detach()
            value, gradient = (inside(inputs.columns[name], mask) for name in ("pair_loss", "pair_gradient"))
            loss = (value + gradient * step).sum()
        else:
            loss = self._counted(x).sum()
        count = totals.pairs if self.law.mean == "pair" else totals.sequences
        done = self.pair_loss(x)
        sums = _preference_metrics(done.chosen_rewards, done.rejected_rewards, x.has_chosen & x.has_rejected, totals)
        return LossOutputs(loss / max(count, 1) * totals.dp_size, sums)

    def derived(self, means: Metrics) -> Metrics:
        """Nothing beyond the means."""
        return means

    def _counted(self, x: PairInputs) -> Tensor:
        """(P,): the loss of each pair; 0 where it compares and one of the replies is missing."""
        loss = self.pair_loss(x).loss
        return loss if self.law.mean == "reply" else torch.where(x.has_chosen & x.has_rejected, loss, 0.0)


@dataclass(frozen=True)
class ScoreObjective(CutAnywhere):
    """A reward model's loss over pairs; a reply's score is the model's number at its last trained token.

    A pair of which one reply has no trained token adds nothing.
    """

    score_loss: Callable[[ScoreInputs], Tensor]
    law: ScoreLossLaw

    role: str = "reward"
    head: str = "score"
    unit: str = "pair"
    needs: frozenset[str] = frozenset()
    on_policy: str = "none: it fits scores, not the policy"

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs:
        """This micro-batch's part of the step's loss, and its metrics."""
        mask = inputs.response_mask.bool()
        scores = inside(_given(inputs.values, "values"), mask)
        last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
        chosen, rejected = _by_pair(scores.gather(1, last).squeeze(1))
        has_chosen, has_rejected = _by_pair(mask.any(-1))
        whole = has_chosen & has_rejected
        loss = torch.where(whole, self.score_loss(ScoreInputs(chosen, rejected)), 0.0).sum()
        sums = _preference_metrics(chosen.detach(), rejected.detach(), whole, totals)
        return LossOutputs(loss / max(totals.pairs, 1) * totals.dp_size, sums)


def _pairs(log_prob: Tensor, reference: Tensor, mask: Tensor) -> PairInputs:
    """Sums of the log-probabilities (B, L) over each row's trained tokens, by pair."""
    policy, frozen = (_by_pair(inside(values, mask).sum(-1)) for values in (log_prob, reference))
    return PairInputs(*policy, *frozen, *_by_pair(mask.any(-1)))


def _by_pair(values: Tensor) -> tuple[Tensor, Tensor]:
    """(chosen (P,), rejected (P,)) of numbers by row, (B,)."""
    if len(values) % 2:
        raise DataError(
            "rows in pairs of chosen and rejected", f"{len(values)} rows", "let the algorithm build the batch of pairs"
        )
    return values[0::2], values[1::2]


def _preference_metrics(chosen: Tensor, rejected: Tensor, whole: Tensor, totals: Totals) -> dict[str, Tensor]:
    """Means over pairs, as the sums that the learner will divide by the number of trained tokens."""
    numbers = {
        "train/preference_accuracy": (chosen > rejected).to(chosen.dtype),
        "train/preference_margin": chosen - rejected,
        "train/preference_chosen": chosen,
        "train/preference_rejected": rejected,
    }
    weight = totals.tokens / max(totals.pairs, 1)
    return {key: torch.where(whole, values, 0.0).sum() * weight for key, values in numbers.items()}


def _given(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise DataError(f"the loss inputs' {name}", "None", "run the objective with the model head that it declares")
    return values
