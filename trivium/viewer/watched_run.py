"""A run directory that a page shows, finished or in progress. Caches the data until the files change."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from trivium.buffers.media import MediaFiles
from trivium.errors import TriviumError
from trivium.monitors.identity import settings_of
from trivium.runtime.recorded_run import RecordedRun
from trivium.runtime.rollout_view import decoder
from trivium.viewer.group_list import GroupList
from trivium.viewer.rollout_data import RecordedGroups, member_row, piecewise, rollout_values
from trivium.viewer.run_data import CHARTS, curves, keys_of, marks, matching, run_verdict
from trivium.viewer.task_table import TaskTable

_END = 256
"""Number of bytes before the read position that are compared to detect a cut file."""


class MetricRows:
    """The rows of metrics.jsonl. Each refresh reads only the added rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[dict[str, float]] = []
        self.generation = 0
        """Counts how often a resumed run cut the file, which invalidates the rows read before."""
        self._position, self._end = 0, b""
        self._lock = Lock()

    def refresh(self) -> list[dict[str, float]]:
        """Returns all rows so far; an incomplete last line is left for the next refresh."""
        with self._lock:
            if not self._path.is_file():
                return self.rows
            with self._path.open("rb") as file:
                file.seek(max(0, self._position - len(self._end)))
                if file.read(len(self._end)) != self._end:
                    self.rows, self._position, self._end = [], 0, b""
                    self.generation += 1
                    file.seek(0)
                added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            self.rows = [*self.rows, *(json.loads(line) for line in whole.splitlines() if line.strip())]
            self._position += len(whole)
            self._end = (self._end + whole)[-_END:]
            return self.rows


class WatchedRun:
    """One run of a page. Its methods may be called from several threads, and return JSON values."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.recorded = RecordedGroups(path)
        self.groups = GroupList(self.recorded)
        self.tasks = TaskTable(self.recorded)
        self.metrics = MetricRows(path / "metrics.jsonl")
        self.media = MediaFiles(path / "rollouts" / "media")
        self._pieces_lock = Lock()

    def about(self) -> dict[str, Any]:
        """Returns the charts, marks and steps of the run."""
        run, rows = RecordedRun.open(self.path), self.metrics.refresh()
        keys = keys_of(rows)
        charts = [
            {"title": chart.title, "keys": matching(keys, chart), "patterns": chart.patterns, "lacking": chart.lacking}
            for chart in CHARTS
        ]
        return {
            "name": self.name,
            "path": str(self.path),
            "charts": charts,
            "keys": keys,
            "marks": [{"step": each.step, "kind": each.kind, "text": each.text} for each in marks(run)],
            "planned_steps": sum(stage.schedule.steps for stage in run.config.stage_configs()),
            "config": (self.path / "config.yaml").read_text(encoding="utf-8"),
            "settings": settings_of(self.path),
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Returns the progress of the run: `age_s`, seconds since the last row of metrics, and whether the run
        ended."""
        rows, path = self.metrics.refresh(), self.path / "metrics.jsonl"
        return {
            "rows": len(rows),
            "generation": self.metrics.generation,
            "step": max((int(row["step"]) for row in rows), default=0),
            "finished": (self.path / "summary.json").is_file(),
            "age_s": round(time.time() - path.stat().st_mtime, 1) if path.is_file() else None,
        }

    def curves(self, keys: Sequence[str], after: int) -> dict[str, Any]:
        """Returns the points of these keys in the rows after the first `after` ones."""
        rows = self.metrics.refresh()
        return {**self.state(), "curves": {key: _curve(each) for key, each in curves(rows[after:], keys).items()}}

    def verdict(self) -> dict[str, Any]:
        """Returns the bottleneck, the problems and the objective of the run. Reads rollouts and builds the
        algorithm."""
        from trivium.runtime.build import explain
        from trivium.runtime.doctor import diagnose

        def findings() -> list[dict[str, str]]:
            return [{"rule": each.where, "figures": each.found, "do": each.do} for each in diagnose(self.path).findings]

        return {
            "verdict": run_verdict(self.path, self.metrics.refresh()),
            "findings": _or_error(findings),
            "objective": _or_error(lambda: explain(RecordedRun.open(self.path).config)),
        }

    def rollouts(self, step: int, place: Mapping[str, int], first: int, count: int) -> list[dict[str, Any]]:
        """Returns rollouts of a group of a step token by token, the greedy rollout last. `place` has the group's stage,
        slot and attempt. Returns at least one rollout: beyond the end, the last one."""
        recorded = self.recorded.place(step, place["stage"], place["slot"], place["attempt"])
        group = self.recorded.group(recorded)
        members, means = [*group.rollouts], self.recorded.advantages(step, [recorded])
        about = {"task": group.task.task_id, "epoch": group.epoch, "dropped": group.dropped, "size": len(members)}
        rows: list[dict[str, Any]] = []
        for trajectory in members[first : first + count] or members[-1:]:
            rollout = self.recorded.rollout(recorded, group, trajectory, step)
            row = member_row(group, trajectory, means)
            rows.append({**row, **rollout_values(rollout, self._pieces), **about})
        return rows

    @cached_property
    def _decode(self) -> Callable[[Sequence[int]], list[str]]:
        return piecewise(decoder(self.path))

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        with self._pieces_lock:  # loaded once; a tokenizer is not thread-safe
            return self._decode(tokens)


def _curve(curve: Any) -> dict[str, Any]:
    return {"help": curve.help, "unit": curve.unit, "floor": curve.floor, "steps": curve.steps, "values": curve.values}


def _or_error(work: Callable[[], Any]) -> Any:
    """Returns the result of `work`, or its error, so that a page can show its other parts."""
    try:
        return work()
    except TriviumError as error:
        return {"error": str(error)}
