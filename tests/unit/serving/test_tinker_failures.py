"""What the service does after errors, with clients that leave and with requests that it refuses."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from failing import refused
from tinker_client import BODY_BYTES, NAME, Client, again, loss_message, opened, served, stage_in, supervised
from waiting import until

import trivium.serving.tinker.futures as futures_module
import trivium.serving.tinker.routes as routes_module
import trivium.serving.tinker.service as service_module
from trivium.foundation.errors import DataError
from trivium.runtime.adapter_service import ServiceLog
from trivium.serving.tinker.service import TinkerService

TOKENS = [1, 2, 10, 3, 4, 11, 4, 6]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinkerService:
    return opened(tmp_path_factory.mktemp("tinker"))


async def sent(client: Client, sampler: str, number: int) -> str:
    """The id of a sample that is not fetched."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    body = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": {"max_tokens": 3}, "prompt": prompt}
    response = await client.post("asample", body)
    assert response.status_code == 200, response.text
    return response.json()["request_id"]


async def another(client: Client) -> Client:
    return Client(client.http, (await client.ask("create_session"))["session_id"])


def model_form(client: Client, number: int) -> dict[str, Any]:
    return {"session_id": client.session, "model_seq_id": number, "base_model": NAME, "lora_config": {"rank": 4}}


# --------------------------------------------------------------------------- clients that leave


async def test_results_that_one_client_does_not_fetch_hold_up_no_other(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_module, "_MAX_PENDING", 4)
    service = again(models, tmp_path)
    async with served(service) as client:
        await client.model()
        sampler = await client.sampler()
        for number in range(6):  # cancelled ones do not count
            await client.ask("cancel_future", {"request_id": await sent(client, sampler, 100 + number)})
        ids = [await sent(client, sampler, number) for number in range(4)]
        assert (await client.post("create_model", model_form(client, 1))).status_code == 429
        other = await another(client)
        assert await other.model()
        await client.http.post(f"/api/v1/sessions/{client.session}/finish")
        for id in ids:  # forgotten with their session
            assert (await client.post("retrieve_future", {"request_id": id})).status_code == 410


async def test_a_finished_session_ends_its_queued_work(models: TinkerService, tmp_path: Path) -> None:
    service = again(models, tmp_path)
    async with served(service) as client:
        model = await client.model()
        waiting = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
        future = service.futures.find(waiting.json()["request_id"])
        assert future is not None
        await client.http.post(f"/api/v1/sessions/{client.session}/finish")
        assert future.failed
        assert (await client.post("retrieve_future", waiting.json())).status_code == 410
        await until(lambda: not service._tasks)  # nothing waits for request 1


