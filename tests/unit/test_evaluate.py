"""pass@k and maj@k against enumeration of all subsets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from configs import configured
from episodes import group, turn
from hypothesis import given
from hypothesis import strategies as st

from trivium.config import RewardConfig, plugin
from trivium.config.recording import scores_observations
from trivium.evaluate import Evaluator, best_at_k, maj_at_k, observation_loss, pass_at_k, worst_at_k
from trivium.rewards import make_judge
from trivium.runtime.stage import evaluates_alike
from trivium.types import Failure, Group, Sampling, Task, Trajectory


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    expected = mean(any(subset) for subset in combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=8), st.data())
def test_best_and_worst_at_k_are_means_over_all_subsets(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    for found, pick in ((best_at_k(rewards, k), max), (worst_at_k(rewards, k), min)):
        assert found == pytest.approx(mean(pick(subset) for subset in combinations(rewards, k)), abs=1e-9)


def _majority(subset: tuple[str, ...]) -> float:
    counts = Counter(subset)
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    return ("a" in winners) / len(winners)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=8), st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(answers: list[str], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    expected = mean(_majority(subset) for subset in combinations(answers, k))
    assert maj_at_k(answers, "a", k) == pytest.approx(expected, abs=1e-12)


def test_majority_grows_with_k_where_the_right_answer_leads() -> None:
    answers = ["a", "b", "c", "a", "b", "c", "a", "a"]
    assert [round(maj_at_k(answers, "a", k), 3) for k in (1, 3, 4, 8)] == [0.5, 0.595, 0.671, 1.0]


@pytest.mark.parametrize(
    ("rewards", "threshold", "accuracy", "partial"),
    [
        ([0.0, 1.0], None, 0.5, 0),
        ([-1.0, 1.0], None, 0.5, 0),
        ([0.5, 1.0], None, 0.5, 1),
        ([0.5, 0.2], 0.5, 0.5, 0),
        ([3.4, -2.1], None, 0.5, 2),  # a reward model's scores
        ([3.4, -2.1], 0.0, 0.5, 0),
    ],
)
def test_graded_rewards_are_counted_unless_a_threshold_makes_them_right_or_wrong(
    rewards: list[float], threshold: float | None, accuracy: float, partial: int
) -> None:
    explorer = cast(Any, None)  # `measured` rolls nothing out
    evaluator = Evaluator(explorer, [], "test", 0, 2, (1,), Sampling(max_new_tokens=4), threshold)
    trajectories = tuple(Trajectory(index, rewards={"r": reward}) for index, reward in enumerate(rewards))
    metrics = evaluator.measured([Group(0, Task("a", ()), trajectories)], version=3)
    assert (metrics["eval/test/accuracy"], metrics["eval/test/partial"]) == (accuracy, partial)
    assert metrics["eval/test/reward"] == pytest.approx(mean(rewards))


def voted(rewards: list[dict[str, Any]], completions: list[str], num_right: int, **columns: Any) -> float:
    """maj@n of n completions to one task, of which the first `num_right` are right."""
    judge = make_judge([plugin("rewards", RewardConfig)(section) for section in rewards])
    count = len(completions)
    explorer = cast(Any, SimpleNamespace(judge=judge))
    evaluator = Evaluator(explorer, [], "test", 0, count, (1, count), Sampling(max_new_tokens=4))
    members = tuple(
        Trajectory(index, (turn([5], [1], text=text),), {"r": float(index < num_right)})
        for index, text in enumerate(completions)
    )
    metrics = evaluator.measured([Group(0, Task("a", (), columns), members)], version=3)
    return metrics[f"eval/test/maj@{count}"]


RIGHT = ["Way 0: #### 4", "Way 1: #### 4"]


@pytest.mark.parametrize(
    ("rewards", "wrong", "columns", "majority"),
    [
        # one wrong answer, in words of its own each time
        ([{"kind": "gsm8k"}], ["so #### 5", "or #### 5.0", "thus #### 05"], {"answer": "4"}, 0.0),
        ([{"kind": "gsm8k"}], ["so #### 5", "or #### 6", "thus #### 7"], {"answer": "4"}, 1.0),
        ([{"kind": "gsm8k"}], ["I", "do not", "know"], {"answer": "4"}, 0.0),  # no answer, three times
        ([{"kind": "format"}, {"kind": "gsm8k"}], ["so #### 5", "or #### 5", "#### 5"], {"answer": "4"}, 0.0),
        ([{"kind": "gsm8k", "method": "flexible", "workers": 1}], ["5", "is 5", "5."], {"answer": "4"}, 0.0),
        ([{"kind": "exact"}], ["5", " 5", "5\n"], {"answer": "4"}, 0.0),
        ([{"kind": "exact"}], ["5", "5.0", "5.00"], {"answer": 4.0}, 0.0),
        ([{"kind": "exact"}], ["5", "5.0", "5.00"], {"answer": "4"}, 1.0),  # other words
        ([{"kind": "exact", "casefold": True}], ["Yes", "YES", "yes"], {"answer": "no"}, 0.0),
        ([{"kind": "exact"}], ["5", " 5", "5 "], {"answer": None}, 0.0),  # cannot be compared: the text
        # no form of its own: the whole text
        ([{"kind": "regex", "pattern": "4"}], ["so 5", "or 5", "5"], {}, 1.0),
        ([{"kind": "regex", "pattern": "4"}], ["5", "5 ", " 5"], {}, 0.0),
        # the grader of the task
        (
            [{"kind": "by_source"}],
            ["\\boxed{\\frac12}", "or \\boxed{1/2}", "so \\boxed{0.5}"],
            {"data_source": "lighteval/MATH", "answer": "4"},
            0.0,
        ),
        (
            [{"kind": "by_source"}],
            ["a\nAnswer: 5", "Answer: $5$", "\\boxed{5}"],
            {"data_source": "aime", "answer": "4"},
            0.0,
        ),
        (
            [{"kind": "by_source"}],
            ["<answer>The end</answer>", "so <answer>end!</answer>", "<answer>an END</answer>"],
            {"data_source": "searchR1_nq", "answer": "4"},
            0.0,
        ),
        ([{"kind": "by_source"}], ["a = 1", "a = 2", "a = 3"], {"data_source": "taco", "answer": "[]"}, 1.0),
    ],
)
def test_a_majority_is_of_answers_not_of_texts(
    rewards: list[dict[str, Any]], wrong: list[str], columns: dict[str, Any], majority: float
) -> None:
    assert voted(rewards, [*RIGHT, *wrong], 2, **columns) == majority


def test_a_majority_of_expressions() -> None:
    pytest.importorskip("math_verify")
    rewards = [{"kind": "math_verify"}]
    same = ["\\boxed{\\sqrt{8}}", "so $2\\sqrt{2}$", "\\boxed{2\\sqrt2}"]
    assert voted(rewards, [*RIGHT, *same], 2, answer="4") == 0.0
    assert voted(rewards, [*RIGHT, "\\boxed{1/2}", "\\boxed{0.5}", "\\boxed{x}"], 2, answer="4") == 0.5


def test_a_majority_with_the_recipe_of_the_task() -> None:
    parts = [{"kind": "gsm8k"}, {"kind": "regex", "pattern": "4"}]
    recipe = {"kind": "recipe", "components": parts, "labels": {"sums": {"gsm8k": 1.0}, "other": {"regex": 1.0}}}
    wrong = ["so #### 5", "or #### 5", "#### 5"]
    assert voted([recipe], [*RIGHT, *wrong], 2, label="sums", answer="4") == 0.0
    assert voted([recipe], [*RIGHT, *wrong], 2, label="other", answer="4") == 1.0


def test_the_loss_of_observations_is_a_mean_over_their_tokens() -> None:
    """The tokens between turns, each with its first recorded log-probability; a failed rollout is left out."""

    def recorded(*log_prob: float) -> dict[str, Any]:
        return {"extra": {"prompt_log_prob": np.array(log_prob, np.float32)}}

    first = turn([5, 6], [1], **recorded(0, -9, 0))
    second = turn([5, 6, 1, 7, 8], [2], **recorded(0, -9, -9, -1, -2, 0))
    third = turn([5, 6, 1, 7, 8, 2, 9], [3, 3], **recorded(0, -9, -9, -8, -8, -9, -3, 0, 0))
    failed = Trajectory(1, (first, second), failure=Failure("deadline", "TimeoutError", "late"))
    whole = group(0, Trajectory(0, (first, second, third), {"r": 0.0}), failed)
    assert observation_loss([whole, whole]) == {"observation_tokens": 6, "observation_loss": 2.0}
    assert observation_loss([group(0, Trajectory(0, (first,), {"r": 0.0}))]) == {"observation_tokens": 0}


def test_an_evaluation_is_repeated_for_a_stage_that_measures_more() -> None:
    sections = {
        "tasks": {name: {"kind": "arithmetic"} for name in ("train", "test")},
        "evaluation": {"taskset": "test"},
    }
    plain, echo = (configured(algorithm=kind, **sections) for kind in ("grpo", "echo"))
    assert (scores_observations(plain), scores_observations(echo)) == (False, True)
    assert evaluates_alike(plain, plain)
    assert not evaluates_alike(plain, echo)
    scripted = configured(algorithm="echo", engine={"kind": "scripted", "replies": ["1"]}, **sections)
    assert not scores_observations(scripted)
