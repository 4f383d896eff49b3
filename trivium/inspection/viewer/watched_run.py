"""The values of a run, finished or in progress, that a page shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from trivium.buffers.media import MediaFiles
from trivium.foundation.errors import TriviumError
from trivium.inspection.charts import CHARTS, Curve, curves, keys_of, marks, matching
from trivium.inspection.doctor import diagnose
from trivium.inspection.rollout_values import member_row, rollout_values
from trivium.inspection.rollout_view import decoder, piecewise
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.group_list import GroupList
from trivium.inspection.viewer.task_table import TaskTable
from trivium.monitors.identity import settings_of
from trivium.runtime.build import explain


class WatchedRun:
    """One run of a page. Its methods may be called from several threads, and return JSON values."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.run = RecordedRun(path)
        self.groups = GroupList(self.run)
        self.tasks = TaskTable(self.run)
        self.media = MediaFiles(path / "rollouts" / "media")
        self._pieces_lock = Lock()

    def about(self) -> dict[str, Any]:
        """Returns the charts, marks and steps of the run."""
        keys = keys_of(self.run.rows())
        charts = [
            {"title": chart.title, "keys": matching(keys, chart), "patterns": chart.patterns, "lacking": chart.lacking}
            for chart in CHARTS
        ]
        return {
            "name": self.name,
            "path": str(self.path),
            "charts": charts,
            "keys": keys,
            "marks": [{"step": mark.step, "kind": mark.kind, "text": mark.text} for mark in marks(self.run)],
            "planned_steps": self.run.stage_bounds[-1],
            "config": self.run.config_file.read_text(encoding="utf-8"),
            "settings": settings_of(self.path),
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Returns the progress of the run: `age_s`, seconds since the last row of metrics, and whether the run
        ended."""
        written_s = self.run.metrics.written_s
        return {
            "rows": len(self.run.rows()),
            "generation": self.run.metrics.generation,
            "step": self.run.last_step,
            "finished": self.run.finished,
            "age_s": None if written_s is None else round(time.time() - written_s, 1),
        }

    def curves(self, keys: Sequence[str], after: int) -> dict[str, Any]:
        """Returns the points of these keys in the rows after the first `after` ones."""
        state = self.state()
        rows = self.run.rows()[after : state["rows"]]  # the next request asks for the rows after these
        return {**state, "curves": {key: curve_values(curve) for key, curve in curves(rows, keys).items()}}

    def verdict(self) -> dict[str, Any]:
        """Returns the bottleneck, the problems and the objective of the run. Reads rollouts and builds the
        algorithm."""

        return {
            "verdict": self.run.verdict,
            "doctor": _or_error(self._diagnosed),
            "objective": _or_error(lambda: explain(self.run.config)),
        }

    def _diagnosed(self) -> dict[str, Any]:
        report = diagnose(self.path)
        findings = [{"rule": finding.where, "figures": finding.found, "do": finding.do} for finding in report.findings]
        return {"findings": findings, "no_findings": report.no_findings}

    def rollouts(self, step: int, place: Mapping[str, int], first: int, count: int) -> list[dict[str, Any]]:
        """Returns rollouts of a group of a step token by token, the greedy rollout last. `place` has the group's stage,
        slot and attempt. Returns at least one rollout: beyond the end, the last one."""
        recorded = self.run.groups.place(step, place["stage"], place["slot"], place["attempt"])
        group = self.run.groups.group(recorded)
        members, means = [*group.rollouts], self.run.advantages(step)
        about = {"task": group.task.task_id, "epoch": group.epoch, "dropped": group.dropped, "size": len(members)}
        rows: list[dict[str, Any]] = []
        for trajectory in members[first : first + count] or members[-1:]:
            rollout = self.run.rollout(recorded, group, trajectory, step)
            row = member_row(group, trajectory, means)
            rows.append({**row, **rollout_values(rollout, self._pieces), **about})
        return rows

    @cached_property
    def _decode(self) -> Callable[[Sequence[int]], list[str]]:
        return piecewise(decoder(self.path))

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        with self._pieces_lock:  # loaded once; a tokenizer is not thread-safe
            return self._decode(tokens)


def curve_values(curve: Curve) -> dict[str, Any]:
    """Returns a curve as JSON values."""
    return {"help": curve.help, "unit": curve.unit, "floor": curve.floor, "steps": curve.steps, "values": curve.values}


def _or_error(work: Callable[[], Any]) -> Any:
    """Returns the result of `work`, or its error, so that a page can show its other parts."""
    try:
        return work()
    except TriviumError as error:
        return {"error": str(error)}
