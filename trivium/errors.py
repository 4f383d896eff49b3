"""The error tree. Every error a user can meet has three parts: what was asked, what was found, what to do.

TriviumError
├── ConfigError          the config asks for something that cannot be done (exit code 2)
│   └── UnknownName      a short name that is not in the catalogue; also a LookupError
├── DataError            a file, dataset or rollout record is missing or malformed; also a ValueError
├── MissingPackage       an optional package is not installed; also an ImportError
├── RunDirError          a run directory belongs to another run, or is damaged
├── StorageError         a file cannot be written: the disk is full, a right is missing; also an OSError
├── RolloutError         one rollout failed: recorded as data, never ends the run by itself
│   ├── RewardError      a reward raised, or returned something that is not a finite number
│   └── DeadlineExceeded a deadline fired; also a TimeoutError
├── RolloutsFailing      more rollouts failed than `workflow.max_failed_fraction` allows: ends the run
├── SyncError            trainer and explorer lost contact, or weights arrived damaged
│   └── VersionGone      a version is no longer offered: ask for one that is offered now
└── RoleFailed           a role of the run (trainer, an explorer, its engine, the buffer, ...) died
"""

from __future__ import annotations

import sysconfig
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class TriviumError(Exception):
    """Base of every error that Trivium raises on purpose."""

    def __init__(self, asked: str, found: str = "", do: str = "") -> None:
        super().__init__(asked, found, do)
        self.asked, self.found, self.do = asked, found, do

    def __str__(self) -> str:
        parts = (("asked", self.asked), ("found", self.found), ("do", self.do))
        return "\n".join(f"{label}: {text}" for label, text in parts if text)


class Problem(NamedTuple):
    """One thing wrong with a config, a run or a machine, as a rule reports it (`trivium.config.rules`)."""

    where: str
    """Dotted path of the key, or the name of the rule."""
    asked: str
    """Empty for a problem that is no key's."""
    found: str
    do: str

    def __str__(self) -> str:
        found = f"{self.asked}\n    found: {self.found}" if self.asked else self.found
        return f"{self.where}: {found}\n    do: {self.do}"


class Caution(Problem):
    """A problem that does not prevent a run: what is asked for is allowed, and probably a mistake."""


class ConfigError(TriviumError):
    """A config that cannot run; `problems` holds all of them, not the first."""

    def __init__(self, asked: str, found: str = "", do: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(asked, found, do)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  - {problem}" for problem in self.problems)])


class UnknownName(ConfigError, LookupError):
    """A name that is not in the catalogue."""


class DataError(TriviumError, ValueError):
    """Data that cannot be used as it is."""


class MissingPackage(TriviumError, ImportError):
    """An optional package that is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str, otherwise: str = "") -> None:
        """`otherwise`: where the command is another one."""
        super().__init__(
            purpose,
            f"the package {package!r} is not installed",
            f"pip install 'trivium[{extra}]'{otherwise}",
        )


class RunDirError(TriviumError):
    """A run directory that this config cannot continue."""


class StorageError(TriviumError, OSError):
    """A file or a directory that cannot be written."""


class RolloutError(TriviumError):
    """One rollout failed; caught at the rollout boundary and recorded."""

    place: str = ""
    """Where user code in another process raised it (see `user_place`)."""


class RewardError(RolloutError):
    """A reward that did not give a finite number."""


class DeadlineExceeded(RolloutError, TimeoutError):
    """Something took longer than its deadline."""


class RolloutsFailing(TriviumError):
    """More rollouts failed than `workflow.max_failed_fraction` allows."""

    slots: tuple[int, ...] = ()
    """The slots whose groups hold the failures."""


class SyncError(TriviumError):
    """Weights could not be carried from the trainer to an explorer."""


class VersionGone(SyncError):
    """A version that is no longer offered: newer ones replaced it, or the exchange that carried it was aborted."""


class RoleFailed(TriviumError):
    """A role died, and the run cannot go on without it."""

    def __init__(self, role: str, cause: str) -> None:
        super().__init__(
            f"a run whose {role} works",
            f"{role} failed: {cause}",
            "fix the cause (its log says more) and run the same command again: it continues from the last checkpoint",
        )
        self.role, self.cause = role, cause

    def __reduce__(self) -> tuple[type[RoleFailed], tuple[str, str]]:
        return type(self), (self.role, self.cause)  # by its own arguments, where it travels between processes


def portable(error: Exception, otherwise: Callable[[str], TriviumError]) -> Exception:
    """An error that any process can unpickle: one of Trivium as it is, any other as `otherwise` of its text."""
    if isinstance(error, TriviumError) and type(error).__module__.partition(".")[0] == "trivium":
        return error
    return otherwise(f"{type(error).__name__}: {error}")


def text_of(value: object, limit: int = 4000, text: Callable[[Any], str] = str) -> str:
    """`str(value)` (or `repr`) as text that can be stored and printed, whatever the value is: shortened beyond `limit`
    characters, lone surrogates escaped; where `str` itself raises, the text says so."""
    try:
        shown = text(value)
    except Exception as error:
        shown = f"a {type(value).__name__} whose text raises {type(error).__name__}"
    shown = shown if len(shown) <= limit else f"{shown[: limit - 3]}..."
    return shown.encode(errors="backslashreplace").decode()


def described(value: object) -> str:
    """A value and its type, shortened, for error texts."""
    return f"{text_of(value, 80, repr)} of type {type(value).__name__}"


_OWN = str(Path(__file__).parent)
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")


def user_place(frames: Iterable[tuple[str, int, str]]) -> str:
    """`function (file:line)` of the innermost frame that is user code, neither of Trivium nor of a library; empty where
    none is. `frames` are (file, line, function), outermost first."""
    for file, line, function in reversed(list(frames)):
        if not file.startswith((_OWN, *_LIBRARIES)):
            return f"{function} ({file}:{line})"
    return ""


def one_line(error: BaseException) -> str:
    """An error in one line, its parts included: `found: ... do: ...`."""
    kind = "" if isinstance(error, TriviumError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{text_of(error)}".split())


def first_cause(error: BaseException) -> BaseException:
    """The error itself; of a group (a task group's), the first that was raised in it and is no cancellation."""
    while isinstance(error, BaseExceptionGroup):
        parts: list[BaseException] = list(error.exceptions)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        error = next((part for part in parts if not isinstance(part, CancelledError)), parts[0])
    return error
