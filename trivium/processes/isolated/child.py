"""A process that this one starts, sends requests to and kills, whichever way it was started.

`spawn` starts a new interpreter, `fork` a copy of this process. Both talk over a socket of their own, in frames: the
length of the content in 8 bytes, then the content. The end of the socket is how either side notices the other's death.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, NoReturn

from trivium.planning.machine import ended_copy

_HEADER = 8
_POLL_S = 0.005
_forking = threading.Lock()
"""`warnings.catch_warnings` supports one thread at a time."""


def frame(content: bytes) -> bytes:
    """The content with its length in front."""
    return len(content).to_bytes(_HEADER, "big") + content


def read_frame(stream: IO[bytes] | io.BufferedRWPair) -> bytes | None:
    """The content of the next frame. Returns None at the end of the stream, also if it ends within a frame."""
    header = stream.read(_HEADER)
    size = int.from_bytes(header, "big")
    content = stream.read(size) if len(header) == _HEADER else None
    return content if content is not None and len(content) == size else None


class Child:
    """A child process and the socket to it. Deleting this object kills the process."""

    def __init__(
        self, process: subprocess.Popen[bytes] | ForkedProcess, channel: socket.socket, timeout_s: float | None = None
    ) -> None:
        """`timeout_s` bounds each `send` and `receive`. None waits until the process answers or ends, or another thread
        calls `kill`."""
        channel.settimeout(timeout_s)
        self._process, self._socket, self._answers = process, channel, channel.makefile("rb")
        self._end = weakref.finalize(self, _end, os.getpid(), process, channel, self._answers)

    def send(self, request: bytes) -> None:
        """Sends a request. Raises no error if the process has ended or does not read: `receive` returns None then."""
        with suppress(ConnectionError, TimeoutError):
            self._socket.sendall(frame(request))

    def receive(self) -> bytes | None:
        """The next answer. Returns None if the process ends first, or sends none within `timeout_s`."""
        try:
            return read_frame(self._answers)
        except (ConnectionError, TimeoutError):
            return None

    def wait(self, seconds: float) -> int | None:
        """The exit code of the process (negative: the signal that killed it), or None if it still runs after
        `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kills the process. Any thread may call it; a `receive` that waits returns None."""
        self._process.kill()
        with suppress(OSError):  # not connected any more; a process that it started may hold the other end
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """Kills the process, closes the socket and returns the exit code."""
        self._end()
        return self._process.wait()


def _end(owner: int, process: subprocess.Popen[bytes] | ForkedProcess, *channel: socket.socket | IO[bytes]) -> None:
    if os.getpid() == owner:  # not a fork of the owner, which deletes its copy of the `Child`
        process.kill()  # without effect on a process that has been waited for
        process.wait()
        for file in channel:
            file.close()


def spawn(
    program: Sequence[str],
    *arguments: str,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stdout: IO[bytes] | int = 2,
    stderr: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    timeout_s: float | None = None,
) -> Child:
    """Starts `python PROGRAM... DESCRIPTOR ARGUMENTS...`; DESCRIPTOR is the number of its end of the socket.

    The process runs in a session of its own and inherits the socket, the standard streams and `pass_fds` only. Its
    output goes to the standard error of this process by default.
    """
    ours, theirs = socket.socketpair()
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
    return Child(process, ours, timeout_s)


def fork(serve: Callable[[socket.socket], NoReturn]) -> Child:
    """Starts a copy of this process, in which `serve` runs with the other end of the socket, in the main thread."""
    with _forking, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns if other threads run; the copy has none and uses none of theirs
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
    if not pid:
        serve(theirs)
    theirs.close()
    return Child(ForkedProcess(pid), ours)


class ForkedProcess:
    """The part of `subprocess.Popen` that `Child` uses, for a process that `os.fork` started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._code: int | None = None

    def _poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                try:
                    pid, status, usage = os.wait4(self._pid, os.WNOHANG)
                    if pid:
                        ended_copy(usage)
                except ChildProcessError:  # this process ignores SIGCHLD, or other code in it has waited for all
                    pid, status = self._pid, 0
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def kill(self) -> None:
        if self._poll() is None:  # not reaped, so no other process has its pid
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self._poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_POLL_S)
        return code
