"""Several rollout engines as one. A request goes to the least busy replica."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from trivium.foundation.concurrency import wait_for
from trivium.policy import EngineFailure
from trivium.protocols import Weights
from trivium.types import Capabilities, Completion, Request


class Replica(ABC):
    """One engine of a pool."""

    num_requests = 0
    """Number of requests in progress."""
    is_restarting = False
    """Whether requests must wait for a new process."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """One completion."""


R = TypeVar("R", bound=Replica)


def named(failed: EngineFailure, name: str) -> EngineFailure:
    """The error of an engine, with the name of its replica added."""
    suffix = "" if name in failed.asked else f" ({name})"
    return EngineFailure(f"{failed.asked}{suffix}", failed.found, failed.do)


async def load_in_time(loading: Awaitable[object], late: Callable[[], str], version: int, deadline_s: float) -> None:
    """Waits for the load of a version. After the deadline, raises an EngineFailure that names the `late` replicas,
    whose processes may still run."""
    try:
        await wait_for(deadline_s, loading)
    except TimeoutError as error:
        raise EngineFailure(
            f"version {version} in the engine of {late()}",
            f"it has not loaded it within {deadline_s:g} s, and its process has not ended",
            "look at its log and at the load of its machine; raise sync.deadline_s if it is only slow",
        ) from error


class EnginePool(ABC, Generic[R]):
    """Several engines as one. A request goes to the least busy replica. During a load, new requests wait."""

    max_context = 0
    capabilities = Capabilities()

    def __init__(self, replicas: Sequence[R]) -> None:
        self.replicas = list(replicas)
        self._version = 0
        self._loaded: asyncio.Event | None = None
        """Set at the end of the load in progress. Created for each load, since successive loads may use different event
        loops."""

    @property
    def version(self) -> int:
        """The version that every replica has loaded."""
        return self._version

    async def generate(self, request: Request) -> Completion:
        """One completion of the least busy replica. Raises EngineFailure if its engine fails."""
        async with self._least_busy() as replica:
            return await replica.generate(request)

    @asynccontextmanager
    async def _least_busy(self) -> AsyncGenerator[R]:
        """A replica for one request, after the load in progress."""
        if self._loaded is not None:
            await self._loaded.wait()
        replica = min(self.replicas, key=lambda replica: (replica.is_restarting, replica.num_requests))
        replica.num_requests += 1
        try:
            yield replica
        finally:
            replica.num_requests -= 1

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Loads the weights into every replica. `version` changes once all replicas have loaded them."""
        loaded = self._loaded = asyncio.Event()
        try:
            await self._load(version, weights, in_flight)
        finally:
            loaded.set()
            if self._loaded is loaded:  # else a later load has begun meanwhile
                self._loaded = None
        self._version = version

    @abstractmethod
    async def _load(self, version: int, weights: Weights, in_flight: str) -> None: ...
