"""Which texts and numbers a run can record: those that UTF-8, JSON and msgpack hold."""

from __future__ import annotations

import math

_LOWEST, _HIGHEST = -(2**63), 2**64 - 1
"""The integers of msgpack, in which rollouts are recorded."""


def unrecordable(value: object) -> tuple[str, str, str] | None:
    """(asked, found, do) for a text or a number that cannot be recorded; None for any other value."""
    match value:
        case str():
            if not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    found = f"half of a surrogate pair in {visible(value)!r:.60}"
                    return "text in Unicode", found, "send whole characters"
        case float():
            if not math.isfinite(value):
                found = "nan" if math.isnan(value) else f"{value}, a number too large for a float"
                return "a finite number", found, "send finite numbers, or null"
        case int():
            if not _LOWEST <= value <= _HIGHEST:
                return "an integer of 64 bits", f"one of {value.bit_length()} bits", "send it as text"
        case _:
            pass
    return None


def visible(text: str) -> str:
    """The text, with the halves of surrogate pairs escaped, which UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()
