"""Curricula: the order of the tasks of a stage, by a column, or by what the policy earned on each task.

Legend: N tasks, p the success rate of a task in (0, 1), Beta(alpha, beta) what is known about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trivium.config import CurriculumConfig, Plugin, RunConfig
from trivium.foundation.errors import DataError, Problem, described
from trivium.foundation.randomness import stream, uniforms
from trivium.foundation.registry import resolve
from trivium.protocols import TaskSource
from trivium.schedule import AdaptiveCurriculum, Curriculum
from trivium.types import Group, Metrics, Task

Floats = npt.NDArray[np.float64]
_TRUST = 0.9
"""The weight of earlier estimates of the policy's position between two references (BOTS)."""
_SURPRISE = 0.25
"""The mean error of the predicted rates of a step from which adaptive sharing halves."""


class Difficulty:
    """Tasks by a numeric column instead of at random. Every epoch visits every task once. It learns nothing, and has
    none of the keys of the others."""

    class Config(Plugin):
        kind: str = "difficulty"
        column: str
        """The column with the difficulty of a task: a number, higher is harder."""
        easy_first: bool = True
        """Whether an epoch begins with the easy tasks; else with the hard ones."""
        spread: float = Field(default=0.2, ge=0)
        """Noise on the order, as a fraction of the taskset: 0 is strictly by difficulty (ties in random order), 10 is
        nearly a shuffle."""

    def __init__(self, config: Config, *, tasks: TaskSource, **beside: object) -> None:
        """Raises DataError for a task whose column is not a finite number."""
        del beside
        values = numbers_of(tasks, config.column, "schedule.curriculum.column")
        _, step, counts = np.unique(values if config.easy_first else -values, return_inverse=True, return_counts=True)
        self.ranks = (np.cumsum(counts) - counts)[step] / len(values)
        """(N,) in [0, 1): the relative place of each task in the order without noise."""
        self.spread = config.spread

    def order(self, *address: int | str) -> npt.NDArray[np.int64]:
        """A permutation of the places, with equal difficulties in random order."""
        noise = uniforms(np.uint64(stream(*address)), np.arange(len(self.ranks)))
        return np.lexsort((noise, self.ranks + self.spread * noise))


def numbers_of(tasks: TaskSource, column: str, key: str) -> Floats:
    """(N,): a column of the tasks, which the config's `key` names. Raises DataError unless all are finite numbers."""
    return np.array([_number(tasks[place], column, key) for place in range(len(tasks))], np.float64)


def _number(task: Task, column: str, key: str) -> float:
    value = task.columns.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"the difficulty of task {task.task_id!r}",
            f"column {column!r} is {value!r:.60}; the columns are {sorted(task.columns)}",
            f"name a column with a finite number for every task in {key}",
        )
    return float(value)


# --------------------------------------------------------------------------- curricula that learn


@dataclass
class Record:
    """What the curriculum knows about each task: arrays (N,), in the order of the tasks."""

    alpha: Floats
    """Successes in what is known about p, 1 without groups."""
    beta: Floats
    """Failures, likewise."""
    visits: npt.NDArray[np.int64]
    """Groups that were trained on."""
    solved: npt.NDArray[np.int64]
    """The last visits in a row whose success rate was at least `retire_above`."""
    rate: Floats
    """The success rate of the last visit; -1 without one."""

    @classmethod
    def empty(cls, number: int) -> Record:
        none = np.zeros(number, np.int64)
        return cls(np.ones(number), np.ones(number), none, none.copy(), np.full(number, -1.0))

    @property
    def p(self) -> Floats:
        """(N,): the expected success rate."""
        return self.alpha / (self.alpha + self.beta)


