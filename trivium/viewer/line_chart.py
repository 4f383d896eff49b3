"""Draws curves as SVG without a script: axes, a line per metric, marks at the beginning of stages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from trivium.viewer.run_data import Curve, Mark

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 190, 46, 8, 8, 22
_POINTS = 300
"""Most points of a drawn curve; each is the mean of the points that it replaces."""
_COLOURS = 6
_SMOOTHED = 40
"""Number of points from which a smoothed curve is drawn over the noisy one."""


def line_chart(title: str, curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    """Returns a figure; `data-points` holds the numbers for tooltips. Curves must not be empty."""
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


class _scale:
    """Maps a number to a position on an axis."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = low, start
        self._factor = (end - start) / ((high - low) or 1.0)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._factor


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


def _grid(ticks: Sequence[float], y: _scale) -> Iterator[str]:
    for tick in ticks:
        at = f"{y(tick):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at}" dy=".32em" text-anchor="end">{shown(_short(tick))}</text>'


def _steps(first: int, last: int, x: _scale) -> Iterator[str]:
    step = max(1, round(_ticks(first, max(last, first + 1))[1] - _ticks(first, max(last, first + 1))[0]))
    for tick in range(math.ceil(first / step) * step, last + 1, step):
        yield f'<text x="{x(tick):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{tick}</text>'


def _line(points: tuple[Sequence[int], Sequence[float]], x: _scale, y: _scale, kind: str) -> str:
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(*points, strict=True))
    return f'<polyline class="{kind}" points="{places}"/>'
