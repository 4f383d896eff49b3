"""The channel that broadcasts weights: by nccl where every process has a GPU of its own, else by gloo.

The trainer offers a version, and every explorer that lacks it enters the exchange (`Synchronizer.ready_to_nccl_sync`).
The tensors are sent in buckets: the entries of a bucket, its bytes, its hashes. The version is delivered when all
explorers have verified all of them. The weights are read once, one tensor at a time, and both sides keep only the
current bucket. If an exchange is aborted, the trainer offers the whole version again. A version can be collected only
while it is offered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from trivium.foundation.errors import RoleFailed, SyncError, VersionGone
from trivium.foundation.run_role import dead_explorers
from trivium.models.weights.stream import BUCKET_BYTES, Described, Named, drained, raw, type_name, type_named, unique
from trivium.protocols import TensorSpec, Weights
from trivium.sync.hashes import digests, joined, verify
from trivium.sync.process_group import (
    ExchangeAborted,
    ExchangeGroup,
    join_store,
    open_store,
    own_address,
    refuses_connections,
)
from trivium.synchronizer import Exchange, Synchronizer
from trivium.types import TRAINER, Capabilities

_log = logging.getLogger("trivium")

MAX_EXCHANGES = 5
"""The most exchanges of one version. An aborted exchange is followed by another one with the remaining members."""
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
        self._offer = _Offer(-1)

    def offer(self, version: int, weights: Weights) -> bool:
        if self._offer.version != version:
            self._offer = _Offer(version)
        offer, stream = self._offer, _BucketStream(weights)
        if self._store is None:
            self._store = open_store()
        address = f"{own_address()}:{self._store.port}"
        exchange = asyncio.run(self._synchronizer.ready_to_nccl_sync(TRAINER, version, address))
        # Without an exchange, every live explorer has the version, perhaps from the one before, which was aborted.
        delivered = offer.is_held if exchange is None else self._exchange(exchange, offer, stream)
        self.offered = joined(offer.hashes) if delivered else ""
        if not delivered and len(offer.aborted) == MAX_EXCHANGES:
            raise SyncError(
                f"offer version {version}",
                f"{MAX_EXCHANGES} exchanges were aborted, the last one because {offer.aborted[-1]}",
                "look at the logs of the explorers; sync.method checkpoint needs no exchange",
            )
        return delivered

    def _exchange(self, exchange: Exchange, offer: _Offer, stream: _BucketStream) -> bool:
        """Sends the weights to the members of an exchange. Returns whether all of them have the whole version."""
        assert self._store is not None
        group, hashes = None, dict[str, str]()
        try:
            group = self._group = ExchangeGroup(exchange, 0, self._store, self._synchronizer, stream.device)
            self._warn(group.by_host)
            group.broadcast_object(stream.tensors)
            while stream.bucket is not None:
                hashes |= _send_bucket(group, offer.version, stream.bucket)
                stream.advance()
            group.broadcast_object(None)
            problems = group.problems()
        except (ExchangeAborted, RuntimeError) as error:
            problems = (group.rejections() if group is not None else {}) or {"the exchange": str(error)}
            self._close_group()
        except BaseException:  # reading the weights failed: the members must not wait
            self._close_group()
            raise
        if group is not None and group.delivered():
            offer.is_held, offer.hashes = True, hashes
        if not problems:
            offer.aborted.clear()
        else:
            offer.aborted.append(_listed(problems))
            _log.warning("version %d, exchange %d: %s", offer.version, exchange.number, offer.aborted[-1])
        return not problems

    def collect(self, version: int) -> Weights:
        """The weights as they arrive. Reading them takes part in the exchange, and in the next if it is aborted."""
        exchange = self._enter(version)
        with self._aborts(exchange, version):
            group = self._join(exchange)
            tensors: list[Any] | None = group.receive_object()
        arriving = self._arriving(exchange, group, version)
        if tensors is None:
            return arriving
        return Described(tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors), arriving)

    def _arriving(self, exchange: Exchange, group: ExchangeGroup, version: int) -> Iterator[Named]:
        """Yields the tensors, a bucket at a time. After an aborted exchange, the engine that reads them has a part of
        them: it gets the others from the next exchange, in which all are sent again."""
        num_read = 0
        while True:
            try:
                with self._aborts(exchange, version):
                    position = 0
                    while (header := group.receive_object()) is not None:
                        named = _received(group, version, header)
                        begin, position = position, position + len(named)
                        del named[: max(0, num_read - begin)]  # read in the aborted exchange
                        num_read = max(num_read, position)
                        yield from drained(named)
                        del named  # frees its memory before the next bucket is received
                    group.acknowledge()
                    return
            except VersionGone as gone:
                if not num_read:
                    raise
                _log.warning("version %d, after %d tensor(s): %s", version, num_read, gone.found)
                exchange, group = self._enter_again(version, num_read)

    def _enter_again(self, version: int, num_read: int) -> tuple[Exchange, ExchangeGroup]:
        """The next exchange of a version of which this explorer has read tensors. Raises VersionGone if the trainer
        offers another version."""
        while asyncio.run(self._synchronizer.next_version(self._role, None, newest=True)) == version:
            with suppress(VersionGone):
                exchange = self._enter(version)
                with self._aborts(exchange, version):
                    group = self._join(exchange)
                    group.receive_object()  # the specs of the tensors, which `collect` has read
                    return exchange, group
        self._close_group()
        raise VersionGone(
            f"the rest of version {version}, after {num_read} tensor(s)",
            "the trainer no longer sends this version",
            "adopt the version that it offers",
        )

    def _join(self, exchange: Exchange) -> ExchangeGroup:
        rank, store = exchange.members.index(self._role) + 1, join_store(exchange.address)
        self._group = ExchangeGroup(exchange, rank, store, self._synchronizer, _own_device())
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


@dataclass
class _Offer:
    """The exchanges of a version."""

    version: int
    aborted: list[str] = field(default_factory=list[str])
    """Why each exchange since the last one without problems was aborted."""
    is_held: bool = False
    """Whether an explorer has the whole version, perhaps from an exchange that was aborted for others."""
    hashes: dict[str, str] = field(default_factory=dict[str, str])
    """The hashes of its tensors, once an explorer has all of them."""


class _BucketStream:
    """The offered weights, a bucket at a time."""

    def __init__(self, weights: Weights) -> None:
        self.tensors: Sequence[TensorSpec] | None = getattr(weights, "tensors", None)
        """The specs of the tensors; None if they are not known in advance."""
        self._buckets = _buckets(weights)
        self.bucket = next(self._buckets, None)
        self.device = self.bucket.flat.device if self.bucket is not None else torch.device("cpu")

    def advance(self) -> None:
        """Drops the current bucket and fills the next one."""
        self.bucket = None  # before the memory of the next one is allocated
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


def _send_bucket(group: ExchangeGroup, version: int, bucket: _Bucket) -> dict[str, str]:
    """Sends a bucket. Returns the hash of each tensor."""
    group.broadcast_object({"version": version, "bytes": bucket.flat.nbytes, "tensors": bucket.entries})
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
        group.acknowledge(error.found)
        group.close()  # the trainer, which sends the next bucket, must not wait
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
