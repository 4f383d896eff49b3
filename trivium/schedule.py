"""Schedule: slot -> task, epoch and the version that samples it. A pure function of the slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trivium.foundation.errors import DataError
from trivium.foundation.randomness import SampleKey, permutation

if TYPE_CHECKING:
    from trivium.protocols import TaskSource
    from trivium.types import Draws, Group, Metrics, Task

_REPLACED = ("given_up", "dropped", "refused")
# Simulated train steps an hour with equal parts, and where an explorer leases every free slot that it finds: 1,274 and
# 830 (4 explorers, `max_staleness` 0), 1,674 and 1,121 (8 explorers, 1), 1,226 and 1,547 (4 explorers, 4). In the last
# run, an engine that waits for its longest rollout before it loads a version leaves its part unused.
_EQUAL_PARTS_UP_TO = 1
"""The `max_staleness` up to which explorers lease equal parts."""
_SPARE = 4
"""Tasks that an adaptive curriculum draws for each slot: the further ones replace refused groups."""


def num_replaced(counts: Mapping[str, int]) -> int:
    """The number of slots whose groups are not trained on, by the counts of a buffer: another slot is admitted in place
    of each."""
    return sum(counts.get(name, 0) for name in _REPLACED)


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


class Curriculum(Protocol):
    """Orders the tasks of each epoch. Compares by identity, so that it can be a cache key."""

    def order(self, *address: int | str) -> npt.NDArray[np.int64]:
        """A permutation of the places of the tasks. `address` is the address of its random numbers (`randomness`)."""
        ...


class AdaptiveCurriculum(ABC):
    """Chooses the tasks of later slots by the results of the groups that were trained on.

    After each train step, the trainer calls `observe` with its groups, and `draw` for the slots that only the new
    version admits. Explorers follow these draws. In an ordered run both depend on nothing but the groups.
    """

    def __init__(self, tasks: TaskSource) -> None:
        self.tasks = tasks
        self.place_of = {tasks[place].task_id: place for place in range(len(tasks))}
        self.draws: Draws = ()
        """(first slot, places of the tasks of the slots from there on), in order."""

    @abstractmethod
    def order(self, slot: int) -> npt.NDArray[np.int64]:
        """The places of tasks for the slots from `slot` on, best first. Depends on nothing but the slot and what was
        observed and drawn before."""

    @abstractmethod
    def observe(self, groups: Sequence[Group]) -> Metrics:
        """Learns from the groups of a train step; returns metrics of the tasks."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; JSON values."""
        return {"draws": self.draws}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.follow(state["draws"])

    def draw(self, slot: int, number: int, keep: int) -> None:
        """Draws the tasks of the `number` slots from `slot` on, and further ones that replace refused groups. Keeps so
        many earlier draws, for the slots that are not trained on yet."""
        self.draws = (*self.draws[-keep:], (slot, tuple(map(int, self.order(slot)[: _SPARE * number]))))

    def follow(self, draws: Draws) -> None:
        """Takes over the draws of another process."""
        self.draws = tuple((slot, tuple(places)) for slot, places in draws)

    def place(self, slot: int) -> int:
        """The place of a slot's task. Slots beyond a draw repeat it: they replace groups that were not trained on."""
        if not self.draws:
            raise DataError(
                f"the task of slot {slot}", "no draw of the curriculum", "let a trainer begin the stage: it draws"
            )
        first, places = next((draw for draw in reversed(self.draws) if draw[0] <= slot), self.draws[0])
        return places[(slot - first) % len(places)]


