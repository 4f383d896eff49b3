"""verl's object API, over the loop and components of `trivium run`: every name that its users import, in one place.

A script for verl changes its import lines, and the line that reads its config. Names are imported on first use, because
most of them import Ray and torch.

Other files name the modules beside this one: `kind` strings of saved configs, an entry point, command lines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trivium.foundation.errors import MissingPackage
from trivium.foundation.registry import lazy_names

if TYPE_CHECKING:  # `__getattr__` reads the names and their modules from this block
    from trivium.algorithms import AdaptiveKLController as AdaptiveKLController
    from trivium.algorithms import FixedKLController as FixedKLController
    from trivium.algorithms import agg_loss as agg_loss
    from trivium.algorithms import compute_entropy_loss as compute_entropy_loss
    from trivium.algorithms import compute_policy_loss as compute_policy_loss
    from trivium.algorithms import compute_value_loss as compute_value_loss
    from trivium.algorithms import get_kl_controller as get_kl_controller
    from trivium.algorithms import kl_penalty as kl_penalty
    from trivium.algorithms.stats import masked_mean as masked_mean
    from trivium.algorithms.stats import masked_sum as masked_sum
    from trivium.algorithms.stats import masked_var as masked_var
    from trivium.frontdoors.verl.main_ppo import TaskRunner as TaskRunner
    from trivium.frontdoors.verl.main_ppo import config_of as config_of
    from trivium.frontdoors.verl.main_ppo import need_critic as need_critic
    from trivium.frontdoors.verl.main_ppo import need_reference_policy as need_reference_policy
    from trivium.frontdoors.verl.main_ppo import need_reward_model as need_reward_model
    from trivium.frontdoors.verl.main_ppo import run_ppo as run_ppo
    from trivium.frontdoors.verl.main_ppo import validate_config as validate_config
    from trivium.frontdoors.verl.main_ppo import with_defaults as with_defaults
    from trivium.frontdoors.verl.objects import core_algos as core_algos
    from trivium.frontdoors.verl.objects.batches.batch_view import BatchView as BatchView
    from trivium.frontdoors.verl.objects.batches.batch_view import Scored as Scored
    from trivium.frontdoors.verl.objects.batches.batch_view import living as living
    from trivium.frontdoors.verl.objects.batches.batch_view import scored_rows as scored_rows
    from trivium.frontdoors.verl.objects.batches.protocol import DataProto as DataProto
    from trivium.frontdoors.verl.objects.batches.protocol import DataProtoItem as DataProtoItem
    from trivium.frontdoors.verl.objects.core_algos import AdvantageEstimator as AdvantageEstimator
    from trivium.frontdoors.verl.objects.core_algos import get_adv_estimator_fn as get_adv_estimator_fn
    from trivium.frontdoors.verl.objects.core_algos import get_policy_loss_fn as get_policy_loss_fn
    from trivium.frontdoors.verl.objects.core_algos import register_adv_est as register_adv_est
    from trivium.frontdoors.verl.objects.core_algos import register_policy_loss as register_policy_loss
    from trivium.frontdoors.verl.objects.datasets.rl_dataset import RLHFDataset as RLHFDataset
    from trivium.frontdoors.verl.objects.datasets.rl_dataset import collate_fn as collate_fn
    from trivium.frontdoors.verl.objects.datasets.rl_dataset import create_rl_dataset as create_rl_dataset
    from trivium.frontdoors.verl.objects.datasets.rl_dataset import create_rl_sampler as create_rl_sampler
    from trivium.frontdoors.verl.objects.datasets.rl_dataset import get_dataset_class as get_dataset_class
    from trivium.frontdoors.verl.objects.datasets.samplers import AbstractCurriculumSampler as AbstractCurriculumSampler
    from trivium.frontdoors.verl.objects.datasets.samplers import AbstractSampler as AbstractSampler
    from trivium.frontdoors.verl.objects.launching import auto_set_device as auto_set_device
    from trivium.frontdoors.verl.objects.launching import copy_to_local as copy_to_local
    from trivium.frontdoors.verl.objects.launching import get_ppo_ray_runtime_env as get_ppo_ray_runtime_env
    from trivium.frontdoors.verl.objects.launching import is_cuda_available as is_cuda_available
    from trivium.frontdoors.verl.objects.launching import load_extern_object as load_extern_object
    from trivium.frontdoors.verl.objects.launching import load_extern_type as load_extern_type
    from trivium.frontdoors.verl.objects.resource_pools import ResourcePoolManager as ResourcePoolManager
    from trivium.frontdoors.verl.objects.resource_pools import Role as Role
    from trivium.frontdoors.verl.objects.tool_classes import BaseInteraction as BaseInteraction
    from trivium.frontdoors.verl.objects.tool_classes import BaseTool as BaseTool
    from trivium.frontdoors.verl.objects.tool_classes import OpenAIFunctionToolSchema as OpenAIFunctionToolSchema
    from trivium.frontdoors.verl.objects.tool_classes import ToolResponse as ToolResponse
    from trivium.frontdoors.verl.objects.tool_classes import function_tool as function_tool
    from trivium.frontdoors.verl.objects.trainer import RayPPOTrainer as RayPPOTrainer
    from trivium.frontdoors.verl.objects.workers.model_workers import ActorRolloutRefWorker as ActorRolloutRefWorker
    from trivium.frontdoors.verl.objects.workers.model_workers import (
        AsyncActorRolloutRefWorker as AsyncActorRolloutRefWorker,
    )
    from trivium.frontdoors.verl.objects.workers.model_workers import CriticWorker as CriticWorker
    from trivium.frontdoors.verl.objects.workers.model_workers import RewardModelWorker as RewardModelWorker
    from trivium.frontdoors.verl.objects.workers.worker import Worker as Worker
    from trivium.frontdoors.verl.objects.workers.worker_group import RayWorkerGroup as RayWorkerGroup
    from trivium.frontdoors.verl.reward_managers import BatchRewardManager as BatchRewardManager
    from trivium.frontdoors.verl.reward_managers import DAPORewardManager as DAPORewardManager
    from trivium.frontdoors.verl.reward_managers import NaiveRewardManager as NaiveRewardManager
    from trivium.frontdoors.verl.reward_managers import PrimeRewardManager as PrimeRewardManager
    from trivium.frontdoors.verl.rewards.reward_bases import AbstractRewardManager as AbstractRewardManager
    from trivium.frontdoors.verl.rewards.reward_bases import RawRewardFn as RawRewardFn
    from trivium.frontdoors.verl.rewards.reward_bases import RewardManagerBase as RewardManagerBase
    from trivium.frontdoors.verl.rewards.reward_bases import get_event_loop as get_event_loop
    from trivium.frontdoors.verl.rewards.reward_bases import get_reward_manager_cls as get_reward_manager_cls
    from trivium.frontdoors.verl.rewards.reward_bases import register as register
    from trivium.frontdoors.verl.rewards.reward_loading import compute_reward as compute_reward
    from trivium.frontdoors.verl.rewards.reward_loading import load_compute_score as load_compute_score
    from trivium.frontdoors.verl.rewards.reward_loading import load_reward_manager as load_reward_manager
    from trivium.frontdoors.verl.rewards.reward_loading import score_groups as score_groups
    from trivium.frontdoors.verl.rewards.scorer import default_compute_score as default_compute_score
    from trivium.text import hf_processor as hf_processor
    from trivium.text import hf_tokenizer as hf_tokenizer


def __getattr__(name: str) -> Any:
    module = lazy_names(__file__).get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(module)
        return getattr(home, name) if hasattr(home, name) else import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        # Another missing module is not what this name needs: its own error says more.
        if error.name != "ray":
            raise
        raise MissingPackage("ray", "ray", f"trivium.frontdoors.verl.{name}") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *lazy_names(__file__)])
