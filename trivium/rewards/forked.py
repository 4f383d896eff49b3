"""A function in forks of this process, each of which runs it in a main thread of its own.

A fork has whatever this process has: closures, functions of a notebook, state, objects that cannot be pickled. Only
arguments and results travel, pickled, between the two. It has no other thread than the one that runs the function, and
no GPU that this process uses (CUDA refuses a fork of a process that has used it).
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from trivium.concurrency import ExitRaised, ProcessLife, end_with
from trivium.errors import RewardError
from trivium.rewards.child import Child, failure
from trivium.rewards.isolated import Children

_POLL_S = 0.005
_starting = threading.Lock()
"""Held while a fork starts: another one must not inherit the end of its socket, or its death would go unnoticed."""


class Forks(Children):
    """Forks of this process that call one function, plain or `async`."""

    def __init__(self, label: str, function: Callable[..., Any]) -> None:
        super().__init__(label)
        self._function = function

    def start(self) -> Child:
        if not hasattr(os, "fork"):
            raise RewardError(
                f"a main thread for {self.label}, which uses signals",
                f"{sys.platform} cannot fork a process",
                "set `workers` (of a function of a module or a file), or use no signals",
            )
        return Fork(self._function)

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        try:
            return pickle.dumps(dict(arguments))
        except Exception as error:  # whatever the arguments raise
            raise RewardError(
                f"a process of its own for {self.label}, which uses signals",
                f"its arguments cannot be pickled: {type(error).__name__}: {error}",
                "give it plain values, or use no signals in it",
            ) from error


class Fork(Child):
    """A fork of this process that serves calls of a function until this object or this process is gone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        with _starting, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns where other threads run: the child uses none of theirs
            ours, theirs = socket.socketpair()
            sys.stdout.flush()
            sys.stderr.flush()
            parent, pid = ProcessLife.of(os.getpid()), os.fork()
            if not pid:
                _serve(function, theirs, parent)
            theirs.close()
        self._attach(_Forked(pid), ours)

    def receive(self) -> dict[str, Any] | None:
        try:
            return pickle.load(self._answers)
        except (EOFError, ConnectionError, pickle.UnpicklingError):  # it may have ended in the middle of one
            return None


class _Forked:
    """What subprocess.Popen has, of a process that `os.fork` made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._code: int | None = None

    def _poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self._pid, os.WNOHANG)
                except ChildProcessError:  # this process ignores SIGCHLD, or other code of it has waited for all
                    pid, status = self._pid, 0
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def kill(self) -> None:
        if self._poll() is None:  # not reaped, so the number is still its own
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self._poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


# --------------------------------------------------------------------------- in the fork


def _serve(function: Callable[..., Any], channel: socket.socket, parent: ProcessLife) -> NoReturn:
    try:
        _settle(parent, channel.fileno())
        with channel.makefile("rwb") as stream:
            while True:
                stream.write(_answer(function, pickle.load(stream)))
                stream.flush()
    except (EOFError, ConnectionError):
        os._exit(0)
    finally:
        os._exit(1)


def _settle(parent: ProcessLife, channel: int) -> None:
    """Makes a process of its own out of the fork."""
    global _starting
    _starting = threading.Lock()  # the parent's is held
    os.setsid()  # Ctrl-C is for the parent
    gc.freeze()  # what the parent made is the parent's to end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the others of its pool are in the parent
    _let_go(channel)
    end_with(parent)


def _let_go(channel: int) -> None:
    """Replaces the parent's pipes, sockets and locked files. A process that waits for their end waits for the parent
    alone, and two that talk over one connection would mix their messages. Code that finds one closed opens its own."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in (channel, nothing) and _is_shared(number):
            os.dup2(nothing, number, inheritable=False)
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._run_after_forkers()  # proxies of a multiprocessing.Manager connect anew


def _is_shared(number: int) -> bool:
    with suppress(OSError):  # not open any more
        mode = os.fstat(number).st_mode
        about = Path(f"/proc/self/fdinfo/{number}")
        return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or (about.exists() and "\nlock:" in about.read_text())
    return False


def _answer(function: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """`{"result": ...}`, `{"raised": exception}`, or a `failure` where that cannot be pickled."""
    try:
        result = function(**arguments)
        answer = {"result": asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result}
        return pickle.dumps(answer)
    except BaseException as raised:
        error = raised if isinstance(raised, Exception) else ExitRaised(raised)
        about = failure(error)
        return _pickled(error, str(about["traceback"])) or pickle.dumps(about)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _pickled(error: Exception, trace: str) -> bytes | None:
    """The answer with the exception itself, its traceback as a note; None where it does not survive."""
    error.add_note(trace)
    try:
        answer = pickle.dumps({"raised": error})
        return answer if type(pickle.loads(answer)["raised"]) is type(error) else None
    except Exception:  # whatever its own pickling raises
        return None


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
