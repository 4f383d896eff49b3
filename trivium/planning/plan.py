"""The plan that follows from a config and a machine: made once, printed, saved and passed on. It is never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trivium.config.recording import recorded_in, shape_in
from trivium.config.saved import as_yaml
from trivium.config.schema import BufferConfig, Config, RunConfig
from trivium.planning.choices import choices, threads_of
from trivium.planning.machine import Machine
from trivium.planning.memory_estimate import (
    BatchPlan,
    MemoryPlan,
    TaskTokens,
    plan_communication,
    plan_stage,
    planned,
    planned_engine,
    refuse_what_cannot_fit,
    trajectories_per_step,
    vision_in,
    with_limits,
)
from trivium.planning.model_shape import ModelShape


class StageText(Config):
    """The arithmetic of one stage, as it is printed and saved."""

    name: str = ""
    first_step: int
    last_step: int
    groups_per_step: int
    rolled_out_groups_per_step: int
    trajectories_per_step: int
    max_response_tokens_per_step: int
    max_staleness: int
    weights: str
    slots: int
    algorithm: dict[str, str]
    """The algorithm, and its values that follow from the rest of the config."""
    learning_rate: float | None = None
    """The peak; None if nothing is trained with an optimizer of the config's."""
    batch: BatchPlan
    """How a train step is cut."""
    vision: str | None
    """Which parts of a vision-language model are trained; None for a model that reads text only, or of unknown
    size."""
    evaluated: dict[str, int | bool]
    """`every` so many train steps, 0 for none, and whether at the `ends` of the stage."""
    recorded: str | None = None
    """What rollouts record beside tokens and log-probabilities, and its size; None if nothing."""
    memory: dict[str, Any] | None
    """An estimate in MiB; None if the size of the model is unknown."""
    communication: dict[str, Any] | None = None
    """What a rank sends, if ranks split the layers (`train.parallel`); None if they do not, or for an unknown size."""


class PlanText(Config):
    """The plan of a run, as it is printed and saved."""

    stages: tuple[StageText, ...]
    total_steps: int
    threads: int


@dataclass(frozen=True)
class StagePlan:
    """What follows from the config of one stage."""

    config: RunConfig
    """The stage's, as it follows from the saved config."""
    name: str
    number: int
    first_version: int
    is_last: bool
    machine: Machine
    shape: ModelShape | None
    """Of the policy; None if its size is unknown."""
    batch: BatchPlan
    """How a train step is cut."""
    memory: MemoryPlan | None
    """None if the size of the model is unknown."""

    @property
    def last_version(self) -> int:
        return self.first_version + self.config.schedule.steps

    @property
    def trainer(self) -> tuple[str, str]:
        """(device type, data type) of training."""
        train = self.config.train
        return planned(getattr(train, "device", "cpu"), getattr(train, "dtype", "float32"), self.machine)

    @property
    def engine(self) -> tuple[str, str]:
        """(device type, data type) of sampling."""
        return planned_engine(self.config, self.batch, self.machine)

    def described(self) -> StageText:
        stage, schedule, evaluation = self.config, self.config.schedule, self.config.evaluation
        ends = evaluation.held_out is not None or (evaluation.taskset is not None and self.is_last)
        rolled_out = schedule.groups_per_step - stage.buffer.strategy.num_stored(schedule.groups_per_step)
        trajectories = trajectories_per_step(stage, schedule.groups_per_step - rolled_out)
        return StageText(
            name=self.name,
            first_step=self.first_version + 1,
            last_step=self.last_version,
            groups_per_step=schedule.groups_per_step,
            rolled_out_groups_per_step=rolled_out,
            trajectories_per_step=trajectories,
            max_response_tokens_per_step=trajectories * stage.engine.sampling.max_new_tokens,
            max_staleness=stage.max_staleness,
            weights=f"{stage.sync.style} style by {stage.sync.method}, every {stage.sync.interval} step(s)",
            slots=schedule.steps * rolled_out,
            algorithm=stage.algorithm.describe(stage),
            learning_rate=getattr(getattr(stage.train, "optimizer", None), "lr", None),
            batch=self.batch,
            vision=vision_in(stage),
            evaluated={"every": evaluation.every if ends or evaluation.taskset else 0, "ends": ends},
            recorded=recorded_in(stage),
            memory=None if self.memory is None else self.memory.summary(self.machine),
            communication=plan_communication(stage, self.batch, self.machine),
        )

    def choices(self, cores: int) -> dict[str, str] | None:
        """What Trivium chooses by the machine, with the rule of each choice; None for a model of unknown size."""
        train, ranks = self.config.train, self.batch.ranks
        if self.shape is None or not hasattr(train, "device"):
            return None
        lora = getattr(train, "lora", None)
        trained = None if lora is None else self.shape.adapter(lora.rank, lora.adapted(self.shape.layers))
        own_process = self.config.cluster.kind == "local" and ranks == 1 and getattr(train, "own_process", False)
        by_name = choices(
            self.config,
            self.shape.parameters,
            threads_of(self.config, cores, ranks, own_process=own_process),
            self.engine if getattr(self.config.engine, "kind", None) == "torch" else None,
            self.trainer,
            trained=self.shape.parameters if trained is None else trained,
            parallel=ranks == 1 and self.shape.vision is None,
            max_tokens=self.batch.tokens_per_micro_batch,
        )
        return {
            name: f"{choice.value} ({choice.rule}; benchmarks/{choice.benchmark})" for name, choice in by_name.items()
        }


