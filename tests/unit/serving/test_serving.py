"""The endpoint over real HTTP, a scripted engine and the memory buffer: what agents play is what is trained on."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from failing import refused
from fastapi import FastAPI

from tests.serving import NAME, Served, StoppedClock, served
from trivium.config import RewardConfig
from trivium.foundation.randomness import SampleKey
from trivium.policy import EngineFailure
from trivium.serving.bodies import RequestError
from trivium.serving.connections import ListenError, serve_app
from trivium.serving.requests import read_feedback
from trivium.serving.server import ChatServer
from trivium.tasks.drawings import png
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Group, experiences_of

PICTURES = [png(np.full((28, 28, 3), level, np.uint8)) for level in (10, 200)]
IMAGE_URL = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}

# --------------------------------------------------------------------------- custody


async def agent(here: Served, seed: int, named: bool) -> list[str]:
    """Plays at random: goes on, branches off, edits what was said, asks for several choices. Returns reply ids."""
    draw = random.Random(seed)
    labels = {"task_id": f"task-{seed // 3}", "session": f"agent-{seed}"} if named else {}
    histories: list[list[Any]] = [[{"role": "user", "content": f"{seed} begins"}]]
    ids: list[str] = []
    for turn in range(draw.randint(1, 6)):
        history = draw.choice(histories) if named else histories[-1]
        if named and turn and draw.random() < 0.2:  # whatever the policy said there, it now said something else
            history = [*history[:-2], {"role": "assistant", "content": "edited"}, history[-1]]
        n = draw.choice((1, 1, 3)) if named else 1
        done = await here.chat(*history, n=n, max_tokens=draw.randint(1, 8), **labels)
        for choice in done["choices"]:
            ids.append(choice["id"])
            message = {"role": "assistant", "content": choice["message"]["content"], "tool_calls": None}
            histories.append([*history, message, {"role": "user", "content": f"and {turn} é{draw.random()}"}])
    return ids


def check_custody(here: Served, groups: Sequence[Group]) -> int:
    """Every reply is trained on exactly once, with the engine's own ids, in the engine's own context. Returns how many
    turns continue a sequence."""
    given = Counter(
        (request.prompt_tokens.tobytes(), done.tokens.tobytes(), done.log_prob.tobytes())
        for request, done in here.engine.given
    )
    trained: Counter[tuple[bytes, bytes, bytes]] = Counter()
    continued = 0
    for group in groups:
        for trajectory in group.trajectories:
            for experience in experiences_of(group, trajectory):
                continued += len(experience.turns) - 1
                in_spans = np.zeros(len(experience.tokens), bool)
                for span in experience.turns:
                    own = slice(span.start, span.stop)
                    in_spans[own] = True
                    tokens, log_prob = experience.tokens[own], experience.rollout_log_prob[own]
                    trained[experience.tokens[: span.start].tobytes(), tokens.tobytes(), log_prob.tobytes()] += 1
                assert np.array_equal(experience.response_mask, in_spans)
    assert trained == given
    return continued


@pytest.mark.parametrize("named", [True, False])
async def test_what_agents_play_is_what_the_engine_said(tmp_path: Path, named: bool) -> None:
    size = 3 if named else 1
    async with served(tmp_path, group_size=size, groups=60, delay_s=0.001) as here:
        played = await asyncio.gather(*(agent(here, seed, named) for seed in range(48)))
        for seed, ids in enumerate(played):
            labels = {"task_id": f"task-{seed // 3}", "session": f"agent-{seed}"} if named else {"ids": ids[-1:]}
            await here.feedback(reward=seed / 7, **labels)
        groups = await here.take(48 // size)
        assert all(len(group.alive) == size for group in groups)
        # What went on from a reply continues its tokens: a good part of all turns did.
        assert check_custody(here, groups) > 40
        assert sum(len(t.turns) for group in groups for t in group.trajectories) == sum(map(len, played))
        rewards = sorted(round(t.reward * 7) for group in groups for t in group.trajectories)
        assert rewards == list(range(48))
        assert here.gateway.health() | {"sessions": 0, "open_groups": 0, "forgotten": 0} == here.gateway.health()


async def test_a_call_that_goes_on_begins_with_the_sampled_tokens(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        first = await here.chat("hello", session="s")
        reply = first["choices"][0]["message"]
        await here.chat("hello", reply, "more", session="s")
        await here.chat("hello", reply, "else", session="s")  # a branch off the same reply
        await here.chat("hello", {**reply, "content": "never said"}, "more", session="s")
        (one, said), *others = here.engine.given
        known = np.concatenate([one.prompt_tokens, said.tokens])
        goes_on = [np.array_equal(request.prompt_tokens[: len(known)], known) for request, _ in others]
        assert goes_on == [True, True, False]
        await here.feedback(session="s", reward=1)
        await here.chat("x", task_id="t")


async def test_equal_replies_are_told_apart_by_reply_to(tmp_path: Path) -> None:
    async with served(tmp_path, replies=((65, 66),)) as here:
        first, second = [await here.chat("a", task_id="t", session=name) for name in ("x", "y")]
        reply = first["choices"][0]["message"]
        one = await here.chat("a", reply, "b", reply_to=second["id"])
        assert one["choices"][0]["session"] == "y"
        error = await here.chat("a", "b", reply_to=first["id"], expect=400)
        assert "do not begin with its conversation" in error["error"]["message"]
        await here.chat("a", "b", reply_to="nothing", expect=404)


async def test_without_labels_a_conversation_is_a_trajectory_and_its_beginning_the_task(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        one, two = [await here.chat("same") for _ in range(2)]
        other = await here.chat("other")
        a, b, c = (done["choices"][0] for done in (one, two, other))
        assert a["task_id"] == b["task_id"] != c["task_id"]
        assert a["session"] != b["session"]
        again = (await here.chat("same", a["message"], "more"))["choices"][0]
        assert again["session"] == a["session"]
        answer = await here.feedback(ids=[a["id"], again["id"]], reward=1)
        assert answer == {"trajectories": 1, "groups": [{"task_id": a["task_id"], "done": 1, "of": 2}]}
        await here.feedback(id=b["id"], rewards={"x": 0.25, "y": 0.5})
        (group,) = await here.take()
        assert (group.task.taskset, group.task.task_id) == ("served", a["task_id"])
        assert [message.content for message in group.task.prompt] == ["same"]
        assert [t.rewards for t in group.trajectories] == [{"reward": 1.0}, {"x": 0.25, "y": 0.5}]
        assert [len(t.turns) for t in group.trajectories] == [2, 1]


async def test_several_choices_are_trajectories_of_one_group(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=4) as here:
        done = await here.chat("q", n=4)
        ids = [choice["id"] for choice in done["choices"]]
        assert len(set(ids)) == 4
        assert len({choice["session"] for choice in done["choices"]}) == 4
        for number, reply in enumerate(ids):
            await here.feedback(id=reply, reward=number)
        (group,) = await here.take()
        assert [t.reward for t in group.trajectories] == [0, 1, 2, 3]
        check_custody(here, [group])


async def test_the_same_run_of_an_agent_draws_the_same_samples(tmp_path: Path) -> None:
    async def play(path: Path, order: Sequence[str]) -> list[str]:
        async with served(path, groups=10) as here:
            texts = {}
            for task in order:
                done = await here.chat(f"do {task}", task_id=task, session="s", n=2)
                texts[task] = [c["message"]["content"] for c in done["choices"]]
            return [text for task in sorted(texts) for text in texts[task]]

    first = await play(tmp_path / "a", ["x", "y", "z"])
    assert await play(tmp_path / "b", ["z", "x", "y"]) == first
    assert len(set(first)) == 6


# --------------------------------------------------------------------------- OpenAI's shapes


async def test_a_stream_says_what_the_whole_answer_says(tmp_path: Path) -> None:
    async def ask(path: Path, **more: Any) -> httpx.Response:
        async with served(path) as here:
            body = {
                "model": "policy",
                "messages": [{"role": "user", "content": "x"}],
                "n": 2,
                "logprobs": True,
                "task_id": "t",
                "session": "s",
                **more,
            }
            return await here.client.post("/v1/chat/completions", json=body)

    whole = (await ask(tmp_path / "a")).json()
    stream = await ask(tmp_path / "b", stream=True, stream_options={"include_usage": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    *events, end = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []
    for index, choice in enumerate(whole["choices"]):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [*[None] * (len(mine) - 1), choice["finish_reason"]]
        entries = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]


async def test_log_probs_ids_usage_and_stop_strings(tmp_path: Path) -> None:
    async with served(tmp_path, replies=((65, 66, 67, 68),)) as here:
        done = await here.chat("x", logprobs=True, return_token_ids=True, session="s")
        choice = done["choices"][0]
        (request, completion), *_ = here.engine.given
        assert choice["token_ids"] == completion.tokens.tolist()
        assert choice["prompt_token_ids"] == request.prompt_tokens.tolist()
        assert [e["token"] for e in choice["logprobs"]["content"]] == ["A", "B", "C", "D", ""]
        assert [e["logprob"] for e in choice["logprobs"]["content"]] == completion.log_prob.tolist()
        prompt = len(request.prompt_tokens)
        assert done["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}
        assert choice["finish_reason"] == "stop"
        assert (await here.chat("x", max_completion_tokens=2, session="s"))["choices"][0]["finish_reason"] == "length"
        cut = (await here.chat("x", stop=["C"], session="s"))["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == ("AB", "stop")
        await here.chat("x", cut["message"], "more", session="s")  # the stop string was sampled, so it is kept
        request, _ = here.engine.given[-1]
        stopped, said = here.engine.given[-2]
        known = np.concatenate([stopped.prompt_tokens, said.tokens])
        assert said.tokens.tolist() == [65, 66, 67]
        assert np.array_equal(request.prompt_tokens[: len(known)], known)
        assert (await here.client.get("/v1/models")).json()["data"][0]["id"] == "policy"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt"}, "model"),
    ({"temprature": 1}, "temprature"),
    ({"temperature": 0.5}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"max_tokens": 9}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"seed": 1}, "seed"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE_URL]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"metadata": {"colour": "red"}}, "metadata"),
    ({"metadata": {"task_id": "a"}, "task_id": "b"}, "task_id"),
    ({"session": ""}, "session"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"columns": [1]}, "columns"),
    ({"evaluation": "maybe"}, "evaluation"),
    ({"row": {"taskset": "a", "index": 0}}, "row"),
    ({"task_id": "t", "evaluation": True, "row": {"taskset": "a", "index": 0}}, "row"),
    ({"task_id": "t", "row": {"taskset": "a"}}, "row"),
    ({"task_id": "t", "row": "a row"}, "row"),
    ({"task_id": "t", "row": '{"taskset": "\\ud800", "index": 0}'}, "row"),
    ({"task_id": "t", "n": 2, "row": {"taskset": "a", "index": 0}}, "n"),
    ({"task_id": "t", "row": {"taskset": "a", "index": True}}, "row"),
    ({"task_id": "t", "row": {"taskset": "", "index": 0}}, "row.taskset"),
]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    config = TinyVisionModel.Config(layers=1, hidden=32, mlp=8, vision_layers=1, alphabet="bytes")
    return renderer_of(TinyVisionModel(config, seed=0).materialize(tmp_path_factory.mktemp("vision") / "model"))


async def test_images_are_data_uris_and_become_part_of_the_experience(tmp_path: Path, vision: ChatRenderer) -> None:
    """Two pictures of one size are two conversations; a URL is refused by name, a damaged picture is a 400."""

    def asked(number: int) -> dict[str, Any]:
        uri = f"data:image/png;base64,{base64.b64encode(PICTURES[number]).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": uri, "detail": "low"}}, {"type": "text", "text": "what?"}]
        return {"role": "user", "content": parts}

    async with served(tmp_path, renderer=vision, groups=2, group_size=1) as here:
        for number in (0, 1):
            said = (await here.chat(asked(number)))["choices"][0]["message"]["content"]
            history = [asked(number), {"role": "assistant", "content": said}, {"role": "user", "content": "sure?"}]
            await here.feedback(ids=[(await here.chat(*history))["choices"][0]["id"]], reward=1.0)
        groups = await here.take(2)
        (first,), (second,) = (experiences_of(group, group.trajectories[0]) for group in groups)
        assert [[item.data for item in e.media] for e in (first, second)] == [[PICTURES[0]], [PICTURES[1]]]
        assert [len(e.turns) for e in (first, second)] == [2, 2]
        assert groups[0].task.task_id != groups[1].task.task_id
        assert np.array_equal(*(group.trajectories[0].turns[0].prompt_tokens for group in groups))
        fetched = await here.chat({"role": "user", "content": [IMAGE_URL]}, expect=400)
        assert "not downloaded" in fetched["error"]["message"]
        cut = f"data:image/png;base64,{base64.b64encode(PICTURES[0][:60]).decode()}"
        damaged = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": cut}}]}
        assert "damaged" in (await here.chat(damaged, expect=400))["error"]["message"]
    async with served(tmp_path / "text") as here:
        assert "text only" in (await here.chat(asked(0), expect=400))["error"]["message"]


async def test_what_cannot_be_done_is_refused_in_three_parts(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        for change, param in REFUSED:
            body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], **change}
            answer = await here.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == (404 if param == "model" else 400), (change, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param
            assert all(f"{part}: " in error["message"] for part in ("asked", "found", "do")), error
        for raw in (b"", b"[]", b"{", b'{"n": NaN}'):
            assert (await here.client.post("/v1/chat/completions", content=raw)).status_code == 400
        long = await here.chat("x" * 5000, expect=400)
        assert long["error"]["code"] == "context_length_exceeded"
        neutral = dict.fromkeys(("tools", "seed", "top_p", "user", "metadata", "stop", "n"))
        await here.chat({"role": "user", "content": [{"type": "text", "text": "x"}]}, temperature=1, **neutral)
        await here.eventually(sessions=1, open_groups=1)  # what was refused left nothing behind


async def test_labels_may_come_in_headers_metadata_and_user(tmp_path: Path) -> None:
    async with served(tmp_path, groups=8) as here:
        body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
        headers = {"X-Task-Id": "t", "X-Session": "s"}
        by_header = await here.client.post("/v1/chat/completions", json=body, headers=headers)
        by_metadata = await here.chat("x", metadata={"task_id": "t", "session": "s"})
        by_body = await here.chat("x", task_id="t", session="s")
        by_user = await here.chat("x", task_id="t", user="s")
        for done in (by_header.json(), by_metadata, by_body, by_user):
            assert (done["choices"][0]["task_id"], done["choices"][0]["session"]) == ("t", "s")
        await here.eventually(sessions=1)
        row = {"taskset": "train", "epoch": 0, "index": 1}
        for sent in (row, json.dumps(row)):  # OpenAI's clients send texts only in `metadata`
            await here.chat("y", metadata={"task_id": "u", "session": "s", "row": sent})
        await here.eventually(sessions=2)


async def test_an_evaluation_is_sampled_as_it_likes_and_leaves_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, groups=1, staleness=0) as here:
        done = await here.chat("x", evaluation=True, temperature=0, max_tokens=100)
        await here.chat("x", done["choices"][0]["message"], "y", metadata={"evaluation": "true"}, top_p=0.5)
        assert [r.sampling.temperature for r, _ in here.engine.given] == [0.0, 1.0]
        assert here.gateway.health()["open_groups"] == 0
        error = await here.feedback(id=done["id"], reward=1, expect=400)
        assert "evaluation" in error["error"]["message"]


# --------------------------------------------------------------------------- feedback


async def test_feedback_counts_exactly_once(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=2) as here:
        done = await here.chat("x", session="s")
        for said, status in (
            ({"id": "nobody", "reward": 1}, 404),
            ({"session": "nobody", "reward": 1}, 404),
            ({"reward": 1}, 400),
            ({"session": "s"}, 400),
            ({"session": "s", "reward": "high"}, 400),
            ({"session": "s", "rewrad": 1}, 400),
            ({"session": "s", "reward": 1, "failure": "x"}, 400),
            ({"ids": [done["id"], "nobody"], "reward": 1}, 404),
        ):
            await here.feedback(expect=status, **said)
        await here.feedback(session="s", reward=1)
        assert "once" in (await here.feedback(session="s", reward=1, expect=409))["error"]["message"]
        await here.feedback(id=done["id"], reward=1, expect=409)
        await here.chat("x", session="s", expect=409)


async def test_feedback_waits_for_calls_in_progress(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        await here.chat("x", session="s")
        here.engine.may_answer.clear()
        asking = asyncio.create_task(here.chat("y", session="s"))
        await here.eventually(in_flight=1)
        await here.feedback(session="s", reward=1, expect=409)
        here.engine.may_answer.set()
        await asking
        await here.feedback(session="s", reward=1)


async def test_a_failure_is_recorded_and_not_scored(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        for name in "ab":
            await here.chat("x", task_id="t", session=name)
        await here.feedback(task_id="t", session="a", failure="the browser crashed")
        await here.feedback(task_id="t", session="b", reward=2)
        (group,) = await here.take()
        assert [t.failure.message for t in group.trajectories if t.failure] == ["the browser crashed"]
        assert [t.reward for t in group.alive] == [2.0]


async def test_reward_functions_judge_what_agents_close(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def length(prompt, completion, answer):\n    return float(len(completion) == answer) + len(prompt)\n"
    )
    rewards = [RewardConfig(kind=f"{tmp_path}/mine.py:length", weight=0.5)]
    async with served(tmp_path / "r", rewards=rewards, replies=((65, 66),)) as here:
        await here.chat("abc", task_id="t", session="a", columns={"answer": 2})
        await here.chat("abc", task_id="t", session="b")
        clash = await here.feedback(task_id="t", session="b", columns={"answer": 3}, expect=400)
        assert "column 'answer'" in clash["error"]["message"]
        await here.feedback(task_id="t", session="b", rewards={"length": 1}, expect=400)
        await here.feedback(task_id="t", session="a")
        await here.feedback(task_id="t", session="b", reward=10)
        (group,) = await here.take()
        assert [dict(t.rewards) for t in group.trajectories] == [{"length": 2.0}, {"reward": 10.0, "length": 2.0}]
        await here.chat("abc", task_id="u", session="a")
        lacking = await here.feedback(task_id="u", session="a", expect=400)
        assert "answer" in lacking["error"]["message"]


# --------------------------------------------------------------------------- groups


async def test_a_row_of_a_taskset_samples_with_the_keys_of_a_run_that_reads_it(tmp_path: Path) -> None:
    """Whatever the order of calls and of feedback, and also without the name of a session."""
    async with served(tmp_path, group_size=2) as here:

        async def chat(index: int, *messages: Any, expect: int = 200, **more: Any) -> dict[str, Any]:
            row = {"taskset": "train", "epoch": 3, "index": index}
            return await here.chat(*messages, expect=expect, task_id="7", row=row, **more)

        second = (await chat(1, "x", session="b"))["choices"][0]
        for lost in (await chat(1, "x", expect=400), await chat(0, "x", session="b", expect=400)):
            assert lost["error"]["param"] == "row"
        first = (await chat(0, "x"))["choices"][0]
        await chat(0, "x", first["message"], "y" * 5000, expect=400)  # no call: its prompt is too long
        again = (await chat(0, "x", first["message"], "y"))["choices"][0]
        await chat(1, "x", second["message"], "y", session="b")
        row = {"taskset": "train", "epoch": 3, "index": 1}
        lost = await here.feedback(task_id="7", session="b", row={**row, "index": 0}, reward=1, expect=400)
        assert lost["error"]["param"] == "row"
        # Agents send the same labels with their calls and with the feedback.
        assert (await here.feedback(task_id="7", session="b", row=row, reward=1))["trajectories"] == 1
        await here.feedback(id=again["id"], reward=0)
        (group,) = await here.take()
        keys = [request.key for request, _ in here.engine.given]
        members = [SampleKey(0, "stage-0", "train", "7", 3, index) for index in (1, 0, 0, 1)]
        assert keys == [key.child(call) for key, call in zip(members, (0, 0, 1, 1), strict=True)]
        assert [(t.index, t.reward, len(t.turns)) for t in group.trajectories] == [(0, 0.0, 2), (1, 1.0, 2)]


async def test_a_row_is_trained_on_once(tmp_path: Path) -> None:
    """While its group is open, and after it was submitted; one that is not trained on may be rolled out again."""
    async with served(tmp_path, group_size=2, min_members=2) as here:

        async def begin(session: str, index: int, epoch: int = 0, expect: int = 200) -> None:
            row = {"taskset": "train", "epoch": epoch, "index": index}
            done = await here.chat("x", task_id="7", session=session, row=row, expect=expect)
            assert expect == 200 or done["error"]["param"] == "row"

        await begin("outside", 2, expect=400)
        await begin("a", 0)
        await begin("b", 1)
        await begin("again", 0, expect=400)  # its group is full, and this is not the first member of another one
        await begin("next epoch", 0, epoch=1)
        for session in ("a", "b", "next epoch"):
            await here.feedback(task_id="7", session=session, reward=1)
        await here.take()
        await begin("again", 0, expect=400)
        await here.client.post("/commit", json={"task_id": "7"})  # one member is less than `min_members`
        await here.eventually(groups=2)
        await begin("again", 0, epoch=1)


async def test_the_record_of_a_row_has_its_index(tmp_path: Path) -> None:
    """Also without the members before it: a replay samples with the key of this index."""
    async with served(tmp_path, group_size=4) as here:
        for index in (3, 1):
            row = {"taskset": "train", "epoch": 0, "index": index}
            labels: dict[str, Any] = {"task_id": "7", "session": str(index), "row": row}
            await here.chat("x", **labels)
            await here.feedback(reward=index, **labels)
        await here.client.post("/commit")
        (group,) = await here.take()
        assert [(t.index, t.reward) for t in group.trajectories] == [(1, 1.0), (3, 3.0)]


async def test_a_commit_closes_a_group_now(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=4) as here:
        for name in "abc":
            await here.chat("x", task_id="t", session=name)
        assert (await here.client.post("/commit", json={"task_id": "t"})).status_code == 404
        await here.feedback(task_id="t", session="a", reward=1)
        await here.feedback(task_id="t", session="b", reward=2)
        committed = await here.client.post("/commit")
        assert committed.json() == {"groups": 1, "trajectories": 2, "dropped": 1}
        (group,) = await here.take()
        assert [t.reward for t in group.trajectories] == [1, 2]
        gone = await here.feedback(task_id="t", session="c", reward=3, expect=410)
        assert "committed" in gone["error"]["message"]
        assert here.gateway.health()["forgotten"] == 1


async def test_what_is_not_heard_of_is_forgotten_and_its_slot_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StoppedClock(monkeypatch)
    async with served(tmp_path, group_size=2, min_members=2, idle_s=0.2, groups=1, staleness=0) as here:
        for name in ("kept", "lost"):
            await here.chat("x", task_id="t", session=name)
        await here.feedback(task_id="t", session="kept", reward=1)
        clock.now += 0.25
        await here.eventually(forgotten=1)
        clock.now += 0.25  # the group is dropped as long after its last session
        await here.eventually(groups=1)
        assert (await here.buffer.counts())["dropped"] == 1
        await here.chat("y", session="next")  # the slot was given up, so another is admitted
        clock.now += 0.25
        await here.eventually(forgotten=2, sessions=0)
        clock.now += 0.25
        await here.eventually(groups=2)


async def test_a_session_that_takes_too_long_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppedClock(monkeypatch)
    async with served(tmp_path, group_size=1, deadline_s=3.0) as here:
        await here.chat("x", session="s")
        clock.now += 3.1
        await here.eventually(failed=1)
        late = await here.feedback(session="s", reward=1, expect=410)
        assert "workflow.deadline_s" in late["error"]["message"]
        (group,) = await here.take()
        assert group.trajectories[0].failure is not None
        assert group.trajectories[0].failure.side == "deadline"
        assert not group.trajectories[0].failure.of_rewards


async def test_agents_ahead_of_the_trainer_wait_and_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoppedClock(monkeypatch)
    async with served(tmp_path, group_size=1, groups=1, staleness=0, deadline_s=2.0) as here:
        await here.chat("a", task_id="a", session="s")
        await here.feedback(task_id="a", session="s", reward=1)
        body = {"model": "policy", "messages": [{"role": "user", "content": "b"}]}
        answer = await here.client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "trainer" in answer.json()["error"]["message"]
        await here.eventually(waiting_groups=0, sessions=0)
        waits = here.gateway.sessions
        monkeypatch.setattr(waits, "_options", replace(waits._options, deadline_s=60.0))
        waiting = asyncio.create_task(here.chat("b"))
        await here.eventually(waiting_groups=1)
        await here.take()
        await here.buffer.advance(NAME, 1)
        await waiting


async def test_a_client_that_goes_away_leaves_its_slot(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, groups=1, staleness=0) as here:
        here.engine.may_answer.clear()
        with pytest.raises(httpx.ReadTimeout):
            await here.client.post(
                "/v1/chat/completions",
                timeout=httpx.Timeout(60, read=0.1),
                json={"model": "policy", "messages": [{"role": "user", "content": "a"}], "session": "s"},
            )
        await here.eventually(sessions=0, open_groups=0, in_flight=0)
        here.engine.may_answer.set()
        done = await here.chat("b", task_id="other")
        assert done["choices"][0]["session"] == "0.0.0"
        assert len(here.engine.given) == 1


async def test_sessions_that_became_too_stale_end_and_say_so(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, groups=1, staleness=1) as here:
        await here.chat("old", task_id="old", session="s")
        for version in range(2):
            await here.chat("new", task_id=f"{version}", session="s")
            await here.feedback(task_id=f"{version}", session="s", reward=1)
            await here.take(1, version)
            await here.buffer.advance(NAME, version + 1)
        await here.eventually(called_off=1)
        for answer in (
            await here.feedback(task_id="old", session="s", reward=1, expect=410),
            await here.chat("old", task_id="old", session="s", expect=410),
        ):
            assert "too stale" in answer["error"]["message"]


# --------------------------------------------------------------------------- the server


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path, api_key="secret") as here:
        await here.chat("x")
        here.client.headers["Authorization"] = "Bearer wrong"
        wrong = await here.chat("x", expect=401)
        assert wrong["error"]["code"] == "invalid_api_key"
        for path in ("/feedback", "/commit"):
            assert (await here.client.post(path, json={})).status_code == 401
        assert (await here.client.get("/v1/models")).status_code == 401
        assert (await here.client.get("/health")).status_code == 200


async def test_without_weights_clients_are_sent_away_for_a_moment(tmp_path: Path) -> None:
    async with served(tmp_path, loaded=False) as here:
        error = await here.chat("x", expect=503)
        assert error["error"]["code"] == "not_loaded"
        assert (await here.client.get("/health")).json()["status"] == "loading"
        assert here.announced == []
        here.synchronizer.adopted(NAME, 0)
        await here.eventually(loaded=True)
        assert here.announced == [True]
        await here.chat("x", evaluation=True)


async def test_a_broken_engine_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    async with served(tmp_path, broken=True, break_after=1) as here:
        await here.chat("x")
        error = await here.chat("y", expect=500)
        assert error["error"]["code"] == "engine_failure"
        await asyncio.wait([here.running], timeout=60)
        with pytest.raises(ExceptionGroup) as raised:
            here.running.result()
        assert raised.group_contains(EngineFailure)
        await here.chat("z", expect=503)


async def test_feedback_is_refused_as_soon_as_a_submission_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[int] = []
    async with served(tmp_path, group_size=1, broken=True) as here:
        ids = {task: (await here.chat("x", task_id=task))["choices"][0]["id"] for task in "ab"}

        def end_the_other() -> None:
            try:
                here.gateway.sessions.feedback(read_feedback({"ids": [ids["b"]], "reward": 1}, {}))
            except RequestError as error:
                refusals.append(error.status)

        async def put(*_: object) -> None:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, end_the_other)  # after the end of this task, before its task group ends
            raise OSError("no space left")

        monkeypatch.setattr(here.buffer, "put", put)
        await here.feedback(ids=[ids["a"]], reward=1)
        await asyncio.wait([here.running], timeout=60)
    assert refusals == [503]


async def test_the_end_of_the_training_answers_who_still_waits(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, groups=1, staleness=0) as here:
        await here.chat("a", task_id="a")
        waiting = asyncio.create_task(here.chat("b", expect=503))
        await here.eventually(waiting_groups=1)
        await here.buffer.close()
        assert "the training is over" in (await waiting)["error"]["message"]
        await asyncio.wait_for(here.running, 60)


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        port = here.client.base_url.port
        assert port is not None
        with refused(ListenError, f"127.0.0.1:{port}", "serve.port"):
            async with serve_app(ChatServer(here.gateway, "policy", None).app, "127.0.0.1", port):
                raise AssertionError


async def test_answers_on_their_way_arrive_though_the_end_is_said_twice() -> None:
    app, urls = FastAPI(), asyncio.Queue[str]()
    arrived, leave, leaves, answer = (asyncio.Event() for _ in range(4))

    @app.get("/slow")
    async def slow() -> str:
        arrived.set()
        await answer.wait()
        return "there"

    async def serve() -> None:
        async with serve_app(app, "127.0.0.1", 0) as url:
            urls.put_nowait(url)
            await leave.wait()
            leaves.set()

    serving = asyncio.create_task(serve())
    async with httpx.AsyncClient(base_url=await urls.get()) as client:
        asking = asyncio.create_task(client.get("/slow"))
        await asyncio.wait_for(arrived.wait(), 60)
        leave.set()
        await asyncio.wait_for(leaves.wait(), 60)
        serving.cancel()
        answer.set()
        assert (await asking).json() == "there"
        await asyncio.wait([serving], timeout=60)
        assert serving.cancelled()
