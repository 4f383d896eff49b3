"""Validation under verl's metric names. verl bootstraps its estimates over n of N samples; these are exact."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

from trivium.evaluate import Evaluator, maj_at_k
from trivium.foundation.metrics import declare
from trivium.frontdoors.verl.group_rewards import GroupRewards, number_of
from trivium.frontdoors.verl.objects.batches.batch_view import living
from trivium.types import Group, Metrics, Trajectory

declare(
    "val-core/*",
    "validation: `<data source>/<variable>/<statistic>` of the samples of a task, at the most samples: mean@N, and "
    "best@N and maj@N over all choices of N",
    better="up",
)
declare("val-aux/*", "the other statistics and variables of a validation, and the turns of its samples")

_ALWAYS = ("reward", "acc")
"""Variables that are 0 for a failed rollout."""


@dataclass
class Validator(Evaluator):
    """Samples rollouts of the validation set, scores them as one batch, and reports per data source."""

    rewards: GroupRewards | None = None
    """None if explorers score their rollouts."""
    source_key: str = "data_source"
    """The column that groups the results."""
    results: Metrics = field(default_factory=dict[str, float], init=False)
    """Metrics of the last validation."""
    samples_seen: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], init=False)
    """Prompts, completions and scores of the last validation."""

    async def run(self, version: int) -> Metrics:
        """Returns metrics under `eval/<taskset>/`, `val-core/` and `val-aux/`."""
        groups = await self.rollouts(version)
        if self.rewards is None:
            extras: list[Mapping[str, Any]] = [member.metrics for _, member in living(groups)]
        else:
            groups, extras = await asyncio.to_thread(self.rewards, groups, global_steps=version, validate=True)
        extra_of = {
            (group.group_id, member.index): extra for (group, member), extra in zip(living(groups), extras, strict=True)
        }
        tables = [(self._source(group), _table(group, extra_of)) for group in groups]
        self.samples_seen = [
            sample(group, member, extra_of[group.group_id, member.index]) for group, member in living(groups)
        ]
        self.results = {**self.measured(groups, version), **statistics(tables), **_turns(groups)}
        return self.results

    def _source(self, group: Group) -> str:
        return str(group.task.columns.get(self.source_key, group.task.taskset))


def sample(group: Group, member: Trajectory, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rollout under verl's names, with the extra information of its reward."""
    return {
        "input": "\n".join(message.content for message in group.task.prompt),
        "output": member.completion,
        "score": member.reward,
        "gts": group.task.columns.get("answer"),
        **{name: value for name, value in extra.items() if name != "score"},
    }


VariableTable = Mapping[str, Sequence[Any]]
"""Variable -> its value in each sample of one task."""


def _table(group: Group, extra_of: Mapping[tuple[str, int], Mapping[str, Any]]) -> VariableTable:
    """Returns the variables that have a value in all samples of a task."""
    rows = [
        {"reward": member.reward, **extra_of[group.group_id, member.index]} if member.failure is None else None
        for member in group.trajectories
    ]
    names = dict.fromkeys(name for row in rows if row is not None for name in row if name != "score")
    table: dict[str, list[Any]] = {}
    for name in names:
        # A failed rollout has no other numbers, so its task is left out of their averages.
        values = [0.0 if row is None and name in _ALWAYS else None if row is None else row.get(name) for row in rows]
        if all(value is not None for value in values):
            table[name] = values
    return table or {"reward": [0.0] * len(rows)}


def statistics(tables: Sequence[tuple[str, VariableTable]]) -> Metrics:
    """Returns `val-core/` and `val-aux/` metrics of (data source, table) pairs, averaged over the tasks of a source
    (`averages`)."""
    largest = max((len(values) for _, table in tables for values in table.values()), default=0)
    core = {
        source: "acc" if any("acc" in table for s, table in tables if s == source) else "reward" for source, _ in tables
    }
    metrics: Metrics = {}
    for (source, name, metric), average in averages(tables).items():
        is_core = name == core[source] and metric.partition("@")[0] in ("mean", "maj", "best")
        # verl counts only the statistics over the most samples as core ones.
        is_core = is_core and metric.partition("/")[0].endswith(f"@{largest}")
        area = "val-core" if is_core else "val-aux"
        metrics[f"{area}/{source}/{name}/{metric}"] = average
    return metrics


def averages(tables: Sequence[tuple[str, VariableTable]]) -> dict[tuple[str, str, str], float]:
    """Returns (data source, variable, statistic) -> the average of `of_task` over the tasks of a source. It leaves out
    tasks in which a sample has no number for the variable (`number_of`)."""
    rows: dict[tuple[str, str, str], list[float]] = {}
    for source, table in tables:
        for name, values in table.items():
            numbers = [number for value in values if (number := number_of(value)) is not None]
            if len(numbers) < len(values):
                continue
            for metric, number in of_task(numbers, table.get("pred")).items():
                rows.setdefault((source, name, metric), []).append(number)
    return {key: sum(numbers) / len(numbers) for key, numbers in rows.items()}


def of_task(values: Sequence[float], predictions: Sequence[Any] | None) -> Metrics:
    """Returns the statistics of one variable over the N samples of a task: `mean@N` and `std@N`. For n = 2, 4, ... N,
    it adds mean and standard deviation, over all choices of n samples, of the best, the worst, and (with predictions)
    the sample with the most frequent prediction."""
    number = len(values)
    metrics = {f"mean@{number}": sum(values) / number}
    if number == 1:
        return metrics
    metrics[f"std@{number}"] = _deviation([(1 / number, value) for value in values])
    for n in sorted({*(2**power for power in range(1, number.bit_length()) if 2**power <= number), number}):
        choices = {"best": _extreme(sorted(values), n), "worst": _extreme(sorted(values, reverse=True), n)}
        if predictions is not None:
            choices["maj"] = _majority(values, [str(p) for p in predictions], n)
        for name, outcomes in choices.items():
            metrics[f"{name}@{n}/mean"] = sum(weight * value for weight, value in outcomes)
            metrics[f"{name}@{n}/std"] = _deviation(outcomes)
    return metrics


def _extreme(ordered: Sequence[float], n: int) -> list[tuple[float, float]]:
    """Returns (probability, value) of the last, in this order, of n values drawn without replacement."""
    total = comb(len(ordered), n)
    return [(comb(place, n - 1) / total, value) for place, value in enumerate(ordered)]


def _majority(values: Sequence[float], predictions: Sequence[str], n: int) -> list[tuple[float, float]]:
    """Returns (probability, value) of the most frequent prediction among n. Ties share the probability."""
    by_prediction: dict[str, list[float]] = {}
    for prediction, value in zip(predictions, values, strict=True):
        by_prediction.setdefault(prediction, []).append(value)
    return [(maj_at_k(predictions, p, n), sum(of_p) / len(of_p)) for p, of_p in by_prediction.items()]


def _deviation(outcomes: Sequence[tuple[float, float]]) -> float:
    mean = sum(weight * value for weight, value in outcomes)
    return math.sqrt(max(0.0, sum(weight * (value - mean) ** 2 for weight, value in outcomes)))


def _turns(groups: Sequence[Group]) -> Metrics:
    turns = [2 * len(member.turns) for _, member in living(groups)]
    if not turns:
        return {}
    return {
        "val-aux/num_turns/min": min(turns),
        "val-aux/num_turns/max": max(turns),
        "val-aux/num_turns/mean": sum(turns) / len(turns),
    }