@dataclass(frozen=True)
class Plan:
    """The plan of a run on a machine."""

    config: RunConfig
    """With the limits that the user's config leaves out. The config that is saved with a run records them, and a
    resumed run keeps them: sums of floats may depend on them in the last bits."""
    stages: tuple[StagePlan, ...]
    machine: Machine
    cores: int

    @property
    def buffers(self) -> list[BufferConfig]:
        """Of each stage."""
        return [stage.config.buffer for stage in self.stages]

    @cached_property
    def text(self) -> PlanText:
        """What is printed and saved."""
        stages = tuple(stage.described() for stage in self.stages)
        return PlanText(
            stages=stages, total_steps=stages[-1].last_step, threads=self.config.cluster.threads or self.cores
        )

    def to_yaml(self) -> str:
        return as_yaml(self.text.model_dump(mode="json"), width=1000)

    def choices(self) -> str:
        """What Trivium chooses by the machine, for each stage whose model has a known size, as YAML."""
        by_stage = [stage.choices(self.cores) for stage in self.stages]
        return as_yaml({"choices": [stage for stage in by_stage if stage is not None]}, width=1000)

    @property
    def needed(self) -> dict[str, int]:
        """MiB of each kind of memory that the largest stage needs; empty if the size of a model is unknown."""
        needed = [stage.memory.summary(self.machine)["needed"] for stage in self.stages if stage.memory is not None]
        return {kind: max(stage.get(kind, 0) for stage in needed) for stage in needed for kind in stage}

    def refuse_too_large(self) -> None:
        """Raises ConfigError for a stage that does not fit the machine. A running Ray cluster is not measured."""
        if self.config.cluster.address is not None:
            return
        for stage in self.stages:
            if stage.memory is not None:
                where = f" for stage {stage.number}" if self.config.stages else ""
                refuse_what_cannot_fit(stage.memory, self.machine, where)


def plan_run(
    config: RunConfig, cores: int, machine: Machine | None = None, ranks: int = 1, tasks: Sequence[TaskTokens] = ()
) -> Plan:
    """The plan of a run on `cores` cores and `ranks` training ranks. `tasks` are those of the stages, if they were
    read. The limits that the config leaves out are the smallest of all stages (`plan_stage`)."""
    machine = machine or Machine()
    stages = _stages(config, machine, ranks, tasks)
    tokens = {getattr(stage.config.train, "max_tokens_per_micro_batch", None) for stage in stages}
    rows = {getattr(stage.config.engine, "max_rows", None) for stage in stages}
    # A section of another kind, which has no such limit, says nothing about those of the others.
    limits = [min((limit for limit in values if limit), default=None) for values in (tokens, rows)]
    with_all = with_limits(config, *limits)
    if max(len(tokens), len(rows)) > 1:  # the limits of one stage hold for the others
        stages = _stages(with_all, machine, ranks, tasks)
    # A stage trains with the limits that are saved, so a resumed run has the same: one whose section sets null, or has
    # another kind than that of the run, takes over no limit.
    saved = zip(stages, with_all.stage_configs(), strict=True)
    return Plan(with_all, tuple(replace(stage, config=config) for stage, config in saved), machine, cores)


def _stages(config: RunConfig, machine: Machine, ranks: int, tasks: Sequence[TaskTokens]) -> list[StagePlan]:
    stages, configs, version = list[StagePlan](), config.stage_configs(), 0
    for number, (name, stage) in enumerate(zip(config.stage_names, configs, strict=True)):
        is_last = number == len(configs) - 1
        stage_tasks = tasks[number] if tasks else TaskTokens()
        limited, batch, memory = plan_stage(stage, ranks, machine, stage_tasks, is_last=is_last)
        planned = StagePlan(limited, name, number, version, is_last, machine, shape_in(stage), batch, memory)
        stages.append(planned)
        version = planned.last_version
    return stages
