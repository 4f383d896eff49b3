"""Environments of other libraries, each over its real package: Gymnasium, OpenEnv's wire format, MCP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import agent_game
import guessing
import numpy as np
import pytest
from failing import refused
from gymnasium import spaces
from websockets.asyncio.server import ServerConnection, serve
from workflow_parts import policy, shown, workflow

from tests.ports import port_below_ephemeral
from tests.waiting import until
from trivium.config import RunConfig, plugin
from trivium.foundation.errors import DataError, MissingPackage, UnknownName
from trivium.foundation.registry import resolve
from trivium.policy import Policy
from trivium.types import Message, Task
from trivium.workflows.adapters import mapping_of, observed_text, seed_of
from trivium.workflows.episodes import EnvironmentFailure
from trivium.workflows.gymnasium import action_of

GAME = agent_game.__file__
PROMPT = (Message("user", "digit?"),)
COLUMNS = {"secret": 6, "options": {"secret": 6}, "reset": {"secret": 6}}
TASK = Task("t", (Message("tools", agent_game.TOOLS), *PROMPT), COLUMNS)
WITHOUT_TOOLS = Task("t", PROMPT, COLUMNS)
BY_FUNCTIONS: dict[str, Any] = {"observe": f"{GAME}:observe", "act": f"{GAME}:act"}


def guess(digit: object) -> str:
    return f'<tool_call>{{"name": "guess", "arguments": {{"digit": {json.dumps(digit)}}}}}</tool_call>'


COMPLETIONS = (guess(3), guess("x") + guess(7), guess(6), "6")
EARNED = {"environment": 1 - 3 * guessing.MISS}


@pytest.fixture
async def reference() -> list[str]:
    """The turns of the game behind an environment class."""
    player = policy(*COMPLETIONS)
    assert await workflow("multi_turn", environment=f"{GAME}:Guess").run(TASK, player) == EARNED
    assert len(player.turns) == 4
    return shown(player)


@asynccontextmanager
async def openenv(port: int = 0) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    """A server process on loopback. Yields (port, process)."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, GAME, "openenv", str(port), stdout=asyncio.subprocess.PIPE, env=env
    )
    assert process.stdout is not None
    try:
        yield int(await asyncio.wait_for(process.stdout.readline(), 60)), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_the_game_behind_gymnasium(reference: list[str]) -> None:
    agent_game.register()
    player = policy(*COMPLETIONS)
    episodes = workflow("gymnasium", id="Guess-v0", **{**BY_FUNCTIONS, "act": f"{__file__}:strict"})
    assert await episodes.run(TASK, player) == EARNED
    assert shown(player) == reference
    player = policy("?", "6")
    assert await episodes.run(TASK, player) == {"environment": 0.0}
    assert "<|user|>error: write a call<|end|>" in shown(player)[1]


def strict(completion: str) -> str:
    if completion == "?":
        raise ValueError("write a call")
    return completion


async def test_the_game_behind_openenv(reference: list[str]) -> None:
    async with openenv() as (port, _):
        fields = {"url": f"http://127.0.0.1:{port}", "observe": f"{GAME}:observe"}
        player = policy(*COMPLETIONS)
        assert await workflow("openenv", **fields).run(TASK, player) == EARNED
        assert shown(player) == reference
        with refused(EnvironmentFailure, "EXECUTION_ERROR", "it broke"):
            await workflow("openenv", **fields).run(TASK, policy("crash"))
        player = policy("a", "b")
        renamed = workflow("openenv", action_field="text", invalid_reward=-1, max_turns=2, **fields)
        assert await renamed.run(TASK, player) == {"environment": -2.0}
        assert "<|user|>error: Invalid message" in shown(player)[1]
        assert await workflow("openenv", **fields).run(TASK, policy("true")) == {"environment": 1.0}
        slow = workflow("openenv", act=f"{__file__}:held", call_deadline_s=0.2, **fields)
        try:
            with refused(EnvironmentFailure, "step", 0.2):
                await slow.run(TASK, policy("a"))
        finally:
            resolve("functions", f"{__file__}:RELEASE").set()


RELEASE = threading.Event()


def held(completion: str) -> dict[str, str]:
    """An action that takes longer than any deadline of these tests."""
    assert RELEASE.wait(60)
    return {"message": completion}


