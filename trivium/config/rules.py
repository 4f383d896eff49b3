"""Rules find problems of a config, of the data and devices of a run, of a run in progress or finished, of a machine.

`trivium.config.checks` has the rules for configs, `trivium.runtime.preflight` those before a run,
`trivium.monitors.health` those during and after it, and `trivium.inspection.doctor` those for a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

from trivium.foundation.errors import Problem

Subject = TypeVar("Subject")
"""What a rule reads."""

Rule = Callable[[Subject], Iterable[Problem]]
"""A generator function: it yields a problem for each thing that is wrong. Its docstring states the condition."""


class Rules(Generic[Subject]):
    """The rules for one kind of subject, in the order in which they report."""

    def __init__(self) -> None:
        self.by_name: dict[str, Rule[Subject]] = {}

    def rule(self, find: Rule[Subject]) -> Rule[Subject]:
        """Decorates a function: adds it under its name, with blanks for underscores."""
        self.by_name[find.__name__.replace("_", " ").strip()] = find
        return find

    def problems(self, subject: Subject, without: Collection[str] = ()) -> list[Problem]:
        """The problems that the rules find, except those named in `without`. A problem without a place is reported
        under the name of its rule."""
        return [
            problem if problem.where else problem._replace(where=name)
            for name, find in self.by_name.items()
            if name not in without
            for problem in find(subject)
        ]


def wrong(found: str, do: str) -> Problem:
    """A problem that is no key's: what is wrong, in figures with the threshold, and which setting to change."""
    return Problem("", "", found, do)
