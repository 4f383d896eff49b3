"""Whole runs with environments: one game behind every door, and servers that are killed in the middle of episodes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import agent_game
import guessing
import pytest
from example_counts import FULL

from tests.e2e.test_kill import outcome_of
from tests.serving import anthropic
from tests.waiting import until
from trivium.buffers.journal import Journal
from trivium.config import config_from_mapping, load_config, merged
from trivium.inspection.rollout_view import calls_of, decoder, rollouts_of
from trivium.runtime.launch import run
from trivium.types import Group, Trajectory

GAME, TOOL = agent_game.__file__, agent_game.TOOL


@contextmanager
def server(port: int = 0, steps: int | None = None) -> Generator[int]:
    """An OpenEnv server on loopback. With `steps`, it is killed after so many, and another one starts at its port."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        command = [sys.executable, GAME, "openenv", *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
        assert processes[-1].stdout is not None
        return processes[-1].stdout.readline().strip()

    def restart(port: str) -> None:
        assert processes[0].wait() == -9
        start(port)

    port_text = start(str(port), *([] if steps is None else [str(steps)]))
    watcher = threading.Thread(target=restart, args=(port_text,))
    if steps is not None:
        watcher.start()
    try:
        yield int(port_text)
    finally:
        if steps is not None:
            watcher.join(120)
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def config(
    run_dir: Path,
    steps: int = 2,
    rows: bool = True,
    size: int = 6,
    seed: int = 0,
    tasks: dict[str, Any] | None = None,
    **workflow: Any,
) -> dict[str, Any]:
    """A run of the game with a tiny model. `rows` is whether the rows offer the tool, `tasks` replaces them."""
    source = {"kind": "python", "source": f"{GAME}:rows", "id": "id", "args": {"with_tools": rows}}
    return {
        "run": {"dir": str(run_dir), "seed": seed},
        "model": {"kind": f"{GAME}:TinyModel", "layers": 1, "hidden": 32, "heads": 2, "mlp": 32, "max_position": 96},
        "tasks": {"train": tasks or source},
        "workflow": {"max_failed_fraction": 1.0, **workflow},
        "engine": {"sampling": {"max_new_tokens": 1}},
        "schedule": {"steps": steps, "groups_per_step": 1, "group_size": size},
        "train": {"optimizer": {"lr": 1e-2}},
        "checkpoint": {"save_every": 1},
        "cluster": {"threads": 1},
        "monitors": [{"kind": "jsonl"}],
    }


def rollouts_in(run_dir: Path) -> list[Trajectory]:
    """All rollouts of a run, in the order of the schedule."""
    return [rollout for group in groups_of(run_dir) for rollout in group.trajectories]


def outcome(
    run_dir: Path, steps: int = 2, changed: dict[str, Any] | None = None, **fields: Any
) -> tuple[dict[str, bytes], list[Trajectory]]:
    """Runs the game with a tiny model. Returns (the files of the last weights, all rollouts in order)."""
    mapping = merged(config(run_dir, steps, **fields), changed or {})
    assert run(config_from_mapping(mapping, run_dir.parent))["steps"] == steps
    rollouts = rollouts_in(run_dir)
    assert len(rollouts) == steps * fields.get("size", 6)
    return outcome_of(run_dir)["tensors"], rollouts


def groups_of(run_dir: Path) -> list[Group]:
    folders = {path.parent for path in (run_dir / "rollouts").rglob("*.msgpack")}
    groups = [group for folder in sorted(folders) for group in Journal(folder).read(after_step=0)]
    return sorted(groups, key=lambda group: group.slot)


