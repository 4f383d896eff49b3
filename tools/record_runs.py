"""Records the runs of tests/data/runs again, by their configs: `python tools/record_runs.py [NAME ...]`.

`--keep DIR` keeps their directories there; a run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trivium.config import load_config
from trivium.runtime.launch import run

RUNS = Path(__file__).parents[1] / "tests" / "data" / "runs"
LOSSES = ("step", "train/version", "train/loss/*", "train/preference_margin", "rollout/trajectories", "eval/*/*")
KEPT = (
    *("reward/mean", "reward/min", "reward/max", "reward/equal_groups", "reward/component/*", "curriculum/success"),
    *("rollout/groups", "rollout/total", "rollout/failed", "rollout/refused*", "rollout/evicted", "rollout/staleness"),
    *("rollout/response_tokens", "rollout/truncated", "rollout/empty", "rollout/most_common"),
    *("train/entropy", "train/kl", "train/ref_kl", "train/clip_fraction", "train/lr/*", "train/grad_norm/*"),
    *("mismatch/kl", "mismatch/ess", "perf/idle", "time/step"),
)
"""What rules read beside `LOSSES`, in rows of steps that learn from rollouts."""
Table = dict[str, Any]
"""By metric: the values of all rows of one kind, None where a row lacks it; one value if all have the same."""


def record(name: str, directory: Path) -> None:
    """Runs a config in the directory and keeps what the rules read of its metrics."""
    if not (directory / "metrics.jsonl").is_file():
        run(load_config(RUNS / name / "config.yaml", [f"run.dir={directory}"]))
    tables = as_tables([json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()])
    lines = [",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in each.items()) for each in tables]
    (RUNS / name / "metrics.json").write_text("[\n{" + "},\n{".join(lines) + "}\n]\n")


def as_tables(rows: Sequence[dict[str, float]]) -> list[Table]:
    """The rows of evaluations, of steps that learn from rows, and of steps that learn from rollouts, to 3 digits."""
    kinds = [[row for row in rows if _kind(row) == kind] for kind in range(3)]
    return [_table(same, LOSSES + KEPT if kind == 2 else LOSSES) for kind, same in enumerate(kinds) if same]


def _table(rows: Sequence[dict[str, float]], patterns: Sequence[str]) -> Table:
    keys = sorted({key for row in rows for key in row if any(fnmatchcase(key, each) for each in patterns)})
    columns = {key: [_rounded(row.get(key)) for row in rows] for key in keys}
    return {key: column[0] if len({*column}) == 1 and key != "step" else column for key, column in columns.items()}


def _rounded(value: float | None) -> float | None:
    return value if value is None else int(value) if value % 1 == 0 else float(f"{value:.3g}")


def _kind(row: dict[str, float]) -> int:
    return 2 if "reward/mean" in row else 1 if "train/version" in row else 0


def as_rows(tables: Sequence[Table]) -> list[dict[str, float]]:
    """The rows of `as_tables`, in order of steps; an evaluation follows the step of its weights."""
    rows = [
        {key: value for key, column in table.items() if (value := _at(column, number)) is not None}
        for table in tables
        for number in range(len(table["step"]))
    ]
    return sorted(rows, key=lambda row: (row["step"], "train/version" not in row))


def _at(column: Any, number: int) -> float | None:
    return column[number] if isinstance(column, list) else column


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=sorted(path.parent.name for path in RUNS.glob("*/config.yaml")))
    parser.add_argument("--keep", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.names:
            record(name, (given.keep or Path(scratch)) / name)
