"""The config of a run: base classes of sections, the sections whose rules involve others, and `RunConfig`.

A plugin section names its class by `kind`; that class owns the section's fields. The string under a field is its help.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from datetime import date as Day
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

from trivium.config.fields import changeable, free, plugin_path
from trivium.config.merging import is_mapping, merged
from trivium.config.sections import (
    BaseConfig,
    CheckpointSection,
    ClusterSection,
    EvaluationSection,
    SamplingConfig,
    ServeSection,
    SyncSection,
    ThresholdConfig,
)
from trivium.foundation.errors import ConfigError, Problem, TriviumError, UnknownName, user_place
from trivium.foundation.registry import CATALOGUE, describe, is_only_here, resolve, suggest
from trivium.types import SERVED, capabilities_of


class Config(BaseConfig):
    """Base of the sections whose rules involve the whole config."""

    def with_usual(self, **values: object) -> Self:
        """A copy with these values. They still count as unset: a stage that differs in other sections has its own."""
        section = self.model_copy()
        for name, value in values.items():
            object.__setattr__(section, name, value)  # the section is frozen for everything else
        return section

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """A rule: reports what is wrong with this section, given the others of `run`. `where` is its path."""
        yield from ()

    def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """A rule: reports why this machine cannot run the section. Applied before a run, not when a config is read."""
        yield from ()

    def warnings(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """A rule: reports what is allowed and probably a mistake. Applied before a run."""
        yield from ()

    def on_this_machine(self) -> Self:
        """The section with every `auto` resolved for this machine."""
        return self


class Plugin(Config):
    """Base of a section whose class is picked by `kind`."""

    kind: str
    """Short name, `package.module:Name`, or `file.py:Name` relative to the config file."""

    @property
    def short_name(self) -> str:
        """The kind's last part: the name of its object in metrics."""
        return self.kind.rpartition(":")[2].rpartition(".")[2]


class NestedError(ValueError):
    """Carries an error of Trivium, or the errors of a section, through pydantic's collection of errors."""

    def __init__(self, error: TriviumError | ValidationError, owner: type[BaseModel] | None = None) -> None:
        super().__init__(str(error))
        self.error, self.owner = error, owner


def plugin(kind: str, base: type[Plugin] = Plugin, default_name: str | None = None) -> Callable[[Any], Any]:
    """A validator that turns `{kind: <name>, ...}` into the Config of the class that the registry has under
    `kind` and that name.

    The class (or value) may offer `configure(data) -> Config`, or have a `Config`; a plain function has none and gets
    `base`.
    """

    def validate(data: object) -> object:
        if isinstance(data, Plugin):
            return data
        if isinstance(data, str):
            data = {"kind": data}
        if not is_mapping(data):
            raise ValueError(f"expected a mapping with `kind`, found {type(data).__name__}")
        section: dict[str, Any] = dict(data)
        name = section.setdefault("kind", default_name)
        if not isinstance(name, str):
            raise NestedError(UnknownName("a section with `kind`", "no kind", suggest("", CATALOGUE[kind])))
        section["kind"] = name = plugin_path(name)
        target = _resolved(kind, name)
        owner, configure = getattr(target, "Config", base), getattr(target, "configure", None)
        try:
            return owner.model_validate(section) if configure is None else configure(section)
        except (TriviumError, ValidationError) as error:
            raise NestedError(error, owner) from error

    return validate


def _resolved(kind: str, name: str) -> object:
    """The object that a section's `kind` names. An exception while a user's module is imported is reported with its
    place."""
    try:
        return describe(kind, name)
    except TriviumError as error:
        raise NestedError(error) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = user_place((frame.filename, frame.lineno or 0, frame.name) for frame in frames)
        cause = f"{type(error).__name__}: {error}" + (f", in {place}" if place else "")
        raise NestedError(ConfigError(f"import {name}", cause, "fix the module")) from error


def build(kind: str, config: Plugin, **context: Any) -> Any:
    """The object that a plugin section describes: `Target(config, **context)`, or the plain function itself."""
    target = resolve(kind, config.kind)
    return target(config, **context) if isinstance(target, type) else target


