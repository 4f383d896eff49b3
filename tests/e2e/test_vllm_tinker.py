"""run.mode tinker with engine.kind vllm: the service of adapters that samples with vLLM, one for the whole file.
`make test-vllm` runs this, where vLLM is installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from tinker_client import NAME, Client, gathered, served, supervised

from tests.e2e.test_vllm import pytestmark as of_vllm
from tests.e2e.test_vllm import sharp_model
from tests.unit.serving.test_tinker_service import log_probs_of
from trivium.config import config_from_mapping
from trivium.runtime.adapter_service import ServiceLog, open_service
from trivium.runtime.stage import Stage
from trivium.serving.tinker.wire import read_message

pytestmark = [*of_vllm, pytest.mark.asyncio(loop_scope="module")]
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
TOP: Any = {1: ("ids", "bytes"), 2: ("log_probs", "bytes"), 3: ("width", "int")}
COMPLETION: Any = {2: ("tokens", "bytes"), 3: ("log_probs", "bytes"), 4: ("top", TOP)}
SAMPLE: Any = {1: ("sequences", [COMPLETION]), 2: ("prompt", "bytes"), 3: ("top", TOP)}


class Sampled(NamedTuple):
    """What a client gets for a prompt."""

    tokens: list[list[int]]
    log_probs: list[np.ndarray]
    prompt: np.ndarray
    """The log-probabilities of the prompt's tokens, where they are asked for."""
    tops: list[np.ndarray]
    """(tokens, k, 2) of the prompt and of each completion: the ids and log-probabilities of the most probable ones."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    folder = tmp_path_factory.mktemp("tinker")
    model = sharp_model(folder / "model", 0)
    sections = {
        "run": {"dir": str(folder), "mode": "tinker"},
        "model": {"kind": "hf", "path": str(model)},
        "tasks": {"train": {"kind": "served"}},
        "engine": {"kind": "vllm", "max_rows": 16, "adapter_rank": 8},
        "serve": {"model": NAME},
        "cluster": {"threads": 1},
    }
    stage = Stage(config_from_mapping(sections), 0, 0, True, folder, model)
    log = ServiceLog(stage)
    service = await asyncio.to_thread(open_service, stage, log)
    async with served(service) as made:
        yield made
    await service.close()
    log.monitor.close()


class Trained(NamedTuple):
    """A model with a client of its own."""

    client: Client
    id: str
    sampler: str
    """A sampling client of its weights."""

    async def sample(self, prompt: Sequence[int] = TOKENS, n: int = 1, **more: Any) -> Sampled:
        raw = await self.client.sample(self.sampler, prompt, n, **more)
        assert isinstance(raw, bytes), raw
        message = read_message(memoryview(raw), SAMPLE)
        parts, tops = message["sequences"], [each.get("top") for each in (message, *message["sequences"])]
        return Sampled(
            [np.frombuffer(each["tokens"], "<i4").tolist() for each in parts],
            [np.frombuffer(each["log_probs"], "<f4") for each in parts],
            np.frombuffer(message.get("prompt", b""), "<f4"),
            [_table(**top) for top in tops if top],
        )

    async def log_probs(self, tokens: Sequence[int]) -> np.ndarray:
        """The trainer's, of all tokens but the first."""
        return log_probs_of(await self.client.loss(self.id, [supervised(tokens)], only=True))[0]


def _table(ids: bytes, log_probs: bytes, width: int) -> np.ndarray:
    return np.stack([np.frombuffer(ids, "<i4"), np.frombuffer(log_probs, "<f4")], -1).reshape(-1, width, 2)


async def trained(client: Client, rank: int, steps: int, shift: int = 0) -> Trained:
    """A model that has learned a text. Without a step it is the base model."""
    client = Client(client.http)
    model = await client.model(rank=rank, seed=shift)
    for _ in range(steps):
        await client.loss(model, [supervised([token + shift for token in TOKENS])])
        await client.step(model)
    path = (await client.save(model, "trained", "save_weights_for_sampler"))["path"]
    return Trained(client, model, await client.sampler(path if steps else None))