@pytest.mark.parametrize("limit", ["_MAX_BYTES", "_MAX_BYTES_OF_ALL"])
async def test_pending_requests_and_results_have_a_limit_in_bytes(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Of a client, and of all clients together: then those that have left make room. Nothing is lost."""
    monkeypatch.setattr(futures_module, limit, 600)
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        data = [supervised(TOKENS)] * 3
        for number in (2, 3):  # they wait for the first one
            response = await client.post("forward_backward", loss_message(model, number, data))
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_requests")
        assert "600 bytes" in response.json()["error"]["message"]
        other = await another(client)
        its = await other.model()
        of_other = await other.post("forward_backward", loss_message(its, 1, data))
        assert (of_other.status_code == 200) == (limit == "_MAX_BYTES")
        first = await client.post("forward_backward", loss_message(model, 1, [supervised(TOKENS)]))
        assert first.status_code == 200
        assert isinstance(await client.result(first.json()["request_id"]), bytes)
        await client.http.post(f"/api/v1/sessions/{client.session}/finish")
        if limit == "_MAX_BYTES_OF_ALL":
            assert isinstance(await other.ask("forward_backward", loss_message(its, 1, data)), bytes)


async def test_clients_that_have_left_make_room_for_the_requests_of_others(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_module, "_MAX_BYTES_OF_ALL", 600)
    service = again(models, tmp_path)
    async with served(service) as client:
        model = await client.model()
        await client.post("forward_backward", loss_message(model, 2, [supervised(TOKENS)] * 3))
        other = await another(client)
        message = loss_message(await other.model(), 1, [supervised(TOKENS)] * 3)
        assert (await other.post("forward_backward", message)).status_code == 429
        service._sessions[client.session] = -1e9  # without a heartbeat for long
        assert isinstance(await other.ask("forward_backward", message), bytes)


async def test_a_silent_client_gives_its_place_to_another_one(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(again(models, tmp_path, max_models=1)) as client:
        await client.model()
        other = await another(client)
        assert (await other.post("create_model", model_form(other, 0))).status_code == 400
        monkeypatch.setattr(service_module, "_SILENT_S", 0.0)
        assert await other.model()
        assert (await client.post("session_heartbeat", {"session_id": client.session})).status_code == 410


async def test_idle_sessions_are_dropped_without_a_new_one(models: TinkerService, tmp_path: Path) -> None:
    service = again(models, tmp_path, idle_s=0.05)
    async with served(service) as client:
        await client.ask("create_session")
        await until(lambda: not service._sessions)


# --------------------------------------------------------------------------- refused requests


async def in_parts(body: bytes) -> AsyncGenerator[bytes]:
    for at in range(0, len(body), 65536):
        yield body[at : at + 65536]


async def test_a_refused_request_takes_its_turn(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_module, "_GAP_S", 1e9)
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        save = {"model_id": model, "seq_id": 1, "kind": "inflight", "sampling_session_seq_id": 0}
        step: dict[str, Any] = {"model_id": model, "seq_id": 2, "optimizer_params": {"type": "dimuon"}}
        bad_name = {"model_id": model, "seq_id": 3, "path": "a\0"}
        requests = ("save_weights_for_sampler", save), ("optim_step", step), ("save_weights", bad_name)
        for path, body in requests:
            assert (await client.post(path, body)).status_code == 400
        large = loss_message(model, 4, [supervised(TOKENS)]) + b"\0" * BODY_BYTES
        response = await client.http.post("/api/v1/forward_backward", content=in_parts(large))
        assert response.status_code == 413
        damaged = loss_message(model, 5, [b"\xff"])
        assert (await client.post("forward_backward", damaged)).status_code == 400
        client.numbers = count(6)
        assert isinstance(await client.loss(model, [supervised(TOKENS)]), bytes)
        assert "lacks data" in (await client.step(model))["error"]


async def test_a_step_fails_once_if_its_gradient_lacks_data(models: TinkerService, tmp_path: Path) -> None:
    """A request fails between two that succeed; the step that was sent with them does not step on these two."""
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        before = await client.loss(model, [supervised(TOKENS)], only=True)
        assert isinstance(await client.loss(model, [supervised(TOKENS)]), bytes)
        assert "error" in await client.loss(model, [supervised([5] * 60)])  # longer than the context
        assert isinstance(await client.loss(model, [supervised(TOKENS)]), bytes)
        failed = await client.step(model)
        assert (failed["category"], "lacks data" in failed["error"]) == ("user", True)
        assert "error" in await client.loss(model, [supervised([5] * 60)], only=True)  # nothing is lost with it
        assert (await client.step(model))["metrics"] == {"grad_norm:mean": 0.0, "step:max": 1.0}
        assert await client.loss(model, [supervised(TOKENS)], only=True) == before


async def test_the_number_of_another_verb_is_refused(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        first = await client.post("forward_backward", loss_message(model, 1, [supervised(TOKENS)]))
        response = await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "seq_id")
        assert isinstance(await client.result(first.json()["request_id"]), bytes)


async def test_a_late_repetition_of_create_model_replaces_nothing(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_module, "_FETCHED", 1)
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        await client.loss(model, [supervised(TOKENS)])
        await client.step(model)
        trained = await client.loss(model, [supervised(TOKENS)], only=True)
        response = await client.post("create_model", model_form(client, 0))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model_seq_id")
        assert await client.loss(model, [supervised(TOKENS)], only=True) == trained


# --------------------------------------------------------------------------- saved states


async def test_a_model_from_a_state_has_the_metadata_of_both_and_the_base_model(
    models: TinkerService, tmp_path: Path
) -> None:
    async with served(again(models, tmp_path)) as client:
        client.session = (await client.ask("create_session"))["session_id"]
        first = {**model_form(client, 0), "user_metadata": {"a": "1", "b": "1"}}
        model = (await client.ask("create_model", first))["model_id"]
        path = (await client.save(model, "x"))["path"]
        load = {"session_id": client.session, "model_seq_id": 1, "path": path, "user_metadata": {"b": "2"}}
        loaded = (await client.ask("load_weights", load))["model_id"]
        info = await client.ask("weights_info", {"tinker_path": (await client.save(loaded, "y", seq_id=1))["path"]})
        assert info["user_metadata"] == {"a": "1", "b": "2"}
        other = {**load, "model_seq_id": 2, "base_model": "other/model"}
        response = await client.post("load_weights", other)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "base_model")


async def test_most_probable_tokens_are_at_most_the_vocabulary(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        await client.model()
        sampler = await client.sampler()
        every = models.adapters.vocabulary
        most = await client.sample(sampler, TOKENS, topk_prompt_logprobs=256, params={"seed": 1})
        assert most == await client.sample(sampler, TOKENS, topk_prompt_logprobs=every, params={"seed": 1})


async def test_a_missing_file_of_an_adapter_is_named_without_its_place(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        saved = (await client.save(model, "x", "save_weights_for_sampler"))["path"]
        for file in tmp_path.rglob("adapter_model.safetensors"):
            file.unlink()
        failed = await client.sample(await client.sampler(saved), TOKENS)
        assert failed["category"] == "user"
        assert "adapter_model.safetensors" in failed["error"]
        assert str(tmp_path) not in failed["error"]
        with refused(DataError, "adapter_model.safetensors"):
            models.adapters.saved(next(tmp_path.rglob("adapter_config.json")).parent, optimizer=False)


async def test_the_time_of_a_link_is_signed(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        await client.save(model, "a", "save_weights_external")
        at = f"/api/v1/training_runs/{model}/checkpoints/external_weights/a/external_weights_urls"

        async def link() -> httpx.URL:
            return httpx.URL((await client.http.get(at)).json()["urls"]["adapter_config.json"])

        assert (await client.http.get(await link())).status_code == 200
        monkeypatch.setattr(routes_module, "_LINK_S", -1)
        past = await link()
        assert (await client.http.get(past)).status_code == 403
        later = past.copy_set_param("expires", str(int(time.time()) + 1000))
        assert (await client.http.get(later)).status_code == 403
        # Without a key of the service, no client knows what signs a link.
        key = hmac.new(b"None", f"{past.path} soon".encode(), hashlib.sha256).hexdigest()
        forged = past.copy_merge_params({"expires": "soon", "key": key})
        assert (await client.http.get(forged)).status_code == 403


# --------------------------------------------------------------------------- the log of steps


def test_losses_without_a_step_are_in_no_row(tmp_path: Path) -> None:
    log = ServiceLog(stage_in(tmp_path))
    log.metrics(f"{0:032}:train:0", {"loss": 1.0})
    log.metrics(f"{0:032}:train:0", {})
    log.metrics(f"{0:032}:train:0", {"loss": 2.0})
    log.metrics(f"{0:032}:train:0", {"train/grad_norm/policy": 3.0})
    log.monitor.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss/00000000-0"] for row in rows] == [2.0]


async def test_a_failed_step_and_a_load_drop_the_logged_losses_and_a_broken_log_is_no_error(
    models: TinkerService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, records = again(models, tmp_path), list[Any]()
    service._record = lambda _, metrics: records.append({*metrics})
    async with served(service) as client:
        model = await client.model()
        path = (await client.save(model, "x"))["path"]
        await client.loss(model, [supervised(TOKENS)])
        await client.ask("load_weights", {"model_id": model, "seq_id": next(client.numbers), "path": path})
        assert "error" in await client.loss(model, [supervised([5] * 60)])
        assert "error" in await client.step(model)
        assert records == [{"loss"}, set(), set()]

        def broken(*_: Any) -> None:
            raise OSError("no space")

        service._record = broken
        assert np.isfinite((await client.step(model))["metrics"]["grad_norm:mean"])
    assert [record for record in caplog.records if record.levelname == "ERROR"]
