"""What a train step spends its time on, and which of it bounds a run; what goes on now, for those who watch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trivium.types import Batch, Metrics

_log = logging.getLogger("trivium")


@dataclass
class Phase:
    """One kind of work within a step: its time, and the sequences that it went over."""

    seconds: float = 0.0
    tokens: int = 0
    """Of all sequences, context included."""
    squares: int = 0
    """The sum of their squared lengths: what attention goes by."""
    trained_tokens: int = 0
    """Tokens inside the response masks: what the head goes by."""
    image_tokens: int = 0
    """Those of `tokens` that stand for images."""
    image_squares: int = 0
    """The sum over images of the squared number of their tokens."""


Phases = dict[str, Phase]
_COLLECTING: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def phase(name: str, batch: Batch | None = None) -> Generator[None]:
    """Adds the time of this block, and the size of `batch`, to the phase of that name, where a collection is open."""
    started = time.monotonic()
    yield
    collected = _COLLECTING.get()
    if collected is None:
        return
    current = collected.setdefault(name, Phase())
    current.seconds += time.monotonic() - started
    for experience in batch.experiences if batch is not None else ():
        current.tokens += len(experience)
        current.squares += len(experience) ** 2
        current.trained_tokens += experience.num_response_tokens
        for start, end in (item.span for item in experience.media if item.span):
            current.image_tokens += end - start
            current.image_squares += (end - start) ** 2


@contextmanager
def collecting() -> Generator[Phases]:
    """The phases of everything inside this block, by name."""
    phases: Phases = {}
    token = _COLLECTING.set(phases)
    try:
        yield phases
    finally:
        _COLLECTING.reset(token)


def measured(phases: Mapping[str, Phase]) -> Metrics:
    """Seconds by phase, and the trained sequences' tokens per second of all of them."""
    metrics = {f"time/{name}": each.seconds for name, each in phases.items()}
    tokens = max((each.tokens for name, each in phases.items() if name.startswith("update/")), default=0)
    seconds = sum(each.seconds for each in phases.values())
    return {**metrics, "perf/train_tokens_per_second": tokens / seconds} if tokens and seconds else metrics


# --------------------------------------------------------------------------- for those who watch


@dataclass(eq=False)
class Activity:
    """Something that goes on and may take long."""

    name: str
    total: int | None = None
    """How many parts it has; None where that is unknown."""
    done: int | None = None
    """How many of them are; None where that is unknown."""


class Watcher(Protocol):
    """Shows what goes on in this process."""

    def show(self, activities: Sequence[Activity]) -> None:
        """Called with all that goes on, whenever some of it begins, progresses or ends; from any thread."""
        ...

    def say(self, text: str) -> None:
        """Called with a line about the run as a whole."""
        ...


_watchers: list[Watcher] = []
_activities: list[Activity] = []
_CURRENT: ContextVar[Activity | None] = ContextVar("activity", default=None)


def watch(watcher: Watcher) -> Callable[[], None]:
    """Shows the watcher what goes on from now on; returns what ends that."""
    _watchers.append(watcher)

    def end() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)

    return end


def announce(text: str) -> None:
    """A line about the run as a whole, for those who watch; the log gets it as well."""
    _log.info(text)
    for watcher in tuple(_watchers):
        watcher.say(text)


@contextmanager
def activity(name: str, total: int | None = None) -> Generator[None]:
    """Shows that something goes on inside this block; `progress` says how far it is."""
    current = Activity(name, total)
    token = _CURRENT.set(current)
    _activities.append(current)
    _show()
    try:
        yield
    finally:
        _CURRENT.reset(token)
        _activities.remove(current)
        _show()


def progress(done: int | None = None) -> None:
    """How many parts of the activity that this is called in are done; None: one more."""
    current = _CURRENT.get()
    if current is not None:
        current.done = (current.done or 0) + 1 if done is None else done
        _show()


def _show() -> None:
    for watcher in tuple(_watchers):
        watcher.show(tuple(_activities))


# --------------------------------------------------------------------------- of a run

BOUNDS = {
    "wait": (
        "waiting for rollouts",
        "add engines or explorers (cluster.kind: ray), let rollouts and training overlap "
        "(schedule.max_staleness), or shorten completions; rewards count as part of a rollout",
    ),
    "update": ("training compute", "use more ranks or GPUs, train.dtype: bfloat16, or train.lora"),
    "score": ("scoring passes", "leave out the KL term, or use algorithm.old_log_prob: rollout"),
    "advantage": ("advantages and filters", "look at your own estimator, shaping or filters"),
    "sync": ("weight sync", "raise sync.interval, choose another sync.method, or push adapters alone (train.lora)"),
    "checkpoint": ("checkpoints", "set checkpoint.asynchronous, or raise checkpoint.save_every"),
    "evaluate": ("evaluations", "raise evaluation.every, or lower evaluation.samples"),
}
"""The first part of a phase's name: what it is called, and what makes it shorter."""


def verdict(seconds: Mapping[str, float], total: float) -> str:
    """One line: what bounds a run that took `total` seconds, of which phases (named as in `time/`) took these."""
    spent: dict[str, float] = {}
    for name, taken in seconds.items():
        kind = name.partition("/")[0]
        if kind in BOUNDS:
            spent[kind] = spent.get(kind, 0.0) + taken
    if not spent or total <= 0:
        return "nothing was measured"
    shares = {kind: taken / total for kind, taken in sorted(spent.items(), key=lambda item: -item[1])}
    first = next(iter(shares))
    rest = [f"{BOUNDS[kind][0]} {share:.0%}" for kind, share in shares.items() if kind != first and share >= 0.005]
    unmeasured = max(0.0, 1 - sum(shares.values()))
    rest += [f"loading and the rest {unmeasured:.0%}"] if unmeasured >= 0.005 else []
    others = f" ({', '.join(rest)})" if rest else ""
    what, do = BOUNDS[first]
    cost = f"{shares[first]:.0%} of the trainer's time, {spent[first]:.1f} of {total:.1f} s"
    return f"bound by {what}: {cost}{others}; to shorten it, {do}"
