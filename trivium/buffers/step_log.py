"""steps.jsonl of a run directory: the groups that each train step took, the hash of the resulting weights, the machine.

Each line is one JSON object: `{"machine": {...}}` when a process begins to train, `{"step", "stage", "taken"}` before
an update, `{"step", "stage", "weights"}` when a version is published. A resumed run repeats steps: a row removes the
records of later steps, and updates the record of its own step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trivium.foundation.atomic import writing
from trivium.schedule import Schedule
from trivium.types import Group

STEPS = "steps.jsonl"


@dataclass(frozen=True, slots=True)
class Taken:
    """A group that a train step took, identified by its place in the journal."""

    slot: int
    """Negative for an expert's group."""
    attempt: int
    planned_step: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of a train step. For the version that a stage began with it has only the weights."""

    step: int
    stage: int = 0
    taken: tuple[Taken, ...] | None = None
    """In the order of the batch, replayed groups included; None if it was not recorded."""
    weights: str = ""
    """The hash of the weights after the step; empty if they were not published."""
    machine: Mapping[str, str] = field(default_factory=dict[str, str])
    """Properties of the machine that the bits of the step depend on; empty if they were not recorded."""


class StepLog:
    """Writes the file for one stage."""

    def __init__(self, run_dir: Path, schedule: Schedule, machine: Mapping[str, str]) -> None:
        self.schedule = schedule
        self.recorded_weights = {
            row["step"]: row["weights"] for row in _rows(run_dir) if "weights" in row and row["stage"] == schedule.stage
        }
        """The hash of each version of the stage that an earlier session published last."""
        self._path, self._machine = run_dir / STEPS, machine
        self._started = False

    def took(self, step: int, groups: Sequence[Group]) -> None:
        """Records that the train step trains on these groups."""
        schedule = self.schedule
        taken = [[group.slot, group.attempt, schedule.step_of(group.slot)] for group in groups]
        self._append({"step": step, "stage": schedule.stage, "taken": taken})

    def published(self, step: int, weights: str) -> None:
        """Records the hash of the weights of a version, if it is known."""
        if weights:
            self._append({"step": step, "stage": self.schedule.stage, "weights": weights})

    def _append(self, row: Mapping[str, Any]) -> None:
        rows = [row] if self._started else [{"machine": self._machine}, row]
        text = "".join(json.dumps(entry) + "\n" for entry in rows)
        with writing(self._path), self._path.open("ab") as file:
            # The newline ends a row that a killed process left half-written.
            file.write(text.encode() if self._started or not file.tell() else b"\n" + text.encode())
        self._started = True


def read_steps(run_dir: Path) -> dict[int, StepRecord]:
    """The record of each step, in order; empty for a run without a step log."""
    records, machine = dict[int, StepRecord](), dict[str, str]()
    for row in _rows(run_dir):
        machine = row.get("machine", machine)
        if "step" not in row:
            continue
        step: int = row["step"]
        records = {number: record for number, record in records.items() if number <= step}
        record = records.get(step, StepRecord(step))
        if "taken" in row:
            taken = tuple(Taken(*group) for group in row["taken"])
            records[step] = StepRecord(step, row["stage"], taken, machine=machine)
        else:
            records[step] = replace(record, weights=row["weights"], machine=record.machine or machine)
    return dict(sorted(records.items()))


def resumed_after(run_dir: Path) -> list[int]:
    """The steps after which a session continued an earlier one of the same stage."""
    steps, last, began = list[int](), None, False
    for row in _rows(run_dir):
        began = began or "machine" in row
        if "step" not in row:
            continue
        if began and last is not None and last["stage"] == row["stage"]:
            steps.append(row["step"] - ("taken" in row))
        last, began = row, False
    return steps


def _rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    path = run_dir / STEPS
    return map(_row, path.read_text(encoding="utf-8").splitlines() if path.is_file() else ())


def _row(line: str) -> dict[str, Any]:
    """The row of a line; empty for a half-written line."""
    try:
        row: Any = json.loads(line or "{}")
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
