"""The routes of a gateway over HTTP, as OpenAI's clients call them. They run on the event loop of the run."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from trivium.serving.bodies import BodyLimits, RequestError, read_body
from trivium.serving.completions import read_completion, text_completion
from trivium.serving.endpoints import Endpoint, cancel_on_disconnect, guarded
from trivium.serving.gateway import Gateway
from trivium.serving.requests import read_chat, read_feedback, read_secret
from trivium.serving.responses import chat_completion, chunks


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
            ("GET", "/v1/models", self._models),
            ("POST", "/feedback", self._feedback),
            ("POST", "/commit", self._commit),
            ("POST", "/v1/feedback", self._feedback),  # where `client.post("/feedback")` of the openai client goes
            ("POST", "/v1/commit", self._commit),
        ]
        for method, path, endpoint in routes:
            self.app.add_api_route(path, guarded(endpoint, api_key), methods=[method])

    # ------------------------------------------------------------------ endpoints

    async def _chat(self, request: Request) -> Response:
        gateway, explorer = self.gateway, self.gateway.explorer
        sent = read_body(await request.body())
        chat = read_chat(sent, request.headers, self.model, explorer.sampling, gateway.text_of)
        completions = await cancel_on_disconnect(request, gateway.complete(chat))
        body = chat_completion(self.model, chat, completions, explorer.renderer)
        if not chat.stream:
            return JSONResponse(body)
        # The response begins after the last token is sampled, so an error can still set its status.
        return StreamingResponse(chunks(body, chat.include_usage), media_type="text/event-stream")

    async def _complete(self, request: Request) -> Response:
        """A completion of token ids, which is not recorded."""
        explorer = self.gateway.explorer
        sent = read_body(await request.body())
        self._num_completions += 1
        wanted = read_completion(
            sent, self.model, explorer.sampling, explorer.renderer.eos_token_ids, number=self._num_completions
        )
        completion = await cancel_on_disconnect(request, self.gateway.sample(wanted))
        return JSONResponse(text_completion(self.model, wanted, completion, explorer.renderer))

    async def _models(self, request: Request) -> Response:
        del request
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "trivium"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self) -> dict[str, Any]:
        """Needs no key: status and counts, no content."""
        return self.gateway.health()

    async def _feedback(self, request: Request) -> Response:
        body = read_body(await request.body())
        return JSONResponse(self.gateway.feedback(read_feedback(body, request.headers)))

    async def _commit(self, request: Request) -> Response:
        body = read_body(await request.body() or b"{}")
        task_id = body.get("task_id")
        if body.keys() - {"task_id", "secret"} or not (task_id is None or isinstance(task_id, str)):
            raise RequestError(400, "commit", f"{body!r:.80}", "send a task_id as text, or nothing for every task")
        return JSONResponse(await self.gateway.commit(task_id, read_secret(body, request.headers)))
