"""Several task sources in one stage: each with its share of a step's groups, and a config of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pydantic import Field

from trivium.config.schema import (
    AlgorithmPlugin,
    BufferConfig,
    Config,
    CurriculumConfig,
    CurriculumPlugin,
    Plugin,
    RewardConfig,
    RewardPlugin,
    RunConfig,
    Tasks,
    WorkflowPlugin,
    plugin,
)
from trivium.config.sections import EvaluationSection
from trivium.errors import Problem
from trivium.registry import resolve
from trivium.types import capabilities_of


class SourceConfig(Config):
    """One source of the tasks of a step. What it leaves out is as in the rest of the config."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """Its name in metrics (`source/NAME/...`); the taskset of its tasks."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of a step's groups is proportional to this, rounded to whole groups."""
    loss_weight: float = Field(default=1.0, gt=0)
    """Factor of its loss, which is normalised by the counts of its own tokens and sequences."""
    tasks: Tasks
    """Its tasks: a section of `tasks`."""
    completion: str | None = None
    """The column of an expert's completion: the groups of the source are these rows, and nothing is rolled out."""
    workflow: WorkflowPlugin | None = None
    """How its tasks are rolled out; unset: `workflow`."""
    rewards: tuple[RewardPlugin, ...] | None = None
    """Its reward functions; unset: `rewards`."""
    algorithm: AlgorithmPlugin | None = None
    """How it is learned from; unset: `algorithm`."""
    group_size: int | None = Field(default=None, ge=1)
    """Trajectories per task; unset: `schedule.group_size`, or 1 for rows."""
    curriculum: CurriculumPlugin | None = None
    """The order of its tasks; unset: `schedule.curriculum`, but for rows only one that needs no rewards."""


class SourcesConfig(Plugin):
    """Several sources: `tasks.train` as a list."""

    kind: str = "sources"
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """The sources. Each step has slots of every one, in fixed numbers. Its groups may come from others: from the slots
    that finish first in an unordered run, or from the next ones, which replace refused groups."""

    def groups(self, number: int) -> list[int]:
        """The number of groups of each source among `number`: the shares, rounded by largest remainders."""
        whole = sum(source.weight for source in self.sources)
        shares = [number * source.weight / whole for source in self.sources]
        counts = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
        for i in by_remainder[: number - sum(counts)]:
            counts[i] += 1
        return counts


def source_configs(config: RunConfig) -> dict[str, RunConfig]:
    """The config of each source by name: that of a stage which has this source alone. {"": config} for one source."""
    train = config.tasks.get("train")
    if not isinstance(train, SourcesConfig):
        return {"": config}
    counts = train.groups(config.schedule.groups_per_step)
    return {source.name: _config_of(config, source, n) for source, n in zip(train.sources, counts, strict=True)}


def algorithm_kinds(config: RunConfig) -> str:
    """The kind of the algorithm of a stage, or of those of its sources."""
    return ", ".join(dict.fromkeys(own.algorithm.kind for own in source_configs(config).values()))


def rewards_of(config: RunConfig) -> dict[str, tuple[RewardConfig, ...]]:
    """The rewards of a config and those that its sources have of their own, by their place in the config."""
    train, places = config.tasks.get("train"), {"rewards": config.rewards}
    for number, source in enumerate(train.sources if isinstance(train, SourcesConfig) else ()):
        if source.rewards is not None:
            places[f"tasks.train[{number}].rewards"] = source.rewards
    return places


def with_rewards(
    config: RunConfig, change: Callable[[tuple[RewardConfig, ...]], tuple[RewardConfig, ...]]
) -> RunConfig:
    """The config with the rewards of `rewards_of`, each list changed by `change`."""
    update: dict[str, object] = {"rewards": change(config.rewards)}
    if isinstance(train := config.tasks.get("train"), SourcesConfig):
        sources = tuple(
            source if source.rewards is None else source.model_copy(update={"rewards": change(source.rewards)})
            for source in train.sources
        )
        update["tasks"] = {**config.tasks, "train": train.model_copy(update={"sources": sources})}
    return config.model_copy(update=update)


