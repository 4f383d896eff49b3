"""GroupAlgorithm: filters groups, estimates the advantages of their tokens, and names the objectives to minimise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trivium.algorithms.batches import batch_of, batch_of_pairs, column, pair_of, ragged
from trivium.algorithms.correction import Correction
from trivium.algorithms.entropy import EntropyController
from trivium.algorithms.estimator_inputs import (
    advantage_inputs,
    estimator_column,
    rewarded,
    shaping_inputs,
    truncated_rows,
)
from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, members
from trivium.algorithms.estimators.finishing import Normalise, normalised
from trivium.algorithms.filters import Filter
from trivium.algorithms.importance_weights import corrected, measured
from trivium.algorithms.kl import AdaptiveKLController, KlController, apply_kl_penalty, k1
from trivium.algorithms.losses.base import PolicyInputs, check_per_token
from trivium.algorithms.losses.value_loss import SharedObjective, ValueObjective
from trivium.algorithms.metadata import EstimatorMetadata, KlMetadata
from trivium.algorithms.objective import FORWARD_COLUMNS, TEACHER_COLUMNS, PolicyObjective
from trivium.algorithms.preference.objective import PreferenceObjective, ScoreObjective
from trivium.algorithms.resampling import Resampling
from trivium.algorithms.rollout_metrics import describe, describe_tokens
from trivium.algorithms.shaping import Moments, Shaping, shaped
from trivium.algorithms.stats import masked_var
from trivium.algorithms.teachers.teacher_prompts import TeacherPrompts
from trivium.foundation.errors import DataError
from trivium.models.late import torch
from trivium.types import SCORES, AnyArray, Batch, Group, Metrics, Teacher

if TYPE_CHECKING:
    from torch import Tensor

AnyObjective = PolicyObjective | ValueObjective | SharedObjective | PreferenceObjective | ScoreObjective
_SCORE_OF = {column: score for score, column in SCORES.items()}


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages."""

    function: Callable[[AdvantageInputs], Advantages]
    metadata: EstimatorMetadata
    kl: Callable[[PolicyInputs], Tensor] = k1
    """How a KL penalty in the reward is estimated."""
    kl_metadata: KlMetadata = vars(k1)["metadata"]
    kl_controller: KlController | None = None
    """Holds the coefficient of that penalty; None for no penalty. The only mutable field."""
    normalise: Normalise = "none"
    """How the batch's advantages are normalised."""
    clip: float | None = None
    """The largest absolute advantage after normalisation; None for no limit."""
    seed: int = 0
    """The run's seed, for estimators that leave out trajectories at random."""

    def columns(self, batch: Batch) -> dict[str, Tensor]:
        """The columns that the function needs, (B, L) each, and the weights of a correction if the batch has them."""
        further = {"rollout_is_weights"} | ({"taught"} if self.metadata.needs & TEACHER_COLUMNS else set[str]())
        names = self.metadata.needs | (further & batch.columns.keys())
        return {name: estimator_column(batch, name, self.seed) for name in names}

    def advantages(self, x: AdvantageInputs) -> tuple[Advantages, Metrics]:
        """The function's result, normalised and clipped."""
        result = cast(object, self.function(x))
        if not isinstance(result, Advantages):
            name = getattr(getattr(self.function, "func", self.function), "__name__", "the estimator")
            raise DataError(f"Advantages(advantages, returns) from {name!r}", f"a {type(result).__name__}", "wrap them")
        values, returns = (check_per_token(column, x.response_mask, "the advantage estimator") for column in result)
        mask = x.response_mask
        if "taught" in x.columns:  # where the teacher read no context, its opinion does not count
            mask = mask & (x.columns["taught"] != 0)
            values, returns = (torch.where(mask, column, 0.0) for column in (values, returns))
        if self.normalise != "none":
            values = normalised(values, mask, by_std=self.normalise == "std")
        if self.clip is None:
            return Advantages(values, returns), {}
        beyond = (values.abs() > self.clip).sum() / x.response_mask.sum().clamp(min=1)
        return Advantages(values.clamp(-self.clip, self.clip), returns), {"train/advantage_clipped": float(beyond)}


