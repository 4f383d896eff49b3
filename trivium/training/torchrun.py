"""Ranks that `torchrun` started from one command: the first one leads, the others do what it says.

What travels between them is Python's own serialisation: they are one program on one cluster.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trivium.errors import RoleFailed
from trivium.training.ranks import COLLECTIVE_S, Ranks, open_process_group
from trivium.training.split import RankVerbs

_IDLE = timedelta(days=365)
"""How long a rank may wait to be told something: for as long as rollouts take. The leader's death ends the wait."""


@dataclass(frozen=True)
class _Lines:
    """Between the leader and the others."""

    orders: dist.ProcessGroup
    answers: dist.ProcessGroup
    """Whoever was told something answers within the deadline of a collective call."""


_OPEN: list[_Lines] = []
"""Those of this process, once they are open."""


def open_lines(device: str, deadline_s: float = COLLECTIVE_S) -> _Lines:
    """Meets the other ranks. `deadline_s`: how long they wait for each other while they are at work."""
    if not _OPEN:
        open_process_group(device, deadline_s)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"trivium/place/{dist.get_rank()}", f"{socket.gethostname()} {os.getpid()}")
        _OPEN.append(_Lines(_group(_IDLE), _group(timedelta(seconds=deadline_s))))
    return _OPEN[0]


def _group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


class TorchrunRanks:
    """The `RankGroup` of the process that leads."""

    def __init__(self, device: str, announcement: Any, make: Callable[[], tuple[Ranks, Any]]) -> None:
        """Tells the others what to build, and builds this rank's engine: `make` meets them in `join_ranks`."""
        self._lines = open_lines(device)
        self._tell([announcement] * dist.get_world_size())
        self._ranks, engine = make()
        self._verbs = RankVerbs(engine)

    @property
    def data_size(self) -> int:
        return self._ranks.data_size

    def everywhere(self, method: str, *args: Any) -> Any:
        return self._do(method, [args] * self._ranks.size)[0]

    def shared_out(self, method: str, shares: Sequence[tuple[Any, ...]], *args: Any) -> list[Any]:
        each = self._ranks.sequence_size
        given = [(*shares[rank // each], *args) for rank in range(self._ranks.size)]
        return self._do(method, given)[::each]

    def close(self) -> None:
        """Lets go of this rank's models; the others do when they are told of the next stage, or of the end."""
        self._verbs.engine.close()

    def _do(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._tell([(method, mine) for mine in args])
        answers: list[Any] = [None] * self._ranks.size
        try:
            answer = getattr(self._verbs, method)(*args[0])
            dist.gather_object(answer, answers, group=self._lines.answers)
        except RuntimeError as error:
            raise _lost(error) from error
        return answers

    def _tell(self, orders: Sequence[Any]) -> None:
        mine: list[Any] = [None]
        try:
            dist.scatter_object_list(mine, list(orders), group=self._lines.orders)
        except RuntimeError as error:
            raise _lost(error) from error


def follow(device: str, build: Callable[[Any], Any]) -> None:
    """What every rank but the first does, to the end of the run: `build` makes its engine from an announcement.

    Raises RoleFailed if the leader is gone, and whatever an engine raises.
    """
    lines = open_lines(device)
    verbs: RankVerbs | None = None
    while (order := _told(lines.orders)) is not None:
        if not isinstance(order, tuple):
            verbs = None  # the models of the stage before go before those of the next one come
            verbs = RankVerbs(build(order))
            continue
        assert verbs is not None
        method, args = order
        answer = getattr(verbs, method)(*args)
        dist.gather_object(answer if method in ("score", "update") else None, group=lines.answers)


def dismiss(device: str) -> None:
    """The leader's last word: the run is over."""
    orders = open_lines(device).orders
    dist.scatter_object_list([None], [None] * dist.get_world_size(), group=orders)


def _told(group: dist.ProcessGroup) -> Any:
    mine: list[Any] = [None]
    try:
        dist.scatter_object_list(mine, None, group=group)
    except RuntimeError as error:
        raise RoleFailed("trainer rank 0", f"it is gone: {str(error).splitlines()[0]}") from error
    return mine[0]


def _lost(error: RuntimeError) -> Exception:
    """Who is gone, as far as this machine knows, or that somebody is late; else the error itself."""
    store = dist.distributed_c10d._get_default_store()
    for rank in range(1, dist.get_world_size()):
        host, _, pid = store.get(f"trivium/place/{rank}").decode().partition(" ")
        if host == socket.gethostname() and not _alive(int(pid)):
            return RoleFailed(f"trainer rank {rank}", "its process died")
    if "timed out" in str(error).lower():
        return RoleFailed("trainer", f"a rank did not answer in time: {str(error).splitlines()[0]}")
    return error


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
