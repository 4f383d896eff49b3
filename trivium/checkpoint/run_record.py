"""The record of a run in its checkpoints and its summary: measurements, seconds by phase, failed rollouts by cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


class RunRecord:
    """What is known of a run so far, and the seconds of this session.

    The values are JSON values. Each is replaced, never changed in place: a save in progress may read it.
    """

    def __init__(self, earlier: Mapping[str, Any] | None = None) -> None:
        """`earlier`: the values of earlier sessions and stages."""
        self.values: dict[str, Any] = dict(earlier or {})
        self.phases: dict[str, float] = {}
        """Seconds by phase since the last row of metrics."""
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time spent on this run, earlier sessions and stages included."""
        return self.values.get("seconds", 0.0) + time.monotonic() - self._started

    def current(self) -> dict[str, Any]:
        """The record so far, for later stages, later sessions and the summary."""
        return {**self.values, "seconds": self.seconds, "time": self._with(self.phases)}

    def spend(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase of the next row."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def end_row(self, seconds: Mapping[str, float]) -> None:
        """Adds the seconds by phase that a row of metrics has; the next row begins."""
        self.add_seconds(seconds)
        self.phases.clear()

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        self.values["time"] = self._with(seconds)

    def _with(self, seconds: Mapping[str, float]) -> dict[str, float]:
        before: Mapping[str, float] = self.values.get("time", {})
        return {**before, **{name: before.get(name, 0.0) + phase_s for name, phase_s in seconds.items()}}

    def add_failures(self, causes: Iterable[str]) -> None:
        """Adds failed rollouts, by cause."""
        if counts := Counter(causes):
            self.values["failures"] = dict(sorted((Counter(self.values.get("failures", {})) + counts).items()))

    def add_evaluation(self, measured: Mapping[str, float], *ends: str) -> None:
        """Adds an evaluation at these `ends` of the run (`before`, `after`). Removes all accuracies if any evaluation
        had partial rewards, because an accuracy counts only rewards of 0 or 1."""
        record = {**self.values, **{f"{name}_{end}": value for name, value in measured.items() for end in ends}}
        # An evaluation with partial rewards ("graded") measures a reward and no accuracy.
        started_graded = "reward_before" in record and "accuracy_before" not in record
        graded = started_graded or "accuracy" not in measured
        self.values = {n: value for n, value in record.items() if not (graded and n.startswith("accuracy_"))}

    def last_evaluation(self) -> dict[str, float]:
        """The accuracy and reward of the newest evaluation."""
        return {name: self.values[f"{name}_after"] for name in ("accuracy", "reward") if f"{name}_after" in self.values}

    def num_changed_fields(self, step: int) -> int:
        """The number of config fields that `--change` changed at `step`."""
        return sum(len(row["changes"]) for row in self.values.get("changes", ()) if row["step"] == step)
