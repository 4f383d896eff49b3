"""The progress of a run on the console: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from pydantic import Field
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trivium.config import Plugin
from trivium.config.saved import from_yaml
from trivium.foundation.phases import Activity, watch

_log = logging.getLogger("trivium")
Row = dict[str, float]

_QUIET_S = 60.0
"""Seconds between two progress lines of a long activity outside a terminal."""


def _first(*prefixes: str) -> Callable[[Row], float | None]:
    """Returns the value of the first key that starts with the first prefix that any key starts with."""

    def find(row: Row) -> float | None:
        return next((row[key] for prefix in prefixes for key in sorted(row) if key.startswith(prefix)), None)

    return find


def _rewarded(row: Row) -> float | None:
    """Returns the mean reward; None for pairs, whose rewards are 1 for the preferred completion and 0 for the other."""
    return None if "train/preference_accuracy" in row else row.get("reward/mean")


def _evaluated(name: str) -> Callable[[Row], float | None]:
    """Returns a metric of an evaluation; no accuracy if rewards are graded."""

    def find(row: Row) -> float | None:
        keys = (key for key in sorted(row) if key.startswith("eval/") and key.endswith(f"/{name}"))
        graded = name == "accuracy" and _evaluated("partial")(row)
        return None if graded else next((row[key] for key in keys), None)

    return find


def _failed(row: Row) -> str | None:
    """Returns the fraction of failed rollouts, if any failed; for an evaluation, their number."""
    if row.get("rollout/failed"):
        return f"{row['rollout/failed']:.0f}/{row['rollout/total']:.0f}"
    number = sum(value for key, value in row.items() if key.startswith("eval/") and key.endswith("/failed"))
    return f"{number:.0f}" if number else None


COLUMNS: tuple[tuple[str, Callable[[Row], float | str | None], str], ...] = (
    ("reward", _rewarded, "{:.3f}"),
    ("eval reward", _evaluated("reward"), "{:.3f}"),
    ("accuracy", _evaluated("accuracy"), "{:.1%}"),
    ("loss", _first("train/loss/"), "{:.4f}"),
    ("held-out loss", _evaluated("loss"), "{:.4f}"),
    ("preferred", _first("train/preference_accuracy"), "{:.1%}"),
    ("margin", _first("train/preference_margin"), "{:.3f}"),
    ("held-out preferred", _evaluated("preference_accuracy"), "{:.1%}"),
    ("length", _first("rollout/response_tokens"), "{:.1f}"),
    ("grad norm", _first("train/grad_norm/"), "{:.3f}"),
    ("tokens/s", _first("perf/rollout_tokens_per_second", "perf/train_tokens_per_second"), "{:,.0f}"),
    ("failed", _failed, "{}"),
    ("seconds", _first("time/step", "time/"), "{:.2f}"),
)
"""(title, function that extracts the value, format). A row without the value shows a blank; a table without any value
omits the column."""


def cells(row: Row) -> list[str]:
    """Returns one string per column, empty if the row lacks the value."""
    values = [(value(row), pattern) for _, value, pattern in COLUMNS]
    return ["" if number is None else pattern.format(number) for number, pattern in values]


class Unbreakable:
    """A text stream that cannot fail a run. If a write fails (the reader has ended, the disk is full), it logs a
    warning once and discards further output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._replace(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._replace(error)

    def _replace(self, error: OSError) -> None:
        """Redirects the stream's descriptor to the null device: Python writes the buffered rest at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        _log.warning(
            "%s cannot be written (%s): the run continues without this file", self._stream.name, error.strerror
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unbreakable_output() -> Generator[None]:
    """Inside this block, a failed print cannot end the run."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Unbreakable(stream)) if stream is not None else None for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


class ConsoleMonitor:
    """Shows the newest steps and the current activity. All metrics of one step share a line in the live table."""

    class Config(Plugin):
        kind: str = "console"
        rows: int = Field(default=20, ge=1)
        """Steps that the live table shows."""

    def __init__(
        self, config: Config, *, run_dir: Path, resume_step: int | None, console: Console | None = None
    ) -> None:
        """`resume_step`: the step after which the run continues, 0 at its start; None shows activities outside a
        run."""
        self._console = console or Console(file=sys.stdout and cast(TextIO, Unbreakable(sys.stdout)))
        self._rows = config.rows
        self._steps: dict[int, Row] = {}
        self._title = str(run_dir)
        self._remaining = _Remaining(*_planned(run_dir))
        self._live: Live | None = None
        self._bars = _Bars()
        self._lines = None if self._console.is_terminal else _Lines(self._print)
        self._lock = threading.Lock()
        self._unwatch = watch(self)
        if resume_step:
            self._print(f"{self._title}: continues after step {self._remaining.place(resume_step)}")
        elif resume_step == 0 and self._remaining.total is not None:
            self._print(f"{self._title}: {self._remaining.total} steps")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._remaining.observe(step, metrics)
        if not self._console.is_terminal:
            pairs = zip(COLUMNS, cells(dict(metrics)), strict=True)
            named = [f"{title} {cell}" for (title, _, _), cell in pairs if cell]
            remaining_time = (
                [f"left {self._remaining.left()}"] if "time/step" in metrics and self._remaining.left() else []
            )
            self._print(f"step {self._remaining.place(step)}  " + "  ".join(named + remaining_time))
            return
        self._steps[step] = {**self._steps.get(step, {}), **metrics}
        while len(self._steps) > self._rows:
            del self._steps[min(self._steps)]
        self._show_live()

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints the name and length of a table; its rows are too wide for a console and are in the run directory."""
        self._print(f"step {step}  {name}: {len(rows)} rows")

    def show(self, activities: Sequence[Activity]) -> None:
        """Shows activities: as progress bars in a terminal, else as occasional lines for long ones."""
        if self._lines is not None:
            self._lines.show(activities)
            return
        with self._lock:
            self._bars.show(activities)
            self._show_live()

    def say(self, text: str) -> None:
        self._print(text)

    def state(self) -> dict[str, Any]:
        """Returns an empty state: printed output cannot be reverted."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing: printed output cannot be reverted."""

    def close(self) -> None:
        self._unwatch()
        if self._lines is not None:
            self._lines.close()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show_live(self) -> None:
        """Starts the live table, which refreshes itself."""
        if self._live is None:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4)
            self._live.start()

    def _table(self) -> Group:
        """The newest steps, without the columns of which none of them has a value."""
        steps = sorted(self._steps.items())  # a copy, because another thread draws
        rows = [(step, cells(row)) for step, row in steps]
        columns = [place for place in range(len(COLUMNS)) if any(row[place] for _, row in rows)]
        at = self._remaining.place(steps[-1][0]) if steps else ""
        parts = (
            self._title,
            f"step {at}" if at else "",
            f"{remaining_time} left" if (remaining_time := self._remaining.left()) else "",
        )
        title = Text("  ".join(part for part in parts if part), style="italic")
        table = Table(box=None, pad_edge=False)
        for name in ("step", *(COLUMNS[place][0] for place in columns)) if steps else ():
            table.add_column(name, justify="right", no_wrap=True)
        for step, row in rows:
            table.add_row(str(step), *(row[place] for place in columns))
        return Group(title, table, self._bars.progress)


