"""The bodies of requests: how large and how slow they may be, how deep their JSON, and which values a run can record;
errors as responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from trivium.foundation.errors import DataError, RolloutError, TriviumError
from trivium.policy import EngineFailure, PromptTooLong
from trivium.types.recordable import unrecordable, visible

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BODY_S = 30.0
"""Longest time that a body may take to arrive, in seconds."""
_BODIES = 8
"""All bodies that are arriving may take up the memory of this many bodies of the largest size."""
_MAX_DEPTH = 64
"""How deep the values of a body may be nested."""


class RequestError(TriviumError):
    """A request that gets an error response. The run continues."""

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


def as_request_error(error: RequestError | EngineFailure | DataError | RolloutError) -> RequestError:
    """The error as the clients of an endpoint get it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineFailure):  # the gateway raises it in the run, too
        return RequestError(500, error.asked, error.found, error.do, code="engine_failure")
    kind = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return RequestError(400, error.asked, error.found, error.do, code=kind)


class BodyLimits:
    """ASGI middleware that bounds the bodies of requests: the size and the time of each, and the memory of all.

    An endpoint that reads a body beyond these limits gets a RequestError: 413 too large, 408 too slow, 503 too many at
    once.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._arriving = 0
        """Bytes of bodies that have not arrived completely."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = asyncio.get_running_loop().time() + _BODY_S
        size, complete = 0, False

        async def receive_within_limits() -> Message:
            nonlocal size, complete
            if complete:  # what follows a body is the disconnect, which may take as long as the response
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError as error:
                found = f"it has not arrived within {_BODY_S:.0f} s"
                raise RequestError(408, "the body of a request", found, "send it at once") from error
            part = len(message.get("body", b""))
            size, self._arriving = size + part, self._arriving + part
            self._check(size)
            if not message.get("more_body", False):
                complete, self._arriving = True, self._arriving - size
            return message

        try:
            await self._app(scope, receive_within_limits, send)
        finally:
            # An endpoint that fails, or a client that leaves, does not read the rest of the body.
            self._arriving -= 0 if complete else size

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise RequestError(
                413,
                f"a body of at most {self._max_bytes:,} bytes",
                f"at least {size:,} bytes",
                "send less, or raise serve.max_body_bytes",
                code="body_too_large",
            )
        if self._arriving > _BODIES * self._max_bytes:
            raise RequestError(
                503,
                "memory for the body of a request",
                f"{self._arriving:,} bytes of other bodies are arriving",
                "retry with fewer requests at once",
                code="too_many_bodies",
                retry_after_s=1,
            )


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises RequestError, also for values that a run cannot record."""
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
    raise bad_request("", "numbers that JSON supports", name, "send finite numbers")


def _check_values(param: str, value: object) -> None:
    """Raises RequestError for a value that a file, a database or a number format of a run cannot hold."""
    level: list[object] = [param, value]  # by level: a recursion could exceed Python's stack before the limit
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        for entry in level:
            if (problem := unrecordable(entry)) is not None:
                raise bad_request(visible(param), *problem)
        level = [part for entry in level for part in _parts(entry)]
    raise bad_request(
        visible(param), f"values nested at most {_MAX_DEPTH} deep", "deeper ones", "send a flatter value, or JSON text"
    )


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()
