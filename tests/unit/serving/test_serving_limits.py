"""What clients of the endpoint cannot do: end the run, use up its descriptors or memory, or touch others' sessions."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from failing import refused

from tests.serving import RENDERER, Babbler, Served, StoppedClock, served
from tests.waiting import until
from trivium.foundation.errors import ConfigError, RolloutError
from trivium.foundation.randomness import SampleKey
from trivium.policy import Policy
from trivium.serving import bodies, connections
from trivium.serving.bodies import RequestError
from trivium.serving.connections import ListenError, RepeatedLines, connection_cap
from trivium.serving.requests import read_chat
from trivium.serving.session_records import CompletionNode, Session
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Completion, Message, Prompt, Request, Sampling, StopReason, Turn

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n"
"""The first lines of a header that never ends."""


async def post(here: Served, path: str, raw: str) -> httpx.Response:
    return await here.client.post(path, content=raw.encode(errors="surrogatepass"))


# --------------------------------------------------------------------------- values


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


UNRECORDABLE = [
    ('"columns": {"x": 1180591620717411303424}', "64 bits"),
    ('"columns": {"x": 1e400}', "too large for a float"),
    ('"columns": {"x": ' + nested(600) + "}", "nested"),
    ('"columns": {"x": ' + nested(100_000) + "}", "not JSON"),
    ('"columns": {"x": "\\ud800"}', "surrogate"),
    ('"columns": {"\\ud800": 1}', "surrogate"),
    ('"columns": {"x": [{"y": ["\\udfff"]}]}', "surrogate"),
    ('"task_id": "\\ud800"', "surrogate"),
    ('"task_id": "a\\u0000b"', "NUL"),
    ('"task_id": "' + "x" * 1000 + '"', "characters"),
    ('"session": 5', "as text"),
]


async def test_values_that_no_run_can_record_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1) as here:
        for values, reason in UNRECORDABLE:
            body = f'{{"model": "policy", "messages": [{{"role": "user", "content": "x"}}], {values}}}'
            answer = await post(here, "/v1/chat/completions", body)
            assert answer.status_code == 400, (values[:80], answer.text)
            assert reason in answer.json()["error"]["message"]
        lone = await post(
            here, "/v1/chat/completions", '{"model": "policy", "messages": [{"role": "user", "content": "\ud800"}]}'
        )
        assert lone.status_code == 400
        await here.eventually(sessions=0, open_groups=0)
        done = await here.chat("x", session="s", task_id="t")
        rewards = [
            '"reward": 1e39',
            '"reward": 1e400',
            '"reward": 1' + "0" * 400,
            '"rewards": {"\\ud800": 1}',
            '"rewards": {"": 1}',
        ]
        for values in [value for value, _ in UNRECORDABLE[:7]] + rewards:
            answer = await post(here, "/feedback", f'{{"id": "{done["id"]}", {values}}}')
            assert answer.status_code == 400, (values[:80], answer.text)
        await here.feedback(session="s", task_id="t", reward=1.5, columns={"x": [1, {"y": "é"}], "big": 2**63 - 1})
        (group,) = await here.take()
        assert group.trajectories[0].reward == 1.5
        assert group.task.columns == {"x": [1, {"y": "é"}], "big": 2**63 - 1}


async def test_an_evaluation_below_the_lowest_temperature_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        for temperature in (1e-45, 1e-300, 1e-7):
            error = await here.chat("x", evaluation=True, temperature=temperature, expect=400)
            assert error["error"]["param"] == "temperature"
        await here.chat("x", evaluation=True, temperature=1e-6)
        many = [{"role": role, "content": ""} for role in ("user", "assistant")] * 1000
        assert (await here.chat(*many, "x", expect=400))["error"]["param"] == "messages"


# --------------------------------------------------------------------------- connections


async def half_open(here: Served, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx.URL(here.url)
    streams = [await asyncio.open_connection(url.host, url.port) for _ in range(count)]
    for _, writer in streams:
        writer.write(HALF)
    return streams


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What the server sent before it closed the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""


async def test_a_header_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE_S", 1.0)
    async with served(tmp_path, delay_s=1.5) as here:
        streams = await half_open(here, 3)
        asking = asyncio.create_task(here.chat("x", session="s"))  # takes longer: only a header has the limit
        _, drips = streams[0]
        for byte in b"X-Slow: 1":
            drips.write(bytes([byte]))  # each byte is progress, but not a header
            await asyncio.sleep(0.05)  # slower than the network, faster than the limit
        assert [await ended(reader) for reader, _ in streams] == [b""] * 3
        await here.feedback(id=(await asking)["id"], reward=1)
        for _, writer in streams:
            writer.close()


async def test_a_second_header_that_never_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_IDLE_S", 1.0)
    async with served(tmp_path) as here:
        ((reader, writer),) = await half_open(here, 1)
        writer.write(b"Content-Length: 0\r\n\r\n" + HALF)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)).split()[1] == b"400"
        await ended(reader)
        writer.close()


async def test_idle_connections_make_way_for_requests(tmp_path: Path) -> None:
    async with served(tmp_path, max_connections=3) as here:
        streams = await half_open(here, 20)
        for number in range(4):
            await here.chat("x", session=f"{number}", task_id=f"{number % 2}")
        closed = [asyncio.ensure_future(ended(reader)) for reader, _ in streams]
        await asyncio.wait(closed[:17], timeout=60)
        assert sum(task.done() for task in closed) >= 17
        for task, (_, writer) in zip(closed, streams, strict=True):
            task.cancel()
            writer.close()


class Waits(Babbler):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        await self.may_answer.wait()
        return await super().generate(request)


async def test_connections_in_use_are_kept_and_others_refused(tmp_path: Path) -> None:
    engine = Waits()
    async with served(tmp_path, max_connections=1, policy=engine) as here:
        asking = asyncio.create_task(here.chat("x", session="s"))
        await until(lambda: here.gateway.health()["in_flight"])
        async with httpx.AsyncClient(base_url=here.url) as other:
            answer = await other.get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        engine.may_answer.set()
        await asking


def test_descriptors_are_kept_for_the_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def allow(files: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))

    assert connection_cap(16) == 16
    allow(resource.RLIM_INFINITY)
    assert connection_cap(16) == 16
    allow(1024)
    with caplog.at_level(logging.WARNING, "trivium"):
        assert 8 < connection_cap(4096) < 1024 - 256
    assert "the process may open 1024 files" in caplog.text
    allow(300)
    with refused(ListenError, "512", "ulimit"):
        connection_cap(512)


def test_repeated_lines_are_limited_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = RepeatedLines()

    def shown(text: str) -> str | None:
        record = logging.LogRecord("uvicorn.error", logging.WARNING, __file__, 1, text, None, None)
        return record.getMessage() if limit.filter(record) else None

    lines = [shown("socket.accept() out of system resource\nsocket: <1>") for _ in range(1000)]
    assert sum(line is not None for line in lines) == 5
    assert shown("Invalid HTTP request received.") == "Invalid HTTP request received."
    monkeypatch.setattr(connections, "_LOG_S", -1.0)
    assert "995 more" in (shown("socket.accept() out of system resource\nsocket: <1>") or "")


# --------------------------------------------------------------------------- bodies


async def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, max_body_bytes=2000) as here:
        error = await here.chat("x" * 3000, expect=413)
        assert "serve.max_body_bytes" in error["error"]["message"]
        await here.chat("x" * 100)


async def test_bodies_that_do_not_arrive_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_BODY_S", 0.2)
    async with served(tmp_path, max_body_bytes=2000) as here:
        half = HALF + b"Content-Length: 1000\r\n\r\n" + b"x" * 500
        streams = await half_open(here, 2)
        for _, writer in streams:
            writer.write(half.removeprefix(HALF))
        heads = [await asyncio.wait_for(reader.readuntil(b"\r\n"), 30) for reader, _ in streams]
        assert [head.split()[1] for head in heads] == [b"408"] * 2
        for _, writer in streams:
            writer.close()


async def test_the_memory_of_bodies_that_arrive_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_BODIES", 2)
    async with served(tmp_path, max_body_bytes=2000) as here:
        streams = await half_open(here, 3)
        for _, writer in streams:
            writer.write(b"Content-Length: 1000\r\n\r\n" + b"x" * 999)
        full = await here.chat("x" * 1500, expect=503)
        assert full["error"]["code"] == "too_many_bodies"
        for _, writer in streams:
            writer.close()
            await writer.wait_closed()

        async def answered() -> bool:
            body = {"model": "policy", "messages": [{"role": "user", "content": "x" * 100}]}
            return (await here.client.post("/v1/chat/completions", json=body)).status_code == 200

        await until(answered)


class SlowRenderer(ChatRenderer):
    """Encodes nothing before it is allowed to."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer("bytes"))
        self.began, self.allowed = threading.Event(), threading.Event()

    def render(self, messages: Sequence[Message]) -> Prompt:
        self.began.set()
        assert self.allowed.wait(120)
        return super().render(messages)


