"""Measures the phases of a train step. Reports current activities to watchers.
Records the spans of each role for the timeline."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from trivium.foundation.atomic import writing
from trivium.foundation.errors import StorageError

if TYPE_CHECKING:
    from trivium.types import Batch, Metrics

_log = logging.getLogger("trivium")


@dataclass
class Phase:
    """One kind of work within a step: its time and the size of the processed sequences."""

    seconds: float = 0.0
    tokens: int = 0
    """Tokens of all sequences, context included."""
    squares: int = 0
    """The sum of the squared sequence lengths, which determines the work of attention."""
    trained_tokens: int = 0
    """Tokens inside the response masks, which determine the work of the head."""
    image_tokens: int = 0
    """Tokens of images, included in `tokens`."""
    image_squares: int = 0
    """The sum over images of the squared number of their tokens."""


Phases = dict[str, Phase]
_COLLECTING: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def phase(name: str, batch: Batch | None = None) -> Generator[None]:
    """Adds the time of this block and the size of `batch` to the phase `name` of the open collection, if any."""
    started = time.monotonic()
    if (current_activity := _CURRENT.get()) is not None:
        current_activity.phase, current_activity.total, current_activity.completed = name, None, 0
    yield
    add_span(TRAINER_LANE, name, started, time.monotonic())
    collected = _COLLECTING.get()
    if collected is None:
        return
    current = collected.setdefault(name, Phase())
    current.seconds += time.monotonic() - started
    if batch is None:
        return
    current.tokens += batch.num_tokens
    current.squares += sum(length**2 for length in batch.lengths)
    current.trained_tokens += batch.num_response_tokens
    for experience in batch.experiences:
        for start, end in (item.span for item in experience.media if item.span):
            current.image_tokens += end - start
            current.image_squares += (end - start) ** 2


@contextmanager
def collecting() -> Generator[Phases]:
    """Collects the phases inside this block, by name."""
    phases: Phases = {}
    token = _COLLECTING.set(phases)
    try:
        yield phases
    finally:
        _COLLECTING.reset(token)


def measured(phases: Mapping[str, Phase]) -> Metrics:
    """Seconds by phase, and the tokens of trained sequences per second of all phases."""
    metrics = {f"time/{name}": phase.seconds for name, phase in phases.items()}
    tokens = max((phase.tokens for name, phase in phases.items() if name.startswith("update/")), default=0)
    seconds = sum(phase.seconds for phase in phases.values())
    return {**metrics, "perf/train_tokens_per_second": tokens / seconds} if tokens and seconds else metrics


# --------------------------------------------------------------------------- for watchers


@dataclass(eq=False)
class Activity:
    """A running activity that may take long."""

    name: str
    total: int | None = None
    """The number of parts; None if unknown."""
    unit: str = ""
    """What the parts are, if the name does not tell."""
    groups: int = 0
    """Above 0: the parts are the rollouts of so many groups, and `completed` counts groups."""
    completed: int = 0
    phase: str = ""
    """The newest phase of a train step."""
    began: float = field(default_factory=time.monotonic)

    @property
    def finished(self) -> int:
        """The number of finished parts, those of the oldest groups in progress in this process included."""
        if not self.groups or self.total is None:
            return self.completed
        size = self.total // self.groups
        return self.completed * size + sum(
            min(size, group.completed) for group in _groups[: self.groups - self.completed]
        )


class Watcher(Protocol):
    """Shows the activities of this process."""

    def show(self, activities: Sequence[Activity]) -> None:
        """Called with all activities whenever one begins, progresses or ends. May be called from any thread."""
        ...

    def say(self, text: str) -> None:
        """Called with a line about the run as a whole."""
        ...


GROUPS = "groups"
"""The unit of the activity of a process that explores alone: its parts are the groups that it has begun."""
_watchers: list[Watcher] = []
_activities: list[Activity] = []
_groups: list[Activity] = []
"""The groups for training that this process rolls out, in order of their start."""
_CURRENT: ContextVar[Activity | None] = ContextVar("activity", default=None)


def watch(watcher: Watcher) -> Callable[[], None]:
    """Registers a watcher. Returns a function that removes it."""
    _watchers.append(watcher)

    def end() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)

    return end


def announce(text: str) -> None:
    """Sends a line about the whole run to the watchers and to the log."""
    _log.info(text)
    for watcher in tuple(_watchers):
        watcher.say(text)


@contextmanager
def activity(name: str, total: int | None = None, unit: str = "", groups: int = 0) -> Generator[None]:
    """Shows an activity while this block runs; `progress` updates it. A block inside one of the same name, which may be
    another task's, continues that activity."""
    outer = next((candidate for candidate in tuple(_activities) if candidate.name == name), None)
    current = outer or Activity(name)
    current.total, current.unit, current.groups = total, unit, groups
    token = _CURRENT.set(current)
    if outer is None:
        _activities.append(current)
    _show()
    try:
        yield
    finally:
        _CURRENT.reset(token)
        if outer is None:
            _activities.remove(current)
        _show()