def _config_of(config: RunConfig, source: SourceConfig, groups: int) -> RunConfig:
    curriculum = source.curriculum or config.schedule.curriculum
    if source.curriculum is None and source.completion is not None and isinstance(curriculum, CurriculumConfig):
        curriculum = None  # it learns from rewards, which rows do not have
    schedule = {"groups_per_step": groups, "curriculum": curriculum, "until": None}
    size = source.group_size or (1 if source.completion is not None else None)
    update: dict[str, object] = {
        "tasks": {"train": source.tasks},
        "schedule": config.schedule.model_copy(update=schedule | ({"group_size": size} if size else {})),
        "evaluation": EvaluationSection(),
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": None}),
    }
    update |= {
        name: value for name in ("workflow", "rewards", "algorithm") if (value := getattr(source, name)) is not None
    }
    if source.completion is not None:
        update["buffer"] = plugin("buffers", BufferConfig)({"kind": "files", "completion": source.completion})
    return config.model_copy(update=update)


_LIMITS = ("max_concurrent", "max_image_pixels")
"""Keys of `workflow` that hold for all sources together."""
_SHARED = ("epochs", "mini_batches", "teacher")
"""Keys of `algorithm` that sources of one step share."""


def source_problems(config: RunConfig, problems: Callable[[RunConfig], Iterable[Problem]]) -> Iterator[Problem]:
    """Problems of the sources of a config; `problems` checks the config of each alone."""
    for name, tasks in config.tasks.items():
        if isinstance(tasks, SourcesConfig) and name != "train":
            yield Problem(f"tasks.{name}", "tasks of several sources", "only `train` has them", "name one source")
    if not isinstance(train := config.tasks.get("train"), SourcesConfig):
        return
    where = "tasks.train"
    if reason := next(_without_schedule(config), ""):
        yield Problem(where, "tasks of several sources", reason, "name one source, or change that")
        return
    names, total = [source.name for source in train.sources], config.schedule.groups_per_step
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(where, f"the source {name!r}", "another one has this name", "choose another name")
    for name, groups in zip(names, train.groups(total), strict=True):
        if not groups:
            found = f"none of the {total} group(s) of a step"
            yield Problem(where, f"groups of {name!r}", found, "raise its weight or schedule.groups_per_step")
    configs = [*source_configs(config).values()]
    for number, own in enumerate(configs):
        place = f"{where}[{number}]"
        yield from (each._replace(where=f"{place}.{each.where}") for each in problems(own))
        if not hasattr(own.algorithm, "policy_loss") or own.algorithm.has_critic:
            found = f"{own.algorithm.kind!r} has a critic, or no policy loss"
            yield Problem(f"{place}.algorithm", "one update for all sources", found, "use another algorithm")
        given = set[str]() if train.sources[number].workflow is None else own.workflow.model_fields_set
        for key in (key for key in _LIMITS if key in given):
            value, whole = getattr(own.workflow, key), getattr(config.workflow, key)
            if value != whole:
                found = f"the limit of the run is {whole}, and it holds for all sources together"
                yield Problem(f"{place}.workflow.{key}", f"{value} for this source", found, f"set workflow.{key}")
    for key in _SHARED:
        values = [value for own in configs if (value := getattr(own.algorithm, key, None)) is not None]
        if any(value != values[0] for value in values):
            yield Problem(where, f"algorithms with different {key}", "all sources share a step", "set one value")


def _without_schedule(config: RunConfig) -> Iterator[str]:
    """Why the schedule does not choose all groups of a step."""
    buffer = config.buffer
    if not capabilities_of(resolve("buffers", buffer.kind)).explored:
        yield f"buffer.kind {buffer.kind!r} has no explorers"
    if config.run.mode == "serve":
        yield "agents choose the tasks"
    if buffer.strategy.num_stored(config.schedule.groups_per_step) > 0:
        yield f"buffer.strategy {buffer.strategy.kind!r} gives steps other groups"
