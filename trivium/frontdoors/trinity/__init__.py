"""The object API of Trinity-RFT: the names that its users import, built on the parts that `trivium run` uses.

Names are imported on first use, because most of them import torch; to translate a config needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.foundation.registry import lazy_module, lazy_names

if TYPE_CHECKING:  # `__getattr__` reads the names and their modules from this block
    from trivium.frontdoors.trinity.config.config_object import Config as Config
    from trivium.frontdoors.trinity.config.config_object import load_config as load_config
    from trivium.frontdoors.trinity.config.registries import MONITOR as MONITOR
    from trivium.frontdoors.trinity.config.registries import REWARD_FUNCTIONS as REWARD_FUNCTIONS
    from trivium.frontdoors.trinity.config.registries import SAMPLE_STRATEGY as SAMPLE_STRATEGY
    from trivium.frontdoors.trinity.config.registries import WORKFLOWS as WORKFLOWS
    from trivium.frontdoors.trinity.monitor_views import get_logger as get_logger
    from trivium.frontdoors.trinity.monitor_views import prefix_metrics as prefix_metrics
    from trivium.frontdoors.trinity.objects.boards.checkpoint_monitor import CheckpointMonitor as CheckpointMonitor
    from trivium.frontdoors.trinity.objects.boards.synchronizer import Synchronizer as Synchronizer
    from trivium.frontdoors.trinity.objects.experiences import EID as EID
    from trivium.frontdoors.trinity.objects.experiences import Experience as Experience
    from trivium.frontdoors.trinity.objects.experiences import Experiences as Experiences
    from trivium.frontdoors.trinity.objects.sample_strategies import DefaultSampleStrategy as DefaultSampleStrategy
    from trivium.frontdoors.trinity.objects.sample_strategies import SampleStrategy as SampleStrategy
    from trivium.frontdoors.trinity.objects.train_engine import TrainEngineWrapper as TrainEngineWrapper
    from trivium.frontdoors.trinity.objects.trainer import Trainer as Trainer
    from trivium.frontdoors.trinity.objects.verl_wrapper import VerlPPOTrainerWrapper as VerlPPOTrainerWrapper
    from trivium.frontdoors.trinity.objects.verl_wrapper import get_trainer_wrapper as get_trainer_wrapper
    from trivium.frontdoors.trinity.objects.workflow_api import MultiTurnWorkflow as MultiTurnWorkflow
    from trivium.frontdoors.trinity.objects.workflow_api import RewardPropagationWorkflow as RewardPropagationWorkflow
    from trivium.frontdoors.trinity.objects.workflow_api import SimpleWorkflow as SimpleWorkflow
    from trivium.frontdoors.trinity.objects.workflow_api import StepWiseRewardWorkflow as StepWiseRewardWorkflow
    from trivium.frontdoors.trinity.objects.workflow_api import Task as Task
    from trivium.frontdoors.trinity.objects.workflow_api import Workflow as Workflow
    from trivium.frontdoors.trinity.objects.workflow_model import ModelWrapper as ModelWrapper
    from trivium.types import RunningStatus as RunningStatus
    from trivium.types import SaveStrategy as SaveStrategy
    from trivium.types import SyncMethod as SyncMethod
    from trivium.types import SyncStyle as SyncStyle

__all__ = [*lazy_names(__file__)]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy_module(__name__, __file__)
