"""Generated tasks: arithmetic, Reasoning Gym, and a user's own function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from trivium.config import Config as Section
from trivium.config import Plugin, PluginPath, RunConfig
from trivium.foundation.errors import ConfigError, DataError, MissingPackage, Problem, TriviumError, UnknownName
from trivium.foundation.randomness import permutation, stream, uniforms
from trivium.foundation.registry import resolve, suggest
from trivium.tasks.rows import RowTasks, json_value, missing_package
from trivium.types import Message, Task

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
_MOST_PROBLEMS = 10_000_000
"""The largest number of problems, which are all held in memory."""


class ArithmeticTasks:
    """Problems such as `12+34=` with `answer` (and the expert's `completion`) `46`; no problem occurs twice.

    Whether a pair of operands is held out depends on the two numbers alone: not on their order, the operation, the
    seed or the range. So a `holdout` taskset shares no pair with any `train` taskset of the same `holdout_fraction`.
    """

    class Config(Plugin):
        """Which problems."""

        min_operand: int = Field(default=0, ge=0)
        """Smallest operand."""
        max_operand: int = Field(default=99, ge=0)
        """Largest operand."""
        operations: tuple[Literal["+", "-", "*"], ...] = Field(default=("+",), min_length=1)
        """The operations on two operands."""
        count: int | None = Field(default=None, ge=1)
        """Number of problems, drawn with the run's seed and the taskset's name; unset: all."""
        part: Literal["train", "holdout"] = "train"
        """Which side of the split this taskset draws from."""
        holdout_fraction: float = Field(default=0.1, ge=0, lt=1)
        """Expected part of the operand pairs that is held out."""

        @property
        def width(self) -> int:
            """The number of values of an operand."""
            return self.max_operand - self.min_operand + 1

        @model_validator(mode="after")
        def _possible(self) -> Self:
            if self.width < 1:
                raise ValueError("max_operand is smaller than min_operand")
            if len(self.operations) * self.width**2 > _MOST_PROBLEMS:
                raise ValueError(f"more than {_MOST_PROBLEMS:,} problems; narrow the range of the operands")
            return self

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        self.config, self.name = config, name
        problems = self._problems()
        wanted = len(problems) if config.count is None else config.count
        if not 1 <= wanted <= len(problems):
            raise DataError(
                f"{wanted} problems for {name!r}",
                f"the {config.part} part holds {len(problems)}",
                "ask for fewer, widen the operands' range, or change holdout_fraction",
            )
        order = permutation(len(problems), "arithmetic", seed, name)
        self._problems_in_order = problems[order[:wanted]]

    def __len__(self) -> int:
        return len(self._problems_in_order)

    def __getitem__(self, index: int) -> Task:
        operation_index, a, b = (int(part) for part in self._problems_in_order[index])
        operation = self.config.operations[operation_index]
        answer = str(_OPERATIONS[operation](a, b))
        problem = f"{a}{operation}{b}"
        columns = {"answer": answer, "completion": answer}
        return Task(problem, (Message("user", f"{problem}="),), columns, self.name)

    def _problems(self) -> np.ndarray:
        """All problems of the wanted part, one row (operation, a, b) each; shape (N, 3)."""
        config = self.config
        operands = np.arange(config.min_operand, config.max_operand + 1)
        grid = np.meshgrid(np.arange(len(config.operations)), operands, operands, indexing="ij")
        problems = np.stack([axis.ravel() for axis in grid], axis=1)
        held_out = _held_out(problems[:, 1], problems[:, 2], config.holdout_fraction)
        return problems[held_out if config.part == "holdout" else ~held_out]


def _held_out(a: np.ndarray, b: np.ndarray, fraction: float) -> np.ndarray:
    """Whether each unordered pair of operands belongs to the holdout; a pure function of the two numbers."""
    pair = np.minimum(a, b).astype(np.uint64) << np.uint64(32) | np.maximum(a, b).astype(np.uint64)
    return uniforms(np.uint64(stream("arithmetic holdout")), pair) < fraction


class MixedEnvironment(Section):
    """One environment of a Reasoning Gym mix."""

    weight: float = Field(default=1.0, gt=0)
    """Its share, relative to the others'."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own settings."""


class ReasoningGymTasks:
    """A mix of Reasoning Gym environments in a fixed order; needs `reasoning-gym` (extra `envs`).

    Columns: `answer` (null where the environment has no single one), `data_source` (the environment) and
    `reasoning_gym` = {dataset, config, entry}, which is all that scoring needs. Problems are made on demand.
    """

    class Config(Plugin):
        """Which environments, in which proportions."""

        environments: dict[str, MixedEnvironment] = Field(min_length=1)
        """Reasoning Gym names, each with its weight and settings."""
        size: int = Field(default=1000, ge=1, le=10_000_000)
        """Problems in all."""
        problem_seed: int | None = None
        """Fixes the problems whatever the run's seed; unset, they follow from the run's seed and the taskset's name."""
        system: str | None = None
        """System message put first."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from missing_package(where, "reasoning_gym", _no_reasoning_gym(where))

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            raise _no_reasoning_gym(f"tasks.{name}") from error
        self.config, self.name = config, name
        for environment in config.environments:
            if environment not in DATASETS:
                raise UnknownName(
                    f"Reasoning Gym environment {environment!r}", "no such name", suggest(environment, DATASETS)
                )
        self._order = _interleaved({key: mixed.weight for key, mixed in config.environments.items()}, config.size)
        sizes = {key: sum(1 for chosen, _ in self._order if chosen == key) for key in config.environments}
        self._datasets = {
            key: _created(reasoning_gym.create_dataset, key, mixed.config, sizes[key], self._seed_of(key, seed))
            for key, mixed in config.environments.items()
            if sizes[key]
        }

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Task:
        environment, number = self._order[index]
        entry = _as_json(self._datasets[environment][number])
        prompt = (Message("user", entry["question"]),)
        if self.config.system is not None:
            prompt = (Message("system", self.config.system), *prompt)
        columns = {
            "answer": entry["answer"],
            "data_source": environment,
            "reasoning_gym": {
                "dataset": environment,
                "config": self.config.environments[environment].config,
                "entry": entry,
            },
        }
        return Task(f"{environment}-{number}", prompt, columns, self.name)

    def _seed_of(self, environment: str, seed: int) -> int:
        """A 31-bit seed of an environment's problems."""
        fixed = self.config.problem_seed
        address = (seed, self.name) if fixed is None else (fixed,)
        return stream("reasoning gym", *address, environment) % 2**31


def _no_reasoning_gym(where: str) -> MissingPackage:
    return MissingPackage("reasoning-gym", "envs", f"make the problems of {where}")


def _interleaved(weights: Mapping[str, float], size: int) -> list[tuple[str, int]]:
    """(name, how often it occurred before) for each of `size` places. A place goes to the name that is furthest behind
    its share."""
    total = sum(weights.values())
    counts = dict.fromkeys(weights, 0)
    order: list[tuple[str, int]] = []
    for place in range(1, size + 1):
        name = max(weights, key=lambda key: place * weights[key] / total - counts[key])
        order.append((name, counts[name]))
        counts[name] += 1
    return order


class _ReasoningGymDataset(Protocol):
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any], /) -> float: ...


