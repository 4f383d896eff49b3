"""`trivium run` in shells of its own: started, watched, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent


class Shell:
    """One command, in a process group of its own."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trivium", *arguments], cwd=HERE.parents[1], stdout=file, stderr=file,
                start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def wait(self, seconds: float) -> int:
        """The exit code; AssertionError with what the shell said if it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{self.name} still runs after {seconds:.0f} s:\n{self.said}") from error

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    @property
    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def shells(directory: Path) -> Generator[Callable[..., Shell]]:
    """Opens shells by name and arguments; none is left at the end."""
    opened: list[Shell] = []

    def start(name: str, *arguments: str) -> Shell:
        opened.append(Shell(name, list(arguments), directory / f"{name}-{len(opened)}.out"))
        return opened[-1]

    try:
        yield start
    finally:
        for shell in opened:
            if shell.process.poll() is None:
                shell.kill()


def eventually(what: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    """Waits until it is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, why()
        time.sleep(0.05)
