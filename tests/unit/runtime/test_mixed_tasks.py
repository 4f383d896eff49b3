"""A list of sources: their tasks are one taskset, each with the settings of its section."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs import configured, problems_of

from trivium.config import RunConfig
from trivium.planning.machine import Machine
from trivium.runtime.build import build_schedule, build_tasks
from trivium.runtime.preflight import preflight
from trivium.runtime.stage import Stage

SUMS = {"kind": "arithmetic", "count": 5}


def mixed(folder: Path, rows: list[dict[str, Any]], **section: Any) -> RunConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = {"kind": "jsonl", "path": "rows.jsonl", **section}
    model = {"kind": "tiny", "alphabet": "bytes", "max_position": 96}
    return configured(folder, model=model, tasks={"train": [SUMS, file, file]}, cluster={"threads": 1})


def test_an_epoch_visits_the_tasks_of_all_sources(tmp_path: Path) -> None:
    config = mixed(tmp_path, [{"prompt": f"{n} = ", "answer": str(n), "id": "same"} for n in range(3)], id="id")
    tasks = build_tasks(config, "train")
    assert len(tasks) == 11
    assert tasks[-1] == tasks[10]
    ids = [tasks[place].task_id for place in range(11)]
    assert len({*ids}) == 11, "equal rows of two sources are two tasks"
    assert [task_id[:2] for task_id in ids] == ["0/"] * 5 + ["1/"] * 3 + ["2/"] * 3
    assert {tasks[place].taskset for place in range(11)} == {"train"}
    schedule = build_schedule(Stage(config, 0, 0, True, tmp_path, tmp_path))
    visited = [schedule.at(slot).task.task_id for slot in range(22)]
    assert sorted(visited[:11]) == sorted(visited[11:]) == sorted(ids)


def test_two_generators_of_one_kind_draw_different_tasks() -> None:
    tasks = build_tasks(configured(tasks={"train": [SUMS, SUMS]}), "train")
    prompts = [tasks[place].prompt for place in range(10)]
    assert {*prompts[:5]} != {*prompts[5:]}


def test_each_source_is_checked_and_fitted_by_its_own_section(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "x" * 200, "answer": "2"}, {"prompt": "?"}]
    config = mixed(tmp_path, rows, on_overlong="drop")
    assert len(build_tasks(config, "train")) == 9
    findings = preflight(config, Machine(1 << 34), 1)
    assert [*findings.rows] == ["tasks.train[1]", "tasks.train[2]"]
    assert findings.tasks[0].left_out == {f"tasks.train[{n}]: dropped (on_overlong)": 1 for n in (1, 2)}
    lacking = [each for each in findings.warnings if "rewards read" in each.asked]
    assert [each.where for each in lacking] == ["tasks.train[1]", "tasks.train[2]"]


def test_a_stage_that_learns_from_rows_reads_one_source() -> None:
    learning = {"buffer": {"kind": "files"}, "algorithm": {"kind": "sft"}, "rewards": []}
    assert "files" in problems_of(lambda: configured(tasks={"train": [SUMS, SUMS]}, **learning))["tasks.train"]
