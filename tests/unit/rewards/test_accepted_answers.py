"""Answers of tasks as people have them: numbers, lists, booleans, null, in every grader that compares with one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from failing import check_error, refused
from reward_parts import judged, task

from trivium.config import RewardConfig, plugin
from trivium.foundation.errors import DataError, RewardError
from trivium.rewards import make_judge
from trivium.rewards.accepted import plain_number
from trivium.rewards.by_source import default_compute_score
from trivium.rewards.functions import Exact, Gsm8k


def section(kind: str, **options: Any) -> RewardConfig:
    return plugin("rewards", RewardConfig)({"kind": kind, **options})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("5", "5"), ("5.0", "5"), ("+5.", "5"), ("005", "5"), ("5e0", "5"), ("-0.0", "0"), (".50", "0.5")),
        *(("1e3", "1000"), ("12e-1", "1.2"), ("-3.10", "-3.1"), ("9" * 30 + ".0", "9" * 30)),
        *((text, None) for text in ("", "five", "5 ", "1,000", "٥", "1_0", "nan", "inf", "0x5", "1e999999999", "5!")),
        ("1e99999999999999999999999", None),
    ],
)
def test_a_text_that_is_a_number_has_one_form(text: str, number: str | None) -> None:
    assert plain_number(text) == number


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (5.0, ["5", "5.0", " 5\n", "5.00", "+5"], ["5.1", "five", "", "#### 5", "-5"]),
        (5, ["5", "5.0"], ["6"]),
        (-0.5, ["-0.5", "-.5"], ["0.5", "-1/2"]),
        (10**30, ["1" + "0" * 30], ["1" + "0" * 29, "1e29"]),
        (["5", "five"], ["5", "five"], ["5.0", "fiv", "['5', 'five']"]),
        ([7, "seven", 7.5], ["7.0", "seven", "7.5"], ["8"]),
        (np.array([1.0, 2.0]), ["1", "2"], ["3"]),
        (np.float64(4), ["4"], ["5"]),
        (True, ["true", "True"], ["1", "false", "yes"]),
        ("5.0", ["5.0"], ["5"]),  # text is compared word for word
    ],
)
def test_exact_compares_numbers_as_numbers_and_lists_as_any(answer: Any, right: list[str], wrong: list[str]) -> None:
    exact = Exact(Exact.Config())
    assert [exact("", text, answer) for text in (*right, *wrong)] == [1.0] * len(right) + [0.0] * len(wrong)


def test_partial_credit_is_for_the_nearest_accepted_answer() -> None:
    partial = Exact(Exact.Config(partial_credit=0.5))
    assert partial("", "124", [999.0, 123.0]) == pytest.approx(0.5 * 2 / 3)
    assert partial("", "123.0", [999, 123]) == 1.0


@pytest.mark.parametrize("answer", [42.0, 42, "42", "42.0", ["41", 42], "6 * 7\n#### 42", ["#### 40", "#### 42"]])
def test_gsm8k_compares_the_number(answer: Any) -> None:
    reward = Gsm8k(Gsm8k.Config(format_score=0.1))
    assert [reward("", f"#### {number}", answer) for number in ("42", "42.00", "4,2")] == [1.0] * 3
    assert [reward("", f"#### {number}", answer) for number in ("43", "-42")] == [0.1] * 2


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("openai/gsm8k", "#### 5", "#### 6"),
        ("lighteval/MATH", "\\boxed{5}", "\\boxed{6}"),
        ("lighteval/MATH", "\\boxed{5.00}", "\\boxed{5.01}"),
        ("math_dapo", "Answer: 5", "Answer: 6"),
        ("aime2030", "Answer: 5.0", "Answer: 50"),
        ("searchR1_nq", "<answer>5</answer>", "<answer>50</answer>"),
    ],
)
@pytest.mark.parametrize("truth", [5, 5.0, ["4", 5], [4, 5.0], np.array([5])])
def test_graders_of_sources_compare_numbers_and_lists(source: str, right: str, wrong: str, truth: Any) -> None:
    def score(text: str) -> float:
        graded = default_compute_score(source, text, truth)
        return graded["score"] if isinstance(graded, dict) else graded

    assert score(right) == 1.0
    assert score(wrong) <= 0.0


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("openai/gsm8k", "#### 5"),
        ("lighteval/MATH", "\\boxed{5}"),
        ("math_dapo", "Answer: 5"),
        ("searchR1_nq", "<answer>The 5</answer>"),
    ],
)
def test_any_text_of_a_list_is_right(source: str, text: str) -> None:
    def scores(truth: Any) -> list[float]:
        graded = [default_compute_score(source, text, each) for each in truth]
        return [each["score"] if isinstance(each, dict) else each for each in graded]

    assert scores([["4", "5"], ["5"], ("6", "5")]) == [1.0] * 3
    assert max(scores([["4", "6"], "4"])) <= 0.0


def test_mathematics_that_is_computed_takes_numbers_and_lists() -> None:
    pytest.importorskip("math_verify")
    reward = make_judge([section("math_verify")])
    assert reward.unfit({"answer": None})
    for truth in (0.5, ["2", "\\frac12"]):
        assert default_compute_score("math_verify", "\\boxed{1/2}", truth) == 1.0
        assert default_compute_score("numina_x", "\\boxed{\\frac{2}{4}}", truth) == 1.0
        assert default_compute_score("hiyouga/geometry3k", "\\boxed{7}", truth) == 0.0


UNFIT = [None, [], ["5", None], [["5"]], {"value": 5}, float("nan"), float("inf")]


@pytest.mark.parametrize("answer", UNFIT)
@pytest.mark.parametrize("reward", [section("exact"), section("gsm8k"), section("by_source")], ids=lambda r: r.kind)
async def test_what_cannot_be_compared_is_an_error_of_the_row_that_check_foresees(
    reward: RewardConfig, answer: Any
) -> None:
    judge, columns = make_judge([reward]), {"answer": answer, "data_source": "lighteval/MATH"}
    assert not judge.lacking(columns)
    assert repr(reward.kind) in judge.unfit(columns)
    result = await judge.score(task(**columns), judged("5"))
    check_error(result, RewardError, reward.kind, "DataError")
    assert isinstance(result, RewardError)
    assert isinstance(result.__cause__, DataError)
    for fits in (5, 5.0, "5", ["5", 6]):
        assert not judge.unfit({**columns, "answer": fits})


@pytest.mark.parametrize("reward", [section("gsm8k"), section("gsm8k", method="flexible"), section("by_source")])
async def test_gsm8k_wants_an_answer_that_is_a_number(reward: RewardConfig) -> None:
    judge, source = make_judge([reward]), {"data_source": "openai/gsm8k"}
    for answer in ("", "five", "5 apples", "$5", "1/2", "5%", "#### five", "5 #### x", "٥", ".", ["five", "six"]):
        assert repr(reward.kind) in judge.unfit({"answer": answer, **source}), answer
        check_error(await judge.score(task(answer=answer, **source), judged("#### 5")), RewardError, "DataError")
    fits = [("5", answer) for answer in ("5", " +5.0\n", "5,", "2+3\n#### 5", "####5", 5.0, "5e0", ["five", "5"])]
    for number, answer in [*fits, ("-5", -5), ("-1000.5", "-1,000.50")]:
        assert not judge.unfit({"answer": answer, **source}), answer
        assert await judge.score(task(answer=answer, **source), judged(f"#### {number}")) == {reward.kind: 1.0}


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
@pytest.mark.parametrize(
    "tests",
    [
        *("", "{", "print(1)", 7, {}, [], [1], ["assert ("], ["assert f() == 1\0"], [""], ["# nothing"], ["f"]),
        *(
            {"inputs": one, "outputs": other}
            for one, other in (([], []), (["1"], []), ("1", "1"), (1, 1), (None, [""]))
        ),
        *({"inputs": ["1"], "outputs": [wanted]} for wanted in (None, 3)),
        *({"inputs": [given], "outputs": [1], "fn_name": "f"} for given in (3, None, "no JSON")),
        {"inputs": [[1]], "outputs": ["no JSON"], "fn_name": "f"},
        {"inputs": [[1]], "outputs": [1], "fn_name": "f("},
        {"inputs": [""]},
    ],
)
def test_check_reads_the_tests_of_programs(source: str, tests: Any) -> None:
    judge = make_judge([section("by_source")])
    for given in (tests, json.dumps(tests)):
        assert "by_source" in judge.unfit({"data_source": source, "reward_model": {"ground_truth": given}})


def test_check_accepts_every_form_of_tests() -> None:
    judge = make_judge([section("by_source")])
    script = {"inputs": ["1\n", ["1", "2"]], "outputs": ["2\n", ["3"]]}
    function = {"inputs": [[1, 2], "1\n[2]"], "outputs": [3, "[3]"], "fn_name": "add"}
    huge = {"inputs": [[10**5000]], "outputs": [1], "fn_name": "f"}
    asserts = ["assert add(1, 2) == 3", "import math\nassert math.isclose(f(1), 2)", "check(f)"]
    for tests in (script, function, asserts, {"assert_case": asserts}, json.dumps(script), huge):
        assert not judge.unfit({"data_source": "apps", "answer": tests})


def test_a_boolean_is_text_for_exact_alone() -> None:
    assert not make_judge([section("exact")]).unfit({"answer": True})
    assert "True" in make_judge([section("gsm8k")]).unfit({"answer": True})
    with refused(DataError, "True"):
        Gsm8k(Gsm8k.Config())("", "#### 1", True)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"data_source": "gsm9k", "answer": "5"}, "gsm9k"),
        ({"data_source": "openai/gsm8k", "reward_model": {"style": "rule"}}, "ground_truth"),
        ({"data_source": "searchR1_nq", "answer": {"goal": "x"}}, "None"),
        ({"data_source": "codecontests", "answer": None}, "codecontests"),
        ({"data_source": "codecontests", "answer": {"inputs": [""], "outputs": [""]}}, ""),
        ({"data_source": "searchR1_nq", "answer": {"target": np.array(["x"])}}, ""),
    ],
)
def test_check_names_the_source_and_the_ground_truth(columns: dict[str, Any], named: str) -> None:
    text = make_judge([section("by_source")]).unfit(columns)
    assert named in text if named else not text


def test_workers_and_recipes_are_checked_as_well() -> None:
    parts = {"components": [{"kind": "exact"}, {"kind": "regex", "pattern": "x"}]}
    recipe = section("recipe", labels={"a": {"exact": 1.0}, "b": {"regex": 1.0}}, **parts)
    judge = make_judge([recipe])
    assert judge.unfit({"label": "a", "answer": None})
    assert not judge.unfit({"label": "b", "answer": None})
    assert make_judge([section("gsm8k", workers=1)]).unfit({"answer": None})


def test_a_reward_of_ones_own_takes_any_answer(tmp_path) -> None:
    (tmp_path / "own.py").write_text("def mine(completion, answer):\n    return answer is None\n")
    assert not make_judge([RewardConfig(kind=f"{tmp_path}/own.py:mine")]).unfit({"answer": None})