async def test_a_prompt_far_beyond_the_context_is_not_even_encoded(tmp_path: Path) -> None:
    renderer = SlowRenderer()
    async with served(tmp_path, renderer=renderer) as here:
        error = await here.chat("x y" * 1_300_000, expect=400)
        assert error["error"]["code"] == "context_length_exceeded"
        assert not renderer.began.is_set()


async def test_a_prompt_that_takes_long_to_encode_holds_up_no_other_request(tmp_path: Path) -> None:
    renderer = SlowRenderer()
    async with served(tmp_path, renderer=renderer) as here:
        asking = asyncio.create_task(here.chat("x", session="s"))
        assert await asyncio.to_thread(renderer.began.wait, 60)
        assert (await here.client.get("/health")).json()["in_flight"] == 1
        renderer.allowed.set()
        await asking


# --------------------------------------------------------------------------- sessions


def test_a_conversation_of_many_turns_is_recorded() -> None:
    """Deeper than Python's stack, with a branch off its first completion that is the newest."""
    policy = Policy(Babbler(), RENDERER, Sampling(1), SampleKey(0, "served-0", "served", "t"), 4096)
    session, count = Session(None, "t", None, 0.0), 3000
    node: CompletionNode | None = None
    empty = np.zeros(1, np.int32)
    for order in range(count + 1):
        turn = Turn(empty, empty, empty, empty, StopReason.EOS, str(order))
        parent = session.trees[0] if order == count else node
        node = CompletionNode(str(order), session, policy, turn, (Message("assistant", str(order)),), parent=parent)
        session.record(node)
    assert session.trees[0].newest == count
    assert [turn.text for turn in session.trajectory(0).turns] == [str(order) for order in range(count + 1)]


