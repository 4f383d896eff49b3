"""The channel of processes that take part in a broadcast: nccl where everybody has a GPU of its own, else gloo.

The trainer offers, every explorer that lacks the version enters the exchange (`Synchronizer.ready_to_nccl_sync`), and
the tensors go out in buckets: what is in it, its bytes, its hashes. An explorer answers once it has verified them all;
only then is the version delivered. Nothing is kept, so a version can be had only while it is offered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from trivium.errors import RoleFailed, SyncError, VersionGone
from trivium.protocols import Weights
from trivium.sync.tensors import Named, digests, parts, raw, type_name, type_named, unique, verify
from trivium.sync.wire import BrokenOff, Wire, join_store, open_store, own_address, refuses
from trivium.synchronizer import TRAINER, Exchange, Synchronizer, dead

_log = logging.getLogger("trivium")

BUCKET_BYTES = 2**28
"""A bucket holds so many bytes of tensors, or one larger tensor: what the trainer needs beside its model."""
TRIES = 5
"""An exchange that breaks off is begun again with those who are left, so often."""
_ALIGNED = 16
"""Tensors begin in a bucket at multiples of this, so that any type can be read where it lies."""


class CollectiveChannel:
    """Broadcasts each version once. The trainer and each explorer have an end of their own."""

    collective = True
    in_directory = False

    def __init__(self, *, keep: int, directory: Path, synchronizer: Synchronizer, role: str) -> None:
        del keep, directory  # nothing is kept
        self._synchronizer, self._role = synchronizer, role
        self._store: TCPStore | None = None
        self._entered = 0
        """The exchange this explorer took part in last: none is entered twice."""
        self._last: Wire | None = None
        """Of the exchange before: what this end sends on to others may still be on its way when all is done here."""

    def offer(self, version: int, weights: Weights) -> bool:
        listed = list(unique(weights))  # references, not copies: an exchange that broke off is begun again
        if self._store is None:
            self._store = open_store()
        address = f"{own_address()}:{self._store.port}"
        wires: list[Wire] = []
        troubles: dict[str, str] = {}
        for _ in range(TRIES):
            exchange = asyncio.run(self._synchronizer.ready_to_nccl_sync(TRAINER, version, address))
            if exchange is None:  # every explorer alive has it by now, be it from an exchange that broke off for others
                return any(wire.delivered() for wire in wires)
            try:
                wire = self._last = Wire(exchange, 0, self._store, self._synchronizer, _device(listed))
                wires.append(wire)
                troubles = _send(wire, version, listed)
            except (BrokenOff, RuntimeError) as error:
                troubles = {"the exchange": str(error)}
                self._let_go()
            if not troubles:
                return True
            _log.warning("version %d, exchange %d: %s", version, exchange.number, _listed(troubles))
        raise SyncError(
            f"offer version {version}", f"{TRIES} exchanges broke off, the last one because {_listed(troubles)}",
            "look at the logs of the explorers; with sync.method checkpoint nobody waits for anybody",
        )  # fmt: skip

    def collect(self, version: int) -> Iterator[Named]:
        exchange = self._enter(version)
        try:
            rank = exchange.members.index(self._role) + 1
            store = join_store(exchange.address)
            wire = self._last = Wire(exchange, rank, store, self._synchronizer, _own_device())
            return iter(_receive(wire, version))
        except (BrokenOff, RuntimeError) as error:
            self._let_go()
            if refuses(exchange.address):
                cause = f"nobody listens at {exchange.address} any more, in the midst of version {version}"
                self._synchronizer.report_death(TRAINER, cause)
                raise RoleFailed(TRAINER, cause) from error
            raise VersionGone(
                f"collect version {version} in exchange {exchange.number} of the trainer and "
                + ", ".join(exchange.members), f"it broke off: {error}", "the trainer begins another one",
            ) from error  # fmt: skip

    @property
    def versions(self) -> tuple[int, ...]:
        """None: what was broadcast is gone."""
        return ()

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        del directory, versions  # nothing is kept, and nothing can be asked for later

    def restore(self, directory: Path) -> None:
        del directory

    def _enter(self, version: int) -> Exchange:
        """The exchange of a version, once everybody is there."""
        exchange = asyncio.run(self._synchronizer.ready_to_nccl_sync(self._role, version))
        if exchange is not None and exchange.number > self._entered:
            self._entered = exchange.number
            return exchange
        asked = f"explorer {self._role!r} takes part in the exchange of version {version}"
        values = self._synchronizer.check_alive()
        if self._role in dead(values):
            found = f"the trainer took it for dead: {dead(values)[self._role]}"
            raise SyncError(asked, found, "start it again; raise sync.heartbeat_s if it was only slow")
        found = f"the trainer is at exchange {values.get('exchange', {}).get('number', 0)}, without this explorer"
        raise VersionGone(asked, found, "wait for the next exchange")

    def _let_go(self) -> None:
        if self._last is not None:
            self._last.close()
            self._last = None


def _send(wire: Wire, version: int, weights: Sequence[Named]) -> dict[str, str]:
    """Everything, bucket by bucket; returns what members have against it."""
    for part in parts(weights, BUCKET_BYTES):
        entries, flat = _packed(part, wire.device)
        wire.tell({"version": version, "bytes": flat.nbytes, "tensors": entries})
        carried = wire.start(flat)
        hashes = digests([tensor for _, tensor in part])  # of what is sent, while it is sent
        carried()
        wire.tell(hashes)
    wire.tell(None)
    return wire.troubles()


def _receive(wire: Wire, version: int) -> list[Named]:
    """The same on the other side; on the CPU, where the hashes are taken, whatever carried it."""
    named, hashes = list[Named](), list[str]()
    while (told := wire.hear()) is not None:
        if told["version"] != version:
            raise BrokenOff(f"the trainer sends version {told['version']}")
        flat = torch.empty(told["bytes"], dtype=torch.uint8, device=wire.device)
        wire.carry(flat)
        named += _unpacked(told["tensors"], flat.cpu())
        hashes += wire.hear()
    try:
        verify(
            named, hashes, version, "its bytes changed between the trainer and here",
            "look at the network and the memory of both machines",
        )  # fmt: skip
    except SyncError as error:
        wire.answer(error.found)
        raise
    wire.answer("")
    return named


def _packed(part: Sequence[Named], device: torch.device) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """What is where in a bucket, and the bucket."""
    entries, at = list[dict[str, Any]](), 0
    for name, tensor in part:
        shape, size = list(tensor.shape), tensor.nbytes
        entries.append({"name": name, "dtype": type_name(tensor), "shape": shape, "at": at, "bytes": size})
        at += -(-size // _ALIGNED) * _ALIGNED
    flat = torch.zeros(max(at, _ALIGNED), dtype=torch.uint8, device=device)
    for entry, (_, tensor) in zip(entries, part, strict=True):
        flat[entry["at"] : entry["at"] + entry["bytes"]] = raw(tensor)
    return entries, flat


def _unpacked(entries: Sequence[Mapping[str, Any]], flat: torch.Tensor) -> list[Named]:
    """The tensors of a bucket, where they lie."""
    return [
        (
            entry["name"],
            flat[entry["at"] : entry["at"] + entry["bytes"]].view(type_named(entry["dtype"])).reshape(entry["shape"]),
        )
        for entry in entries
    ]


def _device(weights: Sequence[Named]) -> torch.device:
    return weights[0][1].device if weights else torch.device("cpu")


def _own_device() -> torch.device:
    """Where this process has its model: on a GPU if it has touched one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _listed(troubles: Mapping[str, str]) -> str:
    return "; ".join(f"{who}: {trouble}" for who, trouble in troubles.items())
