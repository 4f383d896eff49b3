"""Several replicas of a rollout engine, each a process of its own, as one engine.

A request goes to the least busy replica. A replica that dies is started again with the current weights, and what it was
asked is asked again: the numbers that sample a reply belong to the request, so the repetition is the same reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from trivium.cluster.remote import Gone, build_in, start_host
from trivium.cluster.weights import Stored, fetched, store
from trivium.errors import RoleFailed
from trivium.policy import EngineFailure
from trivium.protocols import RolloutEngine, Weights
from trivium.types import Completion, Request

_log = logging.getLogger("trivium")


class Replica:
    """An engine in the process that hosts it."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @property
    def facts(self) -> tuple[int, bool, bool]:
        """(longest context, whether it samples exactly, whether batches change bits)."""
        engine = self._engine
        return engine.max_context, engine.exact_sampling, getattr(engine, "batch_invariant", False)

    async def generate(self, request: Request) -> Completion:
        return await self._engine.generate(request)

    async def load(self, stored: Stored, in_flight: str) -> None:
        """Fetches weights from the object store, verifies and adopts them."""
        await self._engine.load(stored.version, await fetched(stored), in_flight=in_flight)

    async def close(self) -> None:
        await self._engine.close()


@dataclass(frozen=True)
class Recipe:
    """How the process of a replica is made."""

    make: Callable[..., RolloutEngine]
    args: tuple[Any, ...]
    run_dir: Path
    threads: int
    namespace: str
    num_gpus: float = 0


def _replica(make: Callable[..., RolloutEngine], args: tuple[Any, ...]) -> Replica:
    return Replica(make(*args))


@dataclass(eq=False)
class _Seat:
    """The place of one replica, whichever process fills it."""

    name: str
    actor: Any = None
    proxy: Any = None
    version: int | None = None
    """The version it was given; none yet where it holds the model as it was built."""
    busy: int = 0
    deaths: int = 0
    filling: asyncio.Task[None] | None = None
    """Somebody is starting a new process for it."""


class ReplicatedEngine:
    """One engine made of several. Build it with `start`."""

    exact_sampling = True
    batch_invariant = False

    def __init__(self, recipe: Recipe, names: Sequence[str], *, max_restarts: int, deadline_s: float) -> None:
        self._recipe, self._max_restarts, self._deadline_s = recipe, max_restarts, deadline_s
        self._seats = [_Seat(name) for name in names]
        self._stored: Stored | None = None
        """The weights that a new replica starts with; none before the first load."""
        self._version, self._max_context = 0, 0
        self._open = asyncio.Event()
        """Cleared while weights are loaded: later requests wait for them."""
        self._open.set()
        self._closed = False

    @classmethod
    async def start(
        cls, recipe: Recipe, names: Sequence[str], *, max_restarts: int, deadline_s: float
    ) -> ReplicatedEngine:
        """Starts a replica per name. Raises what building an engine raises."""
        engine = cls(recipe, names, max_restarts=max_restarts, deadline_s=deadline_s)
        await asyncio.gather(*(engine._refilled(seat, None, None) for seat in engine._seats))
        engine._max_context, engine.exact_sampling, engine.batch_invariant = engine._seats[0].proxy.facts
        return engine

    @property
    def version(self) -> int:
        """The version that every replica has loaded."""
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    async def generate(self, request: Request) -> Completion:
        """One reply of the least busy replica.

        Raises EngineFailure where a replica died more than `max_restarts` times.
        """
        await self._open.wait()
        while True:
            seat = min(self._seats, key=lambda seat: (seat.filling is not None, seat.busy))
            proxy = seat.proxy
            seat.busy += 1
            try:
                return await proxy.generate(request)
            except Gone as gone:
                await self._refilled(seat, proxy, gone)
            except RoleFailed as failed:
                raise EngineFailure(
                    f"a reply from {seat.name}", failed.cause, "look at the engine's own error in the log"
                ) from failed
            finally:
                seat.busy -= 1

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Has every replica adopt the weights. The version is the loaded one once all of them have it."""
        self._open.clear()
        try:
            given = list(weights)
            lies = given[0][1] if given else None
            self._stored = lies if isinstance(lies, Stored) else await asyncio.to_thread(store, version, given)
            await asyncio.gather(*(self._load(seat, self._stored, in_flight) for seat in self._seats))
        finally:
            self._open.set()
        self._version = version

    async def _load(self, seat: _Seat, stored: Stored, in_flight: str) -> None:
        while seat.version != stored.version:
            proxy = seat.proxy
            try:
                await proxy.load(stored, in_flight)
                seat.version = stored.version
            except Gone as gone:
                await self._refilled(seat, proxy, gone)

    async def close(self) -> None:
        """Ends the replicas, and the replies in progress."""
        self._closed = True
        seats = [seat for seat in self._seats if seat.proxy is not None]
        results = await asyncio.gather(*(seat.proxy.close() for seat in seats), return_exceptions=True)
        for seat in seats:
            ray.kill(seat.actor)
        errors = [result for result in results if isinstance(result, Exception) and not isinstance(result, Gone)]
        if errors:
            raise errors[0]

    async def _refilled(self, seat: _Seat, dead: Any, gone: Gone | None) -> None:
        """Waits until another process than the `dead` one fills the seat."""
        if seat.proxy is not dead:
            return  # others noticed before, and it is done
        if seat.filling is None:
            seat.filling = asyncio.ensure_future(self._fill(seat, gone))
        await asyncio.shield(seat.filling)  # one who waits may give up; the others still need it

    async def _fill(self, seat: _Seat, gone: Gone | None) -> None:
        try:
            while True:
                if gone is not None:
                    self._mourn(seat, gone)
                try:
                    seat.actor, proxy = await self._process(seat)
                    if (stored := self._stored) is not None:
                        await proxy.load(stored, "finish")
                        seat.version = stored.version
                    seat.proxy = proxy
                    return
                except Gone as again:
                    gone = again
        finally:
            seat.filling = None

    def _mourn(self, seat: _Seat, gone: Gone) -> None:
        if self._closed:
            raise EngineFailure("a reply from the engine", "the engine was closed", "build a new engine") from gone
        seat.deaths += 1
        if seat.deaths > self._max_restarts:
            raise EngineFailure(
                f"replies from {seat.name}", f"it died {seat.deaths} time(s), last: {gone.cause}",
                "mend the cause (its log says more), or raise cluster.max_restarts; the same command continues the run",
            ) from gone  # fmt: skip
        _log.warning("%s died (%s); it is started again", seat.name, gone.cause)

    async def _process(self, seat: _Seat) -> tuple[Any, Any]:
        """A new process for the seat, its engine built: (actor, proxy)."""
        recipe, name = self._recipe, seat.name + (f"~{seat.deaths}" if seat.deaths else "")
        actor = start_host(name, recipe.run_dir, recipe.threads, namespace=recipe.namespace, num_gpus=recipe.num_gpus)
        try:
            async with asyncio.timeout(self._deadline_s):
                return actor, await build_in(actor, seat.name, seat.name, _replica, recipe.make, recipe.args)
        except TimeoutError as error:
            raise EngineFailure(
                f"start {name}", f"it was not ready after {self._deadline_s:.0f} s",
                "look at its log, and at what the cluster has left (`ray status`); raise sync.deadline_s if it is slow",
            ) from error  # fmt: skip
