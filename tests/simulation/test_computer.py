"""Threads of the real process beside a simulation."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("greenlet")

from tests.simulation.computer import Computer, Process
from tests.simulation.disk import Disk
from tests.simulation.filesystem import Conditions
from tests.simulation.system import installed


def test_a_thread_of_the_real_process_waits_sleeps_and_ends_during_a_simulation(tmp_path: Path) -> None:
    """Progress bars and profilers have such threads."""
    computer, process = Computer(0), Process("simulated")
    rounds, enough, errors = list[threading.Thread](), threading.Event(), list[Exception]()

    def outside() -> None:
        try:
            while len(rounds) < 20:
                enough.wait(0.001)
                time.sleep(0.001)
                rounds.append(threading.current_thread())
        except Exception as error:
            errors.append(error)

    def inside() -> None:
        ends = threading.Event()
        while thread.is_alive():
            ends.wait(1.0)
            time.sleep(1.0)

    thread = threading.Thread(target=outside)
    with installed(computer, Disk(tmp_path), Conditions()):
        thread.start()
        computer.spawn(process, inside, "main")
        computer.run(lambda: not process.alive, float("inf"))
    thread.join(120)
    assert process.error is None
    assert not errors
    assert {*rounds} == {thread}
    assert computer.now >= 2.0
