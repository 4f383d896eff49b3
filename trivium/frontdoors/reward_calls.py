"""Calls a reward function of another trainer once per sample: with a deadline, in threads, processes or on the event
loop, and with errors that name the sample. The front doors' rewards are built on it.

A function returns a number, or a mapping with a number under `key`. Plain functions run one after the other in a
thread, or in parallel in `workers` processes; `async` functions run concurrently. A function that holds the interpreter
can be stopped only in a process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from trivium.foundation.concurrency import Threads, Turns, gather_or_cancel, run_here
from trivium.foundation.errors import ConfigError, RewardError, TriviumError, text_of
from trivium.foundation.registry import resolve
from trivium.policy import finite_number
from trivium.processes.isolated import forked, isolated_function
from trivium.processes.user_calls import UserCall

_WAITING = 32
"""Maximum number of concurrent calls of an `async` function."""
_START_S = 60.0
"""Seconds for a process to start and import the function. An alarm in the process enforces the deadline of the call."""
_DO = "fix the scorer; the `on_error: NUMBER` of a manager gives such samples that reward, and counts them"
"""What a user of verl's reward managers can do about a sample without a score."""

OnError = float | Literal["raise"]
"""The result of a sample that cannot be scored: an error, or this reward together with a reported failure."""


class Scorable(Protocol):
    """The arguments of a call, and their name in errors."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Result:
    """The score of one sample."""

    score: float
    extra: Mapping[str, Any]
    """The entries of the mapping that the function returned, its score included; empty for a number."""
    error: RewardError | None = None
    """The error of a failed sample, whose `score` is the substitute reward."""


class Scorer:
    """Calls a function with a deadline, and handles samples that it cannot score.

    `key` is the entry of a mapping that holds the score. `deadline_s` limits one call. `on_timeout` replaces `on_error`
    for calls that exceed it (None: `on_error`). `forks` is the number of forks of this process that run the function.
    `number` converts a score to float, and raises ValueError for other values. `do` is the advice of errors. Raises
    ConfigError for `workers` with a function that other processes cannot import.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        deadline_s: float = 300.0,
        workers: int = 0,
        on_error: OnError = "raise",
        on_timeout: OnError | None = None,
        forks: int = 0,
        key: str = "score",
        number: Callable[[object], float] = finite_number,
        do: str = _DO,
    ) -> None:
        if not (on_error == "raise" or (isinstance(on_error, Real) and math.isfinite(on_error))):
            raise ConfigError("on_error of a reward manager", repr(on_error), "use 'raise' or a finite number")
        if deadline_s <= 0:
            raise ConfigError("deadline_s of a reward manager", str(deadline_s), "set the seconds that a call may take")
        self._on_error, self._key, self._number, self._do = on_error, key, number, do
        self._on_timeout = on_error if on_timeout is None else on_timeout
        label = _label(function)
        if forks:
            function = forked(function, label, forks)
        if workers:
            function = _isolated(function, deadline_s, workers)
        grace_s = _START_S if workers else 0.0
        self._call = UserCall(function, Threads(1, "a scorer"), deadline_s, grace_s, label=label)
        self._at_once = workers or forks or (_WAITING if self._call.is_async else 1)
        # `each` runs in a new event loop in every call, and a future of one loop cannot be awaited in another.
        self._places = WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]()

    def each(self, samples: Sequence[Scorable]) -> list[Result]:
        """Calls the scorer once per sample. Raises RewardError for the first sample without a score if `on_error` is
        `raise`."""
        return run_here(self._all(samples))

    def together(self, samples: Sequence[Scorable], options: Mapping[str, Any]) -> list[Result]:
        """Calls the scorer once with lists (`data_sources`, `solution_strs`, `ground_truths`, `extra_infos`) and the
        options."""
        if not samples:
            return []
        lists = {f"{name}s": [sample.arguments[name] for sample in samples] for name in samples[0].arguments}
        outcome = run_here(self._call(**{**lists, **options}))
        if not isinstance(outcome, Exception):
            tolist = getattr(outcome, "tolist", None)
            outcome = outcome if tolist is None else tolist()
            if not isinstance(outcome, Sequence) or isinstance(outcome, str) or len(outcome) != len(samples):
                count = f"{len(outcome)} results" if isinstance(outcome, Sequence) else f"a {type(outcome).__name__}"
                outcome = ValueError(f"{count} for {len(samples)} samples")
        if not isinstance(outcome, Exception):
            return [self._result(sample, result) for sample, result in zip(samples, outcome, strict=True)]
        if self._on_error == "raise":
            raise self._error(f"scores of {len(samples)} samples, the first being {samples[0].name}", outcome)
        return [self._result(sample, outcome) for sample in samples]

    async def one(self, sample: Scorable) -> Result:
        """Returns the result of one sample, for concurrent callers in an event loop. Raises the errors of `each`. The
        deadline starts when the call starts."""
        places = self._places.setdefault(asyncio.get_running_loop(), Turns(self._at_once))
        async with places:
            return self._result(sample, await self._call(**sample.arguments))

    async def _all(self, samples: Sequence[Scorable]) -> list[Result]:
        # One after the other: the first sample without a score raises before the next one is called.
        if self._at_once == 1:
            return [await self.one(sample) for sample in samples]
        return await gather_or_cancel(map(self.one, samples))

    def _result(self, sample: Scorable, outcome: object) -> Result:
        """Converts an outcome, which is the function's return value or its exception, to a result."""
        if isinstance(outcome, Exception):
            named = self._error(f"a score of {sample.name}", outcome)
            if isinstance(outcome, TimeoutError) and self._on_timeout != "raise":
                return Result(float(self._on_timeout), {}, named)
        else:
            extra: dict[str, Any] = dict(outcome) if isinstance(outcome, Mapping) else {}
            try:
                return Result(self._number(extra.get(self._key, outcome)), extra)
            except ValueError as error:
                named = self._error(f"a score of {sample.name}", error, raised=False)
        if self._on_error == "raise":
            raise named
        return Result(float(self._on_error), {}, named)

    def _error(self, wanted: str, cause: Exception, *, raised: bool = True) -> RewardError:
        """Returns the error for an exception that a function `raised`, or for a result that is not a number."""
        if isinstance(cause, TriviumError):
            problem = f"{cause.found} ({cause.asked})"
        else:
            problem = f"{type(cause).__name__}: {text_of(cause)}" if raised else str(cause)
        error = RewardError(wanted, problem, self._do)
        # Not by `raise ... from`: with `on_error`, the error is stored and never raised.
        error.__cause__ = cause
        return error


def _label(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"the scorer {getattr(function, '__qualname__', type(function).__qualname__)}"


def _isolated(function: Callable[..., Any], deadline_s: float, workers: int) -> Callable[..., Any]:
    """Wraps a function to run in child processes, with the keywords that `functools.partial` bound."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    # The registry loads a user's file under such a name, by which another process cannot import it.
    where = str(inspect.getsourcefile(function)) if module.startswith("trivium_user_") else module
    # A name that leads to another object (a decorated function, a method) would score with that one in the processes.
    if not name.isidentifier() or module in ("", "__main__") or resolve("rewards", f"{where}:{name}") is not function:
        raise ConfigError(
            "a scorer in processes of its own",
            f"{function!r} cannot be imported there",
            "give a function of a module or of a file, or leave `workers` at 0",
        )
    isolated = isolated_function("rewards", f"{where}:{name}", _label(function), workers, deadline_s)
    return functools.partial(isolated, **options)
