"""Scoring in a process of its own, because some graders compute with what the policy wrote.

`\\boxed{2^{10000000000}}` holds the interpreter inside one big multiplication: no thread, signal or deadline of ours
would run until it is done, if ever. A child process has a CPU limit that the kernel enforces, and a memory limit
(Linux). Requests and answers are lines of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from typing import IO, Any

from trivium.errors import MissingPackage, RewardError


def require(module: str, package: str, extra: str, purpose: str) -> None:
    """Raises MissingPackage unless the module can be imported; the child imports it when it starts."""
    if importlib.util.find_spec(module) is None:
        raise MissingPackage(package, extra, purpose)


class Isolated:
    """A function `module:name` that runs in a child process; keyword arguments and result are JSON values.

    The child starts with the first call, serves one call at a time, and is replaced when a call used more than
    `cpu_limit_s` CPU seconds (RewardError). It ends with this object, or with this process.
    """

    def __init__(self, function: str, cpu_limit_s: int) -> None:
        self._function, self._cpu_limit_s = function, cpu_limit_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, **arguments: Any) -> Any:
        with self._lock:
            child, self._child = self._child or self._start(), None  # a call that is interrupted leaves no child
            requests, answers = _pipes(child)
            try:
                requests.write(json.dumps(arguments) + "\n")
                requests.flush()
                line = answers.readline()
            except BrokenPipeError:
                line = ""
            if not line:
                raise RewardError(
                    f"an answer of {self._function} within {self._cpu_limit_s} CPU seconds",
                    f"its process ended with code {_end(child)} on {str(arguments)[:80]}",
                    "raise cpu_limit_s if the answer is a fair one",
                )
            self._child = child
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RewardError(f"an answer of {self._function}", answer["error"], "look at the task's columns")
        return answer["result"]

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trivium.rewards.child", self._function, str(self._cpu_limit_s)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
        )
        weakref.finalize(self, _end, child)
        return child


def _pipes(child: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert child.stdin is not None
    assert child.stdout is not None
    return child.stdin, child.stdout


def _end(child: subprocess.Popen[str]) -> int:
    """Ends the child and frees its pipes; returns its exit code (negative: the signal that killed it)."""
    if child.poll() is None:
        child.kill()
    child.communicate()
    return child.returncode
