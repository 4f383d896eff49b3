"""What a check reads of a stage's tasks: the lengths of prompts and rows, in tokens of the model."""

import json
from pathlib import Path
from typing import Any

from trivium.config import config_from_mapping
from trivium.planning.machine import Machine
from trivium.planning.memory_estimate import PROMPT_TOKENS
from trivium.runtime.preflight import preflight


def config_of(folder: Path, rows: list[dict[str, str]], **changes: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_from_mapping(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"kind": "tiny", "alphabet": "bytes"},
            "tasks": {"train": {"kind": "jsonl", "path": str(folder / "rows.jsonl")}},
            "rewards": ["exact"],
            "engine": {"max_context": 512, "sampling": {"max_new_tokens": 16}},
            "train": {"optimizer": {"lr": 1e-3}},
            "schedule": {"groups_per_step": 2, "group_size": 2},
            **changes,
        }
    )


def test_the_longest_and_the_median_of_many_prompts_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 10, "answer": "1"} for _ in range(1000)]
    rows[777]["prompt"] = "y" * 300
    (tasks,) = preflight(config_of(tmp_path, rows), Machine(), 1).tasks
    assert tasks.prompts.longest - tasks.prompts.typical == 290  # a byte each, and the same template
    assert 10 < tasks.prompts.typical < 100
    number, _, total = tasks.prompts.source.partition(" of ")
    assert total == "1000 prompts"
    assert int(number) < 200


def test_rows_to_learn_from_count_with_their_completions(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 10, "completion": "1" * 5} for _ in range(200)]
    rows[150]["completion"] = "2" * 200
    changes = {"buffer": {"kind": "files"}, "algorithm": {"kind": "sft"}, "rewards": []}
    schedule = {"groups_per_step": 2, "group_size": 1, "steps": 100}
    (tasks,) = preflight(config_of(tmp_path, rows, **changes, schedule=schedule), Machine(), 1).tasks
    assert tasks.rows is not None
    assert tasks.rows.longest - tasks.rows.typical == 195


def test_prompts_that_a_workflow_makes_are_assumed_and_named(tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(
        "class Play:\n    def __init__(self, config): ...\n    async def run(self, task, policy): ...\n"
    )
    workflow = {"kind": f"{tmp_path / 'play.py'}:Play"}
    rows = [{"prompt": "x", "answer": "1"}]
    (tasks,) = preflight(config_of(tmp_path, rows, workflow=workflow), Machine(), 1).tasks
    assert tasks.prompts.longest == PROMPT_TOKENS
    assert "workflow" in tasks.prompts.source
