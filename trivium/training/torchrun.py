"""Ranks that `torchrun` started from one command: the first one leads, the others do what it says.

What travels between them is Python's own serialisation: they are one program on one cluster.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from trivium.errors import RoleFailed
from trivium.training.ranks import Ranks, open_process_group
from trivium.training.split import RankVerbs

_IDLE = timedelta(days=365)
"""How long a rank may wait to be told something: for as long as rollouts take. The leader's death ends the wait."""


@cache
def _orders(device: str) -> dist.ProcessGroup:
    """The group over which orders go out and answers come back."""
    open_process_group(device)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"trivium/place/{dist.get_rank()}", f"{socket.gethostname()} {os.getpid()}")
    group = dist.new_group(backend="gloo", timeout=_IDLE)
    assert isinstance(group, dist.ProcessGroup)
    return group


class TorchrunRanks:
    """The `RankGroup` of the process that leads."""

    def __init__(self, device: str, announcement: Any, make: Callable[[], tuple[Ranks, Any]]) -> None:
        """Tells the others what to build, and builds this rank's engine: `make` meets them in `join_ranks`."""
        self._group = _orders(device)
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
        """Nothing to do: the others wait for the next order, or for the end."""

    def _do(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._tell([(method, mine) for mine in args])
        answers: list[Any] = [None] * self._ranks.size
        try:
            answer = getattr(self._verbs, method)(*args[0])
            dist.gather_object(answer, answers, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error
        return answers

    def _tell(self, orders: Sequence[Any]) -> None:
        mine: list[Any] = [None]
        try:
            dist.scatter_object_list(mine, list(orders), group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error


def follow(device: str, build: Callable[[Any], Any]) -> None:
    """What every rank but the first does, to the end of the run: `build` makes its engine from an announcement.

    Raises RoleFailed if the leader is gone, and whatever an engine raises.
    """
    group = _orders(device)
    verbs: RankVerbs | None = None
    while (order := _told(group)) is not None:
        if not isinstance(order, tuple):
            verbs = RankVerbs(build(order))
            continue
        assert verbs is not None
        method, args = order
        answer = getattr(verbs, method)(*args)
        dist.gather_object(answer if method in ("score", "update") else None, group=group)


def dismiss(device: str) -> None:
    """The leader's last word: the run is over."""
    dist.scatter_object_list([None], [None] * dist.get_world_size(), group=_orders(device))


def _told(group: dist.ProcessGroup) -> Any:
    mine: list[Any] = [None]
    try:
        dist.scatter_object_list(mine, None, group=group)
    except RuntimeError as error:
        raise RoleFailed("trainer rank 0", f"it is gone: {str(error).splitlines()[0]}") from error
    return mine[0]


def _lost(error: RuntimeError) -> Exception:
    """Who is gone, as far as this machine knows; the error itself where everybody is there."""
    store = dist.distributed_c10d._get_default_store()
    for rank in range(1, dist.get_world_size()):
        host, _, pid = store.get(f"trivium/place/{rank}").decode().partition(" ")
        if host == socket.gethostname() and not _alive(int(pid)):
            return RoleFailed(f"trainer rank {rank}", "its process died")
    return error


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
