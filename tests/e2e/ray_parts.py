"""What the tests of Ray share: an instance of their own, and a process that forks `trivium` commands.

As a program it is that process: it imports everything once, so that a launch costs what Ray costs.
stdin: one JSON object per launch, {"arguments": [...], "output": file}. stdout: the pid, later the exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trivium.cluster.session import PRIVATE

ROOT = Path(__file__).parents[2]
os.environ |= PRIVATE  # for Ray in this process, where nothing has imported it yet, and in those that it starts

_INSTANCE = """
import ray, sys
print(ray.init("local", include_dashboard=False, num_cpus=2, logging_level="ERROR").address_info["address"], flush=True)
sys.stdin.read()
"""


@contextmanager
def ray_instance() -> Iterator[str]:
    """The address of a Ray instance that lives as long as the block."""
    with subprocess.Popen(
        [sys.executable, "-c", _INSTANCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(60)


class Launcher:
    """Starts `trivium` commands, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.ray_parts"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT,
        )  # fmt: skip

    def run(self, run_dir: Path, *arguments: str, meanwhile: Callable[[Run], Any] = lambda run: None) -> Run:
        """A command from beginning to end; `meanwhile` watches it, and kills what it likes."""
        run_dir.mkdir(parents=True, exist_ok=True)
        run = Run(run_dir, len(list(run_dir.glob("output-*.txt"))))
        order = {"arguments": ["run", *arguments, f"run.dir={run_dir}"], "output": str(run.output)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        run.pid = int(self._process.stdout.readline())
        try:
            meanwhile(run)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGTERM)  # so that the next test's launch is the next one here
            raise
        finally:
            run.code = int(self._process.stdout.readline())
            run.ended = time.monotonic()
        return run

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Run:
    """One command, while it runs and afterwards."""

    def __init__(self, run_dir: Path, number: int) -> None:
        self.dir, self.output = run_dir, run_dir / f"output-{number}.txt"
        self._log_before = len(self._whole_log())
        self.pid = self.code = -1
        self.ended = 0.0

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
        return self.output.read_text()

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

    def until(self, happened: Callable[[], bool], patience_s: float = 120.0) -> None:
        end = time.monotonic() + patience_s
        while not happened():
            assert time.monotonic() < end, f"it did not happen:\n{self.log}\n{self.said}"
            assert Path(f"/proc/{self.pid}").exists(), f"the command ended before it happened:\n{self.said}"
            time.sleep(0.01)


class Anything:
    """Something to host."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.colour = "red"

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    def doubled(self, number: int) -> int:
        return 2 * number

    async def fail(self, error: BaseException) -> None:
        raise error

    async def fail_alone(self) -> None:
        class Unheard(Exception):
            pass

        raise Unheard("nobody else knows this class")

    async def sleep(self, name: str) -> None:
        self.log.append(f"{name} began")
        try:
            await asyncio.sleep(3600)
        finally:
            self.log.append(f"{name} ended")

    def all(self) -> list[str]:
        return self.log


def serve() -> None:
    """Forks a command per line of stdin."""
    import trivium.launch  # noqa: F401
    from trivium.cli import main

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            with open(order["output"], "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.setsid()
            sys.argv = ["trivium", *order["arguments"]]
            try:
                main()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin by ignoring it
    serve()
