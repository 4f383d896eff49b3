"""How many environments a server has at the same time: fewer while more of them slow it down.

Additive increase and multiplicative decrease, by the ratio of recent latencies to the lowest ones, as in Netflix's
concurrency-limits. `adapted` is a pure function of the state and of one call; `AdaptiveTurns` holds the state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from trivium.concurrency import Turns

_START = 8
"""The first limit. It doubles until calls take longer, and the first calls measure the server almost without load."""
_MIN_CALLS = 16
_ROUNDS = 2
"""A window has this many calls for each environment, since those that end first are the short ones."""
_MAX_SLOWDOWN = 2.0
"""Calls that take longer than this multiple of the lowest latency reduce the limit. A server whose latency grows with
the square of its environments has its highest throughput there."""
_ERRORS = 1.5
"""Standard errors by which latencies must differ: calls of different length are no slowdown."""
_MAX_FAILED = 0.1
"""The largest fraction of a window's calls that may be refused or late without a reduction."""
_REDUCTION = 0.7


class Call(NamedTuple):
    """One call of a server, or one attempt to connect."""

    seconds: float | None
    """Its latency; None if the server refused it or did not answer in time."""
    environments: int
    """The number of open environments when it began."""


class Window(NamedTuple):
    """Consecutive calls: the moments of the logarithms of their latencies."""

    num: int = 0
    failed: int = 0
    total: float = 0.0
    squares: float = 0.0
    full: bool = False
    """Whether the limit was reached."""

    def plus(self, call: Call, full: bool) -> Window:
        if call.seconds is None:
            return self._replace(failed=self.failed + 1, full=self.full or full)
        value = math.log(max(call.seconds, 1e-6))
        return Window(self.num + 1, self.failed, self.total + value, self.squares + value**2, self.full or full)

    def latency(self, errors: float) -> float:
        """The mean logarithm, plus a number of standard errors."""
        mean = self.total / self.num
        return mean + errors * math.sqrt(max(0.0, self.squares / self.num - mean**2) / self.num)


class Load(NamedTuple):
    """The limit, and the measurements that it depends on."""

    limit: float
    window: Window = Window()
    lowest: Window | None = None
    """The window with the lowest latency."""
    doubles: bool = True
    """Whether the limit doubles at the end of a window, as it does until its first reduction."""


def adapted(load: Load, call: Call, most: int) -> Load:
    """The state after a call. The limit stays between 1 and `most`, and changes at the end of a window only."""
    if call.environments > load.limit + 1:
        return load  # a reduction takes effect when environments end
    window = load.window.plus(call, call.environments > load.limit - 1)
    num = window.num + window.failed
    if num < max(_MIN_CALLS, _ROUNDS * int(load.limit)):
        return load._replace(window=window)
    if window.failed > _MAX_FAILED * num:
        return Load(max(1.0, load.limit * _REDUCTION), lowest=load.lowest, doubles=False)
    lowest = load.lowest
    if lowest is None or load.limit == 1 or window.latency(_ERRORS) < lowest.latency(_ERRORS):
        lowest = window  # also at the limit 1, where the load of other environments cannot be the cause
    if window.latency(-_ERRORS) - lowest.latency(_ERRORS) > math.log(_MAX_SLOWDOWN):
        return Load(max(1.0, load.limit * _REDUCTION), lowest=lowest, doubles=False)
    more = load.limit if load.doubles else math.sqrt(load.limit)
    return Load(min(float(most), load.limit + more * window.full), lowest=lowest, doubles=load.doubles)


class AdaptiveTurns(Turns):
    """At most `most` environments of a server at the same time, and fewer while the server is slow, refuses or is late.

    Only the calls inside `observed` count: without any the limit stays at its start.
    """

    def __init__(self, most: int) -> None:
        self._most, self._load = most, Load(float(min(_START, most)))
        super().__init__(int(self._load.limit))

    @property
    def metrics(self) -> dict[str, float]:
        return {"perf/environments": float(self.running), "perf/environment_limit": float(self.limit)}

    @contextmanager
    def observed(self, refused: tuple[type[Exception], ...] = (), timed: bool = True) -> Generator[None]:
        """Observes a call: its latency if it succeeds and is `timed`, or that it raises TimeoutError or one of
        `refused`. Other errors tell nothing about the load."""
        began, environments = time.monotonic(), self.running
        try:
            yield
        except (TimeoutError, *refused):
            self._observe(Call(None, environments))
            raise
        if timed:
            self._observe(Call(time.monotonic() - began, environments))

    def late(self) -> None:
        """Observes a call that did not end before its deadline."""
        self._observe(Call(None, self.running))

    def _observe(self, call: Call) -> None:
        self._load = adapted(self._load, call, self._most)
        self.set_limit(int(self._load.limit))
