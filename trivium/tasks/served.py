"""The taskset of a run whose tasks come with the agents that play them."""

from __future__ import annotations

from trivium.config import Plugin
from trivium.types import SERVED, Task


class ServedTasks:
    """Stands where a taskset is asked for and there is none: agents bring their tasks (`run.mode: serve`).

    Its one task is a placeholder that nobody plays.
    """

    class Config(Plugin):
        """Nothing to say."""

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        del config, name, seed  # whatever the agents bring

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Task:
        if index not in (0, -1):
            raise IndexError(index)
        return Task(SERVED, (), {}, SERVED)