async def test_the_game_behind_mcp(reference: list[str]) -> None:
    fields = {"command": [sys.executable, guessing.__file__], "env": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    episodes = workflow("mcp", **fields, start_tool="begin", reward_tool="score")
    player = policy(*COMPLETIONS)
    assert await episodes.run(WITHOUT_TOOLS, player) == EARNED
    found = shown(player)
    assert len(found) == 4
    tools = [text.partition("<|user|>")[0] for text in (found[0], reference[0])]
    assert "Compares a digit with the hidden one." in tools[0]
    assert not {"begin", "score"} & set(tools[0].split('"'))
    assert [text.partition("<|user|>")[2] for text in found] == [text.partition("<|user|>")[2] for text in reference]
    assert player.metrics == {"env_done": 1.0, "tool_calls": 4.0, "tool_errors": 0.0}
    episodes = workflow("mcp", **fields, start_tool="begins")
    with refused(EnvironmentFailure, "begins", "begin"):
        await episodes.run(WITHOUT_TOOLS, policy("6"))


async def test_an_mcp_server_that_starts_late_separates_rollouts_and_one_that_restarts_fails_them() -> None:
    port = port_below_ephemeral()
    episodes = workflow("mcp", url=f"http://127.0.0.1:{port}/mcp", start_tool="begin", reward_tool="score")
    others, players, begun = (
        Task("u", PROMPT, {"secret": 5}),
        [policy(*COMPLETIONS) for _ in range(2)],
        asyncio.Barrier(2),
    )
    for player in players:
        player.generate = preceded(player, 0, begun.wait)
    rollouts = (episodes.run(task, each) for task, each in zip((WITHOUT_TOOLS, others), players, strict=True))
    waiting = asyncio.gather(*rollouts)
    async with mcp_at(port) as process:
        assert await waiting == [EARNED, {"environment": -4 * guessing.MISS}]
        await check_what_fails(episodes)
        player = policy(*COMPLETIONS)
        async with AsyncExitStack() as stack:

            async def restart() -> None:
                await kill(process)
                await stack.enter_async_context(mcp_at(port))

            player.generate = preceded(player, 1, restart)
            with refused(EnvironmentFailure, "'guess'"):
                await episodes.run(WITHOUT_TOOLS, player)
        assert len(player.turns) == 2


async def check_what_fails(episodes: Any) -> None:
    """A tool that raises answers the policy; a task that names an unknown tool fails."""
    player = policy(guess("crash"), "6")
    assert await episodes.run(WITHOUT_TOOLS, player) == {"environment": 0.0}
    assert "<|tool|>error: Error executing tool guess" in shown(player)[1]
    chosen = Task("row", PROMPT, {**COLUMNS, "tools": ["gues"]})
    with refused(EnvironmentFailure, "'tools'", "'row'", "'gues'", "'guess'") as caught:  # known only at run time
        await episodes.run(chosen, policy("6"))
    assert "'tools'" in caught.value.asked
    assert "'guess'" in caught.value.do


@asynccontextmanager
async def mcp_at(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """An MCP server process that listens at a port of loopback."""

    async def listens() -> bool:
        with suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return True
        return False

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(sys.executable, guessing.__file__, str(port), env=env)
    try:
        await until(listens)
        yield process
    finally:
        if process.returncode is None:
            await kill(process)


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


def preceded(player: Policy, num_turns: int, action: Callable[[], Awaitable[object]]) -> Any:
    """The policy's `generate`, which calls `action` before the completion that follows `num_turns` others."""
    generate = player.generate

    async def generated(*args: Any, **kwargs: Any) -> Any:
        if len(player.turns) == num_turns:
            await action()
        return await generate(*args, **kwargs)

    return generated


async def test_a_server_that_dies_in_an_episode_fails_it_and_one_that_starts_late_does_not() -> None:
    async with openenv(port_below_ephemeral()) as (port, process):  # its port stays free while it is away
        episodes = workflow("openenv", url=f"ws://127.0.0.1:{port}", observe=f"{GAME}:observe", connect_deadline_s=60)
        player = policy(*COMPLETIONS)
        player.generate = preceded(player, 1, lambda: kill(process))
        with refused(EnvironmentFailure, "step", "t") as caught:
            await episodes.run(TASK, player)
        assert "ConnectionClosed" in caught.value.found
    waiting = asyncio.ensure_future(episodes.run(TASK, policy(*COMPLETIONS)))
    await asyncio.sleep(0.3)  # in which it would give up
    assert not waiting.done()
    async with openenv(port):
        assert await waiting == EARNED
    absent = workflow("openenv", url=f"ws://127.0.0.1:{port}", observe=f"{GAME}:observe", connect_deadline_s=0.3)
    with refused(EnvironmentFailure, f"127.0.0.1:{port}", 0.3):
        await absent.run(TASK, policy("a"))
    missing = workflow("mcp", url=f"http://127.0.0.1:{port}/mcp", connect_deadline_s=3)
    with refused(EnvironmentFailure, f"127.0.0.1:{port}", "3 s", "ConnectError"):
        await missing.run(WITHOUT_TOOLS, policy("a"))


class Small:
    """A server in OpenEnv's format with room for `capacity` sessions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sessions = self.most = self.refused = 0

    async def __call__(self, connection: ServerConnection) -> None:
        if self.sessions >= self.capacity:
            self.refused += 1
            await connection.send(
                json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
            )
            return
        self.sessions += 1
        self.most = max(self.most, self.sessions)
        try:
            async for text in connection:
                if json.loads(text)["type"] == "close":
                    return
                await connection.send(json.dumps({"type": "observation", "data": {"observation": "go", "reward": 1.0}}))
        finally:
            self.sessions -= 1


@pytest.mark.parametrize("limit", [3, 5])
async def test_sessions_wait_for_the_limit_and_those_that_a_full_server_refuses_are_tried_again(limit: int) -> None:
    server = Small(capacity=3)
    async with serve(server, "127.0.0.1", 0) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        episodes = workflow("openenv", url=f"ws://127.0.0.1:{port}", max_turns=4, max_environments=limit)
        runs = [episodes.run(Task("t", PROMPT), policy(*"abcd")) for _ in range(12)]
        assert await asyncio.gather(*runs) == [{"environment": 4.0}] * 12
    assert server.most == 3
    assert bool(server.refused) == (limit > 3)


# --- texts and actions


async def test_gymnasium_reads_actions_by_their_space_and_shows_observations_as_text() -> None:
    lake = workflow("gymnasium", id="FrozenLake-v1", environment_args={"is_slippery": False, "render_mode": "ansi"})
    player = policy("go 1", "9", "2", *["1"] * 9)
    assert await lake.run(Task("t", PROMPT), player) == {"environment": 0.0}
    first, second, third = shown(player)[:3]
    assert first.startswith("<|user|>digit?\n\n")
    assert "[S]FFF" in first
    assert "(Down)" in second
    assert "error: write a number from 0 to 3" in third
    pole = workflow("gymnasium", id="CartPole-v1", max_turns=2)
    seeds = [Task("t", PROMPT, {"seed": 1}), Task("t", PROMPT, {"seed": 1}), Task("t", PROMPT, {"seed": 2})]
    players = [policy("0", "1") for _ in seeds]
    for task, each in zip(seeds, players, strict=True):
        assert await pole.run(task, each) == {"environment": 2.0}
    assert shown(players[0]) == shown(players[1]) != shown(players[2])


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("a", "a"),
        ({"text": "a", "none": None}, "a"),
        ({"text": "a", "n": 1}, '{"text": "a", "n": 1}'),
        (np.arange(3), "[0, 1, 2]"),
        ({"x": np.float32(0.5)}, '{"x": 0.5}'),
    ],
)
def test_an_observation_as_text(observation: object, text: str) -> None:
    assert observed_text(observation) == text


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(4), "go 3", 3),
        (spaces.Discrete(4), "speed 2.1", None),
        (spaces.Discrete(4), "1e400", None),
        (spaces.MultiBinary(2), "0 1", [0, 1]),
        (spaces.MultiBinary(2), "256 1", None),
        (spaces.MultiBinary(2), "0.9 1", None),
        (spaces.MultiDiscrete([3, 3]), "2 0", [2, 0]),
        (spaces.MultiDiscrete([3, 3]), "2.9 -0.5", None),
        (spaces.MultiDiscrete([3, 3]), "1e400 1", None),
        (spaces.Box(-np.inf, np.inf, (1,)), "0.5", [0.5]),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e400", None),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e300", None),
    ],
)
def test_an_action_of_a_space(space: Any, text: str, action: Any) -> None:
    if action is None:
        with pytest.raises(ValueError, match="write"):
            action_of(space)(text)
    else:
        assert np.asarray(action_of(space)(text)).tolist() == action


@pytest.mark.parametrize(
    ("columns", "seed"), [({"seed": 7}, 7), ({"seed": 7.0}, 7), ({"seed": 7.5}, None), ({"seed": "7"}, None)]
)
def test_a_seed_is_a_whole_number(columns: dict[str, Any], seed: int | None) -> None:
    task = Task("t", PROMPT, columns)
    if seed is not None:
        assert seed_of(task) == seed
        return
    with refused(DataError, "'seed'", "'t'", repr(columns["seed"])):
        seed_of(task)


def test_a_column_with_a_mapping() -> None:
    assert mapping_of(TASK, "reset") == {"secret": 6}
    assert mapping_of(TASK, "absent") is None
    with refused(DataError, "'reset'", "'t'"):
        mapping_of(Task("t", PROMPT, {"reset": '{"secret": 6}'}), "reset")


def test_an_unknown_environment_is_found_before_the_run() -> None:
    for name, num_problems in (("FrozenLake-v1", 0), ("FrozenLake", 0), ("FrozenLake-v9", 1), ("Frozen-v1", 1)):
        config = plugin("workflows")({"kind": "gymnasium", "id": name})
        problems = list(config.problems(RunConfig.model_construct(), "workflow"))
        assert [problem.where for problem in problems] == ["workflow.id"] * num_problems


def test_functions_that_are_not_there_are_found_before_the_run() -> None:
    with refused(UnknownName, "observes"):
        workflow("openenv", url="ws://localhost:1", observe=f"{GAME}:observes")


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"gymnasium": {"id": "Guess-v0"}, "mcp": {"url": "http://127.0.0.1:9"}, "verifiers": {"env": {}}}
    for kind, given in fields.items():
        monkeypatch.setitem(sys.modules, kind, None)
        extra = "verifiers" if kind == "verifiers" else "envs"
        with refused(MissingPackage, kind, f"pip install 'trivium[{extra}]'"):
            workflow(kind, **given)
