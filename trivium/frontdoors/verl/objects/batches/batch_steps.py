"""Steps of verl's training loop as functions of a DataProto: KL in the reward, the response mask, advantages."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor

from trivium.algorithms import apply_kl_penalty as penalised
from trivium.algorithms.kl import KlController
from trivium.algorithms.metadata import KlMetadata, resolve_function
from trivium.config import plugin
from trivium.frontdoors.plain_values import read
from trivium.frontdoors.verl.objects.algorithms.core_algos import (
    AdvantageEstimator,
    compute_pf_ppo_reweight_data,
    get_adv_estimator_fn,
)
from trivium.frontdoors.verl.objects.batches.protocol import DataProto
from trivium.frontdoors.verl.registered import called
from trivium.types import Metrics

_OPTIONAL = ("values", "reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
"""Tensors that some estimators read."""


def apply_kl_penalty(data: DataProto, kl_ctrl: KlController, kl_penalty: str = "kl") -> tuple[DataProto, Metrics]:
    """Sets `token_level_rewards` to the scores less the KL penalty, updates the controller, and returns (the data,
    metrics). The data has `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask` (B, R)."""
    tensors, coef = data.batch, kl_ctrl.value
    estimator, _ = resolve_function("kl_estimators", plugin("kl_estimators")({"kind": kl_penalty}), KlMetadata)
    rewards, current = penalised(
        tensors["token_level_scores"],
        tensors["old_log_probs"],
        tensors["ref_log_prob"],
        tensors["response_mask"],
        coef=coef,
        estimator=estimator,
    )
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    tensors["token_level_rewards"] = rewards
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coef}


def compute_response_mask(data: DataProto) -> Tensor:
    """Returns the part of `attention_mask` that belongs to the responses (B, R)."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :]


def compute_advantage(
    data: DataProto,
    adv_estimator: str | Enum,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Sets `advantages` and `returns` (B, R), and returns the data. It has `token_level_rewards`, the column `uid` that
    names groups and, if the estimator reads them, `values` or `reward_baselines`. `num_repeat` has no effect. With
    `config.use_pf_ppo` and GAE, the rows are drawn anew (`core_algos.compute_pf_ppo_reweight_data`)."""
    del num_repeat
    tensors = data.batch
    if "response_mask" not in tensors:
        tensors["response_mask"] = compute_response_mask(data)
    arguments: dict[str, Any] = {
        "token_level_rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "config": config,
    }
    arguments |= {name: tensors[name] for name in _OPTIONAL if name in tensors}
    arguments["non_tensor_batch"] = data.non_tensor_batch
    if "uid" in data.non_tensor_batch:
        arguments["index"] = data.non_tensor_batch["uid"]
    estimated = called(get_adv_estimator_fn(adv_estimator), str(adv_estimator), arguments)
    tensors["advantages"], tensors["returns"] = estimated
    if adv_estimator == AdvantageEstimator.GAE and read(config, "use_pf_ppo", False):
        options = read(config, "pf_ppo", {})
        names = ("reweight_method", "weight_pow")
        given = {name: value for name in names if (value := read(options, name)) is not None}
        return compute_pf_ppo_reweight_data(data, **given)
    return data
