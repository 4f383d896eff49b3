"""`/inference/v1/generate`: token ids in, token ids and log-probabilities out, recorded exactly."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_parts import picture, sizes

from tests.serving import RENDERER, Served, served
from trivium.text.renderer import renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import experiences_of

LABELS: Any = {"session": "s", "task_id": "t"}
PROMPT = [65, 66, 200, 67]  # with a byte that is not UTF-8 alone


async def generate(here: Served, tokens: list[int], expect: int = 200, **more: Any) -> dict[str, Any]:
    answer = await here.client.post("/inference/v1/generate", json={"token_ids": tokens, **more})
    assert answer.status_code == expect, answer.text
    return answer.json()


async def test_a_prompt_that_extends_the_record_continues_it_token_for_token(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1) as here:
        ids, sampled = list(PROMPT), []
        for turn in range(3):
            params = {"max_tokens": 8, "logprobs": 1, "stop_token_ids": sorted(RENDERER.eos_token_ids), "top_k": -1}
            (choice,) = (await generate(here, ids, sampling_params=params, **LABELS))["choices"]
            _, done = here.engine.given[-1]
            assert choice["token_ids"] == done.tokens.tolist()
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
            assert [entry["logprob"] for entry in entries] == done.log_prob.tolist()
            assert choice["finish_reason"] in ("stop", "length")
            sampled += choice["token_ids"]
            ids += [*choice["token_ids"], 10 + turn, 180]
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
    (experience,) = experiences_of(group, group.trajectories[0])
    assert experience.tokens[experience.response_mask].tolist() == sampled
    assert experience.tokens.tolist() == ids[:-2]
    assert group.task.prompt[0].content == RENDERER.decode(PROMPT)


@pytest.mark.parametrize("change", [0, -3], ids=["another prompt", "another completion"])
async def test_another_prompt_starts_another_sequence(change: int, tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, replies=((65, 66, 67),)) as here:
        (choice,) = (await generate(here, PROMPT, **LABELS))["choices"]
        ids = [*PROMPT, *choice["token_ids"], 90]
        ids[change] += 1
        await generate(here, ids, **LABELS)
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
    one, two = experiences_of(group, group.trajectories[0])
    assert two.tokens[: len(ids)].tolist() == ids
    assert not two.response_mask[: len(ids)].any()
    assert one.response_mask.sum() == len(choice["token_ids"])


async def test_a_session_is_found_by_its_tokens_whatever_the_protocol(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1) as here:
        first = (await here.chat("x", return_token_ids=True))["choices"][0]
        ids = [*first["prompt_token_ids"], *first["token_ids"], 65]
        other = (await generate(here, [*ids[:-3], 90, 91, 92], model="policy"))["choices"][0]
        assert other["id"] != first["id"]
        longer = await generate(here, ids, request_id="mine")
        assert longer["request_id"] == "mine"
        (choice,) = longer["choices"]
        assert choice["session"] == first["session"] != other["session"]
        await here.feedback(ids=[first["id"]], reward=1)
        (group,) = await here.take()
    assert len(experiences_of(group, group.trajectories[0])) == 1


async def test_prompts_with_equal_text_and_other_tokens_are_other_tasks(tmp_path: Path) -> None:
    special = [token for token in range(263) if not RENDERER.decode([token])]
    async with served(tmp_path) as here:
        answers = [await generate(here, [token, 65]) for token in (special[0], special[1], special[0])]
    one, two, same = (answer["choices"][0]["task_id"] for answer in answers)
    assert one == same != two


async def test_the_header_of_verifiers_names_the_session_and_n_gives_choices(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1) as here:
        answer = await here.client.post(
            "/inference/v1/generate",
            json={"token_ids": PROMPT, "sampling_params": {"n": 2}, "model": "policy", "cache_salt": "3"},
            headers={"X-Session-ID": "trace-7"},
        )
        assert [choice["session"] for choice in answer.json()["choices"]] == ["trace-7", "trace-7"]
        card = (await here.client.get("/v1/models")).json()["data"][0]
        assert card["max_model_len"] == here.engine.max_context


async def test_the_images_of_a_prompt_are_those_of_the_completion_that_it_continues(tmp_path: Path) -> None:
    config = TinyVisionModel.Config.model_validate(sizes("qwen2_vl"))
    renderer = renderer_of(TinyVisionModel(config, seed=3).materialize(tmp_path / "model"))
    async with served(tmp_path, renderer=renderer, replies=(tuple(renderer._encode("abc").tolist()),)) as here:
        choices = []
        for seed in (1, 2):
            url = "data:image/png;base64," + base64.b64encode(picture(seed).data).decode()
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a?"}]
            answer = await here.chat({"role": "user", "content": parts}, return_token_ids=True, **LABELS)
            choices.append(answer["choices"][0])
        ids, others = ([*choice["prompt_token_ids"], *choice["token_ids"], 5] for choice in choices)
        assert ids == others
        assert (await generate(here, ids, expect=400, **LABELS))["error"]["param"] == "reply_to"
        await generate(here, ids, reply_to=choices[0]["id"], **LABELS)
        assert here.engine.given[-1][0].media == here.engine.given[0][0].media
        for path, name in {"/inference/v1/generate": "token_ids", "/v1/completions": "prompt"}.items():
            answer = await here.client.post(path, json={name: [5, *ids], "model": "policy"})
            assert (answer.status_code, "no image" in answer.text) == (400, True), answer.text
        assert len(here.engine.given) == 3


async def test_a_stream_has_the_same_choices(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        body = {"token_ids": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
        answer = await here.client.post("/inference/v1/generate", json=body)
        *events, end = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert end == "[DONE]"
        *chunks, usage = map(json.loads, events)
        _, done = here.engine.given[0]
        assert np.concatenate([chunk["choices"][0]["token_ids"] for chunk in chunks]).tolist() == done.tokens.tolist()
        assert chunks[-1]["choices"][0]["finish_reason"] is not None
        assert usage["usage"]["completion_tokens"] == len(done.tokens)
        answer = await here.client.post("/inference/v1/generate", json=body | {"sampling_params": {"n": 3}})
        *events, _ = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert len({json.loads(each)["request_id"] for each in events}) == 1


async def test_what_cannot_be_trained_on_is_refused_and_an_evaluation_may_sample_it(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        for param, more in {
            "token_ids": {"token_ids": ["x"]},
            "temperature": {"sampling_params": {"temperature": 0.5}},
            "top_k": {"sampling_params": {"top_k": 3}},
            "min_p": {"sampling_params": {"min_p": 0.5}},
            "min_tokens": {"sampling_params": {"min_tokens": 2}},
            "max_tokens": {"sampling_params": {"max_tokens": 9}},
            "stop_token_ids": {"sampling_params": {"stop_token_ids": [7]}},
            "logprobs": {"sampling_params": {"logprobs": 5}},
            "stream_options": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "routed_experts_prompt_start": {"sampling_params": {"routed_experts_prompt_start": "x"}},
            "seed": {"sampling_params": {"seed": 1}},
            "features": {"features": {"kwargs_data": {}}},
            "output_mode": {"output_mode": "text"},
        }.items():
            error = await generate(here, expect=400, **{"tokens": PROMPT, **more})
            assert error["error"]["param"] == param
        assert not here.engine.given
        greedy = {"temperature": 0, "top_k": 3, "max_tokens": 9}
        await generate(here, PROMPT, sampling_params=greedy, evaluation=True)
        assert here.engine.given[0][0].sampling.temperature == 0
