"""The answer of a call in another process: its result, or its error in a form that the caller can raise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trivium.foundation.errors import TriviumError, first_cause

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
    """The name of this process in its log."""
    of: Callable[[str], TriviumError]
    """Makes an error of Trivium from the text of any other exception, whose class the caller may lack."""

    def answer(self, error: BaseException) -> Answer:
        """The first cause, as an error that any process can unpickle. Errors of Trivium are passed unchanged, and so is
        StopAsyncIteration, which ends the data of a buffer. Any other error is logged with its traceback and replaced
        (`of`)."""
        cause = first_cause(error)
        is_ours = isinstance(cause, TriviumError) and type(cause).__module__.partition(".")[0] == "trivium"
        if is_ours or isinstance(cause, StopAsyncIteration):
            return Answer(error=cause)
        _log.error("%s failed", self.name, exc_info=error)
        return Answer(error=self.of(f"{type(cause).__name__}: {cause}"))

    def answer_of(self, function: Callable[[], Any]) -> Answer:
        """Calls `function`. Returns its result or its error."""
        try:
            return Answer(function())
        except Exception as error:
            return self.answer(error)
