"""Rewards that need a main thread: those with a time limit by `signal.alarm`, by every way in."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from failing import check_error

from tests.waiting import eventually, until
from trivium.config import RewardConfig
from trivium.foundation.concurrency import ProcessLife, Threads, left_behind
from trivium.foundation.errors import RewardError
from trivium.planning.machine import peak_memory
from trivium.processes.isolated.answers import PICKLE, serve_in_fork
from trivium.processes.isolated.child import Child, fork
from trivium.processes.isolated.signals import MainThreadWanted, main_thread_wanted
from trivium.processes.user_calls import UserCall
from trivium.rewards import Judge, make_judge
from trivium.runtime.python_api import configured
from trivium.types import Message, StopReason, Task, Trajectory, Turn

OF_THE_USER = """
import os, signal, threading, time
from signal import SIGALRM, alarm, signal as handle
from tests.waiting import eventually, until

class Late(Exception):
    pass

def limited(seconds, function):
    def late(number, frame):
        raise Late
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

def forgiving(prompt, completion):
    try:
        return limited(0.2, lambda: time.sleep(60) if completion == "slow" else 1.0)
    except Late:
        return -1.0
    except Exception:
        return 0.0

def unlimited_if_refused(prompt, completion):
    try:
        handle(SIGALRM, lambda *arguments: None)
    except ValueError:
        time.sleep(60)
    alarm(0)
    return 1.0

async def waits(prompt, completion):
    return forgiving(prompt, completion)

def group(prompt, completions):
    return [forgiving(prompt, completion) for completion in completions]

class Counts:
    def __init__(self, config):
        self.calls = 0

    def __call__(self, prompt, completion):
        signal.alarm(0)
        self.calls += 1
        return self.calls

def asks(prompt, completion):
    return float(threading.current_thread() is threading.main_thread())

def does(prompt, completion):
    signal.alarm(0)
    if completion == "raise":
        raise KeyError("gone")
    if completion == "exit":
        raise SystemExit(3)
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "hang":
        open(__file__ + ".hangs", "x").close()
        time.sleep(600)
    if completion == "print":
        print("a reward may print")
    return float(os.getpid())

def verified(prompt, completion):
    from math_verify import parse, verify
    try:
        return float(verify(parse("$2$"), parse(completion)))
    except Exception:
        return 0.0
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "limited.py").write_text(OF_THE_USER)
    return tmp_path / "limited.py"


def rollout(index: int, text: str) -> Trajectory:
    tokens, numbers = np.ones(1, np.int32), np.zeros(1, np.float32)
    return Trajectory(index, (Turn(tokens, tokens, numbers, tokens, StopReason.EOS, text),))


async def scored(judge: Judge, *texts: str) -> list[Any]:
    """What each text earns, all of them judged at the same time: a number, or the error."""
    task, rollouts = Task("t", (Message("user", "1+1="),)), [rollout(i, text) for i, text in enumerate(texts)]
    alone = await asyncio.gather(*(judge.score(task, each) for each in rollouts))
    compared = await judge.compare(task, rollouts)
    results = [own or beside for own, beside in zip(alone, compared, strict=True)]
    return [next(iter(result.values())) if isinstance(result, dict) else result for result in results]


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result(120)


@pytest.mark.parametrize("name", ["forgiving", "waits", "group"])
def test_a_time_limit_works_whatever_kind_of_reward_sets_it(user_file: Path, name: str) -> None:
    def score() -> list[Any]:
        judge = make_judge([RewardConfig(kind=f"{user_file}:{name}")])
        return asyncio.run(scored(judge, "fast", "slow", "fast"))

    assert in_a_thread(score) == [1.0, -1.0, 1.0]
    if name != "waits":  # on an event loop in the main thread it has that one
        assert score() == [1.0, -1.0, 1.0]


