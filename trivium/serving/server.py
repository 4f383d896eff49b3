"""The routes of a gateway over HTTP, as clients of OpenAI and Anthropic call them. They run on the event loop of the
run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from trivium.protocols import Renderer
from trivium.serving.bodies import BodyLimits, RequestError, read_body
from trivium.serving.chat_api import ChatEvents, chat_completion
from trivium.serving.completion_parts import Recorded
from trivium.serving.endpoints import Endpoint, EventResponse, cancel_on_disconnect, guarded
from trivium.serving.gateway import Gateway
from trivium.serving.messages_api import MessageEvents, message, message_error, read_message
from trivium.serving.requests import ChatRequest, read_chat, read_feedback, read_secret
from trivium.serving.responses_api import ResponseEvents, read_response, response
from trivium.serving.session_records import CompletionNode
from trivium.serving.streams import CompletionStream, Events
from trivium.serving.tokens_api import (
    GeneratedEvents,
    generated,
    read_completion,
    read_generate,
    text_completion,
)
from trivium.types import IntArray, Sampling


class ChatServer:
    """The HTTP routes of a gateway, in the ASGI application `app`."""

    def __init__(self, gateway: Gateway, model: str, api_key: str | None, max_body_bytes: int = 2**22) -> None:
        self.gateway, self.model = gateway, model
        self._num_completions = 0
        self.app = FastAPI(title="Trivium", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_middleware(BodyLimits, max_bytes=max_body_bytes)
        self.app.add_api_route("/health", self._health, methods=["GET"])
        routes: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._complete),
            ("POST", "/v1/responses", self._response),
            ("POST", "/inference/v1/generate", self._generate),  # where vLLM has it
            ("GET", "/v1/models", self._models),
            ("POST", "/feedback", self._feedback),
            ("POST", "/commit", self._commit),
            ("POST", "/v1/feedback", self._feedback),  # where `client.post("/feedback")` of the openai client goes
            ("POST", "/v1/commit", self._commit),
        ]
        for method, path, endpoint in routes:
            self.app.add_api_route(path, guarded(endpoint, api_key), methods=[method])
        for path, endpoint in (("/v1/messages", self._message), ("/v1/messages/count_tokens", self._count_tokens)):
            self.app.add_api_route(path, guarded(endpoint, api_key, message_error), methods=["POST"])

    # ------------------------------------------------------------------ endpoints

    async def _chat(self, request: Request) -> Response:
        return await self._respond(request, await self._read(request, read_chat), chat_completion, ChatEvents)

    async def _message(self, request: Request) -> Response:
        return await self._respond(request, await self._read(request, read_message), message, MessageEvents)

    async def _response(self, request: Request) -> Response:
        reader = partial(read_response, node_of=self.gateway.sessions.index.node_of)
        return await self._respond(request, await self._read(request, reader), response, ResponseEvents)

    async def _generate(self, request: Request) -> Response:
        explorer = self.gateway.explorer
        eos = explorer.renderer.eos_token_ids

        def text(tokens: IntArray) -> str:
            return explorer.renderer.decode(tokens[: explorer.engine.max_context])  # a longer prompt is refused

        def read(body: Any, headers: Any, model: str, trained: Sampling, _: Recorded) -> ChatRequest:
            return read_generate(body, headers, model, trained, eos, text)

        return await self._respond(request, await self._read(request, read), generated, GeneratedEvents)

    async def _read(self, request: Request, reader: Callable[..., ChatRequest]) -> ChatRequest:
        gateway = self.gateway
        body = read_body(await request.body())
        return reader(body, request.headers, self.model, gateway.explorer.sampling, gateway.recorded)

    async def _respond(
        self,
        request: Request,
        chat: ChatRequest,
        whole: Callable[[str, ChatRequest, Sequence[CompletionNode], Renderer], dict[str, Any]],
        events: type[Events],
    ) -> Response:
        """Samples the completions and returns them in the format of a protocol: `whole`, or as a stream of `events`."""
        renderer = self.gateway.explorer.renderer

        def body(completions: Sequence[CompletionNode]) -> dict[str, Any]:
            return whole(self.model, chat, completions, renderer)

        if not chat.stream:
            return JSONResponse(body(await cancel_on_disconnect(request, self.gateway.complete(chat))))
        stream = CompletionStream(chat, renderer)
        work = asyncio.ensure_future(self.gateway.complete(chat, stream.completions))
        # The response begins with the first token, so an earlier error can still set its status.
        await cancel_on_disconnect(request, stream.started(work))
        return EventResponse(stream.events(work, events(self.model, chat, renderer), body), work)

    async def _count_tokens(self, request: Request) -> Response:
        chat = await self._read(request, partial(read_message, counts=True))
        return JSONResponse({"input_tokens": await self.gateway.count_tokens(chat)})

    async def _complete(self, request: Request) -> Response:
        """A completion of token ids, which is not recorded."""
        explorer = self.gateway.explorer
        body = read_body(await request.body())
        self._num_completions += 1
        sampling_request = read_completion(
            body, self.model, explorer.sampling, explorer.renderer.eos_token_ids, number=self._num_completions
        )
        completion = await cancel_on_disconnect(request, self.gateway.sample(sampling_request))
        return JSONResponse(text_completion(self.model, sampling_request, completion, explorer.renderer))

    async def _models(self, request: Request) -> Response:
        del request
        model: dict[str, Any] = {"id": self.model, "object": "model", "created": 0, "owned_by": "trivium"}
        model["max_model_len"] = self.gateway.explorer.engine.max_context
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self) -> dict[str, Any]:
        """Needs no key: status and counts, no content."""
        return self.gateway.health()

    async def _feedback(self, request: Request) -> Response:
        body = read_body(await request.body())
        return JSONResponse(self.gateway.sessions.feedback(read_feedback(body, request.headers)))

    async def _commit(self, request: Request) -> Response:
        body = read_body(await request.body() or b"{}")
        task_id = body.get("task_id")
        if body.keys() - {"task_id", "secret"} or not (task_id is None or isinstance(task_id, str)):
            raise RequestError(400, "commit", f"{body!r:.80}", "send a task_id as text, or nothing for every task")
        return JSONResponse(await self.gateway.sessions.commit(task_id, read_secret(body, request.headers)))
