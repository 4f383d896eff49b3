"""The taskset of a run whose tasks come from agents."""

from __future__ import annotations

from trivium.config import Plugin
from trivium.types import SERVED, Task


class ServedTasks:
    """A taskset without tasks: agents bring their own (`run.mode: serve`).

    Its one task is a placeholder that is never rolled out.
    """

    class Config(Plugin):
        """It has no options."""

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        del config, name, seed  # the tasks come from agents

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Task:
        if index not in (0, -1):
            raise IndexError(index)
        return Task(SERVED, (), {}, SERVED)
