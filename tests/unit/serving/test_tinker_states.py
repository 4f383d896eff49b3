"""Saved states of the Tinker service on disk, weights and most probable tokens of samplers, padding of targets."""

from __future__ import annotations

import logging
import random
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_counts import FULL
from tinker_client import Client, again, datum, opened, served, supervised

import trivium.serving.tinker.saved_states as saved_states_module
from tests.waiting import until
from trivium.foundation.atomic import commit
from trivium.serving.tinker.lora_models import adapter_in
from trivium.serving.tinker.saved_states import SNAPSHOT, SavedState, SavedStates
from trivium.serving.tinker.service import TinkerService
from trivium.serving.tinker.wire import read_message, write_message

TOKENS = [1, 2, 10, 3, 4, 11, 4, 6]
VOCABULARY = 19
"""Of the tiny model."""
MODEL = "0" * 32 + ":train:0"
TOP: Any = {1: ("ids", "bytes"), 2: ("log_probs", "bytes"), 3: ("k", "int")}
SAMPLE: Any = {
    1: ("sequences", [{2: ("tokens", "bytes"), 3: ("log_probs", "bytes"), 4: ("top", TOP)}]),
    2: ("prompt", "bytes"),
}
OUTPUT: Any = {3: ("metrics", [{1: ("key", "text"), 2: ("value", "double")}])}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinkerService:
    return opened(tmp_path_factory.mktemp("tinker"))


@pytest.fixture
def states(tmp_path: Path) -> SavedStates:
    states = SavedStates(tmp_path)
    states.describe(MODEL, {})
    return states


def saved(states: SavedStates, text: str, name: str = "a", ttl_s: int | None = None) -> SavedState:
    place = states.place(MODEL, "weights", name, overwrite=True)
    states.save(place, lambda directory: (directory / "x").write_text(text), ttl_s)
    return place


def text_of(states: SavedStates, place: SavedState) -> str:
    return (states.open(place.path).directory / "x").read_text()


async def after_steps(client: Client, model: str, steps: int = 3) -> None:
    for _ in range(steps):
        await client.loss(model, [supervised(TOKENS)])
        await client.step(model)


async def scored(client: Client, sampler: str) -> np.ndarray:
    """The log-probabilities of a prompt."""
    raw = await client.sample(sampler, TOKENS, prompt_logprobs=True)
    return np.frombuffer(read_message(memoryview(raw), SAMPLE)["prompt"], "<f4")[1:]


