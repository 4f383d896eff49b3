"""verl's object API, over the loop and components of `trivium run`: every name that its users import, in one place.

A script for verl changes its import lines alone: `from trivium.frontdoors.verl import RayPPOTrainer, core_algos`. Names
are imported on first use, because most of them import Ray and torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trivium.errors import MissingPackage
from trivium.registry import lazy_names

if TYPE_CHECKING:  # `__getattr__` reads the names and their modules from this block
    from trivium.algorithms import (
        AdaptiveKLController,
        FixedKLController,
        agg_loss,
        compute_entropy_loss,
        compute_policy_loss,
        compute_value_loss,
        get_kl_controller,
        kl_penalty,
    )
    from trivium.algorithms.stats import masked_mean, masked_sum, masked_var
    from trivium.frontdoors.verl.config import hydra
    from trivium.frontdoors.verl.config.hydra import DictConfig, ListConfig, OmegaConf, open_dict
    from trivium.frontdoors.verl.main_ppo import (
        TaskRunner,
        need_critic,
        need_reference_policy,
        need_reward_model,
        run_ppo,
        validate_config,
    )
    from trivium.frontdoors.verl.objects.algorithms import core_algos, rollout_corr_helper
    from trivium.frontdoors.verl.objects.algorithms.core_algos import (
        AdvantageEstimator,
        get_adv_estimator_fn,
        get_policy_loss_fn,
        register_adv_est,
        register_policy_loss,
    )
    from trivium.frontdoors.verl.objects.batches import metric_utils, protocol
    from trivium.frontdoors.verl.objects.batches.batch_steps import (
        apply_kl_penalty,
        compute_advantage,
        compute_response_mask,
    )
    from trivium.frontdoors.verl.objects.batches.batch_view import BatchView, Scored, living, scored_rows
    from trivium.frontdoors.verl.objects.batches.metric_utils import (
        compute_data_metrics,
        compute_throughout_metrics,
        compute_timing_metrics,
        process_validation_metrics,
        reduce_metrics,
    )
    from trivium.frontdoors.verl.objects.batches.protocol import (
        DataProto,
        DataProtoItem,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )
    from trivium.frontdoors.verl.objects.datasets.orders import AbstractCurriculumSampler, AbstractSampler
    from trivium.frontdoors.verl.objects.datasets.rl_dataset import (
        RLHFDataset,
        collate_fn,
        create_rl_dataset,
        create_rl_sampler,
        get_dataset_class,
    )
    from trivium.frontdoors.verl.objects.launching import (
        auto_set_device,
        copy_to_local,
        get_ppo_ray_runtime_env,
        is_cuda_available,
        load_extern_object,
        load_extern_type,
    )
    from trivium.frontdoors.verl.objects.resource_pools import RayResourcePool, ResourcePoolManager, Role
    from trivium.frontdoors.verl.objects.tool_classes import (
        BaseInteraction,
        BaseTool,
        OpenAIFunctionToolSchema,
        ToolResponse,
        function_tool,
    )
    from trivium.frontdoors.verl.objects.trainer import RayPPOTrainer
    from trivium.frontdoors.verl.objects.workers.dispatch import (
        Dispatch,
        Execute,
        make_nd_compute_dataproto_dispatch_fn,
    )
    from trivium.frontdoors.verl.objects.workers.model_workers import (
        ActorRolloutRefWorker,
        AsyncActorRolloutRefWorker,
        CriticWorker,
        RewardModelWorker,
    )
    from trivium.frontdoors.verl.objects.workers.worker import Worker
    from trivium.frontdoors.verl.objects.workers.worker_group import (
        DataProtoFuture,
        RayClassWithInitArgs,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )
    from trivium.frontdoors.verl.reward_managers import (
        BatchRewardManager,
        DAPORewardManager,
        NaiveRewardManager,
        PrimeRewardManager,
    )
    from trivium.frontdoors.verl.rewards.reward_bases import (
        AbstractRewardManager,
        RawRewardFn,
        RewardManagerBase,
        get_event_loop,
        get_reward_manager_cls,
        register,
    )
    from trivium.frontdoors.verl.rewards.reward_loading import (
        compute_reward,
        load_compute_score,
        load_reward_manager,
        score_groups,
    )
    from trivium.frontdoors.verl.rewards.scorer import default_compute_score
    from trivium.text import hf_processor, hf_tokenizer

__all__ = [
    "AbstractCurriculumSampler",
    "AbstractRewardManager",
    "AbstractSampler",
    "ActorRolloutRefWorker",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "AsyncActorRolloutRefWorker",
    "BaseInteraction",
    "BaseTool",
    "BatchRewardManager",
    "BatchView",
    "CriticWorker",
    "DAPORewardManager",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "DictConfig",
    "Dispatch",
    "Execute",
    "FixedKLController",
    "ListConfig",
    "NaiveRewardManager",
    "OmegaConf",
    "OpenAIFunctionToolSchema",
    "PrimeRewardManager",
    "RLHFDataset",
    "RawRewardFn",
    "RayClassWithInitArgs",
    "RayPPOTrainer",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "RewardManagerBase",
    "RewardModelWorker",
    "Role",
    "Scored",
    "TaskRunner",
    "ToolResponse",
    "Worker",
    "agg_loss",
    "apply_kl_penalty",
    "auto_set_device",
    "collate_fn",
    "compute_advantage",
    "compute_data_metrics",
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_response_mask",
    "compute_reward",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "compute_value_loss",
    "copy_to_local",
    "core_algos",
    "create_colocated_worker_cls",
    "create_rl_dataset",
    "create_rl_sampler",
    "default_compute_score",
    "fold_batch_dim",
    "function_tool",
    "get_adv_estimator_fn",
    "get_dataset_class",
    "get_event_loop",
    "get_kl_controller",
    "get_policy_loss_fn",
    "get_ppo_ray_runtime_env",
    "get_reward_manager_cls",
    "hf_processor",
    "hf_tokenizer",
    "hydra",
    "is_cuda_available",
    "kl_penalty",
    "living",
    "load_compute_score",
    "load_extern_object",
    "load_extern_type",
    "load_reward_manager",
    "make_nd_compute_dataproto_dispatch_fn",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "metric_utils",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
    "open_dict",
    "pad_dataproto_to_divisor",
    "process_validation_metrics",
    "protocol",
    "reduce_metrics",
    "register",
    "register_adv_est",
    "register_policy_loss",
    "rollout_corr_helper",
    "run_ppo",
    "score_groups",
    "scored_rows",
    "unfold_batch_dim",
    "unpad_dataproto",
    "validate_config",
]


def __getattr__(name: str) -> Any:
    module = lazy_names(__file__).get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(module)
        return getattr(home, name) if hasattr(home, name) else import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingPackage("ray", "ray", f"trivium.frontdoors.verl.{name}") from error
