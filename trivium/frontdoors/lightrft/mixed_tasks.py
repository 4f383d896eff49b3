"""A task source that mixes several sets of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivium.config import build
from trivium.config.schema import plugin
from trivium.frontdoors.lightrft.config.prompt_sets import mixed_places
from trivium.types import Task


def mixed(
    sources: Sequence[Mapping[str, Any]], seed: int, probabilities: Sequence[float] | None = None
) -> Iterator[Task]:
    """Yields the tasks of all sources in the order of `prompt_sets.mixed_places`. A source is a section of `tasks`."""
    sets: list[Any] = []
    for number, section in enumerate(sources):
        config: Any = plugin("tasks")(dict(section))
        sets.append(build("tasks", config, name=f"set_{number}", seed=seed))
    for number, row in mixed_places([len(tasks) for tasks in sets], probabilities, seed):
        task: Task = sets[number][row]
        yield replace(task, task_id=f"{number}/{task.task_id}")