def _created(
    create: Callable[..., _ReasoningGymDataset], name: str, settings: Mapping[str, Any], size: int, seed: int
) -> _ReasoningGymDataset:
    """A Reasoning Gym dataset whose recorded problems can be scored."""
    try:
        dataset = create(name, size=size, seed=seed, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"Reasoning Gym environment {name!r} with {dict(settings)}",
            f"{type(error).__name__}: {error}",
            "correct its `config` (size and seed are not part of it)",
        ) from error
    entry = dataset[0]  # rewards score entries that were stored as JSON, so the score must survive it
    answer = entry["answer"]
    if answer is not None and dataset.score_answer(answer, entry) != dataset.score_answer(answer, _as_json(entry)):
        raise ConfigError(
            f"Reasoning Gym environment {name!r}",
            "its score changes if a problem is stored as JSON",
            "use another environment",
        )
    return dataset


def _as_json(entry: object) -> dict[str, Any]:
    """The entry after a JSON round trip: tuples become lists, keys become text."""
    return json.loads(json.dumps(entry, allow_nan=False))


class PythonTasks(RowTasks):
    """The rows (mappings, treated like the rows of a file) or Tasks that a function of yours returns."""

    class Config(RowTasks.Config):
        """Which function, and how a row becomes a task."""

        source: PluginPath
        """`file.py:function` or `package.module:function`, relative to the config."""
        args: dict[str, Any] = Field(default_factory=dict)
        """Keyword arguments of the function."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            try:
                function_of(self)
            except TriviumError as error:
                yield Problem(f"{where}.source", error.asked, error.found, error.do)

    config: Config

    @property
    def origin(self) -> str:
        return self.config.source

    def rows(self) -> Iterator[tuple[str, Any]]:
        rows = function_of(self.config)(**self.config.args)
        if not isinstance(rows, Iterable):
            raise DataError(f"rows or Tasks from {self.origin}", type(rows).__name__, "return a list, or yield them")
        for number, row in enumerate(rows):
            yield f"{self.origin}, row {number}", row

    def task_of(self, where: str, row: object) -> Task:
        if isinstance(row, Task):
            json_value([row.task_id, *(message.content for message in row.prompt)], where)
            return replace(row, taskset=self.name, columns=json_value(row.columns, where))
        return super().task_of(where, row)


def function_of(config: PythonTasks.Config) -> Callable[..., Any]:
    """The function that `source` names. Raises ConfigError if it is not a function."""
    function = resolve("tasks", config.source)
    if not callable(function):
        raise ConfigError(f"the function {config.source}", f"{type(function).__name__}", "name a function")
    return function
