"""Checks of the errors that Trivium raises: their type, their three parts, and the names that a reader searches for.

Tests do not compare sentences, so an error can be reworded without changing a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from trivium.foundation.errors import ConfigError, TriviumError

E = TypeVar("E", bound=TriviumError)


@contextmanager
def refused(kind: type[E], *names: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Fails unless the block raises a complete error of exactly this type that names all of `names`.

    `with refused(ConfigError, "train.lr", 0.3) as caught: ...`; afterwards the error is `caught.value`.
    """
    with pytest.raises(kind) as caught:
        yield caught
    check_error(caught.value, kind, *names)


def check_error(error: object, kind: type[TriviumError], *names: object) -> None:
    """Asserts that an error has exactly the type `kind`, that it and its problems are complete, and that its text has
    each of `names` (keys, values, files, identifiers), not as a part of a longer word."""
    assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
    assert isinstance(error, TriviumError)
    text = str(error)
    empty = [part for part in ("asked", "found", "do") if not getattr(error, part)]
    for problem in error.problems if isinstance(error, ConfigError) else ():
        empty += [f"{part} of {problem}" for part in ("where", "found", "do") if not getattr(problem, part)]
    assert not empty, f"empty: {', '.join(empty)}; in:\n{text}"
    absent = [name for name in map(str, names) if not _names(text, name)]
    assert not absent, f"not named: {', '.join(map(repr, absent))}; in:\n{text}"


def _names(text: str, name: str) -> bool:
    """Whether `name` is in the text, and not as a part of a longer word."""
    before, after = (r"(?<!\w)" if name[:1].isalnum() else ""), (r"(?!\w)" if name[-1:].isalnum() else "")
    return re.search(f"{before}{re.escape(name)}{after}", text) is not None
