"""A stage of a run: its config and where it stands in the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.checkpoint.store import Checkpoint
from trivium.concurrency import usable_cores
from trivium.config import RunConfig
from trivium.protocols import Renderer
from trivium.registry import resolve
from trivium.text.renderer import renderer_of
from trivium.training.ranks import ranks_here
from trivium.types import capabilities_of


@dataclass(frozen=True)
class Stage:
    """One stage of a run and where it stands in it."""

    config: RunConfig
    number: int
    first_version: int
    is_last: bool
    run_dir: Path
    model_dir: Path
    """The model directory that the stage starts from, also for the frozen reference if there is one."""

    @property
    def evaluated(self) -> bool:
        evaluation = self.config.evaluation
        return evaluation.taskset is not None and (self.is_last or evaluation.every > 0)

    @property
    def num_explorers(self) -> int:
        """Explorers that the run starts; 1, for evaluation alone, if the buffer needs none."""
        if capabilities_of(resolve("buffers", self.config.buffer.kind)).explored:
            return self.config.cluster.explorers
        return int(self.evaluated)

    @property
    def threads(self) -> int:
        return self.config.cluster.threads or max(1, usable_cores() // ranks_here())

    @property
    def renderer(self) -> Renderer:
        return renderer_of(self.model_dir, max_image_pixels=self.config.workflow.max_image_pixels)


TrainStage = Callable[[Stage, Checkpoint | None, dict[str, Any]], dict[str, Any]]
"""(stage, checkpoint to continue from, record of the run) -> record: trains one stage to its end."""
