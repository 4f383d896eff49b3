"""Ranks that `torchrun` started from one command: the first one drives, the others run its commands.

The ranks are one program on one cluster and trust each other (docs/operate.md, "Who is trusted").
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from trivium.foundation.concurrency import ProcessLife
from trivium.foundation.errors import RoleFailed
from trivium.processes.answers import Answer
from trivium.processes.link import CLOSE, Link
from trivium.processes.sockets import Listening, connect, own_address
from trivium.training.distributed.data_parallel import RankVerbs
from trivium.training.distributed.ranks import COLLECTIVE_S, Ranks, open_process_group

_CONNECT_S = 300.0
"""Deadline for a rank to connect to the driver, which is the one of torch for its store."""
_CLOSE_S = 30.0
"""Deadline for the other ranks to answer the last command."""
_SEEN_S = 5.0
"""How long the driver waits for a rank's connection to close after a collective call failed. Another RuntimeError of
its own, such as a lack of memory, is raised that much later."""
_DRIVER_GONE = "trainer rank 0", "it is gone"
_DIED = "its process died"


@dataclass(frozen=True)
class _Connected:
    """The connections of this process to other ranks."""

    links: dict[int, Link]
    """On the driving rank by rank; on the others to rank 0."""
    key: bytes
    """A secret of this run's ranks."""
    deadline_s: float
    """Deadline for the answer of a command, from when the driving rank has run it."""


_GIVES_RESULTS = ("score", "update", "sampler", "take_updates")
"""Commands whose result the driver reads from every rank."""
_BUILD = "build"
"""The command to build the engine of a stage from its spec."""
_OPEN: list[_Connected] = []
"""The connections of this process, once they are open."""


def connect_ranks(device: str, deadline_s: float = COLLECTIVE_S) -> _Connected:
    """Connects all ranks, once. `deadline_s` is the timeout of a collective call within a command."""
    if not _OPEN:
        open_process_group(device, deadline_s)
        store, rank = _store(), dist.get_rank()
        store.set(f"trivium/process/{rank}", json.dumps(asdict(ProcessLife.of(os.getpid()))))
        if rank == 0:
            store.set("trivium/key", secrets.token_hex())
        key = store.get("trivium/key")
        _OPEN.append(_Connected(_links(rank, key), key, deadline_s))
    return _OPEN[0]


def _links(rank: int, key: bytes) -> dict[int, Link]:
    """The other ranks listen, and the driver connects to them."""
    store, name = _store(), "trivium/address/{}"
    if rank == 0:
        addresses = {n: json.loads(store.get(name.format(n))) for n in range(1, dist.get_world_size())}
        return {
            n: Link(connect((host, port), key), f"rank-{n}", partial(RoleFailed, f"trainer rank {n}", _DIED))
            for n, (host, port) in addresses.items()
        }
    with closing(Listening(own_address(), key)) as listening:
        store.set(name.format(rank), json.dumps(listening.address))
        return {0: Link(listening.accept(_CONNECT_S), "rank-0", partial(RoleFailed, *_DRIVER_GONE))}


def life_of_rank(rank: int) -> ProcessLife:
    """The process of a connected rank."""
    return ProcessLife(**json.loads(_store().get(f"trivium/process/{rank}")))


def _store() -> dist.distributed_c10d.Store:
    return dist.distributed_c10d._get_default_store()


def shared_key() -> bytes:
    """A secret of the connected ranks."""
    return _OPEN[0].key


class TorchrunRanks:
    """The `RankGroup` of the driving process."""

    def __init__(self, device: str, spec: object, make: Callable[[], tuple[Ranks, Any]]) -> None:
        """Sends the `spec` of the engine to the other ranks, and builds this rank's engine; `make` calls
        `join_ranks`."""
        self._connected = connect_ranks(device)
        for link in self._connected.links.values():
            link.call(_BUILD, spec)
        self._ranks, engine = make()
        self._verbs = RankVerbs(engine)
        addresses = self._run("sampler", [()] * self._ranks.size)
        self.samplers = {rank: address for rank, address in enumerate(addresses) if address is not None}
        """Addresses of the rollout engines that the others host, by rank."""

    @property
    def data_size(self) -> int:
        return self._ranks.data_size

    def run_on_all_ranks(self, method: str, *args: object) -> Any:
        return self._run(method, [args] * self._ranks.size)[0]

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], *args: object) -> list[Any]:
        size = self._ranks.share_size
        return self._run(method, [(*shares[rank // size], *args) for rank in range(self._ranks.size)])[::size]

    def close(self) -> None:
        """Frees this rank's models. The other ranks free theirs at the next stage or at the end of the run."""
        self._verbs.engine.close()

    def _run(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls `method` with each rank's arguments. Returns each rank's result."""
        # The other ranks first: in a collective call, the part of this rank waits for theirs.
        calls = [link.call(method, *args[rank]) for rank, link in sorted(self._connected.links.items())]
        try:
            result = getattr(self._verbs, method)(*args[0])
            end = time.monotonic() + self._connected.deadline_s
            return [result, *(call.result(max(end - time.monotonic(), 0.0)) for call in calls)]
        except (RuntimeError, TimeoutError) as error:
            raise _diagnosed(error, calls) from error


def serve_rank(device: str, build: Callable[[Any], RankVerbs], at_end: Callable[[], None] = lambda: None) -> None:
    """Runs the commands of the driver on every rank but the first, until the end of the run. `build` makes the engine
    of this rank from a spec. Calls `at_end` when the run ends, while the driver waits.

    Raises RoleFailed if the driving rank ended, and any error of the engine.
    """
    driver = connect_ranks(device).links[0]
    verbs: RankVerbs | None = None
    for call in iter(driver.calls.get, None):
        if call.method == CLOSE:
            at_end()
            driver.disconnect()
            return
        if call.method == _BUILD:
            verbs = None  # frees the models of the previous stage before loading those of the next one
            verbs = build(*call.args)
            call.answer(Answer())
            continue
        result = getattr(verbs, call.method)(*call.args)
        call.answer(Answer(result if call.method in _GIVES_RESULTS else None))
    raise RoleFailed(*_DRIVER_GONE)


def stop_ranks(device: str) -> None:
    """Ends `serve_rank` on the other ranks, at the end of the run."""
    links = connect_ranks(device).links.values()
    for closing_call in [link.call(CLOSE) for link in links]:
        with suppress(RoleFailed, TimeoutError):  # the end of the connection, which is its only answer
            closing_call.result(_CLOSE_S)


def _diagnosed(error: Exception, calls: Sequence[Future[Any]]) -> Exception:
    """Returns a RoleFailed for a rank that died during the `calls`, or for a timeout, which names the ranks on this
    machine that were stopped; else the error itself."""
    # gloo raises a RuntimeError with this text where a collective call takes too long.
    timed_out = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
    # The connection of a collective call may break first, while the process of the rank is still ending.
    for call in wait(calls, 0.0 if timed_out else _SEEN_S, FIRST_EXCEPTION).done:
        if isinstance(failure := call.exception(), RoleFailed):
            return failure
    lives = {rank: life_of_rank(rank) for rank in range(1, dist.get_world_size())}
    for rank, life in lives.items():
        if not life():
            return RoleFailed(f"trainer rank {rank}", _DIED)
    if timed_out:
        stopped = [
            f"rank {n}: process {life.pid} was stopped (SIGSTOP)" for n, life in lives.items() if life.activity()[0]
        ]
        cause = "; ".join(stopped) or (str(error).splitlines() or ["its process runs"])[0]
        return RoleFailed("trainer", f"a rank did not answer in time: {cause}")
    return error
