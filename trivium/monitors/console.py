"""The run as a person watches it: a live table in a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.live import Live
from rich.table import Table

from trivium.config import Plugin

Row = dict[str, float]


def _first(*prefixes: str) -> Callable[[Row], float | None]:
    """The value of the first key that starts with the first prefix that any key starts with."""

    def find(row: Row) -> float | None:
        return next((row[key] for prefix in prefixes for key in sorted(row) if key.startswith(prefix)), None)

    return find


def _evaluated(name: str) -> Callable[[Row], float | None]:
    """A number of an evaluation; no accuracy where rewards are graded."""

    def find(row: Row) -> float | None:
        keys = (key for key in sorted(row) if key.startswith("eval/") and key.endswith(f"/{name}"))
        graded = name == "accuracy" and _evaluated("partial")(row)
        return None if graded else next((row[key] for key in keys), None)

    return find


COLUMNS: tuple[tuple[str, Callable[[Row], float | None], str], ...] = (
    ("reward", _first("reward/mean"), "{:.3f}"),
    ("eval reward", _evaluated("reward"), "{:.3f}"),
    ("accuracy", _evaluated("accuracy"), "{:.1%}"),
    ("loss", _first("train/loss/"), "{:.4f}"),
    ("length", _first("rollout/response_tokens"), "{:.1f}"),
    ("grad norm", _first("train/grad_norm/"), "{:.3f}"),
    ("seconds", _first("time/step", "time/"), "{:.2f}"),
)
"""Title, where its number comes from, how it is written. A row that lacks the number shows a blank."""


def cells(row: Row) -> list[str]:
    """One string per column, empty where the row has no such number."""
    values = [(value(row), pattern) for _, value, pattern in COLUMNS]
    return ["" if number is None else pattern.format(number) for number, pattern in values]


class ConsoleMonitor:
    """Shows the newest steps. What several logs say about one step shares a line in the live table."""

    class Config(Plugin):
        kind: str = "console"
        rows: int = Field(default=20, ge=1)
        """Steps that the live table shows."""

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._rows = config.rows
        self._steps: dict[int, Row] = {}
        self._title = str(run_dir)
        self._live: Live | None = None
        if resume_step:
            self._console.print(f"{self._title}: continues after step {resume_step}", highlight=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._console.is_terminal:
            named = [
                f"{title} {cell}" for (title, _, _), cell in zip(COLUMNS, cells(dict(metrics)), strict=True) if cell
            ]
            self._console.print(f"step {step}  " + "  ".join(named), highlight=False, soft_wrap=True)
            return
        self._steps.setdefault(step, {}).update(metrics)
        while len(self._steps) > self._rows:
            del self._steps[min(self._steps)]
        if self._live is None:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Says that there is a table; its rows are too wide for a console and are in the run directory."""
        self._console.print(f"step {step}  {name}: {len(rows)} rows", highlight=False)

    def state(self) -> dict[str, Any]:
        """Nothing: what was on the screen stays there."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left", box=None, pad_edge=False)
        for title in ("step", *(title for title, _, _ in COLUMNS)):
            table.add_column(title, justify="right", no_wrap=True)
        for step, row in sorted(self._steps.items()):
            table.add_row(str(step), *cells(row))
        return table