@contextmanager
def shown(run_dir: Path) -> Generator[None]:
    """Shows the activities inside this block, which logs no steps, on stderr."""
    monitor = ConsoleMonitor(ConsoleMonitor.Config(), run_dir=run_dir, resume_step=None, console=Console(stderr=True))
    try:
        yield
    finally:
        monitor.close()


@contextmanager
def logged_activities() -> Generator[None]:
    """Logs a line a minute for each long activity inside this block, of a process without a monitor."""
    lines = _Lines(_log.info)
    unwatch = watch(lines)
    try:
        yield
    finally:
        unwatch()
        lines.close()


class _Remaining:
    """Estimates the remaining time of a run from the newest steps and the newest evaluation of this session."""

    def __init__(self, total: int | None, evaluated: Sequence[int] = ()) -> None:
        """`evaluated` are the steps with an evaluation, in order."""
        self.total, self._evaluated = total, evaluated
        self._times: deque[tuple[int, float]] = deque(maxlen=20)
        """(step, time when it was logged, without that of the evaluations before)."""
        self._evaluations: dict[int, float] = {}
        """The seconds of the evaluation at a step."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a logged step or evaluation."""
        if "time/evaluate" in metrics:
            self._evaluations[step] = self._evaluations.get(step, 0.0) + metrics["time/evaluate"]
        if (seconds := metrics.get("time/step")) is None:
            return
        now = time.monotonic() - sum(self._evaluations.values())
        if self._times and step > self._times[-1][0] + 1:  # a stage ended early, and the next has another pace
            self._times.clear()
        if not self._times:
            self._times.append((step - 1, now - seconds))
        self._times.append((step, now))

    def place(self, step: int) -> str:
        return str(step) if self.total is None else f"{step}/{self.total}"

    def left(self) -> str:
        """Returns the remaining time as `m:ss` or `h:mm:ss`; empty if it is unknown or zero."""
        if self.total is None or not self._times:
            return ""
        (first, began), (last, now) = self._times[0], self._times[-1]
        seconds = (self.total - last) * (now - began) / max(1, last - first)
        if self._evaluations:
            step, newest = [*self._evaluations.items()][-1]
            seconds += newest * (len(self._evaluated) - bisect_left(self._evaluated, max(last, step + 1)))
        return _clock(seconds) if seconds else ""


