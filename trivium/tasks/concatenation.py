"""The tasks of several sources."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from pydantic import Field

from trivium.config import Plugin, build
from trivium.config.schema import Tasks
from trivium.protocols import TaskSource
from trivium.types import Task


class Sources:
    """The tasks of several sources, one source after the other: an epoch shuffles them together, so the share of each
    follows from its number of tasks."""

    class Config(Plugin):
        """`tasks.<name>` as a list."""

        sources: tuple[Tasks, ...] = Field(min_length=1)
        """The sources: sections of `tasks`."""

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        self._name = name
        # Names of their own: two generators of one kind must not draw the same problems.
        self.parts: list[TaskSource] = [
            build("tasks", section, name=f"{name}[{number}]", seed=seed)
            for number, section in enumerate(config.sources)
        ]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Task:
        ends = [*accumulate(map(len, self.parts))]
        index = range(ends[-1])[index]
        number = bisect_right(ends, index)
        task = self.parts[number][index - ends[number]]  # counted from the end of the part
        # Two sources may have equal rows, whose ids are equal, too.
        return replace(task, taskset=self._name, task_id=f"{number}/{task.task_id}")
