"""`trivium serve-reward`: a reward or a reward model over HTTP, for the clients of three trainers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from failing import refused
from reward_parts import MESSAGES, exported, picture, reward_model
from safetensors.torch import save_file
from vision_parts import sizes

from trivium.clients.http import TokenRefused
from trivium.config import RewardConfig
from trivium.errors import ConfigError
from trivium.models.heads.trained_models import ScoreModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.rewards.functions import Exact, Regex
from trivium.rewards.model import ModelReward
from trivium.rewards.remote import RemoteReward
from trivium.rewards.remote_forms import RemoteSample, RemoteScore, Scored, jpeg
from trivium.serving.connections import serve_app
from trivium.serving.reward_requests import WantedReward
from trivium.serving.reward_scorers import scorer_of
from trivium.serving.reward_server import RewardServer, RewardServing, Score
from trivium.serving.serve_reward import RewardAddress, read_rewards
from trivium.text import hf_tokenizer
from trivium.text.renderer import renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Media, Message

TOKEN = "sesame-of-the-tests"
SUMS: list[RewardConfig] = [Exact.Config(), Regex.Config(kind="regex", pattern="^4$", weight=0.5)]
FORMS = ("trivium", "lightrft", "openrlhf")


@asynccontextmanager
async def serving(
    score: Score | Sequence[RewardConfig], token: str | None = None, *, batch_tokens: int = 1, **options: Any
) -> AsyncGenerator[tuple[str, RewardServer]]:
    if isinstance(score, Sequence):
        scorer = scorer_of(score, 60.0, batch_tokens)
        server = RewardServer(scorer, scorer.lacking, RewardServing("r", whole=scorer.whole, **options), token)
    else:
        server = RewardServer(score, lambda columns: "", RewardServing("r", **options), token)
    async with serve_app(server.app, "127.0.0.1", 0) as url:
        yield url, server


def client(url: str, protocol: str = "trivium", path: str = "/get_reward", **section: Any) -> RemoteReward:
    return RemoteReward(RemoteReward.Config(urls=url + path, protocol=protocol, attempt_s=60.0, **section))


def sample(completion: str, answer: str = "4") -> RemoteSample:
    return RemoteSample("2+2=", completion, columns={"answer": answer}, label=answer, reference=answer)


def values(results: Sequence[object]) -> list[float]:
    assert all(isinstance(result, RemoteScore) for result in results), results
    return [result.reward for result in results if isinstance(result, RemoteScore)]


async def post(url: str, body: Any, token: str | None = None, path: str = "/get_reward") -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        return await http.post(path, json=body)


# --------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("path", ["/get_reward", "/v1/rewards"])
async def test_every_form_gets_the_weighted_sum_of_the_rewards(path: str) -> None:
    async with serving(SUMS) as (url, _):
        for form in FORMS:
            results = await client(url, form, path).score_batch([sample("4"), sample("5"), sample("5", answer="5")])
            assert values(results) == [1.5, 0.0, 1.0]
        health = (await asyncio.to_thread(httpx.get, f"{url}/health")).json()
    assert health | {"requests": 3, "samples": 9, "failed": 0, "waiting": 0, "status": "ok"} == health


async def test_a_request_as_openrlhf_sends_it() -> None:
    async with serving(SUMS) as (url, _):
        body = {"query": ["<pad><pad>2+2=4", "2+2=5"], "prompts": ["2+2=", "2+2="], "labels": ["4", "4"]}
        assert (await post(url, body)).json() == {
            "rewards": [1.5, 0.0],
            "scores": [1.5, 0.0],
            "extra_logs": {"exact": [1.0, 0.0], "regex": [0.5, 0.0]},
        }


@pytest.mark.parametrize("form", FORMS)
async def test_a_sample_that_fails_has_no_reward_and_says_why(form: str) -> None:
    async def score(batch: list[WantedReward]) -> list[Scored]:
        return [RemoteScore(1.0) if asked.completion == "4" else "the reward raised" for asked in batch]

    async with serving(score) as (url, _):
        good, bad = await client(url, form).score_batch([sample("4"), sample("5")])
    assert isinstance(good, RemoteScore)
    assert "the reward raised" in str(bad)


async def test_requests_of_several_clients_share_batches() -> None:
    sizes: list[int] = []

    async def score(batch: list[WantedReward]) -> list[Scored]:
        sizes.append(len(batch))
        return [RemoteScore(float(asked.completion)) for asked in batch]

    async with serving(score, window_s=50.0, max_batch=6) as (url, _):  # which ends once all six are there
        clients = [
            client(url, form).score_batch([sample(str(2 * n)), sample(str(2 * n + 1))]) for n, form in enumerate(FORMS)
        ]
        assert [values(results) for results in await asyncio.gather(*clients)] == [[0, 1], [2, 3], [4, 5]]
    assert sizes == [6]


# --------------------------------------------------------------------------- bounds


QUERY = {"query": ["2+2=4"], "prompts": ["2+2="], "labels": ["4"]}
SAMPLE = {"messages": [{"role": "user", "content": "x"}], "completion": "4", "columns": {"answer": "4"}}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ([1], "JSON object"),
        ({}, "samples (trivium), queries (lightrft) or query (openrlhf)"),
        ({**QUERY, "queries": ["2+2=4"]}, "one of samples"),
        ({**QUERY, "query": []}, "an empty list"),
        ({**QUERY, "query": "2+2=4"}, "a list under query"),
        ({**QUERY, "prompts": ["2+2=", "2+2="]}, "1 prompts"),
        ({**QUERY, "promts": ["2+2="]}, "did you mean 'prompts'"),
        ({"query": ["2+2=4"], "labels": ["4"]}, "prompts of 1 query"),
        ({**QUERY, "query": ["3+1=4"]}, "contains its prompt"),
        ({**QUERY, "query": [4]}, "query and prompts of text"),
        ({"query": ["2+2=4"], "prompts": ["2+2="]}, "reward 'exact' lacks answer"),
        ({**QUERY, "images": [["not base64!"]]}, "an image at images[0][0]"),
        ({"samples": [{**SAMPLE, "colums": {}}]}, "did you mean 'columns'"),
        ({"samples": [{**SAMPLE, "completion": None}]}, "samples[0].completion"),
        ({"samples": [{**SAMPLE, "messages": []}]}, "samples[0].messages"),
        ({"samples": [{**SAMPLE, "messages": [{"content": "x"}]}]}, "samples[0].messages[0]"),
        ({"samples": [{**SAMPLE, "images": ["http://host/image.png"]}]}, "not downloaded"),
        ({"samples": ["2+2=4"]}, "samples[0]"),
    ],
)
async def test_a_bad_request_is_refused_with_the_reason(body: Any, text: str) -> None:
    async with serving(SUMS) as (url, _):
        answer = await post(url, body)
    message = answer.json()["error"]["message"] + str(answer.json()["error"]["param"])
    assert answer.status_code == 400
    assert text in message
    assert "asked: " in message
    assert "do: " in message


async def test_only_clients_with_the_token_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(SUMS, TOKEN) as (url, _):
        assert (await post(url, QUERY)).status_code == 401
        assert (await post(url, QUERY, "another")).status_code == 401
        assert (await post(url, QUERY, TOKEN)).status_code == 200
        assert (await asyncio.to_thread(httpx.get, f"{url}/health")).status_code == 200
        with refused(TokenRefused):
            await client(url).score_batch([sample("4")])
        monkeypatch.setenv("SCORING_TOKEN", TOKEN)
        assert values(await client(url, token_variable="SCORING_TOKEN").score_batch([sample("4")])) == [1.5]


def test_a_server_for_other_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ConfigError, "0.0.0.0", "token"):
        RewardAddress(host="0.0.0.0").token()
    monkeypatch.setenv("SCORING_TOKEN", TOKEN)
    assert RewardAddress(host="0.0.0.0", token_variable="SCORING_TOKEN").token() == TOKEN
    assert RewardAddress(host="::1").token() is None


async def test_no_more_samples_wait_than_allowed() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def score(batch: list[WantedReward]) -> list[Scored]:
        begun.set()
        await go.wait()
        return [RemoteScore(float(asked.completion)) for asked in batch]

    async with serving(score, max_batch=1, max_waiting=3) as (url, server):
        assert await post(url, {**QUERY, "query": ["2+2=4"] * 4, "prompts": ["2+2="] * 4, "labels": ["4"] * 4})
        first = asyncio.ensure_future(client(url).score_batch([sample("1"), sample("2")]))
        await asyncio.wait_for(begun.wait(), 60)
        refused = await post(url, {"samples": [SAMPLE, SAMPLE]})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert (await post(url, {"samples": [SAMPLE] * 4})).status_code == 413
        second = asyncio.ensure_future(client(url, max_attempts=1).score_batch([sample("3"), sample("4")]))
        go.set()
        assert [values(await call) for call in (first, second)] == [[1.0, 2.0], [3.0, 4.0]]
        assert await server.stop(60)
        assert (await post(url, QUERY)).status_code == 503


async def test_a_reward_that_hangs_is_given_up_at_the_deadline() -> None:
    async def score(batch: list[WantedReward]) -> list[Scored]:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(score, deadline_s=0.2) as (url, _):
        answer = await post(url, QUERY)
        assert answer.status_code == 504
        assert "none within 0.2 s" in answer.text


async def test_requests_in_progress_are_answered_before_the_server_stops() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def score(batch: list[WantedReward]) -> list[Scored]:
        begun.set()
        await go.wait()
        return [RemoteScore(1.0)] * len(batch)

    async with serving(score) as (url, server):
        call = asyncio.ensure_future(post(url, QUERY))
        await asyncio.wait_for(begun.wait(), 60)
        assert not await server.stop(0.01)
        go.set()
        assert await server.stop(60)
        assert (await call).json()["rewards"] == [1.0]


# --------------------------------------------------------------------------- reward models


async def test_a_reward_model_scores_text_in_every_form_as_the_reward_does(tmp_path: Path) -> None:
    path = exported(reward_model(tmp_path), tmp_path / "out", pad=0)
    reward, tokenizer = ModelReward(ModelReward.Config(path=str(path))), hf_tokenizer(path)
    completions = ["7", "11", "1234"]
    wanted = pytest.approx([reward("3+4=", completion, MESSAGES) for completion in completions], abs=1e-4)
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    samples = [RemoteSample(prompt, completion, messages=MESSAGES) for completion in completions]
    for batch_tokens in (1, 1000):
        async with serving(read_rewards(path), batch_tokens=batch_tokens) as (url, _):
            for form in FORMS:
                assert values(await client(url, form).score_batch(samples)) == wanted
            padded = f"{tokenizer.pad_token * 3}{prompt}7{tokenizer.eos_token}{tokenizer.pad_token * 2}"
            answer = (await post(url, {"query": [padded, prompt + "11"]})).json()
            assert answer["rewards"] == pytest.approx(wanted.expected[:2], abs=1e-4)
            good, bad = await client(url).score_batch([samples[0], RemoteSample("", "1" * 50, messages=MESSAGES)])
    assert values([good]) == pytest.approx(wanted.expected[:1], abs=1e-4)
    twice = ["rewards.0.heads.score=2.0", "rewards.0.weight=-1"]
    async with serving(read_rewards(path, twice)) as (url, _):
        assert values(await client(url).score_batch(samples[:1])) == pytest.approx([-2 * wanted.expected[0]], abs=1e-4)
    assert "max_position_embeddings" in str(bad)


def vision_reward_model(directory: Path) -> Path:
    path = TinyVisionModel(TinyVisionModel.Config(**sizes("qwen2_vl")), seed=1).materialize(directory)
    model = ScoreModel(path, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    model.module.save_pretrained(path)
    weights = {name: 100 * value for name, value in model.value_head.state_dict().items()}
    save_file(weights, path / f"{VALUE_HEAD}.safetensors")
    return path


async def test_a_reward_model_sees_the_images_of_every_form(tmp_path: Path) -> None:
    path = vision_reward_model(tmp_path / "model")
    renderer, tokenizer = renderer_of(path), hf_tokenizer(path)
    red, blue = (Media("image/jpeg", jpeg(picture("RGB", colour))) for colour in ("red", "blue"))
    text = {"role": "user", "content": "a <image> b <image>"}
    scored: dict[str, list[float]] = {}
    async with serving(read_rewards(path)) as (url, _):
        for form in ("trivium", "lightrft"):
            samples: list[RemoteSample] = []
            for images in ([red, blue], [red, red], [blue, red]):
                expanded = renderer.render([Message("user", text["content"], tuple(images))])
                prompt = tokenizer.decode(expanded.tokens.tolist())  # with all of an image's placeholders
                samples.append(RemoteSample(str(prompt), "c", messages=[text], images=images))
            scored[form] = values(await client(url, form).score_batch(samples))
        one = base64.b64encode(red.data).decode()
        lacking = await post(url, {"queries": [str(prompt) + "c"], "images": [[one]]})
    assert scored["trivium"] == pytest.approx(scored["lightrft"], abs=1e-5)
    reward = ModelReward(ModelReward.Config(path=str(path)))
    direct = [reward("", "c", [text], images) for images in ([red, blue], [red, red], [blue, red])]
    assert scored["trivium"] == pytest.approx(direct, abs=1e-5)
    assert len({round(score, 4) for score in scored["trivium"]}) == 3
    assert lacking.json()["rewards"] == [None]
    assert "1 image(s)" in lacking.json()["errors"][0]


def test_what_is_served_is_read_from_the_rewards_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {kind: tiny}\nrewards: [{kind: exact, weight: 2}]\n")
    assert [(reward.label, reward.weight) for reward in read_rewards(config)] == [("exact", 2.0)]
    assert read_rewards(config, ["rewards.0.weight=3"])[0].weight == 3.0
    config.write_text("rewards: [{kind: exact, stripp: true}]\n")
    with refused(ConfigError, "strip"):
        read_rewards(config)
    config.write_text("model: {kind: tiny}\n")
    with refused(ConfigError, "rewards"):
        read_rewards(config)
    (tmp_path / "mine.py").write_text("def mine(prompt, completions):\n    return [0.0 for _ in completions]\n")
    config.write_text("rewards: [mine.py:mine]\n")
    with refused(ConfigError, "compares"):
        scorer_of(read_rewards(config), 1.0, 1)
