"""Parts of the endpoints of every server: the key, errors as responses, clients that disconnect."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from trivium.foundation.errors import DataError, RolloutError
from trivium.policy import EngineFailure
from trivium.serving.bodies import RequestError, as_request_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

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
        except ClientDisconnect:
            error = RequestError(400, "the body of a request", "the client has disconnected", "ask again")
            return _error_response(error_body, error)
        except (RequestError, EngineFailure, DataError, RolloutError) as error:
            return _error_response(error_body, as_request_error(error))

    return answer


class EventResponse(StreamingResponse):
    """A stream of server-sent events about work in progress. Cancels the work when the client disconnects."""

    def __init__(self, events: AsyncGenerator[str], work: asyncio.Future[Any]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._work = work
        # An error is an event for the client. If the client has disconnected, asyncio would log it as lost.
        work.add_done_callback(lambda work: work.cancelled() or work.exception())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()


def _authenticate(request: Request, api_key: str | None) -> None:
    if api_key is None:
        return
    headers = request.headers
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    # In constant time: the time of an answer must not tell how much of a key is right.
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
            await asyncio.sleep(0)  # a `receive` that returns at once must not block the event loop

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError(400, "a response", "the client has disconnected", "ask again")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