# --------------------------------------------------------------------------- sections

WITH_FIXED_VERSIONS = "in a deterministic run with staleness"
"""Describes a run with `has_fixed_versions`, in problems."""


class RunSection(Config):
    """Identity, directory and mode of the run."""

    dir: str = free("runs/run")
    """Run directory, relative to the working directory. A run that finds checkpoints there continues."""
    seed: int = 0
    """The seed of everything: weights, order, samples."""
    date: Day | None = free(None)
    """The day that chat templates write into prompts, if they write one. Unset: the day on which the run first starts;
    it keeps this day when it continues, on all machines."""
    name: str = free("")
    """The run's name in a buffer that separate commands share; empty means the last part of `run.dir`."""
    mode: Literal["both", "explore", "train", "bench", "serve", "tinker"] = free("both")
    """`both` explores and trains; `explore` and `train` do one of the two, in any number of shells or machines that
    share a buffer and a channel; `serve` offers the policy to agents instead of exploring, and trains too unless the
    buffer is shared; `bench` evaluates every checkpoint of the run, in order; `tinker` serves the verbs of the Tinker
    SDK to scripts that have a loop of their own."""
    explorer: str = free("", pattern=r"^[\w.-]*$")
    """Name of the explorer that this command starts; empty generates a unique one."""
    enable_preview: bool | None = free(None)
    """Whether monitors get a table of rollouts (best, worst and a failed one of each step) whenever weights are
    published; unset: only if a monitor keeps tables and files (`wandb`, `mlflow`)."""
    keep: Literal["rollouts", "tokens"] = free("rollouts")
    """What the run directory keeps of each step: the rollouts; with `tokens` also the values that the step computed for
    each token (advantages, log-probabilities of trainer and reference, ...). `trivium rollouts` shows them."""
    resume: bool = free(True)
    """Continues the run that the directory holds. If false, such a directory is refused."""
    change: bool = free(False)
    """Allows a resumed run to change the fields marked `change` (`--change`). Each change is recorded."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        if self.keep == "tokens" and capabilities_of(resolve("buffers", run.buffer.kind)).shared:
            yield Problem(
                f"{where}.keep",
                f"tokens of rollouts over buffer.kind {run.buffer.kind!r}",
                "it keeps the rollouts elsewhere, and `trivium rollouts` reads the run directory",
                "leave the key out, or use buffer.kind memory",
            )


class EngineConfig(Plugin):
    """Base of engine sections."""

    kind: str = "torch"
    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""

    def for_run(self, run: RunConfig) -> Self:
        """The section with the values that follow from other sections of `run` filled in."""
        del run
        return self


class WorkflowConfig(Plugin):
    """Base of workflow sections: how a task is rolled out, and what happens when a rollout fails."""

    kind: str = "single_turn"
    deadline_s: float = Field(default=600.0, gt=0)
    """A rollout (workflow and rewards together) that takes longer is recorded as failed."""
    max_failed_fraction: float = free(0.5, ge=0, le=1)
    """The run ends when a larger fraction of the trajectories of a step, or of an evaluation, fails."""
    max_concurrent: int = free(4096, ge=1)
    """Trajectories in flight at once."""
    max_retries: int = Field(default=0, ge=0)
    """How often a rollout is repeated after its workflow failed: from its first turn, with the same randomness, within
    the same deadline."""
    min_members: int = Field(default=1, ge=1)
    """A group with fewer successful trajectories is dropped and replaced by another. With 1 no group is dropped: a
    group without a successful trajectory reaches the trainer, which counts it and leaves it out."""
    max_image_pixels: int = Field(default=64_000_000, ge=1)
    """Largest image of a prompt, width times height: a file of a few kilobytes can hold billions of pixels. A rollout
    whose prompt has a larger one fails."""


class RewardConfig(Plugin):
    """Base of reward sections; a plain function has exactly these keys."""

    weight: float = changeable(1.0)
    """Factor of this component in the total."""
    name: str = ""
    """Name in metrics; empty means the kind's last part."""
    workers: int = free(0, ge=0)
    """Processes that compute this reward; 0 computes it in threads of the explorer. A process whose reward hangs or
    holds the interpreter is killed at the deadline of the rollout."""

    @property
    def label(self) -> str:
        return self.name or self.short_name

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        elsewhere = run.cluster.kind == "ray" or getattr(run.train, "own_process", False)
        if is_only_here(self.kind) and (self.workers or elsewhere):
            yield Problem(
                where,
                f"the reward {self.kind} in other processes",
                "a script or a notebook defines it, and other processes cannot import it",
                "move it to a module, and name it or import it from there",
            )