async def top_of(client: Client, sampler: str, n: int = 1, **params: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token of n samples: its log-probability, and that in the table of all tokens. And the table, (N, K)."""
    more = {"params": {"seed": 1, "stop": [], **params}, "topk_sample_logprobs": VOCABULARY}
    found = read_message(memoryview(await client.sample(sampler, TOKENS, n, **more)), SAMPLE)["sequences"]
    tokens, of_samples = (
        np.concatenate([np.frombuffer(each[name], dtype) for each in found])
        for name, dtype in (("tokens", "<i4"), ("log_probs", "<f4"))
    )
    ids, best = (
        np.concatenate([np.frombuffer(each["top"][name], dtype) for each in found]).reshape(len(tokens), -1)
        for name, dtype in (("ids", "<i4"), ("log_probs", "<f4"))
    )
    assert (len(found), len(best)) == (n, len(of_samples))
    return of_samples, (best * (ids == tokens[:, None])).sum(1), best


# --------------------------------------------------------------------------- on disk


def test_an_overwrite_that_fails_leaves_the_old_state_and_nothing_else(
    states: SavedStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = saved(states, "old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for failing in (full, lambda *_: None):  # the second one: the last rename fails
        monkeypatch.setattr(saved_states_module, "commit", failing)
        with pytest.raises(OSError, match=r"No space|No such file"):
            saved(states, "new")
        assert text_of(states, place) == "old"
        assert not [*tmp_path.glob("*/*/.*")]


def test_during_an_overwrite_there_is_always_a_state(states: SavedStates, monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen = saved(states, "old"), list[str]()

    def watched(*arguments: Any) -> None:
        seen.append(text_of(states, place))
        commit(*arguments)
        seen.append(text_of(states, place))

    monkeypatch.setattr(saved_states_module, "commit", watched)
    saved(states, "new")
    assert [*seen, text_of(states, place)] == ["old", "old", "new"]


def test_readers_meet_saves_and_deletions(states: SavedStates) -> None:
    """Listings while another thread replaces a state: it is there each time."""
    saved(states, "0")
    ended = threading.Event()

    def replace() -> None:
        for number in range(60 if FULL else 15):
            saved(states, str(number))
            states.delete(saved(states, "", "b"))
        ended.set()

    thread = threading.Thread(target=replace)
    thread.start()
    while not ended.is_set():
        rows = [each.row() for each in states.of(MODEL)]
        assert rows[0]["checkpoint_id"] in ("weights/a", "weights/b")
        assert "weights/a" in {row["checkpoint_id"] for row in rows}
    thread.join()


def test_a_start_removes_what_a_killed_service_has_left(
    states: SavedStates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, half = saved(states, "kept", "kept"), saved(states, "half", "half")
    (half.directory / "manifest.json").unlink()  # killed while it was removed
    over = saved(states, "over", "over", ttl_s=600)
    info = over.directory / "checkpoint.json"
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    info.write_text(info.read_text().replace(states.open(over.path).info["expires_at"], past))
    unnamed = states.place(MODEL, SNAPSHOT, "000001", overwrite=False)
    states.save(unnamed, lambda directory: (directory / "x").write_text(""), None)
    (tmp_path / MODEL / "weights" / ".kept.ready").mkdir()
    with caplog.at_level(logging.WARNING):
        started = SavedStates(tmp_path)
    assert {file.name for file in tmp_path.glob("*/*/*")} == {"kept"}
    assert [each.id for each in started.of(MODEL)] == [kept.id]
    assert any("half" in record.message for record in caplog.records)
    started.place(MODEL, "weights", "half", overwrite=False)  # the name is free


# --------------------------------------------------------------------------- unnamed sampler weights


async def test_unnamed_weights_go_with_their_session_and_leave_named_ones_alone(
    models: TinkerService, tmp_path: Path
) -> None:
    async with served(service := again(models, tmp_path)) as client:
        model = await client.model()
        first, _ = [
            (await client.save(model, name, kind))["path"]
            for name, kind in (("snapshot-best", "save_weights"), ("000002", "save_weights_for_sampler"))
        ]
        for _ in range(18):
            await client.save(model, None, "save_weights_for_sampler")
        assert len(service.states.of(model, (SNAPSHOT,))) == 16
        listed = (await client.http.get(f"/api/v1/training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert [row["checkpoint_id"] for row in listed] == ["weights/snapshot-best", "sampler_weights/000002"]
        assert (await client.post("weights_info", {"tinker_path": first})).status_code == 200
        await client.post(f"sessions/{client.session}/finish")
        await until(lambda: not [*tmp_path.glob(f"*/{SNAPSHOT}/*")])
        assert len(service.states.of(model)) == 2


# --------------------------------------------------------------------------- weights of a sampler


async def test_a_replaced_state_is_never_sampled_under_its_name(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        found = list[np.ndarray]()
        for replaced in (False, True, False):
            await after_steps(client, model)
            path = (await client.save(model, "x", "save_weights_for_sampler", overwrite=replaced))["path"]
            sampler = await client.sampler(path)
            found.append(await scored(client, sampler))
            top = await top_of(client, sampler)
            assert np.allclose(top[0], top[1], atol=1e-5)  # the engine that scores has the same weights
            if replaced:
                await client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/x")
            await client.save(model, "x", "save_weights_for_sampler", overwrite=True)
            for more in ({}, {"topk_prompt_logprobs": 2}):
                error = await client.sample(sampler, TOKENS, **more)
                assert error["category"] == "user"
                assert "replaced" in error["error"]
            if replaced:
                await client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/x")
        assert min(np.abs(found[0] - found[1]).max(), np.abs(found[1] - found[2]).max()) > 1e-3


async def test_requests_for_many_weights_in_any_order_each_get_theirs(models: TinkerService, tmp_path: Path) -> None:
    """At once, of which some are cancelled while they wait, load or sample: as each of them alone."""
    async with served(again(models, tmp_path)) as client:
        model, rng = await client.model(), random.Random(1)
        samplers = [await client.sampler()]
        for name in ("a", "b"):
            await after_steps(client, model, 4)
            samplers.append(await client.sampler((await client.save(model, name, "save_weights_for_sampler"))["path"]))
        more = {"prompt_logprobs": True, "params": {"seed": 3}}
        alone = {sampler: await client.sample(sampler, TOKENS, **more) for sampler in samplers}
        assert len({*alone.values()}) == 3
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}, "prompt_logprobs": True}
        body["sampling_params"] = {"max_tokens": 6, "seed": 3}
        wanted = dict[str, str]()
        for number in range(1000, 1060):
            sampler = rng.choice(samplers)
            sent = await client.post("asample", {**body, "sampling_session_id": sampler, "seq_id": number})
            wanted[sent.json()["request_id"]] = sampler
            if rng.random() < 0.3:
                id = rng.choice([*wanted])
                wanted.pop(id)
                await client.ask("cancel_future", {"request_id": id})
        for id, sampler in wanted.items():
            assert await client.result(id) == alone[sampler]
        assert not models.sampler._running


async def test_after_weights_that_cannot_be_read_the_next_ones_are_right(
    models: TinkerService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(service := again(models, tmp_path)) as client:
        model = await client.model()
        base, adapted = await client.sampler(), list[str]()
        of_base, best = await scored(client, base), await top_of(client, base)
        await after_steps(client, model, 6)
        for name in ("a", "b"):
            path = (await client.save(model, name, "save_weights_for_sampler"))["path"]
            adapted.append(await client.sampler(path))
        assert not np.allclose(await scored(client, adapted[0]), of_base, atol=1e-2)
        await top_of(client, adapted[0])
        damaged = adapter_in(service.states.open(path).directory)
        elsewhere = damaged / "elsewhere"
        (damaged / "places.safetensors").rename(elsewhere)
        assert (await client.sample(adapted[1], TOKENS))["category"] == "user"
        assert np.allclose(await scored(client, base), of_base, atol=1e-6)
        elsewhere.rename(damaged / "places.safetensors")
        assert not np.allclose(await scored(client, adapted[1]), of_base, atol=1e-2)
        (damaged / "adapter_config.json").rename(elsewhere)  # engines that score read it
        assert (await client.sample(adapted[1], TOKENS, topk_sample_logprobs=3))["category"] == "user"
        best_after = await top_of(client, adapted[0])
        assert np.allclose(best_after[0], best_after[1], atol=1e-5)
        assert np.allclose((await top_of(client, base))[2], best[2], atol=1e-6)
    caplog.clear()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 0.0])
async def test_the_most_probable_tokens_have_the_temperature_of_the_samples(
    models: TinkerService, tmp_path: Path, temperature: float
) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model()
        await after_steps(client, model)
        sampler = (await client.save(model, None, "save_weights_for_sampler"))["sampling_session_id"]
        of_samples, same, best = await top_of(client, sampler, 20, temperature=temperature)
        assert np.allclose(of_samples, same, atol=1e-5)
        assert np.allclose(np.exp(best).sum(1), 1, atol=1e-4)
        # Those of the prompt are the model's own.
        more = {"prompt_logprobs": True, "topk_prompt_logprobs": VOCABULARY, "params": {"temperature": temperature}}
        names: Any = {**SAMPLE, 3: ("top", TOP)}
        found = read_message(memoryview(await client.sample(sampler, TOKENS, **more)), names)
        ids = np.frombuffer(found["top"]["ids"], "<i4").reshape(len(TOKENS), -1)
        table = np.frombuffer(found["top"]["log_probs"], "<f4").reshape(ids.shape)
        assert np.allclose(
            ((ids == np.array(TOKENS)[:, None]) * table).sum(1)[1:], await scored(client, sampler), 0, 1e-5
        )


# --------------------------------------------------------------------------- targets without weights


def sparse(targets: np.ndarray) -> bytes:
    """Targets (N, K) as the SDK sends them if that is smaller: without zeros."""
    rows, columns = targets.nonzero()
    counts = np.concatenate([[0], np.bincount(rows, minlength=len(targets)).cumsum()])
    parts = (np.asarray(each, "<i8").tobytes() for each in (targets[rows, columns], counts, columns))
    shape = b"".join(write_message((0, size))[1:] for size in targets.shape)
    return write_message((2, write_message(*enumerate(parts, 1))), (3, 2), (4, shape))


async def test_padding_of_targets_counts_nothing(models: TinkerService, tmp_path: Path) -> None:
    async with served(again(models, tmp_path)) as client:
        model = await client.model()

        async def loss(*data: bytes) -> float:
            raw = await client.loss(model, data, only=True)
            return read_message(memoryview(raw), OUTPUT)["metrics"][0]["value"]

        inputs, after = TOKENS[:-1], np.array([*TOKENS[1:-1], 0])  # 0 is a token here
        weight = np.ones(len(inputs), np.float32)
        several = np.array([[a, b, 0, 0] for a, b in zip(TOKENS[1:], TOKENS, strict=False)])
        one, two = datum(inputs, target_tokens=after), datum(inputs, target_tokens=several)
        weighted = datum(inputs, target_tokens=several, weights=(several != 0).astype(np.float32))
        entry = write_message((2, write_message((1, "target_tokens"), (2, sparse(several)))))
        assert await loss(one) == pytest.approx(
            await loss(datum(inputs, target_tokens=after, weights=weight)), abs=1e-5
        )
        assert await loss(two) == pytest.approx(await loss(weighted), abs=1e-5)
        assert await loss(datum(inputs) + entry) == pytest.approx(await loss(weighted), abs=1e-5)
        assert await loss(one, two) == pytest.approx(await loss(one) + await loss(two), abs=1e-5)