class _Bars:
    """Shows a progress bar for each activity."""

    def __init__(self) -> None:
        count = TextColumn("{task.fields[count]}", justify="right")
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(30), count, TimeElapsedColumn()
        )
        self._tasks: dict[Activity, TaskID] = {}

    def show(self, activities: Sequence[Activity]) -> None:
        for activity in activities:
            if activity not in self._tasks:
                self._tasks[activity] = self.progress.add_task(activity.name, total=None, count="")
            self.progress.update(
                self._tasks[activity], total=activity.total, completed=activity.finished, count=_count(activity)
            )
        for ended in self._tasks.keys() - set(activities):
            self.progress.remove_task(self._tasks.pop(ended))


class _Lines:
    """Writes an occasional line for each long activity, also while it reports no progress."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._spoken: dict[Activity, float] = {}
        """The time of the last line of each activity, or of its start."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._repeat, name="console", daemon=True).start()

    def show(self, activities: Sequence[Activity]) -> None:
        with self._lock:
            self._show(activities)

    def say(self, text: str) -> None:
        """Writes nothing: where lines go to the log, it has the text."""

    def close(self) -> None:
        self._closed.set()

    def _repeat(self) -> None:
        while not self._closed.wait(_QUIET_S / 60):
            with self._lock:
                self._show(tuple(self._spoken))

    def _show(self, activities: Sequence[Activity]) -> None:
        now = time.monotonic()
        for activity in activities:
            if now - self._spoken.setdefault(activity, activity.began) >= _QUIET_S:
                self._spoken[activity] = now
                title = f"{activity.name} ({activity.phase})" if activity.phase else activity.name
                self._write(
                    f"{title}: {_count(activity) and f'{_count(activity)} after '}{_clock(now - activity.began)}"
                )
        for ended in self._spoken.keys() - set(activities):
            del self._spoken[ended]
            if now - ended.began >= _QUIET_S:
                self._write(f"{ended.name}: took {_clock(now - ended.began)}")


def _count(activity: Activity) -> str:
    return "" if activity.total is None else f"{activity.finished} of {activity.total} {activity.unit}".strip()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _planned(run_dir: Path) -> tuple[int | None, list[int]]:
    """Returns the planned number of steps, None without a plan, and the steps with an evaluation."""
    path, steps = run_dir / "plan.yaml", set[int]()
    if not path.is_file():
        return None, []
    plan = from_yaml(path.read_text(encoding="utf-8"))
    for stage in plan.get("stages", ()):
        first, last, evaluated = stage["first_step"], stage["last_step"], stage["evaluated"]
        steps |= {step for step in range(first, last + 1) if evaluated["every"] and step % evaluated["every"] == 0}
        steps |= {first - 1, last} if evaluated["ends"] else set()
    return plan["total_steps"], sorted(steps)
