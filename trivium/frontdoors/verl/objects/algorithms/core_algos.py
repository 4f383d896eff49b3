"""verl's `core_algos`: advantage estimators and losses with verl's names, arguments and results.

Every function converts its arguments and calls one of `trivium.algorithms`, which holds the formula. Tensors are
(B, R): B sequences, R tokens of the longest response. Values outside `response_mask` are zero. `config` is any object
or mapping with verl's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

import numpy.typing as npt

from trivium.algorithms import AdaptiveKLController as AdaptiveKLController
from trivium.algorithms import Advantages
from trivium.algorithms import FixedKLController as FixedKLController
from trivium.algorithms import agg_loss as agg_loss
from trivium.algorithms import compute_entropy_loss as compute_entropy_loss
from trivium.algorithms import compute_policy_loss as compute_policy_loss
from trivium.algorithms import compute_value_loss as compute_value_loss
from trivium.algorithms import get_kl_controller as get_kl_controller
from trivium.algorithms import kl_penalty as kl_penalty
from trivium.algorithms.advantages.base import AdvantageInputs
from trivium.algorithms.advantages.components import gdpo
from trivium.algorithms.advantages.group import gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, rloo
from trivium.algorithms.advantages.returns import gae, reinforce_plus_plus, remax
from trivium.algorithms.advantages.tokens import optimal_token_baseline, tir_optimal_token_baseline
from trivium.algorithms.batches import numbered
from trivium.algorithms.resampling import Resampling
from trivium.errors import ConfigError, DataError
from trivium.frontdoors.plain_values import read
from trivium.frontdoors.verl.config.config_table import PF_PPO
from trivium.frontdoors.verl.objects.algorithms.loss_modes import first_value, policy_loss_function, sampled_kl
from trivium.frontdoors.verl.objects.algorithms.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from trivium.models.late import torch
from trivium.registry import name_of, suggest

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]
Index = Union[Sequence[Any], npt.NDArray[Any], "Tensor"]
"""The name of each row's group (B,)."""
FunctionT = TypeVar("FunctionT", bound=Function)


class RegistryError(ConfigError, ValueError):
    """A name that is in use, or unknown. verl raises ValueError for them."""


class AdvantageEstimator(StrEnum):
    """The estimators of verl by name."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


ADV_ESTIMATOR_REGISTRY: dict[str, Function] = {}
"""Name -> estimator: those of this module, and those that `register_adv_est` adds."""
POLICY_LOSS_REGISTRY: dict[str, Function] = {}
"""Name -> policy loss: those of this module, and those that `register_policy_loss` adds."""


def register_adv_est(name_or_enum: str | Enum) -> Callable[[FunctionT], FunctionT]:
    """Registers a function as a value of `algorithm.adv_estimator`. Raises RegistryError for a name in use."""
    return lambda function: _registered(ADV_ESTIMATOR_REGISTRY, name_or_enum, function)


def register_policy_loss(name: str | Enum) -> Callable[[FunctionT], FunctionT]:
    """Registers a function as a value of `actor.policy_loss.loss_mode`. Raises RegistryError for a name in use."""
    return lambda function: _registered(POLICY_LOSS_REGISTRY, name, function)


def get_adv_estimator_fn(name_or_enum: str | Enum) -> Function:
    """Returns the estimator of a name. Raises RegistryError for an unknown name."""
    return _lookup(ADV_ESTIMATOR_REGISTRY, "advantage estimator", "register_adv_est", name_or_enum)


def get_policy_loss_fn(name: str | Enum) -> Function:
    """Returns the policy loss of a name. Raises RegistryError for an unknown name."""
    return _lookup(POLICY_LOSS_REGISTRY, "policy loss", "register_policy_loss", name)


def _registered(functions: dict[str, Function], name: str | Enum, function: FunctionT) -> FunctionT:
    key = _key(name)
    taken = functions.get(key)
    if taken is not None and (taken.__module__, taken.__qualname__) != (function.__module__, function.__qualname__):
        raise RegistryError(f"register {key!r}", f"the name stands for {name_of(taken)}", "choose another name")
    functions[key] = function
    return function


def _lookup(functions: Mapping[str, Function], what: str, decorator: str, name: str | Enum) -> Function:
    key = _key(name)
    if key not in functions:
        raise RegistryError(
            f"the {what} {key!r}",
            "no function is registered under this name",
            f"{suggest(key, functions)}; or import the module that uses @{decorator}({key!r}) first",
        )
    return functions[key]


def _key(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


# --------------------------------------------------------------------------- advantage estimators


def _inputs(rewards: Tensor, mask: Tensor, index: Index | None, **columns: Tensor | None) -> AdvantageInputs:
    """The inputs of an estimator. Rows with an equal entry in `index` are a group; without it, each row is one."""
    rows = torch.arange(len(rewards))
    group = rows if index is None else torch.from_numpy(numbered(_hashable(index)))
    given = {name: column for name, column in columns.items() if column is not None}
    return AdvantageInputs(rewards, mask.bool(), group, rows, given)


def _hashable(index: Any) -> list[Any]:
    return index.tolist() if hasattr(index, "tolist") else list(index)


def _pair(done: Advantages) -> tuple[Tensor, Tensor]:
    return done.advantages.detach(), done.returns.detach()


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Returns (whitened advantages, returns) of `trivium.algorithms.advantages.returns.gae`."""
    x = _inputs(token_level_rewards, response_mask, None, values=values)
    return _pair(gae(x, gamma=float(gamma), lam=float(lam)))