@contextmanager
def mcp_server() -> Generator[int]:
    """An MCP server at a port of loopback; rollouts wait until it listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, guessing.__file__, str(port)], env=env) as process:
        try:
            yield port
        finally:
            process.kill()


async def play(url: str, task: str, index: int) -> None:
    """An agent that plays one rollout with Anthropic's client."""
    labels = {"task_id": task, "session": f"rollout {index}"}
    row = {"taskset": "train", "epoch": 0, "index": index}
    tools: Any = [{key: TOOL[key] for key in ("name", "description")} | {"input_schema": TOOL["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": "digit?"}]
    game = agent_game.Game(int(task))
    async with anthropic(url, retries=2) as client:
        for _ in range(12):
            asked: dict[str, Any] = {"model": "policy", "max_tokens": 1, "tools": tools, "messages": messages}
            asked["extra_body"] = {**labels, "row": row}
            if index % 2:
                async with client.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [(call.id, game.guess(call.input.get("digit"))) for call in calls]
            if not results:
                break
            said = [{"type": "tool_result", "tool_use_id": call, "content": result} for call, result in results]
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": said}]
        await client.post("/feedback", body={**labels, "reward": game.reward}, cast_to=object)


def openenv(port: int, **workflow: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    return {"kind": "openenv", "url": url, "observe": f"{GAME}:observe", "max_turns": 12, **workflow}


def contents(rollouts: list[Trajectory]) -> list[Any]:
    """What the policy saw and sampled in each rollout, and its reward."""
    turns = [[(turn.prompt_tokens.tolist(), turn.tokens.tolist()) for turn in each.turns] for each in rollouts]
    return list(zip(turns, [each.reward for each in rollouts], strict=True))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("class") / "run"


@pytest.fixture(scope="module")
def undisturbed(run_dir: Path) -> tuple[dict[str, bytes], list[Trajectory]]:
    """The game behind an environment class."""
    fields = {"kind": "multi_turn", "environment": f"{GAME}:Guess", "max_turns": 12}
    weights, rollouts = outcome(run_dir, **fields)
    assert len({rollout.reward for rollout in rollouts}) > 1
    assert max(len(rollout.turns) for rollout in rollouts) > 2
    return weights, rollouts


def test_calls_and_results_are_shown(undisturbed: tuple[dict[str, bytes], list[Trajectory]], run_dir: Path) -> None:
    shown = [calls_of(each, decoder(run_dir)) for each in rollouts_of(run_dir, 1, None, False)]
    for text, rollout in zip(shown, undisturbed[1], strict=False):
        assert f"reward {rollout.reward:.4g}" in text
        assert text.count("  call: guess {") == len(rollout.turns) - 1
        own = sum(turn.text.count("<|tool|>") for turn in rollout.turns)  # a tiny policy may write any token
        assert text.count("<|tool|>") == len(rollout.turns) - 1 + own
        assert text.count("  completion: ") == 1


@pytest.mark.parametrize("door", ["gymnasium", "openenv", "mcp"])
def test_one_game_behind_every_door_gives_equal_tokens_rewards_and_weights(
    door: str, undisturbed: tuple[dict[str, bytes], list[Trajectory]], tmp_path: Path
) -> None:
    with {"gymnasium": partial(nullcontext, 0), "openenv": server, "mcp": mcp_server}[door]() as port:
        fields: dict[str, Any] = openenv(port, max_environments=2)  # rollouts that wait sample the same tokens
        if door == "gymnasium":
            agent_game.register()
            fields = {**fields, "kind": door, "id": "Guess-v0", "act": f"{GAME}:act"}
            del fields["url"]
        if door == "mcp":
            # One server for all rollouts; tests/unit/workflows/test_workflows_adapters.py starts one for each.
            fields = {
                "kind": door,
                "url": f"http://127.0.0.1:{port}/mcp",
                "start_tool": "begin",
                "reward_tool": "score",
            }
            fields |= {"max_calls": 11, "rows": False}
        weights, rollouts = outcome(tmp_path / "run", **fields)
    assert contents(rollouts) == contents(undisturbed[1])
    assert weights == undisturbed[0]
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert not {name for name in row if "environment" in name and not name.startswith(("perf/", "reward/"))}


def test_an_agent_that_plays_the_same_rows_over_http_gives_them_too(
    undisturbed: tuple[dict[str, bytes], list[Trajectory]], run_dir: Path, tmp_path: Path
) -> None:
    served = {"run": {"mode": "serve"}, "tasks": {"train": {"kind": "served"}}}

    async def agent() -> None:
        path = tmp_path / "run" / "serve.json"
        await until(path.is_file, 240)
        url = json.loads(path.read_text())["url"]
        for group in groups_of(run_dir):
            await asyncio.gather(*(play(url, group.task.task_id, index) for index in reversed(range(6))))

    with ThreadPoolExecutor(1) as threads:
        playing = threads.submit(asyncio.run, agent())
        weights, rollouts = outcome(tmp_path / "run", changed=served)
        playing.result()
    assert contents(rollouts) == contents(undisturbed[1])
    assert weights == undisturbed[0]


def test_a_server_that_is_killed_in_the_middle_of_episodes_changes_nothing(
    undisturbed: tuple[dict[str, bytes], list[Trajectory]], tmp_path: Path
) -> None:
    weights, expected = undisturbed
    with server(steps=5) as port:  # the rollouts fail, and are repeated with the same randomness
        again, rollouts = outcome(tmp_path / "repeated", **openenv(port, max_retries=3))
    assert contents(rollouts) == contents(expected)
    assert again == weights
    assert max(rollout.metrics["retries"] for rollout in rollouts) >= 1

    with server(steps=5) as port:  # killed in the first step, and again after the run is resumed
        outcome(tmp_path / "resumed", 1, **openenv(port, max_retries=3))
    with server(port, steps=5) as port:
        again, rollouts = outcome(tmp_path / "resumed", **openenv(port, max_retries=3))
    assert contents(rollouts) == contents(expected)
    assert again == weights

    with server(steps=5) as port:  # without repeats the rollouts are left out, and none of them counts as 0
        _, rollouts = outcome(tmp_path / "failed", 1, **openenv(port))
    failed = [rollout for rollout in rollouts if rollout.failure is not None]
    assert failed
    for rollout in failed:
        assert not rollout.rewards
        assert rollout.failure is not None
        assert rollout.failure.side == "workflow"
    for rollout, whole in zip(rollouts, expected, strict=False):
        assert rollout.failure is not None or rollout.reward == whole.reward


def calculator(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The summary of the recipe of tools, which ends once most answers are right."""
    recipe = Path(__file__).parents[2] / "recipes" / "tools.yaml"
    until = "stages.1.schedule.until={metric: eval/test/accuracy, above: 0.79}"
    return run(load_config(recipe, [f"run.dir={run_dir}", "cluster.threads=1", until, *overrides]))


@pytest.mark.timeout(1800)
def test_a_tiny_model_learns_to_use_a_calculator(tmp_path: Path) -> None:
    """In about 70 supervised steps, and then by its rewards."""
    # A reinforced step costs six supervised ones: these end where half of the answers are right, in the steepest part.
    early = "stages.0.schedule.until={metric: eval/test/accuracy, above: 0.2}"
    evaluated = ["tasks.test.args.count=100", "stages.0.evaluation.every=10", "stages.1.evaluation.every=5"]
    learned = calculator(tmp_path / "run", early, *evaluated)
    assert learned["accuracy_after"] > learned["accuracy_before"] + 0.2
    assert learned["accuracy_after"] > 0.7


@pytest.mark.skipif(not FULL, reason="a control of the recipe; HYPOTHESIS=full runs it")
def test_a_tiny_model_cannot_answer_without_a_calculator(tmp_path: Path) -> None:
    without = ["workflow={kind: single_turn}", "tasks.train.source=tools.py:direct"]
    fewer = ["stages.0.schedule.steps=100", "stages.1.schedule.steps=5"]  # more supervised steps than with one
    assert calculator(tmp_path / "run", *without, *fewer)["accuracy_after"] < 0.1
