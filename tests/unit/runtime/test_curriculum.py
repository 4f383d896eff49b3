"""A curriculum orders epochs by difficulty: every task still comes once, and noise moves none too far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from failing import refused
from hypothesis import given
from hypothesis import strategies as st

from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError, DataError
from trivium.runtime.build import build_schedule
from trivium.runtime.stage import Stage
from trivium.schedule import Schedule
from trivium.tasks.curricula import Difficulty
from trivium.types import Task

LEVELS = st.lists(st.integers(-3, 3) | st.floats(-5, 5), min_size=1, max_size=25)


def tasks(levels: Sequence[object]) -> list[Task]:
    return [Task(f"t{i}", (), {"level": level}) for i, level in enumerate(levels)]


def schedule(levels: Sequence[float], easy_first: bool = True, spread: float = 0.2, **change: int) -> Schedule:
    taught = tasks(levels)
    config = Difficulty.Config(column="level", easy_first=easy_first, spread=spread)
    curriculum = Difficulty(config, tasks=taught)
    return Schedule(taught, curriculum=curriculum, **{"seed": 0, **change})


def epoch_of(which: Schedule, epoch: int) -> list[float]:
    """The levels of an epoch, in order."""
    size = len(which.tasks)
    return [which.at(slot).task.columns["level"] for slot in range(epoch * size, (epoch + 1) * size)]


@given(LEVELS, st.booleans(), st.sampled_from([0.0, 0.2, 1.0, 10.0]), st.integers(0, 9))
def test_every_epoch_visits_every_task_once(levels: list[float], easy_first: bool, spread: float, seed: int) -> None:
    which = schedule(levels, easy_first, spread, seed=seed)
    for epoch in range(3):
        seen = [which.at(slot) for slot in range(epoch * len(levels), (epoch + 1) * len(levels))]
        assert sorted(a.task.task_id for a in seen) == sorted(f"t{i}" for i in range(len(levels)))
        assert {a.epoch for a in seen} == {epoch}


@given(LEVELS, st.booleans(), st.integers(0, 9))
def test_without_spread_the_order_is_that_of_difficulty(levels: list[float], easy_first: bool, seed: int) -> None:
    assert epoch_of(schedule(levels, easy_first, 0.0, seed=seed), 1) == sorted(levels, reverse=not easy_first)


@given(LEVELS, st.booleans(), st.floats(0, 1.2), st.integers(0, 9))
def test_no_task_passes_one_that_is_easier_by_more_than_the_spread(
    levels: list[float], easy_first: bool, spread: float, seed: int
) -> None:
    """By rank: a task's is the part of the taskset that strictly comes before it."""
    order = epoch_of(schedule(levels, easy_first, spread, seed=seed), 0)
    sign = 1 if easy_first else -1
    rank = {level: sum(sign * other < sign * level for other in levels) / len(levels) for level in levels}
    for later, level in enumerate(order):
        assert all(rank[earlier] <= rank[level] + spread + 1e-12 for earlier in order[:later])


def test_equally_difficult_tasks_come_in_another_order_each_epoch_seed_and_stage() -> None:
    def order(epoch: int = 0, **change: int) -> tuple[str, ...]:
        which = schedule([1.0] * 30, spread=0.0, **change)
        return tuple(which.at(slot).task.task_id for slot in range(epoch * 30, epoch * 30 + 30))

    orders = [order(), order(1), order(seed=1), order(stage=1)]
    assert len(set(orders)) == 4
    assert order() == orders[0]


def test_the_spread_goes_from_sorted_to_shuffled() -> None:
    levels = list(range(400))
    slope = [
        np.corrcoef(levels, epoch_of(schedule(levels, spread=spread), 0))[0, 1] for spread in (0.0, 0.2, 1.0, 10.0)
    ]
    assert slope[0] == pytest.approx(1.0)
    assert 0.95 < slope[1] < 1.0
    assert 0.5 < slope[2] < 0.9
    assert abs(slope[3]) < 0.25


@pytest.mark.parametrize("level", [None, "hard", True, float("nan"), [1]])
def test_a_task_without_a_difficulty_is_named(level: object) -> None:
    with refused(DataError, "'t1'", "'level'"):
        Difficulty(Difficulty.Config(column="level"), tasks=tasks([1, level, 2]))
    with refused(DataError, "'difficulty'", "['level']", "schedule.curriculum.column"):
        Difficulty(Difficulty.Config(column="difficulty"), tasks=tasks([1]))


def configured(folder: Path, **said: object) -> RunConfig:
    (folder / "tasks.jsonl").write_text("".join(f'{{"prompt": "{n}=", "level": {9 - n}}}\n' for n in range(10)))
    return config_from_mapping(
        {
            "model": {"kind": "tiny"},
            "tasks": {"train": {"kind": "jsonl", "path": "tasks.jsonl"}},
            "rewards": ["exact"],
            "engine": {"kind": "scripted", "replies": ["1"]},
            "schedule": said,
        },
        folder,
    )


def test_a_config_names_the_column(tmp_path: Path) -> None:
    config = configured(tmp_path, curriculum={"column": "level", "spread": 0.0, "easy_first": False})
    which = build_schedule(Stage(config, 0, 0, True, tmp_path, tmp_path))
    assert epoch_of(which, 0) == list(range(9, -1, -1))
    with refused(DataError, "'levle'"):
        build_schedule(Stage(configured(tmp_path, curriculum={"column": "levle"}), 0, 0, True, tmp_path, tmp_path))
    with refused(ConfigError, "schedule.shuffle", "curriculum"):
        configured(tmp_path, curriculum={"column": "level"}, shuffle=False)
    with refused(ConfigError, "schedule.curriculum.column"):
        configured(tmp_path, curriculum={})
