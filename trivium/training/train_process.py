"""A train engine in a separate process, on the machine of the driving process.

Python runs one thread of a process at a time: with thousands of rollouts in the same process, an update would wait for
the interpreter lock at every operation. Commands and results are pickled: both ends are one program, over a private
socket.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any, cast

from trivium.concurrency import HeartbeatTracker, ProcessLife
from trivium.errors import RoleFailed, TriviumError, portable
from trivium.models.weights.stream import Described, Named, groups, receive_together, send_together, spec
from trivium.protocols import DescribedWeights, WeightChannel, Weights
from trivium.training.data_parallel import RankVerbs

_log = logging.getLogger("trivium")
_NAME = "trainer's process"
_CLOSE_S = 60.0
"""Deadline for the process to end, which includes a checkpoint in progress."""
_STOPPED_S = 5.0
"""How long it may be stopped while this process waits for it, or be idle while it closes."""
_IDLE_SHARE = 1e-3
"""The share of a core up to which a process counts as idle."""
_LOOK_S = 0.25


class TrainProcess:
    """The `RankGroup` of a single rank. Its process ends with this one.

    While a call waits, the process is killed if it was stopped for `_STOPPED_S` or idle for `deadline_s`. The call then
    raises RoleFailed, as after any other death.
    """

    data_size = 1

    def __init__(self, module: str, spec: object, channel: WeightChannel, deadline_s: float = 3600.0) -> None:
        """Starts `python -m module DESCRIPTOR`, which calls `serve_driver` with its end of the connection and builds
        the engine from `spec`. The weights that it offers go to `channel`, which stays in this process."""
        self._channel, self._calls, self._deadline_s = channel, Lock(), deadline_s
        self._call = "its start"
        self._waits = 0
        """Odd while this process waits for the other one."""
        self._is_closing = False
        self._stall = ""
        """Why it was killed."""
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                pass_fds=[theirs.fileno()],
                process_group=0,  # only this process gets Ctrl-C and ends the run
            )
        self.pid = self._process.pid
        Thread(target=self._watch, name="trivium-trainer", daemon=True).start()
        self._send(spec)

    def _watch(self) -> None:
        """Kills the process if it stalls."""
        life, silence = ProcessLife.of(self.pid), HeartbeatTracker(_STOPPED_S / 2)
        while self._process.poll() is None:
            is_stopped, cpu_s = life.activity()
            limit_s = _STOPPED_S if is_stopped or self._is_closing else self._deadline_s
            # CPU time of idle threads, such as polling threads of libraries, is not progress.
            silent_s = silence.silence_s(self._waits + int(cpu_s / (limit_s * _IDLE_SHARE)))
            if self._waits % 2 and silent_s > limit_s:
                state = "was stopped (SIGSTOP)" if is_stopped else "computed nothing"
                self._stall = f"process {self.pid} {state} for {silent_s:.0f} s in {self._call}, so it was killed"
                self._process.kill()
            time.sleep(_LOOK_S)

    @contextmanager
    def _waiting(self) -> Generator[None]:
        self._waits += 1
        try:
            yield
        finally:
            self._waits += 1

    def run_on_all_ranks(self, method: str, *args: object) -> Any:
        with self._calls:
            self._call = f"the call {method!r} of {time.strftime('%H:%M:%S')}"
            self._send((method, args))
            while (answer := self._receive())[0] == "offer":
                self._send(self._offer(*answer[1:]))
        kind, result = answer
        if kind == "error":
            raise result
        return result

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], *args: object) -> list[Any]:
        return [self.run_on_all_ranks(method, *shares[0], *args)]

    def close(self) -> None:
        """Ends the process and waits for it. Kills it if a call in progress does not finish within `_CLOSE_S`, or
        sooner if the process is stopped or hangs."""
        self._is_closing = True
        if not (is_idle := self._calls.acquire(timeout=_CLOSE_S)):
            self._process.kill()
            is_idle = self._calls.acquire(timeout=_CLOSE_S)
        self._connection.close()
        if is_idle:
            self._calls.release()
        self._exit_code()

    def _offer(self, version: int, tensors: tuple[Any, ...] | None) -> tuple[bool, str] | Exception:
        """Offers weights from the connection. Returns (whether they were delivered, their hash), or the error."""
        arriving = self._arriving()
        try:
            delivered = self._channel.offer(version, arriving if tensors is None else Described(tensors, arriving))
        except TriviumError as error:
            return error
        finally:
            for _ in arriving:  # the channel may not have read all of them
                pass
        return delivered, getattr(self._channel, "offered", "")

    def _arriving(self) -> Iterator[Named]:
        while (headers := self._receive()) is not None:
            with self._waiting():
                arrived = deque(receive_together(self._connection, headers))
            while arrived:
                yield arrived.popleft()

    def _send(self, message: object) -> None:
        with self._waiting(), suppress(BrokenPipeError, ConnectionResetError):  # it ended: `_receive` raises
            self._connection.send_bytes(pickle.dumps(message))

    def _receive(self) -> Any:
        try:
            with self._waiting():
                return pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            code = self._exit_code()
            raise RoleFailed(_NAME, self._stall or f"it ended with exit code {code}") from error

    def _exit_code(self) -> int:
        """Waits for the end of the process, whose connection is closed."""
        try:
            with self._waiting():
                return self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            _log.warning("the %s has not ended after %.0f s: it is killed", _NAME, _CLOSE_S)
            self._process.kill()
            return self._process.wait()


class _DriverGone(Exception):
    """The driving process has closed the connection, or has ended."""


class _Driver:
    """The driving process, seen from its train process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        with self._watched():
            self._connection.send_bytes(pickle.dumps(message))

    def send_tensors(self, group: Sequence[Named]) -> None:
        with self._watched():
            send_together(self._connection, group)

    def receive(self) -> Any:
        with self._watched():
            return pickle.loads(self._connection.recv_bytes())

    @contextmanager
    def _watched(self) -> Generator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise _DriverGone from error


class _DriversChannel:
    """The channel of the engine: forwards offers to the channel of the driving process."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        self.offered = ""

    def offer(self, version: int, weights: Weights) -> bool:
        self._driver.send(("offer", version, weights.tensors if isinstance(weights, DescribedWeights) else None))
        for group in groups((name, value.detach().cpu().contiguous()) for name, value in weights):
            self._driver.send([spec(*named) for named in group])
            self._driver.send_tensors(group)
        self._driver.send(None)
        answer = self._driver.receive()
        if isinstance(answer, Exception):
            raise answer
        delivered, self.offered = answer
        return delivered


def serve_driver(connection: Connection, make: Callable[[Any, WeightChannel], RankVerbs]) -> None:
    """Runs the commands of the driving process until it closes the connection or ends. `make` builds the engine from
    its spec and the channel for weights."""
    driver = _Driver(connection)
    with suppress(_DriverGone):
        spec = driver.receive()
        try:
            made: RankVerbs | Exception = make(spec, cast(WeightChannel, _DriversChannel(driver)))
        except Exception as error:  # raised in the driving process by its first command
            made = _portable(error)
        while True:
            method, args = driver.receive()
            driver.send(("error", made) if isinstance(made, Exception) else _answer(made, method, args))


def _answer(verbs: RankVerbs, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "result", getattr(verbs, method)(*args)
    except _DriverGone:
        raise
    except Exception as error:  # raised in the driving process
        return "error", _portable(error)


def _portable(error: Exception) -> Exception:
    if (answer := portable(error, partial(RoleFailed, _NAME))) is not error:
        _log.error("the %s failed", _NAME, exc_info=error)
    return answer
