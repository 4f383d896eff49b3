"""What runs in the process of an isolated function: it answers calls until the parent is gone.

`main` is the program of a process that is spawned, `serve_in_fork` that of a fork.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import os
import pickle
import resource
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from trivium.config import RewardConfig, build, plugin
from trivium.foundation.concurrency import ProcessLife, end_with, outcome_of
from trivium.foundation.errors import text_of, user_place
from trivium.foundation.registry import resolve
from trivium.processes.isolated.child import frame, read_frame


class Form(NamedTuple):
    """How two processes write arguments, results and errors to each other."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def _to_json(value: object) -> bytes:
    return json.dumps(value, default=_plain).encode()


def _plain(value: object) -> object:
    """Arrays and numbers of numpy and torch as Python's own. Raises TypeError for other types."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


JSON = Form(_to_json, json.loads)
"""For a process that computes with what the policy wrote: reading an answer runs none of its code."""
PICKLE = Form(pickle.dumps, pickle.loads)
"""For a fork of this process, which runs a function that could run here as well."""


class CallLimits(NamedTuple):
    """Limits of each call that the kernel enforces, also if the parent is gone or the function holds the interpreter.

    It ends the process with SIGXCPU or SIGALRM.
    """

    cpu_s: int | None = None
    wall_s: float | None = None

    def begin(self) -> None:
        if self.cpu_s is not None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            # The kernel counts the whole life of the process. The hard limit stays, since no process can raise it
            # again.
            used = int(usage.ru_utime + usage.ru_stime) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (used + self.cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        if self.wall_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self.wall_s)

    def end(self) -> None:
        if self.wall_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def serve(function: Callable[..., Any], channel: socket.socket, form: Form, limits: CallLimits) -> None:
    """Answers one call after the other. Returns once the parent is gone."""
    with suppress(ConnectionError), channel.makefile("rwb") as stream:
        while (request := read_frame(stream)) is not None:
            limits.begin()
            answer = _answer(function, request, form)
            limits.end()
            stream.write(frame(answer))
            stream.flush()


def _answer(function: Callable[..., Any], request: bytes, form: Form) -> bytes:
    """`{"result": ...}`, `{"raised": exception}`, or a `_described` error if the form cannot write the exception."""
    answer, error = outcome_of(lambda: form.write({"result": _result(function(**form.read(request)))}))
    sys.stdout.flush()
    sys.stderr.flush()
    if error is None:
        return answer
    described = _described(error)
    error.add_note(described["traceback"])
    is_kept, _ = outcome_of(lambda: type(form.read(form.write({"raised": error}))["raised"]) is type(error))
    return form.write({"raised": error} if is_kept else described)


def _result(returned: Any) -> Any:
    return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _described(error: BaseException) -> dict[str, Any]:
    """The text of an error, the place in user code that raised it, and its traceback."""
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    return {
        "error": f"{type(error).__name__}: {text_of(error)}",
        "place": user_place(frames),
        "traceback": text_of("".join(traceback.format_exception(error)), 20_000),
    }


def main() -> None:
    """Serves a function. The arguments of the program are the descriptor of the channel, and as JSON the function, its
    `memory` (bytes of address space) and its `limits` (`CallLimits`). The function is `function` ("module:name"), or
    `kind` and `path` (a name of the registry), or `reward` (the config of a reward)."""
    descriptor, spec = int(sys.argv[1]), json.loads(sys.argv[2])
    end_with(ProcessLife.of(os.getppid()))
    os.set_inheritable(descriptor, False)  # or a process that the function starts would keep the parent waiting
    function = _load(spec)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if spec.get("memory") and sys.platform == "linux":  # elsewhere address space is not limited reliably
        resource.setrlimit(resource.RLIMIT_AS, (spec["memory"], resource.getrlimit(resource.RLIMIT_AS)[1]))
    serve(function, socket.socket(fileno=descriptor), JSON, CallLimits(*spec["limits"]))


def _load(spec: Mapping[str, Any]) -> Callable[..., Any]:
    if "function" in spec:
        module, _, name = spec["function"].partition(":")
        return getattr(importlib.import_module(module), name)
    if "path" in spec:
        return resolve(spec["kind"], spec["path"])
    return build("rewards", plugin("rewards", RewardConfig)(spec["reward"]))


# --------------------------------------------------------------------------- in a fork


def serve_in_fork(function: Callable[..., Any], parent: ProcessLife, channel: socket.socket) -> NoReturn:
    """Answers calls in a fork of the process that has the function; then the fork ends."""
    try:
        _separate(channel.fileno())
        end_with(parent)
        serve(function, channel, PICKLE, CallLimits())
        os._exit(0)
    finally:
        os._exit(1)


def _separate(channel: int) -> None:
    """Undoes what a fork shares with its parent."""
    os.setsid()  # Ctrl-C is for the parent
    gc.freeze()  # finalizers of the parent's objects run in the parent alone
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the other threads of its pool are in the parent
    _close_shared(channel)


def _close_shared(channel: int) -> None:
    """Replaces the parent's pipes, sockets and locked files by /dev/null.

    A process that waits for the end of one waits for the parent alone, and two processes that use one connection would
    mix their messages. Code that finds a connection closed opens its own.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in (channel, nothing) and _is_shared(number):
            os.dup2(nothing, number, inheritable=False)
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._run_after_forkers()  # proxies of a multiprocessing.Manager connect anew


def _is_shared(number: int) -> bool:
    with suppress(OSError):  # closed since it was listed
        mode = os.fstat(number).st_mode
        about = Path(f"/proc/self/fdinfo/{number}")
        return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or (about.exists() and "\nlock:" in about.read_text())
    return False
