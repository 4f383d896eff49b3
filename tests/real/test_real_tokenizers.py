"""Runs with the tokenizers and chat templates of public models, and tiny random weights: tools, turns, the endpoint,
supervised rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fetch_chats
import httpx
import numpy as np
import pytest
import torch
from chat_matrix import TOOLS, template, tokenizer_of
from openai import OpenAI
from transformers import LlamaConfig, LlamaForCausalLM

from tests.waiting import eventually
from trivium.config import config_from_mapping, merged
from trivium.inspection.rollouts import read_rollouts
from trivium.runtime.launch import run
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.types import Message, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("chats")]

ROLES: dict[str, dict[str, str]] = {"gemma3": {"tool": "user"}}
"""What a template needs for results of tools."""
RESULT = "sunny 🌞 שלום"
HELPERS = f'''
from trivium.types import Message


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return {RESULT!r}


class Twice:
    def reset(self, task):
        self.steps = 0
        return [Message("user", "first question 漢字")]

    def step(self, completion):
        self.steps += 1
        return [Message("user", "second question")], None, self.steps == 2
'''
SCRIPT = """
CALL, ANSWER = {call!r}, {answer!r}


def with_tools(request, version):
    return ANSWER if any(message.role == "tool" for message in request.messages) else CALL


def answers(request, version):
    return ANSWER
"""


class Model:
    """A directory with one of the tokenizers and tiny random weights, and two completions as tokens."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory, self.roles = directory, ROLES.get(name, {})
        self.tokenizer = tokenizer_of(name)
        self.tokenizer.chat_template = self.tokenizer.chat_template or template("gptoss")
        self.tokenizer.save_pretrained(directory)
        saved = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        saved.pop("processor_class", None)  # Gemma 3's: the weights here read text alone
        (directory / "tokenizer_config.json").write_text(json.dumps(saved), encoding="utf-8")
        config = LlamaConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
        self.renderer: ChatRenderer = renderer_of(directory, roles=self.roles)
        text = self.renderer.tool_format.write([ToolCall("weather", '{"city": "Zürich"}')])
        called = "<|call|>" if name == "gptoss" else self.tokenizer.eos_token
        self.call = [*self._encoded(text), self.tokenizer.convert_tokens_to_ids(called)]
        # Arbitrary tokens of the vocabulary, which no text encodes to.
        drawn = np.random.default_rng(0).integers(0, len(self.tokenizer), 6).tolist()
        words = [token for token in drawn if token not in self.renderer.eos_token_ids] + self._encoded("fine")
        self.answer = [*words, self.tokenizer.eos_token_id]

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def config(self, folder: Path, **sections: Any) -> Any:
        """A config whose run directory is in `folder`, as is its script."""
        (folder / "helpers.py").write_text(HELPERS, encoding="utf-8")
        (folder / "script.py").write_text(SCRIPT.format(call=self.call, answer=self.answer))
        base = {
            "run": {"dir": str(folder / "run")},
            "model": {"kind": "hf", "path": str(self.directory), "roles": self.roles},
            "engine": {"kind": "scripted", "script": "script.py:answers", "sampling": {"max_new_tokens": 128}},
            "schedule": {"steps": 1, "groups_per_step": 1, "group_size": 2},
            "checkpoint": {"save_every": 0},
            "monitors": ["jsonl"],
            "cluster": {"threads": 1},
        }
        return config_from_mapping(merged(base, sections), folder)


@pytest.fixture(scope="module", params=fetch_chats.TOKENIZERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, chats: None) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def taskset(folder: Path, rows: list[Mapping[str, Any]], **columns: str) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"train": {"kind": "jsonl", "path": str(path), **columns}}


