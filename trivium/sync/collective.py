"""The channel of processes that take part in a broadcast: nccl where everybody has a GPU of its own, else gloo.

The trainer offers, every explorer that lacks the version enters the exchange (`Synchronizer.ready_to_nccl_sync`), and
the tensors go out in buckets: what is in it, its bytes, its hashes. An explorer answers once it has verified a bucket;
only then is the next one filled, and only when all have everything is the version delivered. The weights are read once,
one tensor at a time, and nothing is kept but the bucket in hand: an exchange that breaks off is taken up again with it,
by those who have what went before it. A version can be had only while it is offered.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from trivium.errors import RoleFailed, SyncError, VersionGone
from trivium.protocols import Weights
from trivium.sync.tensors import Named, digests, raw, type_name, type_named, unique, verify
from trivium.sync.wire import WHOLE, BrokenOff, Forsaken, Wire, join_store, open_store, own_address, refuses
from trivium.synchronizer import TRAINER, Exchange, Synchronizer, dead

_log = logging.getLogger("trivium")

BUCKET_BYTES = 2**28
"""A bucket holds so many bytes of tensors, or one larger tensor: what the trainer needs beside its model, and beside
the tensor that it reads."""
TRIES = 5
"""An exchange that breaks off is taken up again with those who are left, so often."""
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
        self._arrived = _Arrived("")

    def offer(self, version: int, weights: Weights) -> bool:
        stream = _Stream(weights)
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
                wire = self._last = Wire(
                    exchange, 0, self._store, self._synchronizer, stream.device, stream=stream.name, has=stream.number
                )
                wires.append(wire)
                troubles = _send(wire, version, stream)
            except Forsaken:  # those who came late, for whom it is offered anew
                return any(wire.delivered() for wire in wires)
            except (BrokenOff, RuntimeError) as error:
                troubles = {"the exchange": str(error)}
                self._let_go()
            except BaseException:  # the weights could not be read to their end; nobody is to wait for it
                self._let_go()
                raise
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
            arrived = self._arrived
            wire = self._last = Wire(
                exchange, rank, store, self._synchronizer, _own_device(),
                stream=arrived.stream, has=len(arrived.buckets),
            )  # fmt: skip
            if wire.stream != arrived.stream:
                arrived = self._arrived = _Arrived(wire.stream)
            _receive(wire, version, arrived.buckets)
            self._arrived = _Arrived("")
            return (named for bucket in arrived.buckets for named in bucket)
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


@dataclass(frozen=True)
class _Arrived:
    """What an explorer has of an offer."""

    stream: str
    buckets: list[list[Named]] = field(default_factory=list[list[Named]])


@dataclass(frozen=True)
class _Bucket:
    """Tensors end to end, and what is where."""

    entries: list[dict[str, Any]]
    flat: torch.Tensor


class _Stream:
    """What is offered, a bucket at a time. The one in hand can be sent again; those before it are gone."""

    def __init__(self, weights: Weights) -> None:
        self.name, self.number = uuid.uuid4().hex, 0
        self._buckets = _buckets(weights)
        self.bucket = next(self._buckets, None)
        self.device = self.bucket.flat.device if self.bucket is not None else torch.device("cpu")

    def advance(self) -> None:
        """Everybody has the bucket in hand: lets go of it, and fills the next."""
        self.bucket, self.number = None, self.number + 1
        self.bucket = next(self._buckets, None)


def _buckets(weights: Weights) -> Iterator[_Bucket]:
    """The weights, each read when there is a place for it."""
    entries, flat, at = list[dict[str, Any]](), torch.empty(0), 0
    for name, tensor in unique(weights):
        size = tensor.nbytes
        if entries and at + size > len(flat):
            yield _Bucket(entries, flat[:at])
            entries = []
        if not entries:
            del flat  # before there is another
            # Memory that is never written to costs nothing on a CPU, however small the model.
            flat, at = torch.empty(max(BUCKET_BYTES, size), dtype=torch.uint8, device=tensor.device), 0
        entries.append({
            "name": name, "dtype": type_name(tensor), "shape": list(tensor.shape), "at": at, "bytes": size
        })  # fmt: skip
        flat[at : at + size] = raw(tensor)
        at += -(-size // _ALIGNED) * _ALIGNED
    if entries:
        yield _Bucket(entries, flat[:at])


def _send(wire: Wire, version: int, stream: _Stream) -> dict[str, str]:
    """Everything from the bucket in hand; returns what members have against one."""
    while stream.bucket is not None:
        _send_bucket(wire, version, stream.number, stream.bucket)
        if troubles := wire.troubles(stream.number):
            return troubles
        stream.advance()
    wire.tell(None)
    return wire.troubles(WHOLE)


def _send_bucket(wire: Wire, version: int, number: int, bucket: _Bucket) -> None:
    wire.tell({"version": version, "number": number, "bytes": bucket.flat.nbytes, "tensors": bucket.entries})
    carried = wire.start(bucket.flat.to(wire.device))
    hashes = digests([tensor for _, tensor in _unpacked(bucket.entries, bucket.flat)])  # while it is sent
    carried()
    wire.tell(hashes)


def _receive(wire: Wire, version: int, buckets: list[list[Named]]) -> None:
    """The same on the other side; adds to the buckets that have arrived."""
    while (told := wire.hear()) is not None:
        if told["version"] != version:
            raise BrokenOff(f"the trainer sends version {told['version']}")
        named = _unpacked(told["tensors"], _carried(wire, told["bytes"]))
        try:
            verify(
                named, wire.hear(), version, "its bytes changed between the trainer and here",
                "look at the network and the memory of both machines",
            )  # fmt: skip
        except SyncError as error:
            wire.answer(told["number"], error.found)
            raise
        if told["number"] == len(buckets):  # else it is here from the exchange before
            buckets.append(named)
        wire.answer(told["number"])
    wire.done()


def _carried(wire: Wire, size: int) -> torch.Tensor:
    """The bytes of a bucket; on the CPU, where the hashes are taken, whatever carried them."""
    flat = torch.empty(size, dtype=torch.uint8, device=wire.device)
    wire.carry(flat)
    return flat.cpu()


def _unpacked(entries: Sequence[Mapping[str, Any]], flat: torch.Tensor) -> list[Named]:
    """The tensors of a bucket, where they lie."""
    return [
        (
            entry["name"],
            flat[entry["at"] : entry["at"] + entry["bytes"]].view(type_named(entry["dtype"])).reshape(entry["shape"]),
        )
        for entry in entries
    ]


def _own_device() -> torch.device:
    """Where this process has its model: on a GPU if it has touched one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _listed(troubles: Mapping[str, str]) -> str:
    return "; ".join(f"{who}: {trouble}" for who, trouble in troubles.items())
