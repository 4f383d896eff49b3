"""A function that is slightly wrong, and the checks that should notice it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from hypothesis import Phase, is_hypothesis_test, settings
from torch import Tensor

Check = Callable[[], Any]


@contextmanager
def replaced(function: FunctionType, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Whoever holds the function calls `stand_in(original, *arguments, **options)` instead.

    The code is exchanged, not a name: tests and partials that took the function earlier meet the stand-in as well.
    """
    code, hook = function.__code__, f"_stand_in_{id(function)}"
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    names: dict[str, Any] = {}
    exec(f"def call(*arguments, **options):\n    return {hook}(*arguments, **options)", names)
    function.__globals__[hook] = partial(stand_in, original)
    vars(function)["__signature__"] = inspect.signature(original)  # its options are read from here
    function.__code__ = names["call"].__code__.replace(co_freevars=code.co_freevars)
    try:
        yield
    finally:
        function.__code__ = code
        del vars(function)["__signature__"], function.__globals__[hook]


def parts(result: Any) -> Iterator[tuple[str, Any]]:
    """(name, the result with only that part slightly wrong): numbers by one in 10,000, decisions the other way."""
    if isinstance(result, Tensor):
        yield "", ~result if result.dtype == torch.bool else result * 1.0001
    elif isinstance(result, bool):
        yield "", not result
    elif isinstance(result, int | float):
        yield "", result * 1.0001
    elif is_dataclass(result) and not isinstance(result, type):
        for field in fields(result):
            for name, wrong in parts(getattr(result, field.name)):
                yield f"{field.name}{name}", replace(result, **{field.name: wrong})
    elif isinstance(result, tuple):
        names = getattr(result, "_fields", range(len(result)))
        for place, (name, part) in enumerate(zip(names, result, strict=True)):
            for deeper, wrong in parts(part):
                changed = (*result[:place], wrong, *result[place + 1 :])
                yield f".{name}{deeper}", type(result)(*changed) if hasattr(result, "_fields") else changed
    elif isinstance(result, list):
        yield "", result[1:]


def unnoticed(function: FunctionType, checks: Iterable[Check], places: Iterable[int]) -> list[int]:
    """Those of the places of parts of a function's result where a slight error fails none of the checks."""
    checks, missed = list(checks), []
    for place in places:
        with replaced(function, partial(_wrong, place)):
            if not any(fails(check) for check in checks):
                missed.append(place)
    return missed


def _wrong(place: int, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result with the part at `place` wrong; as it is where it has no such part."""
    result = original(*arguments, **options)
    return next((changed for _, changed in itertools.islice(parts(result), place, None)), result)


def fails(check: Check) -> bool:
    """Whether a check raises what a failing test raises."""
    try:
        check()
    except (AssertionError, pytest.fail.Exception):
        return True
    except ExceptionGroup as several:  # of a property that fails in more than one way
        return several.subgroup(AssertionError) is not None
    return False


def passes(check: Check) -> bool:
    """Whether a check runs through; what else it raises fails the test that it was taken from."""
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return False
    return True


@contextmanager
def noting(functions: Mapping[str, FunctionType]) -> Iterator[dict[str, list[str]]]:
    """Within, it holds what those that have been called have given: name -> the names of the parts of the result that
    had most."""
    called: dict[str, list[str]] = {}

    def note(name: str, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        called[name] = max(called.get(name, []), [part or "its result" for part, _ in parts(result)], key=len)
        return result

    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(replaced(function, partial(note, name)))
        yield called


def checks_in(module: ModuleType) -> list[Check]:
    """The tests of a module as plain calls, parameters filled in; without those that ask for fixtures. Properties come
    last, and try a few examples, the same each time."""
    tests = [test for name, test in vars(module).items() if name.startswith("test_") and callable(test)]
    properties = [test for test in tests if is_hypothesis_test(test)]
    others = [test for test in tests if test not in properties]
    return [
        *(call for test in others for call in _calls(test)),
        *(partial(_briefly, call) for test in properties for call in _calls(test)),
    ]


def _briefly(check: partial[Any]) -> None:
    """A property without the time that shrinking what failed takes."""
    name = "_hypothesis_internal_use_settings"
    own = getattr(check.func, name)
    setattr(check.func, name, settings(own, max_examples=10, derandomize=True, phases=(Phase.explicit, Phase.generate)))
    try:
        check()
    finally:
        setattr(check.func, name, own)


def _calls(test: Callable[..., Any]) -> Iterator[partial[Any]]:
    rows: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            rows = [{**row, **added} for row in rows for added in _parameters(*mark.args[:2])]
    wanted = set(inspect.signature(test).parameters)
    yield from (partial(test, **row) for row in rows if wanted == set(row))


def _parameters(names: str | tuple[str, ...], values: Any) -> Iterator[dict[str, Any]]:
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    for value in values:
        row = getattr(value, "values", value) if type(value).__name__ == "ParameterSet" else value
        several = len(listed) > 1 or type(value).__name__ == "ParameterSet"
        yield dict(zip(listed, row if several else [row], strict=True))