async def test_a_session_with_a_secret_is_touched_by_nobody_else(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=2) as here:
        mine: dict[str, Any] = {"task_id": "t", "session": "s", "secret": "mine"}
        done = await here.chat("x", **mine)
        reply = done["choices"][0]["message"]
        for change in ({}, {"secret": "yours"}):
            labels = {"task_id": "t", "session": "s", **change}
            assert (await here.chat("x", reply, "y", **labels, expect=403))["error"]["code"] == "wrong_secret"
            await here.feedback(**labels, reward=-1, expect=403)
            await here.feedback(id=done["id"], **change, reward=-1, expect=403)
        await here.chat("x", reply, "y", **mine)
        body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
        headers = {"X-Task-Id": "t", "X-Session": "s", "X-Session-Secret": "mine"}
        assert (await here.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        await here.feedback(**mine, reward=1)
        for change in ({"task_id": "t"}, {"task_id": "t", "secret": "yours"}):
            assert (await here.client.post("/commit", json=change)).status_code == 403
        assert (await here.client.post("/commit", json={})).json()["groups"] == 0
        committed = await here.client.post("/commit", json={"task_id": "t"}, headers={"X-Session-Secret": "mine"})
        assert committed.json() == {"groups": 1, "trajectories": 1, "dropped": 0}
        (group,) = await here.take()
        assert group.trajectories[0].reward == 1
        assert "mine" not in json.dumps(dict(group.task.columns)) + group.task.task_id


async def test_a_conversation_is_continued_with_its_secret_only(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        first = (await here.chat("x", secret="mine"))["choices"][0]
        other = (await here.chat("x", first["message"], "y"))["choices"][0]
        again = (await here.chat("x", first["message"], "y", secret="mine"))["choices"][0]
        assert again["session"] == first["session"] != other["session"]


async def test_secrets_can_be_required(tmp_path: Path) -> None:
    async with served(tmp_path, require_secret=True) as here:
        assert (await here.chat("x", session="s", expect=400))["error"]["param"] == "secret"
        await here.chat("x", session="s", secret="mine")


async def test_a_session_of_one_call_is_dropped_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppedClock(monkeypatch)
    async with served(tmp_path, group_size=2, unstarted_idle_s=2.0) as here:
        for turn in ("x", "y"):
            await here.chat(turn, session="agent", task_id="t")
        lost = await here.chat("x", session="visitor", task_id="t")
        clock.now += 2.1
        await here.eventually(forgotten=1, sessions=1)
        error = await here.feedback(id=lost["id"], reward=1, expect=410)
        assert "serve.unstarted_idle_s" in error["error"]["message"]
        await here.feedback(session="agent", task_id="t", reward=1)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        (["serve.host=0.0.0.0", "serve.key_variable=null"], "serve.key_variable"),
        (["serve.host='::'", "serve.key_variable=null"], "serve.key_variable"),
        (["serve.host=my.machine", "serve.key_variable=null"], "serve.key_variable"),
        (["run.mode=train", "serve.linger_s=5"], "serve.linger_s"),
        (["serve.linger_s=4000"], "serve.linger_s"),
        (["evaluation.sampling.temperature=1e-45"], "evaluation.sampling.temperature"),
    ],
)
def test_what_the_section_cannot_mean_is_refused(values: list[str], where: str) -> None:
    from trivium.config import load_config

    example = Path(__file__).parents[3] / "examples" / "agent.yaml"
    with refused(ConfigError, where):
        load_config(example, values)
    load_config(example, ["serve.host=0.0.0.0"])  # with a key
    load_config(example, ["serve.host=localhost", "serve.key_variable=null"])


