"""The curves and marks of a run, which the pages of `trivium view` draw, and the charts of `trivium report`: SVG with
axes, a line per metric and marks at the beginning of stages, without a script."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from itertools import pairwise
from typing import NamedTuple

from trivium.buffers.step_log import resumed_after
from trivium.errors import DataError
from trivium.inspection.changing_files import Row
from trivium.inspection.run import RecordedRun
from trivium.metrics import declared, graded_accuracies

_FLOORS = {"nats": 1e-6, "tokens": 1e-2, "tokens/s": 1e-2, "versions": 1e-2, "s": 1e-6, "1/s": 1.0}
"""Unit -> the smallest difference that an axis shows; a smaller one is a rounding error."""
_FLOOR = 1e-10
"""The smallest difference for metrics without a unit, which include learning rates."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 190, 46, 8, 8, 22
_POINTS = 300
"""Most points of a drawn curve; each is the mean of the points that it replaces."""
_COLOURS = 6
_SMOOTHED = 40
"""Number of points from which a smoothed curve is drawn over the noisy one."""


Scale = Callable[[float], float]
"""Maps a number to its position on an axis."""


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
    described = {key: described_metric(key) for key, each in points.items() if each}
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


# --------------------------------------------------------------------------- as SVG


def line_chart(title: str, curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    """Returns a figure; `data-points` holds the numbers for tooltips. Curves must not be empty."""
    parts, drawn = _drawn(curves, marks)
    steps = [step for each, _ in drawn for step in each]
    legend = "".join(
        f'<span title="{escape(curve.help)}"><i class="c{number % _COLOURS}"></i>{escape(curve.key)} '
        f"<b>{shown(curve.values[-1])}</b> {escape(curve.unit)}</span>"
        for number, curve in enumerate(curves)
    )
    points = json.dumps([[steps, [_short(value) for value in values]] for steps, values in drawn])
    frame = f"{_LEFT},{_WIDTH - _RIGHT},{min(steps)},{max(steps)}"
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" data-frame="{frame}" data-points="{escape(points)}">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def _drawn(curves: Sequence[Curve], marks: Sequence[Mark]) -> tuple[list[str], list[tuple[list[int], list[float]]]]:
    """Returns (the elements of a chart, the points of each curve)."""
    drawn = [thinned(curve) for curve in curves]
    steps = [step for each, _ in drawn for step in each]
    values = [value for _, each in drawn for value in each]
    x = _scale(min(steps), max(max(steps), min(steps) + 1), _LEFT, _WIDTH - _RIGHT)
    ticks = _ticks(min(values), max(values), max(curve.floor for curve in curves))
    y = _scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(ticks, y), *_steps(min(steps), max(steps), x)]
    for mark in marks:
        if min(steps) <= mark.step <= max(steps):
            place = f'x1="{x(mark.step):.1f}" x2="{x(mark.step):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
            parts.append(f'<line class="mark" {place}><title>{escape(mark.text)}</title></line>')
    for number, points in enumerate(drawn):
        colour = f"c{number % _COLOURS}"
        smooth = len(points[0]) >= _SMOOTHED
        for part in _unbroken(*points):
            parts.append(_line(part, x, y, f"{colour} noise" if smooth else colour))
            if smooth:
                parts.append(_line((part[0], _smoothed(part[1])), x, y, colour))
            if len(part[0]) == 1:
                parts.append(f'<circle class="{colour}" cx="{x(part[0][0]):.1f}" cy="{y(part[1][0]):.1f}" r="2.5"/>')
    return parts, drawn


def thinned(curve: Curve) -> tuple[list[int], list[float]]:
    """Returns steps and values of at most `_POINTS` points."""
    size = math.ceil(len(curve.steps) / _POINTS)
    parts = range(0, len(curve.steps), size)
    means = [sum(part := curve.values[at : at + size]) / len(part) for at in parts]
    return [curve.steps[min(at + size, len(curve.steps)) - 1] for at in parts], means


def _unbroken(steps: list[int], values: list[float]) -> Iterator[tuple[list[int], list[float]]]:
    """Yields the parts of a curve between gaps: a stage that ends early leaves steps out."""
    usual = sorted(b - a for a, b in pairwise(steps))[len(steps) // 2 - 1] if len(steps) > 2 else steps[-1] - steps[0]
    start = 0
    for end in [*(at + 1 for at, (a, b) in enumerate(pairwise(steps)) if b - a > 4 * usual), len(steps)]:
        yield steps[start:end], values[start:end]
        start = end


def shown(value: float) -> str:
    """Formats a number with four significant digits."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean of up to nine values around each."""
    return [sum(part := values[max(0, at - 4) : at + 5]) / len(part) for at in range(len(values))]


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Returns a function from numbers to their positions on an axis."""
    factor = (end - start) / ((high - low) or 1.0)
    return lambda value: start + (value - low) * factor


def _ticks(low: float, high: float, floor: float = 0.0) -> list[float]:
    """Returns round numbers from one below the lowest value to one above the highest. If the values differ by less than
    `floor`, which is rounding error, the axis covers their surroundings instead of magnifying the difference."""
    if max(abs(low), abs(high)) < floor:
        low, high = 0.0, 1.0
    if high - low < max(floor, 1e-9 * max(abs(low), abs(high), 1e-30)):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _grid(ticks: Sequence[float], y: Scale) -> Iterator[str]:
    for tick in ticks:
        at = f"{y(tick):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at}" dy=".32em" text-anchor="end">{shown(_short(tick))}</text>'


def _steps(first: int, last: int, x: Scale) -> Iterator[str]:
    lowest, second, *_ = _ticks(first, max(last, first + 1))
    step = max(1, round(second - lowest))
    for tick in range(math.ceil(first / step) * step, last + 1, step):
        yield f'<text x="{x(tick):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{tick}</text>'


def _line(points: tuple[Sequence[int], Sequence[float]], x: Scale, y: Scale, kind: str) -> str:
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(*points, strict=True))
    return f'<polyline class="{kind}" points="{places}"/>'
