"""Curricula that learn: what they know and draw, against slow loops; checkpoints; the draws of a schedule."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from configs import configured, problems_of
from failing import refused

from trivium.foundation.errors import DataError
from trivium.protocols import TaskSource
from trivium.runtime.build import build_schedule
from trivium.runtime.stage import Stage
from trivium.schedule import Schedule
from trivium.tasks.curricula import Learned, SuccessRate, curriculum_of
from trivium.types import Group, Task, Trajectory


def tasks(number: int, **columns: Sequence[float]) -> list[Task]:
    return [Task(f"t{i}", (), {name: values[i] for name, values in columns.items()}) for i in range(number)]


def learned(number: int = 5, seed: int = 0, **said: Any) -> Learned:
    source = tasks(number, weak=(0.2, 0.4), strong=(0.6, 0.8)) if "references" in said else tasks(number)
    config = SuccessRate.Config(**said)
    curriculum = curriculum_of(config, cast(TaskSource, source), seed=seed, stage=0)
    assert isinstance(curriculum, Learned)
    return curriculum


def group(place: int, rewards: Sequence[float], slot: int = 0) -> Group:
    members = tuple(Trajectory(i, (), {"right": reward}) for i, reward in enumerate(rewards))
    return Group(slot, Task(f"t{place}", ()), members, slot)


def slow(steps: Sequence[Mapping[int, Sequence[float]]], number: int, forget: float) -> list[tuple[float, float]]:
    """(alpha, beta) of each task after these steps, from the docstring."""
    known = [(1.0, 1.0)] * number
    for step in steps:
        for task, (alpha, beta) in enumerate(known):
            results = step.get(task, ())
            known[task] = (
                (1 - forget) * alpha + forget + sum(results),
                (1 - forget) * beta + forget + sum(1 - result for result in results),
            )
    return known


def test_what_is_known_equals_a_slow_loop() -> None:
    dice, curriculum, steps = np.random.default_rng(0), learned(forget=0.1), list[dict[int, list[float]]]()
    for _ in range(6):
        step = {int(place): dice.integers(0, 2, 4).astype(float).tolist() for place in dice.choice(5, 2, replace=False)}
        curriculum.observe([group(place, rewards) for place, rewards in step.items()])
        steps.append(step)
    known = np.array(slow(steps, 5, 0.1))
    np.testing.assert_allclose(np.stack([curriculum.record.alpha, curriculum.record.beta], 1), known, rtol=1e-12)
    curriculum.config = curriculum.config.model_copy(update={"temperature": 0.0})
    distance = abs(known[:, 0] / known.sum(1) - 0.5)
    np.testing.assert_allclose(distance[curriculum.order(7)], sorted(distance))


def test_two_references_predict_as_bots_does() -> None:
    """The check value of Trinity-RFT's estimator."""
    options = {"references": ("weak", "strong"), "trials": 16, "forget": 0.2, "sharing": 0.2}
    curriculum = learned(number=2, **options)
    curriculum.observe([group(0, (1, 0))])
    np.testing.assert_allclose(curriculum.record.alpha, [9, 3.24], rtol=1e-4)
    np.testing.assert_allclose(curriculum.record.beta, [9, 1.96], rtol=1e-4)
    np.testing.assert_allclose(curriculum.record.p, [0.5, 0.6231], rtol=1e-3)
    halved = learned(number=2, adaptive_sharing=True, **options)
    for rewards in ((1, 0), (1, 1)):  # the second step is predicted at about 1/2
        halved.observe([group(0, rewards)])
    assert halved.state()["sharing"] == 0.1
    resumed = learned(number=2, adaptive_sharing=True, **options)
    resumed.restore(halved.state())
    assert resumed.state() == halved.state()


def test_tasks_are_drawn_by_the_softmax_of_their_scores() -> None:
    """The first of a draw has the probability softmax(score / temperature); the second that of the others."""
    curriculum = learned(number=3, temperature=0.2)
    curriculum.record.alpha[:] = (1, 3, 9)  # p = 1/2, 3/4, 9/10
    weights = np.exp(-np.array([0.0, 0.25, 0.4]) / 0.2)
    first, pairs = Counter[int](), Counter[tuple[int, int]]()
    for slot in range(20000):
        order = curriculum.order(slot).tolist()
        first[order[0]] += 1
        pairs[order[0], order[1]] += 1
    for place, share in enumerate(weights / weights.sum()):
        assert first[place] / 20000 == pytest.approx(share, abs=0.012)
    second = weights[0] / weights.sum() * weights[1] / weights[1:].sum()
    assert pairs[0, 1] / 20000 == pytest.approx(second, abs=0.012)


def test_sampled_rates_follow_the_beta_distribution() -> None:
    curriculum = learned(number=2, temperature=0.0, target=1.0, sampled=True)
    curriculum.record.alpha[:], curriculum.record.beta[:] = (2.0, 1.0), (1.0, 1.0)
    share = np.mean([curriculum.order(slot)[0] == 0 for slot in range(4000)])
    assert share == pytest.approx(2 / 3, abs=0.03)  # P(Beta(2, 1) > Beta(1, 1))


