"""The process of a rank: it runs the workers of one or several roles.

Methods run in one thread in call order, because collective operations need the same order on all ranks. Coroutines run
concurrently on the process's event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from trivium.cluster.actors import Call, Inputs
from trivium.engines.section import ENGINE_GPUS
from trivium.errors import ConfigError, DataError, RoleFailed, TriviumError
from trivium.frontdoors.verl.objects.workers.row_splitting import Piece
from trivium.training.launched import launched_ranks, this_rank


@dataclass(frozen=True)
class Place:
    """The share of the data that a rank receives."""

    data_rank: int
    data_size: int
    collects: bool = True
    """Whether the rank's result is collected. One rank per share collects."""


class Worker:
    """Base class of the ranks of a group. The group has the methods that `register` marks.

    From construction on, the environment holds the variables of torch.distributed (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Roles that share a process share its process group.
    """

    _place: Place | None = None
    _place_is_known = False

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    @property
    def local_rank(self) -> int:
        """Index of this process's device among the visible devices."""
        return int(os.environ["LOCAL_RANK"])

    def set_data_rank(self, data_rank: int, data_size: int, collects: bool = True) -> None:
        """Sets which of `data_size` shares this rank receives (default: one share per rank), and whether its result is
        collected for that share. Raises TriviumError after the first call that splits."""
        if self._place_is_known:
            raise TriviumError(
                f"rank {self.rank} as data rank {data_rank}",
                "batches were split already",
                "call set_data_rank in the constructor, or before the first call that splits",
            )
        self._place = Place(data_rank, data_size, collects)

    def place(self) -> Place:
        """Returns the share of this rank. `set_data_rank` raises afterwards."""
        self._place_is_known = True
        return self._place or Place(self.rank, self.world_size)


@dataclass(frozen=True)
class Pending:
    """A pending value of some ranks, in the form that is sent to other ranks."""

    calls: tuple[Call, ...]
    collect: Callable[[list[Any]], Any]

    def get(self, timeout_s: float = 3600.0) -> object:
        """Waits for the value. Raises the exception of the first failed rank, ActorDied if a rank died, and RoleFailed
        if a rank does not answer in time."""
        end, waiting = time.monotonic() + timeout_s, {call.ref: number for number, call in enumerate(self.calls)}
        values: list[Any] = [None] * len(self.calls)
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(end - time.monotonic(), 0.0))
            if not done:
                silent = ", ".join(self.calls[number].actor for number in waiting.values())
                raise RoleFailed(silent, f"no answer after {timeout_s:.0f} s")
            number = waiting.pop(done[0])
            values[number] = self.calls[number].answer().unwrap()
        return self.collect(values)


@dataclass(frozen=True)
class WorkerCall:
    """A call of a worker's method, without its arguments."""

    role: str
    method: str
    splits: bool = False
    """Whether arguments with rows arrive as Pieces, and the result is returned as a Piece."""
    materialize: bool = True
    deadline_s: float = 3600.0

    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Inputs, Piece]:
        """Returns the arguments with pending values resolved, and the Piece that they belong to."""
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        if self.materialize:
            given = {
                name: value.get(self.deadline_s) if isinstance(value, Pending) else value
                for name, value in given.items()
            }
        pieces = {name: value for name, value in given.items() if isinstance(value, Piece)}
        if len({(piece.rows, piece.padding) for piece in pieces.values()}) > 1:
            shares = ", ".join(f"argument {name} {piece.rows} and {piece.padding}" for name, piece in pieces.items())
            raise DataError(
                f"the arguments of {self.method} as shares of one batch",
                f"rows and, of all shares, padding: {shares}",
                "give all arguments the same number of rows; pass the result of `get()` instead of such a future",
            )
        values = {name: value.value if name in pieces else value for name, value in given.items()}
        piece = next(iter(pieces.values()), Piece(None, 0))
        return ([values[place] for place in range(len(args))], {name: values[name] for name in kwargs}), piece


class RankWorkers:
    """The workers of one process, by role."""

    def __init__(self, roles: Mapping[str, Any]) -> None:
        """Builds each worker from its class and arguments (`RayClassWithInitArgs`)."""
        self._workers: dict[str, Any] = {role: made.cls(*made.args, **made.kwargs) for role, made in roles.items()}
        for worker in list(self._workers.values()):  # a fused worker holds workers of its own
            self._workers |= {role: getattr(worker, role) for role in getattr(worker, "fused", {})}

    def call(self, call: WorkerCall, /, *args: object, **kwargs: object) -> object:
        """Calls a method and returns its result."""
        (args_there, kwargs_there), piece = call.resolved(args, kwargs)
        result = getattr(self._workers[call.role], call.method)(*args_there, **kwargs_there)
        return piece.made(result) if call.splits else result

    async def call_coroutine(self, call: WorkerCall, /, *args: object, **kwargs: object) -> object:
        """Awaits a coroutine method and returns its result."""
        if any(isinstance(value, Pending) for value in (*args, *kwargs.values())):
            (args_there, kwargs_there), piece = await asyncio.to_thread(call.resolved, args, kwargs)
        else:
            (args_there, kwargs_there), piece = call.resolved(args, kwargs)
        result = await getattr(self._workers[call.role], call.method)(*args_there, **kwargs_there)
        return piece.made(result) if call.splits else result


def takes_gpus_of_ranks(number: int) -> bool:
    """Whether this rank hosts a rollout engine over its GPU and those of the ranks that follow on its machine, `number`
    in all. Sets `ENGINE_GPUS`. All ranks, which see one GPU each, must call it. Raises ConfigError if `number` does not
    divide the ranks of the machine."""
    if number == 1:
        return True
    import torch.distributed as dist  # torch reads the environment that the process of the rank sets

    places: list[Any] = [None] * launched_ranks()
    own = (ray.util.get_node_ip_address(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if len(places) > 1:
        dist.all_gather_object(places, own)
    else:
        places = [own]
    here = [rank for rank, (address, _) in enumerate(places) if address == own[0]]
    if len(here) % number:
        raise ConfigError(
            f"a rollout engine over {number} GPUs",
            f"{len(here)} ranks on this machine",
            "choose a divisor of the ranks of a machine (tensor_parallel_size x data_parallel_size)",
        )
    first = here.index(this_rank())
    if own[1]:
        os.environ[ENGINE_GPUS] = ",".join(places[rank][1] for rank in here[first : first + number])
    return first % number == 0