def sampled(folder: Path) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(tokens, those of each completion) of the rollouts of the one step."""
    for rollout in read_rollouts(folder / "run", step=1):
        [sequence] = rollout.sequences
        yield sequence.tokens.tolist(), [turn.tokens.tolist() for turn in rollout.trajectory.turns]


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens) - len(part) + 1))


def shows(text: str, result: str) -> bool:
    """Whether a result is in a text, in which some templates write it as JSON."""
    return result in text or json.dumps(result)[1:-1] in text


def length(completion: str) -> float:
    """A reward."""
    return float(len(completion) % 2)


def test_the_result_of_a_tool_reaches_the_policy(model: Model, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "tasks": taskset(tmp_path, [{"prompt": "Weather?"}]),
        "workflow": {"kind": "tools", "tools": ["helpers.py:weather"], "max_calls": 2},
        "rewards": [f"{__file__}:length"],
        "engine": {"script": "script.py:with_tools"},
    }
    run(model.config(tmp_path, **sections))
    rollouts = list(sampled(tmp_path))
    assert len(rollouts) == 2
    for tokens, turns in rollouts:
        assert turns == [model.call, model.answer]
        assert contains(tokens, model.call)
        text = model.renderer.decode(tokens)
        assert shows(text, RESULT)
        assert "Tells the weather of a city." in text


def test_a_second_turn_continues_the_tokens_of_the_first(model: Model, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "tasks": taskset(tmp_path, [{"prompt": "unused"}]),
        "workflow": {"kind": "multi_turn", "environment": "helpers.py:Twice", "max_turns": 2},
        "rewards": [f"{__file__}:length"],
    }
    run(model.config(tmp_path, **sections))
    rollouts = list(sampled(tmp_path))
    assert len(rollouts) == 2
    for tokens, turns in rollouts:
        assert turns == [model.answer, model.answer]
        first = model.renderer.render([Message("user", "first question 漢字")])
        start = [*first.tokens.tolist(), *model.answer]
        assert tokens[: len(start)] == start
        assert "second question" in model.renderer.decode(tokens[len(start) :])


def test_an_agent_answers_a_call_by_its_id(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_KEY", "swordfish")
    sections: dict[str, Any] = {
        "run": {"mode": "serve"},
        "tasks": {"train": {"kind": "served"}},
        "serve": {"port": 0, "key_variable": "AGENT_KEY"},
        "engine": {"script": "script.py:with_tools"},
    }
    config, raised = model.config(tmp_path, **sections), list[BaseException]()

    def serve() -> None:
        try:
            run(config)
        except BaseException as error:
            raised.append(error)

    server = threading.Thread(target=serve)
    server.start()
    path = tmp_path / "run" / "serve.json"
    eventually(lambda: path.is_file() or not server.is_alive(), 240)
    assert not raised, raised
    url = json.loads(path.read_text())["url"]
    eventually(lambda: httpx.get(f"{url}/health", timeout=60).json()["loaded"], 240)
    with OpenAI(base_url=f"{url}/v1", api_key="swordfish", max_retries=2, timeout=120) as client:
        for number in range(2):
            labels = {"task_id": "weather", "session": f"agent {number}"}
            asked: dict[str, Any] = {"model": "policy", "tools": TOOLS, "extra_body": labels}
            messages: list[Any] = [{"role": "user", "content": "Weather?"}]
            message = client.chat.completions.create(**asked, messages=messages).choices[0].message
            [call] = message.tool_calls or [pytest.fail(f"no call: {message.content}")]
            assert json.loads(call.function.arguments) == {"city": "Zürich"}
            result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
            messages += [message.model_dump(exclude_none=True), result]
            client.chat.completions.create(**asked, messages=messages)
            client.post("/feedback", body={**labels, "reward": float(number)}, cast_to=object)
    server.join(120)
    assert not raised, raised
    rollouts = list(sampled(tmp_path))
    assert len(rollouts) == 2
    for tokens, turns in rollouts:
        assert turns == [model.call, model.answer]
        assert contains(tokens, model.call), "the second call continues the first one, token by token"
        assert shows(model.renderer.decode(tokens), RESULT)


def test_rows_of_several_turns_and_calls_are_learned(model: Model, tmp_path: Path) -> None:
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call00000", "content": RESULT},
        {"role": "assistant", "content": "cold in Bern"},
    ]
    sections: dict[str, Any] = {
        "tasks": taskset(tmp_path, [{"messages": talk, "tools": TOOLS}], prompt="messages", completion="messages"),
        "buffer": {"kind": "files", "turns": "all"},
        "algorithm": {"kind": "sft"},
        "schedule": {"group_size": 1},
        "train": {"optimizer": {"lr": 1e-2}},
    }
    run(model.config(tmp_path, **sections))
    [step] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["train/grad_norm/policy"] > 0
    called = Message("assistant", "", tool_calls=(ToolCall("weather", '{"city": "Bern"}'),))
    told = [Message("tools", json.dumps(TOOLS)), Message("user", "first"), Message("assistant", "well")]
    told += [Message("user", "Weather?"), called, Message("tool", RESULT, call=0), Message("assistant", "cold in Bern")]
    texts = [model.tokenizer.decode(tokens.tolist()) for _, tokens in model.renderer.supervised(told)]
    assert len(texts) == 3
    for text, words in zip(texts, ("well", "weather", "cold in Bern"), strict=True):
        assert words in text
        assert not shows(text, RESULT)
        assert "Weather?" not in text