def test_functions_that_python_callers_pass() -> None:
    """What no other process could import: a closure, an object with state, a partial."""
    limit = 0.1

    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    def closure(prompt: str, completion: str, bonus: float = 0.0) -> float:
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            time.sleep(60)
        except TimeoutError:
            return 1.0 + bonus
        finally:
            signal.signal(signal.SIGALRM, before)
        return 0.0

    config = {"model": {"kind": "tiny"}, "tasks": {"train": {"kind": "arithmetic"}}}
    for function, wanted in ((closure, 1.0), (functools.partial(closure, bonus=1.0), 2.0)):
        run_config, _ = configured(config, [function], None)
        assert asyncio.run(scored(make_judge(run_config.rewards), "x")) == [wanted]


def test_a_function_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limited_package").mkdir()
    (tmp_path / "limited_package" / "__init__.py").touch()
    (tmp_path / "limited_package" / "rewards.py").write_text(OF_THE_USER)
    monkeypatch.syspath_prepend(tmp_path)
    judge = make_judge([RewardConfig(kind="limited_package.rewards:forgiving")])
    assert asyncio.run(scored(judge, "fast", "slow")) == [1.0, -1.0]
    workers = make_judge([RewardConfig(kind=f"{tmp_path}/limited_package/rewards.py:forgiving", workers=1)])
    assert asyncio.run(scored(workers, "fast", "slow")) == [1.0, -1.0]


def test_math_verify_in_a_reward_of_the_users_own(user_file: Path) -> None:
    pytest.importorskip("math_verify")
    judge = make_judge([RewardConfig(kind=f"{user_file}:verified")])
    assert asyncio.run(scored(judge, "$2$", "$\\frac{4}{2}$", "$3$")) == [1.0, 1.0, 0.0]


def test_a_refused_limit_ends_the_attempt(user_file: Path) -> None:
    """A function that goes on without its limit would never end."""
    judge = make_judge([RewardConfig(kind=f"{user_file}:unlimited_if_refused")])
    assert asyncio.run(scored(judge, "x")) == [1.0]
    asks = make_judge([RewardConfig(kind=f"{user_file}:asks")])
    assert asyncio.run(scored(asks, "x", "y")) == [1.0, 1.0]


def test_state_of_a_reward_lives_on_in_its_process(user_file: Path) -> None:
    async def one_by_one() -> list[Any]:
        judge = make_judge([RewardConfig(kind=f"{user_file}:Counts")])
        return [(await scored(judge, "x"))[0] for _ in range(3)]

    assert asyncio.run(one_by_one()) == [1.0, 2.0, 3.0]


def test_what_goes_wrong_in_the_process_is_named(
    user_file: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "trivium")
    before = left_behind()

    async def main() -> None:
        judge = make_judge([RewardConfig(kind=f"{user_file}:does")])
        (raised,) = await scored(judge, "raise")
        assert raised.found == "KeyError: 'gone'"
        assert isinstance(raised.__cause__, KeyError)
        assert f'{user_file}", line' in raised.__cause__.__notes__[0]
        (left,) = await scored(judge, "exit")
        assert "SystemExit(3)" in left.found
        (crashed,) = await scored(judge, "crash")
        assert "its process was ended by SIGSEGV" in crashed.found
        assert "'completion': 'crash'" in crashed.found
        (pid,) = await scored(judge, "print")  # another process takes its place
        life = ProcessLife.of(int(pid))
        hanging = asyncio.create_task(scored(judge, "hang"))
        await until(Path(f"{user_file}.hangs").exists)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await until(lambda: not life(), why=lambda: "a process that hangs is killed")
        await until(lambda: left_behind() <= before, why=lambda: "and its thread ends")

    asyncio.run(main())
    assert "a reward may print" in capfd.readouterr().out
    (line,) = [record.message for record in caplog.records if "main thread" in record.message]
    assert line.startswith("reward 'does' calls signal.alarm: from now on it runs in the main thread")


def uses_signals(**arguments: Any) -> Any:
    signal.alarm(0)
    return arguments.get("result", lambda: 0)


def test_what_cannot_travel_between_the_processes() -> None:
    call = UserCall(uses_signals, Threads(1, "test"), label="the scorer x")
    refused = asyncio.run(call(lock=threading.Lock()))
    check_error(refused, RewardError, "its arguments", "TypeError")
    answer = asyncio.run(call())
    assert isinstance(answer, RewardError | AttributeError | pickle.PicklingError)
    assert asyncio.run(call(result=b"\x00")) == b"\x00"