@register_adv_est(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, the same) of `trivium.algorithms.advantages.group.grpo`. `index` (B,) names the groups."""
    del config
    x = _inputs(token_level_rewards, response_mask, index)
    return _pair(grpo(x, norm_by_std=norm_adv_by_std_in_grpo, epsilon=epsilon))


compute_grpo_vectorized_outcome_advantage = register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)(
    compute_grpo_outcome_advantage
)


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, the same) of `trivium.algorithms.advantages.group.grpo_passk`."""
    by_std = bool(read(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo))
    x = _inputs(token_level_rewards, response_mask, index)
    return _pair(grpo_passk(x, norm_by_std=by_std, epsilon=epsilon))


def _of_groups(kind: AdvantageEstimator, estimator: Callable[[AdvantageInputs], Advantages]) -> Function:
    """Returns the function of an estimator that reads rewards and groups alone, registered under its name."""

    def _estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Index,
        epsilon: float = 1e-6,
        config: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return _pair(estimator(_inputs(token_level_rewards, response_mask, index)))

    _estimate.__name__ = _estimate.__qualname__ = f"compute_{kind}_outcome_advantage"
    _estimate.__doc__ = f"Returns (advantages, the same) of the estimator `{kind}`. `index` (B,) names the groups."
    return register_adv_est(kind)(_estimate)


compute_reinforce_plus_plus_baseline_outcome_advantage = _of_groups(
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE, reinforce_plus_plus_baseline
)
compute_rloo_outcome_advantage = _of_groups(AdvantageEstimator.RLOO, rloo)
compute_rloo_vectorized_outcome_advantage = _of_groups(AdvantageEstimator.RLOO_VECTORIZED, partial(rloo, alone="zero"))
"""As `compute_rloo_outcome_advantage`, but a group of one gets 0."""
compute_opo_outcome_advantage = _of_groups(AdvantageEstimator.OPO, opo)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Returns (whitened advantages, returns) of `trivium.algorithms.advantages.returns.reinforce_plus_plus`, with
    `config.gamma`."""
    x = _inputs(token_level_rewards, response_mask, None)
    return _pair(reinforce_plus_plus(x, gamma=float(read(config, "gamma", 1.0))))


@register_adv_est(AdvantageEstimator.REMAX)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns) of `trivium.algorithms.advantages.returns.remax`. `reward_baselines` (B,) are the
    rewards of the greedy responses."""
    baselines = reward_baselines.unsqueeze(-1).expand(response_mask.shape)
    return _pair(remax(_inputs(token_level_rewards, response_mask, None, greedy_reward=baselines)))


@register_adv_est(AdvantageEstimator.GPG)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, the same) of `trivium.algorithms.advantages.group.gpg`. As in verl, the batch determines
    `alpha`, and the argument has no effect."""
    del alpha
    return _pair(gpg(_inputs(token_level_rewards, response_mask, index), f_norm=f_norm))


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
    epsilon: float = 1e-8,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns) of `trivium.algorithms.advantages.tokens.optimal_token_baseline`."""
    columns = {"log_prob": old_log_probs, "sum_pi_squared": sum_pi_squared, "rollout_is_weights": rollout_is_weights}
    x = _inputs(token_level_rewards, response_mask, index, **columns)
    return _pair(optimal_token_baseline(x, handle_zero_tail=handle_zero_tail))


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns) of `trivium.algorithms.advantages.tokens.tir_optimal_token_baseline`."""
    columns = {"log_prob": old_log_probs, "sum_pi_squared": sum_pi_squared, "rollout_is_weights": rollout_is_weights}
    x = _inputs(token_level_rewards, response_mask, index, **columns)
    return _pair(tir_optimal_token_baseline(x, handle_zero_tail=handle_zero_tail))


@register_adv_est(AdvantageEstimator.GDPO)
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (whitened advantages, the same) of `trivium.algorithms.advantages.components.gdpo`.

    `config.gdpo_reward_keys` names the columns of `non_tensor_batch` with the components of the reward,
    `config.gdpo_reward_weights` their weights; without keys, the total reward is the only component. Raises DataError
    for a missing column, and ConfigError unless each key has one weight.
    """
    keys, columns = read(config, "gdpo_reward_keys") or [], non_tensor_batch or {}
    if missing := [key for key in keys if key not in columns]:
        found = f"the columns are {', '.join(columns) or 'none'}"
        raise DataError(f"the components {', '.join(missing)} of the reward", found, "return them from the scorer")
    components = {key: torch.tensor([float(value) for value in columns[key]]) for key in keys}
    weights = read(config, "gdpo_reward_weights") or [1.0] * len(keys)
    if len(weights) != len(keys):
        found = f"gdpo_reward_keys has {len(keys)} name(s)"
        raise ConfigError(f"gdpo_reward_weights {weights!r}", found, "give one weight for each name")
    x = _inputs(token_level_rewards, response_mask, index)
    x = replace(x, components=components or {"reward": token_level_rewards.sum(-1)})
    by_name = dict(zip(keys, weights, strict=True)) or None
    return _pair(gdpo(x, weights=by_name, norm_by_std=norm_adv_by_std_in_grpo, epsilon=epsilon))


