"""Inputs and outputs of advantage estimators, and the trajectories that the rows belong to.

Legend: B sequences, L tokens, T trajectories. Rows of one trajectory (its history was rewritten) share an entry of
`trajectory`; rows of one task share an entry of `group`. A statistic over a group counts each trajectory once. All
arithmetic is in float64; results come back in the dtype of the rewards, and zero outside the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from trivium.algorithms.stats import distinct, group_statistics
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The inputs of an estimator."""

    token_level_rewards: Tensor
    """(B, L), after shaping and any KL penalty; zero outside the mask. A row's sum is its trajectory's reward, penalty
    included."""
    response_mask: Tensor
    """(B, L) bool; holes (tokens of a tool) and empty rows are legal."""
    group: Tensor
    """(B,) int64."""
    trajectory: Tensor
    """(B,) int64; different numbers in different groups."""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """(B, L) each: the columns that the estimator declares. Beside the scores of the train engine it may need

    - `turn`: int64, the number of the turn that sampled the token, -1 elsewhere;
    - `turn_reward`: the environment's reward for a turn, on the turn's last trained token, 0 elsewhere;
    - `turn_state`: int64, equal for turns of one task that were sampled in the same state, -1 if the state is unknown;
    - `greedy_reward`: the reward of the task's greedy completion, on every token;
    - `rollout_log_prob`: log-probability under the distribution sampled from;
    - `uniform`: a number in [0, 1) that depends on the run's seed, the trajectory and the token's position.
    """
    components: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """(B,) each: the components of the reward by name, weights applied, before shaping; NaN if a trajectory lacks the
    component."""
    token_level_scores: Tensor | None = None
    """(B, L): the rewards before the KL penalty; None without a penalty."""
    reward: Tensor | None = None
    """(B,): the trajectory's reward after shaping, for rows without a trained token to put it on; None if there is no
    such row."""
    reference_rewards: Tensor | None = None
    """(B, N) float64: the rewards of samples of the reference policy for the row's task, from the task's column of this
    name, NaN after the last; None if no task has the column."""

    def unpenalised(self) -> AdvantageInputs:
        """The same without the KL penalty in the rewards."""
        return self if self.token_level_scores is None else replace(self, token_level_rewards=self.token_level_scores)


class Advantages(NamedTuple):
    """Per token, (B, L) each, zero outside the mask."""

    advantages: Tensor
    returns: Tensor
    """The targets of the critic; for estimators without a critic, the advantages."""


class Members(NamedTuple):
    """The trajectories behind the rows."""

    score: Tensor
    """(T,) float64: the mean over a trajectory's rows of the row's summed reward. Rows without a trained token are
    skipped; a trajectory with only such rows has its reward."""
    group: Tensor
    """(T,) int64."""
    of_row: Tensor
    """(B,) int64: the trajectory of each row."""


def members(x: AdvantageInputs) -> Members:
    """The trajectories of a batch and their rewards."""
    ids, of_row, _ = distinct(x.trajectory)
    per_row, trained = x.token_level_rewards.double().sum(-1), x.response_mask.any(-1)
    any_trained = torch.zeros(len(ids), dtype=torch.bool).index_put((of_row[trained],), torch.tensor(True))
    if x.reward is not None:
        per_row = torch.where(trained, per_row, x.reward.double())
    counts = trained | ~any_trained[of_row]
    mean = group_statistics(per_row[counts], of_row[counts]).mean
    score = per_row.new_zeros(len(ids)).scatter(0, of_row[counts], mean)
    return Members(score, x.group.new_zeros(len(ids)).scatter(0, of_row, x.group), of_row)


def spread(per_member: Tensor, of_row: Tensor, x: AdvantageInputs) -> Advantages:
    """One number per trajectory, written on every trained token of its rows."""
    per_token = torch.where(x.response_mask, per_member[of_row].unsqueeze(-1), 0.0).to(x.token_level_rewards.dtype)
    return Advantages(per_token, per_token)


def per_member(values: Tensor, trajectories: Members) -> Tensor:
    """(T,) from (B,): values that are equal in all rows of a trajectory."""
    return values.new_zeros(len(trajectories.score)).scatter(0, trajectories.of_row, values)


def trained_columns_backwards(mask: Tensor) -> list[int]:
    """The positions at which any row is trained on, last first."""
    return [int(t) for t in torch.nonzero(mask.any(0)).flatten().flip(0)]
