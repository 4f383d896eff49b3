"""What is found before a run begins: rows, completions, rewards, tokenizers, devices, packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trivium.config import config_from_mapping, merged
from trivium.config.memory_estimate import Machine
from trivium.runtime.preflight import Findings, preflight
from trivium.text.tiny import TinyModel

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}, {"prompt": "4+4=", "answer": "8"}]
TINY = {
    "kind": "tiny",
    "alphabet": "0123456789+=",
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "mlp": 16,
    "max_position": 24,
}


def look(folder: Path, rows: list[dict[str, Any]], change: Mapping[str, Any], gpus: int = 0) -> Findings:
    """What is found out about a run on these rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "run": {"dir": str(folder / "run")},
        "model": TINY,
        "tasks": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
        "rewards": ["exact"],
        "engine": {"sampling": {"max_new_tokens": 4}},
        "schedule": {"steps": 1, "groups_per_step": 1, "group_size": 2},
    }
    config = config_from_mapping(merged(base, change), folder)
    findings = preflight(config, Machine(1 << 34, (1 << 34,) * gpus), config.cluster.ranks)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        {"rows.jsonl"} | {p.name for p in folder.glob("m*")}
    )
    return findings


def test_a_good_run_has_nothing_to_report(tmp_path: Path) -> None:
    findings = look(tmp_path, ROWS, {})
    assert (findings.problems, findings.warnings) == ([], [])


def test_rows_without_the_column_of_a_reward_are_counted(tmp_path: Path) -> None:
    lacking = [*ROWS, {"prompt": "5+5="}]
    findings = look(tmp_path, lacking, {})
    assert findings.problems == []
    assert [w.where for w in findings.warnings] == ["tasks.train"]
    assert "1 of 4 do not: reward 'exact' lacks answer" in findings.warnings[0].found
    assert look(tmp_path, lacking, {"workflow": {"max_failed_fraction": 0.1}}).warnings == []
    (problem,) = look(tmp_path, lacking, {"workflow": {"max_failed_fraction": 0.1}}).problems
    assert "1 of 4" in problem.found


EXPERT = {"algorithm": "sft", "buffer": "files", "schedule": {"group_size": 1}, "rewards": []}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1="}, "column 'completion' is None"),
        ({"prompt": "1+1=", "completion": "1" * 20}, "1 of 2 do not: task"),
    ],
)
def test_completions_of_an_expert_are_looked_at(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    good = {"prompt": "2+3=", "completion": "5"}
    assert look(tmp_path, [good], EXPERT).problems == []
    (problem,) = look(tmp_path, [good, row], EXPERT).problems
    assert words in problem.found
    assert problem.where == "tasks.train"


def test_a_curriculum_needs_its_column(tmp_path: Path) -> None:
    (problem,) = look(tmp_path, ROWS, {"schedule": {"curriculum": {"column": "difficulty"}}}).problems
    assert "'difficulty'" in problem.found


def test_a_model_directory_without_a_tokenizer(tmp_path: Path) -> None:
    model = config_from_mapping({"model": TINY, "tasks": {"train": "arithmetic"}, "rewards": ["exact"]}).model
    assert isinstance(model, TinyModel.Config)
    directory = TinyModel(model, seed=0).materialize(tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    (problem,) = look(tmp_path, ROWS, {"model": {"kind": "hf", "path": str(directory)}}).problems
    assert problem.where == "model"
    assert "tokenizer" in problem.asked


def test_processes_beyond_the_gpus_there_are(tmp_path: Path) -> None:
    ray = {"cluster": {"kind": "ray", "ranks": 4}}
    (problem,) = look(tmp_path, ROWS, ray, gpus=2).problems
    assert (problem.where, problem.found) == ("cluster.ranks", "there are 2")
    assert look(tmp_path, ROWS, ray, gpus=4).problems == []
    assert look(tmp_path, ROWS, ray).problems == []  # train.device auto is the CPU
    (problem,) = look(tmp_path, ROWS, {"train": {"device": "cuda"}}).problems
    assert problem.where == "train.device"
    elsewhere = {"cluster": {"kind": "ray", "ranks": 4, "address": "auto"}, "train": {"device": "cuda"}}
    assert look(tmp_path, ROWS, elsewhere).problems == []


def test_what_every_stage_shares_is_reported_once(tmp_path: Path) -> None:
    stages = {"stages": [{"schedule": {"steps": 1}}, {"schedule": {"steps": 2}}], "engine": {"max_context": 5}}
    findings = look(tmp_path, ROWS, stages)
    assert [problem.where for problem in findings.problems] == ["stages[0].tasks.train"]
