"""The HTTP routes that the Tinker SDK calls."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from trivium.models.weights.section import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trivium.serving.bodies import BodyLimits, RequestError, bad_request, read_body
from trivium.serving.endpoints import Endpoint, guarded
from trivium.serving.tinker import verbs
from trivium.serving.tinker.futures import POLL_S, PendingResult
from trivium.serving.tinker.lora_models import adapter_in
from trivium.serving.tinker.saved_states import SavedState
from trivium.serving.tinker.service import TinkerService
from trivium.serving.tinker.verbs import read_form

_RUN, _STATE = "training_runs/{model_id}/checkpoints", "training_runs/{model_id}/checkpoints/{kind}/{name}"
_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_LINK_S = 86400
"""How long the link to a file is valid."""
_REPEATED = (408, 429, 503)
"""The SDK repeats requests with these statuses: their numbers will come again."""
_NOTE = {"info_message": "adapters are on attention and MLP: train_unembed has no effect here"}
CLIENT_CONFIG: Mapping[str, Any] = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
"""How the SDK works with this service: a sampling client waits for all its results over one connection."""
Answer = Mapping[str, Any] | PendingResult


class TinkerServer:
    """The routes of a service, in the ASGI application `app`."""

    def __init__(self, service: TinkerService, api_key: str | None, max_body_bytes: int) -> None:
        self.service = service
        # Without a key, links are signed by a secret that no client can know, so they end with the service.
        self._secret = (api_key or secrets.token_hex()).encode()
        self.app = FastAPI(title="Trivium", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_middleware(BodyLimits, max_bytes=max_body_bytes)
        config = {**CLIENT_CONFIG, "fwdbwd_max_chunk_bytes_count": max_body_bytes * 3 // 4}
        answers: dict[str, tuple[type[verbs.Body], Callable[[Any], Answer | Awaitable[Answer]]]] = {
            "client/config": (verbs.Empty, lambda _: config),
            "client/dynamic_config": (verbs.Empty, lambda _: {"sample_cancel_enabled": True}),
            "telemetry": (verbs.Empty, lambda _: {"status": "accepted"}),
            "create_session": (verbs.Empty, lambda _: {"session_id": service.create_session(), **_NOTE}),
            "session_heartbeat": (verbs.SessionOf, self._heartbeat),
            "create_model": (verbs.ModelForm, service.create_model),
            "get_info": (verbs.ModelOf, self._info),
            "optim_step": (verbs.StepForm, self._optim_step),
            "save_weights": (verbs.SaveForm, lambda form: self._save(form, "weights")),
            "save_weights_for_sampler": (verbs.SaveForm, lambda form: self._save(form, "sampler_weights")),
            "save_weights_external": (verbs.SaveForm, lambda form: self._save(form, "external_weights")),
            "load_weights": (verbs.LoadForm, self._load),
            "weights_info": (verbs.PathOf, lambda form: self._info_of(form.tinker_path)),
            "create_sampling_session": (verbs.SamplerForm, self._create_sampler),
            "join_sampling_session": (verbs.SamplerOf, self._join_sampler),
            "retrieve_futures": (verbs.ResultsForm, self._results),
            "cancel_future": (verbs.ResultOf, self._cancel),
        }
        routes: list[tuple[str, str, Endpoint]] = [
            ("GET", "healthz", self._health),
            ("GET", "get_server_capabilities", self._capabilities),
            ("POST", "forward_backward", self._forward_backward),
            ("POST", "asample", self._sample),
            ("POST", "retrieve_future", self._result),
            ("POST", "sessions/{session_id}/finish", self._finish),
            ("GET", "samplers/{sampler_id}", self._sampler),
            ("GET", "training_runs", self._runs),
            ("GET", "training_runs/{model_id}", self._run),
            ("GET", "checkpoints", self._checkpoints),
            ("GET", _RUN, self._states),
            ("DELETE", _STATE, self._delete),
            ("GET", f"{_STATE}/external_weights_urls", self._links),
            *(("POST", name, self._answering(form, answer)) for name, (form, answer) in answers.items()),
        ]
        for method, path, endpoint in routes:
            self.app.add_api_route(f"/api/v1/{path}", guarded(endpoint, api_key), methods=[method])
        # A link to a file carries its own permission.
        self.app.add_api_route(f"/api/v1/{_STATE}/files/{{file}}", guarded(self._file, None), methods=["GET"])
        methods = ["GET", "POST", "PUT", "DELETE"]
        self.app.add_api_route("/api/v1/{path:path}", guarded(self._unknown, api_key), methods=methods)

    # ----------------------------------------------------------------------- the service

    async def _health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        del request
        each = {"max_context_length": self.service.sampler.engine.max_context, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": name, **each} for name in self.service.names]})

    async def _unknown(self, request: Request) -> Response:
        do = "see what differs from the service in docs/tinker.md"
        raise RequestError(404, f"{request.method} {request.url.path[:120]}", "this service does not have it", do)

    def _heartbeat(self, form: verbs.SessionOf) -> Answer:
        self.service.heartbeat(form.session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> Response:
        self.service.finish(request.path_params["session_id"])
        return JSONResponse(None)

    # ----------------------------------------------------------------------- results

    async def _result(self, request: Request) -> Response:
        id = read_form(verbs.ResultOf, read_body(await request.body())).request_id
        try:
            future = await self.service.futures.fetch(id)
        except RequestError as error:
            if error.status != 408:
                raise
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)
        body, future.fetched = future.body(), True
        return Response(body, media_type="application/x-protobuf" if future.is_message else "application/json")

    async def _results(self, form: verbs.ResultsForm) -> Answer:
        sampler = self.service.sampling_session(form.target.sampling_session_id)
        waits = POLL_S if form.timeout is None else min(form.timeout, POLL_S)
        return await sampler.completions(form.target.cloned_sampler_id, form.prev_cursor, waits)

    def _cancel(self, form: verbs.ResultOf) -> Answer:
        future = self.service.futures.find(form.request_id)
        if future is not None:
            future.cancel()
        return {}

    # ----------------------------------------------------------------------- training

    def _info(self, form: verbs.ModelOf) -> Answer:
        model = self.service.model(form.model_id)
        name, rank = model.info["base_model"], model.info["lora_rank"]
        data = {"model_name": name, "tokenizer_id": str(self.service.model_dir)}
        return {"model_id": model.id, "model_data": data, "model_name": name, "is_lora": True, "lora_rank": rank}

    async def _forward_backward(self, request: Request) -> Response:
        raw = bytearray()
        with self._in_order(lambda: verbs.loss_number(bytes(raw[:500])), loses_data=True):
            async for part in request.stream():  # the number is known even of a body that is too large
                raw += part
            form, message = verbs.read_loss_head(raw)
        only = bool(message.get("forward_only"))
        with self._in_order(lambda: form, loses_data=not only):
            model = self.service.model(form.model_id)
            wanted = verbs.read_loss(message, self.service.adapters.vocabulary)
            return JSONResponse({"request_id": self.service.forward_backward(model, form.seq_id, wanted).id})

    def _optim_step(self, form: verbs.StepForm) -> Answer:
        return self.service.optim_step(self.service.model(form.model_id), form.seq_id, form.adam_params.settings)

    def _save(self, form: verbs.SaveForm, kind: str) -> Answer:
        return self.service.save(self.service.model(form.model_id), form, kind)

    def _load(self, form: verbs.LoadForm) -> Answer:
        if form.model_id is not None:
            model, saved = self.service.model(form.model_id), self.service.states.open(form.path)
            return self.service.load(model, form.seq_id, saved, optimizer=form.optimizer)
        if form.session_id is None or form.model_seq_id is None:
            raise bad_request("model_id", "model_id, or session_id and model_seq_id", "neither", "send one")
        saved = self.service.states.open(form.path)
        return self.service.create_from_state(form.session_id, form.model_seq_id, saved, form)

    @contextmanager
    def _in_order(self, head: Callable[[], verbs.Numbered | None], *, loses_data: bool = False) -> Generator[None]:
        """If the block refuses a request, later ones of its model do not wait for it. `head` returns its model and
        number as far as they can be read. `loses_data`: the gradient then lacks data."""
        try:
            yield
        except RequestError as error:
            form = None if error.status in _REPEATED or error.param == "seq_id" else head()
            if form is not None and form.seq_id is not None:
                with suppress(RequestError):  # an unknown model, or a number that has had its turn
                    model = self.service.model(form.model_id)
                    self.service.refuse(model, form.seq_id, error, loses_data=loses_data)
            raise

    def _answering(self, form: type[verbs.Body], answer: Callable[[Any], Answer | Awaitable[Answer]]) -> Endpoint:
        """The endpoint that answers a JSON body with JSON."""

        async def endpoint(request: Request) -> Response:
            raw = await request.body()
            with self._in_order(lambda: verbs.number_in(raw)):
                result = answer(read_form(form, read_body(raw)))
            result = await result if isinstance(result, Awaitable) else result
            return JSONResponse({"request_id": result.id} if isinstance(result, PendingResult) else result)

        return endpoint

    # ----------------------------------------------------------------------- sampling

    def _create_sampler(self, form: verbs.SamplerForm) -> Answer:
        number, base, path = form.sampling_session_seq_id, form.base_model, form.model_path
        return {"sampling_session_id": self.service.create_sampler(form.session_id, number, base, path).id}

    def _join_sampler(self, form: verbs.SamplerOf) -> Answer:
        sampler = self.service.sampling_session(form.sampling_session_id)
        sampler.clones += 1
        return {"client_counter": sampler.clones}

    async def _sample(self, request: Request) -> Response:
        raw = await request.body()
        form = read_form(verbs.SampleForm, read_body(raw))
        future = self.service.sample(form, len(raw))
        ids = [f"{future.id}-{number}" for number in range(form.num_samples)]
        return JSONResponse({"request_id": future.id, "sample_sequence_ids": ids})

    async def _sampler(self, request: Request) -> Response:
        sampler = self.service.sampling_session(request.path_params["sampler_id"])
        more = {"base_model": sampler.base_model, "model_path": sampler.model_path}
        return JSONResponse({"sampler_id": sampler.id, **more})

    # ----------------------------------------------------------------------- saved states

    def _info_of(self, path: str) -> Answer:
        return self.service.states.model(self.service.states.open(path).model_id)

    async def _runs(self, request: Request) -> Response:
        return _page(request, "training_runs", self.service.states.runs())

    async def _run(self, request: Request) -> Response:
        return JSONResponse(self.service.states.run(request.path_params["model_id"]))

    async def _checkpoints(self, request: Request) -> Response:
        states = self.service.states
        rows = [saved.row() for run in states.runs() for saved in states.of(run["training_run_id"])]
        return _page(request, "checkpoints", sorted(rows, key=lambda row: row["time"], reverse=True))

    async def _states(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        self.service.states.model(model_id)
        return JSONResponse({"checkpoints": [saved.row() for saved in self.service.states.of(model_id)]})

    def _state(self, request: Request) -> SavedState:
        parts = (request.path_params[name] for name in ("model_id", "kind", "name"))
        return self.service.states.open("/".join(parts))

    async def _delete(self, request: Request) -> Response:
        self.service.states.delete(self._state(request))
        return JSONResponse(None)

    async def _links(self, request: Request) -> Response:
        """A link to each file of the state's peft directory."""
        self._state(request)
        base, expires = request.url.replace(query=""), int(time.time()) + _LINK_S
        paths = {file: base.path.removesuffix("external_weights_urls") + f"files/{file}" for file in _FILES}
        queries = {file: f"expires={expires}&key={self._signed(path, f'{expires}')}" for file, path in paths.items()}
        urls = {file: str(base.replace(path=path, query=queries[file])) for file, path in paths.items()}
        return JSONResponse({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})

    async def _file(self, request: Request) -> Response:
        file, query = request.path_params["file"], request.query_params
        expires, key = query.get("expires", ""), query.get("key", "")
        is_signed = hmac.compare_digest(key.encode(), self._signed(request.url.path, expires).encode())
        if file not in _FILES or not is_signed or int(expires) < time.time():
            raise RequestError(403, f"the file {file[:60]!r}", "the link is wrong, or too old", "ask for new links")
        return FileResponse(adapter_in(self._state(request).directory) / file)

    def _signed(self, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{path} {expires}".encode(), hashlib.sha256).hexdigest()


def _page(request: Request, name: str, rows: Sequence[Mapping[str, Any]]) -> Response:
    """The part of a list that the query asks for."""
    page = read_form(verbs.PageOf, dict(request.query_params))
    cursor = {**page.model_dump(), "total_count": len(rows)}
    return JSONResponse({name: rows[page.offset : page.offset + page.limit], "cursor": cursor})
