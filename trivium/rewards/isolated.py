"""Scoring in a process of its own, because some graders compute with what the policy wrote.

`\\boxed{2^{10000000000}}` holds the interpreter inside one big multiplication: no thread, signal or deadline of ours
would run until it is done, if ever. A child process has a CPU limit that the kernel enforces, and a memory limit
(Linux). Requests and answers are lines of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

from trivium.errors import MissingPackage, RewardError


def require(module: str, package: str, extra: str, purpose: str) -> None:
    """Raises MissingPackage unless the module can be imported; the child imports it when it starts."""
    if importlib.util.find_spec(module) is None:
        raise MissingPackage(package, extra, purpose)


class Child:
    """A child process that answers one call at a time. It ends with this object, or with this process."""

    def __init__(self, *command: str) -> None:
        """`command`: see `trivium.rewards.child`. It imports from where this process does."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trivium.rewards.child", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, encoding="utf-8", start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        weakref.finalize(self, _end, self._process)

    def ask(self, arguments: str) -> dict[str, Any] | None:
        """`{"result": ...}` or `{"error": text}` for keyword arguments as JSON; None where it ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(arguments + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else None

    def kill(self) -> None:
        """Ends it whatever it does; whoever waits for its answer gets None."""
        self._process.kill()

    def end(self) -> int:
        """Ends it and frees its pipes; returns its exit code (negative: the signal that killed it)."""
        return _end(self._process)


class Isolated:
    """A function `module:name` that runs in a child process; keyword arguments and result are JSON values.

    The child starts with the first call, serves one call at a time, and is replaced when a call used more than
    `cpu_limit_s` CPU seconds (RewardError).
    """

    def __init__(self, function: str, cpu_limit_s: int) -> None:
        self._function, self._cpu_limit_s = function, cpu_limit_s
        self._lock = threading.Lock()
        self._child: Child | None = None

    def __call__(self, **arguments: Any) -> Any:
        with self._lock:
            child = self._child or Child("function", self._function, str(self._cpu_limit_s))
            self._child = None  # a call that is interrupted leaves no child
            answer = child.ask(json.dumps(arguments))
            if answer is None:
                raise RewardError(
                    f"an answer of {self._function} within {self._cpu_limit_s} CPU seconds",
                    f"its process ended with code {child.end()} on {str(arguments)[:80]}",
                    "raise cpu_limit_s if the answer is a fair one",
                )
            self._child = child
        return result_of(answer, self._function)


def result_of(answer: dict[str, Any], who: str) -> Any:
    """What a child's function returned; raises RewardError with what it raised."""
    if "error" in answer:
        raise RewardError(f"an answer of {who}", answer["error"], "look at the task's columns")
    return answer["result"]


def _end(process: subprocess.Popen[str]) -> int:
    if process.poll() is None:
        process.kill()
    process.communicate()
    return process.returncode
