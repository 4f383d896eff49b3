"""A pool of engines, each in its own process.

A replica that dies is restarted with the current weights, and its requests are sent again. The random numbers of a
completion depend only on the request, so the repeated completion is the same.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from trivium.cluster.actors import ActorDied, Proxy, build_hosted, start_host
from trivium.cluster.weights import store
from trivium.engines.load_gate import LoadGate
from trivium.engines.pool import EnginePool, Replica, load_in_time, named
from trivium.engines.reporting import TokenReport
from trivium.foundation.errors import RoleFailed
from trivium.policy import EngineFailure, sampled
from trivium.protocols import RolloutEngine, StreamingEngine, WeightHandle, Weights
from trivium.types import Capabilities, Completion, Request, capabilities_of

if TYPE_CHECKING:
    from trivium.protocols.rollout import OnTokens

_log = logging.getLogger("trivium")


# --------------------------------------------------------------------------- engines in separate processes


class _Stream:
    """The tokens of a completion so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self._grown = asyncio.Event()

    def add(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self._grown.set()

    async def after(self, num_known: int) -> tuple[list[int], list[float]]:
        """Waits for tokens after the first `known`."""
        while len(self.tokens) <= num_known:
            self._grown.clear()
            await self._grown.wait()
        return self.tokens[num_known:], self.log_probs[num_known:]


class HostedEngine:
    """An engine in the process that hosts it."""

    def __init__(self, make: Callable[..., RolloutEngine], args: tuple[Any, ...]) -> None:
        self._engine = make(*args)
        self._streams = defaultdict[str, _Stream](_Stream)

    @property
    def facts(self) -> tuple[int, Capabilities, bool]:
        """(longest context, capabilities, whether it is a `StreamingEngine`)."""
        return self._engine.max_context, capabilities_of(self._engine), isinstance(self._engine, StreamingEngine)

    async def generate(self, request: Request) -> Completion:
        return await self._engine.generate(request)

    async def stream(self, name: str, request: Request) -> Completion:
        """One completion, which `tokens` follows by the name."""
        try:
            return await sampled(self._engine, request, self._streams[name].add)
        finally:
            self._streams.pop(name, None)

    async def tokens(self, name: str, num_known: int) -> tuple[list[int], list[float]]:
        """The tokens of a stream after the first `known`, as soon as one is sampled, and their log-probabilities. The
        call may arrive before its stream, or after it: the caller cancels it at the end."""
        try:
            return await self._streams[name].after(num_known)
        except asyncio.CancelledError:
            self._streams.pop(name, None)
            raise

    async def load(self, weights: WeightHandle, in_flight: str) -> None:
        """Loads weights from their handle."""
        await self._engine.load(weights.version, weights, in_flight=in_flight)

    async def close(self) -> None:
        await self._engine.close()


@dataclass(frozen=True)
class EngineSpec:
    """How to start the process of a replica, and how often to restart it."""

    make: Callable[..., RolloutEngine]
    """Called with `args` in the process of the replica."""
    args: tuple[Any, ...]
    run_dir: Path
    threads: int
    namespace: str
    max_restarts: int
    deadline_s: float
    """Deadline for starting a process and building its engine, and for loading weights."""
    num_gpus: float = 0


class ActorReplica(Replica):
    """An engine in its own process, which is restarted if it dies."""

    def __init__(self, name: str, spec: EngineSpec) -> None:
        self.name, self._spec = name, spec
        self._actor: Any = None
        self._engine: Any = None
        """The engine of the current process; None before the first one has started."""
        self._weights: WeightHandle | None = None
        """The weights that a new process starts with; none before the first load."""
        self._version: int | None = None
        """The loaded version; None before the first load."""
        self._gate = LoadGate()
        """Sends a load after the completions in progress have ended: Ray may deliver calls in another order."""
        self._num_deaths = 0
        self._restart: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_restarting(self) -> bool:
        return self._restart is not None

    @property
    def facts(self) -> tuple[int, Capabilities, bool]:
        return self._engine.facts

    async def start(self, dead: Proxy | None = None, died: ActorDied | None = None) -> None:
        """Starts a process in place of the `dead` one (None: the first process), and waits until it is ready. Several
        callers share one start. Raises the error of building its engine, and EngineFailure after more than
        `max_restarts` deaths."""
        if self._engine is not dead:
            return  # another caller has already restarted it
        if self._restart is None:
            self._restart = asyncio.ensure_future(self._start(died))
        await asyncio.shield(self._restart)  # the caller may be cancelled; others still need it

    async def generate(self, request: Request) -> Completion:
        return await self._sampled(lambda engine: engine.generate(request))

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        report = TokenReport(on_tokens)
        return report.end(await self._sampled(lambda engine: _followed(engine, request, report)))

    async def _sampled(self, call: Callable[[Any], Awaitable[Completion]]) -> Completion:
        """The result of a call to the engine, again in a new process if its process dies."""
        async with self._gate.completion():
            while True:
                engine = self._engine
                try:
                    return await call(engine)
                except ActorDied as died:
                    await self.start(engine, died)
                except EngineFailure as failed:
                    raise named(failed, self.name) from failed
                except RoleFailed as failed:
                    raise EngineFailure(
                        f"a completion from {self.name}", failed.cause, "see the engine's error in the log"
                    ) from failed

    async def load(self, weights: WeightHandle, in_flight: str) -> None:
        """Loads weights, if necessary into a restarted process."""
        async with AsyncExitStack() as order:
            if in_flight == "finish":
                await self._in_time(order.enter_async_context(self._gate.load()), weights)
            self._weights = weights
            while self._version != weights.version:  # `_start` may have loaded them into a new process
                engine = self._engine
                try:
                    await self._in_time(engine.load(weights, in_flight), weights)
                except ActorDied as died:
                    await self.start(engine, died)
                else:
                    self._version = weights.version

    async def _in_time(self, loading: Awaitable[None], weights: WeightHandle) -> None:
        """Waits for a part of the load. After the deadline, kills the process and raises EngineFailure."""
        try:
            await load_in_time(loading, lambda: self.name, weights.version, self._spec.deadline_s)
        except EngineFailure as failed:
            self._is_closed = True
            ray.kill(self._actor)
            raise named(failed, self.name) from failed

    async def close(self) -> None:
        """Ends the process, also one that is being started, and the completions in progress. Idempotent."""
        was_closed, self._is_closed = self._is_closed, True
        if (restart := self._restart) is not None:
            if self._actor is not None:
                ray.kill(self._actor)
            # Its error reaches those that wait for the new process.
            await asyncio.gather(asyncio.shield(restart), return_exceptions=True)
            return
        if was_closed or self._engine is None:
            return
        try:
            with suppress(ActorDied):
                await self._engine.close()
        finally:
            ray.kill(self._actor)

    async def _start(self, died: ActorDied | None) -> None:
        """Starts processes until one is ready and has loaded the current weights. Raises EngineFailure if the replica
        is closed meanwhile."""
        try:
            while True:
                if self._is_closed:
                    do = "build a new engine"
                    raise EngineFailure("a completion from the engine", "the engine was closed", do) from died
                if died is not None:
                    self._count_death(died)
                try:
                    engine = await self._start_process()
                    if (weights := self._weights) is not None:
                        await self._in_time(engine.load(weights, "finish"), weights)
                        self._version = weights.version
                    self._engine = engine
                    return
                except ActorDied as again:
                    died = again
        finally:
            self._restart = None

    def _count_death(self, died: ActorDied) -> None:
        """Raises EngineFailure if the replica has died more than `max_restarts` times."""
        self._num_deaths += 1
        if self._num_deaths > self._spec.max_restarts:
            raise EngineFailure(
                f"completions from {self.name}",
                f"it died {self._num_deaths} time(s), last: {died.cause}",
                "fix the cause (see its log), or raise cluster.max_restarts; the same command continues the run",
            ) from died
        _log.warning("%s died (%s); it is restarted", self.name, died.cause)

    async def _start_process(self) -> Proxy:
        """Starts a process and waits until its engine is built."""
        spec, name = self._spec, self.name + (f"~{self._num_deaths}" if self._num_deaths else "")
        actor = self._actor = start_host(
            name, spec.run_dir, spec.threads, namespace=spec.namespace, num_gpus=spec.num_gpus
        )
        try:
            async with asyncio.timeout(spec.deadline_s):
                return await build_hosted(actor, self.name, self.name, HostedEngine, spec.make, spec.args)
        except TimeoutError as error:
            ray.kill(actor)
            raise EngineFailure(
                f"start {name}",
                f"it was not ready after {spec.deadline_s:.0f} s",
                "look at its log, and at the free resources of the cluster (`ray status`); raise sync.deadline_s if "
                "it is slow",
            ) from error


async def _followed(engine: Any, request: Request, report: TokenReport) -> Completion:
    """One completion of a hosted engine. Reports its tokens while they are sampled."""
    name = uuid.uuid4().hex

    async def follow() -> None:
        with suppress(ActorDied):  # `whole` raises it
            while True:
                report.add(*await engine.tokens(name, len(report.tokens)))

    following = asyncio.ensure_future(follow())
    whole = asyncio.ensure_future(engine.stream(name, request))
    try:
        return await whole
    finally:
        following.cancel()


class ReplicatedEngine(EnginePool[ActorReplica]):
    """Replicas of one engine. Build it with `start`. It is a `StreamingEngine` if the engine is one."""

    stream: Callable[[Request, OnTokens], Awaitable[Completion]]

    @classmethod
    async def start(cls, spec: EngineSpec, names: Sequence[str]) -> ReplicatedEngine:
        """Starts a replica for each name. Raises the error of building an engine."""
        pool = cls([ActorReplica(name, spec) for name in names])
        await asyncio.gather(*(replica.start() for replica in pool.replicas))
        pool.max_context, capabilities, streams = pool.replicas[0].facts
        if streams:
            pool.stream = pool._stream
        # Not `updates_in_flight`: replicas change their weights at different tokens.
        pool.capabilities = Capabilities(
            exact_sampling=capabilities.exact_sampling, batch_invariant=capabilities.batch_invariant
        )
        return pool

    async def _stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        """One completion of the least busy replica."""
        async with self._least_busy() as replica:
            return await replica.stream(request, on_tokens)

    async def _load(self, version: int, weights: Weights, in_flight: str) -> None:
        handle = weights if isinstance(weights, WeightHandle) else await asyncio.to_thread(store, version, weights)
        await asyncio.gather(*(replica.load(handle, in_flight) for replica in self.replicas))

    async def close(self) -> None:
        """Ends the replicas, and the completions in progress."""
        closing = (replica.close() for replica in self.replicas)
        errors = [error for error in await asyncio.gather(*closing, return_exceptions=True) if error is not None]
        if errors:
            raise errors[0]
