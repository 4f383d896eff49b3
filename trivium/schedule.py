"""Schedule: slot -> task, epoch and the version that samples it. A pure function of the slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trivium.errors import DataError
from trivium.randomness import SampleKey, permutation, stream, uniforms

if TYPE_CHECKING:
    from trivium.protocols import TaskSource
    from trivium.types import Task


@runtime_checkable
class OrderedTasks(Protocol):
    """A task source with its own order, for example that of a sampler, which `shuffle` does not change."""

    @property
    def epoch_length(self) -> int:
        """The number of tasks of every epoch."""
        ...

    def visit(self, epoch: int, place: int) -> Task:
        """The task at a place below `epoch_length`. Every call returns the same task. Ids are unique within an
        epoch."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """The task, epoch and position of a slot."""

    slot: int
    task: Task
    epoch: int
    """Complete passes over the taskset before this one."""


@dataclass(frozen=True, eq=False)
class Curriculum:
    """Orders tasks by difficulty, with new noise in every epoch. Compares by identity, so that it can be a cache
    key."""

    ranks: npt.NDArray[np.float64]
    """(N,) in [0, 1): the relative place of each task in the order without noise."""
    spread: float
    """Width of the uniform noise on the ranks: 0 keeps the order, far above 1 shuffles."""

    @classmethod
    def of(cls, tasks: TaskSource, column: str, easy_first: bool, spread: float) -> Curriculum:
        """The curriculum by a numeric column. Larger values are harder.

        Raises DataError for a task whose column is not a finite number.
        """
        values = np.array([_difficulty(tasks[place], column) for place in range(len(tasks))])
        _, step, counts = np.unique(values if easy_first else -values, return_inverse=True, return_counts=True)
        return cls((np.cumsum(counts) - counts)[step] / len(values), spread)

    def order(self, *address: int | str) -> npt.NDArray[np.int64]:
        """A permutation of the places, with equal difficulties in random order. `address` is the address of the noise
        (`randomness`)."""
        noise = uniforms(np.uint64(stream(*address)), np.arange(len(self.ranks)))
        return np.lexsort((noise, self.ranks + self.spread * noise))


def _difficulty(task: Task, column: str) -> float:
    value = task.columns.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"the difficulty of task {task.task_id!r}",
            f"column {column!r} is {value!r:.60}; the columns are {sorted(task.columns)}",
            "name a column with a finite number for every task in schedule.curriculum.column",
        )
    return float(value)


@lru_cache(maxsize=8)
def _blurred(curriculum: Curriculum, *address: int | str) -> tuple[int, ...]:
    return tuple(int(place) for place in curriculum.order(*address))


@lru_cache(maxsize=8)
def _order(length: int, *address: int | str) -> tuple[int, ...]:
    return tuple(int(place) for place in permutation(length, *address))


@dataclass(frozen=True)
class Schedule:
    """The order in which one stage visits its tasks, and how far sampling may run ahead of training.

    Slots are numbered from 0 within the stage; versions and steps are global, the stage beginning at `first_version`.
    """

    tasks: TaskSource
    seed: int
    stage: int = 0
    first_version: int = 0
    groups_per_step: int = 1
    """Groups that one train step consumes."""
    stored_per_step: int = 0
    """The part of these groups that the sample strategy replays or takes from experts, for which no slots are
    issued."""
    group_size: int = 1
    max_staleness: int = 0
    sync_interval: int = 1
    deterministic: bool = False
    shuffle: bool = True
    curriculum: Curriculum | None = None
    """Orders the tasks of an epoch by difficulty instead of shuffling them."""
    max_attempts: int = 3
    over_rollout: int = 0
    """Additional groups that are rolled out, so that a step does not wait for the slowest one."""
    steps: int = field(default=1)
    """Train steps of the stage."""
    until: tuple[str, float, float] | None = None
    """(metric, least, most): the stage ends early after the first train step whose metric, or that of its evaluation,
    is outside these bounds."""

    @property
    def fresh_per_step(self) -> int:
        """Groups that one train step takes from the buffer, and so the number of slots of a step."""
        return self.groups_per_step - self.stored_per_step

    @property
    def ordered(self) -> bool:
        """Whether groups are trained in slot order, not in order of arrival."""
        return (self.max_staleness == 0 and not self.over_rollout) or self.deterministic

    def at(self, slot: int) -> Assignment:
        """The task of a slot. Every epoch visits every task once, unless the tasks have their own order."""
        if isinstance(self.tasks, OrderedTasks):
            epoch, place = divmod(slot, self.tasks.epoch_length)
            return Assignment(slot, self.tasks.visit(epoch, place), epoch)
        epoch, place = divmod(slot, len(self.tasks))
        if self.curriculum is not None:
            place = _blurred(self.curriculum, self.seed, "curriculum", self.stage, epoch)[place]
        elif self.shuffle:
            place = _order(len(self.tasks), self.seed, "order", self.stage, epoch)[place]
        return Assignment(slot, self.tasks[place], epoch)

    def key(self, assignment: Assignment, index: int) -> SampleKey:
        """The random key of one member of a slot's group."""
        task = assignment.task
        return SampleKey(self.seed, f"stage-{self.stage}", task.taskset, task.task_id, assignment.epoch, index)

    def step_of(self, slot: int) -> int:
        """The (global) train step of a slot."""
        return self.first_version + slot // self.fresh_per_step + 1

    def ends_with(self, metrics: Mapping[str, float]) -> bool:
        """Whether a train step with these metrics ends the stage by `until`."""
        if self.until is None:
            return False
        metric, least, most = self.until
        return not least <= metrics.get(metric, least) <= most

    def admitted(self, version: int) -> int:
        """The number of slots that may be issued in total to explorers with `version`."""
        ahead = version - self.first_version + self.max_staleness + 1
        return min(ahead, self.steps) * self.fresh_per_step + self.over_rollout

    def published(self, version: int) -> bool:
        """Whether the trainer offers `version` to the explorers."""
        return version == self.first_version or version % self.sync_interval == 0

    def version_for(self, slot: int) -> int:
        """The first published version that admits a slot. A deterministic run samples the slot with it."""
        version = max(self.first_version, self.step_of(slot) - 1 - self.max_staleness)
        while not self.published(version):
            version += 1
        return version

    def resume_version(self, version: int) -> int:
        """The version explorers start from when training resumes at `version`."""
        if not self.ordered:
            return version
        return min(version, self.version_for((version - self.first_version) * self.fresh_per_step))


@dataclass(frozen=True)
class Cadence:
    """The intervals of evaluations and checkpoints, in train steps; 0: only at the ends of a stage."""

    save_every: int = 0
    evaluate_every: int = 0
    evaluate_ends: bool = False
    """Whether to evaluate at the start and at the end of the stage."""
    skip_start: bool = False
    """Leaves out the evaluation at the start."""
    skip_end: bool = False
    """Leaves out the evaluation at the end."""

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due at this train step."""
        return self.save_every > 0 and step % self.save_every == 0

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due at this train step."""
        return self.evaluate_every > 0 and step % self.evaluate_every == 0
