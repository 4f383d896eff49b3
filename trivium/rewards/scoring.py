"""How a manager calls a scorer: once per sample, with a deadline, and with an error that names the sample.

A scorer is `f(data_source=, solution_str=, ground_truth=, extra_info=)`, plain or `async`, and gives a number or a dict
whose `score` is one. Plain ones are called one after the other in a thread, or side by side in `workers` processes:
only there can one be stopped that holds the interpreter. Those that wait (`async`) do so side by side.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np

from trivium.config import RewardConfig
from trivium.deadlines import together, within
from trivium.errors import ConfigError, RewardError, TriviumError
from trivium.registry import resolve
from trivium.rewards.workers import Workers
from trivium.threads import Threads

T = TypeVar("T")

_WAITING = 32
"""Calls of an `async` scorer that may wait at the same time."""
_START_S = 60.0
"""What a process may take to start and import the scorer; its own alarm keeps the deadline of the call."""

OnError = float | Literal["raise"]
"""What a sample that cannot be scored means: an error, or this reward (and it is said that it failed)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row as a scorer sees it."""

    row: int
    uid: str
    data_source: str
    prompt: str
    response: str
    length: int
    """Response tokens."""
    ground_truth: Any
    extra_info: dict[str, Any]

    @property
    def name(self) -> str:
        truth = repr(self.ground_truth)
        shown = truth if len(truth) <= 60 else truth[:57] + "..."
        uid = f" of {self.uid}" if self.uid else ""
        return f"sample {self.row}{uid} (data source {self.data_source!r}, ground truth {shown})"

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "data_source": self.data_source, "solution_str": self.response, "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """What one sample is worth."""

    score: float
    extra: Mapping[str, Any]
    """The other entries of a scorer's dict, `score` included where it gave one."""
    error: RewardError | None = None
    """Why there was no score, where `score` stands in for one."""


class Scorer:
    """A scorer, its deadline, and what becomes of samples that it cannot score.

    `deadline_s` is for one call. Raises ConfigError for `workers` of a function that no other process could import.
    """

    def __init__(
        self, function: Callable[..., Any], deadline_s: float = 300.0, workers: int = 0, on_error: OnError = "raise"
    ) -> None:
        if not (on_error == "raise" or (isinstance(on_error, Real) and math.isfinite(on_error))):
            raise ConfigError("on_error of a reward manager", repr(on_error), "say 'raise', or a finite number")
        if deadline_s <= 0:
            raise ConfigError("deadline_s of a reward manager", str(deadline_s), "say how many seconds a call may take")
        self._deadline_s, self._on_error = deadline_s, on_error
        self._patience_s = deadline_s + (_START_S if workers else 0.0)
        self._at_once, self._call = _caller(function, deadline_s, workers)

    def each(self, samples: Sequence[Sample]) -> list[Result]:
        """One call per sample. Raises RewardError, naming the first sample without a score, unless told otherwise."""
        return run_here(self._all(samples))

    def together(self, samples: Sequence[Sample], options: Mapping[str, Any]) -> list[Result]:
        """One call with lists (`data_sources`, `solution_strs`, `ground_truths`, `extra_infos`) and the options."""
        if not samples:
            return []
        names = [*samples[0].arguments]
        lists = {f"{name}s": [sample.arguments[name] for sample in samples] for name in names}
        given = run_here(self._answer({**lists, **options}))
        if not isinstance(given, Exception):
            given = given.tolist() if hasattr(given, "tolist") else given
            if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(samples):
                count = f"{len(given)} results" if isinstance(given, Sequence) else f"a {type(given).__name__}"
                given = ValueError(f"{count} for {len(samples)} samples")
        if isinstance(given, Exception) and self._on_error == "raise":
            error = _found(given)
            raise RewardError(
                f"scores of {len(samples)} samples, the first being {samples[0].name}", error.found, error.do
            ) from given
        results = [given] * len(samples) if isinstance(given, Exception) else given
        return [self._result(sample, result) for sample, result in zip(samples, results, strict=True)]

    async def _all(self, samples: Sequence[Sample]) -> list[Result]:
        gate = asyncio.Semaphore(self._at_once)

        async def one(sample: Sample) -> Result:
            async with gate:
                return self._result(sample, await self._answer(sample.arguments))

        if self._at_once == 1:
            return [await one(sample) for sample in samples]
        return await together(map(one, samples))

    async def _answer(self, arguments: Mapping[str, Any]) -> Any:
        """What the scorer gave, or the exception that it ended with."""

        async def outcome() -> Any:
            try:
                return await self._call(**arguments)
            except Exception as error:
                return error  # `_result` raises it with the sample's name, or counts it

        try:
            return await within(self._patience_s, outcome())
        except TimeoutError:
            return TimeoutError(f"no answer within {self._deadline_s:g} s")

    def _result(self, sample: Sample, given: Any) -> Result:
        try:
            if isinstance(given, Exception):
                raise _found(given)
            extra = dict(given) if isinstance(given, Mapping) else {}
            return Result(_number(extra.get("score", given)), extra)
        except RewardError as error:
            named = RewardError(f"a score of {sample.name}", error.found, error.do)
            named.__cause__ = error.__cause__
        if self._on_error == "raise":
            raise named
        return Result(float(self._on_error), {}, named)


