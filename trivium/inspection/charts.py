"""The curves and marks of a run, which the pages of `trivium view` and `trivium report` draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from trivium.buffers.step_log import resumed_after
from trivium.foundation.errors import DataError
from trivium.foundation.metrics import declared, graded_accuracies
from trivium.inspection.changing_files import Row
from trivium.inspection.run import RecordedRun

_FLOORS = {"nats": 1e-6, "tokens": 1e-2, "tokens/s": 1e-2, "versions": 1e-2, "s": 1e-6, "1/s": 1.0}
"""Unit -> the smallest difference that an axis shows; a smaller one is a rounding error."""
_FLOOR = 1e-10
"""The smallest difference for metrics without a unit, which include learning rates."""
_POINTS = 300
"""Most points of a curve in a report; each is the mean of the points that it replaces."""


class Chart(NamedTuple):
    """One chart of the overview."""

    title: str
    patterns: tuple[str, ...]
    """Metric keys; `*` stands for any text."""
    lacking: str = ""
    """The reason why a run may not log them."""


CHARTS = (
    Chart("Reward", ("reward/mean",), "rewards are of runs that roll out tasks"),
    Chart("Held-out reward", ("eval/*/reward",), "set evaluation.taskset"),
    Chart("Accuracy", ("eval/*/accuracy",), "set evaluation.taskset; graded rewards have evaluation.threshold"),
    Chart("Loss", ("train/loss/*",)),
    Chart("Completion length", ("rollout/response_tokens",)),
    Chart("Entropy", ("train/entropy",)),
    Chart("KL to the reference", ("train/ref_kl",), "set algorithm.kl.coef"),
    Chart("KL of the update", ("train/kl",), "the loss reads no old log-probabilities"),
    Chart("Engine-trainer mismatch (KL)", ("mismatch/kl",), "the step has no sampled tokens"),
    Chart("Clipped tokens", ("train/clip_fraction",), "the loss does not clip"),
    Chart("Gradient norm", ("train/grad_norm/*",)),
    Chart("Learning rate", ("train/lr/*",)),
    Chart("Staleness", ("rollout/staleness",)),
    Chart("Failed rollouts", ("rollout/failed", "eval/*/failed")),
    Chart("Truncated rollouts", ("rollout/truncated",)),
    Chart("Groups of equal rewards", ("reward/equal_groups",)),
    Chart("Seconds of a step", ("time/step", "time/wait")),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric by train step, in order; NaN and infinities are left out."""

    key: str
    help: str
    unit: str
    steps: list[int]
    values: list[float]

    @property
    def floor(self) -> float:
        """The smallest difference that the axis shows."""
        return _FLOORS.get(self.unit, _FLOOR)


@dataclass(frozen=True, slots=True)
class Mark:
    """An event between two steps."""

    step: int
    """The last step before the event."""
    kind: str
    """`stage`, `resume` or `change`."""
    text: str


def keys_of(rows: Sequence[Row]) -> list[str]:
    """Returns every metric key of the rows, sorted, without accuracies of graded rewards."""
    keys = {key for row in rows for key in row}
    return sorted(keys - {"step"} - graded_accuracies(rows))


def matching(keys: Sequence[str], chart: Chart) -> list[str]:
    """Returns the keys that a chart shows."""
    return [key for key in keys if any(fnmatchcase(key, pattern) for pattern in chart.patterns)]


def curves(rows: Iterable[Row], keys: Iterable[str]) -> dict[str, Curve]:
    """Returns the curves of these keys that any row has. If a step has several rows, the last one counts."""
    points: dict[str, dict[int, float]] = {key: {} for key in keys}
    for row in rows:
        for key in points.keys() & row.keys():
            if math.isfinite(row[key]):
                points[key][int(row["step"])] = row[key]
    described = {key: described_metric(key) for key, values_by_step in points.items() if values_by_step}
    return {
        key: Curve(key, *about, sorted(points[key]), [points[key][step] for step in sorted(points[key])])
        for key, about in described.items()
    }


def described_metric(key: str) -> tuple[str, str]:
    """Returns (help, unit) of a metric; empty for a metric that user code declared in the run's process."""
    try:
        metric = declared(key)
    except DataError:
        return "", ""
    return metric.help, metric.unit


def marks(run: RecordedRun) -> list[Mark]:
    """Returns marks for the beginnings of stages, the resumed sessions and the changes by `--change`, in order of
    steps."""
    result, stages = list[Mark](), run.config.stage_configs()
    if len(stages) > 1:
        kinds = enumerate(stage.algorithm.kind for stage in stages)
        result = [Mark(run.stage_bounds[number], "stage", f"stage {number}: {kind}") for number, kind in kinds]
    result += [Mark(step, "resume", f"resumed after step {step}") for step in resumed_after(run.path)]
    for row in run.changes:
        changed = ", ".join(f"{where}: {before} → {after}" for where, (before, after) in row["changes"].items())
        result.append(Mark(row["step"], "change", f"changed {changed}"))
    return sorted(result, key=lambda mark: mark.step)


def thinned(curve: Curve) -> Curve:
    """Returns a curve of at most `_POINTS` points."""
    size = math.ceil(len(curve.steps) / _POINTS)
    parts = range(0, len(curve.steps), size)
    means = [sum(part := curve.values[at : at + size]) / len(part) for at in parts]
    return replace(curve, steps=[curve.steps[min(at + size, len(curve.steps)) - 1] for at in parts], values=means)
