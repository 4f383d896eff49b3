"""The event loop of a run: what user code raises, ignores or blocks neither ends it as if finished nor keeps it."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from failing import refused

from tests.processes import Forked
from tests.waiting import eventually
from trivium.foundation.errors import TriviumError
from trivium.runtime import main_loop
from trivium.runtime.main_loop import exit_without_threads, run_in_loop


async def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_the_loop_goes_on_where_a_task_would_end_it(error: BaseException) -> None:
    async def main() -> str:
        asyncio.get_running_loop().stop()
        with pytest.raises(type(error)):
            await asyncio.gather(raises(error), asyncio.sleep(0))
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)  # some turns of the loop
        return "finished"

    assert run_in_loop(main(), 60) == "finished"


def settings() -> tuple[int, float]:
    """Of the whole process: the garbage collector's first threshold, and the seconds a thread keeps the interpreter."""
    return gc.get_threshold()[0], sys.getswitchinterval()


async def settings_in_loop() -> tuple[int, float]:
    return settings()


# These run in processes of their own: loops that other tests left running would hold the settings.
def settings_of_a_loop(started: Path) -> None:
    for before in (700, 0, 10**6):
        gc.set_threshold(before, 10, 10)
        sys.setswitchinterval(0.005)
        assert run_in_loop(settings_in_loop(), 60) == (max(before, 50_000) if before else 0, 0.0005)
        with pytest.raises(ZeroDivisionError):
            run_in_loop(raises(ZeroDivisionError()), 60)
        assert settings() == (before, 0.005)


def settings_of_loops_that_overlap(started: Path) -> None:
    """The first to begin ends first: what the second found is not what there was before both."""
    before = settings()
    began, ended = threading.Event(), threading.Event()

    async def main() -> tuple[int, float]:
        began.set()
        await asyncio.to_thread(ended.wait, 60)
        return settings()

    async def first() -> None:
        other.start()
        await asyncio.to_thread(began.wait, 60)

    results: list[tuple[int, float]] = []
    other = threading.Thread(target=lambda: results.append(run_in_loop(main(), 60)))
    run_in_loop(first(), 60)
    ended.set()
    other.join(120)
    assert results == [(50_000, 0.0005)]
    assert settings() == before


@pytest.mark.parametrize("work", [settings_of_a_loop, settings_of_loops_that_overlap])
def test_the_process_collects_seldom_and_switches_often_only_while_a_loop_runs(
    work: Callable[[Path], None], tmp_path: Path
) -> None:
    start(tmp_path, work).ended()


class Odd(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Odd("x")])
def test_a_run_that_such_an_error_ends_has_not_finished(error: BaseException) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(raises(error))

    with refused(TriviumError, type(error).__name__, "has finished"):
        run_in_loop(main(), 60)


def test_a_run_whose_tasks_were_all_cancelled_has_not_finished() -> None:
    async def main() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(60)

    with refused(TriviumError, "were cancelled"):
        run_in_loop(main(), 60)


async def ignores_its_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


def test_a_task_that_ignores_its_cancellation_is_left_behind_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(ignores_its_cancellation())
        await asyncio.sleep(0)
        return task

    monkeypatch.setattr(main_loop, "_CANCEL_S", 0.05)
    assert not run_in_loop(main(), 60).done()
    (line,) = [line for line in caplog.messages if "are abandoned" in line]
    assert re.search(rf"in ignores_its_cancellation \({re.escape(__file__)}:\d+\)", line)


# --------------------------------------------------------------------------- in processes of their own


def sleeps() -> None:
    time.sleep(3600)


def holds_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def blocked(marker: Path, block: Callable[[], None], deadline_s: float) -> None:
    async def main() -> None:
        marker.touch()
        block()

    # What only sleeps is named by the watchdog's thread: on a busy machine faulthandler must not be first.
    main_loop.GRACE_S = 2.0 if block is sleeps else 0.3
    run_in_loop(main(), deadline_s)


def start(tmp_path: Path, work: Callable[..., None], *arguments: object) -> Forked:
    return Forked(work.__name__, tmp_path / "output", work, tmp_path / "started", *arguments)


@pytest.mark.parametrize(
    ("block", "words"),
    [(sleeps, ("asked:", "sleeps (", "do:")), (holds_the_interpreter, ("in holds_the_interpreter",))],
)
def test_a_function_that_blocks_the_loop_ends_the_process_and_is_named(
    tmp_path: Path, block: Callable[[], None], words: list[str]
) -> None:
    process = start(tmp_path, blocked, block, 0.2)
    try:
        assert process.wait(120) == 1
        for word in words:
            assert word in process.text
    finally:
        process.kill()


@pytest.mark.parametrize("block", [sleeps, holds_the_interpreter])
def test_the_second_ctrl_c_ends_the_process_whatever_it_does(tmp_path: Path, block: Callable[[], None]) -> None:
    process = start(tmp_path, blocked, block, 3600)
    try:
        eventually((tmp_path / "started").exists, 60, lambda: process.text, process)
        os.kill(process.pid, signal.SIGINT)
        if block is sleeps:
            eventually(lambda: "Ctrl-C again" in process.text, 60, lambda: process.text)

        def ends() -> bool:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(process.pid, signal.SIGINT)
            return process.poll() is not None

        eventually(ends, 60, lambda: process.text)  # two at the same moment are one
        assert process.poll() == -signal.SIGINT
    finally:
        process.kill()


def interrupted(marker: Path) -> None:
    async def main() -> None:
        marker.touch()
        await asyncio.sleep(3600)

    try:
        run_in_loop(main(), 60)
    except KeyboardInterrupt:
        sys.exit(130)


def test_ctrl_c_ends_a_run_in_order(tmp_path: Path) -> None:
    process = start(tmp_path, interrupted)
    try:
        eventually((tmp_path / "started").exists, 60, lambda: process.text, process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) == 130
    finally:
        process.kill()


def leaves_a_thread(_: Path) -> None:
    threading.Thread(target=sleeps).start()
    exit_without_threads(3, 0.1)


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    process = start(tmp_path, leaves_a_thread)
    try:
        assert process.wait(120) == 3
        assert "sleeps (" in process.text
    finally:
        process.kill()
