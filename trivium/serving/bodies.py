"""The JSON bodies of requests: how deep one may be, and which values can be recorded; errors as responses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from trivium.errors import TriviumError

_MAX_DEPTH = 64
"""How deep the values of a body may be nested."""
_MAX_INTEGER = 2**63


class RequestError(TriviumError):
    """A request that gets an error response; the run continues."""

    def __init__(
        self,
        status: int,
        asked: str,
        found: str,
        do: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(asked, found, do)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            409: "conflict_error",
            410: "gone_error",
        }
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_request(param: str, asked: str, found: str, do: str, code: str | None = None) -> RequestError:
    """An error with status 400 about one parameter."""
    return RequestError(400, asked, found, do, param=param, code=code)


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request, whose values can all be recorded. Raises RequestError."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request("", "a JSON body", f"not JSON: {error}", "send one JSON object") from error
    if not isinstance(body, dict):
        raise bad_request("", "a JSON object", type(body).__name__, "send one JSON object")
    for name, value in body.items():
        _check_values(name, value)
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise bad_request("", "numbers that JSON knows", name, "send finite numbers")


def _check_values(param: str, value: object) -> None:
    """Refuses what no file, database or number format of a run can hold."""
    level: list[object] = [param, value]
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        for entry in level:
            if (problem := _problem(entry)) is not None:
                raise bad_request(_shown(param), *problem)
        level = [part for entry in level for part in _parts(entry)]
    raise bad_request(
        _shown(param), f"values nested at most {_MAX_DEPTH} deep", "deeper ones", "send a flatter value, or JSON text"
    )


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()


def _problem(value: object) -> tuple[str, str, str] | None:
    """(asked, found, do) for a text or number that cannot be recorded."""
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                return "text in Unicode", f"half of a surrogate pair in {_shown(value)!r:.60}", "send whole characters"
        case float():
            if not math.isfinite(value):
                return "a finite number", "one too large for a float", "send finite numbers"
        case int():
            if not -_MAX_INTEGER <= value < _MAX_INTEGER:
                return "an integer of 64 bits", f"one of {value.bit_length()} bits", "send it as text"
    return None


def _shown(text: str) -> str:
    """The text, with what cannot be sent escaped."""
    return text.encode(errors="backslashreplace").decode()
