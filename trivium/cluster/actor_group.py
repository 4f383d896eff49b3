"""A group of processes, on one machine or many, that run the same calls and fail together.

The first failure or death ends every waiting call at once with an error that names the process. After that the group
can only be shut down.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trivium.cluster.actors import MAX_CONCURRENCY, ActorDied, Call, Host, Inputs, causality
from trivium.cluster.pools import ResourcePool
from trivium.foundation.errors import RoleFailed, TriviumError

_POLL_S = 1.0
"""Interval at which a wait returns to Python, so that signals are handled."""
_GRACE_S = 3.0
"""After a rank failed, how long to wait for the death of another rank, which may be the cause."""
_END_S = 20.0
"""Deadline for processes to end."""


class RankHost:
    """Hosts the object of one rank, in the environment of torch.distributed."""

    def __init__(self) -> None:
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # functions block in their own thread
        self._object: Any = None
        self._store: Any = None

    def open_store(self) -> tuple[str, int]:
        """Opens the rendezvous store of the ranks. Returns its (address, port), which stays bound."""
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # listens on every interface
        return ray.util.get_node_ip_address(), self._store.port

    def build_rank(self, environment: Mapping[str, str], make: Callable[..., Any], args: Sequence[Any]) -> None:
        """Sets the environment of torch.distributed and builds the object."""
        os.environ.update(environment)
        if ray.get_gpu_ids():
            os.environ["LOCAL_RANK"] = "0"  # Ray shows each process only its own GPU
        self._object = make(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(self._object, name)


class ActorGroup:
    """One process per place of a pool. Each hosts the object that `make(*args)` builds."""

    def __init__(
        self,
        name: str,
        pool: ResourcePool,
        make: Callable[..., Any],
        *args: object,
        run_dir: Path | None,
        threads: int,
        deadline_s: float,
    ) -> None:
        """Returns once every object is built. Raises the error of a failed build, and RoleFailed if a build or a later
        call takes longer than `deadline_s`. Rank 1 is `<name>-rank-1` in logs and errors. `run_dir` as for `Actor`."""
        self._pool, self._releases = pool, not pool.placements
        self._deadline_s = deadline_s
        cpus, gpus = pool.admit()
        self.names = [f"{name}-rank-{rank}" for rank in range(pool.world_size)]
        """By rank."""
        self._actors: list[Any] = [
            ray.remote(Host)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=MAX_CONCURRENCY,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, placement.bundle),
            )
            .remote(rank_name, run_dir, threads)
            for rank_name, placement in zip(self.names, pool.placements, strict=True)
        ]
        self._is_shut_down = False
        self._caller = uuid.uuid4().hex
        self._numbers = [0] * len(self._actors)
        self._lock = threading.Lock()
        """Guards the order of calls, which is the same on all ranks."""
        self._lives = [Call(actor.live.remote(), name) for actor, name in zip(self._actors, self.names, strict=True)]
        """Calls that only the death of a process ends."""
        try:
            self._build(make, args)
        except BaseException:
            self.shutdown()
            raise

    def _build(self, make: Callable[..., Any], args: Sequence[Any]) -> None:
        """Builds all objects concurrently: their constructors may wait for one another."""
        placements = self._pool.placements
        built = [actor.build.remote(RankHost) for actor in self._actors]
        self.results([Call(ref, name) for ref, name in zip(built, self.names, strict=True)])
        ((address, port),) = self.results(self.call("open_store", {0: put_inputs()}))
        inputs: dict[int, ray.ObjectRef[Inputs]] = {}
        for rank, placement in enumerate(placements):
            environment = {
                "RANK": rank,
                "WORLD_SIZE": len(placements),
                "LOCAL_RANK": placement.bundle,
                "LOCAL_WORLD_SIZE": placement.local_size,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 already listens on the port
            }
            inputs[rank] = put_inputs({name: str(value) for name, value in environment.items()}, make, args)
        self.results(self.call("build_rank", inputs))

    def call(
        self,
        method: str,
        inputs: Mapping[int, ray.ObjectRef[Inputs]],
        *head: object,
        wanted: Collection[int] | None = None,
    ) -> list[Call]:
        """Calls a method of the objects on some ranks. `inputs` has a reference from `put_inputs` for each rank. Small
        arguments may be passed before them, in `head`. Only the `wanted` ranks return a value (None: all ranks)."""
        if self._is_shut_down:
            raise TriviumError(f"{method} of {self.names[0]}", "the group was shut down", "build a new group")
        calls: list[Call] = []
        with self._lock:
            for rank, rank_inputs in inputs.items():
                is_wanted = wanted is None or rank in wanted
                number = self._numbers[rank]
                ref = self._actors[rank].call_in_order.remote(
                    self._caller, number, method, rank_inputs, is_wanted, *head
                )
                self._numbers[rank] += 1
                calls.append(Call(ref, self.names[rank]))
        return calls

    def results(self, calls: Sequence[Call]) -> list[Any]:
        """The results of the calls. Raises the most probable first cause as soon as a call fails or a rank dies, and
        RoleFailed after `deadline_s`."""
        end = time.monotonic() + self._deadline_s
        waiting = {call.ref: number for number, call in enumerate(calls)}
        results: list[Any] = [None] * len(calls)
        while waiting:
            refs = [*(life.ref for life in self._lives), *waiting]
            poll_s = min(_POLL_S, max(end - time.monotonic(), 0.0))
            ready, _ = ray.wait(refs, num_returns=1, timeout=poll_s, fetch_local=False)
            if ready and (dead := self._dead()):  # asks again, since `ray.wait` returns an arbitrary ready reference
                raise self._death(dead[0])
            for ref in ready:
                number = waiting.pop(ref)
                answer = calls[number].answer()
                if answer.error is not None:
                    raise self._first_cause(answer.error, [calls[other] for other in waiting.values()])
                results[number] = answer.value
            if not ready and time.monotonic() >= end:
                silent = ", ".join(calls[number].actor for number in waiting.values())
                raise RoleFailed(silent, f"no answer after {self._deadline_s:.0f} s")
        return results

    async def settled(self, calls: Sequence[Call]) -> None:
        """Waits until all calls have ended, one call has failed or a rank has died."""
        waiting = {asyncio.ensure_future(call.answered()) for call in calls}
        while waiting and not self._dead():
            ended, waiting = await asyncio.wait(waiting, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result().error is not None for task in ended):
                break
        for task in waiting:
            task.cancel()

    async def watch(self) -> None:
        """Waits until a rank dies, and raises ActorDied, which names it."""
        waiting = {asyncio.ensure_future(life.answered()): life for life in self._lives}
        try:
            ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            raise self._death(waiting[ended.pop()])
        finally:
            for task in waiting:
                task.cancel()

    def shutdown(self) -> None:
        """Ends every process and releases their places. Idempotent."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        for actor in self._actors:
            ray.kill(actor)
        refs = [life.ref for life in self._lives]
        ray.wait(refs, num_returns=len(refs), timeout=_END_S, fetch_local=False)
        self._pool.leave()
        if self._releases:
            self._pool.release()

    def _first_cause(self, error: BaseException, others: Sequence[Call]) -> BaseException:
        """Returns the first cause among this error and those that other ranks raise within the grace time."""
        end, errors = time.monotonic() + _GRACE_S, [error]
        waiting = {call.ref: call for call in others}
        while waiting and (poll_s := end - time.monotonic()) > 0:
            refs = [*(life.ref for life in self._lives), *waiting]
            ready, _ = ray.wait(refs, num_returns=1, timeout=poll_s, fetch_local=False)
            if ready and (dead := self._dead()):
                return self._death(dead[0])
            errors += [other for ref in ready if (other := waiting.pop(ref).answer().error) is not None]
        return min(errors, key=causality)

    def _dead(self) -> list[Call]:
        """The ranks whose processes have ended."""
        refs = [life.ref for life in self._lives]
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return [life for life in self._lives if life.ref in ended]

    def _death(self, life: Call) -> BaseException:
        if self._is_shut_down:
            return TriviumError(
                f"an answer of {life.actor}", "the group was shut down", "await all calls before the shutdown"
            )
        return life.answer().error or ActorDied(life.actor, "its process has ended")


def put_inputs(*args: object, **kwargs: object) -> ray.ObjectRef[Inputs]:
    """Puts arguments into the object store once, for any number of ranks."""
    return ray.put((list(args), dict(kwargs)))
