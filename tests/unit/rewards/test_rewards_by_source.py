"""Scorers by data source: what each gives, and what answers that were written to deceive it get."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import check_error, refused

from trivium.config import RewardConfig, plugin
from trivium.foundation.errors import ConfigError, DataError, RewardError
from trivium.frontdoors.verl import default_compute_score
from trivium.rewards import make_judge
from trivium.rewards.by_source import GRADERS, BySource, GraderLimits, grader_of
from trivium.rewards.graders.mathematics import last_boxed, math_dapo
from trivium.rewards.graders.programs import program_of, program_score, read_tests
from trivium.rewards.sandbox import Limits, Sandbox
from trivium.rewards.sandbox.seccomp import known
from trivium.types import Message, StopReason, Task, Trajectory, Turn

linux = pytest.mark.skipif(not known(), reason="programs run in a sandbox, which needs Linux")


def score(source: str, text: str, truth: Any) -> Any:
    found = default_compute_score(source, text, truth)
    return found["score"] if isinstance(found, dict) else found


@pytest.mark.parametrize(
    ("source", "text", "truth", "wanted"),
    [
        ("openai/gsm8k", "so #### 1,234", "1234", 1.0),
        ("openai/gsm8k", "so 1234", "1234", 0.0),
        ("openai/gsm8k", "#### 5", "6", 0.0),
        ("lighteval/MATH", "\\boxed{\\frac12}", "0.5", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", "\\fbox{x=3}", "3", 1.0),
        ("HuggingFaceH4/MATH-500", "3", "3", 0.0),
        ("math_dapo", "Answer: 34", "34", 1.0),
        ("math", "Answer: 35", "34", -1.0),
        ("math_dapo_reasoning", "nothing", "34", -1.0),
        ("aime2024", "Answer: $204$", "204", 1.0),
        ("hiyouga/geometry3k", "<think>so</think> \\boxed{7}", "7", 1.0),
        ("hiyouga/geometry3k", "\\boxed{7}", "7", 0.9),
        ("hiyouga/geometry3k", "<think>so</think> 7", "7", 0.0),
        ("searchR1_nq", "<answer>The Beatles!</answer>", {"target": ["beatles", "fab four"]}, 1.0),
        ("searchR1_hotpotqa", "<answer>Beatles</answer><answer>Stones</answer>", {"target": "Beatles"}, 0.0),
        ("searchR1_nq", "The Beatles", {"target": np.array(["beatles"], dtype=object)}, 0.0),
        ("searchR1_nq", "<answer>an  Apple</answer>", {"target": np.array(["apple"], dtype=object)}, 1.0),
    ],
)
def test_each_source_has_its_grader(source: str, text: str, truth: Any, wanted: float) -> None:
    assert score(source, text, truth) == pytest.approx(wanted)


def test_geometry_is_computed_where_it_is_written_in_another_way() -> None:
    pytest.importorskip("math_verify")
    assert score("hiyouga/geometry3k", "<think></think>\\boxed{2\\sqrt{2}}", "\\sqrt{8}") == pytest.approx(1.0)
    assert score("hiyouga/geometry3k", "<think></think>\\boxed{3}", "\\sqrt{8}") == pytest.approx(0.1)
    assert score("numina_olympiads", "\\boxed{2\\sqrt{2}}", "\\sqrt{8}") == 1.0
    assert score("math_verify", "\\boxed{1/2}", "0.5") == 1.0


def test_dapo_says_what_it_read() -> None:
    assert default_compute_score("math_dapo", "Answer: 1,000 dollars", "1000") == {
        "score": 1.0,
        "acc": True,
        "pred": "1000",
    }


def test_an_unknown_source_is_named_with_those_there_are() -> None:
    with refused(DataError, "'openai/gsm9k'") as caught:
        default_compute_score("openai/gsm9k", "", "")
    assert all(name in caught.value.found for name in GRADERS)
    assert grader_of("aime_2031") is grader_of("aime")


@pytest.mark.parametrize(
    ("source", "text", "truth"),
    [
        # The right answer is there, but it is not the one that is given.
        ("openai/gsm8k", "#### 42 no: #### 41", "42"),
        ("lighteval/MATH", "\\boxed{42}, or \\boxed{41}", "42"),
        ("lighteval/MATH", "\\boxed{41, 42, 43}", "42"),
        ("lighteval/MATH", "\\boxed{42} \\boxed{", "42"),
        ("math_dapo", "Answer: 42\nAnswer: 41", "42"),
        ("math_dapo", "Answer: 41 or 42", "42"),
        ("searchR1_nq", "<answer>yes no</answer>", {"target": ["yes", "no"]}),
        ("searchR1_nq", "<answer>yes", {"target": ["yes"]}),
        # The end of the text is what is read, not what was thought before.
        ("openai/gsm8k", "#### 42" + " so" * 200, "42"),
        ("math_dapo", "Answer: 42" + "\nso" * 200, "42"),
        # Special tokens and tags are no answer.
        ("openai/gsm8k", "<|im_end|>#### <|42|>", "42"),
        ("lighteval/MATH", "\\boxed{<think>42</think>}", "42"),
        ("hiyouga/geometry3k", "\\boxed{} </think><think>", "7"),
        # Nothing at all.
        ("openai/gsm8k", "#### ,", "0"),
        ("lighteval/MATH", "\\boxed{}", "0"),
        ("math_dapo", "[INVALID]", "0"),
        ("searchR1_nq", "<answer></answer>", {"target": ["x"]}),
        ("openai/gsm8k", "", "0"),
        # Other digits than ours, and a sign that is no minus.
        ("openai/gsm8k", "#### ٤٢", "42"),
        ("openai/gsm8k", "#### \u221242", "42"),
    ],
)
def test_answers_that_deceive(source: str, text: str, truth: Any) -> None:
    if source == "hiyouga/geometry3k":
        pytest.importorskip("math_verify")
    assert score(source, text, truth) <= 0.0


def test_what_was_answered_is_never_the_mark_of_no_answer() -> None:
    assert math_dapo("no answer", "[INVALID]")["acc"] is False


def test_long_and_nested_answers_take_no_time() -> None:
    began = time.process_time()
    texts = [
        "\\boxed{" * 20_000,
        "{" * 50_000 + "}" * 50_000,
        "</think>" * 20_000,
        "Answer:" * 20_000,
        "$" * 100_000,
        "\\frac" * 20_000,
        "9," * 50_000,
        "<think>" + "\\boxed{" + "{}" * 20_000,
    ]
    for source in ("openai/gsm8k", "lighteval/MATH", "math_dapo", "hiyouga/geometry3k"):
        for text in texts:
            assert score(source, text, "7" if "gsm8k" in source else "\\text{none of it}") <= 0.1
    assert time.process_time() - began < 10


def test_the_last_box() -> None:
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_boxed("$\\boxed 5$ and") == "5"
    assert last_boxed("\\fbox{x}") == "x"
    assert last_boxed("\\boxed{x} \\fbox{y}") == "x"
    assert last_boxed("\\boxed") is last_boxed("") is None


# --------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(Limits(cpu_s=2, wall_s=20.0, memory=512 << 20))


ADDS = "Sure:\n```python\nprint(sum(map(int, input().split())))\n```\nDone."


@linux
def test_a_script_gets_the_share_of_the_tests_that_it_passes(sandbox: Sandbox) -> None:
    tests = {"inputs": ["1 2\n", "3 4", "x y"], "outputs": ["3\n", "7 \n\n", "0"]}
    assert program_score(ADDS, tests, sandbox) == pytest.approx(2 / 3)
    assert program_score(ADDS, json.dumps(tests), sandbox) == pytest.approx(2 / 3)
    assert default_compute_score("codecontests", ADDS, tests) == pytest.approx(2 / 3)
    assert program_score("print(0.1 + 0.2)", {"inputs": [""], "outputs": ["0.3"]}, sandbox) == 1.0
    assert program_score("print(1000001)", {"inputs": [""], "outputs": ["1000000"]}, sandbox) == 0.0
    assert program_score("no code at all", {"inputs": [""], "outputs": [""]}, sandbox) == 0.0


@linux
def test_ten_tests_are_enough(sandbox: Sandbox) -> None:
    tests = {"inputs": [""] * 12, "outputs": ["1"] * 10 + ["2"] * 2}
    assert program_score("print(1)", tests, sandbox) == 1.0
    assert len(read_tests(tests)) == 12


@linux
def test_a_function_and_a_method(sandbox: Sandbox) -> None:
    tests = {"fn_name": "pair", "inputs": [[1, 2], "3\n[4]"], "outputs": [[[1, 2]], "[3, [4]]"]}
    assert program_score("def pair(a, b):\n    return a, b", tests, sandbox) == 1.0
    method = "class Solution:\n    def pair(self, a, b):\n        return [a, b]"
    assert program_score(method, tests, sandbox) == 1.0
    close = {"fn_name": "f", "inputs": [np.array([1.0])], "outputs": [{"a": 0.3}]}
    assert program_score("def f(x):\n    return {'a': 0.1 + 0.2}", close, sandbox) == 1.0
    assert program_score("def f(x):\n    return {'b': 0.3}", close, sandbox) == 0.0
    assert program_score("def f(x):\n    return 10 ** 400", {**close, "outputs": [1.5]}, sandbox) == 0.0


@linux
def test_asserts(sandbox: Sandbox) -> None:
    code = "def f(x):\n    return (x, [x])"
    tests = ["assert f(1) == (1, [1])", "x = 2\nassert f(x) == (x, [x])", "assert f(3) == (3, [4])", "assert not f(3)"]
    assert program_score(code, tests, sandbox) == 0.5
    assert program_score(code, {"assert_case": tests[:2]}, sandbox) == 1.0


LONG = "1" + "0" * 5000


@linux
def test_integers_of_any_length(sandbox: Sandbox) -> None:
    """CPython refuses to read and to write more than 4300 digits, unless it is told otherwise."""
    limit = sys.get_int_max_str_digits()

    def passes(code: str, tests: Any) -> bool:
        return program_score(code, tests, sandbox) == 1.0

    assert passes("print(10**5000)", {"inputs": [""], "outputs": [LONG]})
    assert not passes("print(10**5000 + 1)", {"inputs": [""], "outputs": [LONG]})
    assert passes("print(int(input()) % 7)", {"inputs": [LONG], "outputs": [str(10**5000 % 7)]})
    power = "def f(n):\n    return 10 ** n"
    assert passes(power, ["assert len(str(f(5000))) == 5001", f"assert f(5000) == {LONG}", "assert f(5000) > 10**4999"])
    assert not passes(power, [f"assert f(5001) == {LONG}"])
    assert passes(power, {"fn_name": "f", "inputs": ["5000"], "outputs": [LONG]})
    assert passes(power, json.dumps({"fn_name": "f", "inputs": [[5000]], "outputs": [0]}).replace("[0]", f"[{LONG}]"))
    add = "def f(a, b):\n    return [a + b]"
    assert passes(add, {"fn_name": "f", "inputs": [[10**5000, -1]], "outputs": [[10**5000 - 1]]})
    assert sys.get_int_max_str_digits() == limit


CHEATS = [
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "class Any:\n    def __eq__(self, other):\n        return True\n    __ne__ = None\ndef f(x):\n    return Any()",
    "def f(x):\n    raise SystemExit(0)",
    "def f(x):\n    while True:\n        pass",
    "class R:\n    def __repr__(self):\n        return 'anything'\ndef f(x):\n    return R()",
    "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in frame.f_locals.values():\n"
    "            if v == [x, 'secret']:\n                return v\n        frame = frame.f_back\n",
    "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) is list and o[1:] == ['secret']:\n"
    "            return o\n",
    "import os\ndef f(x):\n    for n in range(3, 9):\n        try:\n            os.write(n, b\"[1, 'secret']\")\n"
    "        except OSError:\n            pass\n    return 0",
]


@linux
@pytest.mark.parametrize("cheat", range(len(CHEATS)))
def test_programs_that_deceive(cheat: int, sandbox: Sandbox) -> None:
    code = CHEATS[cheat]
    tests: list[Any] = [
        {"fn_name": "f", "inputs": [[1]], "outputs": [[1, "secret"]]},
        ["assert f(1) == [1, 'secret']"],
    ]
    if cheat in (0, 1, 3):
        tests.append(["assert f(1) in ([1, 'secret'],)"])
    if "while True" in code:
        tests, sandbox = tests[:1], Sandbox(Limits(cpu_s=1))
    assert [program_score(code, each, sandbox) for each in tests] == [0.0] * len(tests)


HONEST = """
import math
from math import isclose
def double(x): return x * 2
def half(x): return x / 2
def sort(values): values.sort()
def count(n):
    for i in range(n): yield i
