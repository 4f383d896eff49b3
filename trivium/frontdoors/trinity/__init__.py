"""The object API of Trinity-RFT: the names that its users import, built on the parts that `trivium run` uses."""

from __future__ import annotations

from trivium.frontdoors.trinity.config.config_object import Config, load_config
from trivium.frontdoors.trinity.config.registries import MONITOR, REWARD_FUNCTIONS, SAMPLE_STRATEGY, WORKFLOWS
from trivium.frontdoors.trinity.monitor_views import get_logger, prefix_metrics
from trivium.frontdoors.trinity.objects.boards.checkpoint_monitor import CheckpointMonitor
from trivium.frontdoors.trinity.objects.boards.synchronizer import Synchronizer
from trivium.frontdoors.trinity.objects.experiences import EID, Experience, Experiences
from trivium.frontdoors.trinity.objects.sample_strategies import DefaultSampleStrategy, SampleStrategy
from trivium.frontdoors.trinity.objects.train_engine import TrainEngineWrapper
from trivium.frontdoors.trinity.objects.trainer import Trainer
from trivium.frontdoors.trinity.objects.verl_wrapper import VerlPPOTrainerWrapper, get_trainer_wrapper
from trivium.frontdoors.trinity.objects.workflow_api import (
    MultiTurnWorkflow,
    RewardPropagationWorkflow,
    SimpleWorkflow,
    StepWiseRewardWorkflow,
    Task,
    Workflow,
)
from trivium.frontdoors.trinity.objects.workflow_model import ModelWrapper
from trivium.types import RunningStatus, SaveStrategy, SyncMethod, SyncStyle

__all__ = [
    "EID",
    "MONITOR",
    "REWARD_FUNCTIONS",
    "SAMPLE_STRATEGY",
    "WORKFLOWS",
    "CheckpointMonitor",
    "Config",
    "DefaultSampleStrategy",
    "Experience",
    "Experiences",
    "ModelWrapper",
    "MultiTurnWorkflow",
    "RewardPropagationWorkflow",
    "RunningStatus",
    "SampleStrategy",
    "SaveStrategy",
    "SimpleWorkflow",
    "StepWiseRewardWorkflow",
    "SyncMethod",
    "SyncStyle",
    "Synchronizer",
    "Task",
    "TrainEngineWrapper",
    "Trainer",
    "VerlPPOTrainerWrapper",
    "Workflow",
    "get_logger",
    "get_trainer_wrapper",
    "load_config",
    "prefix_metrics",
]
