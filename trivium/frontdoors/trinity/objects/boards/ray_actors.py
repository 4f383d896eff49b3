"""The board of a name on a Ray cluster: a detached actor that ends some time after its last user."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from trivium.cluster.actors import ActorDied, Host, Proxy, death_cause, start_host
from trivium.cluster.weight_store import BoardAndWeights
from trivium.cluster.weights import ObjectStoreChannel
from trivium.foundation.board import SharedBoard
from trivium.foundation.concurrency import Heartbeat, ProcessLife, ProgressDeadline
from trivium.foundation.errors import RoleFailed
from trivium.frontdoors.trinity.objects.boards.remote_calls import Shared, ray_session
from trivium.processes.answers import Answer
from trivium.protocols import Weights

USER_S = 60.0
"""Seconds without a heartbeat after which a process of another machine counts as ended."""
_UNUSED_S = 20.0
"""Seconds that the actor stays alive without a user."""
_REPLACED_S = 30.0
"""Seconds that an ending actor may keep its name."""


@dataclass
class _User:
    life: ProcessLife
    seen: float
    """The time of its last heartbeat, on the actor's clock."""

    def alive(self) -> bool:
        near = self.life.host == socket.gethostname()
        return self.life() if near else time.monotonic() - self.seen < USER_S


class NamespaceHost(Host):
    """Holds a board while processes use it, and the results of `.remote` calls until they are fetched."""

    def __init__(self, name: str, run_dir: None, threads: int) -> None:
        super().__init__(name, run_dir, threads)
        self._users: dict[str, _User] = {}
        self._results: dict[str, asyncio.Future[Answer]] = {}
        self._ending = False
        self._watching: asyncio.Task[None] | None = None

    async def join(self, key: str, life: ProcessLife) -> bool:
        """Registers a process, with an empty board if no other process is registered. Returns False if this actor is
        about to end."""
        if self._ending:
            return False
        if self._watching is None:
            self._watching = asyncio.create_task(self._end_unused())
        if not self._living():
            self._object = BoardAndWeights()
            self._built.set()
        self._users[key] = _User(life, time.monotonic())
        return True

    async def beat(self, key: str, life: ProcessLife) -> None:
        """Records a heartbeat of a process."""
        self._users[key] = _User(life, time.monotonic())

    async def leave(self, key: str) -> None:
        """Unregisters a process."""
        self._users.pop(key, None)

    async def is_alive(self, life: ProcessLife) -> bool:
        """Whether a registered process lives."""
        return any(user.life == life and user.alive() for user in self._users.values())

    def _living(self) -> bool:
        self._users = {key: user for key, user in self._users.items() if user.alive()}
        return bool(self._users)

    async def _end_unused(self) -> None:
        """Ends this actor after `_UNUSED_S` without a user."""
        since = time.monotonic()
        while time.monotonic() - since < _UNUSED_S:
            await asyncio.sleep(_UNUSED_S / 10)
            since = time.monotonic() if self._living() else since
        self._ending = True
        ray.kill(ray.get_runtime_context().current_actor)

    async def result(self, key: str) -> Any:
        """Waits for the result of a call. Raises the error of the call."""
        try:
            return (await self._future(key)).unwrap()
        finally:
            self._results.pop(key, None)

    async def set_result(self, key: str, answer: Answer) -> None:
        """Stores the result of a finished call."""
        self._future(key).set_result(answer)

    def _future(self, key: str) -> asyncio.Future[Answer]:
        return self._results.setdefault(key, asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class Handle:
    """An actor that is usable while this process keeps its current connection to Ray."""

    name: str
    actor: ActorHandle[NamespaceHost]
    session: str = field(default_factory=ray_session)

    def __reduce__(self) -> tuple[type[Handle], tuple[object, ...]]:
        return Handle, (self.name, self.actor)

    def __getattr__(self, method: str) -> Any:
        if ray_session() != self.session:  # without this check, Ray would start a new instance for the call
            raise RoleFailed(self.name, "this process has left Ray, or joined another cluster")
        return getattr(self.actor, method)


class RayCalls:
    """Makes references to the results of calls that run in this process."""

    def __init__(self, actor: Handle) -> None:
        self._actor = actor

    def submit(self, call: Callable[[], Any]) -> ray.ObjectRef[Any]:
        key = uuid.uuid4().hex
        reference: Any = self._actor.result.remote(key)

        def hand_over(done: Future[Any]) -> None:
            error = done.exception()
            if ray_session() == self._actor.session:
                self._actor.set_result.remote(key, Answer(error=error) if error is not None else Answer(done.result()))

        asyncio.run_coroutine_threadsafe(_result_of(call), _loop()).add_done_callback(hand_over)
        return reference


async def _result_of(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if asyncio.iscoroutine(result) else result


class StateDicts:
    """Weights in Ray's object store. They are lost when the process that offered them ends."""

    def __init__(self, shared: Shared, *, keep: int) -> None:
        self._table = Proxy(shared.host, shared.name, uuid.uuid4().hex)
        self._channel = ObjectStoreChannel(self._table, keep=keep)

    def offer(self, version: int, weights: Weights) -> bool:
        return self._channel.offer(version, weights)

    def collect(self, version: int) -> Weights:
        return self._channel.collect(version)

    @property
    def versions(self) -> tuple[int, ...]:
        return self._channel.versions


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop, in a separate thread, for calls of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="trivium-remote-calls", daemon=True).start()
    return loop


def join(namespace: str, name: str) -> Shared:
    """Joins the board with this name. The first process starts the actor; Ray's own deadlines bound the start."""
    key, life, deadline = uuid.uuid4().hex, ProcessLife.of(os.getpid()), ProgressDeadline(_REPLACED_S)
    while True:
        host: Any = start_host(name, None, 1, namespace=namespace, existing=True, kind=NamespaceHost, detached=True)
        actor: Any = Handle(f"the {name} of {namespace!r}", host)
        try:
            if ray.get(actor.join.remote(key, life)):
                break
        except RayError as error:
            if not deadline.left_s:
                raise ActorDied(f"{name} of {namespace!r}", death_cause(error)) from error
        time.sleep(_REPLACED_S / 100)  # the previous actor is about to end
    heartbeat = Heartbeat(lambda: ray.get(actor.beat.remote(key, life)), USER_S / 4, name)
    heartbeat.__enter__()

    def leave() -> None:
        heartbeat.__exit__()
        if ray_session() == actor.session:
            ray.get(actor.leave.remote(key))

    def is_alive(other: ProcessLife) -> bool:
        return other() if other.host == life.host else ray.get(actor.is_alive.remote(other))

    table: Any = Proxy(actor, name, key)
    return Shared(namespace, name, SharedBoard(table), RayCalls(actor), actor, leave, is_alive)