class Stack:
    def __init__(self): self.values = []
    def push(self, x): self.values.append(x)
    def pop(self): return self.values.pop()
    def empty(self): return not self.values
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
def positive(x):
    if x < 0: raise ValueError("negative")
    return x
def apply(g, x): return g(x)
def pow(a, b): return a ** b
"""

HOLD = """
assert 3 < double(2) < 5
assert abs(half(1) - 0.5) < 1e-6 and math.isclose(half(1), 0.5) and isclose(half(1), 0.5)
assert isinstance(double([1]), list) and double(1) in (1, 2) and not double(0) and double(1) is not None
assert set(double([1, 2])) == {1, 2} and 2 == double(1) and list(count(3)) == [0, 1, 2]
assert all(double(x) == 2 * x for x in range(5)) and double({1: 2}.get(1)) == 4
stack = Stack(); stack.push(3); assert stack.pop() == 3; assert stack.empty() and isinstance(stack, Stack)
values = [3, 1]; sort(values); assert values == [1, 3]
assert Point(1) == Point(1) and not Point(1) == Point(2) and Point(1) != 1
assert apply(lambda x: x + 1, 2) == 3 != 4
assert 0 < pow(2, 3) < 9
try:
    positive(-1); assert False
except ValueError as error:
    assert "negative" in str(error)