# Cached, since each look-up of a slot needs the order of its whole epoch.
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
    curriculum: Curriculum | AdaptiveCurriculum | None = None
    """Orders the tasks of an epoch instead of shuffling them. An adaptive one has no epochs: it chooses the tasks of
    slots."""
    max_attempts: int = 3
    over_rollout: int = 0
    """Additional groups that are rolled out, so that a step does not wait for the slowest one."""
    steps: int = field(default=1)
    """Train steps of the stage."""
    served: bool = False
    """The requests of agents decide which explorer rolls out (`run.mode: serve`)."""
    until: tuple[str, float, float] | None = None
    """(metric, least, most): the stage ends early after the first train step whose metric, or that of its evaluation,
    is outside these bounds."""

    @property
    def fresh_per_step(self) -> int:
        """Groups that one train step takes from the buffer, and so the number of slots of a step."""
        return self.groups_per_step - self.stored_per_step

    @property
    def rollouts_per_step(self) -> int:
        """Trajectories that one train step consumes."""
        return self.groups_per_step * self.group_size

    @property
    def equal_parts(self) -> bool:
        """Whether each explorer leases at most an equal part of the slots that may be in progress. Otherwise the one
        that loads a version first would lease nearly all slots of a step. With more staleness most slots in progress
        are those of earlier versions, and every explorer has some."""
        return self.max_staleness <= _EQUAL_PARTS_UP_TO and not self.served

    @property
    def ordered(self) -> bool:
        """Whether groups are trained in slot order, not in order of arrival."""
        return (self.max_staleness == 0 and not self.over_rollout) or self.deterministic

    def at(self, slot: int) -> Assignment:
        """The task of a slot. Every epoch visits every task once, unless the tasks have their own order."""
        if isinstance(self.tasks, OrderedTasks):
            epoch, place = divmod(slot, self.tasks.epoch_length)
            return Assignment(slot, self.tasks.visit(epoch, place), epoch)
        if isinstance(self.curriculum, AdaptiveCurriculum):
            # The slot is the epoch: the random numbers of two visits of a task must differ.
            return Assignment(slot, self.tasks[self.curriculum.place(slot)], slot)
        epoch, place = divmod(slot, len(self.tasks))
        if self.curriculum is not None:
            place = _blurred(self.curriculum, self.seed, "curriculum", self.stage, epoch)[place]
        elif self.shuffle:
            place = _order(len(self.tasks), self.seed, "order", self.stage, epoch)[place]
        return Assignment(slot, self.tasks[place], epoch)

    def may_have(self, slot: int, task_id: str) -> bool:
        """Whether a stored group of the slot can be of this task. An adaptive curriculum may have drawn the slot in a
        step that a resumed run has not reached, so every task is possible."""
        if isinstance(self.curriculum, AdaptiveCurriculum):
            return task_id in self.curriculum.place_of
        return self.at(slot).task.task_id == task_id

    # ------------------------------------------------------------------ an adaptive curriculum

    @property
    def adaptive(self) -> AdaptiveCurriculum | None:
        """The curriculum, if it learns from the groups of the stage."""
        return self.curriculum if isinstance(self.curriculum, AdaptiveCurriculum) else None

    def learn(self, groups: Sequence[Group]) -> Metrics:
        """Lets an adaptive curriculum observe the groups of a train step."""
        return self.adaptive.observe(groups) if self.adaptive is not None else {}

    def draw_tasks(self, version: int | None, replaced: int) -> None:
        """Draws the tasks of the slots that no version up to `version` admits; None: of the first ones. `replaced` is
        the number of slots that were admitted in place of others (`num_replaced`). The draws do not depend on `steps`:
        a stage that is lengthened continues them."""
        first = 0 if version is None else self._ahead(version) * self.fresh_per_step + self.over_rollout + replaced
        steps = self._ahead(self.first_version) if version is None else 1
        number = steps * self.fresh_per_step + (self.over_rollout if version is None else 0)
        if self.adaptive is not None:
            self.adaptive.draw(first, number, self.max_staleness + 1)

    # ------------------------------------------------------------------ slots and versions

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
        return min(self._ahead(version), self.steps) * self.fresh_per_step + self.over_rollout

    def _ahead(self, version: int) -> int:
        """The number of steps whose slots a version admits, in a stage without an end."""
        return version - self.first_version + self.max_staleness + 1

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
    """When a policy is evaluated in training."""

    every: int = 0
    """The interval, in train steps; 0: only at the ends of a stage."""
    ends: bool = False
    """Whether to evaluate at the start and at the end of the stage."""
    skip_start: bool = False
    """Leaves out the evaluation at the start."""
    skip_end: bool = False
    """Leaves out the evaluation at the end."""

    def is_due(self, step: int) -> bool:
        """Whether an evaluation is due at this train step."""
        return self.every > 0 and step % self.every == 0