@contextmanager
def group_in_progress() -> Generator[None]:
    """Counts the `progress` of this block for an activity over groups. If the current activity has the unit `GROUPS`,
    the block is a part of it."""
    group, whole = Activity(""), _CURRENT.get()
    whole = whole if whole is not None and whole.unit == GROUPS else Activity("")
    whole.total = (whole.total or 0) + 1
    token = _CURRENT.set(group)
    _groups.append(group)
    try:
        yield
        whole.completed += 1
    finally:
        _groups.remove(group)
        _CURRENT.reset(token)


def progress(completed: int | None = None, total: int | None = None) -> None:
    """Sets the number of finished parts of the current activity (None adds one), and the number of all parts."""
    current = _CURRENT.get()
    if current is not None:
        current.completed, current.total = (
            current.completed + 1 if completed is None else completed,
            total or current.total,
        )
        _show()


def _show() -> None:
    for watcher in tuple(_watchers):
        watcher.show(tuple(_activities))


# --------------------------------------------------------------------------- spans

SPANS = "spans"
"""The folder of a run directory with one file for each process: JSON lines, appended. A session begins with
`{"session": unix time, "pid"}`; then `[lane, name, start, stop, about]`, in seconds since that time."""
TRAINER_LANE = "trainer"
TRAINING_S = "time/rollouts_for_training"
"""What an explorer reports with an evaluation: the part of its seconds that rollouts for training took."""
_FLUSHED_S = 2.0
"""Maximum age of spans that are not yet written to the file."""
_JOINED_S = 0.02
"""`Busy` joins activities with a shorter gap."""


class SpanFile:
    """The spans of this process, appended to its file in batches."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, time.monotonic()
        self._lines = [json.dumps({"session": round(time.time(), 6), "pid": os.getpid()})]
        self._flushed, self._lock = self._began, Lock()

    def add(self, lane: str, name: str, start: float, stop: float, about: Mapping[str, float]) -> None:
        """Adds a span between two times of `time.monotonic`."""
        row = [lane, name, round(start - self._began, 5), round(stop - self._began, 5), *([about] if about else [])]
        with self._lock:
            self._lines.append(json.dumps(row))
            due = stop - self._flushed > _FLUSHED_S
        if due:
            self.flush()

    def flush(self) -> None:
        """Writes the pending spans. A session without spans writes nothing."""
        with self._lock:
            if len(self._lines) == 1 and self._lines[0].startswith("{"):
                return
            lines, self._lines, self._flushed = self._lines, [], time.monotonic()
            with writing(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab") as file:
                    # Ends a partial line that a killed process left.
                    torn = b"\n" if lines and lines[0].startswith("{") and file.tell() else b""
                    file.write(torn + "".join(f"{line}\n" for line in lines).encode())


_span_files: list[SpanFile] = []
_busy: WeakSet[Busy] = WeakSet()
"""Objects that may have an open span."""


@contextmanager
def spans_to(path: Path) -> Generator[None]:
    """Writes the spans of this process to a file while the block runs."""
    _cut_open_spans()  # what ended before belongs to no file, or to the one around this block
    file = SpanFile(path)
    _span_files.append(file)
    failed = True
    try:
        yield
        failed = False
    finally:
        _cut_open_spans()
        _span_files.remove(file)
        with suppress(StorageError) if failed else nullcontext():  # reports the first error
            file.flush()


def _cut_open_spans() -> None:
    for busy in tuple(_busy):
        busy.cut()


def add_span(lane: str, name: str, start: float, stop: float, **about: float) -> None:
    """Records a span between two times of `time.monotonic`, if spans are written to a file."""
    if _span_files:
        _span_files[-1].add(lane, name, start, stop, about)


@contextmanager
def span(lane: str, name: str, **about: float) -> Generator[None]:
    """Records the time of this block in a lane of the run's timeline."""
    started = time.monotonic()
    try:
        yield
    finally:
        add_span(lane, name, started, time.monotonic(), **about)


class Busy:
    """Records one span for many overlapping or closely successive blocks in one event loop."""

    def __init__(self, lane: str, name: str) -> None:
        self.lane, self.name = lane, name
        self._going = self._ended = 0
        self._since = self._until = self._sum = 0.0
        _busy.add(self)

    @property
    def seconds(self) -> float:
        """The seconds of all blocks; those of blocks that overlap are added."""
        return self._sum + self._going * time.monotonic()

    def __enter__(self) -> None:
        if not self._going and ((now := time.monotonic()) > self._until + _JOINED_S or not self._ended):
            self.cut()
            self._since = now
        self._going += 1
        # The start of a block is subtracted and its end added, so that no list of open blocks is needed.
        self._sum -= time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._going -= 1
        self._sum += time.monotonic()
        self._ended += 1
        if not self._going:
            self._until = time.monotonic()

    def cut(self) -> None:
        """Ends the current span and begins a new one, for example when the weights change."""
        now = time.monotonic()
        if self._going or self._ended:
            add_span(self.lane, self.name, self._since, now if self._going else self._until, count=self._ended)
        self._since, self._ended = now, 0
