"""The answers of a task that graders compare with: text, a number, or a list of these, of which any is right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from trivium.foundation.errors import DataError, described

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_DIGITS = 5000
"""Digits of the longest number that is written out. `1e999999999` is only text."""


class AcceptedAnswer(NamedTuple):
    """One accepted answer."""

    text: str
    is_number: bool = False
    """Whether the task has a number, so that 5.0, `5` and `5.00` are equal. Its text is that of `plain_number`."""


def plain_number(text: str) -> str | None:
    """The number that a whole text is, in its shortest decimal form; None for any other text."""
    try:
        number = Decimal(text) if _NUMBER.fullmatch(text) else None
    except InvalidOperation:  # its exponent has too many digits
        return None
    return None if number is None or abs(number.adjusted()) > _DIGITS else _written(number)


def accepted(answer: object, *, booleans: bool = False) -> list[AcceptedAnswer]:
    """The accepted answers in a column of a task or in a ground truth; `booleans`: true and false are texts.

    Raises DataError for null, an empty or a nested list, and any other value.
    """
    tolist = getattr(answer, "tolist", None)  # Parquet tables hold numpy arrays
    value = answer if tolist is None else tolist()
    values = value if isinstance(value, list | tuple) and value else [value]
    answers: list[AcceptedAnswer] = []
    for entry in values:
        if isinstance(entry, str):
            answers.append(AcceptedAnswer(entry))
        elif isinstance(entry, bool) and booleans:
            # As Python and as JSON write them.
            answers += [AcceptedAnswer(str(entry)), AcceptedAnswer(str(entry).lower())]
        elif isinstance(entry, int | float) and not isinstance(entry, bool) and math.isfinite(entry):
            # By `repr`: the decimal of the float 0.1 itself has 55 digits.
            answers.append(
                AcceptedAnswer(_written(Decimal(entry) if isinstance(entry, int) else Decimal(repr(entry))), True)
            )
        else:
            do = "give text, a number, or a list of these of which any is right, and leave out rows without an answer"
            raise DataError("an answer that a completion can be compared with", described(answer), do)
    return answers


def matches(text: str, answers: Iterable[AcceptedAnswer], normal: Callable[[str], str] = str) -> bool:
    """Whether a text in normal form is one of these answers, by its normal form or as a number."""
    return any(
        text == normal(answer.text) or (answer.is_number and plain_number(text) == answer.text) for answer in answers
    )


def _written(number: Decimal) -> str:
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if text.strip("-0") else "0"
