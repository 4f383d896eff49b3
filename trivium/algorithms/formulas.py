"""Fills the values of options into the formula of a function's metadata.

In a formula the name of an option stands for its value. `{option: text}` appears only if the option is set (not null,
false, zero or empty), `{option=value: text}` only if the option has this value. Formulas are for people; the other
fields of the metadata declare what a config may set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trivium.algorithms.metadata import FunctionMetadata, When, format_value

_CLAUSE = re.compile(r"\{(\w+)(?:=([\w.-]+))?:([^{}]*)\}")


def with_values(formula: str, options: Mapping[str, Any]) -> str:
    """The formula with these values instead of their names, and the clauses whose conditions hold."""

    def clause(match: re.Match[str]) -> str:
        name, value, text = match.groups()
        return text if When(name, (value,) if value else ()).holds(options) else ""

    filled = _CLAUSE.sub(clause, formula)
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    return re.sub(rf"\b({names})\b", lambda m: format_value(options[m.group()]), filled) if names else filled


def with_all_clauses(formula: str) -> str:
    """The formula without values: each clause in square brackets, after its condition."""

    def clause(match: re.Match[str]) -> str:
        name, value, text = match.groups()
        return f" [{name}{f' = {value}' if value else ''}: {text.strip(' ,;')}] "

    return re.sub(r" ([,;)])", r"\1", " ".join(_CLAUSE.sub(clause, formula).split()))


def mentions_option(formula: str, name: str) -> bool:
    """Whether a formula contains the name of an option."""
    return re.search(rf"\b{re.escape(name)}\b", formula) is not None


def describe_function(function: Callable[..., Any], metadata: FunctionMetadata, *others: Callable[..., Any]) -> str:
    """The formula with the values bound to the function (and to others that share its section).

    Options that the formula does not mention are appended.
    """
    options: dict[str, Any] = {}
    for bound in (function, *others):
        options.update(getattr(bound, "keywords", {}))
    unmentioned = [
        f"{name} = {format_value(value)}"
        for name, value in options.items()
        if not mentions_option(metadata.formula, name)
    ]
    return with_values(metadata.formula, options) + (f"   ({', '.join(unmentioned)})" if unmentioned else "")
