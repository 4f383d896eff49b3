"""Fuzzed episodes of agents with tools over every protocol: what is trained on is what the engine sampled, token for
token, and an edited history starts another sequence.

`TRIVIUM_EPISODES=1000` runs that many episodes, and half as many with images and the engine of a tiny model.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from training_parts import make_engine
from vision_parts import picture

from tests.serving import RENDERER, VOCABULARY, Babbler, Served, anthropic, served
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import uniforms
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Batch, Completion, Group, Request, experiences_of, forks_of

EPISODES = int(os.environ.get("TRIVIUM_EPISODES", "24"))
IMAGE_EPISODES = (EPISODES + 1) // 2
PICTURES = [picture(seed, *size).data for seed, size in enumerate([(28, 28), (14, 28), (28, 14), (5, 9)])]
AT_ONCE = 8
NAMES = ("weather", "search_1", "empty")
WORDS = ["Warm?", "  \n", "größer 🌍", "<think>", "<tool_call>{}", "{"]
RESULT = "21 °C"
PIECES = [
    "<think>\nIt is winter.\n</think>\n\n",
    "<think></think>",
    "Let me see.\n",
    " Grüße 🌍, naïve \u202e text ",
    "\n\n  ",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    '<tool_call>{"name":"search_1",  "arguments":{"q":"</tool_call>","n":[1,2.50]}}</tool_call>',
    '<tool_call>{"name": "empty", "parameters": {}}</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>',
    "<tool_call>",
    '{"name": "weather", "arguments": {"city": "A"}}',
]


class Agentic(Babbler):
    """Writes pieces of text, calls and arbitrary ids, drawn from the key, each token with a probability of its own."""

    def _choose(self, request: Request, version: int) -> Sequence[int]:
        rng = random.Random(request.key.digest())
        if rng.random() < 0.15:
            return [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))]
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 5)))
        if rng.random() < 0.5:  # as most policies write
            text = rng.choice([*PIECES[:1], ""]) + rng.choice([*PIECES[2:5], ""]) + rng.choice(PIECES[5:8])
        return RENDERER._tokenizer.encode(text, add_special_tokens=False)

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        log_prob = np.log(uniforms(np.uint64(request.key.digest()), np.arange(len(done.tokens))) * 0.99 + 1e-3)
        own = Completion(done.tokens, log_prob, done.policy_version, done.stop_reason)
        self.given[-1] = request, own
        return own


class Sees(TinyVisionModel):
    """A tiny model that reads images, with a token for each piece and call, so that random weights call tools."""

    class Config(TinyVisionModel.Config):
        alphabet: str = "".join(sorted({*string.printable, *"".join([*PIECES, *WORDS]), *RESULT}))

        def tokenizer(self) -> Any:
            tokenizer = super().tokenizer()
            calls = [PIECES[5].replace("Zürich", f"{number}") for number in range(60)]
            tokenizer.add_tokens([*PIECES, *calls])
            names = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
            tokenizer.chat_template = f"{{% if tools %}}{names}{{% endif %}}{tokenizer.chat_template}"
            return tokenizer


class Keeping(TorchEngine):
    """Keeps its requests and completions."""

    def __init__(self, path: Path, renderer: ChatRenderer) -> None:
        super().__init__(
            TorchEngine.Config(),
            model_dir=path,
            eos_token_ids=renderer.eos_token_ids,
            decode=renderer.decode,
            threads=1,
        )
        self.given: list[tuple[Request, Completion]] = []

    async def _completion(self, request: Request, on_tokens: Any) -> Completion:
        done = await super()._completion(request, on_tokens)
        self.given.append((request, done))
        return done


def chat_picture(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def message_picture(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def response_picture(data: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}


class Episode:
    """One agent: a protocol, a session, and edits of its own history. With pictures, its messages have some."""

    def __init__(self, here: Served, number: int, pictures: Sequence[bytes] = ()) -> None:
        self.here, self.rng, self.number, self.pictures = here, random.Random(number), number, pictures
        self.edits: Counter[str] = Counter()
        self.labels: dict[str, Any] = {"task_id": f"task {number}", "session": f"session {number}"}
        self.stream = self.rng.random() < 0.3
        """Whether the agent asks for streams."""

    async def run(self) -> None:
        text_only = [] if self.pictures else [self.generate]
        protocol = self.rng.choice([self.chat, self.message, self.response, *text_only])
        if self.pictures and protocol != self.message:
            self.stream = False  # OpenAI's client raises at the end of a completion that its length cut
        last = await protocol(self.rng.randrange(1, 5))
        await self.here.feedback(**(self.labels if self.rng.random() < 0.5 else {"id": last}), reward=1)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.here.client.post(path, json={"model": "policy", **body, **self.labels})
        assert answer.status_code == 200, (self.number, answer.text)
        return answer.json()

    def editing(self, *kinds: str) -> str:
        """An edit of the newest completion, or none."""
        kind = self.rng.choice([*kinds, *[""] * len(kinds)])
        self.edits[kind] += bool(kind)
        return kind

    def said(self, text: str, picture: Callable[[str], dict[str, Any]]) -> Any:
        """The content of a message: a text, or parts of the type `text` and what `picture` makes of base64."""
        words = self.rng.choice(WORDS) + str(self.number)
        if not self.pictures or self.rng.random() < 0.3:
            return words
        shown = self.rng.choices(self.pictures, k=self.rng.randrange(1, 3))
        parts = [picture(base64.b64encode(each).decode()) for each in shown] + [{"type": text, "text": words}]
        return self.rng.sample(parts, len(parts))

    # ------------------------------------------------------------------ the protocols

    async def chat(self, turns: int) -> str:
        tools: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES]
        messages: list[Any] = [{"role": "user", "content": self.said("text", chat_picture)}]
        last = ""
        for _ in range(turns):
            if self.stream:
                async with (
                    AsyncOpenAI(base_url=f"{self.here.url}/v1", api_key="none", max_retries=0) as client,
                    client.chat.completions.stream(
                        model="policy", messages=messages, tools=tools, extra_body=self.labels
                    ) as stream,
                ):
                    done = (await stream.get_final_completion()).to_dict()
            else:
                done = await self.post("/v1/chat/completions", messages=messages, tools=tools)
            choice: Any = done["choices"][0]
            last, message = choice["id"], choice["message"]
            calls = message.get("tool_calls") or []
            kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
            if calls:
                kept["tool_calls"] = [
                    {
                        "id": c["id"],
                        "type": "function",
                        "function": {k: c["function"][k] for k in ("name", "arguments")},
                    }
                    for c in calls
                ]
            self.edit_chat(kept)
            messages += [kept, *({"role": "tool", "tool_call_id": c["id"], "content": RESULT} for c in calls)]
            messages += [] if calls else [{"role": "user", "content": self.said("text", chat_picture)}]
            if len(messages) > 3 and self.rng.random() < 0.1:
                self.edits["dropped"] += 1
                del messages[1:3]
        return last

    def edit_chat(self, kept: dict[str, Any]) -> None:
        match self.editing("replaced", "stripped", "arguments", "written anew", "ids"):
            case "replaced":
                kept["content"] = f"{kept['content'] or ''} edited"
            case "stripped":
                kept["content"] = (kept["content"] or "").rpartition("</think>")[2].strip()
            case "arguments" if "tool_calls" in kept:
                kept["tool_calls"][0]["function"]["arguments"] = '{"city": "Bern"}'
            case "written anew" if "tool_calls" in kept:  # the same value, so no edit
                function = kept["tool_calls"][0]["function"]
                function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=2)
            case "ids" if "tool_calls" in kept:
                kept["tool_calls"][0]["id"] = "call_of_another_server"

    async def message(self, turns: int) -> str:
        tools: list[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]
        messages: list[Any] = [{"role": "user", "content": self.said("text", message_picture)}]
        asked: dict[str, Any] = {"max_tokens": 400, "tools": tools, "thinking": {"type": "adaptive"}}
        last = ""
        for _ in range(turns):
            if self.stream:
                async with (
                    anthropic(self.here.url) as client,
                    client.messages.stream(
                        model="policy", messages=messages, extra_body=self.labels, **asked
                    ) as stream,
                ):
                    done = (await stream.get_final_message()).to_dict()
            else:
                done = await self.post("/v1/messages", messages=messages, **asked)
            last = str(done["id"])
            content: Any = done["content"]
            fields = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("id", "name", "input")}
            blocks = [{"type": b["type"], **{k: b[k] for k in fields[b["type"]]}} for b in content]
            calls = [block for block in blocks if block["type"] == "tool_use"]
            match self.editing("replaced", "thinking", "arguments"):
                case "replaced":
                    blocks = [*(b for b in blocks if b["type"] != "text"), {"type": "text", "text": "edited"}]
                case "thinking":
                    blocks = [b for b in blocks if b["type"] != "thinking"]
                case "arguments":
                    blocks = [{**b, "input": {"x": 1}} if b["type"] == "tool_use" else b for b in blocks]
            results = [{"type": "tool_result", "tool_use_id": c["id"], "content": RESULT} for c in calls]
            messages += [{"role": "assistant", "content": blocks}] if blocks else []
            self.edits["left out"] += not blocks  # the protocol has no empty message
            messages += [{"role": "user", "content": results or self.said("text", message_picture)}]
        return last

    async def response(self, turns: int) -> str:
        tools: list[Any] = [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in NAMES]
        items: list[Any] = [{"role": "user", "content": self.said("input_text", response_picture)}]
        previous: dict[str, Any] = {}
        stored, last = self.rng.random() < 0.3, ""
        for _ in range(turns):
            if self.stream:
                async with (
                    AsyncOpenAI(base_url=f"{self.here.url}/v1", api_key="none", max_retries=0) as client,
                    client.responses.stream(
                        model="policy", input=items, tools=tools, extra_body=self.labels, **previous
                    ) as stream,
                ):
                    done = (await stream.get_final_response()).to_dict()
            else:
                done = await self.post("/v1/responses", input=items, tools=tools, **previous)
            last = str(done["id"])
            output: list[Any] = [dict(item) for item in done["output"]]  # pyright: ignore
            calls = [item for item in output if item["type"] == "function_call"]
            new = [{"type": "function_call_output", "call_id": c["call_id"], "output": RESULT} for c in calls]
            new = new or [{"role": "user", "content": self.said("input_text", response_picture)}]
            if stored:
                previous, items = {"previous_response_id": last}, new
                continue
            match self.editing("replaced", "thinking", "arguments"):
                case "replaced":
                    text = {"type": "output_text", "text": "edited", "annotations": []}
                    output = [{**i, "content": [text]} if i["type"] == "message" else i for i in output]
                case "thinking":
                    output = [item for item in output if item["type"] != "reasoning"]
                case "arguments":
                    output = [{**i, "arguments": '{"x": 1}'} if i["type"] == "function_call" else i for i in output]
            items += [*output, *new]
        return last

    async def generate(self, turns: int) -> str:
        ids = [self.rng.randrange(VOCABULARY) for _ in range(5)]
        last = ""
        for _ in range(turns):
            choice = (await self.post("/inference/v1/generate", token_ids=ids, stream=False))["choices"][0]
            last = choice["id"]
            ids = [*ids, *choice["token_ids"], *(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(4)))]
            if self.editing("token"):
                ids[self.rng.randrange(len(ids))] = self.rng.randrange(VOCABULARY)
        return last


def check(group: Group, given: set[tuple[bytes, bytes, bytes]], edits: Counter[str]) -> int:
    """Compares a recorded rollout with what the engine gave (prompt, tokens, log-probabilities). Returns the number of
    its forks."""
    (trajectory,) = group.trajectories
    for turn in trajectory.turns:
        assert (turn.prompt_tokens.tobytes(), turn.tokens.tobytes(), turn.log_prob.tobytes()) in given
    experiences = experiences_of(group, trajectory)
    trained = 0
    for experience in experiences:
        for span in experience.turns:
            turn, place = trajectory.turns[span.number], slice(span.start, span.stop)
            assert span.start == len(turn.prompt_tokens)
            assert np.array_equal(experience.tokens[: span.start], turn.prompt_tokens)
            assert np.array_equal(experience.tokens[place], turn.tokens)
            assert np.array_equal(experience.rollout_log_prob[place], turn.log_prob)
            assert experience.response_mask[place].all()
            trained += len(turn.tokens)
    assert sum(int(experience.response_mask.sum()) for experience in experiences) == trained
    forks = forks_of(trajectory.turns)
    assert len(forks) == len(experiences) - 1
    for fork in forks:
        sent, turn = trajectory.turns[fork.turn].prompt_tokens, trajectory.turns[fork.earlier]
        known = np.concatenate([turn.prompt_tokens, turn.tokens])
        assert np.array_equal(sent[: fork.at], known[: fork.at])
        assert not np.array_equal(sent[fork.at : fork.at + 1], known[fork.at : fork.at + 1])
    assert not forks or edits.total(), (group.task.task_id, forks)
    return len(forks)


@pytest.mark.timeout(300 + EPISODES)
async def test_fuzzed_episodes_are_recorded_token_for_token(tmp_path: Path) -> None:
    await rolled_out(tmp_path, Agentic(), EPISODES, max_new_tokens=400)


@pytest.mark.timeout(300 + EPISODES)
async def test_fuzzed_conversations_with_images_are_what_training_scores(tmp_path: Path) -> None:
    config = Sees.Config(layers=1, hidden=32, mlp=8, vision_layers=1, vision_hidden=16, image_size=28)
    path = Sees(config, seed=0).materialize(tmp_path / "model")
    renderer = renderer_of(path)
    engine = Keeping(path, renderer)
    try:
        groups = await rolled_out(
            tmp_path / "run", engine, IMAGE_EPISODES, PICTURES, renderer=renderer, max_new_tokens=4
        )
    finally:
        await engine.close()
    experiences = [each for group in groups for each in experiences_of(group, group.trajectories[0])]
    calls = sum("tool_call" in turn.text for group in groups for turn in group.trajectories[0].turns)
    seen = [item.data for each in experiences for item in each.media]
    assert calls > IMAGE_EPISODES / 10
    assert {*seen} == {*PICTURES}
    train = make_engine(path, temperature=1.0)
    for start in range(0, len(experiences), 64):
        batch = Batch(tuple(experiences[start : start + 64]))
        for own, experience in zip(train.score(batch, "old"), batch.experiences, strict=True):
            assert np.abs(own - experience.rollout_log_prob).max() < 1e-4


async def rolled_out(
    path: Path, engine: Any, number: int, pictures: Sequence[bytes] = (), **options: Any
) -> list[Group]:
    """Runs episodes and checks their records against what the engine gave."""
    async with served(path, policy=engine, group_size=1, groups=number, deadline_s=3600.0, **options) as here:
        episodes = [Episode(here, each, pictures) for each in range(number)]
        for start in range(0, number, AT_ONCE):
            await asyncio.gather(*(episode.run() for episode in episodes[start : start + AT_ONCE]))
        groups = await here.take(number)
    edits = {episode.labels["task_id"]: episode.edits for episode in episodes}
    assert {group.task.task_id for group in groups} == edits.keys()
    given = {
        (request.prompt_tokens.tobytes(), done.tokens.tobytes(), done.log_prob.tobytes())
        for request, done in engine.given
    }
    forks = {group.task.task_id: check(group, given, edits[group.task.task_id]) for group in groups}
    turns = sum(len(group.trajectories[0].turns) for group in groups)
    logging.getLogger("trivium").info("%d episodes, %d turns, %d forks", number, turns, sum(forks.values()))
    assert sum(forks.values()) > number / 10
    return groups