async def test_adapters_in_turn_sample_with_the_log_probs_of_their_trainers(client: Client) -> None:
    """Two of different ranks, and the base model between them. Those of prompts are what `compute_logprobs` returns."""
    base, first, second = [await trained(client, *each) for each in ((1, 0), (4, 3), (8, 3, 20))]
    prompts = list[np.ndarray]()
    for model in (base, first, second, first, base):
        sampled = await model.sample(n=3, prompt_logprobs=True, params={"max_tokens": 12})
        for tokens, log_probs in zip(sampled.tokens, sampled.log_probs, strict=True):
            expected = await model.log_probs([*TOKENS, *tokens])
            np.testing.assert_allclose(log_probs, expected[len(TOKENS) - 1 :], atol=1e-4)
            np.testing.assert_allclose(sampled.prompt[1:], expected[: len(TOKENS) - 1], atol=1e-4)
        assert np.isnan(sampled.prompt[0])
        prompts.append(sampled.prompt[1:])
    np.testing.assert_array_equal(prompts[3:], [prompts[1], prompts[0]])
    assert all(np.abs(prompts[a] - prompts[b]).max() > 0.1 for a, b in ((0, 1), (0, 2), (1, 2)))
    alone = [await model.sample(params={"seed": 1}) for model in (base, first, second)]
    at_once = await gathered(*(model.sample(params={"seed": 1}) for model in (base, first, second)))
    assert [each.tokens for each in at_once] == [each.tokens for each in alone]


async def test_the_most_probable_tokens_are_those_of_the_same_weights(client: Client) -> None:
    model = await trained(client, 4, 2)
    how = {"temperature": 0.7, "max_tokens": 8}
    sampled = await model.sample(prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=3, params=how)
    [tokens], [log_probs] = sampled.tokens, sampled.log_probs
    listed = 0
    for top, ids, values in zip(sampled.tops, (TOKENS, tokens), (sampled.prompt, log_probs), strict=True):
        assert top.shape == (len(ids), 3, 2)
        for place, token, value in zip(top, ids, values, strict=True):
            if token in place[:, 0]:
                listed += 1
                assert abs(place[place[:, 0] == token, 1][0] - value) < 1e-4
    assert listed > 1
    greedy = await model.sample(params={"temperature": 0.0, "max_tokens": 8, "stop": []}, topk_sample_logprobs=1)
    assert (greedy.tops[0][:, 0, 0] == greedy.tokens[0]).all()
    assert not greedy.log_probs[0].any()
    of_two = await model.sample(params={"top_k": 2, "max_tokens": 8})
    expected = (await model.log_probs([*TOKENS, *of_two.tokens[0]]))[len(TOKENS) - 1 :]
    assert (of_two.log_probs[0] >= expected - 1e-4).all(), "they are among two tokens"
    assert np.abs(of_two.log_probs[0] - expected).max() > 1e-3


async def test_seeds_repeat_and_completions_stop_where_they_are_told(client: Client) -> None:
    model, other = await trained(client, 4, 2), await trained(client, 2, 1)
    how = {"max_tokens": 12, "stop": []}
    first = await model.sample(n=4, params={**how, "seed": 7})
    await other.sample()
    again, differs = [await model.sample(n=4, params={**how, "seed": seed}) for seed in (7, 8)]
    assert first.tokens == again.tokens != differs.tokens
    assert [len(each) for each in first.tokens] == [12] * 4
    stop = first.tokens[0][3]
    stopped = await model.sample(n=4, params={**how, "seed": 7, "stop": [stop]})
    for tokens, whole in zip(stopped.tokens, first.tokens, strict=True):
        assert tokens == whole[: whole.index(stop) + 1 if stop in whole else 12]
    assert len(stopped.tokens[0]) <= 4


async def test_what_vllm_cannot_sample_is_refused_and_the_service_goes_on(client: Client) -> None:
    own = Client(client.http)
    await own.model()
    body = {"session_id": own.session, "model_seq_id": 1, "base_model": NAME}
    refused = await own.ask("create_model", {**body, "lora_config": {"rank": 9}})
    assert refused["category"] == "user"
    assert all(part in refused["error"] for part in ("rank 9", "rank 8", "engine.adapter_rank"))
    sampler = await own.sampler()
    for prompt in ([5] * 300, [10**6]):
        assert (await own.sample(sampler, prompt))["category"] == "user"
    assert isinstance(await own.sample(sampler, [5], prompt_logprobs=True), bytes)