"""


@linux
def test_other_asserts_are_evaluated_beside_the_program(sandbox: Sandbox) -> None:
    wrong = ["assert double(1) < 2", "assert 3 == double(1)", "assert missing(1) > 0", "assert pow(2, 3) > 8"]
    assert program_score(HONEST, [HOLD], sandbox) == 1.0
    assert program_score(HONEST, wrong, sandbox) == 0.0


FORGED = """
tried = (
    lambda: f(2) > 3, lambda: abs(f(1) - 0.5) < 1e-6, lambda: isinstance(f([1]), list), lambda: f(1) in (1, 2),
    lambda: 7 in f(1), lambda: f("a") is True, lambda: set(f([1, 2])) == {5, 6}, lambda: f(1).startswith("a"),
    lambda: f(1).isdigit(), lambda: math.isclose(f(1), 0.5), lambda: isclose(f(1), 0.5), lambda: 9 == f(1),
    lambda: sorted(f([2, 1])) == [1, 2], lambda: all(f(x) == x * x + 7 for x in range(3)), lambda: f(1) == 9,
    lambda: round(f(1), 2) == 0.33, lambda: any(x == 3 for x in f(1)), lambda: {1: 2} == f(1),
    lambda: f(1) <= 5 <= f(2),
    lambda: type(f(1)) == list, lambda: (f(1) > 3) == True, lambda: "%d" % f(1) == "12", lambda: max(f(1), 3) > 4,
    lambda: len(f(1)) == 17, lambda: f(1) + 1 == 5, lambda: not f(1) != 5,
)
for each in tried:
    try:
        held = bool(each())
    except Exception:
        held = False
    assert not held
