"""How rewards are called: columns by name, weights, threads, and errors that are never a score of 0."""

import asyncio
import math
import sys
import threading
import time

import numpy as np
import pytest

from trivium.config import RewardConfig, plugin
from trivium.errors import ConfigError, DataError, RewardError, UnknownName
from trivium.registry import resolve
from trivium.rewards import Judge, make_judge
from trivium.rewards.functions import Exact
from trivium.types import Message, StopReason, Task, Trajectory, Turn

USER_FILE = """
import asyncio, functools, threading, time

threads = []
seen = []

def mine(prompt, completion, answer, bonus=0.5):
    threads.append(threading.current_thread())
    seen.append((prompt, completion, answer, bonus))
    return float(completion == answer) + bonus

def everything(prompt, completion, **columns):
    return len(columns)

async def later(completion, prompt, *, answer):
    await asyncio.sleep(0.05)
    return completion == answer

def sneaky(prompt, completion):
    return _sneaky()

async def _sneaky():
    return 3

class Twice:
    def __init__(self, config):
        self.config = config

    async def __call__(self, prompt, completion):
        return 2 * len(completion)

partial = functools.partial(mine, bonus=7)

def backwards(response, truth):
    return 0.0

number = 5

def returns(prompt, completion, what):
    return what

def raises(prompt, completion):
    raise KeyError("gone")

def slow(prompt, completion, calls):
    calls.append(1)
    time.sleep(0.05)
    return 1.0

async def gives_up(prompt, completion):
    raise asyncio.CancelledError
"""


@pytest.fixture
def rewards(tmp_path):
    """A function that builds a judge from names in a user's file."""
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_FILE)

    def build(*names: str, **fields) -> Judge:
        return make_judge([RewardConfig(kind=f"{path}:{name}", **fields) for name in names])

    return build


def task(**columns) -> Task:
    prompt = (Message("system", "be brief"), Message("user", "1+1="), Message("assistant", "hm"))
    return Task("t7", prompt, columns)


def said(*texts: str) -> list[Trajectory]:
    def turn(text: str) -> Turn:
        return Turn(np.ones(1), np.ones(1), np.zeros(1), np.zeros(1), StopReason.EOS, text)

    return [Trajectory(i, (turn("first"), turn(text))) for i, text in enumerate(texts)]


def score(judge: Judge, on: Task, *texts: str):
    return asyncio.run(judge.score(on, said(*texts)))


def test_a_reward_gets_the_last_user_message_the_last_turn_and_the_columns_it_names(rewards, tmp_path):
    judge = rewards("mine", weight=2.0)
    assert score(judge, task(answer="2", other=1), "2", "3") == [{"mine": 3.0}, {"mine": 1.0}]
    module = sys.modules[resolve("rewards", f"{tmp_path}/my_rewards.py:mine").__module__]
    assert module.seen == [("1+1=", "2", "2", 0.5), ("1+1=", "3", "2", 0.5)]
    assert len(set(module.threads)) == 1
    assert module.threads[0] is not threading.main_thread()


def test_keyword_catch_all_gets_every_column_but_the_two_that_are_given(rewards):
    assert score(rewards("everything"), task(a=1, b=2, prompt="x", completion="y"), "2") == [{"everything": 2.0}]


def test_async_rewards_run_concurrently_and_mix_with_plain_ones(rewards):
    judge = rewards("mine", "later", "sneaky", "Twice", "partial")
    assert judge.labels == ("mine", "later", "sneaky", "Twice", "partial")
    start = time.perf_counter()
    scores = score(judge, task(answer="2"), *["2"] * 40)
    assert time.perf_counter() - start < 40 * 0.05 / 2
    assert scores == [{"mine": 1.5, "later": 1.0, "sneaky": 3.0, "Twice": 2.0, "partial": 8.0}] * 40


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"), (math.inf, "inf"), (None, "None of type NoneType"), ("1", "'1' of type str"),
        ([1.0], "[1.0] of type list"), ({"score": 1}, "dict"), (np.zeros(2), "ndarray"),
        pytest.param(10**400, "too large", id="huge"),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_is_an_error_with_name_task_and_value(rewards, value, shown):
    (error,) = score(rewards("returns"), task(what=value), "2")
    assert isinstance(error, RewardError)
    assert "'returns'" in error.asked
    assert "'t7'" in error.asked
    assert shown in error.found
    assert error.do


@pytest.mark.parametrize(("value", "number"), [(True, 1.0), (np.bool_(False), 0.0), (3, 3.0), (np.float32(0.5), 0.5)])
def test_booleans_and_numbers_of_any_kind_are_scores(rewards, value, number):
    (scores,) = score(rewards("returns"), task(what=value), "2")
    assert scores == {"returns": number}
    assert type(scores["returns"]) is float


def test_a_weight_that_overflows_is_an_error(rewards):
    (error,) = score(rewards("returns", weight=10.0), task(what=1e308), "2")
    assert isinstance(error, RewardError)


def test_one_reward_that_raises_costs_that_trajectory_its_score_and_keeps_the_cause(rewards):
    (error,) = score(rewards("mine", "raises"), task(answer="2"), "2")
    assert isinstance(error, RewardError)
    assert "KeyError" in error.found
    assert isinstance(error.__cause__, KeyError)


def test_a_missing_column_is_found_before_the_run_and_never_scored(rewards):
    judge = rewards("mine", "everything")
    judge.check_columns({"answer", "x"})
    with pytest.raises(DataError, match="'mine' lacks answer; there are: solution, x"):
        judge.check_columns({"x": 1, "solution": 2})
    (error,) = score(judge, task(solution="2"), "2")
    assert isinstance(error, RewardError)
    assert "lacks answer" in error.found


def test_rewards_that_cannot_be_called_are_config_errors(rewards):
    with pytest.raises(ConfigError, match=r"it takes \(response, truth\)"):
        rewards("backwards")
    with pytest.raises(ConfigError, match="a int"):
        rewards("number")
    with pytest.raises(ConfigError, match="mine twice"):
        rewards("mine", "mine")
    with pytest.raises(UnknownName, match="no 'mien'"):
        rewards("mien")


def test_no_rewards_give_no_components():
    assert score(make_judge([]), task(), "a", "b") == [{}, {}]


def test_cancelling_stops_the_worker_after_the_reward_it_is_in(rewards):
    calls: list[int] = []

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rewards("slow").score(task(calls=calls), said(*["x"] * 100)), 0.12)
        await asyncio.sleep(0.12)

    asyncio.run(main())
    assert 1 <= len(calls) <= 5


def test_cancelled_error_is_not_turned_into_a_score(rewards):
    with pytest.raises(asyncio.CancelledError):
        score(rewards("gives_up"), task(), "x")


def test_a_config_names_a_shipped_reward_and_a_users_own(tmp_path):
    (tmp_path / "my_rewards.py").write_text(USER_FILE)
    validate = plugin("rewards", RewardConfig)
    exact = validate({"kind": "exact", "casefold": True, "weight": 0.5})
    own = validate({"kind": f"{tmp_path}/my_rewards.py:mine", "name": "me"})
    assert isinstance(exact, Exact.Config)
    assert score(make_judge([exact, own]), task(answer="B"), "b") == [{"exact": 0.5, "me": 0.5}]
