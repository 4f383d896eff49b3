"""Rewards by label: which components are called, with which weights, and what a recipe is refused for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from failing import check_error, refused

from trivium.config import RunConfig, load_config
from trivium.config.resume import resume_differences, to_yaml
from trivium.foundation.errors import ConfigError, DataError, RewardError
from trivium.foundation.registry import resolve
from trivium.planning.machine import Machine
from trivium.rewards.judge import Judge, make_judge
from trivium.runtime.preflight import preflight
from trivium.types import Message, StopReason, Task, Trajectory, Turn

OWN = """
seen = []

def length(prompt, completion, unit=1):
    seen.append(completion)
    return len(completion) / unit

def rank(prompt, completions, order):
    return [float(len(completions) - i) for i in range(len(completions))]
"""
RECIPE: dict[str, Any] = {
    "kind": "recipe",
    "column": "source",
    "components": [{"kind": "exact"}, {"kind": "own.py:length"}, {"kind": "own.py:rank"}],
    "labels": {"math": {"exact": 0.9, "length": 0.1}, "chat": {"length": 2, "exact": 0}, "order": {"rank": 1.0}},
}


def config_with(folder: Path, **recipe: Any) -> RunConfig:
    (folder / "own.py").write_text(OWN)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "source": "math"}\n')
    data = {
        "model": {"kind": "tiny"},
        "tasks": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
        "rewards": [{"kind": "regex", "pattern": "2"}, {**RECIPE, **recipe}],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return load_config(folder / "run.yaml")


def score(judge: Judge, trajectory: Trajectory, **columns: Any) -> Any:
    task = Task("t", (Message("user", "1+1="),), columns)
    return asyncio.run(judge.score(task, trajectory))


def rollout(text: str) -> Trajectory:
    tokens, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Trajectory(0, (Turn(tokens, tokens, numbers, tokens, StopReason.EOS, text),))


def test_each_label_calls_its_components_with_its_weights(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    judge = make_judge(config.rewards)
    assert judge.labels == ("regex", "exact", "length", "rank")
    seen = resolve("rewards", str(tmp_path / "own.py:length")).__globals__["seen"]
    assert score(judge, rollout("2"), source="math", answer="2") == {"regex": 1, "exact": 0.9, "length": 0.1}
    assert score(judge, rollout("22"), source="chat") == {"regex": 1, "length": 4}  # which has no column `answer`
    assert score(judge, rollout("222"), source="order", order=1) == {"regex": 1}
    assert seen == ["2", "22"]
    task = Task("t", (), {"source": "order", "order": 1})
    assert asyncio.run(judge.compare(task, [rollout("a"), rollout("b")])) == [{"rank": 2}, {"rank": 1}]
    assert asyncio.run(judge.compare(replace(task, columns={"source": "chat"}), [rollout("a")])) == [{}]


def test_the_weight_of_a_recipe_is_a_factor_of_its_components(tmp_path: Path) -> None:
    judge = make_judge(config_with(tmp_path, weight=10).rewards)
    assert score(judge, rollout("2"), source="math", answer="2") == {"regex": 1, "exact": 9, "length": 1}


def test_a_label_without_a_recipe_is_an_error_unless_there_is_a_default(tmp_path: Path) -> None:
    judge = make_judge(config_with(tmp_path).rewards)
    for columns, found in (({"source": "code"}, "'code'"), ({"source": 3}, "3"), ({}, "no column 'source'")):
        error = score(judge, rollout("2"), answer="2", **columns)
        check_error(error, RewardError, found, "math, chat, order")
        with refused(DataError, "math, chat, order"):
            judge.check_columns({"answer": "2", **columns})
        assert found in judge.lacking({"answer": "2", **columns})
    judge = make_judge(config_with(tmp_path, default="chat").rewards)
    assert score(judge, rollout("2"), source="code") == score(judge, rollout("2")) == {"regex": 1, "length": 2}


def test_columns_are_wanted_of_the_labels_whose_components_read_them(tmp_path: Path) -> None:
    judge = make_judge(config_with(tmp_path).rewards)
    judge.check_columns({"source": "chat"})
    with refused(DataError, "'exact'", "answer"):
        judge.check_columns({"source": "math"})
    error = score(judge, rollout("2"), source="order")
    assert error == {"regex": 1}  # the comparison is what fails
    (failed,) = asyncio.run(judge.compare(Task("t", (), {"source": "order"}), [rollout("2")]))
    assert isinstance(failed, RewardError)


@pytest.mark.parametrize(
    ("recipe", "where", "found"),
    [
        ({"labels": {"math": {"exacts": 1.0}}}, "rewards[1]", "did you mean 'exact'"),
        ({"labels": {}}, "rewards[1].labels", "at least 1 item"),
        ({"default": "maths"}, "rewards[1]", "did you mean 'math'"),
        ({"components": [{"kind": "exact"}, {"kind": "exact"}]}, "rewards[1]", "exact twice"),
        ({"labels": {"math": {"exact": 1.0}}}, "rewards[1].components[1]", "no label gives it a weight"),
        ({"name": "mix"}, "rewards[1].name", "belongs to each component"),
        ({"components": [{"kind": "exact", "weight": 2}, *RECIPE["components"][1:]]}, "components[0].weight", "2, bes"),
        ({"components": [{"kind": "regex"}]}, "rewards[1].components[0].pattern", "nothing"),
        (
            {"components": [{"kind": "exact"}, {**RECIPE, "name": "length"}, {"kind": "own.py:rank"}]},
            "rewards[1].components[1]",
            "a recipe in a recipe",
        ),
    ],
)
def test_check_names_what_is_wrong_with_a_recipe(
    recipe: dict[str, Any], where: str, found: str, tmp_path: Path
) -> None:
    with refused(ConfigError) as error:
        config_with(tmp_path, **recipe)
    problems = [problem for problem in error.value.problems if problem.where.endswith(where)]
    assert any(found in f"{p.asked} {p.found} {p.do}" for p in problems), error.value


def test_two_rewards_of_one_name_are_refused_inside_a_recipe_and_beside_it(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    with refused(ConfigError, "exact twice"):
        make_judge([*config.rewards, *config_with(tmp_path).rewards[1].components[:1]])  # pyright: ignore[reportAttributeAccessIssue]


def test_a_resumed_run_may_change_the_weights_of_labels_alone(tmp_path: Path) -> None:
    saved = yaml.safe_load(to_yaml(config_with(tmp_path)))
    assert not resume_differences(saved, config_with(tmp_path))
    other = {**RECIPE["labels"], "math": {"exact": 0.5, "length": 0.1}}
    (problem,) = resume_differences(saved, config_with(tmp_path, labels=other))
    assert problem.where == "rewards[1].labels.math.exact"
    assert "--change" in problem.do
    (problem,) = resume_differences(saved, config_with(tmp_path, column="label"))
    assert problem.where == "rewards[1].column"
    assert "--change" not in problem.do


def test_preflight_looks_at_the_labels_of_the_tasks(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    rows = [{"prompt": "1+1=", "answer": "2", "source": label} for label in ("math", "mth", "mth")]
    assert not preflight(config, Machine(1 << 40), 1).problems
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = preflight(config, Machine(1 << 40), 1).problems
    assert problem.where == "tasks.train"
    assert "2 of 3 do not: the label 'mth'" in problem.found