class Learned(AdaptiveCurriculum):
    """Prefers tasks by a score of what is known about them.

    Each train step updates the knowledge: with a fraction f forgotten, and s successes and r failures in the step,
    alpha becomes (1 - f) alpha + f + s, and beta (1 - f) beta + f + r. The tasks of a step are drawn without
    replacement, with probabilities softmax(score / temperature).
    """

    Config = CurriculumConfig

    def __init__(
        self,
        config: CurriculumConfig,
        *,
        tasks: TaskSource,
        seed: int,
        stage: int,
        score: Callable[[Record], object] | None = None,
    ) -> None:
        """`score` is a function of the user, by default the method."""
        super().__init__(tasks)
        self.config, self._address = config, (seed, "curriculum", stage)
        self.record = Record.empty(len(tasks))
        self._function = score

    def score(self, record: Record, slot: int) -> Floats:
        """(N,): higher is preferred."""
        assert self._function is not None
        values = self._function(record)
        scores = np.asarray(values, np.float64) if isinstance(values, Sequence | np.ndarray) else np.empty(0)
        if scores.shape != record.alpha.shape or not np.isfinite(scores).all():
            raise DataError(
                f"a finite score of each of {len(record.alpha)} tasks from {self.config.kind}",
                described(values) if scores.shape != record.alpha.shape else "scores that are not finite",
                "return an array with a number for each task",
            )
        return scores

    @property
    def retired(self) -> npt.NDArray[np.bool_]:
        """(N,): the tasks that are solved and not drawn any more."""
        return self.record.solved >= self.config.retire_after

    def order(self, slot: int) -> npt.NDArray[np.int64]:
        scores, temperature = self.score(self.record, slot), self.config.temperature
        noise = uniforms(np.uint64(stream(*self._address, slot)), np.arange(len(scores)))
        if temperature:  # the largest of these keys are a draw without replacement (Gumbel top-k)
            # The summand keeps a noise of exactly 0 out of the logarithm.
            scores = scores / temperature - np.log(-np.log(noise + 2.0**-54))
        order = np.lexsort((noise, -scores))
        active = order[~self.retired[order]]
        return active if len(active) else order

    def observe(self, groups: Sequence[Group]) -> Metrics:
        members: dict[int, list[float]] = {}
        visits: dict[int, list[float]] = {}
        for group in groups:
            successes = [self._success(reward) for reward in group.member_rewards()] if not group.expert else []
            place = self.place_of.get(group.task.task_id)
            if successes and place is not None:
                members.setdefault(place, []).extend(successes)
                visits.setdefault(place, []).append(fmean(successes))
        places, rates = np.array([*members], np.int64), np.array([fmean(successes) for successes in members.values()])
        numbers = np.array([len(successes) for successes in members.values()], np.float64)
        record, bound = self.record, math.inf if self.config.retire_above is None else self.config.retire_above
        self._learn(places, rates, numbers)
        for place, visit_rates in visits.items():
            record.visits[place] += len(visit_rates)
            record.rate[place] = visit_rates[-1]
            for rate in visit_rates:
                record.solved[place] = record.solved[place] + 1 if rate >= bound else 0
        return self._metrics(rates)

    def _learn(self, places: npt.NDArray[np.int64], rates: Floats, numbers: Floats) -> None:
        """Learns the success rates of the tasks at these places, each of a number of trajectories."""
        forget, record = self.config.forget, self.record
        for estimate, share in ((record.alpha, rates), (record.beta, 1 - rates)):
            estimate *= 1 - forget
            estimate += forget
            estimate[places] += share * numbers

    def _success(self, reward: float) -> float:
        if self.config.threshold is None:
            return min(1.0, max(0.0, reward))
        return float(reward >= self.config.threshold)

    def _metrics(self, rates: Floats) -> Metrics:
        record = self.record
        values = {
            "expected_success": float(record.p.mean()),
            "seen": float((record.visits > 0).mean()),
            "retired": float(self.retired.mean()),
        }
        if len(rates):
            values["success"] = float(rates.mean())
        return {f"curriculum/{name}": value for name, value in values.items()}

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The draws, and lists with what is known about each task about which something is known."""
        record = self.record
        changed = (record.visits > 0) | (record.alpha != 1) | (record.beta != 1)
        places = np.flatnonzero(changed)
        learned = {field.name: getattr(record, field.name)[places].tolist() for field in fields(Record)}
        ids = [self.tasks[place].task_id for place in places.tolist()]
        return {**super().state(), "known": {"task": ids, "retired": self.retired[places].tolist(), **learned}}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.record = Record.empty(len(self.tasks))
        places = [self.place_of[task_id] for task_id in state["known"]["task"]]
        for field in fields(Record):
            getattr(self.record, field.name)[places] = state["known"][field.name]


class SuccessRate(Learned):
    """Prefers tasks whose success rate is near a target (BOTS, Shen et al. 2025). With `references`, the results of a
    task also tell about the others."""

    class Config(CurriculumConfig):
        kind: str = "success_rate"
        target: float = Field(default=0.5, ge=0, le=1)
        """The preferred success rate."""
        sampled: bool = False
        """Whether the success rate is drawn from what is known about it (Thompson sampling), instead of expected."""
        references: tuple[str, str] | None = None
        """Columns with the success rates of a weaker and of a stronger model. The results of a step then say where
        the policy is between the two, which predicts the rates of all other tasks."""
        sharing: float = Field(default=0.2, ge=0, le=1)
        """The weight of predicted rates, for all tasks, beside the results; read with `references`."""
        adaptive_sharing: bool = False
        """Whether `sharing` is halved after a step whose predictions were wrong by 0.25 or more on average."""
        trials: float | None = Field(default=None, gt=0)
        """The number of trajectories that a result counts as; unset: as many as it has. `references` need it."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            for name in ("sharing", "adaptive_sharing"):
                if self.references is None and name in self.model_fields_set:
                    yield Problem(f"{where}.{name}", name, "no column predicts rates", f"set {where}.references")
            if self.references is not None and self.trials is None:
                yield Problem(f"{where}.trials", "predicted rates", "they have no weight", "set it, 16 for example")

    config: Config

    def __init__(self, config: Config, *, tasks: TaskSource, **beside: Any) -> None:
        super().__init__(config, tasks=tasks, **beside)
        key, self._position, self._sharing = "schedule.curriculum.references", None, config.sharing
        self._references = [numbers_of(tasks, column, key) for column in config.references or ()]

    def score(self, record: Record, slot: int) -> Floats:
        p = record.p
        if self.config.sampled:
            generator = np.random.Generator(np.random.Philox(stream(*self._address, "sampled", slot)))
            p = generator.beta(record.alpha, record.beta)
        return -np.abs(self.config.target - p)

    def _learn(self, places: npt.NDArray[np.int64], rates: Floats, numbers: Floats) -> None:
        trials = self.config.trials
        numbers = numbers if trials is None else np.full_like(numbers, trials)
        if not (self._references and trials is not None and len(places)):
            super()._learn(places, rates, numbers)
            return
        weak, strong = self._references
        low, high = float(weak[places].mean()), float(strong[places].mean())
        # The summand is for tasks that both references solve equally often.
        position = (float(rates.mean()) - low) / (high - low + 1e-6)
        self._position = position if self._position is None else _TRUST * self._position + (1 - _TRUST) * position
        predicted = np.clip((strong - weak) * self._position + weak, 0, 1)
        if self.config.adaptive_sharing and np.abs(predicted[places] - rates).mean() >= _SURPRISE:
            self._sharing /= 2
        predicted[places] = rates
        super()._learn(places, rates, (1 - self._sharing) * numbers)
        self.record.alpha += self._sharing * trials * predicted
        self.record.beta += self._sharing * trials * (1 - predicted)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "position": self._position, "sharing": self._sharing}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._position, self._sharing = state["position"], state["sharing"]


def curriculum_of(config: Plugin, tasks: TaskSource, *, seed: int, stage: int) -> Curriculum | AdaptiveCurriculum:
    """Builds a curriculum. A plain function of the user scores the tasks of a `Learned` one."""
    target = resolve("curricula", config.kind)
    options: dict[str, Any] = {"tasks": tasks, "seed": seed, "stage": stage}
    if isinstance(target, type):
        return target(config, **options)
    assert isinstance(config, CurriculumConfig)
    return Learned(config, score=target, **options)
