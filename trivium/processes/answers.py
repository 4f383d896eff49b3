"""The answer of a call in another process: its result, or its error in a form that the caller can raise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trivium.errors import TriviumError, first_cause

_log = logging.getLogger("trivium")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result or the error of a call in another process."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        """Returns the value, or raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True, slots=True)
class Failures:
    """Makes the answers of calls that failed in this process."""

    name: str
    """Names this process in its log."""
    of: Callable[[str], TriviumError]
    """Makes the error that the caller raises for an exception whose class it may lack, from its text."""

    def answer(self, error: BaseException) -> Answer:
        """The first cause, as an error that any process can unpickle. Errors of Trivium stay as they are. The log has
        the traceback of any other."""
        cause = first_cause(error)
        is_ours = isinstance(cause, TriviumError) and type(cause).__module__.partition(".")[0] == "trivium"
        if is_ours or isinstance(cause, StopAsyncIteration):
            return Answer(error=cause)
        _log.error("%s failed", self.name, exc_info=error)
        return Answer(error=self.of(f"{type(cause).__name__}: {cause}"))

    def answer_of(self, function: Callable[[], Any]) -> Answer:
        """The answer of a call of `function`."""
        try:
            return Answer(function())
        except Exception as error:
            return self.answer(error)
