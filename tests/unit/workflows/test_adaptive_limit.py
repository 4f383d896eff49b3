"""The number of sessions that a server gets: bounds, long tails, a server that slows down with its sessions."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve
from workflow_parts import policy, workflow

from trivium.types import Message, Task
from trivium.workflows.adapters import connected
from trivium.workflows.adaptive_limit import AdaptiveTurns, Call, Load, Window, adapted

CALLS = st.builds(
    lambda seconds, failed, *others: Call(None if failed else seconds, others[0], failed, others[1]),
    st.none() | st.floats(0, 1e4),
    st.booleans(),
    st.integers(0, 40),
    st.floats(-1e4, 1e4),
)


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
                assert load.window == Window()
            if call.seconds is None and load.lowest is not None:  # a failed call has no latency
                assert load.lowest.total in (before.lowest.total if before.lowest else None, before.window.total)


def simulated(latency: Callable[[int, random.Random], float | None], most: int, num_calls: int) -> list[float]:
    """The limits after each call of `most` clients that always have a next call."""
    rng, now, load, running = random.Random(0), 0.0, Load(float(min(8, most))), list[tuple[float, int, Call]]()
    limits = list[float]()
    while len(limits) < num_calls:
        while len(running) < int(load.limit):
            seconds = latency(len(running) + 1, rng)
            call = Call(seconds, len(running) + 1, failed=seconds is None)
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


def test_a_server_that_slows_down_gets_the_environments_of_its_highest_throughput_and_more_when_it_recovers() -> None:
    numbers, slow = itertools.count(), 10_000

    def latency(environments: int, _: random.Random) -> float:
        return 0.04 * (1 + (environments / (16 if next(numbers) < slow else 1e6)) ** 2)

    limits = simulated(latency, 128, 15_000)
    while_slow = limits[1_000 : slow - 128]
    assert max(while_slow) < 3 * 16
    best = 0.04 * (1 + 1) / 16  # seconds per call with 16 environments
    assert fmean(0.04 * (1 + (int(limit) / 16) ** 2) / int(limit) for limit in while_slow) < best / 0.85
    assert limits[-1] == 128


def test_calls_without_a_latency_raise_the_limit_and_refusals_are_a_fraction_of_them_too() -> None:
    def last_limit(refusals: Callable[[int], bool]) -> int:
        turns = AdaptiveTurns(64)
        for number in range(2_000):
            turns.running = turns.limit
            with suppress(OSError), turns.observed((OSError,), timed=False):
                if refusals(number):
                    raise OSError
        return turns.limit

    assert last_limit(lambda _: False) == 64
    assert last_limit(lambda number: number % 100 == 0) == 64
    assert last_limit(lambda number: number % 5 == 0) < 8


async def test_a_server_that_starts_is_not_full() -> None:
    turns, attempts = AdaptiveTurns(64), itertools.count()

    async def connect() -> None:
        if next(attempts) < 64:
            raise ConnectionRefusedError

    async with asyncio.timeout(60):
        await asyncio.gather(*(connected("a server", connect, (OSError,), 20, turns) for _ in range(64)))
    assert next(attempts) == 128
    assert turns.limit == 8


async def test_a_slowdown_counts_in_proportion_to_the_time_that_environments_are_open() -> None:
    """All environments call a fast server at the same time, so an event loop that needs 0.5 ms for each is late."""

    async def last_limit(between: float) -> int:
        now = 0.0
        turns = AdaptiveTurns(256, lambda: now)
        for _ in range(40):
            async with AsyncExitStack() as opened:
                for _ in range(turns.limit):
                    await opened.enter_async_context(turns)
                for _ in range(4):
                    now += between
                    with ExitStack() as calls:
                        for _ in range(turns.running):
                            calls.enter_context(turns.observed())
                        now += 0.002 + 0.0005 * turns.running
            now += 100  # the trainer's step, without rollouts
        return turns.limit

    assert await last_limit(0.4) == 256
    assert await last_limit(0.0) < 64


# --- over a real socket


class Server:
    """A server in OpenEnv's format with room for `capacity` sessions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sessions = self.most = 0

    async def __call__(self, socket: ServerConnection) -> None:
        if self.sessions >= self.capacity:
            await socket.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}))
            return
        self.sessions += 1
        self.most = max(self.most, self.sessions)
        try:
            async for text in socket:
                if json.loads(text)["type"] == "close":
                    return
                await socket.send(json.dumps({"type": "observation", "data": {"observation": "go", "reward": 1.0}}))
        finally:
            self.sessions -= 1


async def test_the_answers_of_a_server_raise_the_limit_and_its_refusals_reduce_it() -> None:
    server = Server(capacity=3)
    async with serve(server, "127.0.0.1", 0) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]

        async def limits() -> list[float]:
            episodes = workflow("openenv", url=f"ws://127.0.0.1:{port}", max_turns=4)
            players = [policy(*"abcd") for _ in range(30)]
            earned = await asyncio.gather(
                *(episodes.run(Task("t", (Message("user", "go"),)), each) for each in players)
            )
            assert earned == [{"environment": 4.0}] * 30
            return [each.metrics["perf/environment_limit"] for each in players]

        async def reaches(wanted: Callable[[float], bool]) -> bool:
            """Whether one of the next limits is wanted. How many calls that takes depends on the machine's load."""
            for _ in range(10):
                if any(map(wanted, await limits())):
                    return True
            return False

        assert await reaches(lambda limit: limit < 8)
        assert server.most == 3
        server.capacity = 1000
        assert await reaches(lambda limit: limit >= 16)


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
    async with asyncio.timeout(60):
        await asyncio.gather(*visits[1:])
    assert running == list(range(8))
    assert turns.running == 0
