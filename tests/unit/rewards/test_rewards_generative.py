"""Generative judges: what is sent, how a verdict is read, and what becomes of one that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import configured, problems_of
from failing import refused
from reward_parts import judged, picture, task
from reward_services import computed, json_of, raw, service
from serving import RENDERER, served

from trivium.clients.http import EndpointError, MalformedResponse, TokenRefused
from trivium.errors import RewardError
from trivium.rewards import make_judge
from trivium.rewards.generative import GenerativeJudge, UnreadableVerdict
from trivium.types import Media

PATH = "/v1/chat/completions"


def verdict(text: Any, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


async def score(url: str, completion: str = "it is 4", media: tuple[Media, ...] = (), **section: Any) -> float:
    """What the judge gives a completion; raises the error that it ends with."""
    config = GenerativeJudge.Config(urls=url.removesuffix("/chat/completions"), model="judge", **section)
    result = await make_judge([config]).score(task(*media, answer="4"), judged(completion))
    if isinstance(result, RewardError):
        raise result.__cause__ or result
    return result["generative_judge"]


async def test_the_request_holds_the_filled_template_and_deterministic_settings() -> None:
    async with service(json_of(verdict("Fine.\nScore: 7")), path=PATH) as here:
        template = "Q {prompt} of {conversation}; right: {answer}; A {completion}; {x y} {{"
        assert await score(here.url, "{answer} and {prompt}", template=template, system="Be fair to {answer}.") == 0.7
        request = here.requests[0]
    text = "Q how? of system: be brief\nuser: how?; right: 4; A {answer} and {prompt}; {x y} {{"
    messages = [{"role": "system", "content": "Be fair to 4."}, {"role": "user", "content": text}]
    assert request.path == PATH
    assert request.body == {"model": "judge", "messages": messages, "temperature": 0.0, "max_tokens": 512, "seed": 0}


async def test_images_are_sent_where_the_judge_reads_them() -> None:
    image = picture("RGB", "red")
    async with service(json_of(verdict("Score: 10")), path=PATH) as here:
        assert await score(here.url, media=(image,), images=True) == 1.0
        parts = here.requests[0].body["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


@pytest.mark.parametrize(
    ("text", "section", "expected"),
    [
        ("Score: 3 is too low.\n**Score:** 8", {"pattern": r"Score:\D*(\d+)"}, 0.8),
        ("<think>Score: 1</think>Score: 9", {}, 0.9),
        ("score = 2.5", {}, 0.25),
        ('{"score": 1} then {"why": "{", "score": 4}', {"json_key": "score", "max_score": 5}, 0.8),
        ("Yes", {"pattern": r"\w+", "choices": {"yes": 1, "no": -1}}, 1.0),
        ("verdict: NO.", {"pattern": r"verdict: (\w+)", "choices": {"yes": 1, "no": -1}}, -1.0),
        ("Score: -1", {"min_score": -1, "max_score": 1}, 0.0),
    ],
)
async def test_the_score_is_read_from_the_verdict(text: str, section: dict[str, Any], expected: float) -> None:
    async with service(json_of(verdict(text)), path=PATH) as here:
        assert await score(here.url, **section) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "section", "kind", "text"),
    [
        (verdict("I cannot judge this"), {}, UnreadableVerdict, "'I cannot judge this'"),
        (verdict("<think>Score: 9</think>hm"), {}, UnreadableVerdict, "pattern"),
        (verdict("Score: 11"), {}, UnreadableVerdict, "0 to 10"),
        (verdict("Score: 5", "length"), {}, UnreadableVerdict, "512 tokens"),
        (verdict('{"score": "8"}'), {"json_key": "score"}, UnreadableVerdict, "'8'"),
        (verdict('{"score": NaN}'), {"json_key": "score"}, UnreadableVerdict, "nan"),
        (verdict('{"mark": 8}'), {"json_key": "score"}, UnreadableVerdict, "'score'"),
        (verdict("maybe"), {"pattern": r"\w+", "choices": {"yes": 1}}, UnreadableVerdict, "choices yes"),
        (verdict(None), {}, MalformedResponse, "content: None"),
        ({"choices": []}, {}, MalformedResponse, "choices[0].message.content"),
        ([], {}, MalformedResponse, "choices[0].message.content"),
    ],
)
async def test_a_verdict_without_a_score_is_a_named_error(
    value: Any, section: dict[str, Any], kind: type[EndpointError], text: str
) -> None:
    async with service(json_of(value), path=PATH) as here:
        with refused(kind, text) as raised:
            await score(here.url, **section)
        assert raised.value.place == here.url
        assert len(here.requests) == 1


async def test_several_verdicts_are_averaged_or_voted_on() -> None:
    def by_seed(body: dict[str, Any]) -> dict[str, Any]:
        return verdict(f"Score: {[2, 8, 2, 6][body['seed'] - 5]}")

    async with service(computed(by_seed), path=PATH) as here:
        several = {"samples": 4, "temperature": 0.7, "seed": 5}
        assert await score(here.url, **several) == pytest.approx(0.45)
        assert await score(here.url, aggregate="majority", **several) == pytest.approx(0.2)
        assert sorted(request.body["seed"] for request in here.requests) == sorted([5, 6, 7, 8] * 2)


async def test_requests_are_retried_and_refused_as_those_of_every_reward_over_http() -> None:
    async with service(raw(503, b"", Retry_After="0"), json_of(verdict("Score: 5")), path=PATH) as here:
        assert await score(here.url) == 0.5
        assert len(here.requests) == 2
    async with service(raw(401, b""), path=PATH) as here:
        with refused(TokenRefused):
            await score(here.url)
        assert len(here.requests) == 1


async def test_our_own_endpoint_serves_a_judge(tmp_path: Path) -> None:
    verdict = tuple(RENDERER.read("Score: 6").tokens.tolist())
    async with served(tmp_path, replies=(verdict,), max_new_tokens=16) as here:
        evaluation = {"evaluation": True, "seed": None}
        section = {"extra_body": evaluation, "max_tokens": 16, "template": "Q {prompt} A {completion}"}
        config = GenerativeJudge.Config(urls=f"{here.url}/v1", model="policy", **section)
        assert await make_judge([config]).score(task(), judged("fine")) == {"generative_judge": 0.6}


def test_columns_of_the_template_are_asked_for_before_a_run_begins() -> None:
    config = GenerativeJudge.Config(urls="http://127.0.0.1:1/v1", model="j", template="{answer} {rubric} {completion}")
    judge = make_judge([config])
    assert "lacks answer, rubric" in judge.lacking({})
    assert not judge.lacking({"answer": "4", "rubric": "r"})


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"template": "Judge {prompt}"}, "no {completion}"),
        ({"samples": 3}, "3 samples at temperature 0"),
        ({"min_score": 5, "max_score": 5}, "5 to 5"),
        ({"pattern": "("}, "not a regular expression"),
        ({"workers": 2}, "workers=2"),
        ({"token_variable": "A", "token_file": "b"}, "token_variable and token_file"),
    ],
)
def test_a_section_that_cannot_work_is_refused(section: dict[str, Any], text: str) -> None:
    judge = {"kind": "generative_judge", "urls": "http://127.0.0.1:1/v1", "model": "j", **section}
    assert text in " ".join(problems_of(configured, rewards=[judge]).values())
