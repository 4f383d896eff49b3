"""The error tree. Every user-facing error has three parts: what was asked, what was found, what to do.

TriviumError
├── ConfigError          the config asks for something that cannot be done (exit code 2)
│   └── UnknownName      a short name that is not in the catalogue; also a LookupError
├── DataError            a file, dataset or rollout record is missing or malformed; also a ValueError
│   └── TemplateRefusal  the chat template refuses, drops or rewrites a sequence of roles: ends the run
├── MissingPackage       an optional package is not installed; also an ImportError
├── RunDirError          a run directory belongs to another run, or is damaged
├── StorageError         a file cannot be written: disk full, no permission; also an OSError
├── RolloutError         one rollout failed: recorded as data, never ends the run by itself
│   ├── RewardError      a reward raised, or returned something that is not a finite number
│   └── DeadlineExceeded a deadline fired; also a TimeoutError
├── RolloutsFailing      more rollouts failed than `workflow.max_failed_fraction` allows: ends the run
├── SyncError            trainer and explorer lost contact, or weights arrived damaged
│   └── VersionGone      a version is no longer offered: request a newer one
└── RoleFailed           a role of the run (trainer, an explorer, its engine, the buffer, ...) died
    └── ProcessDied      ... because its process ended
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
    """A problem of a config, a run or a machine that a rule reports (`trivium.config.rules`)."""

    where: str
    """Dotted path of the key, or the name of the rule."""
    asked: str
    """Empty if the problem does not concern a key."""
    found: str
    do: str

    def __str__(self) -> str:
        found = f"{self.asked}\n    found: {self.found}" if self.asked else self.found
        return f"{self.where}: {found}\n    do: {self.do}"


class Caution(Problem):
    """A problem that does not prevent a run: an allowed setting that is probably a mistake."""


class ConfigError(TriviumError):
    """A config that cannot run; `problems` holds all problems, not only the first."""

    def __init__(self, asked: str, found: str = "", do: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(asked, found, do)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  - {problem}" for problem in self.problems)])


class UnknownName(ConfigError, LookupError):
    """A name that is not in the catalogue."""


class DataError(TriviumError, ValueError):
    """Data that is missing or malformed."""


class TemplateRefusal(DataError):
    """A conversation that a chat template refuses, drops or rewrites, whatever its texts are. It ends the run: every
    rollout of the same form would fail."""


class MissingPackage(TriviumError, ImportError):
    """A feature needs an optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str, otherwise: str = "") -> None:
        """`otherwise` describes exceptions to the install command."""
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
    """A failed rollout; caught at the rollout boundary and recorded."""

    place: str = ""
    """The place in user code of another process that raised it (see `user_place`)."""


class RewardError(RolloutError):
    """A reward raised, or returned no finite number."""


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
    """A role died, and the run cannot continue without it."""

    def __init__(self, role: str, cause: str) -> None:
        super().__init__(
            f"a run whose {role} works",
            f"{role} failed: {cause}",
            "fix the cause (see its log) and run the same command again: it continues from the last checkpoint",
        )
        self.role, self.cause = role, cause

    def __reduce__(self) -> tuple[type[RoleFailed], tuple[str, str]]:
        return type(self), (self.role, self.cause)  # pickled by its own arguments


class ProcessDied(RoleFailed):
    """The process of a role died. A run that started the process may start it again (`cluster.max_restarts`)."""


def text_of(value: object, limit: int = 4000, text: Callable[[Any], str] = str) -> str:
    """`str(value)` (or `repr`) as printable text for any value: shortened to `limit` characters, with lone surrogates
    escaped. If `str` raises, returns a text with the type of the error."""
    try:
        printed = text(value)
    except Exception as error:
        printed = f"a {type(value).__name__} whose text raises {type(error).__name__}"
    printed = printed if len(printed) <= limit else f"{printed[: limit - 3]}..."
    return printed.encode(errors="backslashreplace").decode()


def described(value: object) -> str:
    """A value and its type, shortened, for error texts."""
    return f"{text_of(value, 80, repr)} of type {type(value).__name__}"


_OWN = str(Path(__file__).parents[1])
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")


def user_place(frames: Iterable[tuple[str, int, str]]) -> str:
    """`function (file:line)` of the innermost frame of user code, outside Trivium and libraries; empty if there is
    none. `frames` are (file, line, function), outermost first."""
    for file, line, function in reversed(list(frames)):
        if not file.startswith((_OWN, *_LIBRARIES)):
            return f"{function} ({file}:{line})"
    return ""


def one_line(error: BaseException) -> str:
    """An error in one line, with its parts: `found: ... do: ...`."""
    kind = "" if isinstance(error, TriviumError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{text_of(error)}".split())


def first_cause(error: BaseException) -> BaseException:
    """The error itself, or the first error of an exception group that is not a cancellation."""
    while isinstance(error, BaseExceptionGroup):
        parts: list[BaseException] = list(error.exceptions)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        error = next((part for part in parts if not isinstance(part, CancelledError)), parts[0])
    return error
