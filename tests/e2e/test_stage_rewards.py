"""A reward model that one stage trains rewards the next one, by its stage's name and by the label of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from failing import refused

from tests.processes import commands
from trivium.config import load_config
from trivium.foundation.errors import ConfigError
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.planning.machine import Machine
from trivium.planning.plan import plan_run
from trivium.runtime.preflight import preflight

RUN: dict[str, Any] = {
    "model": {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 32, "heads": 2, "mlp": 64},
    "cluster": {"threads": 1},
    "train": {"optimizer": {"lr": 1.0e-2}},
    "monitors": [{"kind": "jsonl"}],
    "tasks": {"train": {"kind": "jsonl", "path": "pairs.jsonl"}},
    "engine": {"sampling": {"max_new_tokens": 2}},
    "schedule": {"groups_per_step": 8, "group_size": 2, "steps": 2},
    "checkpoint": {"save_every": 1},
}
JUDGE: dict[str, Any] = {"kind": "model", "stage": "judge"}
RECIPE: dict[str, Any] = {
    "kind": "recipe",
    "components": [JUDGE, {"kind": "regex", "pattern": "[0-4]"}],
    "labels": {"taste": {"model": 0.5, "regex": 0.1}, "rule": {"regex": 1.0}},
}


def config(folder: Path, *rewards: dict[str, Any], first: str = "judge", **training: Any) -> Path:
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a % 5), "rejected": str(9 - b % 3), "label": label}
        for a in range(8)
        for b, label in ((1, "taste"), (7, "rule"))
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {"name": first, "buffer": {"kind": "files"}, "algorithm": {"kind": "reward_model"}, **training}
    data = {**RUN, "run": {"dir": str(folder / "run")}, "stages": [judge, {"name": "policy", "rewards": [*rewards]}]}
    (folder / "run.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return folder / "run.yaml"


def components_of(folder: Path) -> list[list[str]]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [[key.rpartition("/")[2] for key in sorted(row) if key.startswith("reward/component/")] for row in rows]
    return [names for names in found if names != ["preferred"]]  # what the rows of the first stage say


def test_a_stage_is_rewarded_by_the_model_that_the_stage_before_it_trained_and_resumes(
    tmp_path: Path,
) -> None:
    path = config(tmp_path, RECIPE)
    plan = plan_run(load_config(path), 1)
    assert [stage.name for stage in plan.stages] == ["judge", "policy"]
    with commands(tmp_path) as start:
        start("run", "run", str(path)).ended()
        assert components_of(tmp_path) == [["model", "regex"]] * 2
        assert (tmp_path / "run/checkpoints/step-000002/reward" / f"{VALUE_HEAD}.safetensors").is_file()
        assert not (tmp_path / "run/checkpoints/step-000004/reward").exists()
        start("longer", "run", str(path), "stages.1.schedule={steps: 3}").ended()
        assert components_of(tmp_path) == [["model", "regex"]] * 3
        renamed = start("renamed", "run", str(config(tmp_path, {**JUDGE, "stage": "other"}, first="other")))
        assert renamed.wait(120) != 0, "another reward is another run"


@pytest.mark.parametrize(
    ("first", "reward", "training", "found"),
    [
        ("judge", {"stage": "jugde"}, {}, "did you mean 'judge'"),
        ("judge", {"stage": "policy"}, {}, "that is no earlier stage"),
        ("judge", {}, {"algorithm": {"kind": "dpo"}}, "has algorithm.kind 'dpo'"),
        ("judge", {"path": "judge"}, {}, "both path and stage"),
        ("policy", {}, {}, "an earlier one has this name"),
        ("", {}, {}, "write some text"),
    ],
)
def test_check_refuses_a_stage_that_trains_no_reward_model_before(
    first: str, reward: dict[str, Any], training: dict[str, Any], found: str, tmp_path: Path
) -> None:
    path = config(tmp_path, {**JUDGE, **reward}, first=first, **training)
    with refused(ConfigError) as error:
        preflight(load_config(path), Machine(1 << 40), 1).refuse()
    assert any(found in f"{problem.found}; {problem.do}" for problem in error.value.problems)
    if found.startswith("did you mean"):
        with commands(tmp_path) as start:
            check = start("check", "check", str(path)).ended(2)
            assert found in check.text
