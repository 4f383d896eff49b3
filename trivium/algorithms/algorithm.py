"""One algorithm class: which groups to keep, what their tokens are worth, which objectives to minimise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trivium.algorithms.advantages.inputs import AdvantageInputs, Advantages
from trivium.algorithms.groups import advantage_inputs, batch_of, batch_of_pairs, column, describe, pair_of, ragged
from trivium.algorithms.inputs import PolicyInputs
from trivium.algorithms.kl import KlController, apply_kl_penalty, k1
from trivium.algorithms.objective import LIVE, PolicyObjective, ValueObjective
from trivium.algorithms.preference_objective import PreferenceObjective, ScoreObjective
from trivium.algorithms.registered import EstimatorLaw
from trivium.algorithms.stats import masked_var
from trivium.types import SCORES, Batch, Group, Metrics, Teacher

_SCORE_OF = {column: what for what, column in SCORES.items()}


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages."""

    function: Callable[[AdvantageInputs], Advantages]
    law: EstimatorLaw
    kl: Callable[[PolicyInputs], Tensor] = k1
    """How a KL penalty in the reward is estimated."""
    kl_controller: KlController | None = None
    """Holds the coefficient of that penalty; None for no penalty. The one thing here that changes."""


@dataclass(frozen=True)
class GroupAlgorithm:
    """An algorithm as a value; implements `protocols.Algorithm`."""

    name: str
    objectives: tuple[PolicyObjective | ValueObjective | PreferenceObjective | ScoreObjective, ...]
    """In the order they are minimised."""
    estimator: Estimator | None = None
    """None where nothing is judged, as in supervised learning."""
    recompute_old: bool = False
    """Whether the trainer recomputes the old log-probabilities; else the engine's stand for them."""
    kl_coef: float = 0.0
    """The KL coefficient in the loss, for the log."""
    epochs: int = 1
    mini_batches: int = 1
    pairs: bool = False
    """Whether a group is trained on as a pair: its best member and its worst one."""
    teacher: Teacher | None = None
    """Whom the policy learns from, where one of the functions asks for a teacher."""

    @property
    def needs(self) -> frozenset[str]:
        """Scores wanted from the train engine before the first update: names of `types.SCORES`."""
        columns = self._columns - LIVE
        if not self.recompute_old:
            columns = columns - {"old_log_prob"}
        return frozenset(_SCORE_OF[name] for name in columns if name in _SCORE_OF)

    @property
    def _columns(self) -> frozenset[str]:
        """Every column that an objective or the estimator reads."""
        wanted = frozenset[str]().union(*(objective.needs for objective in self.objectives))
        if self.estimator is None:
            return wanted
        penalty = {"old_log_prob", "ref_log_prob"} if self.estimator.kl_controller else set[str]()
        return wanted | self.estimator.law.needs | penalty

    def filter(self, groups: Sequence[Group]) -> tuple[list[Group], Metrics]:
        """The groups with enough living members to be judged (or a better and a worse one, where pairs are wanted),
        and what was played."""
        if self.pairs:
            kept = [group for group in groups if pair_of(group)]
            return kept, describe(groups, kept) | {"rollout/trajectories": 2 * len(kept)}
        fewest = self.estimator.law.min_group if self.estimator else 1
        kept = [group for group in groups if len(group.alive) >= fewest]
        return kept, describe(groups, kept)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The experiences of the groups' living members, in order; of a pair, the better member's first."""
        return batch_of_pairs(groups) if self.pairs else batch_of(groups)

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with every column its objectives need; scores named in `needs` must be there already.

        A trajectory's reward lands on the last trained token of each of its experiences.
        """
        if "old_log_prob" in self._columns and not self.recompute_old:
            batch = batch.with_columns(old_log_prob=[e.rollout_log_prob for e in batch.experiences])
        metrics: Metrics = {"train/kl_coef": self.kl_coef} if self.kl_coef else {}
        if self.estimator is None:
            return batch, metrics
        x = advantage_inputs(batch)
        x = replace(x, columns={name: column(batch, name) for name in self.estimator.law.needs})
        if self.estimator.kl_controller is not None:
            x, metrics = _penalised(x, batch, self.estimator.kl, self.estimator.kl_controller)
        done = self.estimator.function(x)
        if "values" in self.estimator.law.needs:
            metrics |= _value_metrics(x, done)
        return batch.with_columns(
            advantages=ragged(done.advantages, batch), returns=ragged(done.returns, batch)
        ), metrics

    def state(self) -> dict[str, Any]:
        """The KL coefficient, where it may have moved."""
        controller = self.estimator.kl_controller if self.estimator else None
        return {"kl_coef": controller.value} if controller else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; the state of a stage without a moving coefficient changes nothing."""
        if self.estimator and self.estimator.kl_controller:
            self.estimator.kl_controller.value = float(state.get("kl_coef", self.estimator.kl_controller.value))


def _penalised(
    x: AdvantageInputs, batch: Batch, kl: Callable[[PolicyInputs], Tensor], controller: KlController
) -> tuple[AdvantageInputs, Metrics]:
    """The inputs with the KL penalty taken off their rewards; the controller learns of the KL it saw."""
    coef = controller.value
    rewards, current = apply_kl_penalty(
        x.token_level_rewards, column(batch, "old_log_prob"), column(batch, "ref_log_prob"), x.response_mask,
        coef=coef, estimator=kl,
    )  # fmt: skip
    controller.update(current, len(batch))
    return replace(x, token_level_rewards=rewards), {"train/kl_coef": coef, "train/ref_kl": current}


def _value_metrics(x: AdvantageInputs, done: Advantages) -> Metrics:
    """How much of the returns' variance the critic explained; nothing where they have none."""
    mask, returns = x.response_mask, done.returns.double()
    if int(mask.sum()) < 2 or not float(variance := masked_var(returns, mask)):
        return {}
    error = torch.where(mask, returns - x.columns["values"].double(), 0.0)
    return {"train/value_explained": 1 - float(masked_var(error, mask) / variance)}
