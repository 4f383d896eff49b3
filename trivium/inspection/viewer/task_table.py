"""Lists the results of a run for each task over its train steps, with sorting, search and paging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from trivium.config import RunConfig
from trivium.evaluate import is_partial, is_right
from trivium.inspection.rollouts import Place
from trivium.inspection.run import RecordedRun

_PROMPT = 200
"""Characters of a prompt in a row."""
SORTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "task": lambda row: row["task"],
    "rollouts": lambda row: row["rollouts"],
    "times": lambda row: len(row["points"]),
    "first": lambda row: row["points"][0]["value"],
    "last": lambda row: row["points"][-1]["value"],
    "expected": lambda row: row.get("expected", -1.0),
    "change": lambda row: row["points"][-1]["value"] - row["points"][0]["value"],
}
"""Sort keys of tasks; the default is the order in which the run first used them."""


class _Result(NamedTuple):
    """The result of a group for its task."""

    taskset: str
    task: str
    prompt: str
    rollouts: int
    success: float
    reward: float | None
    partial: bool


class TaskTable:
    """Lists the tasks of a finished or running run. Reads every recorded group once."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._results: dict[tuple[Path, int, int], _Result] = {}
        """Record of a group (`Place.record`) -> its result."""
        self._lock = Lock()

    def page(self, sort: str, descending: bool, text: str, first: int, count: int) -> dict[str, Any]:
        """Returns the `rows` of the tasks that contain `text` in their id or prompt, with a point for every train step
        that rolled the task out: `value` is the success rate, or the mean reward if `graded`. Where a curriculum
        learned, `expected` is the success rate that it expects, and `retired` whether it no longer draws the task, both
        at the newest checkpoint."""
        rows, graded = self._rows()
        wanted = text.casefold()
        matching = [row for row in rows if wanted in f"{row['task']}\n{row['prompt']}".casefold()]
        if sort in SORTS:
            matching.sort(key=SORTS[sort], reverse=descending)
        page = matching[first : first + count]
        return {"total": len(rows), "matching": len(matching), "first": first, "graded": graded, "rows": page}

    def _rows(self) -> tuple[list[dict[str, Any]], bool]:
        """(the row of each task, whether rewards are graded)."""
        stages = self._run.config.stage_configs()
        with self._lock:  # one request reads the groups, concurrent ones wait
            results = [(self._result(place, stages[place.stage]), place) for place in self._run.groups.of_run()]
        graded, rows = any(result.partial for result, _ in results), dict[tuple[str, str], dict[str, Any]]()
        for result, place in results:
            value = result.reward if graded else result.success
            if value is not None:
                new = {"taskset": result.taskset, "task": result.task, "prompt": result.prompt}
                row = rows.setdefault((result.taskset, result.task), {**new, "rollouts": 0, "steps": {}})
                row["rollouts"] += result.rollouts
                step = place.takers[0] if place.takers else place.planned_step
                group = f"{place.stage}.{place.slot}.{place.attempt}"
                row["steps"].setdefault(step, (group, list[float]()))[1].append(value)
        estimates = self._known()
        for row in rows.values():
            if (task := estimates.get((row["taskset"], row["task"]))) is not None:
                row |= {"expected": task["alpha"] / (task["alpha"] + task["beta"]), "retired": task["retired"]}
            row["points"] = [
                {"step": step, "value": sum(values) / len(values), "group": group}
                for step, (group, values) in sorted(row.pop("steps").items())
            ]
        return list(rows.values()), graded

    def _known(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """What the curriculum of the newest checkpoint knows about each task, by (taskset, task)."""
        latest = self._run.store.latest()
        curriculum = None if latest is None else latest.state.get("curriculum")
        columns = {} if curriculum is None else curriculum["known"]
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return {("train", row["task"]): row for row in rows}

    def _result(self, place: Place, config: RunConfig) -> _Result:
        """The result of a group, which is read once."""
        key, threshold = place.record, config.evaluation.threshold
        if key not in self._results:
            group = self._run.groups.group(place)
            members, alive, task = group.trajectories, group.alive, group.task
            self._results[key] = _Result(
                taskset=task.taskset,
                task=task.task_id,
                prompt=(task.prompt[-1].content if task.prompt else "")[:_PROMPT],
                rollouts=len(members),
                success=sum(is_right(member, threshold) for member in members) / max(1, len(members)),
                reward=sum(member.reward for member in alive) / len(alive) if alive else None,
                partial=any(is_partial(member, threshold) for member in alive),
            )
        return self._results[key]
