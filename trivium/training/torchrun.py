"""Ranks that `torchrun` started from one command: the first one drives, the others run its commands.

Commands and results use torch's object collectives, which pickle: the ranks are one program on one cluster and trust
each other (docs/operate.md, "Who is trusted").
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trivium.concurrency import ProcessLife
from trivium.errors import RoleFailed
from trivium.training.data_parallel import RankVerbs
from trivium.training.ranks import COLLECTIVE_S, Ranks, open_process_group

_IDLE = timedelta(days=365)
"""Timeout of a wait for a command, which may be as long as rollouts take. The death of the driver ends the wait."""


@dataclass(frozen=True)
class _CommandGroups:
    """Process groups between the driving rank and the others."""

    commands: dist.ProcessGroup
    results: dist.ProcessGroup
    """Used for results, which arrive within the deadline of a collective call."""
    key: bytes
    """A secret of this run's ranks."""


_GIVES_RESULTS = ("score", "update", "sampler", "take_updates")
"""Commands whose result the driver reads from every rank."""
_STOPPED = "trivium/stopped"
"""Key of the store that the driver sets once every rank has the command to end."""
_STOPPED_S = 30.0
"""Longest wait for that key, in seconds."""
_OPEN: list[_CommandGroups] = []
"""The groups of this process, once they are open."""


def connect_ranks(device: str, deadline_s: float = COLLECTIVE_S) -> _CommandGroups:
    """Opens the process groups of all ranks, once. `deadline_s` is the timeout of a collective call within a
    command."""
    if not _OPEN:
        open_process_group(device, deadline_s)
        life = json.dumps(asdict(ProcessLife.of(os.getpid())))
        store = _store()
        store.set(f"trivium/process/{dist.get_rank()}", life)
        if dist.get_rank() == 0:
            store.set("trivium/key", secrets.token_hex())
        deadline = timedelta(seconds=deadline_s)
        commands = _group(_IDLE if dist.get_rank() else deadline)  # each process applies its own timeout
        _OPEN.append(_CommandGroups(commands, _group(deadline), store.get("trivium/key")))
    return _OPEN[0]


def life_of_rank(rank: int) -> ProcessLife:
    """The process of a connected rank."""
    return ProcessLife(**json.loads(_store().get(f"trivium/process/{rank}")))


def _store() -> dist.distributed_c10d.Store:
    return dist.distributed_c10d._get_default_store()


def shared_key() -> bytes:
    """A secret of the connected ranks."""
    return _OPEN[0].key


def _group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


class TorchrunRanks:
    """The `RankGroup` of the driving process."""

    def __init__(self, device: str, spec: object, make: Callable[[], tuple[Ranks, Any]]) -> None:
        """Sends the `spec` of the engine to the other ranks, and builds this rank's engine; `make` calls
        `join_ranks`."""
        self._groups = connect_ranks(device)
        self._scatter_commands([spec] * dist.get_world_size())
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
        size = self._ranks.sequence_size
        return self._run(method, [(*shares[rank // size], *args) for rank in range(self._ranks.size)])[::size]

    def close(self) -> None:
        """Frees this rank's models. The other ranks free theirs at the next stage or at the end of the run."""
        self._verbs.engine.close()

    def _run(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls `method` with each rank's arguments. Returns each rank's result."""
        self._scatter_commands([(method, each) for each in args])
        results: list[Any] = [None] * self._ranks.size
        try:
            result = getattr(self._verbs, method)(*args[0])
            dist.gather_object(result, results, group=self._groups.results)
        except RuntimeError as error:
            raise _diagnosed(error) from error
        return results

    def _scatter_commands(self, commands: Sequence[Any]) -> None:
        own: list[Any] = [None]
        try:
            dist.scatter_object_list(own, list(commands), group=self._groups.commands)
        except RuntimeError as error:
            raise _diagnosed(error) from error


def serve_rank(device: str, build: Callable[[Any], RankVerbs]) -> None:
    """Runs the commands of the driver on every rank but the first, until the end of the run. `build` makes the engine
    of this rank from a spec.

    Raises RoleFailed if the driving rank ended, and any error of the engine.
    """
    groups = connect_ranks(device)
    verbs: RankVerbs | None = None
    while (command := _receive_command(groups.commands)) is not None:
        if not isinstance(command, tuple):
            verbs = None  # frees the models of the previous stage before loading those of the next one
            verbs = build(command)
            continue
        assert verbs is not None
        method, args = command
        result = getattr(verbs, method)(*args)
        dist.gather_object(result if method in _GIVES_RESULTS else None, group=groups.results)
    # The driver may still be sending the command: its call would fail if this connection closed now.
    with suppress(RuntimeError):  # the driver, which may host the store, has ended
        _store().wait([_STOPPED], timedelta(seconds=_STOPPED_S))


def stop_ranks(device: str) -> None:
    """Ends `serve_rank` on the other ranks, at the end of the run."""
    commands = connect_ranks(device).commands
    dist.scatter_object_list([None], [None] * dist.get_world_size(), group=commands)
    _store().set(_STOPPED, "")


def _receive_command(group: dist.ProcessGroup) -> object:
    own: list[Any] = [None]
    try:
        dist.scatter_object_list(own, None, group=group)
    except RuntimeError as error:
        raise RoleFailed("trainer rank 0", f"it is gone: {str(error).splitlines()[0]}") from error
    return own[0]


def _diagnosed(error: RuntimeError) -> Exception:
    """Returns a RoleFailed for a rank on this machine that died or was stopped, or for a timeout; else the error
    itself."""
    lives = {rank: life_of_rank(rank) for rank in range(1, dist.get_world_size())}
    for rank, life in lives.items():
        if not life():
            return RoleFailed(f"trainer rank {rank}", "its process died")
    if "timed out" in str(error).lower():
        stopped = [
            f"rank {n}: process {life.pid} was stopped (SIGSTOP)" for n, life in lives.items() if life.activity()[0]
        ]
        cause = "; ".join(stopped) or str(error).splitlines()[0]
        return RoleFailed("trainer", f"a rank did not answer in time: {cause}")
    return error