# --------------------------------------------------------------------------- what is recorded


class FailsThird(Babbler):
    """An engine whose third completion fails, after the others."""

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        if len(self.given) == 3:
            raise RolloutError("a completion", "a scripted failure", "try another")
        return done


async def test_a_request_records_all_of_its_choices_or_none(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, policy=FailsThird()) as here:
        labels = {"session": "s", "task_id": "t"}
        await here.chat("x", n=3, expect=400, **labels)
        assert not here.gateway.sessions.active
        await here.chat("x", n=2, **labels)
        (session,) = here.gateway.sessions.active
        assert [node.order for node in session.completions] == [0, 1]
        assert session.calls == 0


class EndsSession(Babbler):
    """An engine after whose completion the session ends, before the gateway has seen the completion."""

    end: Callable[[], None]

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        asyncio.get_running_loop().call_soon(self.end)
        return done


@pytest.mark.parametrize("ends", [False, True], ids=["cancelled before it starts", "its session ends"])
async def test_a_call_that_is_over_is_not_recorded_and_not_in_progress(ends: bool, tmp_path: Path) -> None:
    engine = EndsSession()
    async with served(tmp_path, group_size=1, policy=engine) as here:
        gateway, body = here.gateway, {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
        request = read_chat(body, {}, "policy", gateway.explorer.sampling, gateway.recorded)
        calling = asyncio.create_task(gateway.complete(request))
        await asyncio.sleep(0)
        (session,) = gateway.sessions.active
        engine.end = lambda: gateway.sessions._drop(session, "its group was committed")
        if not ends:
            calling.cancel()
        await asyncio.wait([calling])
        if ends:
            assert isinstance(calling.exception(), RequestError)
        assert (session.calls, session.completions, len(here.engine.given)) == (0, [], int(ends))
        assert not gateway.sessions.active
