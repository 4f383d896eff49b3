"""Processes that tests start, forked from one that has everything imported: a start costs milliseconds, not seconds.

That process is `multiprocessing`'s fork server, one per test process. It has no thread and no event loop, unlike the
tests' own process, in which others have left threads; what it forks has a pid, a session and an exit status of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import chdir, contextmanager, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from tests.ahead import Ahead
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]


@cache
def fork_server() -> ForkServerContext:
    """The context of processes that are forked from the preloaded one. `OMP_NUM_THREADS` must be set by now: the
    preloaded process reads it once, for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with chdir(ROOT):  # where its modules are found
        forkserver.ensure_running()
    return context


class Forked:
    """`work(*arguments)` in a process of its own, the leader of a new session, which writes to `output`."""

    def __init__(self, name: str, output: Path, work: Callable[..., Any], *arguments: Any) -> None:
        self.name, self.output = name, output
        output.touch()
        about = (str(output), os.getcwd(), dict(os.environ), work, arguments)
        self._process = fork_server().Process(target=_work, args=about, name=name)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def text(self) -> str:
        """What it has written."""
        return self.output.read_text()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """The exit code; AssertionError with what the process wrote if it takes longer."""
        self._process.join(seconds)
        code = self.poll()
        assert code is not None, f"{self.name} still runs after {seconds:.0f} s:\n{self.text}"
        return code

    def ended(self, code: int = 0, seconds: float = 240) -> Self:
        """The process, once it has ended with this exit code."""
        assert self.wait(seconds) == code, self.text
        return self

    def kill(self) -> None:
        """SIGKILL to the process and to those that it started; waits for its end."""
        with suppress(ProcessLookupError):  # it has no session yet, or has ended
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self.wait(120)


def trivium(*arguments: str) -> None:
    """The command `trivium`, as its console script calls it. With `train.own_process=true` among its arguments, its
    first train processes are forked as well."""
    from trivium.cli import main

    if any("own_process=true" in argument for argument in arguments):
        fork_train_processes(2)
    sys.argv = ["trivium", *arguments]
    main()


def fork_train_processes(number: int) -> None:
    """Forks the next train processes of this process, which has no thread yet."""
    from trivium.training.distributed import train_process

    start = Ahead(number).start
    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    train_process.subprocess = SimpleNamespace(Popen=start, **names)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def commands(directory: Path) -> Generator[Callable[..., Forked]]:
    """Starts `trivium` commands by name and arguments, each with an output file in `directory`; none is left at the
    end."""
    started: list[Forked] = []

    def start(name: str, *arguments: str) -> Forked:
        started.append(Forked(name, directory / f"{name}-{len(started)}.out", trivium, *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.kill()


def _work(
    output: str, directory: str, environment: dict[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    assert "tests.preloaded" in sys.modules, "the fork server could not import it"
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin by ignoring it
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(written)
    try:
        work(*arguments)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def survivors(pids: Iterable[int], seconds: float = 120) -> list[int]:
    """The processes that still run after so long: Ray ends an actor, and what it owned, some time after its command."""
    remaining = [*pids]
    with suppress(AssertionError):
        eventually(lambda: not any(map(alive, remaining)), seconds)
    return [pid for pid in remaining if alive(pid)]
