"""verl's object API, over the loop and components of `trivium run`.

Names are imported on first use, because most of them import Ray and torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trivium.errors import MissingPackage

if TYPE_CHECKING:
    from trivium.algorithms import (
        agg_loss,
        compute_entropy_loss,
        compute_policy_loss,
        compute_value_loss,
        get_kl_controller,
        kl_penalty,
    )
    from trivium.algorithms.kl import AdaptiveKLController, FixedKLController
    from trivium.algorithms.stats import masked_mean, masked_sum, masked_var
    from trivium.frontdoors.verl.batch_view import BatchView, DataProto, Scored, living, scored_rows
    from trivium.frontdoors.verl.model_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
    from trivium.frontdoors.verl.orders import AbstractCurriculumSampler, AbstractSampler
    from trivium.frontdoors.verl.registered import (
        get_adv_estimator_fn,
        get_policy_loss_fn,
        register_adv_est,
        register_policy_loss,
    )
    from trivium.frontdoors.verl.resource_pools import ResourcePoolManager, Role
    from trivium.frontdoors.verl.reward_bases import (
        AbstractRewardManager,
        RawRewardFn,
        RewardManagerBase,
        get_event_loop,
        get_reward_manager_cls,
        register,
    )
    from trivium.frontdoors.verl.reward_loading import (
        compute_reward,
        load_compute_score,
        load_reward_manager,
        score_groups,
    )
    from trivium.frontdoors.verl.reward_managers import (
        BatchRewardManager,
        DAPORewardManager,
        NaiveRewardManager,
        PrimeRewardManager,
    )
    from trivium.frontdoors.verl.scorer import default_compute_score
    from trivium.frontdoors.verl.trainer import RayPPOTrainer
    from trivium.frontdoors.verl.worker_group import RayWorkerGroup
    from trivium.text import hf_processor, hf_tokenizer

__all__ = [
    "AbstractCurriculumSampler",
    "AbstractRewardManager",
    "AbstractSampler",
    "ActorRolloutRefWorker",
    "AdaptiveKLController",
    "BatchRewardManager",
    "BatchView",
    "CriticWorker",
    "DAPORewardManager",
    "DataProto",
    "FixedKLController",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RawRewardFn",
    "RayPPOTrainer",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "RewardManagerBase",
    "RewardModelWorker",
    "Role",
    "Scored",
    "agg_loss",
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_reward",
    "compute_value_loss",
    "default_compute_score",
    "get_adv_estimator_fn",
    "get_event_loop",
    "get_kl_controller",
    "get_policy_loss_fn",
    "get_reward_manager_cls",
    "hf_processor",
    "hf_tokenizer",
    "kl_penalty",
    "living",
    "load_compute_score",
    "load_reward_manager",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "register",
    "register_adv_est",
    "register_policy_loss",
    "score_groups",
    "scored_rows",
]

_MODULES = {
    "trivium.algorithms": (
        "agg_loss",
        "compute_entropy_loss",
        "compute_policy_loss",
        "compute_value_loss",
        "get_kl_controller",
        "kl_penalty",
    ),
    "trivium.algorithms.kl": ("AdaptiveKLController", "FixedKLController"),
    "trivium.algorithms.stats": ("masked_mean", "masked_var", "masked_sum"),
    "trivium.frontdoors.verl.batch_view": ("BatchView", "DataProto", "Scored", "living", "scored_rows"),
    "trivium.frontdoors.verl.resource_pools": ("ResourcePoolManager", "Role"),
    "trivium.frontdoors.verl.reward_loading": (
        "compute_reward",
        "load_compute_score",
        "load_reward_manager",
        "score_groups",
    ),
    "trivium.frontdoors.verl.reward_bases": (
        "AbstractRewardManager",
        "RawRewardFn",
        "RewardManagerBase",
        "get_event_loop",
        "get_reward_manager_cls",
        "register",
    ),
    "trivium.frontdoors.verl.reward_managers": (
        "BatchRewardManager",
        "DAPORewardManager",
        "NaiveRewardManager",
        "PrimeRewardManager",
    ),
    "trivium.frontdoors.verl.registered": (
        "get_adv_estimator_fn",
        "get_policy_loss_fn",
        "register_adv_est",
        "register_policy_loss",
    ),
    "trivium.frontdoors.verl.scorer": ("default_compute_score",),
    "trivium.frontdoors.verl.orders": ("AbstractCurriculumSampler", "AbstractSampler"),
    "trivium.frontdoors.verl.trainer": ("RayPPOTrainer",),
    "trivium.frontdoors.verl.worker_group": ("RayWorkerGroup",),
    "trivium.frontdoors.verl.model_workers": ("ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"),
    "trivium.text": ("hf_processor", "hf_tokenizer"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            try:
                return getattr(import_module(module), name)
            except ModuleNotFoundError as error:
                if error.name != "ray":
                    raise
                raise MissingPackage("ray", "ray", f"trivium.frontdoors.verl.{name}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
