"""Engines in other processes of a run, and one of this process, as one engine.

Messages are pickled: both ends are one program, and share a key without which nothing is read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from threading import Thread
from typing import Any

from trivium.engines.pool import EnginePool, Replica, load_in_time
from trivium.errors import TriviumError
from trivium.policy import EngineFailure
from trivium.protocols import RolloutEngine, Weights
from trivium.types import Capabilities, Completion, Request, capabilities_of

_log = logging.getLogger("trivium")
_CLOSE_S = 60.0
"""How long an engine in another process may take to close."""


class EngineHost:
    """Lets one other process use an engine of this one, which is closed when that process goes, or closes it."""

    def __init__(self, engine: RolloutEngine, host: str, key: bytes) -> None:
        """`host` is this machine's address for the other process."""
        self._engine, self._listener = engine, Listener((host, 0), authkey=key)
        self.address: tuple[str, int] = self._listener.address  # pyright: ignore[reportAttributeAccessIssue]
        self._num_completions = 0
        Thread(target=self._serve, name="trivium-engine-host", daemon=True).start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept() as connection:
            asyncio.run(self._answer_all(connection))

    async def _answer_all(self, connection: Connection) -> None:
        weights, calls = list[tuple[str, Any]](), dict[int, asyncio.Task[None]]()
        while (message := await asyncio.to_thread(_received, connection)) is not None:
            number, what, value = message
            if what == "close":
                break
            if what == "weight":
                weights.append(value)
            elif what == "cancel":
                if number in calls:
                    calls[number].cancel()
            else:
                given, weights = (weights, []) if what == "load" else (None, weights)
                calls[number] = asyncio.ensure_future(self._answer(connection, number, value, given))
                calls[number].add_done_callback(lambda _, number=number: calls.pop(number))
        for call in [*calls.values()]:
            call.cancel()
        await self._engine.close()
        _log.info("this rank sampled %d completions", self._num_completions)

    async def _answer(
        self, connection: Connection, number: int, value: Any, weights: list[tuple[str, Any]] | None
    ) -> None:
        try:
            if weights is None:
                result = await self._engine.generate(value)
                self._num_completions += 1
            else:
                version, in_flight = value
                result = await self._engine.load(version, weights, in_flight=in_flight)
            answer = number, result, None
        except Exception as error:  # raised in the other process, which may not know its class
            answer = number, None, _portable(error)
        connection.send_bytes(pickle.dumps(answer))


def _portable(error: Exception) -> Exception:
    """An error that any process can unpickle: an error of Trivium as it is, any other as an EngineFailure."""
    if isinstance(error, TriviumError) and type(error).__module__.partition(".")[0] == "trivium":
        return error
    _log.error("the engine of this process failed", exc_info=error)
    return EngineFailure("a completion", f"{type(error).__name__}: {error}", "look at the log of its process")


def _received(connection: Connection) -> Any:
    """The next message; None where the other process is gone."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return None


class _OwnReplica(Replica):
    """The engine of this process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def generate(self, request: Request) -> Completion:
        return await self.engine.generate(request)

    async def load(self, version: int, weights: Sequence[tuple[str, Any]], in_flight: str) -> None:
        await self.engine.load(version, weights, in_flight=in_flight)

    async def close(self) -> None:
        await self.engine.close()


class _ProcessReplica(Replica):
    """An engine that another process hosts."""

    def __init__(self, name: str, address: tuple[str, int], key: bytes, deadline_s: float) -> None:
        self._name, self._connection, self._deadline_s = name, Client(address, authkey=key), deadline_s
        self._numbers = count()
        self._unsent = SimpleQueue[bytes | tuple[int, str, Any] | None]()
        """Messages, of which weights are pickled one by one. A process that hangs reads nothing: only a thread may
        wait until it does."""
        self._waiting: dict[int, Future[Any]] = {}
        self._is_gone = False
        self._receiving = Thread(target=self._receive, name=f"trivium-{name}", daemon=True)
        self._receiving.start()
        self._sending = Thread(target=self._send_all, name=f"trivium-to-{name}", daemon=True)
        self._sending.start()

    async def generate(self, request: Request) -> Completion:
        return await self._call("generate", request)

    async def load(self, version: int, weights: Sequence[tuple[str, Any]], in_flight: str) -> None:
        for weight in () if self._is_gone else weights:
            self._unsent.put((-1, "weight", weight))
        try:
            await load_in_time(self._call("load", (version, in_flight)), self._name, version, self._deadline_s)
        except EngineFailure:
            self._disconnect()
            raise

    async def close(self) -> None:
        """Returns once the other process has closed its engine, or is gone."""
        if not self._is_gone:
            self._send(-1, "close", None)
            await asyncio.to_thread(self._receiving.join, _CLOSE_S)
        self._disconnect()

    async def _call(self, what: str, value: object) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        try:
            if self._is_gone:
                raise self._failure()
            self._send(number, what, value)
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._send(number, "cancel", None)
            raise
        finally:
            self._waiting.pop(number, None)

    def _disconnect(self) -> None:
        """Ends both threads, also one that waits in a read or a write; the other process closes its engine."""
        if self._connection.closed:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)
        for thread in (self._receiving, self._sending):  # neither uses a connection that is closed under it
            thread.join(_CLOSE_S)
        self._connection.close()

    def _send(self, number: int, what: str, value: object) -> None:
        self._unsent.put(pickle.dumps((number, what, value)))

    def _send_all(self) -> None:
        while (message := self._unsent.get()) is not None:
            try:
                self._connection.send_bytes(message if isinstance(message, bytes) else pickle.dumps(message))
            except OSError:
                return  # the process is gone, as the other thread notices, which tells all who wait

    def _receive(self) -> None:
        while (message := _received(self._connection)) is not None:
            number, result, error = message
            future = self._waiting.pop(number, None)
            if future is None or not future.set_running_or_notify_cancel():
                continue  # its caller was cancelled
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._is_gone = True
        self._unsent.put(None)
        for future in [*self._waiting.values()]:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure())

    def _failure(self) -> EngineFailure:
        return EngineFailure(f"completions of {self._name}", "its process is gone", "look at its log")


class ProcessPool(EnginePool[_OwnReplica | _ProcessReplica]):
    """An engine of this process and those that others host: what is sampled does not depend on where."""

    def __init__(
        self, own: RolloutEngine, others: Sequence[tuple[str, tuple[str, int]]], key: bytes, deadline_s: float
    ) -> None:
        """`others` are (name, address) of each `EngineHost`, which has to load weights within `deadline_s`."""
        replicas = (_ProcessReplica(name, address, key, deadline_s) for name, address in others)
        super().__init__([_OwnReplica(own), *replicas])
        each = capabilities_of(own)
        # Not `updates_in_flight`: they change their weights at different tokens, which a caller cannot rely on.
        self.capabilities = Capabilities(exact_sampling=each.exact_sampling, batch_invariant=each.batch_invariant)
        self.max_context = own.max_context

    async def _load(self, version: int, weights: Weights, in_flight: str) -> None:
        named = await asyncio.to_thread(list, weights)
        await asyncio.gather(*(replica.load(version, named, in_flight) for replica in self.replicas))

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()
