"""The results of requests, which clients fetch later, and the order in which a model works on its requests."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from trivium.foundation.concurrency import Turns
from trivium.foundation.errors import DataError, RolloutError, TriviumError, text_of
from trivium.serving.bodies import RequestError, bad_request

_log = logging.getLogger("trivium")
POLL_S = 25.0
"""Longest time that a poll waits for a result; the SDK waits 45 s."""
_GAP_S = 60.0
"""Longest wait for a request whose number comes before that of one that has arrived."""
_MAX_PENDING, _MAX_BYTES, _MAX_BYTES_OF_ALL = 4096, 2**30, 2**32
"""How many requests of a session may be pending, or have a result that it has not fetched; their bytes; those of all
sessions."""
_FETCHED = 64
"""How many results of a session stay after they were fetched: a response may be lost."""
Work = Callable[[], Awaitable["Mapping[str, Any] | bytes"]]


class PendingResult:
    """The result of a request: JSON values, a protobuf message as bytes, or an error."""

    def __init__(self, session_id: str, verb: str, size: int = 0) -> None:
        """`size` is that of the request in bytes."""
        self.id, self.session_id, self.verb = uuid.uuid4().hex, session_id, verb
        self.size = size
        """How many bytes it takes: of the request, and once it has ended, of the result."""
        self.outcome: asyncio.Future[Mapping[str, Any] | bytes] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.fetched = False
        """Whether the client has the result, or has cancelled the request."""

    async def run(self, work: Work) -> None:
        """Works, unless the request has ended already."""
        try:
            result = b"" if self.outcome.done() else await work()
            if not self.outcome.done():
                self.outcome.set_result(result)
                self.size = len(result) if isinstance(result, bytes) else 0
        except Exception as error:
            if not self.outcome.done():
                self.size = 0
                self.outcome.set_exception(error)
            self.outcome.exception()  # else asyncio logs an error that no client fetches

    @property
    def is_held(self) -> bool:
        """Whether the request is pending, or its client is yet to fetch the result."""
        return not self.outcome.done() or not self.fetched

    def cancel(self) -> None:
        """Ends the request now, unless it waits in the queue of a model. Its client does not want the result."""
        self.fetched = True
        if self.task is not None:
            self.fail(bad_request("", "the result", "the request was cancelled", "send it again"))
            self.task.cancel()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, unless it has ended."""
        if not self.outcome.done():
            self.size = 0
            self.outcome.set_exception(error)
            self.outcome.exception()  # else asyncio logs an error that no client fetches

    @property
    def failed(self) -> bool:
        return self.outcome.exception() is not None

    @property
    def is_message(self) -> bool:
        return not self.failed and isinstance(self.outcome.result(), bytes)

    def body(self) -> bytes:
        """The result as the SDK reads it; an error is one that it raises. Logs those of the service itself."""
        error = self.outcome.exception()
        if error is None:
            result = self.outcome.result()
            return result if isinstance(result, bytes) else json.dumps(result).encode()
        if not isinstance(error, TriviumError) and not self.fetched:
            _log.error("a request of a Tinker client failed", exc_info=error)
        of_user = isinstance(error, DataError | RolloutError | RequestError)
        text = str(error) if isinstance(error, TriviumError) else f"{type(error).__name__}: {text_of(error)}"
        return json.dumps({"error": text, "category": "user" if of_user else "server"}).encode()


