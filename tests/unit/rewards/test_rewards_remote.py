"""Rewards over HTTP: forms of requests and responses, batches, retries, and everything that a service may do wrong.

The services are real ones on sockets of this machine (tests/reward_services.py).
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import check_error, refused
from PIL import Image
from pydantic import ValidationError
from reward_parts import judged, picture, task
from reward_services import (
    Behaviour,
    Service,
    computed,
    cut,
    drip,
    endless,
    hung,
    json_of,
    lengths,
    raw,
    service,
)

from tests.ports import port_below_ephemeral
from tests.waiting import until
from trivium.clients.http import (
    EndpointClient,
    EndpointError,
    EndpointFailed,
    EndpointTimeout,
    EndpointUnreachable,
    MalformedResponse,
    RequestRefused,
    TokenRefused,
    read_token,
    retry_after_s,
)
from trivium.foundation.errors import ConfigError, RewardError
from trivium.models.vision.images import decoded
from trivium.rewards import make_judge
from trivium.rewards.batcher import Batcher
from trivium.rewards.remote import RemoteReward
from trivium.rewards.remote_forms import Protocol, RemoteSample, RemoteScore, request
from trivium.types import Media

TOKEN = "sesame-of-the-tests"
TWO = [RemoteSample("ask ", "a"), RemoteSample("ask ", "bb")]


def remote(url: str | Sequence[str], **section: Any) -> RemoteReward:
    quick = {"protocol": "lightrft", "attempt_s": 20.0, "total_s": 60.0, "max_attempts": 3}
    return RemoteReward(RemoteReward.Config(urls=url, **{**quick, **section}))


def rewards(results: Sequence[object]) -> list[float]:
    assert all(isinstance(result, RemoteScore) for result in results), results
    return [result.reward for result in results if isinstance(result, RemoteScore)]


def errors(results: Sequence[object], kind: type[EndpointError]) -> str:
    """The text of the errors, which all samples got."""
    assert {type(result) for result in results} == {kind}, results
    return str(results[0])


# --------------------------------------------------------------------------- forms


async def test_each_protocol_sends_its_own_form_and_reads_its_own_response() -> None:
    async def one(protocol: str, response: Any, *media: Media) -> tuple[float, dict[str, Any]]:
        async with service(json_of(response)) as here:
            judge = make_judge([RemoteReward.Config(urls=here.url, protocol=protocol, window_s=0.0)])
            scores = await judge.score(task(*media, answer="4", reference="four"), judged("it is 4"))
            assert isinstance(scores, dict), scores
            return scores["remote"], here.requests[0].body

    assert await one("lightrft", {"rewards": [0.25]}) == (
        0.25,
        {"queries": ["how?it is 4"], "prompts": ["how?"], "references": ["four"]},
    )
    assert (await one("lightrft", {"rewards": 2}))[0] == 2.0  # a number alone, for one sample
    openrlhf = {"rewards": [1], "scores": [0.5], "extra_logs": {"length": [7]}}
    assert await one("openrlhf", openrlhf) == (
        1.0,
        {"query": ["how?it is 4"], "prompts": ["how?"], "labels": ["4"]},
    )
    image = picture("RGB", "red")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how?"}]
    url = "data:image/png;base64," + base64.b64encode(image.data).decode()
    assert await one("trivium", {"results": [{"reward": -1.5, "metrics": {"n": 1}}]}, image) == (
        -1.5,
        {
            "samples": [
                {
                    "messages": messages,
                    "completion": "it is 4",
                    "columns": {"answer": "4", "reference": "four"},
                    "images": [url],
                }
            ]
        },
    )


async def test_the_numbers_beside_rewards_are_kept_per_sample() -> None:
    body = {"rewards": [1, 2], "scores": [3, 4], "extra_logs": {"words": [5, 6]}}
    async with service(json_of(body)) as here:
        results = await remote(here.url, protocol="openrlhf").score_batch(TWO)
    assert results == [RemoteScore(1.0, {"score": 3.0, "words": 5.0}), RemoteScore(2.0, {"score": 4.0, "words": 6.0})]


async def test_every_image_is_encoded_by_itself_as_a_jpeg_without_transparency() -> None:
    """In LightRFT the second string begins with the first image's bytes."""
    images = [picture("RGBA", (255, 0, 0, 192)), picture("RGB", "blue"), picture("RGB", "lime", "image/jpeg")]
    samples = [RemoteSample("p", "c", images=images), RemoteSample("p", "c")]
    async with service(computed(lengths)) as here:
        await remote(here.url).score_batch(samples)
        sent, none = here.requests[0].body["images"]
    assert none is None
    decoded = [base64.b64decode(text, validate=True) for text in sent]
    assert decoded[2] == images[2].data
    for data, dominant in zip(decoded, (0, 2, 1), strict=True):
        with Image.open(io.BytesIO(data)) as opened:
            pixel = opened.getpixel((4, 4))
            assert (opened.format, opened.mode, opened.size) == ("JPEG", "RGB", (8, 8))
            assert isinstance(pixel, tuple)
            assert pixel[dominant] > 200 > 100 > max(value for i, value in enumerate(pixel) if i != dominant)


