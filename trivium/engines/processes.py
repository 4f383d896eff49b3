"""The engine of this process and engines of other processes of the run, as one engine.

Messages are pickled: both ends are one program, and a shared key authenticates them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import torch

from trivium.concurrency import gather_or_cancel
from trivium.engines.pool import EnginePool, Replica, load_in_time
from trivium.errors import SyncError, portable
from trivium.models.weights.stream import Described, Named, described, parts_of, receive, spec
from trivium.policy import EngineFailure
from trivium.protocols import DescribedWeights, RolloutEngine, TensorSpec, Weights
from trivium.types import Capabilities, Completion, Request, capabilities_of

_log = logging.getLogger("trivium")
_CLOSE_S = 60.0
"""How long an engine in another process may take to close."""
_TAKEN = "taken"
"""The message of a process for each tensor of a load that its engine has taken."""


class _Arriving:
    """Weights that arrive one at a time. The engine reads them in its own thread."""

    def __init__(self, taken: Callable[[], None]) -> None:
        """Calls `taken` when the engine takes a tensor."""
        self._taken = taken
        self._given = SimpleQueue[Named | SyncError | None]()

    def put(self, named: Named | SyncError | None) -> None:
        """Adds a tensor; None ends the weights; an error reports that the rest will not arrive."""
        self._given.put(named)

    def __iter__(self) -> Iterator[Named]:
        while (named := self._given.get()) is not None:
            if isinstance(named, SyncError):
                raise named
            self._taken()
            yield named
            del named  # before the next one comes


async def _load(
    engine: RolloutEngine, version: int, tensors: tuple[TensorSpec, ...], in_flight: str, arriving: _Arriving
) -> None:
    try:
        await engine.load(version, Described(tensors, arriving), in_flight=in_flight)
    finally:  # an engine may still read after its load was cancelled
        arriving.put(SyncError(f"the rest of version {version}", "its load has ended", "load the version anew"))


class EngineHost:
    """Serves an engine of this process to one other process. Closes the engine when that process ends or closes it."""

    def __init__(self, engine: RolloutEngine, host: str, key: bytes) -> None:
        """`host` is the address of this machine for the other process."""
        self._engine, self._listener = engine, Listener((host, 0), authkey=key)
        self.address: tuple[str, int] = self._listener.address  # pyright: ignore[reportAttributeAccessIssue]
        self._num_completions = 0
        self._arriving: _Arriving | None = None
        """The weights of the newest load."""
        self._sending = Lock()
        Thread(target=self._serve, name="trivium-engine-host", daemon=True).start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept() as connection:
            _send_at_once(connection)
            asyncio.run(self._answer_all(connection))

    async def _answer_all(self, connection: Connection) -> None:
        calls = dict[int, asyncio.Task[None]]()
        while (message := await asyncio.to_thread(self._next_call, connection)) is not None:
            number, what, value = message
            if what == "close":
                break
            if what == "cancel":
                if number in calls:
                    calls[number].cancel()
                continue
            if what == "load":
                self._arriving = _Arriving(partial(self._send, connection, (number, _TAKEN, None)))
                call = partial(_load, self._engine, *value, self._arriving)
            else:
                call = partial(self._generate, value)
            calls[number] = asyncio.ensure_future(self._answer(connection, number, call))
            calls[number].add_done_callback(lambda _, number=number: calls.pop(number))
        for call in [*calls.values()]:
            call.cancel()
        await self._engine.close()
        _log.info("this rank sampled %d completions", self._num_completions)

    def _next_call(self, connection: Connection) -> Any:
        """Reads the next message, and passes tensors to the newest load. Returns None if the other process has
        ended."""
        with suppress(EOFError, ConnectionError):
            while (message := pickle.loads(connection.recv_bytes()))[1] == "weight":
                named = message[2] and receive(connection, *message[2])
                if self._arriving is not None:
                    self._arriving.put(named)
                del named  # before the next one comes
            return message
        return None

    async def _generate(self, request: Request) -> Completion:
        completion = await self._engine.generate(request)
        self._num_completions += 1
        return completion

    async def _answer(self, connection: Connection, number: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            answer = number, await call(), None
        except Exception as error:  # raised in the other process, which may lack its class
            if (answered := portable(error, _failed)) is not error:
                _log.error("the engine of this process failed", exc_info=error)
            answer = number, None, answered
        self._send(connection, answer)

    def _send(self, connection: Connection, answer: tuple[int, Any, Exception | None]) -> None:
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):  # it ended, which the reader detects
            connection.send_bytes(pickle.dumps(answer))


def _failed(text: str) -> EngineFailure:
    return EngineFailure("a completion", text, "look at the log of its process")


def _send_at_once(connection: Connection) -> None:
    """Disables Nagle's algorithm, which would delay each tensor by 40 ms."""
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _received(connection: Connection) -> Any:
    """Reads the next message. Returns None if the other process has ended."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return None


class _Loading:
    """The load of one engine, one tensor at a time."""

    def __init__(self) -> None:
        self.put: Callable[[Named | None], None]
        """Set before the first tensor is given."""
        self.has_taken = Event()
        """Set when the engine has taken the last tensor, or needs no more."""
        self.has_taken.set()
        self.is_over = False

    def give(self, named: Named | None) -> None:
        """Passes the next tensor to the engine; None ends the weights."""
        self.has_taken.clear()
        if self.is_over:  # checked after `clear`, since `end` may be called in between
            self.has_taken.set()
        else:
            self.put(named)

    def end(self) -> None:
        """The engine needs no more."""
        self.is_over = True
        self.has_taken.set()


def _give_all(weights: Weights, loadings: Collection[_Loading]) -> None:
    """Reads the weights. Reads a tensor once every engine has taken the previous one."""
    for name, value in weights:
        named = name, torch.as_tensor(value).detach().cpu().contiguous()
        for loading in loadings:
            loading.give(named)
        del value, named  # frees the tensor before the next one is read
        for loading in loadings:
            loading.has_taken.wait()
        if all(loading.is_over for loading in loadings):
            return
    for loading in loadings:
        loading.give(None)


class _OwnReplica(Replica):
    """The engine of this process."""

    name = "rank 0"

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def generate(self, request: Request) -> Completion:
        return await self.engine.generate(request)

    async def load(self, version: int, tensors: tuple[TensorSpec, ...], in_flight: str, loading: _Loading) -> None:
        arriving = _Arriving(loading.has_taken.set)
        loading.put = arriving.put
        await _load(self.engine, version, tensors, in_flight, arriving)

    def disconnect(self) -> None:
        """Does nothing, since there is no connection."""

    async def close(self) -> None:
        await self.engine.close()


class _ProcessReplica(Replica):
    """An engine that another process hosts."""

    def __init__(self, name: str, address: tuple[str, int], key: bytes) -> None:
        self.name, self._connection = name, Client(address, authkey=key)
        _send_at_once(self._connection)
        self._numbers = count()
        self._unsent = SimpleQueue[tuple[bytes | memoryview, ...] | None]()
        """Messages for the sending thread. A write blocks while the other process hangs."""
        self._waiting: dict[int, tuple[Future[Any], Event]] = {}
        self._is_gone = False
        self._receiving = Thread(target=self._receive, name=f"trivium-{name}", daemon=True)
        self._receiving.start()
        self._sending = Thread(target=self._send_all, name=f"trivium-to-{name}", daemon=True)
        self._sending.start()

    async def generate(self, request: Request) -> Completion:
        return await self._call("generate", request)

    async def load(self, version: int, tensors: tuple[TensorSpec, ...], in_flight: str, loading: _Loading) -> None:
        loading.put = self._send_weight
        await self._call("load", (version, tensors, in_flight), loading.has_taken)

    async def close(self) -> None:
        """Closes the engine of the other process, and waits until it is closed or the process has ended."""
        if not self._is_gone:
            self._send(-1, "close", None)
            await asyncio.to_thread(self._receiving.join, _CLOSE_S)
        self.disconnect()

    async def _call(self, what: str, value: object, has_taken: Event | None = None) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future, has_taken or Event()
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

    def disconnect(self) -> None:
        """Ends both threads, even during a read or a write. The other process then closes its engine."""
        if self._connection.closed:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)
        for thread in (self._receiving, self._sending):  # they must end before the connection is closed
            thread.join(_CLOSE_S)
        self._connection.close()

    def _send(self, number: int, what: str, value: object) -> None:
        self._unsent.put((pickle.dumps((number, what, value)),))

    def _send_weight(self, named: Named | None) -> None:
        if named is None:
            self._send(-1, "weight", None)
            return
        name, tensor = named
        self._unsent.put((pickle.dumps((-1, "weight", spec(name, tensor))), *parts_of(tensor)))

    def _send_all(self) -> None:
        with suppress(OSError):  # the process ended; the receiving thread fails the waiting calls
            while self._send_next():
                pass

    def _send_next(self) -> bool:
        message = self._unsent.get()
        for part in message or ():
            self._connection.send_bytes(part)
        return message is not None

    def _receive(self) -> None:
        while (message := _received(self._connection)) is not None:
            number, result, error = message
            future, has_taken = self._waiting.get(number, (None, None))
            if future is None or has_taken is None:
                continue  # its caller was cancelled
            if isinstance(result, str):
                has_taken.set()
                continue
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._is_gone = True
        self._unsent.put(None)
        for future, _ in [*self._waiting.values()]:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure())

    def _failure(self) -> EngineFailure:
        return EngineFailure(f"completions of {self.name}", "its process is gone", "look at its log")


class ProcessPool(EnginePool[_OwnReplica | _ProcessReplica]):
    """The engine of this process and those that other processes host. Completions do not depend on the process that
    samples them."""

    def __init__(
        self, own: RolloutEngine, others: Sequence[tuple[str, tuple[str, int]]], key: bytes, deadline_s: float
    ) -> None:
        """`others` has the (name, address) of each `EngineHost`. All engines must load weights within `deadline_s`."""
        replicas = (_ProcessReplica(name, address, key) for name, address in others)
        super().__init__([_OwnReplica(own), *replicas])
        self._deadline_s = deadline_s
        each = capabilities_of(own)
        # Not `updates_in_flight`: replicas change their weights at different tokens.
        self.capabilities = Capabilities(exact_sampling=each.exact_sampling, batch_invariant=each.batch_invariant)
        self.max_context = own.max_context

    async def _load(self, version: int, weights: Weights, in_flight: str) -> None:
        given = weights if isinstance(weights, DescribedWeights) else await asyncio.to_thread(described, weights)
        loadings = {replica: _Loading() for replica in self.replicas}

        async def load_all() -> None:
            loads = [load(replica, loading) for replica, loading in loadings.items()]
            await gather_or_cancel([*loads, asyncio.to_thread(_give_all, given, loadings.values())])

        async def load(replica: _OwnReplica | _ProcessReplica, loading: _Loading) -> None:
            await replica.load(version, tuple(given.tensors), in_flight, loading)
            loading.end()

        def late() -> list[_OwnReplica | _ProcessReplica]:
            return [replica for replica, loading in loadings.items() if not loading.has_taken.is_set()]

        def names() -> str:
            return ", ".join(replica.name for replica in late()) or "every rank: they wait for weights"

        try:
            await load_in_time(load_all(), names, version, self._deadline_s)
        except EngineFailure as error:
            if isinstance(error.__cause__, TimeoutError):  # they run, but do not answer
                for replica in late():
                    replica.disconnect()
            raise
        finally:
            for loading in loadings.values():
                loading.end()

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()
