"""The plan that follows from a config and a machine: batch arithmetic, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trivium.config.recording import recorded_in, shape_in
from trivium.config.saved import as_yaml
from trivium.config.schema import Config, RunConfig
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


class StagePlan(Config):
    """The arithmetic of one stage."""

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


class Plan(Config):
    """The plan of a run: printed and saved, never changed."""

    stages: tuple[StagePlan, ...]
    total_steps: int
    threads: int

    @property
    def needed(self) -> dict[str, int]:
        """MiB of each kind of memory that the largest stage needs; empty if the size of a model is unknown."""
        needed = [stage.memory["needed"] for stage in self.stages if stage.memory is not None]
        return {kind: max(each.get(kind, 0) for each in needed) for each in needed for kind in each}

    def to_yaml(self) -> str:
        return as_yaml(self.model_dump(mode="json"), width=1000)


def _stages(
    config: RunConfig, machine: Machine, ranks: int, tasks: Sequence[TaskTokens]
) -> Iterator[tuple[RunConfig, BatchPlan, MemoryPlan | None]]:
    """Each stage with the cut of its steps and its memory. `tasks` are those of the stages, if they were read."""
    stages = config.stage_configs()
    for number, stage in enumerate(stages):
        read = tasks[number] if tasks else TaskTokens()
        yield plan_stage(stage, ranks, machine, read, is_last=number == len(stages) - 1)


def with_choices(config: RunConfig, machine: Machine, ranks: int = 1, tasks: Sequence[TaskTokens] = ()) -> RunConfig:
    """The config with the limits that it leaves out (`plan_stage`): the smallest of all stages. The config that is
    saved with a run records them, and a resumed run keeps them: sums of floats may depend on them in the last bits."""
    tokens, rows = set[int | None](), set[int | None]()
    for stage, _, _ in _stages(config, machine, ranks, tasks):
        tokens.add(getattr(stage.train, "max_tokens_per_micro_batch", None))
        rows.add(getattr(stage.engine, "max_rows", None))
    # A section of another kind, which has no such limit, says nothing about those of the others.
    return with_limits(config, *(min((each for each in limits if each), default=None) for limits in (tokens, rows)))


def plan_run(
    config: RunConfig, cores: int, machine: Machine | None = None, ranks: int = 1, tasks: Sequence[TaskTokens] = ()
) -> Plan:
    """The batch arithmetic and the memory of every stage, on `cores` cores and `ranks` training ranks."""
    machine = machine or Machine()
    stages: list[StagePlan] = []
    step = 0
    for name, (stage, batch, memory) in zip(config.stage_names, _stages(config, machine, ranks, tasks), strict=True):
        schedule, evaluation, is_last = stage.schedule, stage.evaluation, len(stages) + 1 == len(config.stage_names)
        ends = evaluation.held_out is not None or (evaluation.taskset is not None and is_last)
        rolled_out = schedule.groups_per_step - stage.buffer.strategy.num_stored(schedule.groups_per_step)
        trajectories = trajectories_per_step(stage, schedule.groups_per_step - rolled_out)
        stages.append(
            StagePlan(
                name=name,
                first_step=step + 1,
                last_step=step + schedule.steps,
                groups_per_step=schedule.groups_per_step,
                rolled_out_groups_per_step=rolled_out,
                trajectories_per_step=trajectories,
                max_response_tokens_per_step=trajectories * stage.engine.sampling.max_new_tokens,
                max_staleness=stage.max_staleness,
                weights=f"{stage.sync.style} style by {stage.sync.method}, every {stage.sync.interval} step(s)",
                slots=schedule.steps * rolled_out,
                algorithm=stage.algorithm.describe(stage),
                learning_rate=getattr(getattr(stage.train, "optimizer", None), "lr", None),
                batch=batch,
                vision=vision_in(stage),
                evaluated={"every": evaluation.every if ends or evaluation.taskset else 0, "ends": ends},
                recorded=recorded_in(stage),
                memory=None if memory is None else memory.summary(machine),
                communication=plan_communication(stage, batch, machine),
            )
        )
        step += schedule.steps
    return Plan(stages=tuple(stages), total_steps=step, threads=config.cluster.threads or cores)


def choices_of(
    config: RunConfig, cores: int, machine: Machine, ranks: int = 1, tasks: Sequence[TaskTokens] = ()
) -> str:
    """What Trivium chooses by the machine, for each stage whose model has a known size, as YAML."""
    shown: list[dict[str, str]] = []
    for stage, batch, _ in _stages(config, machine, ranks, tasks):
        shape, train = shape_in(stage), stage.train
        if shape is None or not hasattr(train, "device"):
            continue
        own = stage.cluster.kind == "local" and ranks == 1 and getattr(train, "own_process", False)
        threads = threads_of(stage, cores, ranks, own_process=own)
        ours = getattr(stage.engine, "kind", None) == "torch"
        engine = planned_engine(stage, batch, machine) if ours else None
        trainer = planned(getattr(train, "device", "cpu"), getattr(train, "dtype", "float32"), machine)
        parallel = ranks == 1 and shape.vision is None
        budget = batch.tokens_per_micro_batch
        made = choices(stage, shape.parameters, threads, engine, trainer, parallel=parallel, max_tokens=budget)
        shown.append({name: f"{each.value} ({each.rule}; benchmarks/{each.benchmark})" for name, each in made.items()})
    return as_yaml({"choices": shown}, width=1000)


def refuse_too_large(config: RunConfig, machine: Machine, ranks: int = 1, tasks: Sequence[TaskTokens] = ()) -> None:
    """Raises ConfigError for a stage that does not fit the machine. A running Ray cluster is not measured."""
    if config.cluster.address is not None:
        return
    for number, (_, _, memory) in enumerate(_stages(config, machine, ranks, tasks)):
        if memory is not None:
            refuse_what_cannot_fit(memory, machine, f" for stage {number}" if config.stages else "")