def compute_pf_ppo_reweight_data(data: Any, reweight_method: str = "pow", weight_pow: float = 2.0) -> Any:
    """Returns as many rows of a DataProto as it has, drawn with replacement by `trivium.algorithms.resampling` and
    torch's generator. It has `token_level_scores` (B, R). Raises RegistryError for an unknown method."""
    if reweight_method not in PF_PPO:
        do = suggest(reweight_method, PF_PPO)
        raise RegistryError(f"the method {reweight_method!r} of PF-PPO", "no such method", do)
    resampling = Resampling.model_validate({"weights": PF_PPO[reweight_method], "power": weight_pow})
    scores = data.batch["token_level_scores"].sum(-1).double().cpu()
    return data[resampling.draws(scores.numpy(), torch.rand(len(scores), dtype=torch.float64).numpy())]


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Returns the scores less `kl_ratio` times the KL estimate k1 of each token."""
    return token_level_scores - kl_ratio * kl_penalty(old_log_prob, ref_log_prob, "k1")


kl_penalty_forward = kl_penalty
"""The estimate of `kl_penalty`. verl separates it from the gradient that a `+` in the name selects."""


# --------------------------------------------------------------------------- policy losses


def _shipped(mode: str) -> Function:
    """Returns the function of a `loss_mode`, registered under that name."""
    return register_policy_loss(mode)(policy_loss_function(mode))


compute_policy_loss_vanilla = _shipped("vanilla")
compute_policy_loss_gspo = _shipped("gspo")
compute_policy_loss_sapo = _shipped("sapo")
compute_policy_loss_gpg = _shipped("gpg")
compute_policy_loss_clip_cov = _shipped("clip_cov")
compute_policy_loss_kl_cov = _shipped("kl_cov")
compute_policy_loss_geo_mean = _shipped("geo_mean")
compute_policy_loss_cispo = _shipped("cispo")
compute_policy_loss_dppo_tv = _shipped("dppo_tv")
compute_policy_loss_dppo_kl = _shipped("dppo_kl")
compute_policy_loss_dro = _shipped("dro")


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Returns (loss, metrics) of the policy loss `reinforce` of `trivium.algorithms`. `actor/ppo_kl` compares with the
    rollout policy."""
    loss, _ = compute_policy_loss_gpg(
        rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    return loss, {"actor/ppo_kl": sampled_kl(rollout_log_prob, log_prob, response_mask)}


@register_policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Returns (loss, metrics) with the rollout policy as the old one: `old_log_prob` is the rollout's.

    `config.policy_loss.rollout_correction` has the arguments of `compute_rollout_correction_and_rejection_mask`, and
    `loss_type`: `ppo_clip`, whose ratio is the importance weight, or `reinforce`, with importance weights. The argument
    `rollout_is_weights` has no effect. Raises ConfigError without that section, or for another type.
    """
    section = first_value(config, ["policy_loss.rollout_correction"])
    loss_type = read(section, "loss_type", "ppo_clip")
    if section is None or loss_type not in ("ppo_clip", "reinforce"):
        found = "no such section" if section is None else f"loss_type {loss_type!r}"
        do = "set loss_type to ppo_clip or reinforce"
        raise ConfigError("policy_loss.rollout_correction of the loss bypass_mode", found, do)
    names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "rollout_is_batch_normalize")
    options = {name: value for name in names if (value := read(section, name)) is not None}
    weights, kept, corrections = compute_rollout_correction_and_rejection_mask(
        log_prob.detach(), old_log_prob, response_mask, **options
    )
    arguments = (old_log_prob, log_prob, advantages, kept, loss_agg_mode, config)
    if loss_type == "reinforce":
        given = None if weights is None else weights.batch["rollout_is_weights"]
        loss, metrics = compute_policy_loss_reinforce(*arguments, given)
    else:
        loss, metrics = cast("tuple[Tensor, dict[str, Any]]", compute_policy_loss_vanilla(*arguments))
    return loss, {**metrics, **corrections}


BUILT_IN = frozenset(ADV_ESTIMATOR_REGISTRY.values()) | frozenset(POLICY_LOSS_REGISTRY.values())
"""The functions of this module that the registries hold."""
