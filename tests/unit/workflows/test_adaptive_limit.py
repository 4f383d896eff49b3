"""The number of sessions that a server gets: bounds, long tails, a server that slows down with its sessions."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve
from workflow_parts import policy, workflow

from trivium.types import Message, Task
from trivium.workflows.adaptive_limit import AdaptiveTurns, Call, Load, adapted

CALLS = st.builds(Call, st.none() | st.floats(0, 1e4), st.integers(0, 40))


@given(st.lists(st.tuples(CALLS, st.integers(1, 40)), max_size=30), st.integers(1, 40))
def test_the_limit_keeps_its_bounds_and_changes_step_by_step(calls: list[tuple[Call, int]], most: int) -> None:
    load = Load(float(min(8, most)))
    for call, times in calls:
        for _ in range(times):
            before, load = load, adapted(load, call, most)
            assert 1 <= load.limit <= most
            assert 0.7 * before.limit <= max(load.limit, 0.7)
            assert load.limit <= 2 * before.limit
            if load.limit != before.limit:
                assert call.environments <= before.limit + 1
                assert load.window.num == load.window.failed == 0
            if call.seconds is None and load.lowest is not None:  # a failed call has no latency
                assert load.lowest.total in (before.lowest.total if before.lowest else None, before.window.total)


def simulated(latency: Callable[[int, random.Random], float | None], most: int, num_calls: int) -> list[float]:
    """The limits after each call of `most` clients that always have a next call."""
    rng, now, load, running = random.Random(0), 0.0, Load(float(min(8, most))), list[tuple[float, int, Call]]()
    limits = list[float]()
    while len(limits) < num_calls:
        while len(running) < int(load.limit):
            seconds = latency(len(running) + 1, rng)
            call = Call(seconds, len(running) + 1)
            heapq.heappush(running, (now + (0.1 if seconds is None else seconds), rng.getrandbits(60), call))
        now, _, call = heapq.heappop(running)
        load = adapted(load, call, most)
        limits.append(load.limit)
    return limits


def test_long_tails_and_rare_failures_do_not_reduce_it_and_failures_of_many_do() -> None:
    tailed = simulated(lambda _, rng: None if rng.random() < 0.02 else rng.lognormvariate(0, 1.2), 256, 20_000)
    assert tailed[-1] == 256
    assert sorted(tailed) == tailed
    refusing = simulated(lambda number, _: None if number > 20 else 1.0, 256, 5_000)
    assert 10 < min(refusing[1000:]) < max(refusing[1000:]) < 40
    slower = simulated(lambda number, _: 1.0 + (number / 30) ** 2, 256, 20_000)
    assert 20 < min(slower[5000:]) < max(slower[5000:]) < 50


def test_latencies_that_do_not_come_from_the_load_become_the_normal_ones() -> None:
    load = Load(8.0)
    for seconds in [0.1] * 2_000 + [0.9] * 6_000:
        load = adapted(load, Call(seconds, int(load.limit)), 64)
    assert load.limit == 64


# --- over real sockets


class Server:
    """A server in OpenEnv's format whose calls take `base_s * (1 + (sessions / knee)²)`."""

    def __init__(self, base_s: float, knee: float, capacity: int = 1000) -> None:
        self.base_s, self.knee, self.capacity = base_s, knee, capacity
        self.sessions = self.calls = self.refusals = self.most = 0

    async def __call__(self, socket: ServerConnection) -> None:
        if self.sessions >= self.capacity:
            self.refusals += 1
            await socket.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}))
            return
        self.sessions += 1
        self.most = max(self.most, self.sessions)
        try:
            async for text in socket:
                kind = json.loads(text)["type"]
                if kind == "close":
                    return
                if kind == "step":
                    self.calls += 1
                    await asyncio.sleep(self.base_s * (1 + (self.sessions / self.knee) ** 2))
                await socket.send(json.dumps({"type": "observation", "data": {"observation": "go", "reward": 1.0}}))
        finally:
            self.sessions -= 1


TASK = Task("t", (Message("user", "go"),))
STEPS = 4


async def test_a_server_that_slows_down_gets_the_sessions_of_its_highest_throughput_and_more_when_it_recovers() -> None:
    server = Server(0.04, 16)  # its throughput is highest with 16 sessions
    async with serve(server, "127.0.0.1", 0) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]

        async def rolled_out(episodes: Any, number: int) -> tuple[float, list[float]]:
            """Episodes per second, and the limits in order of the rollouts."""
            players, began = [policy(*"abcd") for _ in range(number)], time.monotonic()
            earned = await asyncio.gather(*(episodes.run(TASK, player) for player in players))
            assert earned == [{"environment": float(STEPS)}] * number
            limits = [player.metrics["perf/environment_limit"] for player in players]
            return number / (time.monotonic() - began), limits

        fixed, adaptive = (
            workflow("openenv", url=f"ws://127.0.0.1:{port}", max_turns=STEPS, max_environments=most)
            for most in (16, 128)
        )
        await rolled_out(fixed, 20)
        best, limits = await rolled_out(fixed, 100)
        assert {*limits} == {16.0}
        await rolled_out(adaptive, 60)
        rate, limits = await rolled_out(adaptive, 100)
        assert rate > 0.85 * best
        assert max(limits) < 3 * 16
        server.knee = 1e6
        _, limits = await rolled_out(adaptive, 250)
        assert limits[-1] > 3 * 16
        assert server.most <= 128


async def test_a_server_with_few_sessions_is_not_asked_for_many() -> None:
    server = Server(0.01, 1e6, capacity=3)
    async with serve(server, "127.0.0.1", 0) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        episodes = workflow("openenv", url=f"ws://127.0.0.1:{port}", max_turns=STEPS)
        players = [policy(*"abcd") for _ in range(60)]
        await asyncio.gather(*(episodes.run(TASK, player) for player in players))
    assert server.most == 3
    assert [player.metrics["perf/environment_limit"] for player in players][-1] < 8


async def test_a_limit_that_falls_holds_up_the_next_and_one_that_rises_admits_them() -> None:
    turns, running = AdaptiveTurns(4), list[int]()
    release = asyncio.Event()

    async def visit(number: int) -> None:
        async with turns:
            running.append(number)
            await release.wait()

    visits = [asyncio.create_task(visit(number)) for number in range(8)]
    await asyncio.sleep(0)
    assert running == [0, 1, 2, 3]
    turns.set_limit(2)
    visits[0].cancel()
    await asyncio.wait(visits[:1])
    assert len(running) == 4  # three still run
    turns.set_limit(5)
    await asyncio.sleep(0)
    assert running == [0, 1, 2, 3, 4, 5]
    release.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*visits[1:])
    assert running == list(range(8))
    assert turns.running == 0
