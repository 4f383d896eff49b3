"""The page of the arena: intervals, the table and the plot, all from the lines of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Rows = Sequence[Mapping[str, Any]]
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % quantile of Student's t by the number of seeds."""


@dataclass(frozen=True)
class Interval:
    """The mean of several seeds with its 95 % t-interval; without bounds for fewer than three."""

    mean: float
    half: float | None
    seeds: int

    def __str__(self) -> str:
        spread = "" if self.half is None else f" ± {self.half:.2f}"
        return f"{self.mean:.2f}{spread} ({self.seeds})"


@dataclass(frozen=True)
class Layout:
    """What the page needs to know of the arena."""

    presets: Sequence[str]
    titles: Mapping[str, str]
    """The heading of each task."""
    seeds: Sequence[int]
    absent: Mapping[tuple[str, str], str]
    """(preset, task) that do not take part, with the reason."""
    chance: Mapping[str, float]
    """The accuracy of each start policy."""


def interval(values: Sequence[float]) -> Interval:
    half = STUDENT[len(values)] * stdev(values) / sqrt(len(values)) if len(values) in STUDENT else None
    return Interval(fmean(values), half, len(values))


def reported(rows: Rows, preset: str, task: str, seeds: Sequence[int]) -> list[Mapping[str, Any]]:
    """The rows of the reported seeds, all with the learning rate of the selection."""
    found = [row for row in rows if (row["preset"], row["task"]) == (preset, task) and row["seed"] in seeds]
    return sorted((row for row in found if "error" not in row), key=lambda row: row["seed"])


def table(rows: Rows, layout: Layout) -> str:
    """A line for each preset, a column for each task: the accuracy after training and the learning rate."""
    head = "| preset | " + " | ".join(layout.titles.values()) + " |\n|---|" + "---|" * len(layout.titles)
    lines = [head]
    for preset in layout.presets:
        cells = [_cell(rows, preset, task, layout) for task in layout.titles]
        if any(cell.startswith(tuple("0123456789*f")) for cell in cells):
            lines.append(f"| `{preset}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: Rows, preset: str, task: str, layout: Layout) -> str:
    if (preset, task) in layout.absent:
        return "–"
    found = reported(rows, preset, task, layout.seeds)
    if not found:
        errors = [row for row in rows if (row["preset"], row["task"]) == (preset, task) and "error" in row]
        return "failed" if errors else "not run"
    return f"{interval([row['accuracy'] for row in found])}, {found[0]['lr']:g}"


def not_run(rows: Rows, layout: Layout) -> str:
    """A line for each task with the presets that have no reported cell."""
    lines: list[str] = []
    for task, title in layout.titles.items():
        missing = [p for p in layout.presets if not reported(rows, p, task, layout.seeds)]
        names = [f"`{preset}`" for preset in missing if (preset, task) not in layout.absent]
        lines.append(f"- {title}: {', '.join(names) or 'none'}")
    return "\n".join(lines)


def observation_table(rows: Rows, task: str, layout: Layout) -> str:
    """The held-out loss of observations of the presets that have been measured."""
    lines = ["| preset | loss of held-out observations, nats a token |", "|---|---|"]
    for preset in layout.presets:
        found = [row for row in reported(rows, preset, task, layout.seeds) if "observation_loss" in row]
        if found:
            lines.append(f"| `{preset}` | {interval([row['observation_loss'] for row in found])} |")
    return "\n".join(lines)


def write_page(rows: Rows, layout: Layout, observed: str, page: Path) -> None:
    """Writes the tables and the plot of these results into the page, between its marks; its text stays as it is."""
    parts = {
        "accuracy": table(rows, layout),
        "observations": observation_table(rows, observed, layout),
        "absent": not_run(rows, layout),
    }
    text = page.read_text()
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, after = text.index(begin) + len(begin), text.index(end)  # ValueError if the page has no such mark
        text = f"{text[:before]}{part}\n{text[after:]}"
    page.write_text(text)
    page.with_suffix(".svg").write_text(svg_of(rows, layout))


# --------------------------------------------------------------------------- the plot

WIDTH, LEFT, TOP, ROW = 210, 190, 34, 15
COLORS = ("#2563eb", "#b45309", "#047857")


def svg_of(rows: Rows, layout: Layout) -> str:
    """A panel for each task: a dot for the mean accuracy of each preset, a bar for its interval, and a dashed line at
    the accuracy of the start policy."""
    shown = [
        preset for preset in layout.presets if any(reported(rows, preset, task, layout.seeds) for task in layout.titles)
    ]
    height, across = TOP + ROW * len(shown) + 30, LEFT + (WIDTH + 24) * len(layout.titles)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {height}"',
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, preset in enumerate(shown):
        y = TOP + ROW * (number + 0.5)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{preset}</text>')
    bottom = TOP + ROW * len(shown)
    for column, (task, title) in enumerate(layout.titles.items()):
        left, color = LEFT + column * (WIDTH + 24), COLORS[column % len(COLORS)]
        parts += [
            f'<text x="{left}" y="{TOP - 12}">{title}: accuracy</text>',
            f'<path d="M{left} {TOP}V{bottom}H{left + WIDTH}" fill="none" stroke="black"/>',
            *(f'<text x="{left + WIDTH * v}" y="{bottom + 14}" text-anchor="middle">{v:g}</text>' for v in (0, 0.5, 1)),
        ]
        if task in layout.chance:
            x = left + WIDTH * layout.chance[task]
            parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#9ca3af" stroke-dasharray="3 3"/>')
        for number, preset in enumerate(shown):
            found = reported(rows, preset, task, layout.seeds)
            if found:
                y = TOP + ROW * (number + 0.5)
                parts += _mark(left, y, interval([row["accuracy"] for row in found]), color)
    return "\n".join([*parts, "</svg>", ""])


def _mark(left: float, y: float, found: Interval, color: str) -> list[str]:
    low, high = (min(1.0, max(0.0, found.mean + sign * (found.half or 0.0))) for sign in (-1, 1))
    ends = f"M{left + WIDTH * low:.1f} {y:.1f}H{left + WIDTH * high:.1f}"
    return [
        f'<path d="{ends}" stroke="{color}" stroke-width="2" opacity="0.5"/>',
        f'<circle cx="{left + WIDTH * found.mean:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>',
    ]