class Futures:
    """The pending and finished requests of the service."""

    def __init__(self, drop_silent: Callable[[], object]) -> None:
        """`drop_silent` finishes the sessions of clients that have left."""
        self._drop_silent = drop_silent
        self._all: dict[str, PendingResult] = {}
        """By id."""
        self._known: dict[tuple[str, int], PendingResult] = {}
        """By (session or model, number): the SDK repeats a request whose response it has not received."""

    def known(self, owner: str, number: int | None, verb: str) -> PendingResult | None:
        """The future of a request that arrived before. Raises RequestError for a number that another verb has."""
        future = None if number is None else self._known.get((owner, number))
        if future is not None and future.verb != verb:
            found = f"it is that of a request {future.verb}"
            raise bad_request("seq_id", f"the request {verb} with number {number}", found, "use a new number")
        return future

    def add(
        self, session_id: str, owner: str, number: int | None, verb: str, size: int = 0, work: Work | None = None
    ) -> PendingResult:
        """A new future of a request whose body has `size` bytes, with `work` of one that starts at once. Raises
        RequestError (429) if too many results of the session are pending or not fetched, or too large, or too large
        with those of all sessions."""
        held_by_all = self._held()
        if sum(each.size for each in held_by_all) + size > _MAX_BYTES_OF_ALL:
            self._drop_silent()
            held_by_all = self._held()
        held = [each for each in held_by_all if each.session_id == session_id]
        here, of_all = (sum(each.size for each in group) for group in (held, held_by_all))
        is_large = (here and here + size > _MAX_BYTES) or (of_all and of_all + size > _MAX_BYTES_OF_ALL)
        if len(held) >= _MAX_PENDING or is_large:
            found = f"{len(held)} others of {here:,} bytes are pending or not fetched; {of_all:,} of all clients"
            do = "fetch results, or send fewer at once: "
            do += f"at most {_MAX_PENDING} and {_MAX_BYTES:,} bytes, and {_MAX_BYTES_OF_ALL:,} bytes of all clients"
            raise RequestError(429, "one more request", found, do, code="too_many_requests", retry_after_s=1)
        future = self._all[future.id] = PendingResult(session_id, verb, size)
        if number is not None:
            self._known[owner, number] = future
        if work is not None:
            future.task = asyncio.create_task(future.run(work))
        if len(self._all) - len(held_by_all) > _FETCHED:
            self.forget(*[each for each in self._of(session_id) if not each.is_held][:-_FETCHED])
        return future

    def _held(self) -> list[PendingResult]:
        return [each for each in self._all.values() if each.is_held]

    def _of(self, session_id: str) -> list[PendingResult]:
        """Those of a session, oldest first."""
        return [each for each in self._all.values() if each.session_id == session_id]

    def forget(self, *futures: PendingResult) -> None:
        """Drops results that no one will ask for again."""
        for future in futures:
            del self._all[future.id]
        self._known = {key: each for key, each in self._known.items() if each.id in self._all}

    def finish(self, session_id: str) -> None:
        """Ends the requests of a session, whose results no one will ask for."""
        for future in (futures := self._of(session_id)):
            future.cancel()
            future.fail(DataError("a result", "its session is finished", "create a new ServiceClient"))
        self.forget(*futures)

    def find(self, id: str) -> PendingResult | None:
        return self._all.get(id)

    async def fetch(self, id: str) -> PendingResult:
        """The finished request. Raises RequestError: 408 if it is still pending, 410 if it is unknown."""
        future = self._all.get(id)
        if future is None:
            found = "the service was started again since, its session is finished, or it was fetched long ago"
            do = "send the request again; after a restart, create the model from its last saved state"
            raise RequestError(410, f"the result of request {id[:64]}", found, do, code="unknown_request")
        await asyncio.wait({future.outcome}, timeout=POLL_S)
        if not future.outcome.done():
            raise RequestError(408, "the result", "the request is still pending", "ask again")
        return future

    async def close(self) -> None:
        """Ends everything that is pending."""
        for future in self._all.values():
            future.cancel()
        tasks = [each.task for each in self._all.values() if each.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class QueuedRequest:
    """A request of a model, which has failed already if it was refused."""

    future: PendingResult
    work: Work
    failed: Callable[[], object] | None = None
    """Called in the request's turn if it failed."""


class OrderedWork:
    """The requests of one model, which are done one after the other, in the order of their numbers, whatever the order
    in which they arrive. The models take turns."""

    def __init__(self, turns: Turns, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """`turns` admits one model at a time; `spawn` starts a coroutine in the background."""
        self._turns, self._spawn = turns, spawn
        self._waiting: dict[int, QueuedRequest] = {}
        """By number."""
        self._next = 1
        self._arrived = asyncio.Event()
        self._running = False

    def put(self, number: int | None, request: QueuedRequest) -> None:
        """Queues a request. Raises RequestError for a number whose turn has passed."""
        number = max([self._next - 1, *self._waiting]) + 1 if number is None else number
        if number < self._next or number in self._waiting:
            found = f"it has arrived, or those up to {self._next - 1} are done or given up"
            raise bad_request("seq_id", f"the request with number {number}", found, "use a new number")
        self._waiting[number] = request
        self._arrived.set()
        if not self._running:
            self._running = True
            self._spawn(self._run())

    def fail(self, found: str) -> None:
        """Ends all queued requests with an error."""
        for request in self._waiting.values():
            request.future.fail(DataError("a request of a model", found, "create a client from a saved state"))
        self._waiting.clear()
        self._arrived.set()  # else the worker waits for the next number

    async def _run(self) -> None:
        while self._waiting:
            self._arrived.clear()
            if self._next in self._waiting:
                request = self._waiting.pop(self._next)
                self._next += 1  # before its work: this number has had its turn
                async with self._turns:
                    await request.future.run(request.work)
                    if request.future.failed and request.failed is not None:
                        request.failed()
                continue
            try:
                async with asyncio.timeout(_GAP_S):
                    await self._arrived.wait()
            except TimeoutError:
                missing, self._next = self._next, min(self._waiting)
                found = f"request {missing} of this model did not arrive, and this one must follow it"
                do = "send both again; the gradient since the last step may lack data"
                self._waiting[self._next].future.fail(DataError(f"request {self._next} of the model", found, do))
        self._running = False
