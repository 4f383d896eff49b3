"""The verbs of the Tinker SDK over HTTP, without the SDK: `make test-tinker` has the SDK itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import configured, problems_of
from failing import refused
from tinker_client import Client, again, datum, gathered, loss_message, opened, served, stage_in, supervised, tensor

import trivium.runtime.adapter_service as adapter_service_module
import trivium.serving.tinker.futures as futures_module
from trivium.config.saved import as_yaml
from trivium.foundation.errors import DataError
from trivium.inspection.viewer.group_list import Query
from trivium.inspection.viewer.watched_run import WatchedRun
from trivium.models.backbone.load import load_lm
from trivium.runtime.adapter_service import ServiceLog, adapters_of
from trivium.serving.tinker.saved_states import SavedStates
from trivium.serving.tinker.service import TinkerService
from trivium.serving.tinker.verbs import Lora
from trivium.serving.tinker.wire import read_message, write_message
from trivium.types import Completion, StopReason

TOKENS = [1, 2, 10, 3, 4, 11, 4, 6]
SAMPLE = {
    1: ("sequences", [{1: ("stop", "int"), 2: ("tokens", "bytes"), 3: ("log_probs", "bytes")}]),
    2: ("prompt", "bytes"),
}
ARRAY = {1: ("data", "bytes"), 4: ("trailing", "int")}
OUTPUT: Any = {
    2: ("records", [{2: ("fields", [{2: ("value", ARRAY)}])}]),
    3: ("metrics", [{1: ("key", "text"), 2: ("value", "double")}]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinkerService:
    return opened(tmp_path_factory.mktemp("tinker"))


def loss_of(raw: bytes) -> float:
    return read_message(memoryview(raw), OUTPUT)["metrics"][0]["value"]


def log_probs_of(raw: bytes) -> list[np.ndarray]:
    records = read_message(memoryview(raw), OUTPUT)["records"]
    return [np.frombuffer(each["fields"][0]["value"]["data"], "<f4") for each in records]


def tokens_of(raw: bytes) -> list[list[int]]:
    return [
        np.frombuffer(each["tokens"], "<i4").tolist() for each in read_message(memoryview(raw), SAMPLE)["sequences"]
    ]


async def trained(client: Client, number: int = 0, steps: int = 3) -> tuple[str, list[float]]:
    """A model after some steps, and the losses of the steps."""
    model, losses = await client.model(number, seed=number), list[float]()
    for _ in range(steps):
        losses.append(loss_of(await client.loss(model, [supervised(TOKENS), supervised(TOKENS[2:])])))
        await client.step(model)
    return model, losses


async def test_a_model_trains_and_its_sampler_agrees_with_it(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        model, losses = await trained(client)
        assert losses[2] < losses[1] < losses[0]
        own = log_probs_of(await client.loss(model, [supervised(TOKENS)], only=True))[0]
        sampler = (await client.save(model, None, "save_weights_for_sampler"))["sampling_session_id"]
        raw = await client.sample(sampler, TOKENS, 3, prompt_logprobs=True)
        prompt = np.frombuffer(read_message(memoryview(raw), SAMPLE)["prompt"], "<f4")
        assert np.isnan(prompt[0])
        assert np.allclose(prompt[1:], own, atol=5e-6)
        of_base = await client.sample(await client.sampler(), TOKENS, 3, prompt_logprobs=True)
        assert not np.allclose(
            np.frombuffer(read_message(memoryview(of_base), SAMPLE)["prompt"], "<f4")[1:], own, atol=1e-2
        )


async def test_gradients_accumulate_until_a_step(models: TinkerService, tmp_path: Path) -> None:
    """Two calls and one step are one call with both data. Without data, a step changes nothing."""
    async with served(again(models, tmp_path)) as client:
        first, second = await client.model(0, seed=5), await client.model(1, seed=5)
        client.numbers = iter(range(1, 100))
        for each in (TOKENS, TOKENS[3:]):
            await client.loss(first, [supervised(each)])
        await client.step(first)
        await client.step(first)
        one = log_probs_of(await client.loss(first, [supervised(TOKENS)], only=True))
        client.numbers = iter(range(1, 100))
        await client.loss(second, [supervised(TOKENS), supervised(TOKENS[3:])])
        await client.step(second)
        other = log_probs_of(await client.loss(second, [supervised(TOKENS)], only=True))
        assert np.allclose(one, other, atol=1e-6)


async def test_saved_states_outlive_the_service_and_promises_do_not(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        model, _ = await trained(client)
        path = (await client.save(model, "state"))["path"]
        expected = [loss_of(await client.loss(model, [supervised(TOKENS)])), await client.step(model)]
        expected.append(log_probs_of(await client.loss(model, [supervised(TOKENS)], only=True)))
        lost = (
            await client.post("forward_backward", loss_message(model, next(client.numbers), [supervised(TOKENS)]))
        ).json()
    async with served(again(models, tmp_path)) as client:
        response = await client.post("retrieve_future", lost)
        assert (response.status_code, response.json()["error"]["code"]) == (410, "unknown_request")
        response = await client.post("optim_step", {"model_id": model, "seq_id": 9, "adam_params": {}})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unloaded_model")
        client.session = (await client.ask("create_session"))["session_id"]
        body = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
        loaded = (await client.ask("load_weights", body))["model_id"]
        client.numbers = iter(range(1, 100))
        found = [loss_of(await client.loss(loaded, [supervised(TOKENS)])), await client.step(loaded)]
        found.append(log_probs_of(await client.loss(loaded, [supervised(TOKENS)], only=True)))
        assert found[0] == expected[0]
        assert np.array_equal(found[2], expected[2])  # the moments of the optimizer were saved
        await client.ask("load_weights", {"model_id": loaded, "seq_id": 4, "path": path, "optimizer": False})
        client.numbers = iter(range(5, 100))
        await client.loss(loaded, [supervised(TOKENS)])
        await client.step(loaded)
        assert not np.array_equal(log_probs_of(await client.loss(loaded, [supervised(TOKENS)], only=True)), expected[2])
        rows = (await client.http.get(f"/api/v1/training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert [row["tinker_path"] for row in rows] == [path]
        info = await client.ask("weights_info", {"tinker_path": path})
        assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("tiny", 4, False)
        links = (
            await client.http.get(f"/api/v1/training_runs/{model}/checkpoints/weights/state/external_weights_urls")
        ).json()
        assert {*links["urls"]} == {"adapter_config.json", "adapter_model.safetensors"}
        assert json.loads((await client.http.get(links["urls"]["adapter_config.json"])).content)["r"] == 4
        assert (await client.http.get(links["urls"]["adapter_config.json"] + "0")).status_code == 403
        await client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/state")
        assert (await client.post("weights_info", {"tinker_path": path})).status_code == 404


def test_steps_and_samples_are_a_run_with_a_curve_for_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, prompt = stage_in(tmp_path), np.array(TOKENS, np.int32)
    completion = Completion(prompt[:3], np.zeros(3, np.float32), np.zeros(3, np.int32), StopReason.EOS)
    long = Completion(*(np.ones(1000, dtype) for dtype in (np.int32, np.float32, np.int32)), StopReason.EOS)
    first, second = (f"{letter * 32}:train:{number}" for number, letter in enumerate("ab"))
    for losses in ([1.0, 2.0], [4.0]):  # a service, and the next one in the same directory
        log = ServiceLog(stage)
        for loss in losses:
            log.metrics(first, {"loss": loss})
        log.sample(first, prompt, [completion, completion])
        log.metrics(second, {"train/grad_norm/policy": 3.0})
        log.metrics(first, {"train/grad_norm/policy": 2.0})
        for _ in range(40):
            log.sample(None, prompt[1:], [long] * 20)
        log.monitor.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("train/loss/aaaaaaaa-0") for row in rows] == [None, 3.0, None, 4.0]
    assert [row.get("train/grad_norm/bbbbbbbb-1") for row in rows] == [3.0, None, 3.0, None]
    (tmp_path / "config.yaml").write_text(as_yaml(stage.config.model_dump(mode="json")))
    run = WatchedRun(tmp_path, "served")
    assert run.run.groups.steps() == [1, 3, 5]
    [row] = run.groups.page(1, Query())["rows"]
    assert (row["taskset"], row["size"]) == ("aaaaaaaa-0", 2)
    found = run.rollouts(1, {key: row[key] for key in ("stage", "slot", "attempt")}, 0, 2)
    assert "".join(found[0]["sequences"][0]["text"]) == stage.renderer.decode([*TOKENS, *TOKENS[:3]])
    # The samples after the second step of the first service: 32 requests of 8,192 tokens each.
    rows = run.groups.page(3, Query())["rows"]
    assert [row["taskset"] for row in rows] == ["base"] * 32
    assert {row["size"] for row in rows} == {2**13 // (len(prompt) - 1 + 1000)}
    about = run.about()
    assert next(chart["keys"] for chart in about["charts"] if chart["title"] == "Loss") == [
        "train/loss/aaaaaaaa-0",
        "train/loss/bbbbbbbb-1",
    ]
    monkeypatch.setattr(adapter_service_module, "_STEPS", 4)  # of which samples are kept
    log = ServiceLog(stage)
    log.metrics(first, {"train/grad_norm/policy": 2.0})
    log.monitor.close()
    assert run.run.groups.steps() == [3, 5]


def test_a_state_that_was_being_replaced_is_there_after_a_kill(tmp_path: Path) -> None:
    model = "0" * 32 + ":train:0"
    states = SavedStates(tmp_path)
    states.describe(model, {})
    place = states.place(model, "weights", "a", overwrite=False)
    states.save(place, lambda directory: (directory / "x").write_text("old"), None)

    def killed(directory: Path) -> None:
        (directory / "x").write_text("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        states.save(place, killed, None)
    assert [each.name for each in SavedStates(tmp_path).of(model)] == ["a"]
    place.directory.rename(place.directory.with_name(".a.replaced"))  # killed between the two renames
    again_opened = SavedStates(tmp_path)
    assert (again_opened.open(place.path).directory / "x").read_text() == "old"
    assert not [*tmp_path.glob("*/*/.*")]


async def test_requests_of_a_model_are_done_in_the_order_of_their_numbers(
    models: TinkerService, tmp_path: Path
) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model(0, seed=1)
        step = {"model_id": model, "adam_params": {"learning_rate": 1e-2}}
        sent = [
            await client.post("optim_step", {**step, "seq_id": 4}),
            await client.post("forward_backward", loss_message(model, 3, [supervised(TOKENS[2:])])),
            await client.post("optim_step", {**step, "seq_id": 2}),
            await client.post("forward_backward", loss_message(model, 1, [supervised(TOKENS)])),
        ]
        repeated = await client.post("forward_backward", loss_message(model, 1, [supervised(TOKENS)]))
        assert repeated.json() == sent[3].json()
        results = await gathered(*(client.result(each.json()["request_id"]) for each in sent))
        assert [each["metrics"]["step:max"] for each in (results[2], results[0])] == [1, 2]
        client.session = ""
        other = await client.model(0, seed=1)
        client.numbers = iter(range(1, 100))
        losses = []
        for each in (TOKENS, TOKENS[2:]):
            losses.append(await client.loss(other, [supervised(each)]))
            await client.step(other)
        assert losses == [results[3], results[1]]
        late = await client.post("optim_step", {**step, "seq_id": 2})  # known: the same result
        assert late.json() == sent[2].json()


async def test_a_request_that_never_arrives_fails_the_next_one(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_module, "_GAP_S", 0.05)
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        client.numbers = iter((2, 3))
        failed = await client.step(model)
        assert failed["category"] == "user"
        assert "request 1" in failed["error"]
        assert (await client.step(model))["metrics"]["step:max"] == 1


async def test_a_refused_request_does_not_hold_up_the_next_one(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        refused = await client.post("forward_backward", loss_message(model, 1, [supervised(TOKENS)], "hinge"))
        assert refused.status_code == 400
        client.numbers = iter((2, 3, 4))
        assert "lacks data" in (await client.step(model))["error"]
        assert (await client.step(model))["metrics"]["step:max"] == 1
        failed = await client.loss(model, [supervised([5] * 60)])
        assert failed["category"] == "user"  # longer than the context


async def test_two_clients_at_once_are_as_one_after_the_other(models: TinkerService, tmp_path: Path) -> None:
    async def script(client: Client) -> list[Any]:
        model, losses = await trained(client, steps=2)
        sampler = (await client.save(model, None, "save_weights_for_sampler"))["sampling_session_id"]
        sampled = await gathered(client.sample(sampler, TOKENS, 2), client.sample(await client.sampler(), TOKENS, 2))
        return [losses, *map(tokens_of, sampled)]

    async with served(again(models, tmp_path / "alone")) as client:
        alone = await script(client)
    async with served(again(models, tmp_path / "both")) as client:
        both = await gathered(*(script(Client(client.http)) for _ in range(2)))
    assert both == [alone, alone]


async def test_limits_are_errors_that_lose_nothing(
    models: TinkerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_module, "_MAX_PENDING", 4)
    async with served(again(models, tmp_path, max_models=1)) as client:
        model = await client.model()
        response = await client.post(
            "create_model",
            {"session_id": client.session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1}},
        )
        assert response.json()["error"]["code"] == "too_many_models"
        await client.loss(model, [supervised(TOKENS)])
        too_large = await client.post("forward_backward", b"\0" * 300_000)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
        numbers = [next(client.numbers) for _ in range(4)]
        step = {"model_id": model, "adam_params": {}}
        sent = [await client.post("optim_step", {**step, "seq_id": number}) for number in numbers]
        over = await client.post("optim_step", {**step, "seq_id": 6})
        assert (over.status_code, "retry-after" in over.headers) == (429, True)
        for each in sent:
            assert "metrics" in await client.result(each.json()["request_id"])
        assert (await client.ask("optim_step", {**step, "seq_id": 6}))["metrics"]["step:max"] == 5
        assert (await client.http.post(f"/api/v1/sessions/{client.session}/finish", json={})).status_code == 200
        assert (await client.post("session_heartbeat", {"session_id": client.session})).status_code == 410


async def test_models_and_their_states_are_listed_newest_first(models: TinkerService, tmp_path: Path) -> None:
    """With the names of the SDK. What it asks for and the service does not have is refused by a sentence."""
    async with served(again(models, tmp_path)) as client:
        first, second = await client.model(0), await client.model(1, rank=2)
        path = (await client.save(first, "a"))["path"]
        client.numbers = iter(range(1, 9))
        sampler = (await client.save(second, "b", "save_weights_for_sampler"))["path"]
        runs = (await client.http.get("/api/v1/training_runs?limit=10&offset=0")).json()
        assert [run["training_run_id"] for run in runs["training_runs"]] == [second, first]
        run = (await client.http.get(f"/api/v1/training_runs/{second}")).json()
        assert run == runs["training_runs"][0]
        assert (run["base_model"], run["is_lora"], run["lora_rank"], run["last_checkpoint"]) == ("tiny", True, 2, None)
        assert run["last_sampler_checkpoint"]["tinker_path"] == sampler
        page = (await client.http.get("/api/v1/checkpoints?limit=1&offset=1")).json()
        assert [row["tinker_path"] for row in page["checkpoints"]] == [path]
        assert page["cursor"] == {"limit": 1, "offset": 1, "total_count": 2}
        for url in (f"training_runs/{'0' * 32}:train:0", f"training_runs/{first}/checkpoints/weights/a/publish"):
            refused = await client.http.get(f"/api/v1/{url}")
            assert (refused.status_code, "found: " in refused.json()["error"]["message"]) == (404, True)
        assert (await client.http.get("/api/v1/checkpoints?limit=x")).status_code == 400


async def test_samples_repeat_stop_and_can_be_cancelled(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        await client.model()
        sampler = await client.sampler()
        first, second = [tokens_of(await client.sample(sampler, TOKENS, 4, params={"seed": 7})) for _ in range(2)]
        assert first == second
        assert len({*map(tuple, first)}) > 1
        every = await client.sample(sampler, TOKENS, 4, params={"seed": 7, "stop": []})
        assert all(len(each) == 6 for each in tokens_of(every))
        stop = next(each for each in tokens_of(every) if len({*each}) > 1)[1]
        for tokens in tokens_of(await client.sample(sampler, TOKENS, 4, params={"seed": 7, "stop": [stop]})):
            assert stop not in tokens[:-1]
        texts = await client.sample(sampler, TOKENS, 4, params={"seed": 7, "stop": ["1"]})
        assert tokens_of(texts) != first or all(1 not in each for each in first)
        sent = (
            await client.post(
                "asample",
                {
                    "sampling_session_id": sampler,
                    "seq_id": 99,
                    "sampling_params": {"max_tokens": 9},
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
                },
            )
        ).json()
        assert len(sent["sample_sequence_ids"]) == 1
        await client.ask("cancel_future", {"request_id": sent["request_id"]})
        await client.result(sent["request_id"])
        body = {"target": {"sampling_session_id": sampler}, "prev_cursor": 0, "timeout": 0}
        done = await client.ask("retrieve_futures", body)
        assert (len(done["completions"]), done["cursor"]) == (6, 6)


async def test_the_key_is_required_but_for_links(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path), "tml-secret") as client:
        assert (await client.post("create_session")).status_code == 401
        client.http.headers["X-API-Key"] = "tml-secret"
        model = await client.model()
        await client.save(model, "a", "save_weights_external")
        at = f"/api/v1/training_runs/{model}/checkpoints/external_weights/a/external_weights_urls"
        url = (await client.http.get(at)).json()["urls"]["adapter_model.safetensors"]
        del client.http.headers["X-API-Key"]
        assert (await client.http.get(url)).status_code == 200
        assert (await client.http.get(at)).status_code == 401


def test_a_config_of_the_service() -> None:
    served = {"run": {"mode": "tinker"}, "tasks": {"train": {"kind": "served"}}, "rewards": []}
    assert configured(None, **served).run.mode == "tinker"
    problems = problems_of(
        configured, **served, engine={"kind": "scripted", "replies": ["1"]}, serve={"host": "0.0.0.0"}
    )
    assert {*problems} == {"engine.kind", "serve.key_variable"}
    train = {"frozen_dtype": "nf4", "lora": {"push": "merged"}}
    assert {*problems_of(configured, **served, train=train)} == {"train.frozen_dtype", "train.lora.push"}


def test_an_adapter_that_the_engine_cannot_sample_with_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    adapters = adapters_of(stage_in(tmp_path, engine={"kind": "vllm", "device": "cpu", "adapter_rank": 2}))
    adapters.new(Lora(rank=2), 0).close()
    with refused(DataError, "rank 3", "engine.kind vllm", "rank 2", "engine.adapter_rank"):
        adapters.new(Lora(rank=3), 0)


async def test_a_base_that_was_saved_in_bfloat16_may_stay_in_it(tmp_path: Path) -> None:
    directory = stage_in(tmp_path).model_dir
    load_lm(directory, dtype=torch.bfloat16).save_pretrained(directory)
    model = {"kind": "hf", "path": str(directory)}
    async with served(opened(tmp_path, model=model, train={"frozen_dtype": "bfloat16"})) as client:
        trained_model, losses = await trained(client)
        assert losses[2] < losses[0]
        own = log_probs_of(await client.loss(trained_model, [supervised(TOKENS)], only=True))[0]
        sampler = (await client.save(trained_model, None, "save_weights_for_sampler"))["sampling_session_id"]
        raw = await client.sample(sampler, TOKENS, prompt_logprobs=True)
        prompt = np.frombuffer(read_message(memoryview(raw), SAMPLE)["prompt"], "<f4")
        assert np.allclose(prompt[1:], own, atol=0.05)


# --------------------------------------------------------------------------- hostile requests

WRONG: list[Any] = [
    None, True, -1, 2**70, 1.5, 1e308, "", "x" * 5000, "tinker://../../etc/passwd", "..", "a/b", "\0", [], [[]], [None],
    {}, {"a": {}}, [1] * 50, "\ud800",
]  # fmt: skip


def mutated(body: dict[str, Any], rng: random.Random) -> Any:
    """The body with one value replaced, removed or nested."""
    path, here = [], body
    while isinstance(here, dict | list) and here and (not path or rng.random() < 0.7):
        path.append(rng.choice([*here]) if isinstance(here, dict) else rng.randrange(len(here)))
        here = here[path[-1]]
    changed = json.loads(json.dumps(body))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if rng.random() < 0.2 and isinstance(inner, dict):
        del inner[path[-1]]
    else:
        inner[path[-1]] = rng.choice(WRONG)
    return changed


async def test_300_malformed_requests_get_sentences_and_no_traceback(
    models: TinkerService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(47)
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        sampler = await client.sampler()
        of_session = {"session_id": client.session, "base_model": "tiny"}
        params = {"max_tokens": 1, "temperature": 1.0, "top_p": 0.5, "top_k": 3, "stop": ["a"], "seed": 1}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
        asample = {"sampling_session_id": sampler, "num_samples": 1, "prompt_logprobs_last_n": 2, "prompt": prompt}
        target = {"sampling_session_id": sampler}
        bodies: dict[str, Any] = {
            "create_model": {**of_session, "model_seq_id": 7, "lora_config": {"rank": 2}},
            "optim_step": {"model_id": model, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9}},
            "save_weights": {"model_id": model, "path": "a", "ttl_seconds": 5000},
            "load_weights": {"model_id": model, "path": f"tinker://{model}/weights/none", "optimizer": True},
            "create_sampling_session": {**of_session, "sampling_session_seq_id": 1},
            "asample": {**asample, "sampling_params": params},
            "retrieve_futures": {"target": target, "timeout": 0, "retrieved_request_ids": ["a"]},
            "weights_info": {"tinker_path": "tinker://x/weights/y"},
            "get_info": {"model_id": model},
        }
        good = loss_message(model, 0, [datum(TOKENS, target_tokens=np.array(TOKENS), weights=np.ones(8, np.float32))])
        statuses: list[int] = []
        for number in range(340):
            kind = number % 4
            if kind == 0:  # bytes of forward_backward, changed or cut
                raw = bytearray(good)
                for _ in range(rng.randrange(1, 5)):
                    raw[rng.randrange(len(raw))] = rng.randrange(256)
                path, sent = "forward_backward", bytes(raw[: rng.randrange(1, len(raw))] if rng.random() < 0.5 else raw)
            elif kind == 1:  # no JSON, or JSON that is no object
                path = rng.choice([*bodies])
                sent = rng.choice(
                    [
                        b"",
                        b"{",
                        b"[]",
                        b"nul",
                        b'{"a": NaN}',
                        b"[" * 90000,
                        b'{"a":' * 300 + b"1" + b"}" * 300,
                        rng.randbytes(40),
                    ]
                )
            else:
                path = rng.choice([*bodies])
                sent = json.dumps(mutated(bodies[path], rng)).encode()
            response = await client.post(path, sent)
            statuses.append(response.status_code)
            if response.status_code != 200:
                assert 400 <= response.status_code < 500, (path, sent, response.text)
                text = response.json()["error"]["message"]
                assert all(part in text for part in ("asked: ", "found: ", "do: "))
                assert "Traceback" not in text
        assert sum(status != 200 for status in statuses) >= 230
        wrong_tensors = [
            write_message((1, b"\0\0\0"), (3, 1)),
            write_message((1, b""), (3, 9)),
            tensor(np.zeros((2, 3), np.float32)),
            tensor(np.full(8, np.nan, np.float32)),
            write_message((2, write_message((1, b""), (2, b"\xff" * 72), (3, b""))), (3, 1), (4, b"\x08\x02")),
            write_message((3, 1), (4, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x01")),
        ]
        for wrong in wrong_tensors:
            entry = write_message((2, write_message((1, "weights"), (2, wrong))))
            response = await client.post(
                "forward_backward", loss_message(model, 0, [datum(TOKENS, target_tokens=np.array(TOKENS)) + entry])
            )
            assert response.status_code == 400, response.text
        for token in (-1, 10**6):
            bad = datum([token, 1], target_tokens=np.array([1, 1]))
            assert (await client.post("forward_backward", loss_message(model, 0, [bad]))).status_code == 400
        assert await client.sample(sampler, TOKENS)  # the service goes on
        assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