class ModelConfig(Plugin):
    """Base of sections `model`. `has_random_weights`: whether the run makes the model, which knows nothing then."""

    has_random_weights: ClassVar[bool] = False


class TrainConfig(Plugin):
    """Base of train engine sections."""

    kind: str = "torch"

    def for_run(self, run: RunConfig) -> TrainConfig:
        """The section with the values that follow from other sections of `run` filled in, where they are unset."""
        del run
        return self

    def usual_lr(self, model: Plugin) -> float | None:
        """The learning rate of the policy that is the default for this model; None if the section has none."""
        del model


class AlgorithmConfig(Plugin):
    """Base of algorithm sections; presets own the rest."""

    kind: str = "grpo"

    @property
    def reads_rewards(self) -> bool:
        """Whether rollouts need rewards."""
        return True

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return False

    def for_run(self, run: RunConfig) -> AlgorithmConfig:
        """The section with the values that follow from other sections of `run` filled in; the algorithm is built from
        it."""
        del run
        return self

    def describe(self, run: RunConfig) -> dict[str, str]:
        """Its entry in the plan: the kind, and values that follow from the rest of the config."""
        del run
        return {"kind": self.kind}


class StrategyConfig(Plugin):
    """Base of sample strategy sections: which groups a step is trained on."""

    kind: str = "default"

    def num_stored(self, count: int) -> int:
        """The number of groups among a step's `count` that explorers do not roll out: replayed ones, or an expert's."""
        del count
        return 0

    def oldest(self, max_staleness: int) -> int:
        """How many versions old a group may be when it is trained on, if the buffer drops those older than
        `max_staleness`."""
        return max_staleness


StrategyPlugin = Annotated[
    SerializeAsAny[StrategyConfig], BeforeValidator(plugin("sample_strategies", StrategyConfig, "default"))
]
OperatorPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("operators"))]


