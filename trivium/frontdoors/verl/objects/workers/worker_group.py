"""Worker groups: one process per place of a pool, with a worker of each role, over `cluster.actor_group`."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.cluster.actor_group import ActorGroup, put_inputs
from trivium.cluster.actors import Call
from trivium.cluster.pools import ResourcePool
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.verl.objects.workers.worker import Worker


@dataclass(frozen=True)
class RoleWorker:
    """The worker class of a role, and the constructor arguments of its instances on every rank."""

    worker: type[Worker]
    config: Any
    role: str

    @classmethod
    def of(cls, worker: object, config: object, role: str) -> RoleWorker:
        """`worker` is a subclass of Worker, or the result of `ray.remote` for one. Raises ConfigError for another."""
        remote = getattr(worker, "__ray_metadata__", None)
        kind = remote.modified_class if remote is not None else worker
        if not (isinstance(kind, type) and issubclass(kind, Worker)):
            raise ConfigError(f"{worker!r} as the class of workers", "it is no Worker", "derive it from Worker")
        return cls(kind, config, role)


class RankWorkers:
    """The workers of one process, by role."""

    def __init__(self, roles: Mapping[str, RoleWorker]) -> None:
        self._workers: dict[str, Any] = {
            name: role.worker(config=role.config, role=role.role)  # pyright: ignore[reportCallIssue]
            for name, role in roles.items()
        }

    def call(self, role: str, method: str, /, *args: object) -> object:
        """Calls a method of the worker of a role, and returns its result."""
        return getattr(self._workers[role], method)(*args)

    async def call_coroutine(self, role: str, method: str, /, *args: object) -> object:
        """Awaits a coroutine method of the worker of a role, and returns its result."""
        return await getattr(self._workers[role], method)(*args)


class RayWorkerGroup:
    """The processes of a pool, each with a worker of every role. `of_role` returns the view that calls one role."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        roles: Mapping[str, RoleWorker],
        *,
        run_dir: Path | None = None,
        threads: int = 1,
        deadline_s: float = 3600.0,
    ) -> None:
        """Returns once every worker is built. Raises a constructor's exception, and RoleFailed if a rank is missing.

        The names of the roles identify the group in errors and logs: rank 1 is `<roles>-rank-1`. The processes write to
        `log.txt` in `run_dir`, or to the terminal without one. `threads` is the number of threads for model work in
        each process. `deadline_s` limits every call.
        """
        self._roles, self._role = dict(roles), next(iter(roles))
        self._ranks = ActorGroup(
            "+".join(roles),
            resource_pool,
            RankWorkers,
            self._roles,
            run_dir=run_dir,
            threads=threads,
            deadline_s=deadline_s,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._ranks.names)

    def of_role(self, role: str) -> RayWorkerGroup:
        """Returns a view of the group: the same processes, whose workers of this role are called."""
        view = copy.copy(self)
        view._role = role
        return view

    def run(self, method: str, *args: object) -> list[Any]:
        """Returns the result of a method on each rank. Every rank receives the same arguments."""
        return self._ranks.results(self._calls(method, dict.fromkeys(range(self.world_size), put_inputs(*args))))

    def run_each(self, method: str, arguments: Sequence[object]) -> list[Any]:
        """Returns the result of a method on each rank. Each rank receives its own argument."""
        inputs = {rank: put_inputs(argument) for rank, argument in enumerate(arguments)}
        return self._ranks.results(self._calls(method, inputs))

    async def run_on(self, rank: int, method: str, *args: object) -> Any:
        """Returns the result of a method on one rank."""
        calls = self._calls(method, {rank: put_inputs(*args)})
        await self._ranks.settled(calls)
        return (await asyncio.to_thread(self._ranks.results, calls))[0]

    def shutdown(self) -> None:
        """Stops every process of the group, even during a call. This ends all views of the group."""
        self._ranks.shutdown()

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _calls(self, method: str, inputs: Mapping[int, Any]) -> list[Call]:
        is_coroutine = inspect.iscoroutinefunction(getattr(self._roles[self._role].worker, method))
        return self._ranks.call("call_coroutine" if is_coroutine else "call", inputs, self._role, method)
