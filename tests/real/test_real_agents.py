"""Agents of the real model: a loop with tools, which its chat template does not know, and the endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.processes import Forked, commands
from tests.real.sections import (
    LORA,
    QUESTIONS,
    REWARD,
    assert_same_model_samples_and_trains,
    changed,
    greedy_by_transformers,
    metrics_of,
    rows,
    written,
)
from tests.waiting import eventually
from trivium.config import load_config
from trivium.inspection.rollouts import read_rollouts
from trivium.runtime.launch import run
from trivium.text import hf_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 31, "b": 42}}\n</tool_call>'
ASKED = f"Repeat this: {CALL}"
"""This model calls no tool by itself, but repeats what it is shown."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What its template writes where a conversation has no system message."""
RESULT = "\n<|im_start|>tool\n73<|im_end|>\n<|im_start|>assistant\n"
"""The result of the call in the form of the template, after the end of the turn that called."""


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def test_a_loop_with_tools_shows_the_policy_the_tools_and_their_results(model: Path, tmp_path: Path) -> None:
    sections = {
        "tasks": {"train": rows(tmp_path / "calls.jsonl", [{"prompt": ASKED}])},
        "workflow": {"kind": "tools", "tools": [f"{__file__}:add"], "max_calls": 1},
        "rewards": [REWARD],
        "algorithm": "grpo",
        "engine": {"sampling": {"max_new_tokens": 40, "temperature": 0.5}},
        "schedule": {"steps": 1, "groups_per_step": 1, "group_size": 6},
    }
    run(load_config(written(tmp_path / "run.yaml", model, **sections)))
    [step] = metrics_of(tmp_path / "run")
    assert_same_model_samples_and_trains([step])
    tokenizer: Any = hf_tokenizer(model)
    num_attempted = num_called = 0
    for rollout in read_rollouts(tmp_path / "run", step=1):
        [sequence] = rollout.sequences
        text = tokenizer.decode(sequence.tokens)
        assert text.startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools")
        assert '"name": "add", "description": "Adds two numbers."' in text
        assert text.count(f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n") == 1
        first = rollout.trajectory.turns[0].text
        attempted, called = "<tool_call>" in first, first.strip() == CALL
        assert len(rollout.trajectory.turns) == 1 + attempted, first
        if attempted:
            _, _, between, _ = np.split(sequence.tokens, np.flatnonzero(np.diff(sequence.response_mask)) + 1)
            answered = tokenizer.decode(between)
            assert answered == RESULT if called else "\n<|im_start|>tool\nerror: " in answered, "both turns are sampled"
        num_attempted, num_called = num_attempted + attempted, num_called + called
    assert num_called >= 1
    assert step["rollout/turns"] == 1 + num_attempted / 6


def test_agents_with_the_openai_client_train_the_policy_that_they_call(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps. What the endpoint serves before and after the first, whole and as a stream, is what plain transformers
    writes with the model and with the export of the first checkpoint."""
    monkeypatch.setenv("AGENT_KEY", "swordfish")
    config = written(
        tmp_path / "serve.yaml",
        model,
        run={"dir": str(tmp_path / "run"), "mode": "serve"},
        tasks={"train": {"kind": "served"}},
        serve={"port": 0, "key_variable": "AGENT_KEY"},
        algorithm="grpo",
        engine={"sampling": {"max_new_tokens": 40, "temperature": 0.1}},  # so cold that it calls the tool
        train={**LORA, "optimizer": {"lr": 2e-4}},
        schedule={"steps": 2, "groups_per_step": 1, "group_size": 2},
        checkpoint={"save_every": 1},
    )
    with commands(tmp_path) as start:
        server = start("serve", "run", str(config))
        url = served(server, tmp_path / "run", version=0)
        with OpenAI(base_url=f"{url}/v1", api_key="swordfish", max_retries=2, timeout=120) as client:
            before = greedy(client)
            for number in range(2):
                session(client, number)
            served(server, tmp_path / "run", version=1)
            after = greedy(client)
            for number in range(2):
                session_with_tools(client, number)
        server.ended()
        start("export", "export", str(tmp_path / "run"), str(tmp_path / "model"), "--step", "1").ended()
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 2
    assert all(step["mismatch/kl"] < 1e-6 for step in steps)
    assert changed(model, tmp_path / "model")
    assert before == greedy_by_transformers(model, QUESTIONS[0], 16)
    assert after == greedy_by_transformers(tmp_path / "model", QUESTIONS[0], 16)
    tokenizer: Any = hf_tokenizer(model)
    for rollout in read_rollouts(tmp_path / "run", step=2):
        [sequence] = rollout.sequences  # the second call continued the first one, token by token
        assert f"{CALL}<|im_end|>{RESULT}" in tokenizer.decode(sequence.tokens)
        assert len(sequence.turns) == 2


def served(server: Forked, run_dir: Path, version: int) -> str:
    """The URL of the endpoint, once it serves this version."""
    path = run_dir / "serve.json"

    def serves() -> bool:
        health = httpx.get(f"{json.loads(path.read_text())['url']}/health", timeout=60).json()
        return health["loaded"] and health["version"] == version

    eventually(lambda: path.is_file() and serves(), 300, lambda: server.text, server)
    return json.loads(path.read_text())["url"]


def greedy(client: OpenAI) -> str:
    """The greedy completion, equal whole and as a stream."""
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    asked |= {"temperature": 0, "max_tokens": 16, "extra_body": {"evaluation": True, "session": "greedy"}}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == whole
    assert sum(map(bool, parts)) > 1, "it came as a whole"
    assert whole is not None
    return whole


def session(client: OpenAI, number: int) -> None:
    """One call, and the reward of the rollout. Completions of one length might be equal, and teach nothing then."""
    labels = {"task_id": "sea", "session": f"sea {number}"}
    asked: Any = [{"role": "user", "content": QUESTIONS[0]}]
    done = client.chat.completions.create(model="policy", messages=asked, max_tokens=4 + number, extra_body=labels)
    assert done.usage is not None
    assert done.usage.completion_tokens == 4 + number
    client.post("/feedback", body={**labels, "reward": float(number)}, cast_to=object)


def session_with_tools(client: OpenAI, number: int) -> None:
    """A call of a tool, the completion that follows its result, and the reward."""
    labels = {"task_id": "sum", "session": f"sum {number}"}
    integer = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": integer, "b": integer}}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {"model": "policy", "tools": tools, "extra_body": labels}
    message = client.chat.completions.create(**asked, messages=messages).choices[0].message
    [call] = message.tool_calls or [pytest.fail(f"it calls no tool: {message.content}")]
    assert json.loads(call.function.arguments) == {"a": 31, "b": 42}
    result = {"role": "tool", "tool_call_id": call.id, "content": "73"}
    messages += [message.model_dump(exclude_none=True), result]
    client.chat.completions.create(**asked, messages=messages, max_tokens=8)
    client.post("/feedback", body={**labels, "reward": float(number)}, cast_to=object)
