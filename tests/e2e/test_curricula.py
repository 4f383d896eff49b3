"""Curricula that learn and averaged teachers keep their bits: killed and resumed, with refused groups replaced, and two
steps ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.killing import launches
from tests.e2e.test_kill import TINY, outcome_of
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.task_table import TaskTable

CURRICULUM = {"kind": "success_rate", "temperature": 0.05, "retire_above": 0.5}
REFILLED = ("stages.1.algorithm={kind: grpo, filters: [zero_variance], refill: 2}",)
AHEAD = ("stages.1.schedule.deterministic=true", "stages.1.schedule.max_staleness=2")


@pytest.mark.parametrize("overrides", [REFILLED, AHEAD], ids=["refilled", "ahead"])
def test_a_killed_run_draws_the_same_tasks(overrides: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (*overrides, f"stages.1.schedule.curriculum={json.dumps(CURRICULUM)}")
    assert launches(TINY, tmp_path / "whole", overrides=overrides) == ["finished"]
    expected = outcome_of(tmp_path / "whole")
    rows = [row for row in expected["metrics"] if "curriculum/seen" in row]
    assert len(rows) == 6
    assert 0 < rows[-1]["curriculum/retired"] < rows[-1]["curriculum/seen"] < 1
    shown = TaskTable(RecordedRun(tmp_path / "whole")).page("expected", True, "", 0, 100)["rows"]
    seen = [row for row in shown if "expected" in row]
    assert len({row["expected"] for row in seen}) > 1
    assert any(row["retired"] for row in seen)
    kills = [("put: half a record", 7), ("update: step taken, no version", 3), ("adopt: half the tensors", 1)]
    assert launches(TINY, tmp_path / "killed", kills, overrides)[:-1] == [moment for moment, _ in kills]
    assert outcome_of(tmp_path / "killed") == expected


AVERAGED = {
    "kind": "sdpo",
    "distill": {"coef": 0.5},
    "teacher": {"weights": "average", "rate": 0.3, "context": "{prompt}{answer}", "top_k": 5},
}


@pytest.mark.parametrize("overrides", [(), AHEAD], ids=["synchronous", "ahead"])
def test_a_killed_run_with_an_averaged_teacher_ends_with_the_same_bytes(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    overrides = (*overrides, f"stages.1.algorithm={json.dumps(AVERAGED)}")
    assert launches(TINY, tmp_path / "whole", overrides=overrides) == ["finished"]
    expected = outcome_of(tmp_path / "whole")
    last = f"checkpoints/{expected['checkpoints'][-1]}"
    policy, teacher = (expected["tensors"][f"{last}/{role}/model.safetensors"] for role in ("policy", "teacher"))
    assert policy != teacher
    kills = [("update: step taken, no version", 3), ("save: manifest half written", 1), ("adopt: half the tensors", 1)]
    assert launches(TINY, tmp_path / "killed", kills, overrides)[:-1] == [moment for moment, _ in kills]
    assert outcome_of(tmp_path / "killed") == expected
