"""The gateway over HTTP, in OpenAI's shapes, inside the event loop of the run."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
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
from trivium.serving.asks import Ask, Refused, read_ask, read_body, read_feedback
from trivium.serving.gateway import Gateway
from trivium.serving.sessions import Reply, shown
from trivium.types import StopReason

_log = logging.getLogger("trivium")
_FINISH = {StopReason.LENGTH: "length"}
"""OpenAI's word for why a reply ended; `stop` for everything else."""
_CLOSE_S = 5.0
"""Longest wait for answers on their way when the server is closed."""

_T = TypeVar("_T")
Endpoint = Callable[[Request], Awaitable[Response]]


class CannotListen(TriviumError):
    """The address of the endpoint is not to be had."""


class Door:
    """The endpoint's routes over a gateway."""

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
            self.app.add_api_route(path, self._guarded(endpoint), methods=[method])

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint behind the key, its refusals as answers."""

        async def answer(request: Request) -> Response:
            try:
                self._admit(request)
                return await endpoint(request)
            except Refused as refused:
                return _refusal(refused)
            except EngineFailure as error:  # the gateway ends the run by it
                return _refusal(Refused(500, error.asked, error.found, error.do, code="engine_failure"))
            except (DataError, RolloutError) as error:
                kind = "context_length_exceeded" if type(error).__name__ == "PromptTooLong" else None
                return _refusal(Refused(400, error.asked, error.found, error.do, code=kind))

        return answer

    def _admit(self, request: Request) -> None:
        if self._api_key is None:
            return
        said = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(said.encode(), self._api_key.encode()):
            raise Refused(
                401, "this endpoint", "no key, or another one, in `Authorization: Bearer ...`",
                "send the key that the server was started with", code="invalid_api_key",
            )  # fmt: skip

    # ------------------------------------------------------------------ endpoints

    async def _chat(self, request: Request) -> Response:
        gateway = self.gateway
        ask = read_ask(read_body(await request.body()), request.headers, self.model, gateway.explorer.sampling)
        replies = await _while_there(request, gateway.reply(ask))
        whole = self._completion(ask, replies)
        if not ask.stream:
            return JSONResponse(whole)
        # A reply is sampled before anything is sent, so that what goes wrong still has a status of its own.
        return StreamingResponse(_events(whole, ask.include_usage), media_type="text/event-stream")

    async def _models(self, request: Request) -> Response:
        del request
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "trivium"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self) -> dict[str, Any]:
        """Open to everybody: it says how the server fares, nothing about what is said."""
        return self.gateway.health()

    async def _feedback(self, request: Request) -> Response:
        return JSONResponse(self.gateway.feedback(read_feedback(read_body(await request.body()))))

    async def _commit(self, request: Request) -> Response:
        body = read_body(await request.body() or b"{}")
        task_id = body.get("task_id")
        if body.keys() - {"task_id"} or not (task_id is None or isinstance(task_id, str)):
            raise Refused(400, "commit", f"{body!r:.80}", "send a task_id as text, or nothing for every task")
        return JSONResponse(await self.gateway.commit(task_id))

    # ------------------------------------------------------------------ shapes

    def _completion(self, ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
        """OpenAI's `chat.completion`; each choice says its own id and session beside."""
        renderer = self.gateway.explorer.renderer
        prompt = len(replies[0].turn.prompt_tokens)
        sampled = sum(len(reply.turn.tokens) for reply in replies)
        newest = max((int(reply.turn.policy_version.max(initial=0)) for reply in replies), default=0)
        return {
            "id": replies[0].id, "object": "chat.completion", "created": int(time.time()), "model": self.model,
            "system_fingerprint": f"version-{newest}",
            "choices": [_choice(index, reply, ask, renderer) for index, reply in enumerate(replies)],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }  # fmt: skip


def _choice(index: int, reply: Reply, ask: Ask, renderer: Renderer) -> dict[str, Any]:
    turn = reply.turn
    choice: dict[str, Any] = {
        "index": index, "id": reply.id, "session": reply.session.name, "task_id": reply.session.task_id,
        "message": {"role": "assistant", "content": shown(turn, ask.sampling.stop), "refusal": None},
        "finish_reason": _FINISH.get(turn.stop_reason, "stop"),
        "logprobs": _log_probs(reply, renderer) if ask.logprobs else None,
    }  # fmt: skip
    if ask.token_ids:
        choice |= {"prompt_token_ids": turn.prompt_tokens.tolist(), "token_ids": turn.tokens.tolist()}
    return choice


def _log_probs(reply: Reply, renderer: Renderer) -> dict[str, Any]:
    """One entry per sampled token, the end of turn included; a token that is no text of its own reads empty."""
    texts = [renderer.decode([token]) for token in reply.turn.tokens.tolist()]
    entries = [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(texts, reply.turn.log_prob.tolist(), strict=True)
    ]
    return {"content": entries, "refusal": None}


async def _events(whole: dict[str, Any], include_usage: bool) -> AsyncGenerator[str]:
    """A finished completion as server-sent events: for each choice its role, its text and why it ended."""
    head = {**{name: whole[name] for name in whole.keys() - {"choices", "usage"}}, "object": "chat.completion.chunk"}

    def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        chunk = {**head, "choices": choices, **({"usage": usage} if include_usage else {})}
        return f"data: {json.dumps(chunk)}\n\n"

    for choice in whole["choices"]:
        beside = {name: choice[name] for name in choice.keys() - {"message", "finish_reason", "logprobs"}}
        delta = {"role": "assistant", "content": choice["message"]["content"]}
        yield event([{**beside, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}])
        yield event([{**beside, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}])
    if include_usage:
        yield event([], whole["usage"])
    yield "data: [DONE]\n\n"


def _refusal(refused: Refused) -> Response:
    headers = {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
    return JSONResponse(refused.body(), refused.status, headers)


async def _while_there(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of the work, which is called off when the client has gone: nobody would know the reply."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(400, "an answer", "the client has gone", "ask again")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


# --------------------------------------------------------------------------- the server


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the run's affair, not the server's."""
        yield


@asynccontextmanager
async def listening(app: FastAPI, host: str, port: int) -> AsyncGenerator[str]:
    """Serves the app while the block runs; gives its URL. Raises CannotListen; a server that breaks ends the block."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app, lifespan="off", access_log=False, log_config=None, log_level="warning", ws="none",
        timeout_graceful_shutdown=int(_CLOSE_S),
    )  # fmt: skip
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
            await _ended(serving)  # answers on their way arrive first, for a few seconds
            listener.close()


async def _ended(task: asyncio.Task[None]) -> None:
    """Waits for the task even where the waiting is cancelled meanwhile: a run that ends is told so twice."""
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
        raise CannotListen(
            f"listen on {host}:{port}", str(error), "choose another serve.host or serve.port (0 takes a free one)"
        ) from error
