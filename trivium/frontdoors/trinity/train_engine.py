"""TrainEngineWrapper: a train engine under the names that Trinity-RFT gives its verbs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trivium.checkpoint.save_monitor import CheckpointMonitor, save_step_now
from trivium.config import RunConfig
from trivium.loops import train_step
from trivium.protocols import TrainEngine
from trivium.runtime.build import build_single_train_engine
from trivium.types import Experiences, Metrics


def get_trainer_wrapper(config: RunConfig) -> TrainEngineWrapper:
    """The train engine that a config describes (in its first stage), to be driven without a Trainer.

    Nothing is loaded before its `prepare()`. It saves under `weights` in the run directory.
    """
    engine = build_single_train_engine(config)
    saves = CheckpointMonitor(
        config.checkpoint.save_strategy, str(Path(config.run.dir) / "weights"), deadline_s=config.sync.deadline_s
    )
    return TrainEngineWrapper(engine, saves)


@dataclass
class TrainEngineWrapper:
    """Trains, saves and publishes one engine."""

    engine: TrainEngine
    saves: CheckpointMonitor
    """Where `save_checkpoint` and `save_state_dict` save. A run's own checkpoints, which hold more than the engine
    knows, are those of `trivium.checkpoint.store`."""

    def prepare(self) -> None:
        """Loads models and optimizers. Called once, before anything else."""
        self.engine.prepare()

    @property
    def train_step_num(self) -> int:
        """How many train steps have been taken."""
        return self.engine.version

    def train_step(self, experiences: Experiences) -> tuple[bool, Metrics]:
        """One step on these groups; (whether to go on, metrics)."""
        return True, train_step(self.engine, experiences, self.engine.algorithm)

    def save_checkpoint(self, block_until_saved: bool = False) -> None:
        """Saves everything this engine needs to go on, through the CheckpointMonitor `saves`. On return it is complete,
        whatever `block_until_saved` says."""
        save_step_now(self.saves, self.engine.version, self.engine.save)

    def sync_weight(self) -> bool:
        """Offers the current weights to the explorers. Whether they were delivered, or lie where they can be fetched.
        Blocks."""
        return self.engine.sync_weight()

    def upload_state_dict(self) -> None:
        """`sync_weight` with method `memory`."""
        self.sync_weight()

    def save_state_dict(self) -> None:
        """Saves the policy's weights alone, through the same monitor."""
        save_step_now(self.saves, self.engine.version, self.engine.save_weights, is_state_dict=True)
