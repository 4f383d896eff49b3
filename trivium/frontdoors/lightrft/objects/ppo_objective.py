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
from trivium.algorithms.metadata import TokenWeightMetadata, metadata_of
from trivium.algorithms.objective import Term, TokenWeight
from trivium.algorithms.policy_losses.base import PolicyInputs
from trivium.algorithms.sections.policy_gradient import PolicyGradientConfig, policy_gradient
from trivium.algorithms.token_weights import top_entropy
from trivium.errors import ConfigError, UnknownName
from trivium.frontdoors.lightrft.arguments import OPTIONAL, option
from trivium.frontdoors.lightrft.config.algorithm_section import ESTIMATORS, KL_ESTIMATORS, OF_GROUPS, estimated
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.registry import suggest
from trivium.types import AnyArray, Batch

ADVANTAGE_BOUND = 10.0
"""The bound on the absolute advantages in the policy update."""


@dataclass(frozen=True)
class Settings:
    """The constructor's settings of the objective."""

    eps_clip: float
    value_clip: float | None
    gamma: float
    lambd: float
    has_reference: bool
    has_critic: bool
    max_new_tokens: int


def algorithm_of(args: object, settings: Settings) -> GroupAlgorithm:
    """Builds the algorithm from `args` and the constructor's settings.

    Its KL coefficients are 1; the trainer sets the controller's coefficient later (`with_kl`, `policy_objective`).
    Raises ConfigError for invalid or contradicting settings.
    """
    name = str(getattr(args, "advantage_estimator", None) or ("gae" if settings.has_critic else "group_norm"))
    _check(name, args, settings)
    in_loss = bool(option(args, "use_kl_loss"))
    kl: dict[str, Any] = {}
    if settings.has_reference:
        kl = {"coef": 1.0, "place": "loss" if in_loss else "reward", "estimator": _kl_estimator(args)}
    values = {flag: option(args, flag) for flag in OPTIONAL} | {
        "advantage_estimator": name,
        "eps_clip": settings.eps_clip,
        "gamma": settings.gamma,
        "lambd": settings.lambd,
        "generate_max_len": settings.max_new_tokens,
    }
    section = {"kind": "grpo", **estimated(values), "kl": kl}
    try:
        config = PolicyGradientConfig.model_validate(section)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError("the objective that the arguments describe", reasons, "correct them") from error
    algorithm = policy_gradient(config, int(option(args, "seed")))
    policy = next(each for each in algorithm.objectives if isinstance(each, PolicyObjective))
    critic = ValueObjective(settings.value_clip, config.aggregate)
    objectives = (critic, policy) if settings.has_critic else (policy,)
    return replace(algorithm, name=name, objectives=objectives, max_new_tokens=settings.max_new_tokens)


def _check(name: str, args: object, settings: Settings) -> None:
    if name not in ESTIMATORS:
        raise UnknownName(f"args.advantage_estimator {name!r}", "no such estimator", suggest(name, ESTIMATORS))
    if name == "gae" and not settings.has_critic:
        raise ConfigError("the estimator 'gae'", "no critic", "give the trainer a critic, or use another estimator")
    samples = int(getattr(args, "n_samples_per_prompt", 2))
    if name in OF_GROUPS and samples < 2:
        raise ConfigError(
            f"the estimator {name!r}, which compares the completions of a prompt",
            f"n_samples_per_prompt is {samples}",
            "sample at least 2, or use gae or reinforce",
        )
    if option(args, "dynamic_sampling") and samples < 2:
        raise ConfigError(
            "dynamic sampling, which refuses prompts whose completions all earned the same",
            f"n_samples_per_prompt is {samples}",
            "sample at least 2, or leave it out",
        )
    length = int(option(args, "overlong_buffer_len"))
    if option(args, "overlong_buffer") and not 0 < length <= settings.max_new_tokens:
        raise ConfigError(
            f"an overlong buffer of {length} tokens (overlong_buffer_len)",
            f"completions have at most {settings.max_new_tokens} tokens (max_new_tokens)",
            "choose a part of them",
        )
    if option(args, "aux_loss_coef") > 1e-8:
        raise ConfigError(
            "a load-balancing loss (aux_loss_coef)", "no such loss here", "leave it at 0: routers are not balanced"
        )


def _kl_estimator(args: object) -> dict[str, Any]:
    name = str(option(args, "kl_estimator"))
    if name not in KL_ESTIMATORS:
        raise UnknownName(f"args.kl_estimator {name!r}", "no such estimator", suggest(name, KL_ESTIMATORS))
    return dict(KL_ESTIMATORS[name])


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
    objective = next(each for each in algorithm.objectives if isinstance(each, PolicyObjective))
    if objective.kl is not None:
        objective = replace(objective, kl=Term(kl_coef, objective.kl.function, objective.kl.metadata))
    if masked:
        objective = replace(objective, token_weights=(_highest_entropies(1.0),))
    return objective


def critic_objective(algorithm: GroupAlgorithm) -> ValueObjective:
    """Returns the critic's objective."""
    return next(each for each in algorithm.objectives if isinstance(each, ValueObjective))


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
        given = mask & (inputs.policy_version < 0)
        sampled, expert = denominators.sampled, denominators.expert
        own = replace(sampled, expert_tokens=0, expert_sequences=0)
        outputs = super().loss(replace(inputs, response_mask=mask & ~given), own)
        counts = Counts(max(expert.tokens, 1), max(expert.sequences, 1), 1.0)
        imitation = token_mean(-inputs.log_prob, given, counts) * denominators.dp_size
        scale = denominators.tokens / max(sampled.tokens, 1)
        sums = {key: value * scale for key, value in outputs.sums.items()}
        sums["train/ptx_loss"] = imitation.detach() * denominators.tokens
        return LossOutputs(outputs.loss + self.coef * imitation, sums, outputs.maxima)
