"""What the tests of Ray share: an instance of their own, and `trivium` commands that are watched while they run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.ray_instance import instance
from tests.processes import Forked, fork_server, trivium
from tests.waiting import eventually
from trivium.cluster.session import PRIVATE

os.environ |= PRIVATE  # for Ray in this process, where nothing has imported it yet, and in those that it starts


@contextmanager
def ray_instance(directory: Path) -> Iterator[str]:
    """The address of a Ray instance that lives as long as the block; what it prints goes into `directory`."""
    ours, theirs = fork_server().Pipe()
    with ours:
        with theirs:
            process = Forked("ray", directory / "ray.out", instance, theirs)
        eventually(ours.poll, 120, lambda: process.text, process)
        yield ours.recv()
    process.wait(120)


def run_command(run_dir: Path, *arguments: str, meanwhile: Callable[[Run], Any] = lambda run: None) -> Run:
    """A command from beginning to end; `meanwhile` watches it, and kills what it likes."""
    run = Run(run_dir, *arguments)
    try:
        meanwhile(run)
        run.end()
    finally:
        run.kill()
    return run


class Run:
    """A `trivium run` command, while it runs and afterwards."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.dir, output = run_dir, run_dir / f"output-{len(list(run_dir.glob('output-*.txt')))}.txt"
        self._log_before = len(self._whole_log())
        self._command = Forked("trivium", output, trivium, "run", *arguments, f"run.dir={run_dir}")
        self.pid = self._command.pid

    def end(self) -> None:
        """Waits for its end, and sets `code` and `ended`."""
        self.code = self._command.wait(400)
        self.ended = time.monotonic()

    def kill(self) -> None:
        self._command.kill()

    def _whole_log(self) -> str:
        path = self.dir / "log.txt"
        return path.read_text() if path.is_file() else ""

    @property
    def log(self) -> str:
        """What this command and its roles have logged."""
        return self._whole_log()[self._log_before :]

    @property
    def said(self) -> str:
        """What the user's terminal shows."""
        return self._command.text

    @property
    def steps(self) -> int:
        """The last step that was logged."""
        path = self.dir / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.is_file() else []
        return max((json.loads(row)["step"] for row in rows[:-1]), default=0)

    def pids(self) -> dict[str, int]:
        """Every role's process, as the log names it."""
        lines = [line.split() for line in self.log.splitlines() if " process " in line]
        return {words[3].rstrip(":"): int(words[5]) for words in lines if len(words) == 8 and words[4] == "process"}

    def until(self, happened: Callable[[], bool], patience_s: float = 240.0) -> None:
        end = time.monotonic() + patience_s
        while not happened():
            assert time.monotonic() < end, f"it did not happen:\n{self.log}\n{self.said}"
            assert self._command.poll() is None or happened(), f"the command ended before it happened:\n{self.said}"
            time.sleep(0.01)
