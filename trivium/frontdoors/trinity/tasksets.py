"""Sources of tasks that `kind: python` calls: several tasksets as one, rows without a prompt, texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivium.config.schema import plugin
from trivium.foundation.registry import resolve
from trivium.types import Message, Task


def tasks_of_all(tasksets: Sequence[Mapping[str, Any]]) -> Iterator[Task]:
    """Yields the tasks of all sources, one source after the other. The column `data_source` names the source of each
    task.

    Each source is the section of a task source, with its `name`.
    """
    for section in tasksets:
        source = dict(section)
        name = source.pop("name")
        for task in _tasks(source, name):
            # Rows of two sources have equal numbers, and an id belongs to one task.
            yield replace(task, task_id=f"{name}/{task.task_id}", columns={**task.columns, "data_source": name})


def rows_of_workflow(tasks: Mapping[str, Any]) -> Iterator[Task]:
    """Yields the tasks of a source. The prompt of a row without the prompt column is the row itself, as JSON."""
    column = tasks["prompt"]

    def with_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
        if column in row:
            return row
        return {**row, column: json.dumps(row, default=str, ensure_ascii=False)}

    yield from _tasks(dict(tasks), "train", with_prompt)


def texts(tasks: Mapping[str, Any]) -> Iterator[Task]:
    """Yields the texts of a source as completions of an empty prompt: every token is learnt."""
    for task in _tasks(dict(tasks), "train"):
        text = "".join(message.content for message in task.prompt)
        yield replace(task, prompt=(Message("user", ""),), columns={**task.columns, "completion": text})


def _tasks(
    section: dict[str, Any], name: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
) -> Iterator[Task]:
    """Yields the tasks of a source section. `change` is called with each row."""
    config: Any = plugin("tasks")(section)
    source = resolve("tasks", config.kind)

    class Changed(source):
        def rows(self) -> Iterator[tuple[str, Any]]:
            for where, row in super().rows():
                yield where, row if change is None else change(row)

    taskset = Changed(config, name=name, seed=0)
    for number in range(len(taskset)):
        yield taskset[number]
