"""The object API of Trinity-RFT: what its users import, over the same parts that `trivium run` uses."""

from __future__ import annotations

from trivium.frontdoors.trinity.checkpoint_monitor import CheckpointMonitor
from trivium.frontdoors.trinity.train_engine import TrainEngineWrapper, get_trainer_wrapper
from trivium.synchronizer import Synchronizer
from trivium.trainer import Trainer
from trivium.types import Experiences, RunningStatus, SaveStrategy, SyncMethod, SyncStyle

__all__ = [
    "CheckpointMonitor",
    "Experiences",
    "RunningStatus",
    "SaveStrategy",
    "SyncMethod",
    "SyncStyle",
    "Synchronizer",
    "TrainEngineWrapper",
    "Trainer",
    "get_trainer_wrapper",
]
