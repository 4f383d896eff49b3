"""Builds the core's algorithm from the trainer's arguments: estimator, losses, shapings, filters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from trivium.algorithms import GroupAlgorithm, PolicyObjective, ValueObjective
from trivium.algorithms.aggregation import Counts, token_mean
from trivium.algorithms.batches import padded, ragged
from trivium.algorithms.kl import FixedKLController
from trivium.algorithms.losses.base import PolicyInputs
from trivium.algorithms.metadata import TokenWeightMetadata, metadata_of
from trivium.algorithms.objective import Term, TokenWeight
from trivium.algorithms.sections.policy_gradient import PolicyGradientConfig, policy_gradient
from trivium.algorithms.token_weights import top_entropy
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft.algorithm_section import conflicts, section_of
from trivium.frontdoors.lightrft.arguments import option
from trivium.frontdoors.tables import refuse
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.types import AnyArray, Batch

# LightRFT's trainer clamps at 10, whatever its arguments.
ADVANTAGE_BOUND = 10.0
"""The bound on the absolute advantages in the policy update."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """The constructor's settings of the objective."""

    eps_clip: float
    value_clip: float | None
    gamma: float
    lambd: float
    has_reference: bool
    has_critic: bool
    max_new_tokens: int


def algorithm_of(args: object, settings: ObjectiveSettings) -> GroupAlgorithm:
    """Builds the algorithm from `args` and the constructor's settings.

    Its KL coefficients are 1; the trainer sets the controller's coefficient later (`with_kl`, `policy_objective`).
    Raises ConfigError for invalid or contradicting settings.
    """
    values = _values(args, settings)
    if values["advantage_estimator"] == "gae" and not settings.has_critic:
        raise ConfigError("the estimator 'gae'", "no critic", "give the trainer a critic, or use another estimator")
    refuse(conflicts(values), "arguments whose values fit together")
    try:
        config = PolicyGradientConfig.model_validate(section_of(values))
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError("the objective that the arguments describe", reasons, "correct them") from error
    algorithm = policy_gradient(config, int(option(args, "seed")))
    policy = next(objective for objective in algorithm.objectives if isinstance(objective, PolicyObjective))
    critic = ValueObjective(settings.value_clip, config.aggregate)
    objectives = (critic, policy) if settings.has_critic else (policy,)
    return replace(
        algorithm, name=values["advantage_estimator"], objectives=objectives, max_new_tokens=settings.max_new_tokens
    )


_OF_THE_ALGORITHM = (
    *("kl_estimator", "use_kl_loss", "use_cpg_loss", "use_gspo", "loss_agg_mode", "advantages_norm", "advantage_clip"),
    *("no_advantage_std_norm", "reward_running_norm", "reward_running_norm_minus_mean", "reward_clip"),
    *("overlong_buffer", "overlong_buffer_len", "overlong_buffer_penalty_factor", "dynamic_sampling"),
    "dynamic_sampling_refills",
)
"""Attributes of `args` that the algorithm's section follows from."""


def _values(args: object, settings: ObjectiveSettings) -> dict[str, Any]:
    """Returns the arguments that describe the algorithm."""
    estimator = getattr(args, "advantage_estimator", None) or ("gae" if settings.has_critic else "group_norm")
    return {
        **{name: option(args, name) for name in _OF_THE_ALGORITHM},
        "advantage_estimator": str(estimator),
        # `fit` requires it, the constructor does not: 2 is accepted by the estimators of groups.
        "n_samples_per_prompt": int(getattr(args, "n_samples_per_prompt", 2)),
        "has_reference": settings.has_reference,
        "eps_clip": settings.eps_clip,
        "gamma": settings.gamma,
        "lambd": settings.lambd,
        "max_new_tokens": settings.max_new_tokens,
    }


def with_kl(algorithm: GroupAlgorithm, coef: float) -> GroupAlgorithm:
    """Returns the algorithm with this coefficient of the KL penalty in the rewards, if it has one."""
    estimator = algorithm.estimator
    if estimator is None or estimator.kl_controller is None:
        return algorithm
    return replace(algorithm, estimator=replace(estimator, kl_controller=FixedKLController(coef)))


