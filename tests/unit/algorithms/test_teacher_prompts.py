"""What a teacher reads: templates over the task's columns, feedback and a success of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from configs import algorithm_problems, with_algorithm
from episodes import turn
from failing import refused

from trivium.algorithms import build_algorithm
from trivium.algorithms.batches import batch_of
from trivium.algorithms.teachers.teacher_prompts import TeacherPrompts
from trivium.foundation.errors import DataError
from trivium.types import Group, Message, Prompt, Task, Trajectory


class Letters:
    """A renderer whose tokens are the characters of the messages."""

    def render(self, messages: Sequence[Message]) -> Prompt:
        return Prompt(np.array([ord(c) for message in messages for c in f"{message.role[0]}:{message.content};"]))


def member(index: int, reward: float, feedback: str = "") -> Trajectory:
    prompt = Letters().render(TASK.prompt).tokens
    return Trajectory(index, (turn(prompt, [1, 2, 3], text=f"reply {index}"),), {"exact": reward}, feedback=feedback)


TASK = Task("t", (Message("system", "be brief"), Message("user", "2+2=")), {"answer": 4, "hint": ""})
GROUP = Group(0, TASK, (member(0, 0.0, "too small"), member(1, 1.0), member(2, 0.0), member(3, 1.0)))


def read(*templates: str, group: Group = GROUP, limit: int | None = None) -> list[str | None]:
    prompts = TeacherPrompts(Letters(), templates, limit=limit)
    batch = prompts.added(batch_of([group]), [group])
    taught = [bool(row.all()) for row in batch.columns["taught"]]
    assert taught == [e.teacher_prompt is not None for e in batch.experiences]
    return [None if e.teacher_prompt is None else "".join(map(chr, e.teacher_prompt.tokens)) for e in batch.experiences]


def test_columns_and_the_prompt_are_filled_in() -> None:
    assert read("{prompt} is {answer}") == ["s:be brief;u:2+2= is 4;"] * 4


def test_the_success_is_that_of_another_member() -> None:
    shown = [None if text is None else text.split(":")[-1] for text in read("{success}")]
    assert shown == ["reply 1;", "reply 3;", "reply 1;", "reply 1;"]
    alone = replace(GROUP, trajectories=(member(0, 0.0), member(1, 1.0)))
    assert [text is None for text in read("{success}", group=alone)] == [False, True]


def test_the_first_template_with_known_fields_counts() -> None:
    none = replace(GROUP, trajectories=(member(0, 0.0, "too small"), member(1, 0.0)))
    assert read("{success} {feedback}", "{feedback}", group=none) == ["s:be brief;u:too small;", None]
    assert read("{hint}") == [None] * 4, "an empty column is not known"


def test_an_unknown_field_is_refused() -> None:
    with refused(DataError, "solution", "answer"):
        read("{solution}")


def test_a_workflow_that_shows_another_prompt_is_refused() -> None:
    other = replace(GROUP, trajectories=(Trajectory(0, (turn([7, 7], [1]),), {"exact": 0.0}),))
    with refused(DataError, "'t'", "2 tokens"):
        read("{answer}", group=other)


def test_a_text_that_leaves_no_room_for_the_completion_does_not_count() -> None:
    short = "s:be brief;u:4;"
    assert read("{prompt} is {answer}", "{answer}", limit=len(short) + 3) == [short] * 4
    assert read("{prompt} is {answer}", "{answer}", limit=len(short) + 2) == [None] * 4


def test_a_sequence_of_rewritten_history_is_not_taught() -> None:
    (first,) = GROUP.trajectories[0].turns
    rewritten = replace(GROUP.trajectories[0], turns=(first, turn([7, 7], [1])))
    assert read("{answer}", group=replace(GROUP, trajectories=(rewritten,))) == ["s:be brief;u:4;", None]


def test_an_estimator_that_reads_the_teacher_skips_untaught_rows() -> None:
    teacher = {"context": "{feedback}", "weights": "average"}
    config = with_algorithm({"kind": "iw_opd", "normalise_advantages": "none", "teacher": teacher})
    algorithm = replace(build_algorithm(config.algorithm), teacher_prompts=TeacherPrompts(Letters(), ("{feedback}",)))
    batch = algorithm.batch([GROUP])
    rows = [np.where(e.response_mask, -0.3, 0).astype(np.float32) for e in batch.experiences]
    old = [e.rollout_log_prob for e in batch.experiences]
    done, metrics = algorithm.advantages(batch.with_columns(teacher_log_prob=rows, old_log_prob=old))
    assert [bool(row.any()) for row in done.columns["advantages"]] == [True, False, False, False]
    assert metrics["train/taught"] == 0.25


def test_columns_of_any_type_are_written() -> None:
    task = replace(TASK, columns={"answer": np.array([1, 2])})
    assert read("{answer}", group=replace(GROUP, task=task))[0] == "s:be brief;u:[1 2];"


def test_an_empty_prompt_is_refused() -> None:
    with refused(DataError, "'t'", "empty"):
        read("{answer}", group=replace(GROUP, task=replace(TASK, prompt=())))


@pytest.mark.parametrize(
    ("teacher", "where"),
    [
        ({"context": []}, "algorithm.teacher"),
        ({"context": "{answer}", "weights": "current", "rate": 0.5}, "algorithm.teacher.rate"),
        ({"context": "{answer"}, "algorithm.teacher.context"),
        ({"context": "{}"}, "algorithm.teacher.context"),
        ({"context": "{answer:5d}"}, "algorithm.teacher.context"),
    ],
)
def test_a_teacher_that_knows_nothing_more_is_refused(teacher: dict[str, object], where: str) -> None:
    assert any(name.startswith(where) for name in algorithm_problems({"kind": "distill", "teacher": teacher}))
