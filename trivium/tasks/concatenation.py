"""The tasks of several sources."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from trivium.config import build
from trivium.config.sources import SourcesConfig
from trivium.types import Task


class Sources:
    """The tasks of several sources, one source after the other. The schedule orders them source by source."""

    Config = SourcesConfig

    def __init__(self, config: SourcesConfig, *, name: str, seed: int) -> None:
        del name  # each source has its own
        self._sources = [build("tasks", source.tasks, name=source.name, seed=seed) for source in config.sources]
        self._ends = [*accumulate(map(len, self._sources))]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Task:
        number = bisect_right(self._ends, range(len(self))[index])
        return self._sources[number][index - self._ends[number]]
