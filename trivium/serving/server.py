"""The HTTP server of a gateway, with OpenAI's request and response shapes, inside the event loop of the run."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from trivium.errors import DataError, RolloutError, TriviumError
from trivium.policy import EngineFailure
from trivium.protocols import Renderer
from trivium.serving.gateway import Gateway
from trivium.serving.requests import ChatRequest, RequestError, read_body, read_chat, read_feedback
from trivium.serving.sessions import CompletionNode, visible_text
from trivium.types import StopReason, Turn

_FINISH = {StopReason.LENGTH: "length"}
"""OpenAI's finish reason; `stop` for every other stop reason."""
_CLOSE_S = 5.0
"""Longest wait for responses in progress when the server is closed, in seconds."""

_T = TypeVar("_T")
Endpoint = Callable[[Request], Awaitable[Response]]


class ListenError(TriviumError):
    """The server cannot listen on its address."""


class ChatServer:
    """The routes of the endpoint over a gateway; `app` serves them."""

    def __init__(self, gateway: Gateway, model: str, api_key: str | None) -> None:
        self.gateway, self.model, self._api_key = gateway, model, api_key
        self.app = FastAPI(title="Trivium", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_api_route("/health", self._health, methods=["GET"])
        routes: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("GET", "/v1/models", self._models),
            ("POST", "/feedback", self._feedback),
            ("POST", "/commit", self._commit),
            ("POST", "/v1/feedback", self._feedback),  # where `client.post("/feedback")` of the openai client goes
            ("POST", "/v1/commit", self._commit),
        ]
        for method, path, endpoint in routes:
            self.app.add_api_route(path, self._with_errors(endpoint), methods=[method])

    def _with_errors(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint behind the key, with errors as responses."""

        async def answer(request: Request) -> Response:
            try:
                self._authenticate(request)
                return await endpoint(request)
            except RequestError as error:
                return _error_response(error)
            except EngineFailure as error:  # the gateway raises it in the run, too
                return _error_response(RequestError(500, error.asked, error.found, error.do, code="engine_failure"))
            except (DataError, RolloutError) as error:
                kind = "context_length_exceeded" if type(error).__name__ == "PromptTooLong" else None
                return _error_response(RequestError(400, error.asked, error.found, error.do, code=kind))

        return answer

    def _authenticate(self, request: Request) -> None:
        if self._api_key is None:
            return
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), self._api_key.encode()):
            raise RequestError(
                401,
                "this endpoint",
                "no key, or another one, in `Authorization: Bearer ...`",
                "send the key that the server was started with",
                code="invalid_api_key",
            )

    # ------------------------------------------------------------------ endpoints

    async def _chat(self, request: Request) -> Response:
        gateway = self.gateway
        chat = read_chat(read_body(await request.body()), request.headers, self.model, gateway.explorer.sampling)
        completions = await _cancel_on_disconnect(request, gateway.complete(chat))
        body = self._completion(chat, completions)
        if not chat.stream:
            return JSONResponse(body)
        # Everything is sampled before anything is sent, so that an error still has a status of its own.
        return StreamingResponse(_events(body, chat.include_usage), media_type="text/event-stream")

    async def _models(self, request: Request) -> Response:
        del request
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "trivium"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self) -> dict[str, Any]:
        """Needs no key: it shows status and counts, no content."""
        return self.gateway.health()

    async def _feedback(self, request: Request) -> Response:
        return JSONResponse(self.gateway.feedback(read_feedback(read_body(await request.body()))))

    async def _commit(self, request: Request) -> Response:
        body = read_body(await request.body() or b"{}")
        task_id = body.get("task_id")
        if body.keys() - {"task_id"} or not (task_id is None or isinstance(task_id, str)):
            raise RequestError(400, "commit", f"{body!r:.80}", "send a task_id as text, or nothing for every task")
        return JSONResponse(await self.gateway.commit(task_id))

    # ------------------------------------------------------------------ shapes

    def _completion(self, chat: ChatRequest, completions: Sequence[CompletionNode]) -> dict[str, Any]:
        """OpenAI's `chat.completion`; each choice also has its own id and session."""
        renderer = self.gateway.explorer.renderer
        prompt = len(completions[0].turn.prompt_tokens)
        sampled = sum(len(node.turn.tokens) for node in completions)
        newest = max((int(node.turn.policy_version.max(initial=0)) for node in completions), default=0)
        return {
            "id": completions[0].id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"version-{newest}",
            "choices": [_choice(index, node, chat, renderer) for index, node in enumerate(completions)],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }


def _choice(index: int, node: CompletionNode, chat: ChatRequest, renderer: Renderer) -> dict[str, Any]:
    turn = node.turn
    choice: dict[str, Any] = {
        "index": index,
        "id": node.id,
        "session": node.session.name,
        "task_id": node.session.task_id,
        "message": {"role": "assistant", "content": visible_text(turn, chat.sampling.stop), "refusal": None},
        "finish_reason": _FINISH.get(turn.stop_reason, "stop"),
        "logprobs": _log_probs(turn, renderer) if chat.logprobs else None,
    }
    if chat.token_ids:
        choice |= {"prompt_token_ids": turn.prompt_tokens.tolist(), "token_ids": turn.tokens.tolist()}
    return choice


def _log_probs(turn: Turn, renderer: Renderer) -> dict[str, Any]:
    """One entry per sampled token, the end of turn included; a token without text of its own is empty."""
    texts = [renderer.decode([token]) for token in turn.tokens.tolist()]
    entries = [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(texts, turn.log_prob.tolist(), strict=True)
    ]
    return {"content": entries, "refusal": None}


async def _events(body: dict[str, Any], include_usage: bool) -> AsyncGenerator[str]:
    """A finished completion as server-sent events: role, text and finish reason of each choice."""
    head = {**{name: body[name] for name in body.keys() - {"choices", "usage"}}, "object": "chat.completion.chunk"}

    def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        chunk = {**head, "choices": choices, **({"usage": usage} if include_usage else {})}
        return f"data: {json.dumps(chunk)}\n\n"

    for choice in body["choices"]:
        extra = {name: choice[name] for name in choice.keys() - {"message", "finish_reason", "logprobs"}}
        delta = {"role": "assistant", "content": choice["message"]["content"]}
        yield event([{**extra, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}])
        yield event([{**extra, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}])
    if include_usage:
        yield event([], body["usage"])
    yield "data: [DONE]\n\n"


def _error_response(error: RequestError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.body(), error.status, headers)


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of the work, which is cancelled when the client disconnects."""

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


# --------------------------------------------------------------------------- the server


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the run."""
        yield


@asynccontextmanager
async def serve_app(app: FastAPI, host: str, port: int) -> AsyncGenerator[str]:
    """Serves the app while the block runs; gives its URL. Raises ListenError; a server that fails cancels the block."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        ws="none",
        timeout_graceful_shutdown=int(_CLOSE_S),
    )
    server = _Server(config)
    shown_host = f"[{host}]" if ":" in host else host
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve([listener]), name="http")
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(0.01)
            yield f"http://{shown_host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await _finished(serving)  # responses in progress are sent first, for a few seconds
            listener.close()


async def _finished(task: asyncio.Task[None]) -> None:
    """Waits for the task even if the wait is cancelled meanwhile: a run that ends may be cancelled twice."""
    waiting = asyncio.ensure_future(asyncio.wait({task}))
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await waiting
        raise


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ListenError(
            f"listen on {host}:{port}", str(error), "choose another serve.host or serve.port (0 takes a free one)"
        ) from error