class BufferConfig(Plugin):
    """Base of buffer sections."""

    kind: str = "memory"
    strategy: StrategyPlugin = Field(default={"kind": "default"})  # pyright: ignore[reportAssignmentType]
    """Which groups a step is trained on."""
    operators: tuple[OperatorPlugin, ...] = ()
    """The experience pipeline: operators that are applied in order to each finished group before it is stored. Names,
    or functions of yours."""
    max_dropped_in_a_row: int = free(1000, ge=1)
    """The run ends when the operators dropped this number of consecutive groups of one explorer."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from self.strategy.problems(run, f"{where}.strategy")
        for number, section in enumerate(self.operators):
            place, target = f"{where}.operators[{number}]", resolve("operators", section.kind)
            yield from section.problems(run, place)
            if not capabilities_of(resolve("buffers", self.kind)).explored:
                yield Problem(
                    place,
                    f"the operator {section.kind!r} on buffer.kind {self.kind!r}",
                    "operators work on groups of explorers, and this buffer has no explorers",
                    "leave it out, or change the rows themselves",
                )
            if run.has_fixed_versions and capabilities_of(target).drops:
                yield Problem(
                    place,
                    f"the operator {section.kind!r}, which may drop groups, {WITH_FIXED_VERSIONS}",
                    "the version that samples a slot would depend on the groups dropped before it",
                    "leave it out (if it never drops groups, declare Capabilities(drops=False)), or set "
                    "schedule.max_staleness or schedule.deterministic back",
                )


class CurriculumConfig(Plugin):
    """Base of curricula that learn from the groups of each train step; a plain function, which scores the tasks, has
    exactly these keys."""

    kind: str = "success_rate"
    temperature: float = Field(default=0.1, ge=0)
    """Tasks are drawn with probabilities softmax(score / temperature); 0 takes those with the highest scores."""
    forget: float = Field(default=0.05, ge=0, lt=1)
    """The fraction of what is known about a task that each train step forgets, since the policy changes."""
    threshold: float | None = None
    """A total reward of at least this is a success. Unset: the reward, limited to 0 and 1, is its share."""
    retire_above: float | None = Field(default=None, ge=0, le=1)
    """A task whose success rate is at least this at `retire_after` visits in a row is not drawn any more. Unset: none
    retires."""
    retire_after: int = Field(default=1, ge=1)
    """Visits in a row after which a task retires."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Runs whose steps have no results of tasks of the schedule."""
        reasons = {
            f"buffer.kind {run.buffer.kind!r} has no explorers": (
                not capabilities_of(resolve("buffers", run.buffer.kind)).explored
            ),
            "agents choose the tasks": run.run.mode == "serve"
            or ("train" in run.tasks and run.tasks["train"].kind == SERVED),
            "nothing gives rewards": not (
                run.rewards
                or capabilities_of(resolve("workflows", run.workflow.kind)).gives_rewards
                or capabilities_of(resolve("sample_strategies", run.buffer.strategy.kind)).judges
            ),
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            yield Problem(where, f"the curriculum {self.kind!r}, which learns from rewards", reason, "leave it out")
        if self.retire_above is None and "retire_after" in self.model_fields_set:
            yield Problem(f"{where}.retire_after", "tasks that retire", "none does", f"set {where}.retire_above")


CurriculumPlugin = Annotated[
    SerializeAsAny[Plugin], BeforeValidator(plugin("curricula", CurriculumConfig, "difficulty"))
]


class ScheduleSection(BaseConfig):
    """How many groups are rolled out and trained on, in which order, and how stale they may be."""

    steps: int = free(100, ge=1)
    """Train steps of this stage."""
    until: ThresholdConfig | None = None
    """Ends the stage early when a metric of a train step, or of an evaluation after it, crosses a threshold."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups that one train step consumes."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per task."""
    max_staleness: int | None = Field(default=None, ge=0)
    """How many versions old a group may be when it is trained on. Unset, it follows from `sync.offset`, else it is 0:
    the synchronous run."""
    deterministic: bool = False
    """Makes an asynchronous run a function of its seeds: which version samples a group no longer depends on timing."""
    shuffle: bool = True
    """Whether each epoch has its own random order of tasks."""
    curriculum: CurriculumPlugin | None = None
    """Orders the tasks by difficulty, or chooses them by what the policy earned on each so far."""
    max_attempts: int = Field(default=3, ge=1)
    """How often a slot is rolled out before its group is given up as too stale."""
    over_rollout: float = Field(default=0.0, ge=0)
    """Extra groups that are rolled out for a step, as a fraction of `groups_per_step`: the step takes the groups that
    finish first, and rollouts that would become too stale are cancelled and repeated. 0: none, a step waits for all its
    groups."""


# --------------------------------------------------------------------------- the whole config


def _evaluation(data: object) -> object:
    """`null` is no evaluation; an empty section would say nothing."""
    if is_mapping(data) and not data:
        raise ValueError("an empty section has no effect: name a taskset, or write `evaluation: null` for none")
    return {"taskset": None} if data is None else data


Evaluation = Annotated[EvaluationSection, BeforeValidator(_evaluation)]
Model = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("models", default_name="hf"))]


def _tasks(data: object) -> object:
    """A list mixes several sources."""
    return plugin("tasks")({"kind": "sources", "sources": data} if isinstance(data, list | tuple) else data)


Tasks = Annotated[SerializeAsAny[Plugin], BeforeValidator(_tasks)]
WorkflowPlugin = Annotated[
    SerializeAsAny[WorkflowConfig], BeforeValidator(plugin("workflows", WorkflowConfig, "single_turn"))
]
RewardPlugin = Annotated[SerializeAsAny[RewardConfig], BeforeValidator(plugin("rewards", RewardConfig))]
Engine = Annotated[SerializeAsAny[EngineConfig], BeforeValidator(plugin("engines", EngineConfig, "torch"))]
AlgorithmPlugin = Annotated[
    SerializeAsAny[AlgorithmConfig], BeforeValidator(plugin("algorithms", AlgorithmConfig, "grpo"))
]
Train = Annotated[SerializeAsAny[TrainConfig], BeforeValidator(plugin("train", TrainConfig, "torch"))]
BufferPlugin = Annotated[SerializeAsAny[BufferConfig], BeforeValidator(plugin("buffers", BufferConfig, "memory"))]
MonitorPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("monitors"))]


