"""What tests of API documents share: signatures as they are written, and facts that other tests show."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]


def check_parameters(function: Callable[..., Any], documented: str) -> None:
    """Asserts that the function begins with the parameters of its document, with their names, order and defaults, and
    that no further one must be passed. `documented` has neither `self` nor types: "step, timeout=3"."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    number = len([name for name in documented.split(", ") if name not in ("", "*")])
    first = [each.replace(annotation=each.empty) for each in parameters[:number]]
    assert str(inspect.Signature(first)) == f"({documented})"
    assert all(each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in parameters[number:])


def shown_by(file: str, test: str) -> Callable[..., bool]:
    """A check of whether a file of `tests` has this test."""

    def check(*_: object) -> bool:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        return test in {function.name for function in functions}

    return check
