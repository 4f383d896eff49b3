"""Several algorithms in one step: each source's groups are learned from by its own, and one update follows the sum of
their losses.

Legend: B sequences, L tokens; a number from 1 on stands for each source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.objective import FORWARD_COLUMNS, PolicyObjective, required
from trivium.algorithms.rollout_metrics import describe, describe_tokens
from trivium.metrics import depends_on_machine
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.models.late import torch
from trivium.schedule import source_metric
from trivium.types import SCORES, SOURCE, AnyArray, Batch, Group, Metrics

if TYPE_CHECKING:
    from torch import Tensor

Part = TypeVar("Part", GroupAlgorithm, PolicyObjective)


@dataclass(frozen=True)
class MixedObjective:
    """The weighted sum of the policy losses of several sources. Each is normalised by the counts of its source in the
    whole optimizer step, so the gradient is the sum of those of separate steps."""

    parts: Mapping[str, PolicyObjective]
    """By source. Their order gives the sources their numbers in the column `types.SOURCE`."""
    weights: Mapping[str, float]
    role: str = "policy"
    head: str = "lm"
    unit: str = "sequence"

    def loss(self, inputs: LossInputs, denominators: LossDenominators) -> LossOutputs:
        """This micro-batch's part of the step's loss. Metrics are those of each source (`source_metric`)."""
        numbers = inputs.columns[SOURCE].amax(-1)
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        tokens: dict[str, Tensor] = {}
        for number, (name, objective) in enumerate(self.parts.items(), 1):
            rows = torch.nonzero(numbers == number).flatten()
            own = denominators.sources.get(number)
            if own is None or not len(rows):
                continue
            outputs = objective.loss(_rows_of(inputs, rows, _foreign(self.parts, objective)), own)
            losses.append(self.weights[name] * outputs.loss)
            scale = denominators.tokens / max(own.tokens, 1)  # the learner divides by all tokens
            sums |= {source_metric(name, key): value * scale for key, value in outputs.sums.items()}
            sums[source_metric(name, "train/loss/policy")] = outputs.loss.detach() * denominators.tokens
            maxima |= {source_metric(name, key): value for key, value in outputs.maxima.items()}
            for key, value in outputs.tokens.items():
                grid = tokens.setdefault(key, value.new_full(inputs.response_mask.shape, torch.nan))
                grid[rows] = value
        if not losses:  # no row has a trained token
            losses.append(required(inputs.log_prob, "log_prob").sum() * 0.0)
        return LossOutputs(torch.stack(losses).sum(), sums, maxima, tokens)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({SOURCE}).union(*(objective.needs for objective in self.parts.values()))

    @property
    def looks_at(self) -> frozenset[str]:
        return frozenset[str]().union(*(objective.looks_at for objective in self.parts.values()))

    @property
    def on_policy(self) -> str:
        return "none: each source has its own"

    def select(self, batch: Batch, *address: int) -> Batch:
        """Applies each source's selections to its part of the mini-batch. Columns of sources without rows are 0."""
        batch = _mapped(batch, self.parts, lambda objective, own: objective.select(own, *address))
        missing = self.needs - batch.columns.keys() - FORWARD_COLUMNS
        return batch.with_columns(**{name: [np.zeros(n, np.float32) for n in batch.lengths] for name in missing})

    def derived(self, means: Metrics) -> Metrics:
        for name, objective in self.parts.items():
            prefix = source_metric(name, "")
            own = {key.removeprefix(prefix): value for key, value in means.items() if key.startswith(prefix)}
            means = {**means, **_named(name, objective.derived(own))}
        return means


def _rows_of(inputs: LossInputs, rows: Tensor, without: AbstractSet[str]) -> LossInputs:
    """The inputs of the loss for some of the sequences, without these columns."""
    grids = ("response_mask", "policy_version", "log_prob", "entropy", "values", "candidate_log_prob")
    chosen = {name: None if (grid := getattr(inputs, name)) is None else grid[rows] for name in grids}
    columns = {name: grid[rows] for name, grid in inputs.columns.items() if name not in without}
    return replace(inputs, columns=columns, **chosen)


def _foreign(parts: Mapping[str, Part], own: Part) -> AbstractSet[str]:
    """The columns that only other sources read, scores aside: a loss would take their presence for its own."""

    def read(part: Part) -> AbstractSet[str]:
        return part.columns if isinstance(part, GroupAlgorithm) else part.needs | part.looks_at

    return frozenset[str]().union(*map(read, parts.values())) - read(own) - {*SCORES.values()}


