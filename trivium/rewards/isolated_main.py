"""The child process of `isolated.py`: answers calls of one function until its parent is gone.

python -m trivium.rewards.isolated_main DESCRIPTOR SPEC

SPEC is JSON: `function` ("module:name") or `reward` (a reward's config), and the limits of each call: `cpu_s`,
`wall_s`, and `memory` in bytes of address space.
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
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from trivium.concurrency import ProcessLife, end_with
from trivium.rewards.child import failure, to_json

T = TypeVar("T")


def main() -> None:
    descriptor, spec = int(sys.argv[1]), json.loads(sys.argv[2])
    end_with(ProcessLife.of(os.getppid()))
    os.set_inheritable(descriptor, False)  # or a process that the function starts would keep the parent waiting
    function = _load(spec)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if spec.get("memory") and sys.platform == "linux":  # elsewhere address space is not limited reliably
        resource.setrlimit(resource.RLIMIT_AS, (spec["memory"], resource.getrlimit(resource.RLIMIT_AS)[1]))
    with os.fdopen(os.dup(descriptor), "r") as requests, os.fdopen(descriptor, "w") as answers:
        for line in requests:
            _limit(spec.get("cpu_s"), spec.get("wall_s"))
            answer = _answer(function, json.loads(line))
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            answers.write(answer + "\n")
            answers.flush()


def _load(spec: Mapping[str, Any]) -> Callable[..., Any]:
    if "function" in spec:
        module, _, name = spec["function"].partition(":")
        return getattr(importlib.import_module(module), name)
    from trivium.config import RewardConfig, build, plugin  # here: graders start sooner without

    return build("rewards", plugin("rewards", RewardConfig)(spec["reward"]))


def _limit(cpu_s: int | None, wall_s: float | None) -> None:
    """Has the kernel end this process where the call takes longer: its parent may be gone by then."""
    if cpu_s is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if wall_s is not None:
        signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """`{"result": ...}` or `{"error": text}`, as JSON."""
    try:
        result = function(**arguments)
        result = asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        return to_json({"result": result})
    except Exception as error:
        return to_json(failure(error))  # the parent raises it


async def _awaited(result: Awaitable[T]) -> T:
    return await result


if __name__ == "__main__":
    main()
