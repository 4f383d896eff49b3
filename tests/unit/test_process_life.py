"""A process is known by its number, its start and its machine."""

from __future__ import annotations

import subprocess
import sys

from trivium.foundation.concurrency import ProcessLife


def test_a_process_of_the_same_number_is_another_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    life = ProcessLife.of(child.pid)
    assert life()
    assert not ProcessLife(life.host, life.pid, "1")()
    assert ProcessLife("another machine", 2**22 + 1, "1")()  # nobody can tell from here
    child.kill()
    child.wait()
    assert not life()