@dataclass(frozen=True)
class MixedAlgorithm(GroupAlgorithm):
    """An algorithm for each source. They share the number of passes and of mini-batches, and the teacher's model."""

    parts: Mapping[str, GroupAlgorithm] = field(default_factory=dict[str, GroupAlgorithm])
    """By source, which is the taskset of its tasks."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """The factor of each source's loss."""

    @classmethod
    def of(cls, parts: Mapping[str, GroupAlgorithm], weights: Mapping[str, float]) -> MixedAlgorithm:
        first, *others = parts.values()
        return cls(
            name="mixed",
            objectives=(_objective(parts, weights, first.first_version),),  # pyright: ignore[reportArgumentType]
            epochs=first.epochs,
            mini_batches=first.mini_batches,
            refill=max(part.refill for part in parts.values()),
            max_new_tokens=first.max_new_tokens,
            teacher=next((part.teacher for part in (first, *others) if part.teacher is not None), None),
            parts=parts,
            weights=weights,
        )

    def objectives_at(self, version: int) -> Any:
        return (_objective(self.parts, self.weights, version),)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.needs for part in self.parts.values()))

    @property
    def advantage_needs(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.advantage_needs for part in self.parts.values()))

    @property
    def columns(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.columns for part in self.parts.values()))

    @property
    def greedy_baseline(self) -> bool:
        return any(part.greedy_baseline for part in self.parts.values())

    def filter(self, groups: Sequence[Group]) -> tuple[list[Group], Metrics]:
        """(the groups to train on, in order, metrics of all rollouts and of each source's)."""
        kept: set[int] = set()
        refused_by: Counter[str] = Counter()
        metrics: Metrics = {}
        for name, part in self.parts.items():
            own, measured = part.filter([group for group in groups if group.task.taskset == name])
            kept |= {id(group) for group in own}
            prefix = "rollout/refused/"
            refused_by.update(
                {key.removeprefix(prefix): int(n) for key, n in measured.items() if key.startswith(prefix)}
            )
            metrics |= _named(name, measured)
        trained = [group for group in groups if id(group) in kept]
        return trained, describe(groups, trained, refused_by) | metrics

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The experiences of all groups, in their order, with the number of each one's source as a column."""
        batches: list[Batch] = []
        for number, (name, part) in enumerate(self.parts.items(), 1):
            own = part.batch([group for group in groups if group.task.taskset == name])
            batches.append(
                own.with_columns(**{SOURCE: [np.full(length, number, np.float32) for length in own.lengths]})
            )
        return _joined(batches, {group.group_id: place for place, group in enumerate(groups)})

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        metrics: Metrics = {}

        def estimated(part: GroupAlgorithm, own: Batch) -> Batch:
            own, measured = part.advantages(own)
            name = next(name for name, each in self.parts.items() if each is part)
            metrics.update(_named(name, measured))
            return own

        batch = _mapped(batch, self.parts, estimated)
        return batch, describe_tokens(batch) | metrics

    def state(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self.parts.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.restore(state[name])


def _objective(parts: Mapping[str, GroupAlgorithm], weights: Mapping[str, float], version: int) -> MixedObjective:
    objectives = {name: part.objectives_at(version) for name, part in parts.items()}
    return MixedObjective({name: cast(PolicyObjective, each[0]) for name, each in objectives.items()}, weights)


def _named(source: str, metrics: Metrics) -> Metrics:
    """The metrics of a source, without those of the clock and the machine."""
    return {source_metric(source, key): value for key, value in metrics.items() if not depends_on_machine(key)}


def _mapped(batch: Batch, parts: Mapping[str, Part], change: Callable[[Part, Batch], Batch]) -> Batch:
    """The batch with each source's rows changed by `change(its part, its rows)`."""
    numbers = np.array([array[0] for array in batch.columns.get(SOURCE, ())])
    changed: list[Batch] = []
    for number, (name, part) in enumerate(parts.items(), 1):
        rows = batch.select(np.flatnonzero(numbers == number))
        if not len(rows):  # all its groups were refused, or none has arrived
            continue
        own = change(part, rows.without(*_foreign(parts, part)))
        changed.append(replace(own, metrics=_named(name, dict(own.metrics))))
    order: dict[str, int] = {}
    for e in batch.experiences:
        order.setdefault(e.group_id, len(order))
    joined = _joined(changed, order)
    return replace(joined, metrics={**batch.metrics, **joined.metrics})


def _joined(batches: Sequence[Batch], order: Mapping[str, int]) -> Batch:
    """The rows of all batches by the order of their groups. A column that a batch lacks is 0 in its rows; without the
    column `counted`, every token counts."""
    places = sorted(
        (order[e.group_id], number, row)
        for number, batch in enumerate(batches)
        for row, e in enumerate(batch.experiences)
    )
    names = dict.fromkeys(name for batch in batches if len(batch) for name in batch.columns)
    columns = {name: [*_column(batches, places, name)] for name in names}
    metrics = reduce(lambda all_metrics, batch: {**all_metrics, **batch.metrics}, batches, dict[str, float]())
    experiences = tuple(batches[number].experiences[row] for _, number, row in places)
    return replace(Batch(experiences, metrics=metrics), columns=columns)


def _column(batches: Sequence[Batch], places: Sequence[tuple[int, int, int]], name: str) -> Iterator[AnyArray]:
    known = next(batch.columns[name][0] for batch in batches if len(batch) and name in batch.columns)
    for _, number, row in places:
        batch = batches[number]
        if name in batch.columns:
            yield batch.columns[name][row]
        else:
            yield np.full((len(batch.experiences[row]), *known.shape[1:]), name == "counted", known.dtype)
