"""Parts of the endpoints of every server: the key, errors as responses, clients that disconnect."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from trivium.errors import DataError, RolloutError
from trivium.policy import EngineFailure
from trivium.serving.bodies import RequestError

_T = TypeVar("_T")
Endpoint = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[RequestError], dict[str, Any]]
"""Returns the body of an error as the clients of a protocol read it."""


def guarded(endpoint: Endpoint, api_key: str | None, error_body: ErrorBody = RequestError.body) -> Endpoint:
    """The endpoint, which requires the key (None: no key) and turns errors into responses with `error_body`."""

    async def answer(request: Request) -> Response:
        try:
            _authenticate(request, api_key)
            return await endpoint(request)
        except RequestError as error:
            return _error_response(error_body, error)
        except ClientDisconnect:
            error = RequestError(400, "the body of a request", "the client has disconnected", "ask again")
            return _error_response(error_body, error)
        except EngineFailure as error:  # the gateway raises it in the run, too
            return _error_response(
                error_body, RequestError(500, error.asked, error.found, error.do, code="engine_failure")
            )
        except (DataError, RolloutError) as error:
            kind = "context_length_exceeded" if type(error).__name__ == "PromptTooLong" else None
            return _error_response(error_body, RequestError(400, error.asked, error.found, error.do, code=kind))

    return answer


def _authenticate(request: Request, api_key: str | None) -> None:
    if api_key is None:
        return
    headers = request.headers
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(key.encode(), api_key.encode()):
        raise RequestError(
            401,
            "this endpoint",
            "no key, or a wrong one, in `Authorization: Bearer ...` or `x-api-key`",
            "send the key that the server was started with",
            code="invalid_api_key",
        )


def _error_response(error_body: ErrorBody, error: RequestError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error_body(error), error.status, headers)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of the work. Cancels the work when the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError(400, "a response", "the client has disconnected", "ask again")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
