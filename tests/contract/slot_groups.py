"""Schedules, leases and groups for the contract of a buffer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trivium.foundation.errors import DataError
from trivium.schedule import Schedule
from trivium.testing.promises import require
from trivium.types import Group, Lease, Message, StopReason, Task, Trajectory, Turn

if TYPE_CHECKING:
    from trivium.protocols import Buffer

MakeBuffer = Callable[[str, Schedule], "Buffer"]


def make_schedule(**change: object) -> Schedule:
    tasks: Any = [Task(f"t{place}", (Message("user", f"{place}="),), {"answer": place}) for place in range(8)]
    options: dict[str, Any] = {"groups_per_step": 2, "steps": 50, "shuffle": False, **change}
    return Schedule(tasks, 0, **options)


async def opened(
    make: MakeBuffer, name: str, schedule: Schedule, state: Mapping[str, Any] | None = None, version: int = 0
) -> Buffer:
    """Opens an end of the buffer as a trainer does, with an explorer `e` that has loaded version 0."""
    buffer = make(name, schedule)
    await buffer.restore(state, version)
    await buffer.advance("e", 0)
    return buffer


async def lease(buffer: Buffer, owner: str = "e", version: int | None = None) -> Lease:
    """A lease of `owner`, after it has loaded `version`."""
    if version is not None:
        await buffer.advance(owner, version)
    held = await buffer.lease(owner)
    assert held is not None
    return held


async def leases(buffer: Buffer, count: int, owner: str = "e") -> list[Lease]:
    return [await lease(buffer, owner) for _ in range(count)]


async def rolled_out(buffer: Buffer, count: int, owner: str = "e", version: int = 0) -> list[int]:
    """Leases slots for `owner`, which loads `version` first, one after the other, and puts their groups; returns the
    slots."""
    await buffer.advance(owner, version)
    slots = list[int]()
    for _ in range(count):
        held = await lease(buffer, owner)
        await buffer.put(owner, make_group(held, version))
        slots.append(held.slot)
    return slots


async def saved(buffer: Buffer) -> dict[str, Any]:
    """The state of the buffer in a checkpoint."""
    return json.loads(json.dumps(await buffer.state()))


def make_group(lease: Lease, version: int = 0) -> Group:
    """A group of an explorer that has loaded `version`."""
    turn = Turn(
        np.arange(3, dtype=np.int32),
        np.array([5, 6 + lease.slot], np.int32),
        np.array([-0.5, -1.25], np.float32),
        np.full(2, version, np.int32),
        StopReason.EOS,
        "six",
    )
    task = Task(f"t{lease.slot % 8}", (Message("user", f"{lease.slot % 8}="),), {"answer": lease.slot % 8})
    rollouts = (Trajectory(0, (turn,), {"exact": 1.0}), Trajectory(1, (turn,), {"exact": 0.0}, metrics={"n": 2.0}))
    return Group(lease.slot, task, rollouts, lease.slot // 8, lease.attempt, version)


def slots_of(groups: Sequence[Group]) -> list[int]:
    return [group.slot for group in groups]


async def refused(putting: Awaitable[object], promise: str) -> None:
    try:
        await putting
    except DataError:
        return
    require(False, promise + ": DataError for anything else")