def forked_child(function: Callable[..., Any]) -> Child:
    return fork(functools.partial(serve_in_fork, function, ProcessLife.of(os.getpid())))


def answer_of(child: Child) -> Any:
    child.send(PICKLE.write({}))
    return PICKLE.read(child.receive() or b"")


def test_processes_end_with_what_uses_them(tmp_path: Path) -> None:
    child = forked_child(os.getpid)
    life = ProcessLife.of(answer_of(child)["result"])
    assert life()
    del child
    assert not life()

    outer = forked_child(_with_a_fork)
    inner = ProcessLife.of(answer_of(outer)["result"])
    assert inner()
    outer.kill()
    eventually(lambda: not inner(), 120, lambda: "a fork outlives the process that made it")


def test_a_fork_holds_nothing_that_others_wait_for(tmp_path: Path) -> None:
    """An end of a pipe or a lock that it kept would outlive the parent's."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with ours, open(tmp_path / "lock", "w") as lock, open(tmp_path / "log", "w") as log, theirs:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = forked_child(lambda: print("a line", file=log, flush=True))
        theirs.close()
        os.close(writing)
        assert answer_of(child) == {"result": None}
        assert (tmp_path / "log").read_text() == "a line\n"  # what is only open stays so
        assert (ours.recv(1), os.read(reading, 1)) == (b"", b"")
    os.close(reading)
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.end()


@pytest.mark.parametrize("sent", [b"", bytes(7), b"\0" * 7 + b"\2a"])
def test_an_answer_that_ends_early_is_none(sent: bytes) -> None:
    def dies(channel: socket.socket) -> NoReturn:
        channel.sendall(sent)
        os._exit(3)

    child = fork(dies)
    assert child.receive() is None
    assert child.wait(120) == 3


def test_a_fork_adds_no_memory_to_that_of_this_process() -> None:
    """Its pages are this process's."""
    before, block = peak_memory(), bytearray(b"x" * 300 * 2**20)

    def ends(channel: socket.socket) -> NoReturn:
        os._exit(len(block) % 2)

    assert fork(ends).wait(120) == 0
    assert peak_memory() - before < 700 * 2**20


HELD: list[Any] = []


def _with_a_fork() -> int:
    """The number of a process that is busy when the one that made it is killed."""
    HELD.append(forked_child(lambda seconds: time.sleep(seconds)))
    HELD[0].send(PICKLE.write({"seconds": 600}))
    return HELD[0]._process._pid


def test_ordinary_functions_stay_where_they_are() -> None:
    seen: list[int] = []

    def notes(prompt: str, completion: str) -> float:
        seen.append(os.getpid())
        threading.main_thread  # noqa: B018
        assert signal.getsignal(signal.SIGINT) is not None
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(asyncio.sleep(0))
        with ThreadPoolExecutor(1) as threads:
            threads.submit(int).result()
        return 1.0

    run_config, _ = configured({"model": {"kind": "tiny"}, "tasks": {"train": {"kind": "arithmetic"}}}, [notes], None)
    assert asyncio.run(scored(make_judge(run_config.rewards), "x")) == [1.0]
    assert seen == [os.getpid()]


def test_outside_of_a_reward_signals_are_as_ever() -> None:
    timer = signal.getitimer(signal.ITIMER_REAL)[0]  # the one of pytest-timeout
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with main_thread_wanted() as calls:
        assert signal.signal(signal.SIGUSR2, before) is signal.SIG_IGN
    assert calls == []
    with pytest.raises(ValueError, match="main thread"):
        in_a_thread(lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN))
    assert in_a_thread(threading.main_thread) is threading.main_thread()

    def watched() -> list[str]:
        with main_thread_wanted() as calls:
            for call in (lambda: signal.alarm(1), lambda: signal.setitimer(signal.ITIMER_REAL, 1.0)):
                with pytest.raises(MainThreadWanted):
                    call()
        return calls

    assert in_a_thread(watched) == ["signal.alarm", "signal.setitimer"]
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 1.5) == (timer > 1.5)