class RunConfig(Config):
    """Everything a run depends on."""

    run: RunSection = RunSection()
    model: Model
    """The policy: `{kind: hf, path: ...}` or `{kind: tiny, ...}`."""
    tasks: dict[str, Tasks]
    """Tasksets by name; explorers roll out `train`. A list mixes the tasks of several sources."""
    workflow: WorkflowPlugin = Field(default={"kind": "single_turn"})  # pyright: ignore[reportAssignmentType]
    rewards: tuple[RewardPlugin, ...] = ()
    """Reward functions of a finished trajectory; their weighted sum is the reward."""
    engine: Engine = Field(default={"kind": "torch"})  # pyright: ignore[reportAssignmentType]
    algorithm: AlgorithmPlugin = Field(default={"kind": "grpo"})  # pyright: ignore[reportAssignmentType]
    train: Train = Field(default={"kind": "torch"})  # pyright: ignore[reportAssignmentType]
    schedule: ScheduleSection = ScheduleSection()
    sync: SyncSection = SyncSection()
    buffer: BufferPlugin = Field(default={"kind": "memory"})  # pyright: ignore[reportAssignmentType]
    evaluation: Evaluation = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    monitors: tuple[MonitorPlugin, ...] = free(({"kind": "console"}, {"kind": "jsonl"}))
    """Where metrics go."""
    cluster: ClusterSection = ClusterSection()
    serve: ServeSection = ServeSection()
    stages: tuple[dict[str, Any], ...] = ()
    """Ordered overrides of this config, each with its own `schedule.steps`; one global step runs across them. A stage
    may have a `name`, by which later ones refer to the reward model that it trains."""

    @model_validator(mode="after")
    def _filled_in(self) -> Self:
        """A stage may train another part of the model, so that a config with stages is filled in stage by stage."""
        if not self.stages:
            object.__setattr__(self, "train", self.train.for_run(self))  # frozen for everything else
        return self

    def usual_lr(self) -> float | None:
        """The default learning rate for what the last stage trains."""
        last = self.stage_configs()[-1]
        return last.train.usual_lr(last.model)

    def stage_configs(self) -> tuple[RunConfig, ...]:
        """One config per stage, without `stages`; the config itself if it has no stages."""
        base = self.model_dump(exclude={"stages"}, exclude_unset=True)
        if not self.stages:
            return (self,)
        stages = [{key: value for key, value in stage.items() if key != "name"} for stage in self.stages]
        return tuple(type(self).model_validate(merged(base, stage)) for stage in stages)

    @property
    def stage_bounds(self) -> list[int]:
        """The version that each stage begins with, and the version that the last one ends with."""
        return [0, *accumulate(stage.schedule.steps for stage in self.stage_configs())]

    @property
    def buffers(self) -> tuple[BufferConfig, ...]:
        """The buffer of each stage."""
        return tuple(stage.buffer for stage in self.stage_configs())

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The name of each stage; empty for one without."""
        return tuple(stage.get("name", "") for stage in self.stages) or ("",)

    @property
    def max_staleness(self) -> int:
        """`schedule.max_staleness`, or what follows from `sync.offset`, or 0."""
        if self.sync.offset is not None:
            return self.sync.interval - 1 + self.sync.offset
        return self.schedule.max_staleness or 0

    @property
    def max_age(self) -> int:
        """How many versions old a group may be when it is trained on: `max_staleness`, unless the sample strategy is
        stricter or replays older ones."""
        return self.buffer.strategy.oldest(self.max_staleness)

    @property
    def has_fixed_versions(self) -> bool:
        """Whether the version that samples a slot is fixed in advance. Then no group may be replaced by another."""
        return self.schedule.deterministic and self.max_staleness > 0
