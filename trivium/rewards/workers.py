"""A reward of the config in processes of its own: what hangs there, or holds the interpreter, can be killed."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import threading
from typing import Any

from trivium.config import RewardConfig
from trivium.errors import RewardError
from trivium.rewards.isolated import Child, result_of
from trivium.threads import Threads


class Workers:
    """Calls a reward in up to `config.workers` child processes, each of which serves one call at a time.

    Cancelling a call kills the process it is in; another takes its place. Arguments and result are JSON values.
    """

    def __init__(self, config: RewardConfig, deadline_s: float) -> None:
        said = config.model_dump(mode="json") | {"workers": 0}
        self._command = ("reward", json.dumps(said), str(deadline_s))
        self._label, self._deadline_s = config.label, deadline_s
        self._threads = Threads(config.workers, f"reward {config.label!r}")
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()

    async def __call__(self, **arguments: Any) -> Any:
        call = _Call(self, json.dumps(arguments))
        try:
            return result_of(await self._threads.run(call.run), f"reward {self._label!r}")
        except asyncio.CancelledError:
            call.kill()
            raise

    def take(self) -> Child:
        """A child that nobody uses."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return Child(*self._command)

    def give_back(self, child: Child) -> None:
        self._idle.put(child)

    def ended(self, code: int) -> RewardError:
        """The error of a call whose process ended by itself."""
        if code == -signal.SIGALRM:
            found, do = f"no answer within {self._deadline_s:g} s", "give it more time, or let it give up sooner"
        else:
            found = f"its process ended with code {code}"
            do = "look at what it printed: it crashed, ran out of memory, or left by itself"
        return RewardError(f"an answer of reward {self._label!r}", found, do)


class _Call:
    """One call on its way through a child, which somebody else may kill at any moment."""

    def __init__(self, workers: Workers, arguments: str) -> None:
        self._workers, self._arguments = workers, arguments
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._killed = False

    def run(self) -> dict[str, Any]:
        """The child's answer. Raises RewardError where it ended instead."""
        child = self._workers.take()
        with self._lock:
            self._child = child
            if self._killed:
                child.kill()
        answer = child.ask(self._arguments)
        with self._lock:
            self._child = None
            if answer is not None and not self._killed:
                self._workers.give_back(child)
                return answer
        raise self._workers.ended(child.end())

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()
