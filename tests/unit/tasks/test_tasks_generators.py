"""Sources that make their tasks: splits that never leak, mixes in proportion, a user's own function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.config import build, load_config, plugin
from trivium.foundation.errors import ConfigError, DataError, UnknownName
from trivium.tasks.generators import ArithmeticTasks, PythonTasks
from trivium.types import Message, Task


def source(kind: str, name: str = "train", seed: int = 0, **fields: Any) -> Any:
    return build("tasks", plugin("tasks")({"kind": kind, **fields}), name=name, seed=seed)


def pairs(tasks: Any) -> set[frozenset[str]]:
    """The unordered operand pairs of a taskset of additions."""
    return {frozenset(task.task_id.split("+")) for task in tasks}


# --- arithmetic


def test_arithmetic_problems_are_right_and_unique() -> None:
    tasks = source("arithmetic", max_operand=20, operations=["+", "-", "*"], holdout_fraction=0)
    assert len(tasks) == 3 * 21 * 21
    assert len({task.task_id for task in tasks}) == len(tasks)
    for task in tasks:
        question = task.prompt[0].content
        assert question == f"{task.task_id}="
        assert task.columns == dict.fromkeys(["answer", "completion"], str(eval(task.task_id)))


@settings(max_examples=number_of(25))
@given(st.integers(0, 99), st.integers(0, 99), st.floats(0.05, 0.6))
def test_holdout_shares_no_pair_with_training_whatever_seed_range_or_operation(
    seed: int, other_seed: int, fraction: float
) -> None:
    train = source("arithmetic", seed=seed, max_operand=30, holdout_fraction=fraction)
    held = source("arithmetic", "test", other_seed, max_operand=25, holdout_fraction=fraction, part="holdout")
    assert not pairs(train) & pairs(held)
    products = source("arithmetic", seed=seed, max_operand=30, holdout_fraction=fraction, operations=["*"])
    assert {task.task_id.replace("*", "+") for task in products} == {task.task_id for task in train}


def test_the_two_parts_are_everything_and_near_the_fraction() -> None:
    train = source("arithmetic", holdout_fraction=0.2)
    held = source("arithmetic", part="holdout", holdout_fraction=0.2)
    assert len(train) + len(held) == 100 * 100
    assert 0.18 < len(held) / 10_000 < 0.22


def test_seed_and_taskset_choose_the_drawn_problems() -> None:
    def drawn(name: str, seed: int) -> list[str]:
        return [task.task_id for task in source("arithmetic", name, seed, count=50)]

    assert drawn("train", 0) == drawn("train", 0)
    assert drawn("train", 0) != drawn("train", 1)
    assert drawn("train", 0) != drawn("other", 0)


def test_arithmetic_refuses_more_problems_than_there_are() -> None:
    with refused(DataError, "101 problems", "100", "holdout_fraction"):
        source("arithmetic", max_operand=9, holdout_fraction=0, count=101)
    with refused(DataError, "holdout", "holds 0"):
        source("arithmetic", max_operand=9, holdout_fraction=0, part="holdout")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_operand": 5, "max_operand": 4}, "smaller than min_operand"),
        ({"max_operand": 9999}, "narrow the range"),
        ({"operations": ["/"]}, "Input should be"),
        ({"operations": []}, "at least 1 item"),
    ],
)
def test_arithmetic_refuses_settings_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticTasks.Config(kind="arithmetic", **fields)


# --- reasoning gym

MIX = {"chain_sum": {"weight": 2, "config": {"max_terms": 2, "max_digits": 1}}, "gcd": {}, "spell_backward": {}}


def test_mix_is_interleaved_in_proportion() -> None:
    tasks = source("reasoning_gym", environments=MIX, size=12)
    order = [task.columns["data_source"] for task in tasks]
    assert [order.count(name) for name in MIX] == [6, 3, 3]
    for start in range(0, 12, 4):
        assert sorted(order[start : start + 4]) == ["chain_sum", "chain_sum", "gcd", "spell_backward"]
    assert len({task.task_id for task in tasks}) == 12


def test_recorded_entry_is_all_that_scoring_needs() -> None:
    from reasoning_gym import create_dataset

    for task in source("reasoning_gym", environments=MIX, size=8, system="Answer only."):
        recorded = json.loads(json.dumps(task.columns))
        assert recorded == task.columns
        problem = recorded["reasoning_gym"]
        score = create_dataset(problem["dataset"], **problem["config"]).score_answer
        assert score(recorded["answer"], problem["entry"]) == 1.0
        assert score("wrong", problem["entry"]) < 1.0
        assert [message.role for message in task.prompt] == ["system", "user"]


def test_problems_follow_seed_and_taskset_unless_fixed() -> None:
    def questions(name: str, seed: int, **fields: Any) -> list[str]:
        return [t.prompt[0].content for t in source("reasoning_gym", name, seed, environments=MIX, size=6, **fields)]

    assert questions("train", 0) == questions("train", 0)
    assert questions("train", 0) != questions("train", 1)
    assert questions("train", 0) != questions("test", 0)
    assert questions("train", 0, problem_seed=5) == questions("test", 1, problem_seed=5)


def test_more_environments_than_problems() -> None:
    assert len(source("reasoning_gym", environments=MIX, size=1)) == 1


def test_reasoning_gym_refuses_at_construction() -> None:
    with refused(UnknownName, "'chain_sums'", "'chain_sum'"):
        source("reasoning_gym", environments={"chain_sums": {}})
    with refused(ConfigError, "'terms'"):
        source("reasoning_gym", environments={"chain_sum": {"config": {"terms": 2}}})
    with refused(ConfigError, "AssertionError"):
        source("reasoning_gym", environments={"chain_sum": {"config": {"min_terms": 9, "max_terms": 2}}})


def test_reasoning_gym_refuses_an_environment_whose_scores_do_not_survive_recording() -> None:
    with refused(ConfigError, "rearc", "JSON"):
        source("reasoning_gym", environments={"rearc": {}})


# --- a user's function


def numbers(top: int = 3) -> Iterator[dict[str, Any]]:
    for number in range(top):
        yield {"prompt": f"{number}?", "answer": number}


def tasks() -> list[Task]:
    return [Task("a", (Message("user", "hi"),), {"answer": (1, 2)}), Task("a", (Message("user", "ho"),))]


def nothing() -> None:
    return None


NOT_A_FUNCTION = 3


def test_python_rows_and_arguments() -> None:
    made = source("python", source=f"{__file__}:numbers", args={"top": 2}, skip=1)
    assert [(task.prompt[0].content, task.columns) for task in made] == [("1?", {"answer": 1})]


def test_python_tasks_get_the_tasksets_name_and_unique_ids() -> None:
    made = source("python", "test", source=f"{__file__}:tasks")
    assert [(task.taskset, task.task_id) for task in made] == [("test", "a"), ("test", "a-2")]
    assert made[0].columns == {"answer": [1, 2]}


def test_python_source_is_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rows():\n    return [{'prompt': 'x'}]\n")
    text = "model: {kind: tiny}\ntasks: {train: {kind: python, source: 'mine.py:rows'}}\nrewards: [exact]\n"
    (tmp_path / "run.yaml").write_text(text)
    section = load_config(tmp_path / "run.yaml").tasks["train"]
    assert build("tasks", section, name="train", seed=0)[0].prompt == (Message("user", "x"),)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nothing", DataError, "found: NoneType"),
        ("NOT_A_FUNCTION", ConfigError, "name a function"),
        ("number", UnknownName, "did you mean 'numbers'"),
    ],
)
def test_python_source_that_gives_no_rows(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        source("python", source=f"{__file__}:{name}")


def test_python_source_without_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"file\.py:Name"):
        PythonTasks.Config(kind="python", source="rows")