@dataclass(frozen=True)
class GroupAlgorithm:
    """An algorithm as a value; implements `protocols.Algorithm`."""

    name: str
    objectives: tuple[AnyObjective, ...]
    """In the order they are minimised."""
    estimator: Estimator | None = None
    """None if no advantages are estimated, as in supervised learning."""
    recompute_old: bool = False
    """Whether the trainer recomputes the old log-probabilities. If not, the engine's are used."""
    correction: Correction | None = None
    """An off-policy correction against the recomputed old log-probabilities, applied before the step."""
    kl_coef: float = 0.0
    """The KL coefficient in the loss, for the log."""
    entropy_controller: EntropyController | None = None
    """Holds the coefficient of the entropy bonus; None for a constant one."""
    epochs: int = 1
    mini_batches: int = 1
    pairs: bool = False
    """Whether a group is trained on as a pair: its best member and its worst one."""
    label: str = "label"
    """The task's column with the label of a group's only member: desirable or not."""
    mismatched: bool = False
    """Whether two rows with the pair's prompt and other completions follow each pair (`batch_of_pairs`)."""
    filters: tuple[Filter, ...] = ()
    """Rules that refuse groups, beyond groups without enough rewards, in this order."""
    refill: int = 0
    """How often the refused groups of a step are replaced by newly generated ones before it continues with fewer."""
    shapings: tuple[Shaping, ...] = ()
    """Changes to a trajectory's reward, applied in this order before any KL penalty and the estimator."""
    mask_truncated: bool = False
    """Whether truncated trajectories are compared with their group but not trained on."""
    resample: Resampling | None = None
    """How the trajectories of a step are drawn anew after their advantages are computed; None trains on each once."""
    max_new_tokens: int = 0
    """The longest completion that sampling allows, for shapings that depend on length; 0 if it is not set."""
    teacher: Teacher | None = None
    """The model that the policy learns from, if a function needs a teacher."""
    teacher_prompts: TeacherPrompts | None = None
    """Renders the context of the teacher. Only a trainer has it (`runtime.build.build_trainer`)."""
    critic_warmup: int = 0
    """The number of train steps at the start that update only the critic."""
    first_version: int = 0
    """The version that the first train step starts from."""

    def objectives_at(self, version: int) -> tuple[AnyObjective, ...]:
        """The objectives of the train step from `version`. During the critic's warm-up these are only the critic's."""
        warming_up = version < self.first_version + self.critic_warmup
        return tuple(
            self._steered(objective) for objective in self.objectives if not warming_up or objective.role == "critic"
        )

    def _steered(self, objective: AnyObjective) -> AnyObjective:
        """The objective with the current coefficient of the entropy bonus."""
        if self.entropy_controller is None:
            return objective
        if isinstance(objective, SharedObjective):
            return replace(objective, policy=self._steered(objective.policy))
        if not isinstance(objective, PolicyObjective) or objective.entropy is None:
            return objective
        return replace(objective, entropy=replace(objective.entropy, coef=self.entropy_controller.coef))

    @property
    def needs(self) -> frozenset[str]:
        """Scores wanted from the train engine before the first update: names of `types.SCORES`."""
        estimator_needs = self.estimator.metadata.needs if self.estimator else frozenset[str]()
        # An objective's forward pass computes the `FORWARD_COLUMNS` itself; an estimator needs them before it.
        return self._scores_of((self.columns - FORWARD_COLUMNS) | estimator_needs)

    @property
    def advantage_needs(self) -> frozenset[str]:
        """The scores in `needs` that `advantages` requires. Only the objectives read the others."""
        return self._scores_of(self._advantage_columns)

    def _scores_of(self, columns: frozenset[str]) -> frozenset[str]:
        """The names in `types.SCORES` of the columns that a model computes."""
        if not self.recompute_old:
            columns = columns - {"old_log_prob"}
        return frozenset(_SCORE_OF[name] for name in columns if name in _SCORE_OF)

    @property
    def columns(self) -> frozenset[str]:
        """Every column that an objective or the estimator reads."""
        return self._advantage_columns.union(*(objective.needs for objective in self.objectives))

    @property
    def _advantage_columns(self) -> frozenset[str]:
        """Every column that the estimator, its KL penalty or the correction reads."""
        if self.estimator is None:
            return frozenset()
        penalty = {"old_log_prob", "ref_log_prob"} if self.estimator.kl_controller else set[str]()
        compared = {"old_log_prob"} if self.correction is not None else set[str]()
        return frozenset(self.estimator.metadata.needs | penalty | compared)

    def filter(self, groups: Sequence[Group]) -> tuple[list[Group], Metrics]:
        """(the groups to train on, metrics of all rollouts). Each group is filtered independently, deterministically.

        Raises DataError for a group without the greedy completion that the estimator needs.
        """
        refused_by = [self._refused_by(group) for group in groups]
        accepted = [group for group, rule in zip(groups, refused_by, strict=True) if rule is None]
        metrics = describe(groups, accepted, Counter(rule for rule in refused_by if rule is not None))
        return accepted, metrics | (
            {"rollout/trajectories": sum(min(2, len(group.trajectories)) for group in accepted)} if self.pairs else {}
        )

    def _refused_by(self, group: Group) -> str | None:
        """The rule that refuses a group: too few rewards to compare, or a filter. None for a group to train on."""
        if self.pairs and len(group.trajectories) > 1 and pair_of(group) is None:
            return "no_pair"
        fewest = 1 if self.estimator is None or group.expert else self.estimator.metadata.min_group
        if sum(bool(member.turns) for member in group.alive) < fewest:
            return "too_few_alive"
        if group.expert:
            return None  # filters read rewards, and an expert's completion has none
        if self.greedy_baseline:
            if group.greedy is None:
                raise DataError(
                    f"a greedy completion for task {group.task.task_id!r}",
                    "the group has none",
                    "start another run.dir: its rollouts were not generated for this algorithm",
                )
            if group.greedy.failure is not None:
                return "greedy_failed"
        return next((rule.name for rule in self.filters if not rule.passes(group)), None)

    @property
    def greedy_baseline(self) -> bool:
        """Whether each task gets an additional greedy rollout as the estimator's baseline."""
        return self.estimator is not None and self.estimator.metadata.baseline

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The experiences of the groups' successful members, in order. The better member of a pair comes first."""
        batch = batch_of_pairs(groups, self.label, mismatched=self.mismatched) if self.pairs else batch_of(groups)
        if self.teacher_prompts is not None:
            batch = self.teacher_prompts.added(batch, groups)
        return batch

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Adds every column that the objectives need, given the scores named in `needs`. Advantages require the scores
        in `advantage_needs`.

        The shaped reward of a trajectory is on the last trained token of each of its experiences. Trajectories that are
        not trained on, and tokens that the correction rejects, leave the mask after the advantages are computed: they
        are part of their group's statistics. Expert completions have no rewards and are in no group's statistics: their
        advantages and returns are 0. With `resample`, a trajectory has as many rows as it was drawn times.
        """
        if "old_log_prob" in self.columns and not self.recompute_old:
            batch = batch.with_columns(old_log_prob=[e.rollout_log_prob for e in batch.experiences])
        metrics: Metrics = {"train/kl_coef": self.kl_coef} if self.kl_coef else {}
        batch, masks = self._compared(batch)
        metrics |= batch.metrics
        if len(taught := batch.columns.get("taught", ())):
            metrics["train/taught"] = sum(bool(row.any()) for row in taught) / len(taught)
        if self.estimator is None:
            return batch, metrics
        policy_rows = np.flatnonzero(~batch.experts).tolist()
        judged = batch.select(policy_rows)
        # A step may consist of expert tokens alone, of which no engine measured the entropy.
        if self.entropy_controller is not None and judged.num_response_tokens:
            sampled = judged.flat("rollout_log_prob")[judged.flat("response_mask")]
            self.entropy_controller.update(-float(sampled.mean(dtype=np.float64)))
            metrics |= {"train/entropy_coef": self.entropy_controller.coef}
        x, estimate, judged_metrics = self._judged(self.estimator, judged)
        columns = {"advantages": ragged(estimate.advantages, judged), "returns": ragged(estimate.returns, judged)}
        batch = batch.with_columns(**{name: _placed(arrays, policy_rows, batch) for name, arrays in columns.items()})
        batch = self._trained(batch if masks is None else batch.masked(masks))
        if self.resample is not None:
            batch = batch.select(self.resample.rows(batch, members(x.unpenalised()), self.estimator.seed))
        return batch, metrics | judged_metrics | describe_tokens(batch)

    def _judged(self, estimator: Estimator, batch: Batch) -> tuple[AdvantageInputs, Advantages, Metrics]:
        """(the estimator's inputs, advantages and returns, metrics) of a batch that the policy itself sampled."""
        metrics: Metrics = {}
        x = advantage_inputs(batch)
        x = replace(x, columns=estimator.columns(batch))
        if self.shapings and len(batch):
            rewards = shaped(self.shapings, shaping_inputs(batch, x, self.max_new_tokens))
            x = rewarded(x, rewards[x.trajectory])
            metrics["reward/shaped_mean"] = float(rewards.mean())
        if estimator.kl_controller is not None:
            x, penalty = _penalised(x, batch, estimator.kl, estimator.kl_controller)
            metrics |= penalty
        estimate, clipped = estimator.advantages(x)
        metrics |= clipped
        if "values" in estimator.metadata.needs:
            metrics |= _value_metrics(x, estimate)
        return x, estimate, metrics

    def _compared(self, batch: Batch) -> tuple[Batch, list[AnyArray] | None]:
        """(the batch with importance weights and mismatch metrics, the masks of tokens that are not rejected).

        Compares the engine with the trainer only if the trainer recomputed the old log-probabilities. The masks are
        None without a correction.
        """
        measurable = self.correction is not None or "old_log_prob" in batch.columns
        if not self.recompute_old or not measurable:
            return batch, None
        old = column(batch, "old_log_prob")
        batch = replace(batch, metrics=measured(batch, old))
        return (batch, None) if self.correction is None else corrected(batch, old, self.correction)

    def _trained(self, batch: Batch) -> Batch:
        """The batch with truncated trajectories masked out if `mask_truncated` is set."""
        if not self.mask_truncated:
            return batch
        rows = zip(batch.experiences, truncated_rows(batch), strict=True)
        return batch.masked([np.full(len(e), not truncated) for e, truncated in rows])

    def state(self) -> dict[str, Any]:
        """The adaptive coefficients, and the reward moments of the shapings."""
        controller = self.estimator.kl_controller if self.estimator else None
        moments = [asdict(moments) for moments in self._moments]
        steered = controller if isinstance(controller, AdaptiveKLController) else None
        coef = {"kl_coef": steered.value, "kl_coef_initial": steered.initial} if steered else {}
        if (entropy := self.entropy_controller) is not None:
            coef |= {"entropy_coef": entropy.value, "entropy_coef_initial": entropy.initial}
        roles = [{name: asdict(moments) for name, moments in roles.items()} for roles in self._roles]
        return coef | ({"moments": moments} if moments else {}) | ({"roles": roles} if roles else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`. Keeps the current value of anything that the state lacks, and of a steered
        coefficient whose initial value in the config has changed since."""
        controller = self.estimator.kl_controller if self.estimator else None
        steered = controller if isinstance(controller, AdaptiveKLController) else None
        if steered and state.get("kl_coef_initial", steered.initial) == steered.initial:
            steered.value = float(state.get("kl_coef", steered.value))
        entropy = self.entropy_controller
        if entropy and state.get("entropy_coef_initial", entropy.initial) == entropy.initial:
            entropy.value = float(state.get("entropy_coef", entropy.value))
        if "moments" in state:
            for moments, saved in zip(self._moments, state["moments"], strict=True):
                vars(moments).update(saved)
        # A state without roles has none to restore: strict would refuse the shapings that have some.
        for roles, saved in zip(self._roles, state.get("roles", ()), strict=bool(state.get("roles"))):
            roles.update({name: Moments(**fields) for name, fields in saved.items()})

    @property
    def _moments(self) -> list[Moments]:
        """The moments of the shapings that have them."""
        return [step.moments for step in self.shapings if step.moments is not None]

    @property
    def _roles(self) -> list[dict[str, Moments]]:
        """The moments by participant of the shapings that have them."""
        return [step.roles for step in self.shapings if step.roles is not None]


def _placed(arrays: Sequence[AnyArray], rows: Sequence[int], batch: Batch) -> list[AnyArray]:
    """One array per experience: these at `rows`, zeros elsewhere."""
    if len(rows) == len(batch):
        return [*arrays]
    placed: list[AnyArray] = [np.zeros(len(e), np.float32) for e in batch.experiences]
    for row, array in zip(rows, arrays, strict=True):
        placed[row] = array
    return placed


def _penalised(
    x: AdvantageInputs, batch: Batch, kl: Callable[[PolicyInputs], Tensor], controller: KlController
) -> tuple[AdvantageInputs, Metrics]:
    """The inputs with the KL penalty subtracted from their rewards. Updates the controller with the measured KL."""
    coef = controller.value
    rewards, current = apply_kl_penalty(
        x.token_level_rewards,
        column(batch, "old_log_prob"),
        column(batch, "ref_log_prob"),
        x.response_mask,
        coef=coef,
        estimator=kl,
    )
    controller.update(current, len(batch))
    penalised = replace(x, token_level_rewards=rewards, token_level_scores=x.token_level_rewards)
    return penalised, {"train/kl_coef": coef, "train/ref_kl": current}


def _value_metrics(x: AdvantageInputs, estimate: Advantages) -> Metrics:
    """The fraction of the returns' variance that the critic explains; empty if the returns have no variance."""
    mask, returns = x.response_mask, estimate.returns.double()
    # A single return has no variance, which `masked_var` refuses.
    if int(mask.sum()) < 2 or not float(variance := masked_var(returns, mask)):
        return {}
    error = torch.where(mask, returns - x.columns["values"].double(), 0.0)
    return {"train/value_explained": 1 - float(masked_var(error, mask) / variance)}
