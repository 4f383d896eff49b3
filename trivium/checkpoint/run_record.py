"""The record of a run in its checkpoints and its summary: measurements, seconds by phase, failed rollouts by cause.

A record is a dict of JSON values. Its values are replaced, never changed in place: a save in progress may read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


def with_evaluation(record: Mapping[str, Any], measured: Mapping[str, float], *ends: str) -> dict[str, Any]:
    """The record with an evaluation at these `ends` of the run (`before`, `after`). Removes all accuracies if any
    evaluation had partial rewards, because an accuracy counts only rewards of 0 or 1."""
    record = {**record, **{f"{name}_{end}": value for name, value in measured.items() for end in ends}}
    # An evaluation with partial rewards ("graded") measures a reward and no accuracy.
    started_graded = "reward_before" in record and "accuracy_before" not in record
    graded = started_graded or "accuracy" not in measured
    return {name: value for name, value in record.items() if not (graded and name.startswith("accuracy_"))}


def last_evaluation(record: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy and reward of the newest evaluation in the record."""
    return {name: record[f"{name}_after"] for name in ("accuracy", "reward") if f"{name}_after" in record}


def add_seconds(record: dict[str, Any], seconds: Mapping[str, float]) -> None:
    """Adds seconds by phase."""
    before: Mapping[str, float] = record.get("time", {})
    record["time"] = {**before, **{name: before.get(name, 0.0) + phase_s for name, phase_s in seconds.items()}}


def add_failures(record: dict[str, Any], causes: Iterable[str]) -> None:
    """Adds failed rollouts, by cause."""
    if counts := Counter(causes):
        record["failures"] = dict(sorted((Counter(record.get("failures", {})) + counts).items()))


def num_changed_fields(record: Mapping[str, Any], step: int) -> int:
    """The number of config fields that `--change` changed at `step`."""
    return sum(len(row["changes"]) for row in record.get("changes", ()) if row["step"] == step)