"""
EQUAL_TO_ALL = """
class Yes:
    def __getattr__(self, name): return lambda *args, **options: True
    def __lt__(self, other): return True
    __eq__ = __ne__ = __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __sub__
    def __abs__(self): return 0.0
    def __hash__(self): return 0
    def __len__(self): return 0
    def __iter__(self): return iter([Yes()])
    def __call__(self, *args): return Yes()
    __float__, __index__, __round__, __getitem__ = __abs__, __hash__, __call__, __call__
"""
FORGERIES = {
    "an object": EQUAL_TO_ALL + "f = Yes()",
    "its subclasses of data": "class Int(int):\n    def __lt__(self, other): return True\n"
    "    __eq__ = __gt__ = __le__ = __ge__ = __lt__\n    __hash__ = int.__hash__\ndef f(*args): return Int(-77)",
    "built-ins of its own": "import builtins\nabs = builtins.abs = lambda x: 0\n"
    "isinstance = builtins.isinstance = any = all = isclose = builtins.all = lambda *args: True\n"
    "len = builtins.len = lambda x: 17\nclass math:\n    isclose = isclose\ndef f(*args): return -77",
}


@linux
@pytest.mark.parametrize("program", FORGERIES)
def test_other_asserts_cannot_be_forged(program: str, sandbox: Sandbox) -> None:
    assert program_score(FORGERIES[program], [FORGED], sandbox) == (program != "built-ins of its own")
    alone = [
        "assert abs(f(1) - 0.5) < 1e-6",
        "assert math.isclose(f(1), 0.5)",
        "assert isclose(f(1), 0.5)",
        "assert 3 < f(1)",
    ]
    assert program_score(FORGERIES[program], alone, sandbox) == 0.0


@linux
def test_a_program_cannot_write_the_verdict_or_reach_the_judge(sandbox: Sandbox) -> None:
    writes = """
import os
def f(x):
    for n in range(3, 16):
        for text in (b"True", b'{"result": 9, "changed": [9]}\\n', b'["attribute", 0, "__globals__"]\\n'):
            try:
                os.write(n, text)
            except OSError:
                pass
    os._exit(0)
