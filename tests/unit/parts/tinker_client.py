"""A client of the Tinker verbs without the SDK, and a service on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from configs import tiny_model

from trivium.config import build, config_from_mapping
from trivium.runtime.adapter_service import ServiceLog, open_service
from trivium.runtime.stage import Stage
from trivium.serving.tinker.routes import TinkerServer
from trivium.serving.tinker.saved_states import SavedStates
from trivium.serving.tinker.service import TinkerService
from trivium.serving.tinker.wire import write_message

NAME = "tiny"
BODY_BYTES = 200_000


def tensor(values: Any, dtype: int | None = None) -> bytes:
    """A dense tensor as the SDK writes it."""
    array = np.asarray(values)
    kind = (1 if array.dtype.kind == "f" else 2) if dtype is None else dtype
    packed = b"".join(write_message((0, size))[1:] for size in array.shape)
    return write_message((1, array.astype("<f4" if kind == 1 else "<i8").tobytes()), (3, kind), (4, packed))


def datum(tokens: Sequence[int], **inputs: Any) -> bytes:
    chunk = write_message((1, write_message((1, np.asarray(tokens, "<i4").tobytes()))))
    entries = (write_message((1, key), (2, tensor(values))) for key, values in inputs.items())
    return write_message((1, chunk), *((2, entry) for entry in entries))


def supervised(tokens: Sequence[int]) -> bytes:
    """A datum of the next tokens, with weight one each."""
    return datum(tokens[:-1], target_tokens=np.asarray(tokens[1:]), weights=np.ones(len(tokens) - 1, np.float32))


def loss_message(
    model: str, number: int, data: Sequence[bytes], loss: str = "cross_entropy", *, only: bool = False, **options: float
) -> bytes:
    entries = (write_message((1, key), (2, write_message((1, float(value))))) for key, value in options.items())
    head = ((1, model), (2, number), *((3, each) for each in data), (4, loss), (6, int(only)))
    return write_message(*head, *((7, entry) for entry in entries))


@dataclass
class Client:
    """What the SDK does, without its retries."""

    http: httpx.AsyncClient
    session: str = ""
    numbers: Any = field(default_factory=lambda: count(1))
    samples: Any = field(default_factory=count)

    async def post(self, path: str, body: Mapping[str, Any] | bytes = b"{}") -> httpx.Response:
        sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self.http.post(f"/api/v1/{path}", **sent)

    async def ask(self, path: str, body: Mapping[str, Any] | bytes = b"{}") -> Any:
        """The JSON answer of a request that must succeed; that of its future if it has one."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return await self.result(answer["request_id"]) if "request_id" in answer else answer

    async def result(self, id: str) -> Any:
        while (response := await self.post("retrieve_future", {"request_id": id})).status_code == 408:
            """The request is still pending."""
        assert response.status_code == 200, response.text
        return response.content if "protobuf" in response.headers["content-type"] else response.json()

    async def model(self, number: int = 0, rank: int = 4, **lora: Any) -> str:
        if not self.session:
            self.session = (await self.ask("create_session"))["session_id"]
        body = {"session_id": self.session, "model_seq_id": number, "base_model": NAME}
        return (await self.ask("create_model", {**body, "lora_config": {"rank": rank, **lora}}))["model_id"]

    async def loss(self, model: str, data: Sequence[bytes], loss: str = "cross_entropy", **more: Any) -> Any:
        return await self.ask("forward_backward", loss_message(model, next(self.numbers), data, loss, **more))

    async def step(self, model: str, **adam: Any) -> Any:
        body = {"model_id": model, "seq_id": next(self.numbers), "adam_params": {"learning_rate": 1e-2, **adam}}
        return await self.ask("optim_step", body)

    async def save(self, model: str, name: str | None, kind: str = "save_weights", **more: Any) -> Any:
        named = {"sampling_session_seq_id": 0} if name is None else {"path": name}
        return await self.ask(kind, {"model_id": model, "seq_id": next(self.numbers), **named, **more})

    async def sampler(self, path: str | None = None) -> str:
        source = {"base_model": NAME} if path is None else {"model_path": path}
        body = {"session_id": self.session, "sampling_session_seq_id": 0, **source}
        return (await self.ask("create_sampling_session", body))["sampling_session_id"]

    async def sample(self, sampler: str, prompt: Sequence[int], n: int = 1, **more: Any) -> Any:
        params = {"max_tokens": 6, **more.pop("params", {})}
        chunks = {"chunks": [{"type": "encoded_text", "tokens": [*prompt]}]}
        body = {"sampling_session_id": sampler, "seq_id": next(self.samples), "num_samples": n}
        return await self.ask("asample", {**body, "prompt": chunks, "sampling_params": params, **more})


def stage_in(directory: Path, **changes: Any) -> Stage:
    """The stage of a service. `changes` replace sections of its config."""
    sections: dict[str, Any] = {
        "run": {"dir": str(directory), "mode": "tinker"},
        "model": tiny_model(),
        "tasks": {"train": {"kind": "served"}},
        "serve": {"model": NAME, "max_models": 3},
        "cluster": {"threads": 1},
        **changes,
    }
    config = config_from_mapping(sections, None)
    model_dir = build("models", config.model, seed=0).materialize(directory / "model")
    return Stage(config, 0, 0, True, directory, model_dir)


def again(service: TinkerService, states: Path, **options: Any) -> TinkerService:
    """A service with nothing in memory, on the models of another one."""
    limits = service.limits.model_copy(update=options)
    return TinkerService(
        limits, service.names, service.model_dir, service.adapters, service.sampler, SavedStates(states)
    )


@asynccontextmanager
async def served(service: TinkerService, key: str | None = None) -> AsyncGenerator[Client]:
    app = TinkerServer(service, key, BODY_BYTES).app
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as http:
        yield Client(http)
        await service.futures.close()


def opened(directory: Path, **changes: Any) -> TinkerService:
    stage = stage_in(directory, **changes)
    return open_service(stage, ServiceLog(stage))


async def gathered(*awaitables: Any) -> list[Any]:
    return await asyncio.gather(*awaitables)
