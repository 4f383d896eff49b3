"""Calls between two processes of a run over one connection. Either end may call.

Messages are pickled: both ends are one program, and the connection is private or takes a key (`sockets`).

The kinds of messages are `call`, `answer` and `cancel`; `part` is an early part of an answer; `weights` is a group of
tensors that belongs to a call, and `taken` reports that the receiver has begun to read that group. All of them carry
the number of the call.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from trivium.foundation.errors import TriviumError, text_of
from trivium.models.weights.stream import receive_together, send_together, spec
from trivium.processes.answers import Answer, Failures
from trivium.processes.transfer import Group, Incoming, Outgoing

_CLOSE_S = 60.0
"""How long the threads of a link may take to end."""
CANCEL, CLOSE = "cancel", "close"
"""Methods of special calls: `CANCEL` cancels the earlier call with the same number, `CLOSE` is the last call."""
_NO_WEIGHTS = Incoming(lambda: None)
"""Stands for the weights of a call that has none. Reading it would wait forever."""


class Disconnected(Exception):
    """The other process has ended, or one end has closed the connection."""


@dataclass(frozen=True)
class Call:
    """A call that the other process has made."""

    link: Link
    number: int
    method: str
    args: tuple[Any, ...]
    weights: Incoming = _NO_WEIGHTS
    """The weights that the other process sends with the call, if it sends any."""

    def report(self, *part: object) -> None:
        """Sends an early part of the answer: calls `on_part` of the caller with it."""
        self.link.report(self.number, part)

    def answer(self, answer: Answer) -> None:
        """Ends the call."""
        self.link.answer(self.number, answer)


class _OpenCall(NamedTuple):
    """A call of this process that is not answered."""

    future: Future[Any]
    weights: Outgoing | None
    on_part: Callable[..., object] | None


class Link:
    """One end of a connection. A thread sends, another one receives: a process that hangs blocks neither end."""

    def __init__(self, connection: Connection, name: str, lost: Callable[[], Exception] = Disconnected) -> None:
        """`name` names the threads. `lost` makes the error of a call whose process has ended."""
        self._connection, self._lost = connection, lost
        self.calls = SimpleQueue[Call | None]()
        """The calls of the other process, in order; None once it has ended or closed the connection."""
        self._numbers = count()
        self._unsent = SimpleQueue[tuple[bytes, Group] | None]()
        self._waiting: dict[int, _OpenCall] = {}
        """By the numbers of their calls."""
        self._serving: dict[int, Incoming] = {}
        """Weights of the calls of the other process that are not answered."""
        self._is_disconnected = False
        self._failing = Lock()
        self._receiving = Thread(target=self._receive_all, name=f"trivium-{name}", daemon=True)
        self._sending = Thread(target=self._send_all, name=f"trivium-to-{name}", daemon=True)
        self._receiving.start()
        self._sending.start()

    def call(
        self,
        method: str,
        *args: object,
        weights: Outgoing | None = None,
        on_part: Callable[..., object] | None = None,
    ) -> Future[Any]:
        """Calls the other process, without waiting. Cancelling the future cancels the call there. The future raises the
        error of the call, or `lost()`. The thread that receives calls `on_part` with early parts of the answer, in
        order."""
        number, future = next(self._numbers), Future[Any]()
        if weights is not None:
            weights.put = partial(self._send, "weights", number, None)
        self._waiting[number] = _OpenCall(future, weights, on_part)
        future.add_done_callback(partial(self._settled, number))
        if self._is_disconnected:
            self._fail(future)
        else:
            self._send("call", number, (method, args, weights is not None))
        return future

    def answer(self, number: int, answer: Answer) -> None:
        """Sends the answer of a call of the other process."""
        self._serving.pop(number, None)
        self._send("answer", number, (answer.value, answer.error))

    def report(self, number: int, part: tuple[object, ...]) -> None:
        """Sends an early part of the answer of a call of the other process."""
        self._send("part", number, part)

    def disconnect(self) -> None:
        """Ends both threads, even during a read or a write."""
        if self._connection.closed:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)  # fails if the other process has ended
        for thread in (self._receiving, self._sending):  # they must end before the connection is closed
            thread.join(_CLOSE_S)
        self._connection.close()

    # ------------------------------------------------------------------ sending

    def _send(self, kind: str, number: int, content: object, group: Group = ()) -> None:
        specs = [spec(name, tensor) for name, tensor in group]
        message = io.BytesIO()
        pickle.dump((kind, number, specs), message)
        pickle.dump(content, message)  # apart: the other process may fail to read it, for example lack a class
        # Not `getbuffer`: Python 3.13 warns where it frees a buffer with a view, for example of a message never sent.
        self._unsent.put((message.getvalue(), group))

    def _send_all(self) -> None:
        with suppress(OSError):  # the other process has ended; the receiving thread fails the waiting calls
            while self._send_next():
                pass

    def _send_next(self) -> bool:
        message = self._unsent.get()  # a local variable: its tensors are freed before the next wait
        if message is None:
            return False
        self._connection.send_bytes(message[0])
        if message[1]:
            send_together(self._connection, message[1])
        return True

    def _settled(self, number: int, future: Future[Any]) -> None:
        """Called when a call of this process is answered, fails or is cancelled. After a cancellation, the caller must
        end the weights itself."""
        outgoing = self._waiting.pop(number).weights
        if future.cancelled():
            self._send(CANCEL, number, None)
        elif outgoing is not None:
            outgoing.end()

    # ------------------------------------------------------------------ receiving

    def _receive_all(self) -> None:
        try:
            with suppress(EOFError, ConnectionError):  # the other process has ended
                while True:
                    self._receive_next()
        finally:
            self._end()

    def _receive_next(self) -> None:
        """Waits for a message, and passes it to the call that it belongs to."""
        message = io.BytesIO(self._connection.recv_bytes())
        kind, number, specs = pickle.load(message)
        group = [*receive_together(self._connection, specs)] if specs else []
        incoming, waiting = self._serving.get(number), self._waiting.get(number)
        future, outgoing, on_part = waiting or (None, None, None)
        try:
            content = pickle.load(message)
        except Exception as error:
            unread = TriviumError(
                f"a message ({kind}) of another process", f"{text_of(error)}", "send objects that both processes know"
            )
            if kind == "call":
                self._send("answer", number, (None, unread))
            elif future is not None and future.set_running_or_notify_cancel():
                future.set_exception(unread)
            return
        if kind == "call":
            method, args, has_weights = content
            weights = Incoming(partial(self._send, "taken", number, None)) if has_weights else _NO_WEIGHTS
            if has_weights:
                self._serving[number] = weights
            self.calls.put(Call(self, number, method, args, weights))
        elif kind == CANCEL:
            self._serving.pop(number, None)
            self.calls.put(Call(self, number, CANCEL, ()))
        elif kind == "weights" and incoming is not None:
            incoming.put(group)
        elif kind == "taken" and outgoing is not None:
            outgoing.has_taken.set()
        elif kind == "part" and on_part is not None:
            on_part(*content)
        elif kind == "answer" and future is not None and future.set_running_or_notify_cancel():
            value, error = content
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        # Any other message belongs to a call that has ended here.

    def _end(self) -> None:
        """Fails the open calls of this process and the weights that it receives, and ends the sending thread."""
        self._is_disconnected = True
        self._unsent.put(None)
        for waiting in [*self._waiting.values()]:
            self._fail(waiting.future)
        for incoming in [*self._serving.values()]:
            incoming.fail(self._lost())
        self.calls.put(None)

    def _fail(self, future: Future[Any]) -> None:
        with self._failing:  # `call` and `_end` may fail the same future
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(self._lost())


async def serve(link: Link, start: Callable[[Call], Awaitable[Any]], failures: Failures) -> None:
    """Runs the calls of the other process concurrently, until it ends or makes the last call (`CLOSE`). Then cancels
    the calls in progress."""

    async def run(call: Call) -> None:
        try:
            answer = Answer(await start(call))
        except Exception as error:
            answer = failures.answer(error)
        call.answer(answer)

    tasks = dict[int, asyncio.Task[None]]()
    while (call := await asyncio.to_thread(link.calls.get)) is not None and call.method != CLOSE:
        number = call.number
        if call.method == CANCEL:
            if number in tasks:
                tasks[number].cancel()
            continue
        tasks[number] = asyncio.ensure_future(run(call))
        tasks[number].add_done_callback(lambda _, number=number: tasks.pop(number))
    for task in [*tasks.values()]:
        task.cancel()
