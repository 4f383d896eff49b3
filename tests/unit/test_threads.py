"""User code runs beside the loop and cannot keep the process alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from failing import refused

from tests.waiting import until
from trivium.foundation import concurrency
from trivium.foundation.concurrency import Threads, left_behind
from trivium.foundation.errors import RolloutError


async def test_results_and_errors_come_back() -> None:
    pool = Threads(2, "test")
    assert await pool.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run(lambda: next(iter(())))

    def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="CancelledError"):
        await pool.run(cancels)


async def test_a_blocking_function_does_not_block_the_loop() -> None:
    begun, go_on = threading.Event(), threading.Event()
    slow = asyncio.create_task(Threads(1, "test").run(lambda: (begun.set(), go_on.wait(120))[1]))
    await until(begun.is_set)
    assert not slow.done()
    go_on.set()
    assert await slow


async def test_no_more_threads_than_allowed_and_no_more_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, lock, running, most = Threads(3, "test"), threading.Lock(), 0, 0
    all_three = threading.Barrier(3)

    def work() -> threading.Thread:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_three.wait(60)
        time.sleep(0.01)  # in which a fourth one would begin
        with lock:
            running -= 1
        return threading.current_thread()

    monkeypatch.setattr(concurrency, "_PATIENCE_S", 60.0)  # a busy machine may let the only thread stand still
    quick = Threads(3, "test")
    assert len(set(await asyncio.gather(*(quick.run(threading.current_thread) for _ in range(99))))) == 1
    monkeypatch.setattr(concurrency, "_PATIENCE_S", 0.001)
    assert len(set(await asyncio.gather(*(pool.run(work) for _ in range(12))))) == 3
    assert most == 3


async def test_what_waits_behind_something_slow_gets_a_thread() -> None:
    pool, go_on = Threads(9, "test"), threading.Event()
    slow = [asyncio.create_task(pool.run(go_on.wait)) for _ in range(8)]
    async with asyncio.timeout(60):
        assert await pool.run(lambda: 7) == 7
    go_on.set()
    await asyncio.wait(slow)


async def test_a_loop_is_woken_once_for_all_results_that_it_has_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, done, woken = Threads(1, "test"), threading.Event(), list[object]()
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (woken.append(call), wake(*call)))  # pyright: ignore[reportUnknownLambdaType]
    calls = [asyncio.ensure_future(pool.run(lambda number=number: number)) for number in range(200)]
    last = asyncio.ensure_future(pool.run(done.set))
    await asyncio.sleep(0)  # all are queued, and the loop reads nothing until all have run
    assert done.wait(120)
    assert await asyncio.gather(*calls) == [*range(200)]
    await last
    assert len(woken) <= 2  # what comes after the loop has read wakes it again


@pytest.fixture
def none_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process gave up does not count."""
    monkeypatch.setattr(concurrency, "_num_abandoned", 0)


@pytest.mark.usefixtures("none_left_behind")
async def test_what_is_given_up_makes_room_and_is_counted_until_it_ends() -> None:
    pool, begun, go_on = Threads(1, "test"), threading.Event(), threading.Event()
    stuck = asyncio.create_task(pool.run(lambda: (begun.set(), go_on.wait())))
    queued = asyncio.create_task(pool.run(lambda: pytest.fail("given up before it began")))
    await asyncio.to_thread(begun.wait, 60)
    for task in (queued, stuck):
        task.cancel()
    await asyncio.wait((queued, stuck))
    assert left_behind() == 1
    assert await pool.run(lambda: 5) == 5
    go_on.set()
    await until(lambda: not left_behind())


@pytest.mark.usefixtures("none_left_behind")
async def test_there_are_only_so_many_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MAX_LEFT_BEHIND", 2)
    pool, all_begun, go_on = Threads(8, "a test"), threading.Barrier(3), threading.Event()
    stuck = [asyncio.create_task(pool.run(lambda: (all_begun.wait(60), go_on.wait()))) for _ in range(2)]
    await asyncio.to_thread(all_begun.wait, 60)
    for task in stuck:
        task.cancel()
    await asyncio.wait(stuck)
    with refused(RolloutError, "2 calls", "`workers`"):
        await pool.run(lambda: 1)
    go_on.set()
    await until(lambda: not left_behind())
    assert await pool.run(lambda: 1) == 1


async def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "_IDLE_S", 0.01)
    thread = await Threads(1, "test").run(threading.current_thread)
    await until(lambda: not thread.is_alive())


def test_an_endless_function_does_not_outlive_its_deadline() -> None:
    program = """
import asyncio, time
from trivium.foundation.concurrency import Threads
def endless():
    while True: time.sleep(0.05)
async def main():
    try:
        async with asyncio.timeout(0.1):
            await Threads(1, "test").run(endless)
    except TimeoutError:
        print("deadline")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("deadline", 0), done.stderr
