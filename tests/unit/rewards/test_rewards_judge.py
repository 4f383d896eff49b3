"""How rewards are called: columns by name, weights, threads, and errors that are never a score of 0."""

import asyncio
import math
import os
import sys
import threading
import time

import numpy as np
import pytest
from failing import check_error, refused

from tests.waiting import until
from trivium.config import RewardConfig, plugin
from trivium.foundation import concurrency
from trivium.foundation.errors import ConfigError, DataError, RewardError, UnknownName
from trivium.foundation.registry import resolve
from trivium.rewards import Judge, make_judge
from trivium.rewards.functions import Exact
from trivium.types import Message, StopReason, Task, Trajectory, Turn

USER_FILE = """
import asyncio, ctypes, functools, os, sys, threading, time
import numpy as np
from trivium.config import RewardConfig
from tests.waiting import until

threads = []
seen = []

def mine(prompt, completion, answer, bonus=0.5):
    threads.append(threading.current_thread())
    seen.append((prompt, completion, answer, bonus))
    return float(completion == answer) + bonus

def everything(prompt, completion, **columns):
    return len(columns)

def reads_all(prompt, completion, prompt_messages, **columns):
    given = [(message["role"], message["content"]) for message in prompt_messages]
    return given == [("system", "be brief"), ("user", "1+1="), ("assistant", "hm")] and len(columns)

running = most = 0
all_run = asyncio.Event()

async def later(completion, prompt, *, answer):
    global running, most
    running += 1
    most = max(most, running)
    if running == 40:
        all_run.set()
    await asyncio.wait_for(all_run.wait(), 60)
    running -= 1
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

def quick(prompt, completion):
    threads.append(threading.current_thread())
    return len(completion) if completion else sys.exit(3)

quick.brief = True

def backwards(response, truth):
    return 0.0

number = 5

def returns(prompt, completion, what):
    return what

def raises(prompt, completion):
    raise KeyError("gone")

def slow(prompt, completion, calls, release):
    calls.append("slow")
    release.wait(120)
    return 1.0

def next_one(prompt, completion, calls):
    calls.append("next")
    return 1.0

def shortest(completion, answer):
    return float(completion == answer)

def ignores(prompt, answer):
    return 1.0

def of_group(completions, answer):
    return [1.0 for each in completions]

def place(prompt, completions, seen, default=1):
    seen.append(list(completions))
    return [sorted(completions).index(each) * default for each in completions]

async def place_later(prompt, completions, **columns):
    await asyncio.sleep(0)
    return np.arange(len(completions)) / 2

def both(prompt, completion, completions):
    return 0.0

def blocks(prompt, completion, seconds):
    # One call into C that does not let go of the interpreter.
    if seconds:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return np.float32(len(completion))

def who(prompt, completion):
    print("a reward may print")
    return os.getpid()

def leaves(prompt, completion):
    os._exit(3)

async def slept(prompt, completion):
    await asyncio.sleep(0)
    return 7

class Counts:
    class Config(RewardConfig):
        base: int = 0

    def __init__(self, config):
        self.pid, self.base = os.getpid(), config.base

    def __call__(self, prompt, completion, parent):
        return self.base + (self.pid != parent)

async def gives_up(prompt, completion):
    raise asyncio.CancelledError

def gives_up_too(prompt, completion):
    raise asyncio.CancelledError

async def stubborn(prompt, completion, release):
    while not release.is_set():
        try:
            await release.wait()
        except asyncio.CancelledError:
            continue
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


def trajectories_of(*texts: str) -> list[Trajectory]:
    def turn(text: str) -> Turn:
        token, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
        return Turn(token, token, np.zeros(1, np.float32), zero, StopReason.EOS, text)

    return [Trajectory(i, (turn("first"), turn(text))) for i, text in enumerate(texts)]


def score(judge: Judge, on: Task, *texts: str):
    """What each text earns by itself, all of them judged at the same time."""

    async def all_of_them():
        return await asyncio.gather(*(judge.score(on, trajectory) for trajectory in trajectories_of(*texts)))

    return asyncio.run(all_of_them())


def compare(judge: Judge, on: Task, *texts: str):
    return asyncio.run(judge.compare(on, trajectories_of(*texts)))


def test_a_reward_gets_the_last_user_message_the_last_turn_and_the_columns_it_names(rewards, tmp_path):
    judge = rewards("mine", weight=2.0)
    assert score(judge, task(answer="2", other=1), "2", "3") == [{"mine": 3.0}, {"mine": 1.0}]
    module = sys.modules[resolve("rewards", f"{tmp_path}/my_rewards.py:mine").__module__]
    assert sorted(module.seen) == [("1+1=", "2", "2", 0.5), ("1+1=", "3", "2", 0.5)]
    assert threading.main_thread() not in module.threads


def test_a_reward_that_names_prompt_messages_gets_the_whole_prompt(rewards):
    judge = rewards("reads_all")
    judge.check_columns([])
    assert score(judge, task(a=1, prompt_messages="a column"), "2") == [{"reads_all": 1.0}]


def test_keyword_catch_all_gets_every_column_but_the_two_that_are_given(rewards):
    assert score(rewards("everything"), task(a=1, b=2, prompt="x", completion="y"), "2") == [{"everything": 2.0}]


def test_async_rewards_run_concurrently_and_mix_with_plain_ones(rewards, tmp_path):
    judge = rewards("mine", "later", "sneaky", "Twice", "partial")
    assert judge.labels == ("mine", "later", "sneaky", "Twice", "partial")
    scores = score(judge, task(answer="2"), *["2"] * 40)
    assert sys.modules[resolve("rewards", f"{tmp_path}/my_rewards.py:later").__module__].most == 40
    assert scores == [{"mine": 1.5, "later": 1.0, "sneaky": 3.0, "Twice": 2.0, "partial": 8.0}] * 40


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, "None of type NoneType"),
        ("1", "'1' of type str"),
        ([1.0], "[1.0] of type list"),
        ({"score": 1}, "dict"),
        (np.zeros(2), "ndarray"),
        pytest.param(10**400, "too large", id="huge"),
    ],
)
def test_what_is_no_finite_number_is_an_error_with_name_task_and_value(rewards, value, shown):
    (error,) = score(rewards("returns"), task(what=value), "2")
    check_error(error, RewardError, "'returns'", "'t7'", shown)


@pytest.mark.parametrize(("value", "number"), [(True, 1.0), (np.bool_(False), 0.0), (3, 3.0), (np.float32(0.5), 0.5)])
def test_booleans_and_numbers_of_any_kind_are_scores(rewards, value, number):
    (scores,) = score(rewards("returns"), task(what=value), "2")
    assert scores == {"returns": number}
    assert isinstance(scores, dict)
    assert type(scores["returns"]) is float


def test_a_brief_reward_runs_on_the_event_loop_and_what_ends_it_is_an_error(rewards, tmp_path):
    assert score(rewards("quick"), task(), "abc") == [{"quick": 3.0}]
    assert resolve("rewards", f"{tmp_path / 'my_rewards.py'}:threads") == [threading.current_thread()]
    (error,) = score(rewards("quick"), task(), "")
    check_error(error, RewardError, "SystemExit")


def test_a_weight_that_overflows_is_an_error(rewards):
    (error,) = score(rewards("returns", weight=10.0), task(what=1e308), "2")
    assert isinstance(error, RewardError)


def test_one_reward_that_raises_costs_that_trajectory_its_score_and_keeps_the_cause(rewards):
    (error,) = score(rewards("mine", "raises"), task(answer="2"), "2")
    check_error(error, RewardError, "KeyError")
    assert isinstance(error.__cause__, KeyError)


def test_a_missing_column_is_found_before_the_run_and_never_scored(rewards):
    judge = rewards("mine", "everything")
    judge.check_columns({"answer", "x"})
    with refused(DataError, "'mine'", "answer", "solution, x"):
        judge.check_columns({"x": 1, "solution": 2})
    (error,) = score(judge, task(solution="2"), "2")
    check_error(error, RewardError, "lacks answer")


def test_rewards_that_cannot_be_called_are_config_errors(rewards):
    with refused(ConfigError, "(response, truth)"):
        rewards("backwards")
    with refused(ConfigError, "a int"):
        rewards("number")
    with refused(ConfigError, "mine twice"):
        rewards("mine", "mine")
    with refused(UnknownName, "'mien'"):
        rewards("mien")


def test_a_reward_takes_any_of_prompt_completion_and_columns_by_name(rewards):
    assert score(rewards("shortest"), task(answer="2"), "2", "3") == [{"shortest": 1.0}, {"shortest": 0.0}]
    assert score(rewards("shortest", workers=1), task(answer="2"), "2") == [{"shortest": 1.0}]


@pytest.mark.parametrize(
    ("name", "lacks"), [("ignores", "neither completion"), ("both", "both"), ("of_group", "no prompt")]
)
def test_a_reward_without_a_parameter_that_it_needs_is_told_which(name, lacks, rewards):
    with refused(ConfigError, name, lacks):
        rewards(name)


def test_no_rewards_give_no_components():
    assert score(make_judge([]), task(), "a", "b") == [{}, {}]


def test_cancelling_stops_the_worker_after_the_reward_it_is_in(rewards):
    calls: list[str] = []
    release, before = threading.Event(), concurrency.left_behind()

    async def main() -> None:
        of = task(calls=calls, release=release)
        scoring = asyncio.ensure_future(rewards("slow", "next_one").score(of, *trajectories_of("x")))
        await until(lambda: calls)
        scoring.cancel()
        await asyncio.wait({scoring}, timeout=60)
        assert scoring.cancelled()
        assert concurrency.left_behind() == before + 1
        release.set()
        await until(lambda: concurrency.left_behind() == before)

    asyncio.run(main())
    assert calls == ["slow"]


def test_a_reward_that_compares_sees_the_members_in_order_and_gives_one_number_each(rewards):
    judge, seen = rewards("place", "place_later", weight=2.0), []
    assert judge.labels == ("place", "place_later")
    assert score(judge, task(seen=seen), "b", "a") == [{}, {}]
    found = compare(judge, task(seen=seen), "b", "c", "a")
    assert found == [
        {"place": 2.0, "place_later": 0.0},
        {"place": 4.0, "place_later": 1.0},
        {"place": 0.0, "place_later": 2.0},
    ]
    assert seen == [["b", "c", "a"]]
    assert compare(rewards("mine"), task(answer="x"), "b", "c") == [{}, {}]


@pytest.mark.parametrize(
    ("value", "shown"),
    [([1.0], "1 of them for 2"), (1.0, "1.0 of type float for 2"), ("ab", "2 of them for 2"), ({}, "dict for 2")],
)
def test_a_reward_that_compares_and_does_not_give_one_number_each_fails_all(tmp_path, value, shown):
    (tmp_path / "one.py").write_text("def one(prompt, completions, what):\n    return what\n")
    judge = make_judge([RewardConfig(kind=f"{tmp_path}/one.py:one")])
    errors = compare(judge, task(what=value), "a", "b")
    assert all(isinstance(error, RewardError) and shown in error.found for error in errors)
    good, bad = compare(judge, task(what=[1.0, math.nan]), "a", "b")
    assert good == {"one": 1.0}
    assert isinstance(bad, RewardError)


def test_a_reward_judges_one_or_all_not_both(rewards):
    with refused(ConfigError, "(prompt, completion, completions)"):
        rewards("both")


async def test_a_reward_that_holds_the_interpreter_is_killed_with_its_process(rewards):
    judge = rewards("blocks", workers=1)
    (two,) = trajectories_of("ab")
    before = concurrency.left_behind()  # by other tests of this process
    assert await judge.score(task(seconds=0), two) == {"blocks": 2.0}
    began = time.perf_counter()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await judge.score(task(seconds=120), two)
    assert time.perf_counter() - began < 50
    assert await judge.score(task(seconds=0), two) == {"blocks": 2.0}
    await until(lambda: concurrency.left_behind() <= before)


async def test_the_kernel_ends_what_nobody_is_left_to_kill(rewards, tmp_path):
    judge = make_judge([RewardConfig(kind=f"{tmp_path}/my_rewards.py:blocks", workers=1)], deadline_s=0.2)
    error = await judge.score(task(seconds=60), *trajectories_of("ab"))
    check_error(error, RewardError, "0.2 s")


async def test_workers_serve_calls_side_by_side_and_are_kept(rewards):
    judge = rewards("who", workers=2)
    first = await asyncio.gather(*(judge.score(task(), each) for each in trajectories_of("a", "b", "c", "d")))
    pids = {scores["who"] for scores in first}
    assert len(pids) <= 2
    assert os.getpid() not in pids
    assert (await judge.score(task(), *trajectories_of("e")))["who"] in pids


async def test_workers_build_classes_await_coroutines_and_say_what_went_wrong(rewards, tmp_path):
    once = trajectories_of("abc")
    assert await rewards("slept", workers=1).score(task(), *once) == {"slept": 7.0}
    config = plugin("rewards", RewardConfig)(
        {"kind": f"{tmp_path}/my_rewards.py:Counts", "base": 5, "workers": 1, "weight": 2.0}
    )
    judge = make_judge([config])
    with refused(DataError, "parent"):
        judge.check_columns({})
    assert await judge.score(task(parent=os.getpid()), *once) == {"Counts": 12.0}
    error = await rewards("raises", workers=1).score(task(), *once)
    check_error(error, RewardError, "KeyError", "'gone'")
    error = await rewards("leaves", workers=1).score(task(), *once)
    check_error(error, RewardError, "code 3")
    error = await rewards("everything", workers=1).score(task(what=object()), *once)
    check_error(error, RewardError, "JSON serializable")
    assert isinstance(await rewards("place", workers=1).compare(task(seen=[]), trajectories_of("b", "a")), list)


@pytest.mark.parametrize("name", ["gives_up", "gives_up_too"])
def test_a_cancellation_of_its_own_is_an_error_of_the_reward(rewards, name):
    (error,) = score(rewards(name), task(), "x")
    check_error(error, RewardError)
    assert "ancel" in error.found


async def test_a_coroutine_that_does_not_heed_its_cancellation_holds_up_nobody(rewards, monkeypatch):
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.02)
    release = asyncio.Event()
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await rewards("stubborn").score(task(release=release), *trajectories_of("x"))
    release.set()
    await until(lambda: not concurrency._abandoned)


def test_a_config_names_a_shipped_reward_and_a_users_own(tmp_path):
    (tmp_path / "my_rewards.py").write_text(USER_FILE)
    validate = plugin("rewards", RewardConfig)
    exact = validate({"kind": "exact", "casefold": True, "weight": 0.5})
    own = validate({"kind": f"{tmp_path}/my_rewards.py:mine", "name": "me"})
    assert isinstance(exact, Exact.Config)
    assert score(make_judge([exact, own]), task(answer="B"), "b") == [{"exact": 0.5, "me": 0.5}]
