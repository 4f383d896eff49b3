"""Functions in processes of their own: `Isolated` (the caller waits), `InProcesses` (coroutines wait)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from trivium.config import RewardConfig
from trivium.foundation.concurrency import ProcessLife, Threads
from trivium.foundation.errors import MissingPackage, RewardError, text_of
from trivium.processes.isolated.answers import JSON, PICKLE, CallLimits, Form, serve_in_fork
from trivium.processes.isolated.child import Child, fork, spawn

_MEMORY = 4 << 30
"""Bytes of address space of a grader: an allocation beyond it is a MemoryError, before the machine has no memory."""
_EXIT_S = 5.0
"""How long a process that closed its end of the socket may take to end. Then it is killed: its exit code is lost."""
_MAIN = "from trivium.processes.isolated.answers import main; main()"
_SHOWN = 200
"""Characters of the arguments that an error shows."""


def require(module: str, package: str, extra: str, purpose: str) -> None:
    """Raises MissingPackage unless the module can be imported. It is not imported: a child process does that."""
    if importlib.util.find_spec(module) is None:
        raise MissingPackage(package, extra, purpose)


class Processes:
    """The processes of one function. A call takes an idle one or starts another, and each serves one call at a time."""

    def __init__(self, label: str, start: Callable[[], Child], form: Form, limits: CallLimits | None = None) -> None:
        """`label` names the function in errors; `limits` are those that the processes set for a call."""
        self.label, self.form, self._start, self._limits = label, form, start, limits or CallLimits()
        self.idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        """Processes that wait for a call."""

    def take(self) -> Child:
        """An idle process, or a new one."""
        with suppress(queue.Empty):
            return self.idle.get_nowait()
        return self._start()

    def ended(self, code: int, arguments: Mapping[str, Any]) -> RewardError:
        """The error of a call whose process ended without an answer."""
        asked = f"an answer of {self.label}"
        found = f"its process {_ending(code)} on {text_of(arguments, _SHOWN, repr)}"
        do = "look at its output: it crashed, exited, or used too much memory"
        if code == -signal.SIGALRM and self._limits.wall_s is not None:
            found, do = f"no answer within {self._limits.wall_s:g} s", "give it more time, or an earlier time limit"
        if self._limits.cpu_s is not None:
            asked += f" within {self._limits.cpu_s} CPU seconds"
            do += " or CPU time; raise cpu_limit_s if such a long call is expected"
        return RewardError(asked, found, do)


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    causes = {"SIGKILL": ", as the system does if memory is short", "SIGXCPU": ": its CPU time was used up"}
    return f"was ended by {name}{causes.get(name, '')}"


class _IsolatedCall:
    """One call of a function in one of its processes."""

    def __init__(self, processes: Processes, arguments: Mapping[str, Any]) -> None:
        """Raises RewardError for arguments that cannot be sent."""
        self._processes, self._arguments = processes, arguments
        try:
            self._request = processes.form.write(arguments)
        except Exception as error:  # the arguments' own pickling may raise any
            raise RewardError(
                f"a call of {processes.label} in a process of its own",
                f"its arguments cannot be sent there: {type(error).__name__}: {error}",
                "give it plain values, or a function that needs no process of its own (no `workers`, no signals)",
            ) from error
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._killed = False

    def run(self) -> object:
        """The function's result. Raises what it raised, or a RewardError with its text if the exception cannot be sent
        back; RewardError if the process ended without an answer."""
        child = self._processes.take()
        with self._lock:
            self._child = child
            if self._killed:
                child.kill()
        child.send(self._request)
        answer = child.receive()
        with self._lock:
            self._child, killed = None, self._killed
        if answer is None or killed:
            code = None if killed else child.wait(_EXIT_S)
            raise self._processes.ended(child.end() if code is None else code, self._arguments)
        self._processes.idle.put(child)
        return self._outcome(self._processes.form.read(answer))

    def _outcome(self, answer: Mapping[str, Any]) -> object:
        if "raised" in answer:
            raise answer["raised"]
        if "error" in answer:
            error = RewardError(f"an answer of {self._processes.label}", answer["error"], "look at the task's columns")
            error.place = answer["place"]
            error.add_note(answer["traceback"])
            raise error
        return answer["result"]

    def kill(self) -> None:
        """Kills the process of the call. Any thread may call it, at any time."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()


# --------------------------------------------------------------------------- ways to call


class Isolated:
    """A function `module:name` in a spawned process; its keyword arguments and its result are JSON values.

    The process starts with the first call and serves one call at a time. A call of more than `cpu_limit_s` CPU seconds
    raises RewardError, and the next call starts another process.
    """

    def __init__(self, function: str, cpu_limit_s: int) -> None:
        self._lock = threading.Lock()
        self._processes = _spawned(function, {"function": function, "memory": _MEMORY}, CallLimits(cpu_s=cpu_limit_s))

    def __call__(self, /, **arguments: object) -> Any:
        with self._lock:
            return _IsolatedCall(self._processes, arguments).run()


class InProcesses:
    """A function in up to `limit` processes at the same time. Cancelling a call kills its process."""

    def __init__(self, processes: Processes, limit: int) -> None:
        self._threads = Threads(limit, processes.label)
        self._processes = processes

    async def __call__(self, /, **arguments: object) -> object:
        call = _IsolatedCall(self._processes, arguments)
        try:
            return await self._threads.run(call.run)
        except asyncio.CancelledError:
            call.kill()
            raise


def isolated_reward(config: RewardConfig, deadline_s: float) -> InProcesses:
    """A reward of the config in up to `config.workers` spawned processes; its arguments and its result are JSON values.

    The kernel ends a call after `deadline_s`, also if this process is gone.
    """
    spec = {"reward": config.model_dump(mode="json") | {"workers": 0}}
    return InProcesses(_spawned(f"reward {config.label!r}", spec, CallLimits(wall_s=deadline_s)), config.workers)


def isolated_function(kind: str, path: str, label: str, limit: int, deadline_s: float) -> InProcesses:
    """The function that `path` names (see `trivium.foundation.registry.resolve`) in up to `limit` spawned
    processes; its arguments and its result are JSON values. The kernel ends a call after `deadline_s`."""
    return InProcesses(_spawned(label, {"kind": kind, "path": path}, CallLimits(wall_s=deadline_s)), limit)


def forked(function: Callable[..., Any], label: str, limit: int) -> InProcesses:
    """A function, plain or `async`, in up to `limit` forks of this process, where it has a main thread.

    A fork has everything that this process has: closures, functions of a notebook, state, objects that cannot be
    pickled. Arguments and results are pickled. A fork has no other thread, and no GPU that this process uses: CUDA
    refuses forks of a process that has used it.
    """

    def start() -> Child:
        return fork(partial(serve_in_fork, function, ProcessLife.of(os.getpid())))

    return InProcesses(Processes(label, start, PICKLE), limit)


def _spawned(label: str, spec: Mapping[str, Any], limits: CallLimits) -> Processes:
    """Processes that import the function from where this process does."""

    def start() -> Child:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return spawn(("-c", _MAIN), json.dumps({**spec, "limits": limits}), env=env)

    return Processes(label, start, JSON, limits)