def test_solved_tasks_retire_after_visits_in_a_row() -> None:
    curriculum = learned(retire_above=0.75, retire_after=2)
    for rewards in ((1, 1), (1, 0), (1, 1), (1, 1)):
        assert 3 in curriculum.order(0).tolist()
        metrics = curriculum.observe([group(3, rewards)])
    assert sorted(curriculum.order(0).tolist()) == [0, 1, 2, 4]
    assert metrics["curriculum/retired"] == 0.2
    for place in (0, 1, 2, 4):
        curriculum.observe([group(place, (1, 1)), group(place, (1, 1))])
    assert sorted(curriculum.order(0).tolist()) == [0, 1, 2, 3, 4]  # without any other task, all are drawn again


def test_a_function_of_the_user_scores_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def rarest(record):\n    return -record.visits.astype(float)\n\ndef wrong(record):\n    return [1.0]\n"
    )
    stages = [
        configured(tmp_path, schedule={"curriculum": {"kind": f"mine.py:{name}", "temperature": 0.0}})
        for name in ("rarest", "wrong")
    ]
    mine, wrong = (build_schedule(Stage(config, 0, 0, True, tmp_path, tmp_path)).adaptive for config in stages)
    assert isinstance(mine, Learned)
    assert isinstance(wrong, Learned)
    first = mine.order(0)[0]
    mine.observe([Group(0, mine.tasks[int(first)], (Trajectory(0, (), {"exact": 0.0}),))])
    assert mine.order(0)[-1] == first
    with refused(DataError, "mine.py", len(mine.place_of)):
        wrong.order(0)


REFERENCES = {"references": ("weak", "strong"), "trials": 4, "adaptive_sharing": True, "sampled": True}


@pytest.mark.parametrize("options", [{}, REFERENCES], ids=["alone", "references"])
def test_a_restored_curriculum_continues_alike(options: dict[str, Any]) -> None:
    make = lambda: learned(2, retire_above=0.9, **options)  # noqa: E731
    whole, dice = make(), np.random.default_rng(1)
    whole.draw(0, 2, 2)
    resumed: list[Learned] = []
    for step in range(1, 8):
        groups = [group(whole.place(slot), dice.random(3).tolist(), slot) for slot in (2 * step - 2, 2 * step - 1)]
        if step == 4:
            resumed.append(make())
            resumed[0].restore(json.loads(json.dumps(whole.state())))
            assert resumed[0].draws == whole.draws
        for curriculum in (whole, *resumed):
            curriculum.observe(groups)
            curriculum.draw(2 * step, 2, 2)
    assert json.dumps(whole.state()) == json.dumps(resumed[0].state())
    assert len(whole.draws) == 3


def test_the_slots_of_a_draw_are_those_that_only_its_version_admits() -> None:
    """With staleness 1, a step's tasks follow from all groups but those of the step before it."""
    curriculum = learned(50)
    schedule = Schedule(curriculum.tasks, 0, curriculum=curriculum, groups_per_step=2, max_staleness=1, steps=9)
    schedule.draw_tasks(None, 0)
    first = [schedule.at(slot).task.task_id for slot in range(4)]
    schedule.draw_tasks(0, 0)
    assert [schedule.at(slot).task.task_id for slot in range(4)] == first
    assert [slot for slot, _ in curriculum.draws] == [0, 4]
    schedule.draw_tasks(1, 3)  # three slots were admitted in place of refused ones
    assert [slot for slot, _ in curriculum.draws] == [0, 4, 9]
    assert schedule.at(9).epoch == 9
    assert schedule.may_have(30, "t7")
    assert not schedule.may_have(30, "t77")


def ahead(number: int, **said: Any) -> Schedule:
    curriculum = learned(number)
    return Schedule(curriculum.tasks, 0, curriculum=curriculum, groups_per_step=4, max_staleness=2, **said)


def tasks_of(schedule: Schedule, first: int, last: int) -> list[str]:
    return [schedule.at(slot).task.task_id for slot in range(first, last)]


def test_a_lengthened_stage_draws_the_tasks_of_the_whole_one() -> None:
    whole, cut = ahead(50, steps=10), ahead(50, steps=5)
    for schedule in (whole, cut):
        schedule.draw_tasks(None, 0)
        for version in range(5):
            schedule.draw_tasks(version, 0)
    assert tasks_of(cut, 20, 32) == tasks_of(whole, 20, 32)
    assert cut.admitted(4) == 20


def test_a_curriculum_that_learns_needs_results() -> None:
    no_explorers = {"buffer": {"kind": "files"}, "algorithm": "sft"}
    schedule = {"curriculum": {"kind": "success_rate", "references": ["a", "b"], "retire_after": 2}, "group_size": 1}
    problems = problems_of(lambda: configured(schedule=schedule, **no_explorers))
    assert "files" in problems["schedule.curriculum"]
    assert "retire_above" in problems["schedule.curriculum.retire_after"]
    assert "16" in problems["schedule.curriculum.trials"]