async def test_a_chat_template_writes_the_prompt_and_the_query(tmp_path: Path) -> None:
    from trivium.text.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer("bytes")
    tokenizer.save_pretrained(tmp_path)
    async with service(computed(lengths)) as here:
        section = RemoteReward.Config(urls=here.url, protocol="openrlhf", chat_template=str(tmp_path), window_s=0.0)
        await make_judge([section]).score(task(), judged("fine"))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert here.requests[0].body == {"query": [f"{prompt}fine"], "prompts": [prompt], "labels": [None]}


# --------------------------------------------------------------------------- batches


async def test_calls_that_arrive_together_share_requests_and_get_their_own_rewards() -> None:
    async with service(computed(lengths)) as here:
        reward = remote(here.url, max_batch=4)
        results = await reward.score_batch([RemoteSample("", "x" * n) for n in range(10)])
        assert rewards(results) == [float(n) for n in range(10)]
        assert [len(request.body["queries"]) for request in here.requests] == [4, 4, 2]


async def test_no_more_requests_are_in_progress_than_max_concurrent() -> None:
    running, most, three = 0, 0, asyncio.Barrier(3)

    async def count(received: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await three.wait()
        await asyncio.sleep(0.01)  # in which a fourth one would arrive
        running -= 1
        await computed(lengths)(received, writer)

    async with service(count) as here:
        samples = [RemoteSample("", "x")] * 9
        assert rewards(await remote(here.url, max_batch=1, max_concurrent=3).score_batch(samples)) == [1.0] * 9
    assert most == 3


async def test_a_call_that_is_cancelled_leaves_the_others_their_rewards() -> None:
    arrived, leave = asyncio.Event(), asyncio.Event()

    async def wait(received: Any, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await leave.wait()
        await computed(lengths)(received, writer)

    async with service(wait) as here:
        reward = remote(here.url, window_s=0.2)
        calls = [asyncio.ensure_future(reward.score_batch([RemoteSample("", "x" * n)])) for n in (1, 2)]
        await asyncio.wait_for(arrived.wait(), 30)
        calls[0].cancel()
        leave.set()
        assert rewards(await calls[1]) == [2.0]
        assert len(here.requests) == 1


async def test_a_request_that_no_call_waits_for_is_closed() -> None:
    arrived = asyncio.Event()

    async def wait(received: Any, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await drip(received, writer)

    async with service(wait) as here:
        call = asyncio.ensure_future(remote(here.url).score_batch(TWO))
        await asyncio.wait_for(arrived.wait(), 30)
        call.cancel()
        await asyncio.wait_for(here.broken.wait(), 30)
        with pytest.raises(asyncio.CancelledError):
            await call


def test_one_reward_serves_several_event_loops_one_after_the_other() -> None:
    async def first() -> tuple[RemoteReward, Service]:
        async with service(computed(lengths), port=port_below_ephemeral()) as here:
            reward = remote(here.url, max_concurrent=1, max_batch=1)
            assert rewards(await reward.score_batch(TWO)) == [5.0, 6.0]
            return reward, here

    async def second(reward: RemoteReward, port: int) -> None:
        async with service(computed(lengths), port=port):
            assert rewards(await reward.score_batch(TWO)) == [5.0, 6.0]

    reward, here = asyncio.run(first())
    asyncio.run(second(reward, int(here.url.split(":")[2].split("/")[0])))


# --------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("behaviour", "kind", "text", "attempts"),
    [
        (raw(500, b"out of memory"), EndpointFailed, "status 500: out of memory", 3),
        (raw(429, b""), EndpointFailed, "status 429", 3),
        (raw(404, b"no such path"), RequestRefused, "status 404: no such path", 1),
        (raw(200, b'{"rewards": [1, '), MalformedResponse, "no JSON (Expecting value", 1),
        (raw(200, b"\xff\xfe"), MalformedResponse, "no JSON", 1),
        (json_of([1, 2]), MalformedResponse, "a JSON object", 1),
        (json_of({"scores": [1, 2]}), MalformedResponse, "the keys 'scores', where 'rewards' is wanted", 1),
        (json_of({"rewards": None}), MalformedResponse, "rewards: None of type NoneType, where a list", 1),
        (json_of({"rewards": 1.0}), MalformedResponse, "rewards: 1.0 of type float, where a list", 1),
        (json_of({"rewards": [1]}), MalformedResponse, "1 rewards for 2 samples", 1),
        (json_of({"rewards": [1, 2, 3]}), MalformedResponse, "3 rewards for 2 samples", 1),
        (json_of({"rewards": ["1", "2"]}), MalformedResponse, "'1' of type str", 1),
        (json_of({"rewards": [[1], [2]]}), MalformedResponse, "[1] of type list", 1),
        (json_of({"rewards": [float("nan")] * 2}), MalformedResponse, "nan, which is not a finite number", 1),
        (json_of({"rewards": [float("inf")] * 2}), MalformedResponse, "inf, which is not a finite number", 1),
        (json_of({"rewards": [1e12] * 2}), MalformedResponse, "1e+12", 1),
        (endless, MalformedResponse, "more than 10,000 bytes", 1),
    ],
)
async def test_a_faulty_response_is_a_named_error_of_every_sample(
    behaviour: Behaviour, kind: type[EndpointError], text: str, attempts: int
) -> None:
    async with service(behaviour) as here:
        results = await remote(here.url, max_response_bytes=10_000).score_batch(TWO)
        assert text in errors(results, kind)
        assert here.url in errors(results, kind)
        assert len(here.requests) == attempts


@pytest.mark.parametrize("behaviour", [hung, drip])
async def test_a_slow_response_is_given_up_after_attempt_s_and_total_s(behaviour: Behaviour) -> None:
    async with service(behaviour) as here:
        reward = remote(here.url, attempt_s=0.5, max_attempts=2)
        assert "no complete response within 0.5 s" in errors(await reward.score_batch(TWO), EndpointTimeout)
        reward = remote(here.url, attempt_s=50.0, total_s=0.4, max_attempts=9)
        assert "no complete response within 0." in errors(await reward.score_batch(TWO), EndpointTimeout)
        assert len(here.requests) <= 4


async def test_what_passes_is_tried_again() -> None:
    async with service(raw(500, b""), cut, raw(503, b"", Retry_After="0"), computed(lengths)) as here:
        assert rewards(await remote(here.url).score_batch(TWO)) == [5.0, 6.0]
        assert len(here.requests) == 4


async def test_the_service_says_when_to_try_again() -> None:
    async with service(*[raw(429, b"", Retry_After=n) for n in ("0", "1")], computed(lengths)) as here:
        started = time.monotonic()
        assert rewards(await remote(here.url, max_attempts=1).score_batch(TWO)) == [5.0, 6.0]
        assert time.monotonic() - started >= 1.0
    async with service(raw(503, b"", Retry_After="3600")) as here:  # longer than total_s: given up at once
        assert "status 503" in errors(await remote(here.url).score_batch(TWO), EndpointFailed)
        assert len(here.requests) == 1
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_s(" 7 ") == 7.0
    for text in ("soon", "²", "Mon, 01 Jan 99999 00:00:00 GMT", "Mon, 01 Jan 999999999999999999999 00:00:00 GMT"):
        assert retry_after_s(text) is None


async def test_a_service_that_asks_for_a_long_pause_leaves_the_work_to_the_others() -> None:
    async with service(raw(503, b"", Retry_After="3600")) as busy, service(computed(lengths)) as free:
        assert rewards(await remote([busy.url, free.url]).score_batch(TWO)) == [5.0, 6.0]
        assert (len(busy.requests), len(free.requests)) == (1, 1)


def test_certificates_are_verified_beside_urls_without_any() -> None:
    client = EndpointClient(RemoteReward.Config(urls=["http://host/", "HTTPS://host/"]), what="rewards")
    assert not client._context("http://host/").get_ca_certs()
    assert client._context("HTTPS://host/").get_ca_certs()


async def test_one_bad_number_fails_its_sample_alone() -> None:
    async with service(json_of({"rewards": [0.5, float("nan")]})) as here:
        good, bad = await remote(here.url).score_batch(TWO)
    assert good == RemoteScore(0.5)
    assert isinstance(bad, MalformedResponse)


async def test_errors_of_single_samples_in_our_own_form() -> None:
    entries = [{"reward": 1.0}, {"error": "too long"}, {"rewards": 1}, {"reward": "1"}, {"reward": 1, "metrics": [1]}]
    async with service(json_of({"results": entries})) as here:
        results = await remote(here.url, protocol="trivium").score_batch([RemoteSample("p", "c")] * 5)
    assert results[0] == RemoteScore(1.0)
    texts = [str(result) for result in results[1:]]
    assert all(isinstance(result, MalformedResponse) for result in results[1:])
    for text, wanted in zip(texts, ("too long", "{reward} or {error}", "'1' of type str", "metrics"), strict=True):
        assert wanted in text


async def test_a_service_that_is_away_for_a_while_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    port = port_below_ephemeral()
    call = asyncio.ensure_future(remote(f"http://127.0.0.1:{port}/get_reward", max_attempts=1).score_batch(TWO))
    await until(lambda: call.done() or "is tried again" in caplog.text)
    assert not call.done()
    async with service(computed(lengths), port=port):
        assert rewards(await call) == [5.0, 6.0]


async def test_a_service_that_stays_away_is_a_named_error() -> None:
    url = f"http://127.0.0.1:{port_below_ephemeral()}/get_reward"
    results = await remote(url, total_s=2.0).score_batch(TWO)
    assert "ConnectError" in errors(results, EndpointUnreachable)


async def test_a_dead_url_is_avoided() -> None:
    dead = f"http://127.0.0.1:{port_below_ephemeral()}/"
    async with service(computed(lengths)) as one, service(raw(500, b""), computed(lengths)) as two:
        reward = remote([one.url, two.url, dead], max_batch=1)
        samples = [RemoteSample("", "x" * n) for n in range(12)]
        assert rewards(await reward.score_batch(samples)) == [float(n) for n in range(12)]
        assert len(one.requests) + len(two.requests) == 13  # the 500 was tried again; none was lost
        assert one.requests
        started = len(one.requests) + len(two.requests)
        for sample in samples:
            assert rewards(await reward.score_batch([sample]))
        assert len(one.requests) + len(two.requests) == started + 12


async def test_equal_services_share_the_requests() -> None:
    async with service(computed(lengths)) as one, service(computed(lengths)) as two:
        await remote([one.url, two.url], max_batch=1).score_batch([RemoteSample("", "x")] * 8)
        assert (len(one.requests), len(two.requests)) == (4, 4)


# --------------------------------------------------------------------------- the token


async def test_the_token_is_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCORING_TOKEN", TOKEN)

    async def echo(received: Any, writer: asyncio.StreamWriter) -> None:
        await raw(400, f"bad: {received.headers}".encode())(received, writer)

    async with service(echo) as here:
        reward = remote(here.url, token_variable="SCORING_TOKEN")
        text = errors(await reward.score_batch(TWO), RequestRefused)
        assert here.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert "<token>" in text
    assert TOKEN not in text
    assert TOKEN not in repr(reward._config)


async def test_a_token_file_is_read_for_every_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first-of-the-tokens\n")
    async with service(computed(lengths)) as here:
        reward = remote(here.url, token_file=str(file))
        await reward.score_batch(TWO)
        file.write_text("second-of-the-tokens\n")
        await reward.score_batch(TWO)
        sent = [request.headers["authorization"] for request in here.requests]
    assert sent == ["Bearer first-of-the-tokens", "Bearer second-of-the-tokens"]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_wrong_token_is_not_tried_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORING_TOKEN", TOKEN)
    async with service(raw(status, TOKEN.encode())) as here:
        with refused(TokenRefused, "token") as raised:
            await remote(here.url, token_variable="SCORING_TOKEN").score_batch(TWO)
        assert len(here.requests) == 1
    assert TOKEN not in str(raised.value)


async def test_the_token_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORING_TOKEN", TOKEN)
    async with service(computed(lengths)) as thief, service(raw(307, b"", Location=thief.url)) as here:
        results = await remote(here.url, token_variable="SCORING_TOKEN").score_batch(TWO)
        assert "status 307, a redirect" in errors(results, RequestRefused)
        assert not thief.requests


def test_a_token_that_cannot_be_sent_is_an_error_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_token(None, None) is None
    with refused(ConfigError, "NO_SUCH_VARIABLE"):
        read_token("NO_SUCH_VARIABLE", None)
    with refused(ConfigError, tmp_path / "none", "FileNotFoundError"):
        read_token(None, str(tmp_path / "none"))
    monkeypatch.setenv("SCORING_TOKEN", "a token\r\nX-Evil: 1")
    with refused(ConfigError, "SCORING_TOKEN", "header") as raised:
        read_token("SCORING_TOKEN", None)
    assert "Evil" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:5000/get_reward",
        "ftp://host/",
        "http://",
        "http://me:pass-word@host/",
        "http://host:port/",
        "http://host/\n",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RemoteReward.Config(urls=url)
    assert "pass-word" not in str(raised.value.errors()[0]["msg"])


# --------------------------------------------------------------------------- in a run


async def test_a_failed_request_is_a_failed_trajectory_with_its_cause() -> None:
    async with service(raw(404, b"no such path")) as here:
        judge = make_judge([RemoteReward.Config(urls=here.url, window_s=0.0)])
        error = await judge.score(task(), judged("fine"))
    check_error(error, RewardError, "status 404")
    assert isinstance(error.__cause__, RequestRefused)
    assert error.__cause__.place == here.url


@pytest.mark.parametrize("protocol", ["trivium", "lightrft"])
async def test_the_service_gets_the_picture_that_the_policy_sees(protocol: Protocol) -> None:
    """Turned by its EXIF data, and black with a transparent half."""
    picture = Image.new("RGBA", (32, 16), (0, 0, 0, 255))
    picture.paste((0, 0, 0, 0), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x112] = 6
    written = io.BytesIO()
    picture.save(written, "PNG", exif=exif.tobytes())
    media = Media("image/png", written.getvalue())
    body = request(protocol, [RemoteSample("p", "c", images=[media])])
    sent = body["samples"][0]["images"][0].partition(",")[2] if protocol == "trivium" else body["images"][0][0]
    read = Image.open(io.BytesIO(base64.b64decode(sent)))
    assert read.size == (16, 32)
    difference = np.abs(np.asarray(read, int) - np.asarray(decoded(media), int))
    assert difference.mean() < 2
    assert np.asarray(read)[2, 8].tolist() == pytest.approx([255] * 3, abs=3)


async def test_a_cancelled_call_leaves_the_queue_and_a_batch_that_ends_starts_the_next() -> None:
    batches, may_end = list[list[int]](), asyncio.Event()

    async def work(items: list[int]) -> list[int]:
        batches.append(items)
        await may_end.wait()
        return items

    batcher = Batcher(work, max_batch=2, window_s=0.0, max_concurrent=1)
    first, cancelled, last = (asyncio.ensure_future(batcher(number)) for number in (1, 2, 3))
    await until(lambda: batcher.num_waiting == 2)
    cancelled.cancel()
    may_end.set()
    async with asyncio.timeout(60):
        assert [await first, await last] == [1, 3]
    assert batches == [[1], [3]]
