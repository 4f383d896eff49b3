"""Formulas with values: how a law's one line reads once the options are known.

In a formula the name of an option stands for its value, and `{option: text}` is text that is there only if the option
is set (true, not null, not zero, not empty); `{option=value: text}` asks for one value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trivium.algorithms.registered import Law

_CLAUSE = re.compile(r"\{(\w+)(?:=([\w.-]+))?:([^{}]*)\}")


def _applying(formula: str, options: Mapping[str, Any]) -> str:
    """The formula with the clauses that these values switch on."""

    def clause(match: re.Match[str]) -> str:
        name, wanted, text = match.groups()
        value = options[name]
        return text if (value == wanted if wanted is not None else value not in (None, False, 0, "", ())) else ""

    return _CLAUSE.sub(clause, formula)


def silenced(formula: str, options: Mapping[str, Any]) -> list[str]:
    """The options that have no effect beside the others: all that the formula says of them is switched off."""
    kept, switches = _applying(formula, options), {match.group(1) for match in _CLAUSE.finditer(formula)}
    return [
        name for name in options
        if mentioned(formula, name) and name not in switches and not mentioned(kept, name)
    ]  # fmt: skip


def written(formula: str, options: Mapping[str, Any]) -> str:
    """The formula with these values in the place of their names."""
    kept = _applying(formula, options)
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    return re.sub(rf"\b({names})\b", lambda m: shown(options[m.group()]), kept) if names else kept


def out_of_order(formula: str, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of options that a formula puts around something, `low < x < high`, and whose values leave it no room."""
    pairs = [(low, high) for low in options for high in options if low != high]
    between = r"\b{} <=? [^<>;]* <=? {}\b"
    return [
        (low, high) for low, high in pairs
        if re.search(between.format(re.escape(low), re.escape(high)), _applying(formula, options))
        and None not in (options[low], options[high]) and options[low] >= options[high]
    ]  # fmt: skip


def general(formula: str) -> str:
    """The formula for readers who have not chosen yet: each clause in square brackets, after what switches it on."""

    def clause(match: re.Match[str]) -> str:
        name, wanted, text = match.groups()
        return f" [{name}{f' = {wanted}' if wanted else ''}: {text.strip(' ,;')}] "

    return re.sub(r" ([,;)])", r"\1", " ".join(_CLAUSE.sub(clause, formula).split()))


def mentioned(formula: str, name: str) -> bool:
    """Whether a formula shows what an option does."""
    return re.search(rf"\b{re.escape(name)}\b", formula) is not None


def shown(value: Any) -> str:
    """A value as a reader writes it."""
    if isinstance(value, bool) or value is None:
        return str({True: "true", False: "false", None: "none"}[value])
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_of_bound(function: Callable[..., Any]) -> dict[str, Any]:
    """The values that a bound function was given."""
    return dict(getattr(function, "keywords", {}))


def line_of(function: Callable[..., Any], law: Law, *others: Callable[..., Any]) -> str:
    """The law's formula with the values bound to the function (and to others that share its section).

    Options that the formula does not mention are appended.
    """
    options = {name: value for f in (function, *others) for name, value in options_of_bound(f).items()}
    silent = [f"{name} = {shown(value)}" for name, value in options.items() if not mentioned(law.formula, name)]
    return written(law.formula, options) + (f"   ({', '.join(silent)})" if silent else "")
