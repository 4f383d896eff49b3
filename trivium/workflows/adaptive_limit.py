"""How many environments a server has at the same time: fewer while more of them slow it down.

Additive increase and multiplicative decrease, by the ratio of recent latencies to the lowest ones, as in Netflix's
concurrency-limits. Both include the time between calls: if the policy writes for seconds, some milliseconds more of a
call do not matter, whether they come from the server or from a busy event loop. `adapted` is a pure function of the
state and of one call; `AdaptiveTurns` holds the state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from trivium.concurrency import Turns

_START = 8
"""The first limit. It doubles until calls take longer, and the first calls measure the server almost without load."""
_MIN_CALLS = 16
_ROUNDS = 2
"""A window has this many calls for each environment, since those that end first are the short ones."""
_UNTIMED = 4
"""A window ends earlier if it has this multiple of untimed calls: those of a policy that calls no tool."""
_MAX_SLOWDOWN = 2.0
"""The limit falls if a call and the time before it take longer than this multiple of what they take at the lowest
latency. A server whose latency grows with the square of its environments has its highest throughput there."""
_ERRORS = 1.5
"""Standard errors by which latencies must differ: calls of different length are no slowdown."""
_MAX_FAILED = 0.1
"""The largest fraction of a window's calls that may be refused or late without a reduction."""
_REDUCTION = 0.7


class Call(NamedTuple):
    """One call of a server, or one attempt to connect."""

    seconds: float | None
    """Its latency; None if it failed, or if its latency does not count."""
    environments: int
    """The number of open environments when it began."""
    failed: bool = False
    """Whether the server refused it or did not answer in time."""
    between: float = 0.0
    """The seconds that environments were open since the previous call ended, summed over environments, less those of
    this call. Summed over calls this is the time between calls; a single value may be negative."""


class Window(NamedTuple):
    """Consecutive calls: the moments of the logarithms of their latencies."""

    num: int = 0
    """The number of calls with a latency."""
    failed: int = 0
    untimed: int = 0
    total: float = 0.0
    squares: float = 0.0
    between: float = 0.0
    """The sum of the time between calls."""
    full: bool = False
    """Whether the limit was reached."""

    def plus(self, call: Call, full: bool) -> Window:
        window = self._replace(between=self.between + call.between, full=self.full or full)
        if call.failed:
            return window._replace(failed=self.failed + 1)
        if call.seconds is None:
            return window._replace(untimed=self.untimed + 1)
        value = math.log(max(call.seconds, 1e-6))
        return window._replace(num=self.num + 1, total=self.total + value, squares=self.squares + value**2)

    def latency(self, errors: float) -> float:
        """The geometric mean, with a number of standard errors."""
        mean = self.total / self.num
        return math.exp(mean + errors * math.sqrt(max(0.0, self.squares / self.num - mean**2) / self.num))

    def is_slower_than(self, lowest: Window) -> bool:
        between = max(0.0, self.between) / self.num
        return between + self.latency(-_ERRORS) > _MAX_SLOWDOWN * (between + lowest.latency(_ERRORS))


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
    enough = max(_MIN_CALLS, _ROUNDS * int(load.limit))
    if window.num + window.failed < enough and window.untimed + window.failed < _UNTIMED * enough:
        return load._replace(window=window)
    slow, lowest = window.failed > _MAX_FAILED * (window.num + window.failed + window.untimed), load.lowest
    if not slow and window.num >= enough / 2:  # fewer latencies say little
        if lowest is None or load.limit == 1 or window.latency(_ERRORS) < lowest.latency(_ERRORS):
            lowest = window  # also at the limit 1, where the load of other environments cannot be the cause
        slow = window.is_slower_than(lowest)
    if slow:
        return Load(max(1.0, load.limit * _REDUCTION), lowest=lowest, doubles=False)
    more = load.limit if load.doubles else math.sqrt(load.limit)
    return Load(min(float(most), load.limit + more * window.full), lowest=lowest, doubles=load.doubles)


class AdaptiveTurns(Turns):
    """At most `most` environments of a server at the same time, and fewer while the server is slow, refuses or is late.

    Only the calls inside `observed` count. Without any, the limit stays at its start.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._load, self._clock = most, Load(float(min(_START, most))), clock
        super().__init__(int(self._load.limit))
        self._since, self._open, self._open_s = clock(), 0, 0.0
        """When environments were last counted, how many were open, and for how long since the previous call."""

    async def __aenter__(self) -> None:
        await super().__aenter__()
        self._count()

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._count()

    @property
    def metrics(self) -> dict[str, float]:
        return {"perf/environments": float(self.running), "perf/environment_limit": float(self.limit)}

    @contextmanager
    def observed(self, refused: tuple[type[Exception], ...] = (), timed: bool = True) -> Generator[None]:
        """Observes a call that succeeds, with its latency if it is `timed`, or that raises TimeoutError or one of
        `refused`. Other errors tell nothing about the load."""
        began, environments = self._clock(), self.running
        try:
            yield
        except (TimeoutError, *refused):
            self._observe(self._clock() - began, environments, failed=True)
            raise
        self._observe(self._clock() - began, environments, timed=timed)

    def late(self, seconds: float) -> None:
        """Observes a call that did not end within its deadline of `seconds`."""
        self._observe(seconds, self.running, failed=True)

    def _count(self) -> None:
        now = self._clock()
        self._open_s += self._open * (now - self._since)
        self._since, self._open = now, self.running

    def _observe(self, seconds: float, environments: int, timed: bool = True, failed: bool = False) -> None:
        self._count()
        latency = seconds if timed and not failed else None
        call, self._open_s = Call(latency, environments, failed, self._open_s - seconds), 0.0
        self._load = adapted(self._load, call, self._most)
        self.set_limit(int(self._load.limit))
