"""Signatures of API documents, as they write them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def check_parameters(function: Callable[..., Any], documented: str) -> None:
    """Asserts that the function begins with the parameters of its document, with their names, order and defaults, and
    that no further one must be passed. `documented` has neither `self` nor types: "step, timeout=3"."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    number = len([name for name in documented.split(", ") if name not in ("", "*")])
    first = [each.replace(annotation=each.empty) for each in parameters[:number]]
    assert str(inspect.Signature(first)) == f"({documented})"
    assert all(each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in parameters[number:])