def run_here(doing: Coroutine[Any, Any, T]) -> T:
    """What comes of a coroutine, in a loop of its own: also where the caller is itself inside one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(doing)
    with ThreadPoolExecutor(1, "rewards") as other:
        return other.submit(asyncio.run, doing).result()


# --------------------------------------------------------------------------- calls


def _caller(function: Callable[..., Any], deadline_s: float, workers: int) -> tuple[int, Callable[..., Awaitable[Any]]]:
    """How many calls at once, and how to make one."""
    if workers:
        path, options = _path(function)
        config = RewardConfig.model_validate({"kind": path, "name": "compute_score", "workers": workers})
        processes = Workers(config, deadline_s)

        async def elsewhere(**arguments: Any) -> Any:
            return await processes(**json.loads(json.dumps(arguments | options, default=_plain)))

        return workers, elsewhere
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "func", None)):
        return _WAITING, function
    thread = Threads(1, "a scorer")

    def called(arguments: Mapping[str, Any]) -> Any:
        try:
            return function(**arguments)
        except SystemExit as left:  # it would end this process without a word
            raise RuntimeError(f"SystemExit({left.code}) raised by the scorer") from left

    async def in_a_thread(**arguments: Any) -> Any:
        given = await thread.run(lambda: called(arguments))
        return await given if inspect.isawaitable(given) else given

    return 1, in_a_thread


def _path(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Where another process finds the function, and the keywords that it is called with besides."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    where = str(inspect.getsourcefile(function)) if module.startswith("trivium_user_") else module
    if not name.isidentifier() or module in ("", "__main__") or resolve("rewards", f"{where}:{name}") is not function:
        raise ConfigError(
            "a scorer in processes of its own", f"{function!r} cannot be imported there",
            "give a function of a module or of a file, or leave `workers` at 0",
        )  # fmt: skip
    return f"{where}:{name}", options


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy's and torch's as Python's, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be given to another process")


# --------------------------------------------------------------------------- results


def _number(given: Any) -> float:
    if getattr(given, "shape", None) == () and hasattr(given, "item"):
        given = given.item()
    if not isinstance(given, Real | np.bool_):
        shown = repr(given)
        shown = shown if len(shown) < 80 else shown[:77] + "..."
        raise RewardError("", f"{shown} of type {type(given).__name__}", _MEND)
    try:
        score = float(given)
    except OverflowError:
        raise RewardError("", "a number too large for a float", _MEND) from None
    if not math.isfinite(score):
        raise RewardError("", f"{score}, which is not a finite number", _MEND)
    return score


_MEND = "mend the scorer; with `on_error: NUMBER` such samples get that reward and are counted instead"


def _found(cause: Exception) -> RewardError:
    ours = isinstance(cause, TriviumError)
    error = RewardError("", f"{cause.found} ({cause.asked})" if ours else f"{type(cause).__name__}: {cause}", _MEND)
    error.__cause__ = cause
    return error
