"""A run continues only with the rows that it began with, wherever a task source reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing import refused
from PIL import Image

from trivium.config import config_from_mapping
from trivium.foundation.errors import ConfigError
from trivium.runtime.launch import ready, run

ROWS = [{"prompt": f"{place}+1=", "completion": str(place + 1)} for place in range(8)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "jsonl", "path": str(path)}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return {"kind": "parquet", "path": str(path)}


def config_of(directory: Path, tasks: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    return {
        "run": {"dir": str(directory / "run")},
        "model": {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 16, "heads": 1, "kv_heads": 1},
        "tasks": tasks,
        "rewards": [{"kind": "exact"}],
        "algorithm": {"kind": "sft"},
        "buffer": {"kind": "files"},
        "monitors": [{"kind": "jsonl"}],
        "schedule": {"steps": steps, "groups_per_step": 4, "group_size": 1},
    }


@pytest.mark.parametrize("taskset", ["train", "test"])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_run_refuses_other_rows(
    write: Callable[[Path, list[dict[str, Any]]], dict[str, Any]], taskset: str, tmp_path: Path
) -> None:
    rows = {"train": ROWS, "test": [{**row, "answer": row["completion"]} for row in ROWS]}
    tasks = {name: write(tmp_path / name, part) for name, part in rows.items()}
    run(config_from_mapping(config_of(tmp_path, tasks)))
    write(tmp_path / taskset, rows[taskset][:5])
    for call in (run, ready):  # a run, `trivium check`
        with refused(ConfigError) as error:
            call(config_from_mapping(config_of(tmp_path, tasks, steps=2)))
        (problem,) = error.value.problems
        assert problem.where == f"tasks.{taskset}"
        assert problem.asked.startswith("5 rows, hash ")
        assert problem.found.startswith("the run began with 8 rows, hash ")
    write(tmp_path / taskset, rows[taskset])
    assert run(config_from_mapping(config_of(tmp_path, tasks, steps=2)))["steps"] == 2


def test_one_value_of_one_row_counts(tmp_path: Path) -> None:
    rows = [{**row, "id": place, "level": 1} for place, row in enumerate(ROWS)]
    tasks = {"train": {**write_jsonl(tmp_path / "train", rows), "id": "id"}}
    run(config_from_mapping(config_of(tmp_path, tasks)))
    write_jsonl(tmp_path / "train", [*rows[:-1], {**rows[-1], "level": 2}])
    with refused(ConfigError, "tasks.train", "8 rows"):
        run(config_from_mapping(config_of(tmp_path, tasks, steps=2)))


def test_the_pixels_of_an_image_count(tmp_path: Path) -> None:
    for place in range(2):
        Image.new("RGB", (8, 8), (place, 0, 0)).save(tmp_path / f"{place}.png")
    rows = [{"prompt": f"<image>{place}", "images": [f"{place}.png"], "id": place, "answer": "1"} for place in range(2)]
    tasks = {"train": {**write_jsonl(tmp_path / "train.jsonl", rows), "id": "id"}}
    mapping = {**config_of(tmp_path, tasks), "model": {"kind": "tiny_vision", "alphabet": "0123456789+="}}
    rollouts = {"algorithm": {"kind": "grpo"}, "buffer": {}, "schedule": {"steps": 1, "groups_per_step": 2}}
    config = config_from_mapping({**mapping, **rollouts})
    before = ready(config).rows
    Image.new("RGB", (8, 8), (9, 0, 0)).save(tmp_path / "1.png")
    assert ready(config).rows.keys() == before.keys() == {"tasks.train"}
    assert ready(config).rows != before


def test_a_start_without_a_step_begins_anew_with_other_rows(tmp_path: Path) -> None:
    tasks = {"train": write_jsonl(tmp_path / "train", ROWS)}
    run(config_from_mapping(config_of(tmp_path, tasks, steps=1)))
    for name in ("checkpoints", "metrics.jsonl"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    write_jsonl(tmp_path / "train", ROWS[:5])
    assert run(config_from_mapping(config_of(tmp_path, tasks, steps=1)))["steps"] == 1
