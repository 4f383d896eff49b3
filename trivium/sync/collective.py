"""The channel that broadcasts weights: by nccl where every process has a GPU of its own, else by gloo.

The trainer offers a version, and every explorer that lacks it enters the exchange (`Synchronizer.ready_to_nccl_sync`).
The tensors are sent in buckets: the entries of a bucket, its bytes, its hashes. An explorer verifies a bucket and
acknowledges it; then the trainer fills the next one. The version is delivered when all explorers have all buckets. The
weights are read once, one tensor at a time, and both sides keep only the current bucket. After an aborted exchange, the
next one continues with this bucket and the members that have the buckets before it. A version can be collected only
while it is offered.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from trivium.errors import RoleFailed, SyncError, VersionGone
from trivium.models.weights.stream import BUCKET_BYTES, Described, Named, drained, raw, type_name, type_named, unique
from trivium.protocols import TensorSpec, Weights
from trivium.run_role import dead_explorers
from trivium.sync.hashes import digests, joined, verify
from trivium.sync.process_group import (
    ALL_BUCKETS,
    ExchangeAborted,
    ExchangeGroup,
    NoParticipants,
    join_store,
    open_store,
    own_address,
    refuses_connections,
)
from trivium.synchronizer import Exchange, Synchronizer
from trivium.types import TRAINER, Capabilities

_log = logging.getLogger("trivium")

MAX_EXCHANGES = 5
"""The most exchanges of one offer. An aborted exchange is followed by another one with the remaining members."""
_CLOSING_S = 1.0
"""A killed process may accept connections for this long after its own are closed."""
_ALIGNED = 16
"""Tensors begin at multiples of this in a bucket, so that any type can be viewed in place."""


class CollectiveChannel:
    """Broadcasts each version once. The trainer and each explorer have one object each."""

    capabilities = Capabilities(collective=True, uses_directory=False)

    def __init__(self, *, keep: int, directory: Path, synchronizer: Synchronizer, role: str) -> None:
        del keep, directory  # nothing is kept
        self._synchronizer, self._role = synchronizer, role
        self._store: TCPStore | None = None
        self._entered = 0
        """The number of the last exchange of this explorer, which enters none twice."""
        self._group: ExchangeGroup | None = None
        """The group of the last exchange, which may still relay data when this process has everything."""
        self._by_host = ""
        """Why the last exchange sent the weights through host memory; empty if it did not."""
        self.offered = ""
        """The hash of the weights that were offered last."""

    def offer(self, version: int, weights: Weights) -> bool:
        stream, self.offered = _Stream(weights), ""
        if self._store is None:
            self._store = open_store()
        address = f"{own_address()}:{self._store.port}"
        groups: list[ExchangeGroup] = []
        problems: dict[str, str] = {}
        for _ in range(MAX_EXCHANGES):
            exchange = asyncio.run(self._synchronizer.ready_to_nccl_sync(TRAINER, version, address))
            if exchange is None:  # every live explorer has the version, perhaps from an aborted exchange
                return self._delivered(groups, stream)
            try:
                group = self._group = ExchangeGroup(
                    exchange, 0, self._store, self._synchronizer, stream.device, stream=stream.name, has=stream.number
                )
                groups.append(group)
                self._warn(group.by_host)
                problems = _send(group, version, stream)
            except NoParticipants:  # the version is offered again for late explorers
                return self._delivered(groups, stream)
            except (ExchangeAborted, RuntimeError) as error:
                problems = {"the exchange": str(error)}
                self._close_group()
            except BaseException:  # reading the weights failed: the members must not wait
                self._close_group()
                raise
            if not problems:
                self.offered = joined(stream.hashes)
                return True
            _log.warning("version %d, exchange %d: %s", version, exchange.number, _listed(problems))
        raise SyncError(
            f"offer version {version}",
            f"{MAX_EXCHANGES} exchanges were aborted, the last one because {_listed(problems)}",
            "look at the logs of the explorers; sync.method checkpoint needs no exchange",
        )

    def _delivered(self, groups: Sequence[ExchangeGroup], stream: _Stream) -> bool:
        """Whether an explorer of an earlier exchange has all weights; their hash is then known."""
        delivered = any(group.delivered() for group in groups)
        self.offered = joined(stream.hashes) if delivered else ""
        return delivered

    def collect(self, version: int) -> Weights:
        """The weights as they arrive. Reading them takes part in the exchange, and in those that continue it."""
        exchange = self._enter(version)
        with self._aborts(exchange, version):
            group = self._join(exchange)
            tensors: list[Any] | None = group.receive_object()
        arriving = self._arriving(exchange, group, version)
        if tensors is None:
            return arriving
        return Described(tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors), arriving)

    def _arriving(self, exchange: Exchange, group: ExchangeGroup, version: int) -> Iterator[Named]:
        """Yields the tensors, a bucket at a time. Continues with the next exchange after an aborted one."""
        number, is_over = 0, False
        while not is_over:
            try:
                with self._aborts(exchange, version):
                    while (header := group.receive_object()) is not None:
                        named = _received(group, version, header)
                        group.acknowledge(header["number"])
                        if header["number"] == number:  # else an aborted exchange has delivered it
                            number += 1
                            yield from drained(named)
                        del named  # frees its memory before the next bucket is received
                    group.acknowledge_all()
                    is_over = True
            except VersionGone as gone:
                if not number:
                    raise
                _log.warning("version %d, after %d bucket(s): %s", version, number, gone.found)
                exchange, group = self._continued(version, group.stream, number)

    def _continued(self, version: int, stream: str, number: int) -> tuple[Exchange, ExchangeGroup]:
        """The next exchange of a version of which this explorer has `number` buckets. Raises VersionGone if there is
        none, because the trainer offers another version, or this one from the start."""
        while asyncio.run(self._synchronizer.next_version(self._role, None, newest=True)) == version:
            exchange = self._enter(version)
            try:
                with self._aborts(exchange, version):
                    group = self._join(exchange, stream, number)
                    if group.stream == stream:
                        group.receive_object()  # the specs of the tensors, which `collect` has read
                        return exchange, group
            except VersionGone as gone:
                _log.warning("version %d, after %d bucket(s): %s", version, number, gone.found)
                continue
            break
        self._close_group()
        raise VersionGone(
            f"the rest of version {version}, after {number} bucket(s)",
            "the trainer no longer sends this version",
            "adopt the version that it offers",
        )

    def _join(self, exchange: Exchange, stream: str = "", has: int = 0) -> ExchangeGroup:
        rank, store = exchange.members.index(self._role) + 1, join_store(exchange.address)
        self._group = ExchangeGroup(exchange, rank, store, self._synchronizer, _own_device(), stream=stream, has=has)
        return self._group

    @contextmanager
    def _aborts(self, exchange: Exchange, version: int) -> Generator[None]:
        """Raises VersionGone if the exchange in the block aborts, RoleFailed if it does because the trainer died."""
        try:
            yield
        except (ExchangeAborted, RuntimeError) as error:
            self._close_group()
            if refuses_connections(exchange.address, _CLOSING_S if isinstance(error, RuntimeError) else 0.0):
                cause = f"its store at {exchange.address} closed while it sent version {version}"
                self._synchronizer.mark_dead(TRAINER, cause)
                raise RoleFailed(TRAINER, cause) from error
            raise VersionGone(
                f"collect version {version} in exchange {exchange.number} of the trainer and "
                + ", ".join(exchange.members),
                f"it was aborted: {error}",
                "wait for the trainer's next exchange",
            ) from error

    @property
    def versions(self) -> tuple[int, ...]:
        """Empty, because nothing is kept."""
        return ()

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        del directory, versions  # nothing is kept

    def restore(self, directory: Path) -> None:
        del directory

    def _enter(self, version: int) -> Exchange:
        """Waits until all members of the exchange of a version are ready."""
        exchange = asyncio.run(self._synchronizer.ready_to_nccl_sync(self._role, version))
        if exchange is not None and exchange.number > self._entered:
            self._entered = exchange.number
            return exchange
        request = f"explorer {self._role!r} in the exchange of version {version}"
        values = self._synchronizer.check_alive()
        if self._role in dead_explorers(values):
            cause = f"the trainer counted it as dead: {dead_explorers(values)[self._role]}"
            raise SyncError(request, cause, "start it again; raise sync.heartbeat_s if it was only slow")
        cause = f"the trainer is at exchange {values.get('exchange', {}).get('number', 0)}, without this explorer"
        raise VersionGone(request, cause, "wait for the next exchange")

    def _warn(self, by_host: str) -> None:
        """Warns once that weights pass through host memory."""
        if by_host and by_host != self._by_host:
            _log.warning("weights go through host memory (gloo), not from GPU to GPU (nccl): %s", by_host)
        self._by_host = by_host

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


@dataclass(frozen=True)
class _Bucket:
    """Concatenated tensors, and the offset of each."""

    entries: list[dict[str, Any]]
    flat: torch.Tensor


class _Stream:
    """The offered weights, a bucket at a time. Only the current bucket can be sent again."""

    def __init__(self, weights: Weights) -> None:
        self.name, self.number = uuid.uuid4().hex, 0
        """The name identifies this offer of a version: buckets of another offer cannot be combined with it. The number
        is that of the current bucket."""
        self.tensors: Sequence[TensorSpec] | None = getattr(weights, "tensors", None)
        """The specs of the tensors; None if they are not known in advance."""
        self._buckets = _buckets(weights)
        self.hashes: dict[str, str] = {}
        """The hashes of the tensors that were sent."""
        self.bucket = next(self._buckets, None)
        self.device = self.bucket.flat.device if self.bucket is not None else torch.device("cpu")

    def advance(self) -> None:
        """Drops the current bucket, which every member has, and fills the next one."""
        self.bucket, self.number = None, self.number + 1
        self.bucket = next(self._buckets, None)


def _buckets(weights: Weights) -> Iterator[_Bucket]:
    """The weights in buckets. Each tensor is read when its bucket has room for it."""
    entries, flat, at = list[dict[str, Any]](), torch.empty(0), 0
    for name, tensor in unique(weights):
        size = tensor.nbytes
        if entries and at + size > len(flat):
            yield _Bucket(entries, flat[:at])
            entries = []
        if not entries:
            del flat  # before the next is allocated
            # On a CPU, memory that is never written to costs nothing.
            flat, at = torch.empty(max(BUCKET_BYTES, size), dtype=torch.uint8, device=tensor.device), 0
        entries.append(
            {"name": name, "dtype": type_name(tensor.dtype), "shape": list(tensor.shape), "at": at, "bytes": size}
        )
        flat[at : at + size] = raw(tensor)
        at += -(-size // _ALIGNED) * _ALIGNED
    if entries:
        yield _Bucket(entries, flat[:at])


def _send(group: ExchangeGroup, version: int, stream: _Stream) -> dict[str, str]:
    """Sends the current bucket and all that follow. Returns the problems of members."""
    group.broadcast_object(stream.tensors)
    while stream.bucket is not None:
        stream.hashes |= _send_bucket(group, version, stream.number, stream.bucket)
        if problems := group.problems(stream.number):
            return problems
        stream.advance()
    group.broadcast_object(None)
    return group.problems(ALL_BUCKETS)


def _send_bucket(group: ExchangeGroup, version: int, number: int, bucket: _Bucket) -> dict[str, str]:
    """Sends a bucket. Returns the hash of each tensor."""
    group.broadcast_object(
        {"version": version, "number": number, "bytes": bucket.flat.nbytes, "tensors": bucket.entries}
    )
    flat = bucket.flat.to(group.device)
    wait = group.broadcast_async(flat)
    hashes = digests(_unpacked(bucket.entries, bucket.flat))  # while it is sent
    wait()
    group.broadcast_object(hashes)
    return hashes


def _received(group: ExchangeGroup, version: int, header: Mapping[str, Any]) -> list[Named]:
    """Receives and verifies the bucket of this header, on the device of the group. Tells the trainer if it is
    damaged."""
    if header["version"] != version:
        raise ExchangeAborted(f"the trainer sends version {header['version']}")
    named = _unpacked(header["tensors"], _received_bytes(group, header["bytes"]))
    try:
        verify(
            named,
            group.receive_object(),
            version,
            "its bytes changed between the trainer and here",
            "check the network and the memory of both machines",
        )
    except SyncError as error:
        group.acknowledge(header["number"], error.found)
        raise
    return named


def _received_bytes(group: ExchangeGroup, size: int) -> torch.Tensor:
    flat = torch.empty(size, dtype=torch.uint8, device=group.device)
    group.broadcast(flat)
    return flat


def _unpacked(entries: Sequence[Mapping[str, Any]], flat: torch.Tensor) -> list[Named]:
    """Views of the tensors of a bucket."""
    return [
        (
            entry["name"],
            flat[entry["at"] : entry["at"] + entry["bytes"]].view(type_named(entry["dtype"])).reshape(entry["shape"]),
        )
        for entry in entries
    ]


def _own_device() -> torch.device:
    """The device of this process's model: a GPU if this process has used one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _listed(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{member}: {problem}" for member, problem in problems.items())
