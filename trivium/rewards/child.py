"""The child process of `trivium.rewards.isolated`: `python -m trivium.rewards.child module:function cpu_seconds`."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import IO, Any

_MEMORY = 4 << 30
"""Bytes of address space; an allocation beyond it is a MemoryError instead of a machine without memory."""


def serve(function: Callable[..., Any], cpu_limit_s: int, requests: IO[str], answers: IO[str]) -> None:
    """Answers JSON lines until there are no more."""
    for line in requests:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_limit_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            answer = {"result": function(**json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}  # the parent raises it
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a grader prints must not pass for an answer
    function = getattr(importlib.import_module(module), name)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere address space is not limited reliably
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    serve(function, int(sys.argv[2]), sys.stdin, answers)


if __name__ == "__main__":
    main()
