"""A registered function that is slightly wrong is noticed: by a golden value, or else by an oracle of its own."""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from golden_cases import DATA
from golden_runners import answer_to
from tampering import Check, checks_in, noting, passes, unnoticed
from test_golden import cases_in, deviation, run

import trivium.algorithms
from trivium.algorithms import catalogue
from trivium.algorithms.importance_weights import (
    correct,
    importance_weights,
    live_weights,
    rejection_statistic,
    statistic_bounds,
)

ORACLES = Path(__file__).parent.parent / "oracle"
LAWS = {"test_algorithms_losses", "test_algorithms_advantages", "test_algorithms_kl"}
"""What holds for everything registered says too little about a single formula."""
ROOMS = (
    "advantages",
    "policy_losses",
    "gates",
    "kl_estimators",
    "entropies",
    "aggregations",
    "pair_losses",
    "score_losses",
    "filters",
    "shapings",
)
BEHIND = (correct, importance_weights, live_weights, rejection_statistic, statistic_bounds)
"""What the values of the room `corrections` are made of."""


def everything() -> dict[str, Any]:
    """Name -> each registered function once, the selections of losses, and the public functions that give numbers."""
    found: dict[int, tuple[str, Any]] = {}
    for room in ROOMS:
        for kind, function in catalogue(room).items():
            found.setdefault(id(function), (f"{room}/{kind}", function))
            select = getattr(function.metadata, "select", None)
            if select is not None:
                found.setdefault(id(select), (f"{room}/{kind}/{select.__name__}", select))
    found |= {id(function): (f"corrections/{function.__name__}", function) for function in BEHIND}
    for name in trivium.algorithms.__all__:
        function = getattr(trivium.algorithms, name)
        if inspect.isfunction(function) and "Tensor" in str(function.__annotations__.get("return")):
            found.setdefault(id(function), (name, function))
    return dict(found.values())


EVERYTHING = everything()


@dataclass
class Called:
    """What calls a function."""

    checks: list[Check] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    """Of that result which had most."""


@cache
def golden_checks() -> dict[str, Called]:
    """Function -> the golden cases that call it."""
    cases = [case for case in cases_in(DATA) if answer_to(case) and not deviation(case)]
    return called_by([partial(run, case) for case in cases], EVERYTHING)


def called_by(checks: Iterable[Check], functions: Mapping[str, Any]) -> dict[str, Called]:
    """Function -> those of the checks that call it; checks that fail by themselves say nothing."""
    found = {name: Called() for name in functions}
    with noting(functions) as called:
        for check in checks:
            called.clear()
            if passes(check):
                for name, parts in called.items():
                    found[name].checks.append(check)
                    found[name].parts = max(found[name].parts, parts, key=len)
    return found


def oracle_checks(name: str, identifier: str) -> Called:
    """The oracle tests that call a function, of the modules that mention it."""
    mentioning = [
        file.stem
        for file in sorted(ORACLES.glob("test_*.py"))
        if file.stem not in LAWS and mentions(file.read_text(encoding="utf-8"), name, identifier)
    ]
    of_each = [checks_of(module)[name] for module in mentioning]
    return Called(
        [check for one in of_each for check in one.checks], max((one.parts for one in of_each), key=len, default=[])
    )


@cache
def checks_of(module: str) -> dict[str, Called]:
    """Function -> the tests of a module that call it."""
    return called_by(checks_in(import_module(module)), EVERYTHING)


def mentions(text: str, name: str, identifier: str) -> bool:
    return any(
        re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in (name.rpartition("/")[2], identifier)
    )


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_perturbed_function_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, golden = EVERYTHING[name], golden_checks()[name]
    parts, missed = golden.parts, unnoticed(function, golden.checks, range(len(golden.parts)))
    if missed or not parts:
        monkeypatch.syspath_prepend(ORACLES)
        oracle = oracle_checks(name, function.__name__)
        parts, further = max(parts, oracle.parts, key=len), range(len(parts), len(oracle.parts))
        missed = unnoticed(function, oracle.checks, [*missed, *further])
    assert parts, f"{name}: nothing calls it"
    names = ", ".join(parts[place] for place in missed)
    assert not missed, f"{name} may be wrong in {names} without any golden value or oracle noticing"
