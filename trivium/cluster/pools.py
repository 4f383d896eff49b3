"""Pools of places for processes, reserved on the machines of a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from trivium.foundation.errors import ConfigError, TriviumError

_EXACT = 4
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class Placement:
    """The place of one process of a pool."""

    group: PlacementGroup
    """The placement group of its machine."""
    bundle: int
    """The index of the bundle in the group."""
    local_size: int
    """The number of processes of the pool on this machine."""
    address: str
    """The address of the machine."""


@dataclass
class ResourcePool:
    """Places for processes, with a number of places for each machine.

    Each place reserves `cpus` CPUs and `gpus` GPUs. Up to `max_colocate_count` worker groups may run in a pool. Each
    has one process per place and gets an equal part of its resources.
    """

    process_on_nodes: Sequence[int]
    """The number of processes on each machine."""
    name: str = "pool"
    cpus: float = 1.0
    gpus: float = 0.0
    max_colocate_count: int = 1
    deadline_s: float = 120.0
    """How long to wait for resources that others have reserved."""
    placements: tuple[Placement, ...] = field(default=(), init=False)
    """The placements by rank, once the pool is placed. Machines are in the order of their addresses, so that a rank
    runs on the same machine after a restart."""
    _groups: list[PlacementGroup] = field(default_factory=list[PlacementGroup], init=False)
    _guests: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        counts = list(self.process_on_nodes)
        if not counts or min(counts) < 1 or self.cpus + self.gpus <= 0 or min(self.cpus, self.gpus) < 0:
            raise ConfigError(
                f"the pool {self.name!r} with {counts} processes, {self.cpus:g} CPUs and {self.gpus:g} GPUs each",
                "a pool needs at least one process on each machine, and CPUs or GPUs for each",
                "give the number of processes of each machine, as in [8, 8], and the CPUs or GPUs of each",
            )

    @property
    def world_size(self) -> int:
        """The number of processes on all machines."""
        return sum(self.process_on_nodes)

    def reserve(self) -> None:
        """Reserves the places once. Raises a TriviumError that names the missing resources."""
        reserve_all([self])

    def admit(self) -> tuple[float, float]:
        """Adds a worker group. Returns the (CPUs, GPUs) that each of its processes may use."""
        if self._guests >= self.max_colocate_count:
            raise ConfigError(
                f"one more worker group in the pool {self.name!r}",
                f"it has {self._guests}, its maximum",
                "raise max_colocate_count",
            )
        self.reserve()
        self._guests += 1
        return round(self.cpus / self.max_colocate_count, _EXACT), round(self.gpus / self.max_colocate_count, _EXACT)

    def leave(self) -> None:
        """Removes a worker group."""
        self._guests -= 1

    def release(self) -> None:
        """Releases all places. Ray ends the processes that still run there."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups, self.placements, self._guests = [], (), 0


def reserve_all(pools: Sequence[ResourcePool]) -> None:
    """Reserves the places of all pools, or of none.

    Raises TriviumError at once if the cluster is too small for all of them, or at the deadline if other reservations
    still hold the resources.
    """
    pools = [pool for pool in pools if not pool.placements]
    _refuse_too_small(pools)
    started = time.monotonic()
    try:
        for pool in pools:
            bundle = {kind: amount for kind, amount in (("CPU", pool.cpus), ("GPU", pool.gpus)) if amount}
            pool._groups = [
                placement_group([bundle] * count, strategy="STRICT_PACK") for count in pool.process_on_nodes
            ]
        for pool in pools:
            for group in pool._groups:
                if not group.wait(max(started + pool.deadline_s - time.monotonic(), 0.0)):
                    raise _still_waiting(pool)
    except BaseException:
        for pool in pools:
            pool.release()
        raise
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for pool in pools:
        pool.placements = _placements([(_address(group, addresses), group) for group in pool._groups])


def _placements(placed: Sequence[tuple[str, PlacementGroup]]) -> tuple[Placement, ...]:
    """Assigns ranks to the bundles of (address, placement group) pairs."""
    return tuple(
        Placement(group, bundle, group.bundle_count, address)
        for address, group in sorted(placed, key=lambda pair: (pair[0], -pair[1].bundle_count))
        for bundle in range(group.bundle_count)
    )


def _address(group: PlacementGroup, addresses: Mapping[str, str]) -> str:
    table: Any = placement_group_table(group)
    return addresses[next(iter(table["bundles_to_node_id"].values()))]


def _refuse_too_small(pools: Sequence[ResourcePool]) -> None:
    """Raises if the cluster, even when idle, lacks the resources of the pools."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for kind in ("CPU", "GPU"):
        have, largest = sum(node.get(kind, 0.0) for node in nodes), max(node.get(kind, 0.0) for node in nodes)
        reserved = 0.0
        for pool in pools:
            per_process = pool.cpus if kind == "CPU" else pool.gpus
            on_one, wanted = per_process * max(pool.process_on_nodes), per_process * pool.world_size
            if wanted and round(reserved + wanted - have, _EXACT) > 0:
                others = f", of which other pools take {reserved:g}" if reserved else ""
                raise _missing(pool, kind, reserved + wanted - have, f"the cluster has {have:g}{others}")
            if wanted and round(on_one - largest, _EXACT) > 0:
                raise _missing(pool, kind, on_one - largest, f"no machine has more than {largest:g}")
            reserved += wanted


def _still_waiting(pool: ResourcePool) -> TriviumError:
    free = ray.available_resources()
    wanted = {"CPU": pool.cpus * pool.world_size, "GPU": pool.gpus * pool.world_size}
    kind = max(wanted, key=lambda kind: wanted[kind] - free.get(kind, 0.0))
    missing = wanted[kind] - free.get(kind, 0.0)
    reason = f"{free.get(kind, 0.0):g} are free after {pool.deadline_s:.0f} s, the rest is in use"
    if missing <= 0:
        kind, missing = ("GPU" if pool.gpus else "CPU"), 0.0
        reason = f"enough are free after {pool.deadline_s:.0f} s"
    return _missing(pool, kind, missing, reason)


def _missing(pool: ResourcePool, kind: str, number: float, reason: str) -> TriviumError:
    resources = " and ".join(_count(amount, of) for amount, of in ((pool.gpus, "GPU"), (pool.cpus, "CPU")) if amount)
    return ConfigError(
        f"the pool {pool.name!r}: {list(pool.process_on_nodes)} processes with {resources} each",
        f"{_count(number, kind)} missing: {reason}",
        "ask for fewer processes, wait for machines, or add some (`ray status` shows their use)",
    )


def _count(number: float, kind: str) -> str:
    return f"{number:g} {kind}" if number == 1 else f"{number:g} {kind}s"
