"""Child processes: one way to start one, to exchange lines of JSON with it, to wait for it and to kill it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, Protocol

from trivium.errors import text_of, user_place


class Process(Protocol):
    """What is used of subprocess.Popen."""

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Child:
    """A Python process that is sent requests and sends answers, one JSON value a line, over a socket of its own.

    It runs in its own session, inherits no descriptor but the ones named, and ends with this object or this process.
    """

    def __init__(
        self,
        program: Sequence[str],
        *arguments: str,
        env: Mapping[str, str],
        cwd: str | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        stdout: IO[bytes] | int = 2,
        stderr: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Runs `python PROGRAM... DESCRIPTOR ARGUMENTS...`, where DESCRIPTOR is the number of its end of the socket.

        By default its output goes to this process's standard error. `timeout_s` bounds each `send` and
        `receive`; None: until `kill` is called.
        """
        with ExitStack() as unless_started:
            ours, theirs = socket.socketpair()
            unless_started.enter_context(ours)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, *program, str(theirs.fileno()), *arguments],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=cwd,
                    env=env,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(), *pass_fds),
                )
            unless_started.pop_all()
        ours.settimeout(timeout_s)
        self._attach(process, ours)

    def _attach(self, process: Process, channel: socket.socket) -> None:
        self._process, self._socket, self._answers = process, channel, channel.makefile("rb")
        weakref.finalize(self, _end_from, os.getpid(), process, channel, self._answers)

    @staticmethod
    def encode(request: Mapping[str, Any]) -> bytes:
        """What `send` takes."""
        return to_json(request).encode() + b"\n"

    def send(self, request: bytes) -> None:
        """Sends what `encode` made. That the process has ended or does not read is seen by `receive` and `wait`."""
        try:
            self._socket.sendall(request)
        except (ConnectionError, TimeoutError):
            return

    def receive(self) -> dict[str, Any] | None:
        """The next answer; None where the process ended without one, or gave none in time."""
        try:
            line = self._answers.readline()
        except (ConnectionError, TimeoutError):
            line = b""
        return json.loads(line) if line else None

    def wait(self, seconds: float) -> int | None:
        """Its exit code (negative: the signal that killed it); None where it still runs after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends it whatever it does. May be called from any thread; `receive` then gives None."""
        self._process.kill()
        with suppress(OSError):  # not connected any more; a process that it started may hold the other end
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """Ends it and frees what it holds here; returns its exit code."""
        return _end(self._process, self._socket, self._answers)


def _end_from(owner: int, process: Process, *channel: socket.socket | IO[bytes]) -> None:
    """Ends it; not where a fork of the process that started it lets go of its copy."""
    if os.getpid() == owner:
        _end(process, *channel)


def _end(process: Process, *channel: socket.socket | IO[bytes]) -> int:
    process.kill()  # nothing happens to one that has been waited for
    code = process.wait()
    for each in channel:
        each.close()
    return code


def failure(error: BaseException) -> dict[str, Any]:
    """The answer of a process whose function raised this, for `RewardError`s where another process asked for it."""
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    return {
        "error": f"{type(error).__name__}: {text_of(error)}",
        "place": user_place(frames),
        "traceback": text_of("".join(traceback.format_exception(error)), 20_000),
    }


def to_json(value: object) -> str:
    """One line of JSON; arrays and numbers of numpy and torch become Python's own. Raises TypeError for others."""
    return json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
