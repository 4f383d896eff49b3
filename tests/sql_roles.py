"""What the processes of the crash tests do, and the groups they make."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np

from trivium.buffers.sql.buffer import SqlBuffer
from trivium.foundation.errors import RoleFailed
from trivium.schedule import Schedule
from trivium.types import Group, Lease, Message, StopReason, Task, Trajectory, Turn

TASKS: Any = [Task(f"t{place}", (Message("user", f"{place}="),), {"answer": place}) for place in range(5)]


def make_schedule(**change: Any) -> Schedule:
    return Schedule(TASKS, 0, **{"groups_per_step": 2, "steps": 50, "shuffle": False, **change})


def make_group(lease: Lease, version: int = 0, newest: int | None = None) -> Group:
    versions = np.array([version, version if newest is None else newest])
    turn = Turn(np.arange(3), np.array([5, lease.slot]), np.array([-0.5, -1.25]), versions, StopReason.EOS, "hi")
    played = (Trajectory(0, (turn,), {"exact": 1.0}), Trajectory(1, (turn,), {"exact": 0.0}))
    return Group(lease.slot, TASKS[lease.slot % 5], played, lease.slot // 5, lease.attempt, version)


def make_end(
    url: str, schedule: Schedule, rollouts: Path, name: str = "run/stage-0", deadline_s: float = 30, **change: float
) -> SqlBuffer:
    config, nobody = SqlBuffer.Config.model_validate({"url": url, **change}), cast("Any", None)
    return SqlBuffer(config, schedule=schedule, rollouts=rollouts, renderer=nobody, deadline_s=deadline_s, name=name)


def write(url: str, number: int, rollouts: Path, owner: str) -> None:
    """An explorer: plays until no slot is left, or another trainer takes over."""

    async def play() -> None:
        buffer = make_end(url, make_schedule(groups_per_step=number, steps=1, max_staleness=1), rollouts)
        await buffer.advance(owner, 0)
        while True:
            lease = await buffer.lease(owner)
            assert lease is not None
            await asyncio.sleep(0.002)  # a rollout takes its time
            await buffer.put(owner, make_group(lease))

    try:
        asyncio.run(play())
    except (RoleFailed, StopAsyncIteration):
        return


def train(url: str, number: int, rollouts: Path, checkpoint: Path) -> None:
    """A trainer: takes three by three, and after each step saves which slots it has trained on."""

    async def learn() -> None:
        saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"trained": [], "buffer": None}
        buffer = make_end(url, make_schedule(groups_per_step=number, steps=1, max_staleness=1), rollouts)
        await buffer.restore(saved["buffer"], 0)
        trained = saved["trained"]
        while len(trained) < number:
            groups = await buffer.take(3, 0)
            assert [int(turn.tokens[1]) for group in groups for turn in group.trajectories[0].turns] == [
                group.slot for group in groups
            ]
            trained = [*trained, *(group.slot for group in groups)]
            aside = checkpoint.with_suffix(".new")
            aside.write_text(json.dumps({"trained": trained, "buffer": await buffer.state()}))
            os.replace(aside, checkpoint)
        await buffer.close()

    asyncio.run(learn())


def count_on_board(url: str, times: int) -> None:
    """Adds one to what the board of a run says, so many times."""
    board = SqlBuffer.open_board(SqlBuffer.Config(url=url), name="run")
    for _ in range(times):
        board.write(lambda values: {"count": values.get("count", 0) + 1})
