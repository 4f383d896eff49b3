"""The engine of this process and engines of other processes of the run, as one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trivium.engines.pool import EnginePool, Replica, load_in_time, named
from trivium.engines.reporting import call_on
from trivium.foundation.concurrency import gather_or_cancel, wait_for
from trivium.foundation.errors import SyncError
from trivium.models.weights.stream import Described, Named, described
from trivium.policy import EngineFailure, sampled
from trivium.processes.answers import Failures
from trivium.processes.link import CLOSE, Call, Link, serve
from trivium.processes.sockets import Listening, connect
from trivium.processes.transfer import Incoming, Outgoing, send_to_all
from trivium.protocols import DescribedWeights, RestingEngine, RolloutEngine, StreamingEngine, TensorSpec, Weights
from trivium.types import Capabilities, Completion, Request, capabilities_of

if TYPE_CHECKING:
    from trivium.protocols.rollout import OnTokens

T = TypeVar("T")

_log = logging.getLogger("trivium")
_CLOSE_S = 60.0
"""How long an engine in another process may take to close."""


async def _load(
    engine: RolloutEngine, arriving: Incoming, version: int, tensors: tuple[TensorSpec, ...], in_flight: str
) -> None:
    try:
        await engine.load(version, Described(tensors, arriving), in_flight=in_flight)
    finally:  # an engine may still read after its load was cancelled
        arriving.fail(SyncError(f"the rest of version {version}", "its load has ended", "load the version again"))


async def _rest(engine: RolloutEngine) -> None:
    if isinstance(engine, RestingEngine):
        await engine.rest()


class EngineHost:
    """Serves an engine of this process to one other process. Closes the engine when that process ends or closes it."""

    def __init__(self, engine: RolloutEngine, host: str, key: bytes) -> None:
        """`host` is the address of this machine for the other process."""
        self._engine, self._listening = engine, Listening(host, key)
        self.address = self._listening.address
        self._num_completions = 0
        Thread(target=self._serve, name="trivium-engine-host", daemon=True).start()

    def _serve(self) -> None:
        with closing(self._listening):
            link = Link(self._listening.accept(), "engine-user")
        try:
            asyncio.run(self._serve_until_closed(link))
        finally:
            link.disconnect()

    async def _serve_until_closed(self, link: Link) -> None:
        await serve(link, self._run, Failures("the engine of this process", _failed))
        await self._engine.close()
        _log.info("this rank sampled %d completions", self._num_completions)

    async def _run(self, call: Call) -> Completion | None:
        if call.method == "load":
            return await _load(self._engine, call.weights, *call.args)
        if call.method == "rest":
            return await _rest(self._engine)
        (request,) = call.args
        completion = await sampled(self._engine, request, call.report if call.method == "stream" else None)
        self._num_completions += 1
        return completion


def _failed(text: str) -> EngineFailure:
    return EngineFailure("a completion", text, "look at the log of its process")


def _alone(named: tuple[str, Any]) -> list[Named]:
    """A group of one tensor: what the slowest engine may lag behind."""
    name, value = named
    return [(name, torch.as_tensor(value).detach().cpu().contiguous())]


class _OwnReplica(Replica):
    """The engine of this process."""

    name = "rank 0"

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def generate(self, request: Request) -> Completion:
        return await self.engine.generate(request)

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        return await sampled(self.engine, request, on_tokens)

    async def load(self, version: int, tensors: tuple[TensorSpec, ...], in_flight: str, loading: Outgoing) -> None:
        arriving = Incoming(loading.has_taken.set)
        loading.put = arriving.put
        await _load(self.engine, arriving, version, tensors, in_flight)

    async def rest(self) -> None:
        await _rest(self.engine)

    def disconnect(self) -> None:
        """Does nothing, since there is no connection."""

    async def close(self) -> None:
        await self.engine.close()


class _ProcessReplica(Replica):
    """An engine that another process hosts."""

    def __init__(self, name: str, address: tuple[str, int], key: bytes) -> None:
        self.name = name
        self._link = Link(connect(address, key), name, self._failure)

    async def generate(self, request: Request) -> Completion:
        return await self._answer(self._link.call("generate", request))

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        report = partial(call_on, asyncio.get_running_loop(), on_tokens)  # a thread receives the tokens
        return await self._answer(self._link.call("stream", request, on_part=report))

    async def load(self, version: int, tensors: tuple[TensorSpec, ...], in_flight: str, loading: Outgoing) -> None:
        await self._answer(self._link.call("load", version, tensors, in_flight, weights=loading))

    async def rest(self) -> None:
        await self._answer(self._link.call("rest"))

    async def _answer(self, answer: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(answer)
        except EngineFailure as failed:
            raise named(failed, self.name) from failed

    async def close(self) -> None:
        """Closes the engine of the other process, and waits until it is closed or the process has ended."""
        with suppress(EngineFailure, TimeoutError):  # the end of the connection, which is its only answer
            await asyncio.wait_for(asyncio.wrap_future(self._link.call(CLOSE)), _CLOSE_S)
        self.disconnect()

    def disconnect(self) -> None:
        """Ends the connection. The other process then closes its engine."""
        self._link.disconnect()

    def _failure(self) -> EngineFailure:
        return EngineFailure(f"completions of {self.name}", f"the process of {self.name} is gone", "look at its log")


class ProcessPool(EnginePool[_OwnReplica | _ProcessReplica]):
    """The engine of this process and those that other processes host. With exact sampling, completions do not depend on
    the process that samples them. It is a `StreamingEngine` or a `RestingEngine` if the engine of this process is."""

    def __init__(
        self, engine: RolloutEngine, others: Sequence[tuple[str, tuple[str, int]]], key: bytes, deadline_s: float
    ) -> None:
        """`others` has the (name, address) of each `EngineHost`. All engines must load weights, and go to rest, within
        `deadline_s`."""
        replicas = (_ProcessReplica(name, address, key) for name, address in others)
        super().__init__([_OwnReplica(engine), *replicas])
        self._deadline_s = deadline_s
        capabilities = capabilities_of(engine)
        # Not `updates_in_flight`: replicas change their weights at different tokens.
        self.capabilities = Capabilities(
            exact_sampling=capabilities.exact_sampling, batch_invariant=capabilities.batch_invariant
        )
        self.max_context = engine.max_context
        # These protocols are recognised by their methods, so a pool has the methods only if its engine has them.
        if isinstance(engine, StreamingEngine):
            self.stream = self._stream
        if isinstance(engine, RestingEngine):
            self.rest = self._rest

    async def _stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        """One completion of the least busy replica."""
        async with self._least_busy() as replica:
            return await replica.stream(request, on_tokens)

    async def _load(self, version: int, weights: Weights, in_flight: str) -> None:
        source = weights if isinstance(weights, DescribedWeights) else await asyncio.to_thread(described, weights)
        loadings = {replica: Outgoing() for replica in self.replicas}

        async def load_all() -> None:
            loads = [load(replica, loading) for replica, loading in loadings.items()]
            await gather_or_cancel([*loads, asyncio.to_thread(send_to_all, map(_alone, source), loadings.values())])

        async def load(replica: _OwnReplica | _ProcessReplica, loading: Outgoing) -> None:
            await replica.load(version, tuple(source.tensors), in_flight, loading)
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

    async def _rest(self) -> None:
        awake = set(self.replicas)

        async def rest(replica: _OwnReplica | _ProcessReplica) -> None:
            await replica.rest()
            awake.remove(replica)

        try:
            await wait_for(self._deadline_s, gather_or_cancel([rest(replica) for replica in self.replicas]))
        except TimeoutError as error:
            raise EngineFailure(
                f"rest of the engine of {', '.join(replica.name for replica in self.replicas if replica in awake)}",
                f"it does not rest after {self._deadline_s:g} s, and its process has not ended",
                "look at its log and at the load of its machine; raise sync.deadline_s if it is only slow",
            ) from error

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()
