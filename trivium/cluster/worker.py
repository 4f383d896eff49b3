"""What runs in the process of a rank: the workers of one or several roles, and whoever calls them.

Methods run in one thread, in the order in which they were called: collective operations need one order on all ranks.
Coroutines run on the process's event loop meanwhile, any number at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from trivium.cluster.remote import Answer, Gone, Process, awaited, reason
from trivium.cluster.rows import Piece
from trivium.errors import DataError, RoleFailed, TriviumError


@dataclass(frozen=True)
class Place:
    """Which share of the data a rank is given."""

    data_rank: int
    data_size: int
    collects: bool = True
    """Whether its result counts: that of one rank among those that are given the same share."""


class Worker:
    """Base of the classes whose instances are the ranks of a group; what `register` marks is called on all of them.

    Where it is built, and later, the environment holds what torch.distributed reads (RANK, WORLD_SIZE, LOCAL_RANK,
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
        """Which of the devices that this process sees is its own."""
        return int(os.environ["LOCAL_RANK"])

    def set_data_rank(self, data_rank: int, data_size: int, collects: bool = True) -> None:
        """Says which of `data_size` shares this rank is given (unsaid: one for each rank), and whether its result is
        the one that counts among the ranks of that share. Not after the first call that splits."""
        if self._place_is_known:
            raise TriviumError(
                f"rank {self.rank} as data rank {data_rank}", "batches were split already",
                "say it where the worker is built, or in a method that is called before",
            )  # fmt: skip
        self._place = Place(data_rank, data_size, collects)

    def place(self) -> Place:
        """Which share this rank is given; settled from now on."""
        self._place_is_known = True
        return self._place or Place(self.rank, self.world_size)


@dataclass(frozen=True)
class Part:
    """What one rank will have answered."""

    ref: Any
    owner: str

    def answer(self) -> Answer:
        """The answer, which is there; the rank's death is an answer too."""
        try:
            return ray.get(self.ref)
        except RayError as error:
            return Answer(error=Gone(self.owner, reason(error)))


@dataclass(frozen=True)
class Pending:
    """A value that ranks are still working on, as it travels to other ranks."""

    parts: tuple[Part, ...]
    collect: Callable[[list[Any]], Any]

    def get(self, timeout_s: float = 3600.0) -> Any:
        """The value, once it is there. Raises what the first rank that failed has raised, Gone where one died, and
        RoleFailed where one does not answer in time."""
        end, waiting = time.monotonic() + timeout_s, {part.ref: number for number, part in enumerate(self.parts)}
        values: list[Any] = [None] * len(self.parts)
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(end - time.monotonic(), 0.0))
            if not done:
                silent = ", ".join(self.parts[number].owner for number in waiting.values())
                raise RoleFailed(silent, f"no answer after {timeout_s:.0f} s")
            number = waiting.pop(done[0])
            values[number] = self.parts[number].answer().unwrap()
        return self.collect(values)


@dataclass(frozen=True)
class Ask:
    """A call of a worker's method, apart from its arguments."""

    role: str
    method: str
    splits: bool = False
    """Whether arguments with rows come as Pieces, and the answer goes as one."""
    keeps: bool = True
    """Whether anybody wants the result."""
    materialize: bool = True
    deadline_s: float = 3600.0


class Rank(Process):
    """The process of one rank."""

    def __init__(self, name: str, run_dir: Path | None, threads: int) -> None:
        super().__init__(name, run_dir, threads)
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # methods have a thread of their own to wait in
        self._thread = ThreadPoolExecutor(1, "rank")
        self._roles: dict[str, Worker] = {}
        self._numbers: dict[str, int] = {}
        """The call that is next, by caller: Ray does not promise an order."""
        self._turn = asyncio.Condition()
        self._store: Any = None

    async def open_store(self) -> Answer:
        """(address, port) where the ranks can meet. The port is bound from now on: nobody else can take it."""
        return await self._in_thread(self._open_store)

    async def build(self, environment: Mapping[str, str], roles: Mapping[str, Any]) -> Answer:
        """Builds the worker of each role from its class and arguments."""
        return await self._in_thread(self._build, environment, roles)

    async def call(self, caller: str, number: int, ask: Ask, inputs: tuple[Any, Any]) -> Answer:
        """What a method returns or raises."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._numbers.get(caller, 0) == number)
            worker = self._roles.get(ask.role)
            if inspect.iscoroutinefunction(getattr(worker, ask.method, None)):
                answering = asyncio.ensure_future(awaited(self, _awaited(worker, ask, *inputs)))
            else:
                answering = self._in_thread(_called, worker, ask, *inputs)
            self._numbers[caller] = number + 1
            self._turn.notify_all()
        return await answering

    async def live(self) -> None:
        """Never returns: whoever waits for it hears of this process's death at once."""
        await asyncio.Event().wait()

    def _in_thread(self, body: Callable[..., Any], *args: Any) -> asyncio.Future[Answer]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self.outcome, body, *args)

    def _open_store(self) -> tuple[str, int]:
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # listens on every interface
        return ray.util.get_node_ip_address(), self._store.port

    def _build(self, environment: Mapping[str, str], roles: Mapping[str, Any]) -> None:
        os.environ.update(environment)
        if ray.get_gpu_ids():
            os.environ["LOCAL_RANK"] = "0"  # Ray shows each process its own GPU alone
        for role, made in roles.items():
            self._roles[role] = made.cls(*made.args, **made.kwargs)


def _called(worker: Any, ask: Ask, args: Any, named: Any) -> Any:
    args, named, share = _resolved(ask, args, named)
    return _made(ask, share, getattr(worker, ask.method)(*args, **named))


async def _awaited(worker: Any, ask: Ask, args: Any, named: Any) -> Any:
    pending = any(isinstance(value, Pending) for value in (*args, *named.values()))
    resolved = asyncio.to_thread(_resolved, ask, args, named) if pending else None
    args, named, share = _resolved(ask, args, named) if resolved is None else await resolved
    return _made(ask, share, await getattr(worker, ask.method)(*args, **named))


def _resolved(ask: Ask, args: Any, named: Any) -> tuple[list[Any], dict[str, Any], Piece]:
    """(arguments, named arguments, the share that they are of)."""

    def there(value: Any) -> Any:
        return value.get(ask.deadline_s) if isinstance(value, Pending) and ask.materialize else value

    given: dict[int | str, Any] = {
        **{number: there(value) for number, value in enumerate(args)},
        **{name: there(value) for name, value in named.items()},
    }
    pieces = {name: value for name, value in given.items() if isinstance(value, Piece)}
    if len({(piece.rows, piece.padding) for piece in pieces.values()}) > 1:
        found = ", ".join(f"argument {name} {piece.rows} and {piece.padding}" for name, piece in pieces.items())
        raise DataError(
            f"the arguments of {ask.method} as shares of one batch", f"rows and, of all shares, padding: {found}",
            "give all of them as many rows; pass what `get()` returns where results of a call lie differently",
        )  # fmt: skip
    values = {name: value.value if name in pieces else value for name, value in given.items()}
    share = next(iter(pieces.values()), Piece(None, 0))
    return [values[number] for number in range(len(args))], {name: values[name] for name in named}, share


def _made(ask: Ask, share: Piece, result: Any) -> Any:
    if not ask.keeps:
        return None
    return share.made(result) if ask.splits else result
