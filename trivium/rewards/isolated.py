"""Functions in child processes, because some graders compute with what the policy wrote.

`\\boxed{2^{10000000000}}` holds the interpreter inside one big multiplication: no thread, signal or deadline of ours
would run until it is done, if ever. A child process has limits that the kernel enforces, and can be killed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trivium.concurrency import Threads
from trivium.config import RewardConfig
from trivium.errors import MissingPackage, RewardError, text_of
from trivium.rewards.child import Child

_MEMORY = 4 << 30
"""Bytes of address space of a grader; an allocation beyond it is a MemoryError instead of a machine without memory."""
_LEAVING_S = 5.0
"""How long a process that closed its end may take to end, before it is killed and its exit code is lost."""
_SHOWN = 200
"""Characters of the arguments that an error shows."""


def require(module: str, package: str, extra: str, purpose: str) -> None:
    """Raises MissingPackage unless the module can be imported; the child imports it when it starts."""
    if importlib.util.find_spec(module) is None:
        raise MissingPackage(package, extra, purpose)


class Isolated:
    """A function `module:name` that runs in a child process; keyword arguments and result are JSON values.

    The child starts with the first call, serves one call at a time, and is replaced when a call used more than
    `cpu_limit_s` CPU seconds (RewardError).
    """

    def __init__(self, function: str, cpu_limit_s: int) -> None:
        self._lock = threading.Lock()
        self._children = _Children(function, {"function": function, "cpu_s": cpu_limit_s, "memory": _MEMORY})

    def __call__(self, /, **arguments: object) -> Any:
        with self._lock:
            return _Call(self._children, arguments).run()


class InProcesses:
    """A function in up to `limit` child processes, each of which serves one call at a time.

    Cancelling a call kills the process it is in; another takes its place.
    """

    def __init__(self, children: Children, limit: int) -> None:
        self._threads = Threads(limit, children.label)
        self._children = children

    async def __call__(self, /, **arguments: object) -> object:
        call = _Call(self._children, arguments)
        try:
            return await self._threads.run(call.run)
        except asyncio.CancelledError:
            call.kill()
            raise


class IsolatedReward(InProcesses):
    """A reward of the config in up to `config.workers` child processes. Arguments and result are JSON values. The
    kernel ends a call after `deadline_s`, also where this process is gone."""

    def __init__(self, config: RewardConfig, deadline_s: float) -> None:
        reward = config.model_dump(mode="json") | {"workers": 0}
        label = f"reward {config.label!r}"
        super().__init__(_Children(label, {"reward": reward, "wall_s": deadline_s}), config.workers)


class Children(ABC):
    """Child processes of one function: those that wait for a call, and how another one is started."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()

    @abstractmethod
    def start(self) -> Child:
        """A new process."""

    @abstractmethod
    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        """The request of a call. Raises what says that the arguments cannot be sent."""

    def take(self) -> Child:
        """An idle child, or a new one."""
        with suppress(queue.Empty):
            return self._idle.get_nowait()
        return self.start()

    def give_back(self, child: Child) -> None:
        self._idle.put(child)

    def ended(self, code: int, arguments: str) -> RewardError:
        """The error of a call whose process ended by itself."""
        return RewardError(
            f"an answer of {self.label}",
            f"its process {_ending(code)} on {arguments}",
            "look at what it printed: it crashed, left by itself, or used too much memory",
        )


class _Children(Children):
    """Processes of their own that import the function from where this process does."""

    def __init__(self, label: str, spec: Mapping[str, Any]) -> None:
        super().__init__(label)
        self._spec = spec

    def start(self) -> Child:
        program = ("-m", "trivium.rewards.isolated_main")
        return Child(program, json.dumps(self._spec), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        return Child.encode(arguments)

    def ended(self, code: int, arguments: str) -> RewardError:
        error = super().ended(code, arguments)
        if code == -signal.SIGALRM:
            do = "give it more time, or let it give up sooner"
            return RewardError(error.asked, f"no answer within {self._spec['wall_s']:g} s", do)
        if "cpu_s" not in self._spec:
            return error
        asked = f"{error.asked} within {self._spec['cpu_s']} CPU seconds"
        return RewardError(
            asked, error.found, f"{error.do} or CPU time; raise cpu_limit_s if it is right to take so long"
        )


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    known = {"SIGKILL": ", as the system does where memory is short", "SIGXCPU": ": its CPU time was over"}
    return f"was ended by {name}{known.get(name, '')}"


class _Call:
    """One call on its way through a child; `kill` may be called from another thread at any moment."""

    def __init__(self, children: Children, arguments: Mapping[str, Any]) -> None:
        self._children, self._request = children, children.encode(arguments)
        self._shown = text_of(arguments, _SHOWN, repr)
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._killed = False

    def run(self) -> object:
        """The function's result. Raises what it raised (RewardError where that cannot travel between processes), or
        RewardError where its process ended instead."""
        child = self._children.take()
        with self._lock:
            self._child = child
            if self._killed:
                child.kill()
        child.send(self._request)
        answer = child.receive()
        with self._lock:
            self._child, killed = None, self._killed
        if answer is None or killed:
            left = None if killed else child.wait(_LEAVING_S)
            raise self._children.ended(child.end() if left is None else left, self._shown)
        self._children.give_back(child)
        if "raised" in answer:
            raise answer["raised"]
        if "error" in answer:
            error = RewardError(f"an answer of {self._children.label}", answer["error"], "look at the task's columns")
            error.place = answer["place"]
            error.add_note(answer["traceback"])
            raise error
        return answer["result"]

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()
