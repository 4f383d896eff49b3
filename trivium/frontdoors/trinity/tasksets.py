"""Combines several tasksets into one, for a trainer that reads one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivium.config import build
from trivium.config.schema import plugin
from trivium.types import Task


def tasks_of_all(tasksets: Sequence[Mapping[str, Any]]) -> Iterator[Task]:
    """Yields the tasks of all sources, one source after the other. The column `data_source` names the source of each
    task.

    Each source is the section of a task source, with its `name`.
    """
    for section in tasksets:
        source = dict(section)
        name = source.pop("name")
        config: Any = plugin("tasks")(source)
        tasks = build("tasks", config, name=name, seed=0)
        for number in range(len(tasks)):
            task: Task = tasks[number]
            yield replace(task, task_id=f"{name}/{task.task_id}", columns={**task.columns, "data_source": name})
