"""A running endpoint for tests: real HTTP, a scripted engine and the memory buffer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from tests.waiting import until
from trivium.buffers.memory import MemoryBuffer
from trivium.config import RewardConfig
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.board import MemoryBoard
from trivium.foundation.randomness import uniforms
from trivium.rewards.judge import make_judge
from trivium.schedule import Schedule
from trivium.serving import sessions
from trivium.serving.connections import serve_app
from trivium.serving.gateway import Gateway
from trivium.serving.server import ChatServer
from trivium.serving.sessions import ServingOptions
from trivium.synchronizer import Synchronizer
from trivium.tasks.served import ServedTasks
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Completion, Group, Request, Sampling
from trivium.workflows.single_turn import SingleTurn

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

RENDERER = ChatRenderer(tiny_tokenizer("bytes"))
VOCABULARY = 263
NAME = "server"


def anthropic(url: str, key: str = "none", *, retries: int = 0) -> AsyncAnthropic:
    """Anthropic's client of an endpoint. The tests that run import it, not their modules, which every test process
    imports: it has 3,000 modules, which take 40 MB and a CPU second."""
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(base_url=url, api_key=key, max_retries=retries)


class Babbler(ScriptedEngine):
    """Says arbitrary ids (broken UTF-8, special tokens), drawn from the key; keeps what it gave."""

    def __init__(self, **config: Any) -> None:
        said = {"replies": ((65, 66),), **config}
        super().__init__(ScriptedEngine.Config(**said), eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode)
        self.babbles = "replies" not in config
        self.given: list[tuple[Request, Completion]] = []
        self.may_answer = asyncio.Event()
        """Cleared by a test that needs calls in progress."""
        self.may_answer.set()

    def _choose(self, request: Request, version: int) -> str | Sequence[int]:
        if not self.babbles:
            return super()._choose(request, version)
        drawn = uniforms(np.uint64(request.key.digest()), np.arange(9))
        return [int(u * VOCABULARY) for u in drawn[: 1 + int(drawn[8] * 8)]]

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        await self.may_answer.wait()
        self.given.append((request, done))
        return done


class StoppedClock:
    """The time by which sessions end. It passes when a test adds to `now`, however slow the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(sessions, "time", self)

    def monotonic(self) -> float:
        return self.now


@dataclass
class Served:
    """A running endpoint and what stands behind it."""

    client: httpx.AsyncClient
    gateway: Gateway
    buffer: MemoryBuffer
    engine: Babbler
    running: asyncio.Task[None]
    synchronizer: Synchronizer
    url: str
    announced: list[bool]
    """Whether the policy was loaded when the endpoint was announced."""

    async def chat(self, *messages: Any, expect: int = 200, **more: Any) -> dict[str, Any]:
        said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        answer = await self.client.post("/v1/chat/completions", json={"model": "policy", "messages": said, **more})
        assert answer.status_code == expect, answer.text
        return answer.json()

    async def feedback(self, expect: int = 200, **said: Any) -> dict[str, Any]:
        answer = await self.client.post("/feedback", json=said)
        assert answer.status_code == expect, answer.text
        return answer.json()

    async def take(self, count: int = 1, version: int = 0) -> list[Group]:
        return await asyncio.wait_for(self.buffer.take(count, version), 60)

    async def eventually(self, **health: Any) -> None:
        now: dict[str, Any] = {}

        async def holds() -> bool:
            now.update((await self.client.get("/health")).json())
            return health.items() <= now.items()

        await until(holds, why=lambda: now)


@asynccontextmanager
async def served(
    path: Path,
    *,
    group_size: int = 2,
    groups: int = 4,
    staleness: int = 1,
    idle_s: float = 60.0,
    unstarted_idle_s: float = 60.0,
    require_secret: bool = False,
    linger_s: float = 0.0,
    deadline_s: float = 30.0,
    min_members: int = 1,
    rewards: Sequence[RewardConfig] = (),
    api_key: str | None = None,
    temperature: float = 1.0,
    loaded: bool = True,
    broken: bool = False,
    max_body_bytes: int = 2**22,
    max_connections: int = 512,
    max_new_tokens: int = 8,
    renderer: ChatRenderer = RENDERER,
    policy: Any = None,
    extend: Callable[[FastAPI], None] = lambda app: None,
    **engine: Any,
) -> AsyncGenerator[Served]:
    """`policy` is another engine than a Babbler; `extend` adds routes of a test's own."""
    babbler, judge = policy or Babbler(**engine), make_judge(rewards)
    explorer = Explorer(
        babbler,
        renderer,
        SingleTurn(SingleTurn.Config()),
        judge,
        Sampling(max_new_tokens, temperature),
        RolloutLimits(deadline_s, 64, min_members=min_members),
        NAME,
    )
    schedule = Schedule(
        ServedTasks(ServedTasks.Config(kind="served"), name="train", seed=0),
        seed=0,
        groups_per_step=groups,
        group_size=group_size,
        max_staleness=staleness,
        steps=100,
    )
    buffer = MemoryBuffer(MemoryBuffer.Config(), schedule=schedule, rollouts=path, renderer=RENDERER, deadline_s=30.0)
    await buffer.restore(None, 0)
    synchronizer = Synchronizer(MemoryBoard(), deadline_s=30.0)
    synchronizer.open()
    if loaded:
        synchronizer.adopted(NAME, 0)
        await buffer.advance(NAME, 0)
    options = ServingOptions(
        idle_s,
        unstarted_idle_s,
        deadline_s,
        frozenset(judge.labels),
        judge.check_columns,
        require_secret,
        linger_s,
    )
    gateway = Gateway(explorer, buffer, schedule, synchronizer, options)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    app = ChatServer(gateway, "policy", api_key, max_body_bytes).app
    extend(app)
    async with serve_app(app, "127.0.0.1", 0, max_connections) as url:
        announced: list[bool] = []
        running = asyncio.create_task(gateway.run(lambda: announced.append(gateway.loaded)))
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=100, limits=httpx.Limits()) as client:
            here = Served(client, gateway, buffer, babbler, running, synchronizer, url, announced)
            if loaded:
                await here.eventually(loaded=True)
            yield here
        running.cancel()
        await asyncio.wait([running])
    if not (running.cancelled() or broken):
        running.result()
