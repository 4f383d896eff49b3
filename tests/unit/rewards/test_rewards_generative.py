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
from trivium.foundation.errors import RewardError
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


def read(text: str, **section: Any) -> float | None:
    """The score that a verdict gets, before it is scaled; None if it cannot be read."""
    config = GenerativeJudge.Config(urls="http://127.0.0.1:1/v1", model="j", **section)
    judge = GenerativeJudge(config)
    try:
        return judge._scaled(judge._score(text)) * (config.max_score - config.min_score) + config.min_score
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        *(("Score: 1e-1", 0.1), ("Score: 7", 7), ("Score: 10.0", 10), ("Score: .5", 0.5), ("score = +3", 3)),
        *(("Score: 9.", 9), ("Score: 8, since it is right", 8), ("Score: 8)", 8), ("Good. Score: 6", 6)),
        *(("**Score:** 8", 8), ("**Score**: 8", 8), ("Score: **8**", 8), ("_Score: 8_", 8), ("# Score: 4", 4)),
        *(("Score: 7/10", 7), ("Score: 7 / 10.", 7), ("Score: **7**/10", 7), ("Score: 7 out of 10", 7)),
        *(("Score: 7 (maximum score: 10)", 7), ("Score: 7\n(max score: 10)", 7)),
        ("The perfect score: 10. Score: 2", 2),
        ("Score: 5 out of 10. A perfect score: 10 would need a proof.", 5),
        ("Score: 3 is too low.\nScore: 8", 8),
        ("Score: 8 and again: score: 8.0", 8),
        # read in part, or ambiguous
        *((f"Score: {text}", None) for text in ("8,5", "1.2.3", "7-8", "7–8", "7 to 8", "7 or 8", "1 000", "7½")),
        *((f"Score: {text}", None) for text in ("3/4", "3 out of 5", "90%", "8x", "2^3", "1e", "7_5")),
        *((f"Score: {text}", None) for text in ("seven", "~7", "<8>", "−3")),
        *(("Score: 3. No, score: 8", None), ("Score: -1", None), ("Score: 11", None), ("", None)),
    ],
)
def test_a_number_is_read_whole_or_not_at_all(text: str, score: float | None) -> None:
    assert read(text) == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    ("text", "section", "score"),
    [
        ("Score: 85%", {"max_score": 100}, 85),
        ("Score: 4/5", {"max_score": 5}, 4),
        ("Rating: 8,5", {"pattern": r"Rating: (\d+)"}, None),
        ("Rating: 8,5", {"pattern": r"(\d+)$"}, None),
        ("Rating: -5", {"pattern": r"Rating:\D*(\d+)"}, None),
        ("Rating: 1e-1", {"pattern": r"(\d+)$"}, None),
        ("Rating-5", {"pattern": r"Rating-(\d+)"}, 5),
        ("[[8]]", {"pattern": r"\[\[(\d+)\]\]"}, 8),
        ("I say 7", {"pattern": r"\d+"}, 7),
    ],
)
def test_patterns_of_ones_own_read_whole_numbers(text: str, section: dict[str, Any], score: float | None) -> None:
    assert read(text, **section) == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 7}', 7),
        ('```json\n{"reason": "x {y}", "score": 7}\n```', 7),
        ('{"a": {"score": 3}, "score": 9}', 9),
        ('{"score": 7, "max": {"score": 10}}', 7),
        ('{"verdict": {"why": [{"x": 1}], "score": 6}}', 6),
        ('{"score": 1}\nNo:\n```\n{"score": 2, "of": {"score": 10}}\n``` done {}', 2),
        ('The set {1, 2} and \\frac{1}{2}: {"score": 4} as {said}', 4),
        ('[{"score": 5}]', 5),
        ('{"why": "{\\"score\\": 3}", "score": 8}', 8),
        *((f'{{"score": {value}}}', None) for value in ("true", "null", '"7"', "[7]", "NaN", '{"score": 7}', "7,")),
        ('{"a": {"score": 3}, "b": {"score": 4}}', None),
        ('{"a": {"score": 3}, "score": 9,}', None),  # no JSON: what is inside is not the verdict
        ('{score: 9, max: {"score": 10}}', None),
        ("{'score': 7}", None),
        ('{"score": 7', None),
        ('{"mark": 7}', None),
    ],
)
def test_the_outermost_object_with_the_key_counts(text: str, score: float | None) -> None:
    assert read(text, json_key="score") == (None if score is None else pytest.approx(score))


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