def policy_objective(algorithm: GroupAlgorithm, kl_coef: float, *, masked: bool) -> PolicyObjective:
    """Returns the policy's objective with this coefficient of the KL loss, if it has one.

    With `masked`, the policy loss covers the tokens of an entropy mask (the columns of `with_mask`).
    """
    objective = next(objective for objective in algorithm.objectives if isinstance(objective, PolicyObjective))
    if objective.kl is not None:
        objective = replace(objective, kl=Term(kl_coef, objective.kl.function, objective.kl.metadata))
    if masked:
        objective = replace(objective, token_weights=(_highest_entropies(1.0),))
    return objective


def critic_objective(algorithm: GroupAlgorithm) -> ValueObjective:
    """Returns the critic's objective."""
    return next(objective for objective in algorithm.objectives if isinstance(objective, ValueObjective))


def _highest_entropies(ratio: float) -> TokenWeight:
    metadata = metadata_of(top_entropy, TokenWeightMetadata, "top_entropy")
    return TokenWeight(partial(top_entropy, fraction=ratio, per="sequence"), metadata, narrow=True)


def high_entropy_mask(entropy: torch.Tensor, action_mask: torch.Tensor | None, ratio: float) -> torch.Tensor:
    """Returns a (B, A) mask of the fraction `ratio` of each sequence's valid tokens with the highest entropies.

    Selects at least one token per sequence, and all valid tokens for a ratio outside (0, 1). `entropy` is (B, A).
    Without `action_mask`, all tokens are valid.
    """
    mask = torch.ones_like(entropy, dtype=torch.bool) if action_mask is None else action_mask.bool()
    if not 0 < ratio < 1:
        return mask
    values = torch.where(mask, entropy, 0.0)
    x = PolicyInputs(torch.zeros_like(values), mask, {}, torch.zeros_like(mask), values)
    # Of each sequence, as in LightRFT; the paper chooses over the batch.
    return _highest_entropies(ratio).weights(x).bool() & mask


def with_mask(batch: Batch, masks: list[AnyArray]) -> Batch:
    """Adds the columns that restrict the policy loss to these tokens, (L,) bool for each row."""
    numbers = [np.asarray(mask, np.float32) for mask in masks]
    return batch.with_columns(counted=numbers, token_weight=numbers)


def approximate_kl(algorithm: GroupAlgorithm, batch: Batch) -> list[AnyArray]:
    """Returns the KL estimate of each token against the reference, 0 outside the mask."""
    assert algorithm.estimator is not None
    mask = padded([e.response_mask for e in batch.experiences]).bool()
    old, ref = (padded(batch.columns[name]) for name in ("old_log_prob", "ref_log_prob"))
    x = PolicyInputs(old, mask, {"ref_log_prob": ref}, torch.zeros_like(mask))
    return ragged(torch.where(mask, algorithm.estimator.kl(x), 0.0), batch)


@dataclass(frozen=True)
class WithPretraining(PolicyObjective):
    """Adds `coef` times the mean next-token loss of supervised rows to the policy's objective, in one optimizer step.

    Supervised rows have the version `types.EXPERT_VERSION`.
    """

    coef: float = 0.0

    @property
    def on_policy(self) -> str:
        return "none: it imitates as well"

    def loss(self, inputs: LossInputs, denominators: LossDenominators) -> LossOutputs:
        """Returns this micro-batch's part of both losses. Each metric is a mean over the tokens of its loss."""
        assert inputs.log_prob is not None
        mask = inputs.response_mask.bool()
        supervised = mask & (inputs.policy_version < 0)
        sampled, expert = denominators.sampled, denominators.expert
        of_rollouts = replace(sampled, expert_tokens=0, expert_sequences=0)
        outputs = super().loss(replace(inputs, response_mask=mask & ~supervised), of_rollouts)
        counts = Counts(max(expert.tokens, 1), max(expert.sequences, 1), 1.0)
        imitation = token_mean(-inputs.log_prob, supervised, counts) * denominators.dp_size
        # The learner divides sums by the tokens of both losses.
        scale = denominators.tokens / max(sampled.tokens, 1)
        sums = {key: value * scale for key, value in outputs.sums.items()}
        sums["train/ptx_loss"] = imitation.detach() * denominators.tokens
        return LossOutputs(outputs.loss + self.coef * imitation, sums, outputs.maxima)
