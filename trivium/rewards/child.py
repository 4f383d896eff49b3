"""The child processes of rewards. What they compute is asked for and answered in lines of JSON.

python -m trivium.rewards.child function module:function cpu_seconds     one of our graders, with limits
python -m trivium.rewards.child reward config_as_json seconds            a reward of a config
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

_MEMORY = 4 << 30
"""Bytes of address space of a grader; an allocation beyond it is a MemoryError instead of a machine without memory."""


def serve(function: Callable[..., Any], limited: Callable[[bool], None], requests: IO[str], answers: IO[str]) -> None:
    """Answers JSON lines until there are no more. `limited` sets a limit before each call and takes it off after."""
    for line in requests:
        limited(True)
        try:
            result = function(**json.loads(line))
            result = asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
            answer = json.dumps({"result": result}, default=_plain)
        except Exception as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})  # the parent raises it
        limited(False)
        answers.write(answer + "\n")
        answers.flush()


async def _awaited(result: Any) -> Any:
    return await result


def grader(name: str, cpu_limit_s: int) -> tuple[Callable[..., Any], Callable[[bool], None]]:
    """A function of ours, and what holds each call of it to its CPU seconds."""
    module, _, function = name.partition(":")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere address space is not limited reliably
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def limited(on: bool) -> None:
        if on:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            used = int(usage.ru_utime + usage.ru_stime) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_limit_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))

    return getattr(importlib.import_module(module), function), limited


def reward(config: str, limit_s: float) -> tuple[Callable[..., Any], Callable[[bool], None]]:
    """A reward of a config, and the kernel's alarm: it ends the process even where the parent could not any more."""
    from trivium.config import RewardConfig, build, plugin  # here: graders start sooner without

    function = build("rewards", plugin("rewards", RewardConfig)(json.loads(config)))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def limited(on: bool) -> None:
        signal.setitimer(signal.ITIMER_REAL, limit_s if on else 0.0)

    return function, limited


def _plain(number: Any) -> Any:
    """A number or an array of numpy's as Python's, for JSON."""
    return number.tolist()


def main() -> None:
    kind, what, limit = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a grader prints must not pass for an answer
    function, limited = grader(what, int(limit)) if kind == "function" else reward(what, float(limit))
    serve(function, limited, sys.stdin, answers)


if __name__ == "__main__":
    main()
