"""The buffer in a database answers as the one in memory does, whatever is asked of both."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from sql_roles import make_end, make_group, make_schedule

from trivium.buffers.journal import decode_group, encode_group
from trivium.buffers.memory import MemoryBuffer
from trivium.foundation.errors import DataError, SyncError
from trivium.schedule import Schedule
from trivium.types import Group, Lease


def sqlite(path: Path) -> str:
    return f"sqlite:///{path / 'buffer.db'}"


class Twins:
    """Does everything to a buffer in memory and to one in SQLite, and compares what they say."""

    def __init__(self, path: Path, schedule: Schedule) -> None:
        self.path, self.schedule = path, schedule
        self.version = 0
        self.held: dict[Lease, str] = {}
        self.loaded = {"a": 0, "b": 0}
        self.saved: list[tuple[dict[str, Any], int]] = []
        self.seen: Counter[str] = Counter()
        """How often something came about that the test is for."""

    async def begin(self, state: dict[str, Any] | None = None, version: int = 0) -> None:
        self.memory = MemoryBuffer(
            MemoryBuffer.Config(),
            schedule=self.schedule,
            rollouts=self.path / "memory",
            renderer=cast("Any", None),
            deadline_s=0.01,
        )
        self.sql = make_end(sqlite(self.path), self.schedule, self.path / "sql", deadline_s=0.01)
        await self.both("restore", state, version)
        self.version, self.held, self.loaded = version, {}, {}

    async def both(self, name: str, *args: Any, **kwargs: Any) -> Any:
        answers = [await _said(getattr(buffer, name)(*args, **kwargs)) for buffer in (self.memory, self.sql)]
        assert answers[0] == answers[1], (name, args, answers)
        return answers[0]

    async def advance(self, owner: str, lag: int) -> None:
        self.loaded[owner] = max(self.loaded.get(owner, 0), self.version - lag, 0)
        await self.both("advance", owner, self.loaded[owner])

    async def lease(self, owner: str) -> None:
        lease = await self.both("lease", owner, wait=False)
        if lease is not None:
            self.held[lease] = owner
            self.seen["leased"] += 1

    async def put(self, pick: int, dropped: bool, newer: bool) -> None:
        if not self.held:
            return
        lease = sorted(self.held, key=lambda lease: (lease.slot, lease.attempt))[pick % len(self.held)]
        owner = self.held.pop(lease)
        newest = self.loaded.get(owner, 0)
        group = make_group(lease, newest if newer else max(0, newest - 1), newest)
        await self.both("put", owner, group.refused("unwanted") if dropped else group)
        self.seen["put"] += 1

    async def take(self, count: int) -> None:
        taken = await self.both("take", count, self.version)
        if isinstance(taken, list):
            self.seen["taken"] += 1
            self.version += 1
            await self.both("taken_groups", [decode_group(payload).slot for payload in taken])

    async def release(self, owner: str) -> None:
        await self.both("release", owner)
        self.held = {lease: holder for lease, holder in self.held.items() if holder != owner}

    async def heard(self, owner: str) -> None:
        """What was called off: the buffer in memory waits where there is nothing."""
        try:
            async with asyncio.timeout(0.001):
                off = await self.memory.cancelled_leases(owner)
        except TimeoutError:
            return
        other = await self.sql.cancelled_leases(owner)
        assert sorted(off, key=lambda lease: lease.slot) == sorted(other, key=lambda lease: lease.slot)

    async def save(self) -> None:
        state = await self.both("state")
        self.seen += Counter(await self.both("counts"))
        self.saved.append((json.loads(json.dumps(state)), self.version))

    async def die(self, pick: int) -> None:
        """A new life from a checkpoint; what later ones say is never asked for again."""
        if self.saved:
            del self.saved[pick % len(self.saved) + 1 :]
            await self.begin(*self.saved[-1])
            self.seen["restored"] += 1
        else:
            await self.begin()
        await self.both("state")


async def _said(answer: Any) -> Any:
    """What a call returns or raises, in a form that can be compared."""
    try:
        value = await answer
    except (SyncError, DataError) as error:
        return type(error).__name__, error.asked if isinstance(error, SyncError) else ""
    if isinstance(value, list) and value and isinstance(value[0], Group):
        return [encode_group(group) for group in value]
    return value


KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "asynchronous": {"max_staleness": 1},
    "few attempts": {"max_staleness": 2, "max_attempts": 2},
    "deterministic": {"max_staleness": 1, "deterministic": True},
    "over-rollout": {"over_rollout": 2, "max_attempts": 1},
}
WEIGHTS = {
    "lease": 8,
    "put": 8,
    "take": 4,
    "advance": 5,
    "release": 0.5,
    "refuse": 0.5,
    "heard": 2,
    "save": 1,
    "die": 0.6,
}


def a_step(chance: random.Random) -> tuple[Any, ...]:
    """Something that may be done to a buffer."""
    name, owner = chance.choices([*WEIGHTS], [*WEIGHTS.values()])[0], chance.choice("ab")
    arguments: dict[str, tuple[Any, ...]] = {
        "lease": (owner,),
        "put": (chance.randrange(9), chance.random() < 0.1, chance.random() < 0.5),
        "take": (chance.choice([1, 2, 2]),),
        "advance": (owner, chance.choice([0, 0, 0, 1, 2])),
        "release": (owner,),
        "refuse": (1,),
        "heard": (owner,),
        "save": (),
        "die": (chance.randrange(4),),
    }
    return (name, *arguments[name])


@pytest.mark.parametrize("kind", KINDS)
async def test_it_answers_as_the_buffer_in_memory_does(tmp_path: Path, kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in (0, 1, 17):
        chance, twins = random.Random(seed), Twins(tmp_path / str(seed), make_schedule(**KINDS[kind]))
        await twins.begin()
        for name, *args in [("advance", "a", 0), ("advance", "b", 0), *(a_step(chance) for _ in range(120))]:
            await (getattr(twins, name)(*args) if hasattr(twins, name) else twins.both(name, *args))
        await twins.save()
        seen += twins.seen
    always = {"leased", "put", "taken", "restored", "dropped"}
    if not make_schedule(**KINDS[kind]).ordered:
        always |= {"evicted", "called_off"}
    assert always <= set(+seen), seen
