"""A user's workflow that takes its time, one that cannot be built, and rewards that tell replies apart."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from trivium.config import WorkflowConfig, free
from trivium.policy import Policy
from trivium.types import Task


class Slow:
    """One reply, after a pause; evaluation does not wait."""

    class Config(WorkflowConfig):
        kind: str = "slow.py:Slow"
        pause_s: float = free(0.0, ge=0)

    def __init__(self, config: Config) -> None:
        self._pause_s = config.pause_s

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float] | None:
        await asyncio.sleep(self._pause_s if task.taskset == "train" else 0.0)
        await policy.generate(task.prompt)
        return None


class Broken(Slow):
    """Raises an error of a class that no other process knows."""

    class Unheard(Exception):
        pass

    def __init__(self, config: Slow.Config) -> None:
        raise self.Unheard("the simulator is not licensed on this machine")


def short(prompt: str, completion: str) -> float:
    return 1.0 / (1 + len(completion))


def timely(prompt: str, completion: str) -> float:
    """`short`, as graders with a time limit are written; no reward where the limit cannot be set."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        return short(prompt, completion)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