"""
    ends = "import os, sys\ndef f(x): os._exit(0)\n"
    for code in (writes, ends, ends + "sys.exit(0)"):
        assert program_score(code, ["assert f(1) > 8 and False", "assert f(2) < 0"], sandbox) == 0.0


def test_the_program_in_a_completion() -> None:
    assert program_of("a\n```\nb = 1\n```\n```python\nc = 2\n```\n```text\nd\n```") == "c = 2\n"
    assert program_of("```\nb = 1\n``` so ```\nb = 2\n") == "b = 2\n"
    assert program_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
    "tests",
    [
        "{",
        "[]",
        {},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        7,
        ["assert ("],
        "null",
        {"inputs": [[1]], "outputs": ["1"], "fn_name": "os.system"},
        "text",
    ],
)
def test_tests_that_cannot_be_read_are_an_error_and_no_score(tests: Any) -> None:
    with refused(DataError):
        read_tests(tests)


# --------------------------------------------------------------------------- as a reward of a run


def by_source(**said: Any) -> Any:
    return BySource(BySource.Config(**said))


def test_a_run_scores_by_the_tasks_data_source() -> None:
    reward = by_source()
    assert reward("", "#### 5", "openai/gsm8k", reward_model={"ground_truth": "5"}) == 1.0
    assert reward("", "Answer: 4", "math_dapo", answer="5") == -1.0
    with refused(DataError, "'openai/gsm8k'", "`reward_model.ground_truth`", "`answer`"):
        reward("", "", "openai/gsm8k")


async def test_the_judge_calls_it() -> None:
    judge = make_judge([plugin("rewards", RewardConfig)({"kind": "by_source", "weight": 0.5})])
    empty = np.zeros(0)
    trajectory = Trajectory(0, (Turn(empty, empty, empty, empty, StopReason.EOS, "#### 5"),))
    columns = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "5"}}
    assert await judge.score(Task("t", (Message("user", "?"),), columns), trajectory) == {"by_source": 0.5}
    unknown = await judge.score(Task("t", (), {**columns, "data_source": "mine"}), trajectory)
    check_error(unknown, RewardError, "'mine'")
    judge.check_columns(columns)
    with refused(DataError, "data_source"):
        judge.check_columns(["answer"])


@linux
def test_its_limits_are_those_of_the_config(tmp_path: Path) -> None:
    reward = by_source(cpu_limit_s=1, memory_limit_mb=128)
    hungry = {"inputs": [""], "outputs": ["1"]}
    code = "```python\nx = bytearray({} << 20)\nprint(1)\n```"
    assert reward("", code.format(16), "taco", answer=hungry) == 1.0
    assert reward("", code.format(200), "taco", answer=hungry) == 0.0
    assert default_compute_score("taco", code.format(200), hungry) == 1.0
    assert default_compute_score("taco", code.format(200), hungry, memory_limit_mb=128) == 0.0
    with refused(ConfigError, "everything", "memory"):
        by_source(sandbox_without=("everything",))
    assert GraderLimits(1, 128).sandbox() is GraderLimits(1, 128).sandbox()


@pytest.mark.parametrize(
    ("source", "completion", "truth", "score"),
    [
        ("openai/gsm8k", "#### 18.", "18", 1.0),
        ("lighteval/MATH", "\\fbox{1/2}", "1/2", 1.0),
        ("math_dapo", "\\boxed{5}", "5", 1.0),
        ("numina_olympiads", "\\boxed{50\\%}", "1/2", 1.0),
        ("numina_olympiads", "\\boxed{1000}", "10", 0.0),
        ("numina_olympiads", "we get 2 apples", "2", 1.0),
        ("numina_olympiads", "**2**", "2", 1.0),
        ("hiyouga/geometry3k", "<think>a</think>\\boxed{\\sqrt{9}}", "3", 1.0),
    ],
)
def test_where_graders_differ_from_verls(source: str, completion: str, truth: str, score: float) -> None:
    """The table of docs/ray-ppo-trainer.md."""
    pytest.importorskip("math_verify")
    given = default_compute_score(source, completion, truth)
    assert (given["score"] if isinstance(given, dict) else given) == score


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        ("\\frac{\\sqrt{505}}{7}", "\\frac{\\sqrt{505}}{7}", 1.0),
        ("Therefore the answer is \\frac{\\sqrt{505}}{7}.", "\\frac{\\sqrt{505}}{7}", 1.0),
        ("We add: x = 3 + 4 = 7", "7", 1.0),
        ("The final answer is $\\frac{1}{2}$. I am sure.", "\\frac12", 1.0),
        ("so x = 7, and the answer is 8", "7", 0.0),
        ("The answer is \\boxed{3}, not = 4", "3", 1.0),
        ("The answer is \\boxed{3}, not = 4", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_an_answer_without_a_box_is_what_the_completion_states_last(completion: str, truth: str, score: float) -> None:
    pytest.importorskip("math_verify")
    assert default_compute_score("numina_aops_forum", completion, truth) == score
