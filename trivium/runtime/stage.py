"""A stage of a run: its config and its position in the run, also as plain data for other processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from trivium.checkpoint.store import Checkpoint
from trivium.config import RewardConfig, RunConfig
from trivium.config.recording import scores_observations
from trivium.foundation.concurrency import ProcessLife, usable_cores
from trivium.models.backbone.huggingface import HuggingFaceModel
from trivium.planning.choices import threads_of
from trivium.planning.memory_estimate import is_evaluated, is_explored
from trivium.planning.plan import StagePlan
from trivium.protocols import Renderer, TaskSource
from trivium.runtime.run_dir import hold_with
from trivium.text.renderer import renderer_of
from trivium.training.launched import launched_ranks, ranks_here


@dataclass(frozen=True)
class Stage:
    """One stage of a run and its position in the run."""

    config: RunConfig
    number: int
    first_version: int
    is_last: bool
    run_dir: Path
    model_dir: Path
    """The model directory that the stage starts from, also for the frozen reference if there is one."""
    sources: dict[str, TaskSource] = field(
        default_factory=dict[str, TaskSource], compare=False, repr=False, kw_only=True
    )
    """The task sources that this process has built for the stage, by taskset: its roles share them (`tasks_of`)."""

    @classmethod
    def of(cls, plan: StagePlan, run_dir: Path, model_dir: Path) -> Self:
        return cls(plan.config, plan.number, plan.first_version, plan.is_last, run_dir, model_dir)

    def judged_by(self, rewards: tuple[RewardConfig, ...]) -> Stage:
        """The stage with other rewards."""
        return replace(self, config=self.config.model_copy(update={"rewards": rewards}))

    @property
    def explored(self) -> bool:
        """Whether it learns from rollouts of its policy."""
        return is_explored(self.config)

    @property
    def evaluated(self) -> bool:
        return is_evaluated(self.config, is_last=self.is_last)

    @property
    def num_explorers(self) -> int:
        """The number of explorers that the run starts; 1, for evaluation alone, if the buffer needs none."""
        return self.config.cluster.explorers if self.explored else int(self.evaluated)

    @property
    def threads(self) -> int:
        return threads_of(self.config, usable_cores(), ranks_here(), own_process=self.own_process)

    @property
    def own_process(self) -> bool:
        """Whether the train engine runs in a separate process (`train.own_process`)."""
        local = self.config.cluster.kind == "local" and launched_ranks() == 1
        return local and getattr(self.config.train, "own_process", False)

    @cached_property
    def renderer(self) -> Renderer:
        pixels, model = self.config.workflow.max_image_pixels, self.config.model
        return renderer_of(
            self.model_dir,
            max_image_pixels=pixels,
            tool_calls=getattr(model, "tool_calls", "auto"),
            roles=getattr(model, "roles", None),
            today=self.config.run.date,
            strip_special_tokens=isinstance(model, HuggingFaceModel.Config) and model.strip_special_tokens,
        )


def evaluates_alike(one: RunConfig, other: RunConfig) -> bool:
    """Whether an evaluation of the same weights gives the same result in two stages."""

    def evaluation(config: RunConfig) -> tuple[object, ...]:
        tasks = config.tasks.get(config.evaluation.taskset or "")
        section = config.evaluation.model_dump(exclude={"every", "held_out"})
        return tasks, section, config.rewards, config.workflow, config.engine, scores_observations(config)

    return evaluation(one) == evaluation(other)


@dataclass(frozen=True)
class StageSpec:
    """A stage as plain data."""

    config: dict[str, Any]
    number: int
    first_version: int
    is_last: bool
    run_dir: Path
    model_dir: Path
    owner: ProcessLife = field(default_factory=lambda: ProcessLife.of(os.getpid()))
    """The process of the run."""

    @classmethod
    def of(cls, stage: Stage) -> StageSpec:
        # Fields that the user did not set stay unset; some checks depend on that.
        config = stage.config.model_dump(mode="json", exclude_unset=True)
        paths = stage.run_dir.resolve(), stage.model_dir.resolve()
        return cls(config, stage.number, stage.first_version, stage.is_last, *paths)

    def stage(self) -> Stage:
        """Returns the stage, with its config validated again: this process imports the users' files. From this call on,
        it holds the run directory, and ends with the run's process."""
        hold_with(self.owner, self.run_dir)
        config = RunConfig.model_validate(self.config)
        return Stage(config, self.number, self.first_version, self.is_last, self.run_dir, self.model_dir)


TrainStage = Callable[[Stage, Checkpoint | None, dict[str, Any]], dict[str, Any]]
"""(stage, checkpoint to continue from, record of the run) -> record: trains one stage to its end."""
