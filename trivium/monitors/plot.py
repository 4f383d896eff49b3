"""The learning curve of a run as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from trivium.errors import DataError, MissingPackage
from trivium.metrics import graded_accuracies

REWARD, ACCURACY, QUIET = "#2b6cb0", "#c05621", "#718096"


def learning_curve(metrics_jsonl: Path, png: Path) -> None:
    """Draws mean reward and evaluation accuracy against the step.

    Stage boundaries come from `plan.yaml` beside the metrics, where there is one; steps after which the config was
    changed are marked. Raises DataError when the file holds
    neither number.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("matplotlib", "plot", "draw a learning curve") from error

    rows = [json.loads(line) for line in metrics_jsonl.read_text(encoding="utf-8").splitlines()]
    reward = _series(rows, "reward/mean")
    accuracies = {key: _series(rows, key) for key in _accuracy_keys(rows)}
    if not reward and not accuracies:
        raise DataError(f"a learning curve from {metrics_jsonl}", "no reward/mean and no eval/*/accuracy", "log one")

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if reward:
        steps, values = zip(*reward, strict=True)
        axes.plot(steps, values, color=REWARD, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(values), color=REWARD, linewidth=2, label="mean reward (training)")
    for number, (key, points) in enumerate(accuracies.items()):
        steps, values = zip(*points, strict=True)
        axes.plot(
            steps,
            values,
            color=ACCURACY,
            marker="o",
            markersize=4,
            linewidth=1.5,
            alpha=0.6**number,
            label=f"accuracy ({key.split('/')[1]})",
        )
    changes = [(step - 1, "config changed") for step, _ in _series(rows, "train/changed_fields")]
    for step, name in (*_boundaries(metrics_jsonl.parent / "plan.yaml"), *changes):
        axes.axvline(step, color=QUIET, linestyle=(0, (4, 4)), linewidth=1)
        axes.annotate(
            name,
            (step, 1),
            (4, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            color=QUIET,
            fontsize=8,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("reward, accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=QUIET, alpha=0.2, linewidth=0.8)
    axes.legend(frameon=False, loc="best")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)


def _series(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[key])) for row in rows if key in row]


def _accuracy_keys(rows: list[dict[str, Any]]) -> list[str]:
    keys = {key for row in rows for key in row if key.startswith("eval/") and key.endswith("/accuracy")}
    return sorted(keys - graded_accuracies(rows))


def _smooth(values: tuple[float, ...], width: int = 5) -> list[float]:
    """The mean of up to `width` values around each; a window at the edge is shorter, never padded."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _boundaries(plan: Path) -> list[tuple[int, str]]:
    """(last step of the stage before, name) of each stage but the first."""
    if not plan.is_file():
        return []
    stages: list[dict[str, Any]] = yaml.safe_load(plan.read_text(encoding="utf-8"))["stages"]
    return [(stage["first_step"] - 1, f"stage {number}") for number, stage in enumerate(stages[1:], 2)]
