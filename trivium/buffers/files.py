"""A buffer over expert data: the rows of a taskset, as groups that nobody had to play."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trivium.config import BufferConfig
from trivium.errors import DataError
from trivium.protocols import Renderer
from trivium.schedule import Assignment, Schedule
from trivium.types import EXPERT_VERSION, Group, StopReason, Trajectory, Turn


class FileBuffer:
    """Gives the trainer the expert's replies (column `completion`) in schedule order. Nothing is leased or put."""

    explored = False

    class Config(BufferConfig):
        kind: str = "files"
        completion: str = "completion"
        """The column that holds the expert's reply."""

    def __init__(
        self, config: Config, *, schedule: Schedule, rollouts: Path, renderer: Renderer, deadline_s: float
    ) -> None:
        del rollouts, deadline_s  # nothing is played and nobody is waited for
        self.config, self.schedule, self._renderer = config, schedule, renderer
        self.evicted = 0

    async def take(self, count: int, version: int) -> list[Group]:
        first = (version - self.schedule.first_version) * self.schedule.groups_per_step
        return [self._group(self.schedule.at(slot)) for slot in range(first, first + count)]

    def _group(self, assignment: Assignment) -> Group:
        task = assignment.task
        reply = task.columns.get(self.config.completion)
        if not isinstance(reply, str):
            raise DataError(
                f"an expert reply for task {task.task_id!r}",
                f"column {self.config.completion!r} is {reply!r}; the columns are {sorted(task.columns)}",
                "name the column that holds the reply with buffer.completion",
            )
        prompt_tokens, tokens = self._renderer.expert(task.prompt, reply)
        turn = Turn(
            prompt_tokens, tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), EXPERT_VERSION, np.int32),
            StopReason.EOS, reply,
        )  # fmt: skip
        return Group(assignment.slot, task, (Trajectory(0, (turn,)),), assignment.epoch)

    def state(self) -> dict[str, Any]:
        """Nothing: the rows of a step follow from its number."""
        return {}

    def restore(self, state: Mapping[str, Any] | None, version: int) -> None: ...

    async def lease(self, owner: str) -> int:
        raise DataError("a slot to explore", "this buffer is filled from files", "use buffer.kind: memory to explore")

    def attempt(self, slot: int) -> int:
        return 0

    async def put(self, owner: str, group: Group) -> None:
        raise DataError("put a group", "this buffer is filled from files", "use buffer.kind: memory to explore")

    async def drained(self, version: int) -> None: ...

    async def advance(self, owner: str, version: int) -> None: ...

    async def close(self) -> None: ...
