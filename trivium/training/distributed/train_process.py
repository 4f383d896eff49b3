"""A train engine in a separate process, on the machine of the driving process.

Python runs one thread of a process at a time: with thousands of rollouts in the same process, an update would wait for
the interpreter lock at every operation.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trivium.foundation.concurrency import HeartbeatTracker, ProcessLife
from trivium.foundation.errors import ProcessDied, RoleFailed
from trivium.models.weights.stream import Described, Named, groups
from trivium.processes.answers import Answer, Failures
from trivium.processes.link import Disconnected, Link
from trivium.processes.transfer import Incoming, Outgoing, send_to_all
from trivium.protocols import DescribedWeights, WeightChannel, Weights

if TYPE_CHECKING:
    from trivium.training.distributed.data_parallel import RankVerbs

T = TypeVar("T")

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
    raises ProcessDied, as after any other death.
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
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                # It finds the modules that this process finds, and no others (`-P`). An empty entry is the working
                # directory.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                pass_fds=[theirs.fileno()],
                process_group=0,  # only this process gets Ctrl-C and ends the run
            )
        self.pid = self._process.pid
        Thread(target=self._watch, name="trivium-trainer", daemon=True).start()
        self._link = Link(ours, "train-process")
        self._link.call("build", spec)

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

    def _wait_for(self, arrives: Callable[[], T]) -> T:
        """Calls a function that waits for the other process."""
        self._waits += 1
        try:
            return arrives()
        finally:
            self._waits += 1

    def run_on_all_ranks(self, method: str, *args: object) -> Any:
        with self._calls:
            self._call = f"the call {method!r} of {time.strftime('%H:%M:%S')}"
            result = self._link.call(method, *args)
            result.add_done_callback(lambda _: self._link.calls.put(None))
            try:
                while (offer := self._wait_for(self._link.calls.get)) is not None:
                    offer.answer(self._offer(offer.weights, *offer.args))
                return result.result()
            except Disconnected as error:
                code = self._exit_code()
                raise ProcessDied(_NAME, self._stall or f"it ended with exit code {code}") from error

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], *args: object) -> list[Any]:
        return [self.run_on_all_ranks(method, *shares[0], *args)]

    def close(self) -> None:
        """Ends the process and waits for it. Kills it if a call in progress does not finish within `_CLOSE_S`, or
        sooner if the process is stopped or hangs."""
        self._is_closing = True
        if not (is_idle := self._calls.acquire(timeout=_CLOSE_S)):
            self._process.kill()
            is_idle = self._calls.acquire(timeout=_CLOSE_S)
        self._link.disconnect()
        if is_idle:
            self._calls.release()
        self._exit_code()

    def _offer(self, incoming: Incoming, version: int, tensors: tuple[Any, ...] | None) -> Answer:
        """Answers an offer of weights. The process waits for it, and raises an error in the call in progress."""
        failures = Failures("the channel of weights", partial(RoleFailed, "the channel of weights"))
        return failures.answer_of(partial(self._delivered, incoming, version, tensors))

    def _delivered(self, incoming: Incoming, version: int, tensors: tuple[Any, ...] | None) -> tuple[bool, str]:
        """Offers weights to the channel. Returns (whether they were delivered, their hash)."""
        arriving = self._arriving(incoming)
        delivered = self._channel.offer(version, arriving if tensors is None else Described(tensors, arriving))
        return delivered, getattr(self._channel, "offered", "")

    def _arriving(self, incoming: Incoming) -> Iterator[Named]:
        weights = iter(incoming)
        while (named := self._wait_for(partial(next, weights, None))) is not None:
            yield named
            del named  # before the next one comes

    def _exit_code(self) -> int:
        """Waits for the end of the process, whose connection is closed."""
        try:
            return self._wait_for(partial(self._process.wait, _CLOSE_S))
        except subprocess.TimeoutExpired:
            _log.warning("the %s has not ended after %.0f s: it is killed", _NAME, _CLOSE_S)
            self._process.kill()
            return self._process.wait()


class _DriversChannel:
    """The channel of the engine: forwards offers to the channel of the driving process."""

    def __init__(self, driver: Link) -> None:
        self._driver = driver
        self.offered = ""

    def offer(self, version: int, weights: Weights) -> bool:
        tensors, outgoing = weights.tensors if isinstance(weights, DescribedWeights) else None, Outgoing()
        offered = self._driver.call("offer", version, tensors, weights=outgoing)
        send_to_all(groups((name, value.detach().cpu().contiguous()) for name, value in weights), [outgoing])
        delivered, self.offered = offered.result()
        return delivered


def serve_driver(connection: Connection, make: Callable[[Any, WeightChannel], RankVerbs]) -> None:
    """Runs the commands of the driving process until it closes the connection or ends. `make` builds the engine from
    its spec and the channel for weights; its error is the answer of every command."""
    driver = Link(connection, "driver", partial(RoleFailed, "run's process", "it has ended"))
    failures = Failures(f"the {_NAME}", partial(RoleFailed, _NAME))
    channel = cast(WeightChannel, _DriversChannel(driver))
    engine: Answer | None = None
    for call in iter(driver.calls.get, None):
        if engine is None:
            engine = failures.answer_of(partial(make, *call.args, channel))
            call.answer(Answer())
        elif engine.error is not None:
            call.answer(engine)
        else:
            run = partial(getattr(engine.value, call.method), *call.args)
            call.answer(failures.answer_of(run))
    driver.disconnect()
