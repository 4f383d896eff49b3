"""Agents with the real `openai` client train the policy that they play with, through a kill of the server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from failing import check_error, refused
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, OpenAI

from tests.processes import Forked, commands
from tests.waiting import eventually, until
from trivium.config import load_config
from trivium.foundation.errors import ConfigError, RolloutsFailing
from trivium.runtime.launch import run

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 8


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_KEY", "swordfish")


def the_example() -> Any:
    spec = importlib.util.spec_from_file_location("train_an_agent", EXAMPLES / "train_an_agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kill_after(server: Forked, checkpoint: Path) -> None:
    """SIGKILL once the checkpoint is there, in the middle of whatever is going on."""
    eventually((checkpoint / "manifest.json").is_file, 240, lambda: server.text, server)
    os.kill(server.pid, signal.SIGKILL)


def check_door(url: str, key: str) -> None:
    """What the client library makes of the endpoint: models, streams, several choices, errors."""
    with OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger, pytest.raises(AuthenticationError):
        stranger.models.list()
    said: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "1?"}]}
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        labels = {"evaluation": True, "session": "door"}
        done = client.chat.completions.create(**said, n=3, logprobs=True, temperature=0.0, extra_body=labels)
        texts = [choice.message.content for choice in done.choices]
        assert len(set(texts)) == 1  # greedy
        assert done.choices[0].logprobs is not None
        assert done.usage is not None
        assert done.usage.completion_tokens == 3
        stream = client.chat.completions.create(**said, stream=True, temperature=0.0, extra_body=labels)
        streamed = [chunk.choices[0] for chunk in stream]
        assert "".join(choice.delta.content or "" for choice in streamed) == texts[0]
        assert streamed[-1].finish_reason in ("stop", "length")
        with pytest.raises(BadRequestError, match=r"engine\.sampling\.temperature"):
            client.chat.completions.create(**said, temperature=0.3)


def test_an_agent_is_trained_through_a_kill_of_its_server(tmp_path: Path) -> None:
    example, run_dir = the_example(), tmp_path / "run"
    with commands(tmp_path) as start:
        command = ("serve", "run", str(EXAMPLES / "agent.yaml"), f"run.dir={run_dir}")
        server = start(*command)
        url = example.wait_for(server, run_dir)
        check_door(url, example.KEY)
        killer = threading.Thread(target=kill_after, args=(server, run_dir / "checkpoints" / "step-000004"))
        killer.start()
        asyncio.run(example.run_episodes(url, "before"))
        killer.join(120)
        assert server.wait(120) == -signal.SIGKILL
        server = start(*command)  # serve.json of the dead one is still there; the pid tells
        asyncio.run(example.run_episodes(example.wait_for(server, run_dir), "after"))
        assert server.wait(120) == 0, server.text
    assert f'"steps": {STEPS}' in server.text
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS
    assert (run_dir / "checkpoints" / f"step-{STEPS:06d}" / "manifest.json").is_file()
    assert not (run_dir / "serve.json").exists()
    assert "continuing from step-" in (run_dir / "log.txt").read_text()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > rows[0]["reward/mean"] + 0.3
    assert max(row["rollout/staleness_max"] for row in rows) <= 1


def test_what_stops_the_training_stops_the_server_and_is_said(tmp_path: Path) -> None:
    """Agents that only fail: the trainer gives up, the endpoint closes, the cause is theirs."""
    said = {"workflow": {"max_failed_fraction": 0.5}, "run": {"dir": str(tmp_path / "run"), "mode": "serve"}}
    config = load_config(EXAMPLES / "agent.yaml", [f"{k}={json.dumps(v)}" for k, v in said.items()])
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            run(config)
        except BaseException as error:
            raised.append(error)

    async def fail() -> str:
        path = tmp_path / "run" / "serve.json"
        await until(path.is_file, 240)
        url = json.loads(path.read_text())["url"]
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="swordfish", max_retries=8) as client:

            async def play(task: int, seat: int) -> None:
                labels = {"task_id": str(task), "session": str(seat)}
                messages: Any = [{"role": "user", "content": "1?"}]
                await client.chat.completions.create(model="policy", messages=messages, extra_body=labels)
                await client.post("/feedback", body={**labels, "failure": "no browser"}, cast_to=object)

            await asyncio.gather(*(play(task, seat) for task in range(5) for seat in range(8)))
        return url

    serving = threading.Thread(target=serve)
    serving.start()
    url = asyncio.run(fail())
    serving.join(120)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    (error,) = raised
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    check_error(error, RolloutsFailing, "no browser")


def test_a_server_explores_for_a_trainer_elsewhere(tmp_path: Path) -> None:
    """`serve` and `train` over a buffer and a channel that both reach."""
    example = the_example()
    shared = [
        f"buffer={{kind: sql, url: 'sqlite:///{tmp_path}/buffer.db'}}",
        "run.name=two",
        "schedule.steps=2",
        f"sync={{method: checkpoint, dir: {tmp_path}/sync}}",
    ]
    results: dict[str, Any] = {}

    def role(mode: str) -> None:
        said = [*shared, f"run.mode={mode}", f"run.dir={tmp_path / mode}"]
        results[mode] = run(load_config(EXAMPLES / "agent.yaml", said))

    roles = [threading.Thread(target=role, args=(mode,)) for mode in ("train", "serve")]
    for thread in roles:
        thread.start()
    path = tmp_path / "serve" / "serve.json"
    eventually(lambda: path.is_file() or not all(thread.is_alive() for thread in roles), 240)
    url = json.loads(path.read_text())["url"]
    eventually(lambda: httpx.get(f"{url}/health").json()["loaded"], 240)
    means = asyncio.run(example.run_episodes(url))
    for thread in roles:
        thread.join(120)
    assert len(means) == 2
    assert results["train"]["steps"] == 2
    assert results["serve"]["run_dir"] == str(tmp_path / "serve")
    rows = [json.loads(line) for line in (tmp_path / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [round(row["reward/mean"], 6) for row in rows] == [round(mean, 6) for mean in means]


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ("run.mode=both", "tasks.train"),
        ("schedule.deterministic=true", "schedule.deterministic"),
        ("cluster.kind=ray", "cluster.kind"),
        ("evaluation={taskset: train}", "evaluation.taskset"),
    ],
)
def test_what_agents_cannot_do_is_refused(said: str, where: str) -> None:
    with refused(ConfigError, where):
        load_config(EXAMPLES / "agent.yaml", [said])
